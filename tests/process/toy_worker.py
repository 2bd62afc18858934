"""The commands of the ranks of test_workers.py: methods of a small object, which answer, sleep, print, raise and die."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

from shoal.errors import CheckpointError, RequestError


class Toy:
    def __init__(self, rank: int, world_size: int, **init: Any) -> None:
        self.rank, self.world_size, self.init = rank, world_size, init
        self.seen: list[int] = []

    def echo(self, *args: Any) -> Any:
        return [self.rank, *args]

    def about(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "world_size": self.world_size,
            "init": self.init,
            "group": os.getpgid(0),
            "session": os.getsid(0),
        }

    def note(self, number: int, filler: np.ndarray | None = None) -> None:
        assert filler is None or (filler == number % 251).all(), f"message {number} was overwritten"
        self.seen.append(number)

    def notes(self) -> list[int]:
        return self.seen

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def sleep_on(self, rank: int, seconds: float) -> None:
        """One of the ranks sleeps."""
        if self.rank == rank:
            time.sleep(seconds)

    def compute_or_sleep(self, rank: int, seconds: float) -> None:
        """One of the ranks computes while the others sleep."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.rank != rank:
                time.sleep(0.05)

    def cpu_time(self) -> float:
        return time.process_time()

    def arrived_ns(self, data: np.ndarray) -> int:
        return time.monotonic_ns()

    def print(self, text: str) -> None:
        print(text)

    def fail(self, message: str) -> None:
        raise KeyError(message)

    def refuse(self, message: str) -> None:
        raise RequestError(message)

    def unsendable(self) -> object:
        return object()

    def kill(self, last_words: str) -> None:
        print(last_words, file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)


class ParallelToy(Toy):
    def __init__(self, rank: int, world_size: int, port: int, device: str = "cpu") -> None:
        # They take seconds to import; the tests that need none of it start in a fraction of that.
        import torch

        from shoal.engine.ranks.rendezvous import join

        super().__init__(rank, world_size)
        if device == "cuda":
            torch.cuda.set_device(rank)
        self.tp = join(rank, world_size, device, port)

    def hold_the_line(self) -> None:
        """Stuck as in a collective whose peer is gone."""
        self.tp.barrier()

    def collectives(self) -> dict[str, Any]:
        return collectives(self.tp)

    def replayed_sums(self, inputs: list[float]) -> list[float]:
        return replayed_sums(self.tp, inputs)

    def sums_on_a_side_stream(self, count: int) -> list[float]:
        return sums_on_a_side_stream(self.tp, count)


def collectives(tp: Any) -> dict[str, Any]:
    """One of each."""
    import torch

    r, device = float(tp.rank + 1), tp.device
    results = {
        "summed": tp.all_reduce(torch.full((3, 2), r, dtype=torch.bfloat16, device=device)),
        "columns": tp.all_gather(torch.tensor([[r, -r]], device=device), dim=-1),
        "rows": tp.all_gather(torch.tensor([[r, -r]], device=device), dim=0),
        "sent": tp.broadcast(torch.tensor([tp.rank, 7], dtype=torch.int32, device=device)),
    }
    tp.barrier()
    return {name: tensor.cpu() for name, tensor in results.items()}


def replayed_sums(tp: Any, inputs: list[float]) -> list[float]:
    """An all-reduce and an all-gather captured in one CUDA graph, replayed for each input."""
    import torch

    x = torch.zeros(1024, device=tp.device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tp.all_gather(tp.all_reduce(x + 1))
    sums = []
    for value in inputs:
        x.fill_(value)
        graph.replay()
        sums.append(y.sum().item() / y.numel())
    return sums


def sums_on_a_side_stream(tp: Any, count: int) -> list[float]:
    """No wait between them, and each input's memory is free for the next as soon as Python is past it."""
    import torch

    results = torch.empty(count, device=tp.device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for i in range(count):
            results[i] = tp.all_reduce(
                torch.full((1 << 18,), float(i * (tp.rank + 1)), device=tp.device)
            ).mean()
    torch.cuda.synchronize()
    return results.tolist()


def table_of(toy: Toy) -> dict[str, Any]:
    """Its methods as commands."""
    return {name: getattr(toy, name) for name in dir(toy) if not name.startswith("_")}


# Factories: what a WorkerProcesses is given


def toy(rank: int, world_size: int, **init: Any) -> dict[str, Any]:
    return table_of(Toy(rank, world_size, **init))


def parallel_toy(rank: int, world_size: int, port: int, device: str = "cpu") -> dict[str, Any]:
    return table_of(ParallelToy(rank, world_size, port, device))


def refusing_factory(rank: int, world_size: int) -> None:
    raise CheckpointError("model.safetensors is truncated: 5 bytes of 10; download it again")


def choosy_factory(rank: int, world_size: int) -> dict[str, Any]:
    if rank == 2:
        time.sleep(0.2)
        raise CheckpointError("not with me")
    return toy(rank, world_size)


def broken_factory(rank: int, world_size: int) -> None:
    raise OSError("the dog ate it")


def exiting_factory(rank: int, world_size: int) -> None:
    os._exit(7)
