"""Regions on a real device: the tests of vLLM's and torch_memory_saver's allocators, and what they leave out.

They compare the card's free memory before and after, so they need the card alone and are skipped otherwise.
"""

import gc
import subprocess
import sys

import pytest
import torch

from shoal.memory.regions import Regions

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("alone_on_the_card"),
]
GIB = 2**30
MIB = 2**20


@pytest.fixture
def regions():
    gc.collect()
    torch.cuda.empty_cache()
    made = Regions()
    yield made
    made.close()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def used():
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_tensors_keep_address_and_content(regions):
    beside = torch.cuda.memory_reserved()  # what earlier tests have left in PyTorch's hands
    with regions.region("weights", offload=True):
        x = torch.arange(GIB // 4, dtype=torch.int32, device="cuda")
    with regions.region("cache", offload=False):
        y = torch.ones(GIB, dtype=torch.uint8, device="cuda")
    before, addresses = used(), (x.data_ptr(), y.data_ptr())
    report = regions.pause()
    assert before - used() > 1.9 * GIB and report.freed_bytes >= 2 * GIB and report.host_bytes == GIB
    assert abs(report.in_use_bytes - used()) < 64 * MIB
    assert report.region_bytes == 0 and report.process_bytes < beside + 64 * MIB
    report = regions.resume()
    assert abs(report.in_use_bytes - used()) < 64 * MIB
    assert report.region_bytes >= 2 * GIB and report.process_bytes < beside + 64 * MIB
    assert report.taken_bytes >= 2 * GIB and abs(used() - before) < 64 * MIB
    assert (x.data_ptr(), y.data_ptr()) == addresses
    assert torch.equal(x, torch.arange(GIB // 4, dtype=torch.int32, device="cuda"))
    y.fill_(3)
    assert y.sum(dtype=torch.int64) == 3 * GIB


def test_a_resume_without_memory_changes_nothing_and_can_be_tried_again(regions):
    free, _ = torch.cuda.mem_get_info()
    size = int(free * 0.6)
    with regions.region("weights", offload=True):
        x = torch.full((GIB,), 7, dtype=torch.uint8, device="cuda")
    with regions.region("cache", offload=False):
        y = torch.empty(size - GIB, dtype=torch.uint8, device="cuda")
    regions.pause()
    other = torch.empty(int(free * 0.7), dtype=torch.uint8, device="cuda")
    before = used()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            regions.resume()
        assert abs(used() - before) < 64 * MIB
    assert regions.paused() == {"weights", "cache"}
    del other
    torch.cuda.empty_cache()
    regions.resume()
    assert (x == 7).all() and y[-1] is not None
    with regions.region("weights"):
        torch.zeros(1 << 20, device="cuda")  # the failure poisons nothing


def test_tensors_in_and_beside_a_region(regions):
    """vLLM's test_basic_cumem."""
    x = torch.ones(1024, 1024, device="cuda")
    with regions.region():
        y = torch.ones(1024, 1024, device="cuda") + x
        z = torch.ones(1024, 1024, device="cuda") + y
        del y
    with regions.region("kept", offload=True):
        w = z + x
    regions.pause()
    regions.resume()
    assert torch.equal(w, torch.full_like(x, 4)) and torch.equal(x, torch.ones_like(x))


def test_captured_graphs_replay_after_a_cycle(regions):
    """vLLM's test_cumem_with_cudagraph: weights kept, cache dropped, inputs and graph outside."""
    with regions.region("weights", offload=True):
        weight = torch.eye(1024, device="cuda")
    with regions.region("cache", offload=False):
        cache = torch.ones(1024, 1024, device="cuda")
    x = torch.randn(128, 1024, device="cuda")
    out, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.mm(x, weight)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        cache[:128] = x
        out.copy_(torch.mm(cache[:128], weight))
    graph.replay()
    assert torch.equal(out, x)
    regions.pause()
    regions.resume()
    cache.random_()
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, x)


def test_a_graphs_own_pool_can_lie_in_a_region(regions):
    x = torch.randn(64 * MIB, device="cuda")
    with regions.region("graphs", offload=True):
        pass
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=regions.graph_pool("graphs")):
        out = (x * 2 + 1).sin()
    graph.replay()
    expected = (x * 2 + 1).sin()
    assert torch.equal(out, expected)
    assert regions.usage()["graphs"]["device_bytes"] >= 256 * MIB
    regions.pause()
    assert regions.usage()["graphs"]["device_bytes"] == 0
    regions.resume()
    assert torch.equal(out, expected)
    x.random_()
    graph.replay()
    assert torch.equal(out, (x * 2 + 1).sin())


def test_nested_regions(regions):
    with regions.region("outer", offload=True):
        a = torch.full((64 * MIB,), 1, dtype=torch.uint8, device="cuda")
        with regions.region("inner", offload=True):
            b = torch.full((128 * MIB,), 2, dtype=torch.uint8, device="cuda")
        c = torch.full((32 * MIB,), 3, dtype=torch.uint8, device="cuda")
    assert (regions.usage()["inner"]["reserved_bytes"], regions.usage()["outer"]["reserved_bytes"]) == (
        128 * MIB,
        96 * MIB,
    )
    regions.pause(["inner"])
    assert (a == 1).all() and (c == 3).all()
    regions.resume()
    assert (b == 2).all()


def test_a_trainer_and_an_engine_take_turns(regions):
    """torch_memory_saver's rl_example: model and optimizer of a trainer sleep while the other side generates,
    and the other way round."""
    trainer = Regions()
    with trainer.region("optimizer", offload=True):
        model = torch.nn.Linear(4096, 4096, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 4096, device="cuda")).sum().backward()
        optimizer.step()
    with regions.region("weights"):
        weight = torch.empty(4096, 4096, device="cuda")
    for _ in range(3):
        state = [p.clone() for p in model.parameters()]
        regions.pause()
        model.zero_grad(set_to_none=False)
        model(torch.randn(8, 4096, device="cuda")).sum().backward()
        optimizer.step()
        updated = model.weight.detach().clone()
        assert not torch.equal(updated, state[0])
        regions.resume()
        weight.copy_(model.weight)
        trainer.pause()
        assert torch.equal(weight, updated)
        trainer.resume()
        assert torch.equal(model.weight, updated)
    del model, optimizer
    trainer.close()


def test_a_hundred_cycles_do_not_grow(regions):
    with regions.region("weights", offload=True):
        x = torch.arange(64 * MIB, dtype=torch.int32, device="cuda")
    with regions.region("cache", offload=False):
        torch.empty(GIB, dtype=torch.uint8, device="cuda")
    seen = []
    for _ in range(100):
        regions.pause(keep=["weights"])
        asleep = used()
        regions.resume()
        seen.append((asleep, used()))
    # The driver takes a few hundred KB for itself now and then.
    assert all(max(taken) - taken[0] < 2 * MIB for taken in zip(*seen[1:]))
    assert regions.host_usage()["bytes"] == 4 * 64 * MIB
    assert torch.equal(x, torch.arange(64 * MIB, dtype=torch.int32, device="cuda"))


def test_an_impossible_request_is_pytorchs_error_and_says_why(regions):
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as error, regions.region("big"):
        torch.empty(torch.cuda.mem_get_info()[1] + GIB, dtype=torch.uint8, device="cuda")
    assert "memory region 'big'" in error.value.__notes__[0]
    with regions.region("big"):
        x = torch.ones(MIB, device="cuda")
    assert x.sum() == MIB


def test_freed_memory_goes_back_once_the_region_closes(regions):
    before = used()
    with regions.region("weights"):
        x = torch.ones(GIB, dtype=torch.uint8, device="cuda")
    y = x.sum(dtype=torch.int64)  # may still run
    del x
    regions.close()
    torch.cuda.empty_cache()
    assert used() - before < 64 * MIB and y == GIB


def test_a_dropped_set_frees_its_memory():
    gc.collect()
    torch.cuda.empty_cache()
    before = used()
    for _ in range(70):  # a process has room for 64 regions
        own = Regions()
        with own.region("weights", offload=True):
            x = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
        own.pause()
        del own, x
        gc.collect()
    torch.cuda.empty_cache()
    assert used() - before < 64 * MIB


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_a_region_of_its_own(regions):
    tensors = []
    for device in range(2):
        with torch.cuda.device(device), regions.region("weights", offload=True):
            tensors.append(torch.full((GIB,), device, dtype=torch.uint8, device="cuda"))
    free = [torch.cuda.mem_get_info(d)[0] for d in range(2)]
    regions.pause()
    assert all(torch.cuda.mem_get_info(d)[0] - free[d] > 0.9 * GIB for d in range(2))
    regions.resume()
    assert all((tensor == d).all() for d, tensor in enumerate(tensors))


def test_a_process_with_many_pools_pauses_as_one_with_few():
    """PyTorch's MemPool.snapshot released the numbers of the pool's id once too often, and Python frees those
    above 256. So a process that had made more pools ended in a fault some pauses later."""
    code = """
import sys, torch
from shoal.memory.regions import Regions
pools = [torch.cuda.MemPool() for _ in range(300)]
regions = Regions()
with regions.region("weights", offload=True):
    x = torch.arange(1 << 20, device="cuda")
kept = regions._pools.live_ranges(regions._regions["weights", 0].pool)
assert kept == [(x.data_ptr(), x.nbytes)], kept
number = pools[-1].id[1]
assert number > 256
for _ in range(2000):
    regions._pools.live_ranges(pools[-1])
regions.pause()
regions.resume()
assert (x == torch.arange(1 << 20, device="cuda")).all()
print("well", sys.version)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("well"), done.stderr
