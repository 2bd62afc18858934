"""Tells when each layer of a step has ended, so that its keys and values can leave the device while later
layers are computed."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Called for each layer of a step, in order, while the step is being launched or right after it. The event
# passes when the device has come to the end of the layer; on the CPU there is none, as the layer has ended.
LayerListener = Callable[[int, torch.cuda.Event | None], None]

# Whether graphs of mixed steps record an event for each layer. If they don't, a step runs eagerly when
# somebody listens to it. benchmarks/layer_events.py measures what either costs.
IN_GRAPHS = False


class LayerEnds:
    """Who listens to the next step, and the event of each layer. A later step records the same events again,
    so a listener queues its waits for them when it is told."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.in_graphs = IN_GRAPHS and device.type == "cuda"
        self._events: list[torch.cuda.Event | None] = [None] * num_layers
        if device.type == "cuda":
            # Each replay of a graph records the external events that were captured with it. Other events only
            # order streams inside of a capture.
            self._events = [torch.cuda.Event(external=self.in_graphs) for _ in range(num_layers)]
        self._coming: list[LayerListener] = []
        self._listeners: list[LayerListener] = []

    def listen(self, listener: LayerListener) -> None:
        """Has a listener be told of the next step's layers, and of no other step's."""
        self._coming.append(listener)

    def begin_step(self) -> bool:
        """Whether somebody listens to the step that begins."""
        if not self._coming:
            return False
        self._listeners, self._coming = self._coming, []
        return True

    def end_layer(self, layer: int) -> None:
        """A layer has been launched eagerly."""
        self.record(layer)
        self._tell(layer)

    def record(self, layer: int) -> None:
        """Records the event of a layer on the current stream. A graph captures this."""
        event = self._events[layer]
        if event is not None:
            event.record()

    def replayed(self) -> None:
        """A graph that records the events has been launched."""
        for layer in range(len(self._events)):
            self._tell(layer)

    def _tell(self, layer: int) -> None:
        for listener in self._listeners:
            listener(layer, self._events[layer])
