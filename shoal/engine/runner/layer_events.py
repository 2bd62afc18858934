"""`LayerEvents`: CUDA events at the end of each layer of a step, so that its keys and values can leave the
device while later layers are computed. engine/peers/lender.py listens; steps.py records the events."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Called for each layer of a step, in order, while the step is being launched or right after it. The event
# passes when the device has completed the layer; on the CPU, where the layer has completed, the event is
# None.
LayerListener = Callable[[int, torch.cuda.Event | None], None]


class LayerEvents:
    """The listeners of the next step, and an event for each layer. An eager step reports each layer by
    itself. A captured step reports all layers at its end: it is short, and events inside of it cost more than
    they save (docs/decisions/steps.md).

    Two sets of events alternate, because at most two steps are in flight."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._num_layers, self._is_cuda = num_layers, device.type == "cuda"
        self._events, self._others = self._new_events(), self._new_events()  # the others: the step before's
        self._coming: list[LayerListener] = []
        self._listeners: list[LayerListener] = []

    def _new_events(self) -> list[torch.cuda.Event | None]:
        # blocking: a host thread that waits for one sleeps
        return [torch.cuda.Event(blocking=True) if self._is_cuda else None for _ in range(self._num_layers)]

    def listen(self, listener: LayerListener) -> None:
        """Adds a listener for the layers of the next step only."""
        self._coming.append(listener)

    def begin_step(self) -> bool:
        """True if the step that begins has listeners."""
        if not self._coming:
            return False
        self._listeners, self._coming = self._coming, []
        self._events, self._others = self._others, self._events
        return True

    def end_layer(self, layer: int) -> None:
        """A layer has been launched eagerly."""
        event = self._events[layer]
        if event is not None:
            event.record()
        self._tell(layer, event)

    def end_graph(self) -> None:
        """A graph of all layers has been launched."""
        event = self._events[-1]
        if event is not None:
            event.record()
        for layer in range(self._num_layers):
            self._tell(layer, event)

    def _tell(self, layer: int, event: torch.cuda.Event | None) -> None:
        for listener in self._listeners:
            listener(layer, event)
