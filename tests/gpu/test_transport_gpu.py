"""Blocks of a worker whose cache is on a GPU, read by another process: CUDA IPC and NIXL, on one GPU and
between two."""

import os

import pytest
import torch
from msgspec.structs import replace

from shoal.kv import block_map
from shoal.kv.storage import device_memory, host_memory, memory_of, pinned_memory
from shoal.kv.transfer.fetch import BlockReader
from shoal.kv.transfer.lease import Lease
from shoal.kv.transfer.registry import Transports
from shoal.kv.transfer.ticket import unseal
from shoal.kv.transfer.transport import Reach, TransportError
from shoal.kv.view import BlockView
from shoal.memory.regions import Regions
from tests import transport_cases
from tests.kv_cases import contents
from tests.kv_owner import KINDS, MODEL, logical
from tests.transport_cases import MEMORY, SPEC, empty, owner_process

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NAMES = pytest.mark.parametrize("name", transport_cases.transports_here(["in_process", "cuda_ipc", "nixl"]))
INTO = {"device": device_memory, "pinned": pinned_memory, "host": host_memory}
BIG = replace(SPEC, num_layers=8, num_heads=8, head_dim=128, block_size=16, num_blocks=512)


@pytest.fixture(params=["device", "last device"])
def source(request, monkeypatch):
    """Returns the devices of the owner's cache: the reader's GPU, and another one."""
    if request.param == "last device" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for name in ("in_process", "cuda_ipc", "nixl"):
        monkeypatch.setitem(MEMORY, name, request.param)
    return request.param


@pytest.fixture(params=["engines", "kernel"])
def way(request, monkeypatch):
    monkeypatch.setattr(block_map, "DMA_BYTES", 1 if request.param == "engines" else 1 << 60)


@NAMES
@pytest.mark.parametrize("into", INTO)
def test_blocks_come_as_they_are(name, source, into, way):
    transport_cases.check_blocks_come_as_they_are(name, INTO[into], seed=5)


@NAMES
@pytest.mark.parametrize("case", transport_cases.CASES, ids=lambda case: case.__name__.removeprefix("check_"))
def test_what_every_transport_does(name, source, case):
    case(name, device_memory)


@pytest.mark.parametrize("name", transport_cases.transports_here(["shared_memory", "nixl"]))
def test_a_cpu_s_blocks_reach_a_gpu(name):
    transport_cases.check_blocks_come_as_they_are(name, device_memory, seed=6)


@pytest.mark.parametrize("name", transport_cases.transports_here(["cuda_ipc", "nixl"]))
def test_layers_travel_while_later_ones_are_computed(name, source):
    """The owner's steps wait for nothing; a layer is read behind its event, and never before."""
    owner = owner_process().become([BIG], 1, source, [name])
    into = empty(BIG, device_memory)
    peers = BlockReader(MODEL, Transports([KINDS[name]]), [into])
    sealed, blocks = owner.offer(100, 0)
    with Lease(sealed) as lease:
        owner.compute(unseal(sealed).id, blocks, 7)
        peers.fetch(lease, range(100), range(100))
        assert torch.equal(contents(into)[:, :100], logical(BIG, 7)[:, blocks])
        lease.release()
    peers.close()


def test_the_reader_s_gpu_outlives_a_killed_owner(source):
    """In the middle of copies out of its memory. The driver keeps the memory as long as a reader maps it."""
    owner = owner_process().become([BIG], 1, source, ["cuda_ipc"])
    into = BlockView.over(BIG, device_memory(BIG.num_bytes))
    peer = transport_cases.connect("cuda_ipc", owner.addresses(), into)
    pulls = [peer.pull(range(512), range(512), range(8)) for _ in range(20)]
    owner.kill()
    pulls += [peer.pull(range(512), range(512), range(8)) for _ in range(20)]
    for pull in pulls:
        transport_cases.wait(pull)
    assert torch.equal(contents(into), logical(BIG, 1))
    peer.close()
    torch.cuda.synchronize()
    assert torch.ones(4, device="cuda").sum().item() == 4


def test_connections_give_their_memory_back(source):
    """Opening and closing an export a hundred times keeps no memory, except for streams of torch's pool:
    each connection takes two of 32."""
    owner = owner_process().become([BIG], 1, source, ["cuda_ipc"])
    into = BlockView.over(BIG, device_memory(BIG.num_bytes))
    ranks, free = owner.addresses(), []
    for _ in range(100):
        peer = transport_cases.connect("cuda_ipc", ranks, into)
        transport_cases.wait(peer.pull([1], [1], range(8)))
        peer.close()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[20], {i: free[i] - free[i - 1] for i in range(20, 100) if free[i] != free[i - 1]}


def test_memory_that_can_be_given_back_is_refused_with_the_way_out():
    """CUDA IPC shares what cudaMalloc gave, and nothing else."""
    regions = Regions()
    with regions.region("kv", offload=False):
        kv = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    view = BlockView.over(SPEC, memory_of(kv))
    with pytest.raises(TransportError, match="enable_sleep_mode"):
        Transports([KINDS["cuda_ipc"]]).export_cache([view], Reach.HOST)
    del view, kv
    regions.close()


def test_nothing_stays_in_dev_shm():
    assert not [name for name in os.listdir("/dev/shm") if "shoal" in name or name.startswith("torch_")]
