"""`StepGraphs`: CUDA graphs of decode steps, at a ladder of batch sizes, and of small mixed steps, at a
ladder of token counts. A captured step's content is in steps.py; start_up.py has them captured.

Before any step is captured, each runs once with one layer of each kind, on the stream of captures. So kernels
are compiled and loaded, and workspaces grow, outside of a capture. cuBLAS keeps a workspace for each stream
until the process ends. Taken during a capture it would lie in the pool of these graphs, which sleep unmaps,
and graphs of other engines would use it. Graphs are captured from large to small in one memory pool, so that
the smaller ones live in the memory of the largest, their outputs included.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

Key = TypeVar("Key")


class DecodeKey(NamedTuple):
    """A captured decode step of `queries` tokens for each of `rows` rows."""

    rows: int
    queries: int
    sharing: bool  # whether rows may share prefixes


@dataclass(frozen=True, slots=True)
class StepGraph:
    graph: torch.cuda.CUDAGraph
    # The result of the captured launch. Every replay of a graph of the pool overwrites it, because the memory
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
        with self.rehearsal(), on_capture_stream():
            for key in self.keys[:most]:
                self.launch(key)
        torch.cuda.synchronize()

    def _capture_one(self, key: Key, pool: Any) -> StepGraph:
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(torch.cuda.current_device())
        # Other threads may use the GPU meanwhile: in the mode "global" their allocations would end captures.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = self.launch(key)
        return StepGraph(graph, tuple(map(_unowned, outputs)))


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The stream on which all graphs of a GPU are captured."""
    return torch.cuda.Stream(device)


@contextmanager
def on_capture_stream() -> Iterator[None]:
    """Inside, launches go to the stream of captures, after what the current stream has been given."""
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


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


class DecodeGraphs(StepGraphs[DecodeKey]):
    """The output is logits, [rows * queries, V]. `ladders`: the captured numbers of rows, ascending, by
    queries and sharing (capture_sizes.py)."""

    def __init__(
        self,
        decode: Callable[[DecodeKey], tuple[torch.Tensor, ...]],
        ladders: dict[tuple[int, bool], list[int]],
        rehearsal: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.ladders = ladders
        keys = [DecodeKey(rows, *kind) for kind, ladder in ladders.items() for rows in ladder]
        keys.sort(key=lambda key: (key.rows * key.queries, key), reverse=True)
        super().__init__(decode, keys, rehearsal)

    def fitting(self, size: int, queries: int, sharing: bool) -> tuple[DecodeKey, StepGraph] | None:
        """Returns the key with the fewest captured rows that are at least `size`, and its graph. None: no
        captured step is large enough. Steps of several queries are captured without sharing alone."""
        sharing = sharing and queries == 1
        ladder = self.ladders.get((queries, sharing), [])
        i = bisect.bisect_left(ladder, size)
        if i == len(ladder):
            return None
        key = DecodeKey(ladder[i], queries, sharing)
        return key, self.graphs[key]

    def padded(self, size: int, queries: int) -> int:
        """Returns the largest number of rows of a step of `size` decodes, padding included."""
        ladders = (self.ladders.get((queries, sharing), []) for sharing in (False, True))
        return max(next((rows for rows in ladder if rows >= size), size) for ladder in ladders)
