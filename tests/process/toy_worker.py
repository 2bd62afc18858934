"""What the ranks of test_workers.py run: a small object with methods that answer, sleep, print, raise and die."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np
import torch

from shoal.errors import CheckpointError, RequestError
from shoal.layers.parallel import TensorParallel


class Toy:
    def __init__(self, rank: int, world_size: int, **init: Any) -> None:
        self.rank, self.world_size, self.init = rank, world_size, init
        self.seen: list[int] = []
        self.tp = TensorParallel.connect(rank, world_size, "cpu", init["port"]) if "port" in init else TensorParallel.single()

    def echo(self, *args: Any) -> Any:
        return [self.rank, *args]

    def about(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "world_size": self.world_size, "init": self.init, "group": os.getpgid(0), "session": os.getsid(0)}

    def note(self, number: int, filler: np.ndarray | None = None) -> None:
        assert filler is None or (filler == number % 251).all(), f"message {number} was overwritten"
        self.seen.append(number)

    def notes(self) -> list[int]:
        return self.seen

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

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

    def hold_the_line(self) -> None:
        """Stuck as in a collective whose peer is gone."""
        self.tp.all_reduce(torch.zeros(1))

    def collectives(self) -> dict[str, Any]:
        r = float(self.rank + 1)
        summed = self.tp.all_reduce(torch.full((3, 2), r, dtype=torch.bfloat16))
        columns = self.tp.all_gather(torch.tensor([[r, -r]]), dim=-1)
        rows = self.tp.all_gather(torch.tensor([[r, -r]]), dim=0)
        sent = self.tp.broadcast(torch.tensor([self.rank, 7], dtype=torch.int32))
        self.tp.barrier()
        return {"summed": summed, "columns": columns, "rows": rows, "sent": sent}


def refusing_factory(rank: int, world_size: int) -> None:
    raise CheckpointError("model.safetensors is truncated: 5 bytes of 10; download it again")


def broken_factory(rank: int, world_size: int) -> None:
    raise OSError("the dog ate it")


def exiting_factory(rank: int, world_size: int) -> None:
    os._exit(7)
