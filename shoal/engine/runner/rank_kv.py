"""`RankKv`: one rank's copies of KV blocks between its device and its host slab, and its I/O to the tiers
below. engine/offload/transfers.py commands it; engine/offload/offloader.py decides which blocks move.

Copies out and copies in have a stream each, which waits for steps in flight where these may use the same
blocks. Threads of the tiers read and write files. Ended transfers are reported when rank 0 polls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from shoal.config import ResolvedConfig
from shoal.engine.runner.kv_cache import KvCache
from shoal.errors import ConfigError
from shoal.kv.block_map import BlockMap
from shoal.kv.copy import CopyStream
from shoal.kv.layout import opaque_spec
from shoal.kv.storage import memory_of
from shoal.kv.tiers.block_file import BlockMeta
from shoal.kv.tiers.registry import TierPlace, open_tiers
from shoal.kv.tiers.tier import Tier
from shoal.kv.view import BlockView
from shoal.memory.slab import CHUNK_BYTES, HostSlab

MEASURED_BLOCKS = 32
MEASURE_TRIES = 10  # copies that are measured at the start
ABANDON_S = 30.0


@dataclass(frozen=True, slots=True)
class _CopyInFlight:
    ticket: int
    num_blocks: int
    begin: torch.cuda.Event
    end: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class _FilesInFlight:
    ticket: int
    began: float
    intact: list[Future[bool]]  # for each block, whether it is intact
    ends: list[float]  # when blocks were done, which may be long before rank 0 asks


class RankKv:
    """Every transfer has a ticket, a number that rank 0 chose. `poll` says which have ended."""

    def __init__(
        self, config: ResolvedConfig, cache: KvCache, device: torch.device, num_host_blocks: int
    ) -> None:
        """Takes the host slab. Raises ConfigError if there is no memory for it."""
        self.config, self.plan, self.device = config, cache.plan, device
        host_spec = opaque_spec(self.plan.block_bytes, num_host_blocks)
        try:
            self.slab = HostSlab(num_host_blocks, host_spec.block_bytes, device)
        except (MemoryError, OSError) as error:
            what = "the host memory on the way to kv_disk_path or kv_store"
            if config.kv_host_bytes:
                what = f"kv_host_bytes {config.kv_host_bytes}"
            raise ConfigError(
                f"{what} can't be had, {host_spec.num_bytes} bytes a rank: {error}; lower or drop it"
            ) from None
        self.tiers: dict[str, Tier] = {}  # by name, while they are open
        inside_spec = opaque_spec(self.plan.block_bytes, self.plan.num_blocks)
        inside = BlockView.over(inside_spec, memory_of(cache.blocks))
        outside = BlockView.over(host_spec, memory_of(self.slab.rows))
        self._out, self._in = CopyStream(device), CopyStream(device)
        self._maps = {"out": BlockMap(inside, outside), "in": BlockMap(outside, inside)}
        self._copies: deque[_CopyInFlight] = deque()
        self._files: list[_FilesInFlight] = []
        self._done: list[tuple[int, list[bool], float]] = []  # ticket, whether each block is intact, seconds

    # Tiers below the host

    def open_tiers(self, fingerprint: bytes, record_events: bool) -> None:
        """Opens the tiers that the options name, for the blocks of the weights with this fingerprint. Raises
        ConfigError."""
        self.close_tiers()
        config = self.config
        self.tiers.update(open_tiers(config, TierPlace(fingerprint, self.plan.specs, record_events)))

    def close_tiers(self) -> None:
        with ExitStack() as ends:
            for tier in self.tiers.values():
                ends.callback(tier.close)
            self.tiers.clear()

    # Measuring

    @torch.inference_mode()
    def measure_block(self) -> float:
        """The seconds that the copy in of a block takes among others. To be called once, before the first
        request: afterwards the slab's memory is pinned in the background, and copies may look many times
        slower than they are."""

        def copy(num_blocks: int) -> None:
            blocks = list(range(num_blocks))
            self._in.stage(self._maps["in"], blocks, blocks).trigger_all_layers()
            self._wait_for_copies()

        pinned = CHUNK_BYTES // self.plan.block_bytes
        num_blocks = max(1, min(MEASURED_BLOCKS, pinned, len(self.slab.rows), self.plan.num_blocks))
        seconds = measure_block_s(copy, num_blocks, time.perf_counter)
        self.slab.pin_rest()
        return seconds

    # Transfers: engine/offload/transfers.py says what each is

    @torch.inference_mode()
    def copy_out(self, ticket: int, blocks: Sequence[int], host_blocks: Sequence[int], wait: bool) -> None:
        self._copy(ticket, self._out, self._maps["out"], blocks, host_blocks, wait)

    @torch.inference_mode()
    def copy_in(
        self, ticket: int, host_blocks: Sequence[int], blocks: Sequence[int], wait: bool, after: int
    ) -> None:
        if self._in.stream is not None:
            self._order_after(after, self._in.stream)
        self._copy(ticket, self._in, self._maps["in"], host_blocks, blocks, wait)

    def _copy(
        self,
        ticket: int,
        copying: CopyStream,
        block_map: BlockMap,
        src_ids: Sequence[int],
        dst_ids: Sequence[int],
        wait: bool,
    ) -> None:
        stream = copying.stream
        if stream is None:
            start = time.perf_counter()
            copying.stage(block_map, src_ids, dst_ids).trigger_all_layers()
            self._done.append((ticket, [True] * len(src_ids), time.perf_counter() - start))
            return
        if wait:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        copying.stage(block_map, src_ids, dst_ids).trigger_all_layers()
        end.record(stream)
        self._copies.append(_CopyInFlight(ticket, len(src_ids), begin, end))

    def order_after(self, ticket: int) -> None:
        if self._in.stream is not None:
            self._order_after(ticket, torch.cuda.current_stream(self.device), self._in.stream)

    def _order_after(self, ticket: int, *streams: torch.cuda.Stream) -> None:
        """Makes later work on these streams run after the copy, if it has not ended."""
        for copy in self._copies:
            if copy.ticket == ticket:
                for stream in streams:
                    stream.wait_event(copy.end)

    def write(self, ticket: int, tier: str, metas: Sequence[Any], host_blocks: Sequence[int]) -> None:
        self._begin_files(ticket, self.tiers[tier].write, metas, host_blocks)

    def read(self, ticket: int, tier: str, metas: Sequence[Any], host_blocks: Sequence[int]) -> None:
        self._begin_files(ticket, self.tiers[tier].read, metas, host_blocks)

    def _begin_files(
        self,
        ticket: int,
        move: Callable[[BlockMeta, memoryview], Future[bool]],
        metas: Sequence[Any],
        host_blocks: Sequence[int],
    ) -> None:
        began = time.perf_counter()
        futures = [
            move(BlockMeta.from_plain(meta), self.slab.rows[host_block].numpy().data)
            for meta, host_block in zip(metas, host_blocks)
        ]
        ends: list[float] = []
        for future in futures:
            future.add_done_callback(lambda _: ends.append(time.perf_counter()))
        self._files.append(_FilesInFlight(ticket, began, futures, ends))

    def forget(self, tier: str, keys: Sequence[bytes] | None) -> None:
        """Has a tier forget these blocks, or reset itself (None). A tier that is closed by now has nothing to
        forget."""
        found = self.tiers.get(tier)
        if found is None:
            return
        if keys is None:
            found.reset()
        else:
            found.forget(keys)

    def poll(self) -> dict[str, Any]:
        """Returns the changes since the last call: {"ready": ranges of host blocks that can be used from now
        on, "done": (ticket, whether each block is intact, seconds) of each transfer that has ended}."""
        done, self._done = self._done, []
        for _ in range(len(self._copies)):
            copy = self._copies.popleft()
            if copy.end.query():
                done.append((copy.ticket, [True] * copy.num_blocks, copy.begin.elapsed_time(copy.end) / 1e3))
            else:
                self._copies.append(copy)
        for files in [files for files in self._files if all(future.done() for future in files.intact)]:
            self._files.remove(files)
            intact = [future.result() for future in files.intact]
            done.append((files.ticket, intact, max([*files.ends, files.began]) - files.began))
        return {"ready": self.slab.take_ready(), "done": done}

    def abandon(self) -> None:
        """Waits for the transfers under way, and drops their results. Raises TimeoutError if it does not end;
        a host block may then still be written."""
        self._wait_for_copies()
        for files in self._files:
            for future in files.intact:
                future.result(ABANDON_S)
        self._copies.clear()
        self._files.clear()
        self._done.clear()

    def close(self) -> None:
        """Waits for copies, closes the tiers and gives the slab back, all of it even if a part of that
        fails."""
        with ExitStack() as ends:  # It runs the last entry first.
            ends.callback(self.slab.close)
            ends.callback(self.close_tiers)
            ends.callback(self._maps.clear)  # They hold the cache and the slab.
            ends.callback(self._wait_for_copies)

    def _wait_for_copies(self) -> None:
        """Waits for copies."""
        for copying in (self._out, self._in):
            copying.synchronize()


def measure_block_s(copy: Callable[[int], None], num_blocks: int, clock: Callable[[], float]) -> float:
    """Seconds that each further block of a copy takes. `copy(n)` copies n blocks and returns when they have
    arrived.

    What else the machine does makes a try longer, never shorter, so the least time of several tries counts.
    """
    copy(num_blocks)  # the first launch loads what it needs
    one_s = many_s = float("inf")
    for _ in range(MEASURE_TRIES):
        one_s = min(one_s, _seconds(copy, 1, clock))
        many_s = min(many_s, _seconds(copy, num_blocks, clock))
    whole_s = many_s / num_blocks  # with what any copy takes, however short
    if num_blocks == 1:
        return whole_s
    return max(whole_s / 2, (many_s - one_s) / (num_blocks - 1))


def _seconds(copy: Callable[[int], None], num_blocks: int, clock: Callable[[], float]) -> float:
    start = clock()
    copy(num_blocks)
    return clock() - start
