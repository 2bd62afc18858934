"""`RankPeers`: one rank's KV transfer with other workers: they read its cache, and it reads theirs into it.
engine/peers commands it; kv/transfer has the transports."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import torch

from shoal.config import ResolvedConfig
from shoal.engine.runner.state_rows import plan_states_of_size
from shoal.errors import ConfigError
from shoal.kv.layout import LayoutError
from shoal.kv.transfer.fetch import IDLE_S, BlockReader, Fetched
from shoal.kv.transfer.lease import Lease
from shoal.kv.transfer.registry import Exports, Transports
from shoal.kv.transfer.states import StateInbox
from shoal.kv.transfer.ticket import ExportAddress, Failure, TransferError
from shoal.kv.transfer.transport import CacheViews, Reach, TransportError
from shoal.kv.view import BlockView
from shoal.model_config import ModelConfig

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

    def __init__(
        self, config: ResolvedConfig, model: ModelConfig, layers: CacheViews, device: torch.device
    ) -> None:
        """`layers` are the rank's cache, one for each group of layers. With recurrent layers some of its
        blocks hold parts of snapshots, which are a group more."""
        self._config, self._model, self._layers, self._device = config, model, layers, device
        spec, states = layers[0].spec, plan_states_of_size(config, model, config.tensor_parallel_size)
        self._states, self._views = None, list(layers)
        if states.num_blocks:
            self._states = states.row_layout(spec.tp_size)
            parts = self._states.parts(spec.tp_rank, spec.tp_size, spec.num_blocks)
            self._views.append(BlockView.over(parts, layers[0].storage))
        self._transports = Transports()
        self._exports: Exports | None = None
        self._peers = BlockReader(b"", self._transports, self._views)
        # with recurrent layers: by the tensor-parallel size of other workers
        self._other_sizes: dict[int, tuple[BlockReader, StateInbox]] = {}
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
        for reader, _ in self._other_sizes.values():
            reader.model = model

    def fetch(self, number: int, sealed: bytes, positions: Sequence[int], blocks: Sequence[int]) -> None:
        """Begins to read the blocks at these positions of a ticket into `blocks` here, after the steps and
        copies that were launched before."""
        after = None
        if self._device.type == "cuda":
            after = torch.cuda.Event(blocking=True)
            after.record(torch.cuda.current_stream(self._device))
        self._cancels[number] = cancelled = threading.Event()
        self._threads.submit(self._run, number, sealed, positions, blocks, after, cancelled)

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
        for reader in self._readers():
            reader.close()
        if self._exports is not None:
            self._exports.close()

    # In a thread of the pool

    def _run(
        self,
        number: int,
        sealed: bytes,
        positions: Sequence[int],
        blocks: Sequence[int],
        after: torch.cuda.Event | None,
        cancelled: threading.Event,
    ) -> None:
        try:
            with torch.inference_mode():
                if after is not None:
                    torch.cuda.set_device(self._device)
                    after.synchronize()
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
        readers = self._readers()
        for reader in readers:
            reader.tidy()
        with self._lock:
            self._tidying = None
        if any(reader.num_connected for reader in readers):
            self._tidy_later()

    def _read(
        self, sealed: bytes, positions: Sequence[int], blocks: Sequence[int], cancelled: threading.Event
    ) -> Fetched:
        with Lease(sealed) as lease:
            if self._states is None or len(lease.ticket.ranks) == self._states.tp_size:
                return self._peers.fetch(lease, positions, blocks, PATIENCE_S, cancelled.is_set)
            return self._read_other_size(lease, positions, blocks, cancelled)

    def _read_other_size(
        self, lease: Lease, positions: Sequence[int], blocks: Sequence[int], cancelled: threading.Event
    ) -> Fetched:
        """A snapshot comes after the KV blocks before it. Its parts are not the owner's: their number may
        differ, and each rank here makes its own of several."""
        reader, inbox = self._of_size(len(lease.ticket.ranks))
        parts = [i for i, group in enumerate(lease.ticket.groups) if group == len(self._layers)]
        num_kv = bisect_left(positions, parts[0]) if parts else len(positions)
        done = reader.fetch(lease, positions[:num_kv], blocks[:num_kv], PATIENCE_S, cancelled.is_set)
        if num_kv == len(positions):
            return done
        room = inbox.view.spec.num_blocks
        if len(parts) != room:
            raise TransferError(
                Failure.INCOMPATIBLE,
                f"a snapshot of {lease.ticket.server} has {len(parts)} parts in place of {room}; run equal "
                "versions of Shoal",
            )
        with inbox.lock:
            states = reader.fetch(lease, parts, range(room), PATIENCE_S, cancelled.is_set)
            inbox.unpack(blocks[num_kv:])
        num_bytes, seconds = done.num_bytes + states.num_bytes, done.seconds + states.seconds
        return Fetched(states.transport, len(blocks), num_bytes, seconds)

    def _of_size(self, tp_size: int) -> tuple[BlockReader, StateInbox]:
        """Returns what reads from workers of another tensor-parallel size. Raises TransferError."""
        assert self._states is not None
        with self._lock:
            if tp_size not in self._other_sizes:
                try:
                    plan = plan_states_of_size(self._config, self._model, tp_size)
                    inbox = StateInbox(plan.row_layout(tp_size), self._states, self._layers[0])
                except LayoutError as error:
                    raise TransferError(
                        Failure.INCOMPATIBLE,
                        f"the states of a worker with tensor_parallel_size {tp_size} can't be divided "
                        f"otherwise: {error}",
                    ) from None
                reader = BlockReader(self._peers.model, self._transports, [*self._layers, inbox.view])
                self._other_sizes[tp_size] = reader, inbox
            return self._other_sizes[tp_size]

    def _readers(self) -> list[BlockReader]:
        with self._lock:
            return [self._peers, *(reader for reader, _ in self._other_sizes.values())]


def decode_address(address: bytes) -> ExportAddress:
    """One of `export_cache`."""
    return msgspec.msgpack.decode(address, type=ExportAddress)
