"""CUDA graphs of decode steps, at a ladder of batch sizes, and of small mixed steps, at a ladder of token
counts.

Each runs before any is captured (kernels compile, workspaces grow), one layer of each kind, which is all
there is to load. Graphs are captured from large to small, all in one memory pool, so that the smaller ones
live in the largest one's memory. A decode step takes everything from the batch state; a mixed step its tokens
from one static buffer; both write the sampled tokens back into the state.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from shoal.engine.runner.batch import MixedShape

FEW_DECODES, FEW_PREFILLS = 16, 8  # of a step with room for few sequences
FEW_FROM = 128  # tokens: smaller steps lose nothing by room for many
TOKENS_PER_PREFILL = 16  # room for many: that many prompts, for attention's grid to stay in bounds

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class StepGraph:
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor  # of the captured launch, overwritten by each replay of any graph of the pool

    def replay(self) -> None:
        self.graph.replay()


class StepGraphs(Generic[Key]):
    """`launch(key)` launches a step on the current stream; `keys` come from large to small; `rehearsal` makes
    steps short."""

    def __init__(
        self,
        launch: Callable[[Key], torch.Tensor],
        keys: Sequence[Key],
        rehearsal: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.launch, self.keys, self.rehearsal = launch, keys, rehearsal
        self.graphs: dict[Key, StepGraph] = {}

    def capture(self, pool: Any) -> None:
        """`pool`: the id of the memory pool that the graphs live in."""
        self.rehearse()
        self.graphs = {key: self._capture_one(key, pool) for key in self.keys}

    def measure(self) -> int:
        """Bytes all graphs will take: the two largest are captured on trial; the second shows what each
        further one adds."""
        if not self.keys:
            return 0
        pool = torch.cuda.graph_pool_handle()
        self.rehearse(2)
        torch.cuda.empty_cache()
        free = [torch.cuda.mem_get_info()[0]]
        trials = []
        for key in self.keys[:2]:
            trials.append(self._capture_one(key, pool))
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
        del trials
        return max(0, free[0] - free[1]) + max(0, free[1] - free[-1]) * (len(self.keys) - 1)

    def rehearse(self, most: int | None = None) -> None:
        with self.rehearsal():
            for key in self.keys[:most]:
                self.launch(key)
        torch.cuda.synchronize()

    def _capture_one(self, key: Key, pool: Any) -> StepGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self.launch(key)
        return StepGraph(graph, output)


class DecodeGraphs(StepGraphs[tuple[int, bool]]):
    """Keys are (rows, sharing), outputs logits [rows, V]. Sizes from `share_from` on are captured with
    `sharing` too, as looking for shared prefixes that are not there costs 2 % of a step."""

    def __init__(
        self,
        decode: Callable[[tuple[int, bool]], torch.Tensor],
        sizes: list[int],
        share_from: int | None,
        rehearsal: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.sizes = sorted(sizes)
        keys = [
            (size, sharing)
            for size in reversed(self.sizes)
            for sharing in (True, False)
            if not sharing or (share_from is not None and size >= share_from)
        ]
        super().__init__(decode, keys, rehearsal)

    def fitting(self, size: int, sharing: bool) -> tuple[int, StepGraph] | None:
        """The fewest captured rows, at least `size`, and their graph."""
        i = bisect.bisect_left(self.sizes, size)
        return (self.sizes[i], self.graphs[self.sizes[i], sharing]) if i < len(self.sizes) else None

    def padded(self, size: int) -> int:
        """How many rows a step of `size` decodes runs."""
        i = bisect.bisect_left(self.sizes, size)
        return self.sizes[i] if i < len(self.sizes) else size


def mixed_shapes(max_tokens: int, max_num_seqs: int, share_from: int | None) -> list[MixedShape]:
    """The ladder of mixed steps up to `max_tokens`, small to large. From 256 tokens on rungs are at most a
    quarter apart, which costs 10 % of padding in the mean; below, products take the time of their weights.
    From FEW_FROM on each comes twice: for few sequences, whose decodes are split finely, and for many, whose
    decodes may share prefixes."""
    rungs = [
        32,
        64,
        128,
        192,
        256,
        *(octave * quarters // 4 for octave in (256, 512, 1024, 2048) for quarters in (5, 6, 7, 8)),
    ]
    shapes = set()
    for tokens in rungs:
        if tokens > max_tokens:
            break
        many = min(tokens, max_num_seqs), min(max(FEW_PREFILLS, tokens // TOKENS_PER_PREFILL), max_num_seqs)
        few = min(FEW_DECODES, max_num_seqs), min(FEW_PREFILLS, max_num_seqs)
        sharing = share_from is not None and many[0] >= share_from
        for (decodes, prefills), shares in (
            ((many, sharing), (few, False)) if tokens >= FEW_FROM else ((many, sharing),)
        ):
            shapes.add(MixedShape(tokens, decodes, prefills, min(decodes + prefills, max_num_seqs), shares))
    return sorted(shapes)
