"""`RankPeers`: one rank's KV transfer with other workers: they read its cache, and it reads theirs into it.
engine/peers commands it; kv/transfer has the transports."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import replace

from shoal.errors import ConfigError
from shoal.kv.layout import opaque_spec
from shoal.kv.transfer.fetch import IDLE_S, BlockReader, Fetched
from shoal.kv.transfer.lease import Lease
from shoal.kv.transfer.registry import Exports, Transports
from shoal.kv.transfer.ticket import ExportAddress, TransferError
from shoal.kv.transfer.transport import CacheViews, Reach, TransportError
from shoal.kv.view import BlockView

logger = logging.getLogger(__name__)

# At the same time; others wait for their turn. Most of them wait for layers that are being computed.
MAX_FETCHES = 64
PATIENCE_S = 10.0  # after this time without news the sequence computes its blocks


class Ended(NamedTuple):
    """A fetch that has ended on one rank. `failure` is empty if all its blocks are there, or the kind of what
    went wrong; then they hold anything."""

    number: int
    failure: str
    message: str = ""
    transport: str = ""
    num_bytes: int = 0
    seconds: float = 0.0


class RankPeers:
    """Every fetch has a number, which rank 0 chose. `poll` says which have ended."""

    def __init__(self, views: CacheViews, device: torch.device, has_states: bool = False) -> None:
        """`views` are the rank's cache, one for each group of layers. `has_states`: some of its blocks hold
        parts of snapshots."""
        views = [*views, _parts(views[0])] if has_states else views
        self._views, self._device = views, device
        self._transports = Transports()
        self._exports: Exports | None = None
        self._peers = BlockReader(b"", self._transports, views)
        self._threads = ThreadPoolExecutor(MAX_FETCHES, "kv-fetch")
        # by the number of each fetch that `poll` has not reported
        self._cancels: dict[int, threading.Event] = {}
        self._ended: deque[Ended] = deque()
        self._lock = threading.Lock()
        self._tidying: threading.Timer | None = None  # waits to close idle connections
        self._is_closed = False

    def export_cache(self, reach: int) -> list[bytes]:
        """Opens the cache to other workers within `reach`. Returns the addresses of its exports. Raises
        ConfigError if no transport can do that."""
        try:
            self._exports = self._transports.export_cache(self._views, Reach(reach))
        except TransportError as error:
            raise ConfigError(f"kv_transfer_config: {error}") from None
        return [msgspec.msgpack.encode(address) for address in self._exports.addresses]

    def name_model(self, model: bytes) -> None:
        """The model and its weights from now on. Blocks of any other one are not read."""
        self._peers.model = model

    def fetch(self, number: int, sealed: bytes, positions: Sequence[int], blocks: Sequence[int]) -> None:
        """Begins to read the blocks at these positions of a ticket into `blocks` here, after the steps and
        copies that were launched before."""
        behind = None
        if self._device.type == "cuda":
            behind = torch.cuda.Event(blocking=True)
            behind.record(torch.cuda.current_stream(self._device))
        self._cancels[number] = cancelled = threading.Event()
        self._threads.submit(self._run, number, sealed, positions, blocks, behind, cancelled)

    def cancel(self, number: int) -> None:
        """Cancels a fetch. It ends soon, and `poll` reports it."""
        if number in self._cancels:
            self._cancels[number].set()

    def finish(self) -> None:
        """Returns when this rank's device has computed all that it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def poll(self) -> list[Ended]:
        """The fetches that have ended since the last call. Between processes they travel as tuples."""
        ended: list[Ended] = []
        while self._ended:
            one = self._ended.popleft()
            del self._cancels[one.number]
            ended.append(one)
        return ended

    def abandon(self) -> None:
        """Cancels the fetches under way, waits for their end, and drops their results."""
        for cancelled in self._cancels.values():
            cancelled.set()
        self._threads.shutdown()
        self._threads = ThreadPoolExecutor(MAX_FETCHES, "kv-fetch")
        self._cancels.clear()
        self._ended.clear()

    def close(self) -> None:
        """Cancels what is under way and waits for its end. Nobody can read the cache any more."""
        for cancelled in self._cancels.values():
            cancelled.set()
        self._threads.shutdown()
        with self._lock:
            self._is_closed = True
            if self._tidying is not None:
                self._tidying.cancel()
        self._peers.close()
        if self._exports is not None:
            self._exports.close()

    # In a thread of the pool

    def _run(
        self,
        number: int,
        sealed: bytes,
        positions: Sequence[int],
        blocks: Sequence[int],
        behind: torch.cuda.Event | None,
        cancelled: threading.Event,
    ) -> None:
        try:
            with torch.inference_mode():
                if behind is not None:
                    torch.cuda.set_device(self._device)
                    behind.synchronize()
                done = self._read(sealed, positions, blocks, cancelled)
            ended = Ended(number, "", "", done.transport, done.num_bytes, done.seconds)
        except TransferError as error:
            ended = Ended(number, error.failure.value, str(error))
        except Exception as error:  # The request is computed here, whatever it is.
            logger.exception("KV blocks of another worker could not be read")
            ended = Ended(number, "error", repr(error))
        self._ended.append(ended)
        self._tidy_later()

    def _tidy_later(self) -> None:
        """Unmaps memory of owners that died, which would stay mapped until the next fetch."""
        with self._lock:
            if self._tidying is None and not self._is_closed:
                self._tidying = threading.Timer(IDLE_S, self._tidy)
                self._tidying.daemon = True
                self._tidying.start()

    def _tidy(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._peers.tidy()
        with self._lock:
            self._tidying = None
        if self._peers.num_connected:
            self._tidy_later()

    def _read(
        self, sealed: bytes, positions: Sequence[int], blocks: Sequence[int], cancelled: threading.Event
    ) -> Fetched:
        with Lease(sealed) as lease:
            return self._peers.fetch(lease, positions, blocks, PATIENCE_S, cancelled.is_set)


def _parts(view: BlockView) -> BlockView:
    """Returns the same memory as blocks of bytes: a group in addition to the layers', of parts of snapshots.
    A part goes to the same rank of another worker, as states are divided in other ways than KV heads."""
    spec = view.spec
    parts = replace(
        opaque_spec(spec.block_bytes, spec.num_blocks),
        num_heads=spec.tp_size,
        tp_rank=spec.tp_rank,
        tp_size=spec.tp_size,
    )
    return BlockView.over(parts, view.storage)


def decode_address(address: bytes) -> ExportAddress:
    """One of `export_cache`."""
    return msgspec.msgpack.decode(address, type=ExportAddress)
