"""Commands of the ranks of test_all_reduce_gpu.py and benchmarks/all_reduce.py: sums over peer memory,
compared with NCCL's or timed."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch


class Sums:
    def __init__(self, tp: Any, hidden: int) -> None:
        from shoal.engine.ranks import peer_copies, peer_sums

        self.tp, self.hidden = tp, hidden
        self.sums = peer_sums.connect(tp, hidden, torch.bfloat16)
        if self.sums is not None and tp.size == peer_copies.RANKS:
            self.sums.large = peer_copies.connect(tp, hidden, torch.bfloat16)
        tp.sums = None  # the group's own sums are what is compared with

    def about(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "connected": self.sums is not None}

    def differences(self, rows: int, columns: int, dtype: str, way: str, turns: int) -> list[int]:
        """Returns how many numbers of each kind differ from NCCL's and torch's norm in `turns` turns."""
        from shoal.kernels.all_reduce import Way, all_reduce, all_reduce_add_rms_norm
        from shoal.kernels.reference import rms_norm

        peers, kind, device = self.sums.peers, getattr(torch, dtype), self.tp.device
        generator = torch.Generator(device).manual_seed(self.tp.rank)
        wrong = torch.zeros(3, dtype=torch.int64, device=device)
        for _ in range(turns):
            # whole numbers, whose sums are exact in any order
            x = torch.randint(-9, 10, (rows, columns), generator=generator, device=device).to(kind)
            expected = self.tp.all_reduce(x.clone())
            if peers.takes(rows, columns * x.itemsize):
                residual, weight = torch.ones_like(x), torch.full((columns,), 0.5, dtype=kind, device=device)
                normed = all_reduce_add_rms_norm(peers, x, residual, weight, 1e-6, Way[way])
                wrong[0] += (residual != expected + 1).sum()
                near = torch.isclose(normed.float(), rms_norm(expected + 1, weight, 1e-6).float(), 2e-2, 1e-3)
                wrong[1] += (~near).sum()
            if peers.takes_plain(x):
                wrong[2] += (all_reduce(peers, x, Way[way]) != expected).sum()
        return wrong.tolist()

    def replays(self, way: str, rows: int, count: int, most_lag_s: float) -> list[int]:
        """A graph of sums and norms, one after the other as in a model's layers, is replayed `count` times,
        while this rank now and then comes late. Returns how many numbers were wrong."""
        from shoal.kernels.all_reduce import Way, all_reduce, all_reduce_add_rms_norm

        device, lag = self.tp.device, random.Random(self.tp.rank)
        x = torch.zeros(rows, self.hidden, dtype=torch.bfloat16, device=device)
        weight = torch.ones(self.hidden, dtype=torch.bfloat16, device=device)
        wrong = torch.zeros(2, dtype=torch.int64, device=device)
        turn = torch.zeros((), dtype=torch.int64, device=device)

        def layers() -> None:
            for layer in range(6):
                # A number for each turn, layer, rank and column, small enough to be summed exactly.
                columns = torch.arange(self.hidden, device=device)
                mine = (turn * 7 + layer * 5 + self.tp.rank * 3 + columns) % 23
                total = sum((turn * 7 + layer * 5 + r * 3 + columns) % 23 for r in range(self.tp.size))
                x.copy_(mine.expand(rows, -1))
                residual = torch.zeros_like(x)
                all_reduce_add_rms_norm(self.sums.peers, x, residual, weight, 1e-6, Way[way])
                wrong[0] += (residual != total).sum()
                if self.sums.peers.takes_plain(x):
                    x.copy_(mine.expand(rows, -1))
                    wrong[1] += (all_reduce(self.sums.peers, x, Way[way]) != total).sum()
            turn.add_(1)

        layers()  # compiles
        torch.cuda.synchronize()
        self.tp.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        for _ in range(count):
            if most_lag_s and lag.random() < 0.05:
                torch.cuda.synchronize()
                time.sleep(lag.random() * most_lag_s)
            graph.replay()
        torch.cuda.synchronize()
        return wrong.tolist()

    def large_differences(self, rows: int, turns: int, most_lag_s: float) -> int:
        """Returns how many numbers of large sums in pieces differ from NCCL's in `turns` turns, in which this
        rank comes late now and then."""
        large, device, lag = self.sums.large, self.tp.device, random.Random(self.tp.rank)
        generator = torch.Generator(device).manual_seed(self.tp.rank)
        weight = torch.ones(self.hidden, dtype=torch.bfloat16, device=device)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for turn in range(turns):
            x = torch.randint(-9, 10, (rows, self.hidden), generator=generator, device=device).bfloat16()
            expected, residual = self.tp.all_reduce(x.clone()) + 1, torch.ones_like(x)
            if lag.random() < 0.3:
                torch.cuda.synchronize()
                time.sleep(lag.random() * most_lag_s)
            begun = [(cut, large.begin(x[cut])) for cut in large.pieces(rows) or [slice(0, rows)]]
            for cut, piece in begun:
                if turn % 2:
                    piece.add(residual[cut])
                else:
                    piece.add_rms_norm(residual[cut], weight, 1e-6)
            wrong += (residual != expected).sum()
        return int(wrong)

    def waits_alone(self) -> float:
        """A sum to which no other rank comes, and its release. Returns the seconds that the release took."""
        from shoal.kernels.all_reduce import all_reduce

        x = torch.ones(self.hidden, dtype=torch.bfloat16, device=self.tp.device)
        all_reduce(self.sums.peers, x)
        done = torch.cuda.Event()
        done.record()
        time.sleep(0.2)
        assert not done.query(), "it did not wait"
        begin = time.monotonic()
        self.sums.release()
        done.synchronize()
        return time.monotonic() - begin

    def microseconds(self, way: str, rows: int, with_norm: bool, repeats: int = 20) -> float:
        """The time of one sum in a captured chain of 32. way: ONE_SHOT, TWO_SHOT or NCCL."""
        from shoal.kernels.all_reduce import Way, all_reduce, all_reduce_add_rms_norm
        from shoal.kernels.norm import add_rms_norm

        x = torch.zeros(rows, self.hidden, dtype=torch.bfloat16, device=self.tp.device)
        residual, weight = torch.zeros_like(x), torch.ones_like(x[0])

        def sums() -> None:
            for _ in range(32):
                if way == "NCCL":
                    self.tp.all_reduce(x)
                    if with_norm:
                        add_rms_norm(x, residual, weight, 1e-6)
                elif with_norm:
                    all_reduce_add_rms_norm(self.sums.peers, x, residual, weight, 1e-6, Way[way])
                else:
                    all_reduce(self.sums.peers, x, Way[way])

        sums()
        torch.cuda.synchronize()
        self.tp.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sums()
        return self._best(graph.replay, repeats) / 32

    def large_microseconds(self, way: str, rows: int, repeats: int = 5) -> float:
        """The time of one of 8 large sums with the norm behind it. way: COPIES, in pieces that nothing is
        multiplied beside, or NCCL."""
        from shoal.kernels.norm import add_rms_norm

        large = self.sums.large
        x = torch.zeros(rows, self.hidden, dtype=torch.bfloat16, device=self.tp.device)
        residual, weight = torch.zeros_like(x), torch.ones_like(x[0])

        def sums() -> None:
            for _ in range(8):
                if way == "NCCL":
                    add_rms_norm(self.tp.all_reduce(x), residual, weight, 1e-6)
                    continue
                begun = [(cut, large.begin(x[cut])) for cut in large.pieces(rows)]
                for cut, piece in begun:
                    piece.add_rms_norm(residual[cut], weight, 1e-6)

        return self._best(sums, repeats) / 8

    def _best(self, run: Callable[[], None], repeats: int) -> float:
        """Microseconds of a run, the best of some behind a first one."""
        run()
        torch.cuda.synchronize()
        best = float("inf")
        for _ in range(repeats):
            self.tp.barrier()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            run()
            events[1].record()
            torch.cuda.synchronize()
            best = min(best, events[0].elapsed_time(events[1]))
        return best * 1e3


def factory(rank: int, world_size: int, port: int, hidden: int) -> dict[str, Any]:
    """Arguments of a WorkerProcesses."""
    from shoal.engine.ranks.rendezvous import join

    torch.cuda.set_device(rank)
    sums = Sums(join(rank, world_size, "cuda", port), hidden)
    return {name: getattr(sums, name) for name in dir(sums) if not name.startswith("_")}


class Group:
    """All ranks, rank 0 in this process. A context, which ends them."""

    def __init__(self, world_size: int, hidden: int) -> None:
        from shoal.engine.ranks.rendezvous import Rendezvous
        from shoal.engine.ranks.workers import WorkerProcesses

        torch.cuda.set_device(0)
        rendezvous = Rendezvous()
        init = {"port": rendezvous.port, "hidden": hidden}
        self.group = WorkerProcesses(world_size, "sums_worker:factory", init)
        self.tp = rendezvous.connect(0, world_size, "cuda", self.group.check)
        self.own = Sums(self.tp, hidden)

    def call(self, name: str, *args: Any) -> list[Any]:
        """Runs a method on all ranks; returns the results in rank order."""
        pending = self.group.submit(name, *args)
        return [getattr(self.own, name)(*args), *pending.results()]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close()
        self.tp.close()
        if self.own.sums is not None:
            torch.cuda.synchronize()
            self.own.sums.close()
