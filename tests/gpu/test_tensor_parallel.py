"""Collectives over NCCL between the processes of a worker group: right, in a CUDA graph too, and not for ever
when a rank dies."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from shoal.engine.ranks.rendezvous import Rendezvous
from shoal.engine.ranks.workers import WorkerProcesses
from shoal.errors import EngineDeadError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture
def two_ranks(monkeypatch):
    """(group, rank 0's TensorParallel, the module that rank 1 runs)"""
    # rank 1 gets it too
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "process"), *sys.path])
    import toy_worker

    torch.cuda.set_device(0)
    rendezvous = Rendezvous()
    group = WorkerProcesses(2, "toy_worker:parallel_toy", {"port": rendezvous.port, "device": "cuda"})
    tp = rendezvous.connect(0, 2, "cuda", group.check)
    yield group, tp, toy_worker
    group.close()
    tp.close()


def test_collectives_of_all_ranks(two_ranks):
    group, tp, toy = two_ranks
    pending = group.submit("collectives")
    for r in [toy.collectives(tp), *pending.results()]:
        assert torch.equal(r["summed"], torch.full((3, 2), 3.0, dtype=torch.bfloat16))
        assert torch.equal(r["columns"], torch.tensor([[1.0, -1, 2, -2]])) and torch.equal(
            r["rows"], torch.tensor([[1.0, -1], [2, -2]])
        )
        assert torch.equal(r["sent"], torch.tensor([0, 7], dtype=torch.int32))


def test_collectives_in_a_cuda_graph_see_each_replays_input(two_ranks):
    group, tp, toy = two_ranks
    inputs = [float(i) for i in range(50)]
    pending = group.submit("replayed_sums", inputs)
    expected = [2 * (x + 1) for x in inputs]
    assert toy.replayed_sums(tp, inputs) == expected and pending.results() == [expected]


def test_the_stream_of_an_all_reduce_is_the_current_one(two_ranks):
    """Work queued before and after it is in order without any wait: on a side stream and with memory that is
    freed at once."""
    group, tp, _ = two_ranks
    pending = group.submit("sums_on_a_side_stream", 200)
    from toy_worker import sums_on_a_side_stream

    own = sums_on_a_side_stream(tp, 200)
    assert own == pending.results()[0] == [3.0 * i for i in range(200)]


def test_a_rank_that_dies_in_the_middle_of_a_collective_does_not_hang_rank_0(two_ranks):
    group, tp, _ = two_ranks
    pid = group.submit("about").results()[0]["pid"]
    # runs on the GPU until rank 1 comes, which it never does
    tp.all_reduce(torch.ones(1 << 20, device="cuda"))
    done = torch.cuda.Event()
    done.record()
    os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 1 .* was killed by SIGKILL"):
        while not done.query():
            group.check()
            time.sleep(0.001)
    assert time.monotonic() - begin < 1.5
    group.close()
    tp.close()
    torch.cuda.synchronize()  # the kernel has been aborted
    assert time.monotonic() - begin < 10
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_ranks_stuck_in_a_collective_end_with_the_group(two_ranks):
    group, _, _ = two_ranks
    group.submit("about").results()
    group.send("hold_the_line")
    time.sleep(0.2)
    begin = time.monotonic()
    group.close()
    assert time.monotonic() - begin < 4.0
