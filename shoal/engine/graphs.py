"""CUDA graphs of the decode step at a ladder of batch sizes.

Each size runs once before it is captured (kernels compile, workspaces grow), from large to small, all in one memory pool, so that the
smaller graphs live in the largest one's memory. A graph takes everything from the batch state and writes the sampled tokens back into it.
Sizes at which sequences may share prefixes are captured twice, as looking for what is not there costs 2 % of a step.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    size: int
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor    # [size, V], overwritten by each replay of any graph of the pool

    def replay(self) -> None:
        self.graph.replay()


class DecodeGraphs:
    """`decode(size, max_kv_len, sharing)` launches the step on the current stream and returns its logits. Sizes from `share_from` on are
    captured with `sharing` too."""

    def __init__(self, decode: Callable[[int, int, bool], torch.Tensor], sizes: list[int], max_kv_len: int, share_from: int | None) -> None:
        self.decode, self.sizes, self.max_kv_len = decode, sorted(sizes), max_kv_len
        self.num_sharing = 0 if share_from is None else sum(size >= share_from for size in sizes)
        self.graphs: dict[tuple[int, bool], DecodeGraph] = {}

    def capture(self, pool: Any = None) -> None:
        """`pool`: the id of the memory pool that the graphs live in; None: a new one."""
        pool = pool or torch.cuda.graph_pool_handle()
        gc.collect()
        for i, size in enumerate(reversed(self.sizes)):
            for sharing in (True, False) if i < self.num_sharing else (False,):
                self.graphs[size, sharing] = self._capture_one(size, sharing, pool)

    def measure(self) -> int:
        """Bytes all graphs will take: the two largest are captured on trial; the second shows what each further one adds."""
        pool = torch.cuda.graph_pool_handle()
        for size in self.sizes[-2:]:
            self.decode(size, self.max_kv_len, False)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free = [torch.cuda.mem_get_info()[0]]
        trials = []
        for size in self.sizes[:-3:-1]:
            trials.append(self._capture_one(size, False, pool, run_first=False))
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
        first = max(0, free[0] - free[1])
        each = max(0, free[1] - free[-1])
        del trials
        return first + each * (len(self.sizes) + self.num_sharing - 1)

    def _capture_one(self, size: int, sharing: bool, pool: Any, run_first: bool = True) -> DecodeGraph:
        if run_first:
            self.decode(size, self.max_kv_len, sharing)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self.decode(size, self.max_kv_len, sharing)
        return DecodeGraph(size, graph, logits)

    def fitting(self, size: int, sharing: bool) -> DecodeGraph | None:
        """The smallest captured graph that holds `size` rows."""
        i = bisect.bisect_left(self.sizes, size)
        return self.graphs[self.sizes[i], sharing] if i < len(self.sizes) else None

    def padded(self, size: int) -> int:
        """How many rows a step of `size` decodes runs."""
        i = bisect.bisect_left(self.sizes, size)
        return self.sizes[i] if i < len(self.sizes) else size
