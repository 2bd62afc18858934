"""Tells when each layer of a step has ended, so that its keys and values can leave the device while later
layers are computed."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Called for each layer of a step, in order, while the step is being launched or right after it. The event
# passes when the device has come to the end of the layer; on the CPU there is none, as the layer has ended.
LayerListener = Callable[[int, torch.cuda.Event | None], None]


class LayerEnds:
    """Who listens to the next step, and the event of each layer. An eager step tells each layer by itself. A
    step that is a graph tells all of them at its end: it is short, and events inside of it cost more than
    they save (docs/decisions/steps.md).

    The step after the next records the same events again, and is not launched before the step has ended."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._num_layers, self._is_cuda = num_layers, device.type == "cuda"
        self._events, self._others = self._new_events(), self._new_events()  # the others: the step before's
        self._coming: list[LayerListener] = []
        self._listeners: list[LayerListener] = []

    def _new_events(self) -> list[torch.cuda.Event | None]:
        # Whoever waits for one on the host sleeps.
        return [torch.cuda.Event(blocking=True) if self._is_cuda else None for _ in range(self._num_layers)]

    def listen(self, listener: LayerListener) -> None:
        """Has a listener be told of the next step's layers, and of no other step's."""
        self._coming.append(listener)

    def begin_step(self) -> bool:
        """Whether somebody listens to the step that begins."""
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
