"""`StepGraphs`: CUDA graphs of decode steps, at a ladder of batch sizes, and of small mixed steps, at a
ladder of token counts. A captured step's content is in steps.py; runner.py has them captured at the start.

Before any step is captured, each runs once with one layer of each kind. So kernels are compiled and loaded,
and workspaces grow, outside of a capture. Graphs are captured from large to small in one memory pool, so that
the smaller ones live in the memory of the largest, their outputs included.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from shoal.engine.runner.batch import MixedShape
from shoal.layers.matrix import MatrixLayer
from shoal.models.decoder import Decoder

FEW_DECODES, FEW_PREFILLS = 16, 8  # the places of a shape for few sequences
MANY = 256  # sequences of a shape for many, at most; a larger batch has shapes of its own
# Beyond MANY rows decode steps have sizes every 64 rows up to here, and then every 128.
FINE_ROWS = 384
FINE_SHARING = (
    128  # rows up to which a decode step that shares prefixes has as many sizes as one that does not
)
# From as many tokens on there are shapes for few sequences; smaller steps lose nothing by more.
FEW_FROM = 128
TOKENS_PER_PREFILL = 16  # A shape for many sequences has a place for a prompt for as many of its tokens.
# A mixed step is captured while launching a layer from Python (measured 500 µs, plus 50 %) takes longer than
# computing it at 600 TFLOP/s.
LAUNCH_S, FLOPS = 750e-6, 6e14

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class StepGraph:
    graph: torch.cuda.CUDAGraph
    # What the captured launch returned. Every replay of a graph of the pool overwrites it, because the memory
    # is not kept for it: logits of a thousand rows take hundreds of megabytes, in each of dozens of graphs.
    outputs: tuple[torch.Tensor, ...]

    def replay(self) -> None:
        self.graph.replay()


class StepGraphs(Generic[Key]):
    """`launch(key)` launches a step on the current stream. `keys` are in descending order. Inside
    `rehearsal()` a step runs one layer of each kind."""

    def __init__(
        self,
        launch: Callable[[Key], tuple[torch.Tensor, ...]],
        keys: Sequence[Key],
        rehearsal: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.launch, self.keys, self.rehearsal = launch, keys, rehearsal
        self.graphs: dict[Key, StepGraph] = {}

    def capture(self, pool: Any) -> None:
        """Captures a graph for each key. `pool`: the id of the memory pool that they live in."""
        self.rehearse()
        self.graphs = {key: self._capture_one(key, pool) for key in self.keys}

    def measure(self) -> int:
        """The bytes that all graphs will take. The two largest are captured on trial: the second shows what
        each further one adds."""
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
        """Runs the steps of the `most` largest keys, or of all."""
        with self.rehearsal():
            for key in self.keys[:most]:
                self.launch(key)
        torch.cuda.synchronize()

    def _capture_one(self, key: Key, pool: Any) -> StepGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs = self.launch(key)
        return StepGraph(graph, tuple(map(_unowned, outputs)))


class _Memory:
    """The memory of a tensor on a GPU, without a hold on it, in the words that PyTorch takes from others."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": f"<i{tensor.itemsize}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
        }


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same tensor without ownership, so that its memory can be reused."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


class DecodeGraphs(StepGraphs[tuple[int, bool]]):
    """Keys are (rows, sharing), the output is logits, [rows, V]. Sizes from `share_from` on are captured
    twice, without and with `sharing`, because looking for shared prefixes that are not there costs 2 % of a
    step. Beyond FINE_SHARING rows every other size is captured with `sharing`, counted down from MANY and
    from the largest, because a batch that shares prefixes gains more by that than it loses by padding, and
    each graph lengthens the start."""

    def __init__(
        self,
        decode: Callable[[tuple[int, bool]], tuple[torch.Tensor, ...]],
        sizes: list[int],
        share_from: int | None,
        rehearsal: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.sizes = sorted(sizes)
        self.sharing_sizes: list[int] = []
        if share_from is not None:
            sizes = [size for size in self.sizes if size >= share_from]
            fine = [size for size in sizes if size <= FINE_SHARING]
            coarse = [size for size in sizes if FINE_SHARING < size <= MANY]
            large = [size for size in sizes if size > MANY]
            self.sharing_sizes = fine + coarse[::-2][::-1] + large[::-2][::-1]
        keys = [(size, False) for size in self.sizes] + [(size, True) for size in self.sharing_sizes]
        super().__init__(decode, sorted(keys, reverse=True), rehearsal)

    def fitting(self, size: int, sharing: bool) -> tuple[int, StepGraph] | None:
        """Returns the fewest captured rows that are at least `size`, and their graph. None: no captured step
        is large enough."""
        sizes = self.sharing_sizes if sharing else self.sizes
        i = bisect.bisect_left(sizes, size)
        return (sizes[i], self.graphs[sizes[i], sharing]) if i < len(sizes) else None

    def padded(self, size: int) -> int:
        """Returns the largest number of rows of a step of `size` decodes, padding included."""
        found = size
        for sizes in (self.sizes, self.sharing_sizes):
            i = bisect.bisect_left(sizes, size)
            if i < len(sizes):
                found = max(found, sizes[i])
        return found


def decode_sizes(wanted: list[int] | None, max_num_seqs: int) -> list[int]:
    """The ladder of decode steps, small to large: `wanted`, or 1, 2, 4, 8, every 16 up to MANY, every
    64 up to FINE_ROWS and every 128 beyond. cuBLAS, which multiplies more rows than MANY, is as quick with
    the larger of these sizes as with most of those between them, and each graph lengthens the start.
    max_num_seqs itself is on the ladder, so that no batch falls off its end."""
    large = [*range(MANY + 64, FINE_ROWS, 64), *range(FINE_ROWS, max_num_seqs, 128)]
    sizes = wanted or [1, 2, 4, 8, *range(16, MANY + 1, 16), *large, max_num_seqs]
    return sorted({min(size, max_num_seqs) for size in sizes})


def most_captured_tokens(model: Decoder) -> int:
    """The most tokens of a mixed step that is worth a graph. For more, the GPU takes longer than Python does
    to launch the step."""
    active = 0  # weights that a token meets
    for kind, layer in zip(model.config.layers, model.layers):
        for name, matrix in layer.named_modules():
            # By their sizes, as matrices of fewer bits have no memory yet.
            if isinstance(matrix, MatrixLayer):
                size = sum(matrix.parts) * matrix.num_columns
                if kind.experts is not None and ".experts." in name:
                    size = size * kind.experts.num_experts_per_tok // kind.experts.num_experts
                active += size
    return int(LAUNCH_S * len(model.layers) * FLOPS / (2 * active))


def mixed_shapes(max_tokens: int, max_num_seqs: int, share_from: int | None) -> list[MixedShape]:
    """The ladder of mixed steps up to `max_tokens`, small to large. From 256 tokens on, rungs are at most a
    quarter apart, which costs 10 % of padding in the mean. Below, products take the time of reading their
    weights, whatever the padding. From FEW_FROM on each rung exists twice: for few sequences, whose decodes
    are split finely, and for many, whose decodes may share prefixes. Where more than MANY sequences may run,
    every other rung beyond MANY tokens has a third shape, for all of them."""
    rungs = [32, 64, 128, 192, 256]
    rungs += [octave * quarters // 4 for octave in (256, 512, 1024, 2048) for quarters in (5, 6, 7, 8)]
    shapes = set()

    def add(tokens: int, decodes: int, prefills: int, most_seqs: int, may_share: bool) -> None:
        decodes, prefills = min(decodes, most_seqs), min(prefills, most_seqs)
        samples = min(decodes + prefills, most_seqs)
        sharing = may_share and share_from is not None and decodes >= share_from
        shapes.add(MixedShape(tokens, decodes, prefills, samples, sharing))

    for i, tokens in enumerate(rungs):
        if tokens > max_tokens:
            break
        prefills = max(FEW_PREFILLS, tokens // TOKENS_PER_PREFILL)
        add(tokens, tokens, prefills, min(MANY, max_num_seqs), may_share=True)
        if tokens >= FEW_FROM:
            add(tokens, FEW_DECODES, FEW_PREFILLS, max_num_seqs, may_share=False)
        if tokens > MANY and i % 2 == 0:
            add(tokens, tokens, prefills, max_num_seqs, may_share=True)
    return sorted(shapes)
