"""Reports computed layers to readers of offered blocks, without delaying the steps that compute them.

A step records an event after a layer and continues. A thread waits for the events, in order, and advances the
offers (kv/transfer/offers.py). With several ranks only rank 0 does this: its event comes after the layer's
last all-reduce, which every rank enters only after writing its keys and values.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Protocol

from shoal.kv.transfer.offers import Offers

logger = logging.getLogger(__name__)


class Event(Protocol):
    """The interface of torch.cuda.Event. Make it with `blocking=True`: otherwise the thread spins while
    waiting."""

    def synchronize(self) -> None: ...


class Advancer:
    """The thread that advances the offers. `put` and `close` are for one thread."""

    def __init__(self, offers: Offers) -> None:
        self._offers = offers
        self._queue: queue.SimpleQueue[tuple[Event, Sequence[tuple[bytes, int]], int] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-advance", daemon=True)
        self._thread.start()

    def put(self, event: Event | None, tickets: Sequence[tuple[bytes, int]], num_layers: int) -> None:
        """Queues an advance: after the event, each ticket's first blocks have their first `num_layers`
        layers. `tickets` are (ticket id, number of blocks) for all prompts in the step. Without an event, as
        on the CPU, the layers are there now."""
        if event is None:
            self._advance(tickets, num_layers)
        else:
            self._queue.put((event, tickets, num_layers))

    def close(self) -> None:
        """Waits for the queued events and ends the thread. Safe to call twice."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, tickets, num_layers = item
            try:
                event.synchronize()
            except RuntimeError as error:  # the device failed
                logger.error("the device failed while other workers read its KV blocks: %s", error)
                self._offers.withdraw(f"the owner's device failed: {error}")
                continue
            self._advance(tickets, num_layers)

    def _advance(self, tickets: Sequence[tuple[bytes, int]], num_layers: int) -> None:
        for ticket_id, num_blocks in tickets:
            self._offers.advance(ticket_id, num_blocks, num_layers)
