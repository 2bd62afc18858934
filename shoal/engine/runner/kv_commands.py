"""What each rank does for the tiers below the device, on its own shard: a part of ModelRunner, commanded by
transfers.py.

Copies out and copies in have a stream each, which waits for steps in flight where these may use the same
blocks. Files are read and written by the tiers' threads. What has ended is told when rank 0 polls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from shoal.config import ResolvedConfig
from shoal.errors import ConfigError
from shoal.kv.block_file import BlockMeta, BlockSpec
from shoal.kv.copy import gather_blocks, scatter_blocks
from shoal.kv.disk import DiskTier
from shoal.kv.store import StoreTier
from shoal.layers.parallel import TensorParallel
from shoal.memory.slab import CHUNK_BYTES, HostSlab

MEASURED_TOKENS = 512  # of the prefill that tells the speed to begin with
MEASURED_BLOCKS = 32
ABANDON_S = 30.0


Tier = DiskTier | StoreTier


class KvCommands:
    if TYPE_CHECKING:

        def cache_shape(self, num_blocks: int) -> tuple[int, ...]: ...
        @property
        def block_bytes(self) -> int: ...
        def reset_state(self) -> None: ...
        def _rehearse(self, num_seqs: int, query_len: int, fresh: bool) -> torch.Tensor: ...

    config: ResolvedConfig
    tp: TensorParallel
    device: torch.device
    dtype: torch.dtype
    kv: torch.Tensor
    max_num_tokens: int
    max_model_len: int

    slab: HostSlab | None = None

    def kv_open(self, num_slots: int) -> None:
        """The slab. Raises ConfigError."""
        on_gpu, config = self.device.type == "cuda", self.config
        try:
            self.slab = HostSlab(num_slots, self.block_bytes, self.device)
        except (MemoryError, OSError) as error:
            given = config.kv_host_bytes
            what = (
                f"kv_host_bytes {given}"
                if given
                else "the host memory on the way to kv_disk_path or kv_store"
            )
            raise ConfigError(
                f"{what} can't be had, {num_slots * self.block_bytes} bytes a rank: {error}; lower or drop it"
            ) from None
        self.kv_tiers: dict[str, Tier] = {}
        self.kv_out = torch.cuda.Stream(self.device) if on_gpu else None
        self.kv_in = torch.cuda.Stream(self.device) if on_gpu else None
        # ticket, blocks, events at the start and the end
        self.kv_copies: deque[tuple[int, int, Any, Any]] = deque()
        self.kv_files: list[tuple[int, float, list[Future[bool]]]] = []
        self.kv_done: list[tuple[int, list[bool], float]] = []

    def kv_open_tiers(self, fingerprint: bytes, record_events: bool) -> None:
        """Disk and store, for the blocks of these weights. Raises ConfigError."""
        self.kv_close_tiers()
        config = self.config
        spec = BlockSpec(
            str(list(self.cache_shape(1)[1:])),
            config.dtype,
            self.block_bytes,
            config.block_size,
            self.tp.rank,
            self.tp.size,
        )
        if config.kv_disk_path is not None:
            share = config.kv_disk_bytes // self.tp.size
            self.kv_tiers["disk"] = DiskTier(
                config.kv_disk_path,
                share,
                fingerprint,
                spec,
                config.kv_eviction_policy,
                record_events=record_events,
            )
        if config.kv_store is not None:
            self.kv_tiers["store"] = StoreTier(config.kv_store, fingerprint, spec)

    def kv_close_tiers(self) -> None:
        for tier in self.kv_tiers.values():
            tier.close()
        self.kv_tiers.clear()

    @torch.inference_mode()
    def kv_measure(self) -> tuple[float, float]:
        """Seconds to compute a token of a prompt, and to copy a block in; before the first request."""
        num_tokens = max(
            1,
            min(
                MEASURED_TOKENS if self.device.type == "cuda" else MEASURED_TOKENS // 8,
                self.max_num_tokens,
                self.max_model_len // 2,
            ),
        )
        for _ in range(2):
            start = time.perf_counter()
            self._rehearse(1, num_tokens, True)
            self._settle()
            token_s = (time.perf_counter() - start) / num_tokens
        self.reset_state()
        assert self.slab is not None
        count = max(
            1, min(MEASURED_BLOCKS, CHUNK_BYTES // self.block_bytes, len(self.slab.rows), len(self.kv))
        )
        seconds = {1: float("inf"), count: float("inf")}
        for num_blocks in (count, 1, count, 1, count):  # the first launch loads what it needs
            start, blocks = time.perf_counter(), list(range(num_blocks))
            scatter_blocks(self.slab.rows, blocks, self.kv, blocks)
            self._settle()
            seconds[num_blocks] = min(seconds[num_blocks], time.perf_counter() - start)
        most = seconds[count] / count  # with what any copy takes, however short
        return token_s, max(most / 2, (seconds[count] - seconds[1]) / (count - 1)) if count > 1 else most

    # Transfers: engine/offload/transfers.py says what each is

    @torch.inference_mode()
    def kv_copy_out(self, ticket: int, blocks: Sequence[int], slots: Sequence[int], wait: bool) -> None:
        assert self.slab is not None
        self._copy(ticket, self.kv_out, wait, gather_blocks, self.kv, blocks, self.slab.rows, slots)

    @torch.inference_mode()
    def kv_copy_in(
        self, ticket: int, slots: Sequence[int], blocks: Sequence[int], wait: bool, behind: int
    ) -> None:
        assert self.slab is not None
        if self.kv_in is not None:
            self._order_behind(behind, self.kv_in)
        self._copy(ticket, self.kv_in, wait, scatter_blocks, self.slab.rows, slots, self.kv, blocks)

    def _copy(
        self,
        ticket: int,
        stream: torch.cuda.Stream | None,
        wait: bool,
        copy: Callable[..., Any],
        src: torch.Tensor,
        src_ids: Sequence[int],
        dst: torch.Tensor,
        dst_ids: Sequence[int],
    ) -> None:
        if stream is None:
            start = time.perf_counter()
            copy(src, src_ids, dst, dst_ids)
            self.kv_done.append((ticket, [True] * len(src_ids), time.perf_counter() - start))
            return
        if wait:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        copy(src, src_ids, dst, dst_ids, stream)
        end.record(stream)
        self.kv_copies.append((ticket, len(src_ids), begin, end))

    def kv_order_behind(self, ticket: int) -> None:
        if self.kv_in is not None:
            self._order_behind(ticket, torch.cuda.current_stream(self.device), self.kv_in)

    def _order_behind(self, ticket: int, *streams: torch.cuda.Stream) -> None:
        for other, _, _, end in self.kv_copies:
            if other == ticket:
                for stream in streams:
                    stream.wait_event(end)

    def kv_write(self, ticket: int, tier: str, metas: Sequence[Any], slots: Sequence[int]) -> None:
        into = self.kv_tiers[tier]
        self._files(
            ticket,
            [
                into.write(BlockMeta.from_plain(meta), self._bytes_of(slot))
                for meta, slot in zip(metas, slots)
            ],
        )

    def kv_read(self, ticket: int, tier: str, metas: Sequence[Any], slots: Sequence[int]) -> None:
        source = self.kv_tiers[tier]
        self._files(
            ticket,
            [
                source.read(BlockMeta.from_plain(meta), self._bytes_of(slot))
                for meta, slot in zip(metas, slots)
            ],
        )

    def _files(self, ticket: int, futures: list[Future[bool]]) -> None:
        self.kv_files.append((ticket, time.perf_counter(), futures))

    def _bytes_of(self, slot: int) -> memoryview:
        assert self.slab is not None
        return self.slab.rows[slot].numpy().data

    def kv_forget(self, tier: str, keys: Sequence[bytes] | None) -> None:
        found = self.kv_tiers.get(tier)  # None: closed since
        if found is not None and keys is not None:
            found.forget(keys)
        elif isinstance(found, DiskTier):
            found.forget()

    def kv_poll(self) -> dict[str, Any]:
        """{"ready": ranges of slots, "done": (ticket, whether each block is intact, seconds)}, since the last
        call."""
        assert self.slab is not None
        copies, files = self.kv_copies, self.kv_files
        done, self.kv_done = self.kv_done, []
        for _ in range(len(copies)):
            ticket, num_blocks, begin, end = copy = copies.popleft()
            if end.query():
                done.append((ticket, [True] * num_blocks, begin.elapsed_time(end) / 1e3))
            else:
                copies.append(copy)
        for entry in [entry for entry in files if all(future.done() for future in entry[2])]:
            ticket, begun, futures = entry
            files.remove(entry)
            done.append((ticket, [future.result() for future in futures], time.perf_counter() - begun))
        return {"ready": self.slab.take_ready(), "done": done}

    def kv_abandon(self) -> None:
        """Waits for what is under way and tells nobody. Raises TimeoutError: a slot may still be written."""
        self._settle()
        for _, _, futures in self.kv_files:
            for future in futures:
                future.result(ABANDON_S)
        self.kv_copies.clear()
        self.kv_files.clear()
        self.kv_done.clear()

    def kv_close(self) -> None:
        if self.slab is not None:
            self._settle()
            self.kv_close_tiers()
            self.slab.close()
            self.slab = None

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
