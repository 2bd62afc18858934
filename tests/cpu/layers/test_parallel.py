"""TensorParallel in threads of one process: Gloo needs no more, and two engines in one process are two of
everything anyway."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shoal.engine.ranks.rendezvous import Rendezvous, join
from shoal.errors import CheckpointError, EngineDeadError
from shoal.layers.parallel import TensorParallel


def ranks(size, rendezvous=None):
    rendezvous = rendezvous or Rendezvous()
    others = [lambda r=r: join(r, size, "cpu", rendezvous.port, timeout_s=20) for r in range(1, size)]
    return together([lambda: rendezvous.connect(0, size, "cpu", timeout_s=20), *others])


def together(functions):
    with ThreadPoolExecutor(len(functions)) as pool:
        return [f.result(timeout=60) for f in [pool.submit(f) for f in functions]]


def test_one_rank_needs_no_group():
    tp = TensorParallel.single()
    x = torch.randn(2, 3)
    assert (tp.rank, tp.size) == (0, 1)
    assert tp.all_reduce(x) is x and tp.all_gather(x) is x and tp.broadcast(x) is x
    tp.barrier()
    tp.close()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32], ids=str)
def test_all_reduce_sums_in_place(size, dtype):
    tps = ranks(size)
    inputs = [torch.full((2, 3), r + 1).to(dtype) for r in range(size)]
    outputs = together([lambda tp=tp, x=x: tp.all_reduce(x) for tp, x in zip(tps, inputs)])
    for x, y in zip(inputs, outputs):
        assert y is x and torch.equal(x, torch.full((2, 3), size * (size + 1) // 2).to(dtype))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_all_gather_joins_in_rank_order(dim):
    inputs = [torch.randn(2, 3, 4) for _ in range(3)]
    outputs = together([lambda tp=tp, x=x: tp.all_gather(x, dim) for tp, x in zip(ranks(3), inputs)])
    for y in outputs:
        assert torch.equal(y, torch.cat(inputs, dim)) and y.is_contiguous()


def test_all_gather_takes_strided_tensors():
    inputs = [torch.randn(4, 6).T for _ in range(2)]
    outputs = together([lambda tp=tp, x=x: tp.all_gather(x) for tp, x in zip(ranks(2), inputs)])
    assert torch.equal(outputs[0], torch.cat(inputs, -1)) and torch.equal(outputs[1], outputs[0])


def test_broadcast_overwrites_with_rank_zeros():
    inputs = [torch.full((3,), r) for r in range(3)]
    together([lambda tp=tp, x=x: tp.broadcast(x) for tp, x in zip(ranks(3), inputs)])
    assert all(torch.equal(x, torch.zeros(3, dtype=torch.int64)) for x in inputs)


def test_two_groups_side_by_side_do_not_meet():
    first, second = Rendezvous(), Rendezvous()
    assert first.port != second.port
    for tps in (ranks(2, first), ranks(2, second)):
        outputs = together([lambda tp=tp: tp.all_reduce(torch.ones(1)) for tp in tps])
        assert [y.item() for y in outputs] == [2, 2]


def test_a_closed_group_can_be_followed_by_another():
    for _ in range(3):
        tps = ranks(2)
        for tp in tps:
            tp.close()
            tp.close()


def test_a_rank_that_does_not_come_is_named_in_time():
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 0 .* within 0.3 s: ranks \[1\] of 2 did not come"):
        Rendezvous().connect(0, 2, "cpu", timeout_s=0.3)
    assert time.monotonic() - start < 30


def test_a_rank_without_a_rank_zero_gives_up_in_time():
    rendezvous = Rendezvous()
    port = rendezvous.port
    del rendezvous
    with pytest.raises(EngineDeadError, match=f"rank 1 .* 127.0.0.1:{port}"):
        join(1, 2, "cpu", port, timeout_s=0.5)


def test_what_the_watch_raises_ends_the_wait_for_the_others():
    def check():
        raise CheckpointError("rank 1: model.safetensors is truncated")

    with pytest.raises(CheckpointError, match="truncated"):
        Rendezvous().connect(0, 2, "cpu", check)
