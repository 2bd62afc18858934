"""KV blocks between real processes: tickets, layer by layer, and what is left when either side is killed."""

import itertools
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from msgspec.structs import replace

from shoal.kv.storage import host_memory
from shoal.kv.transfer.fetch import BlockReader
from shoal.kv.transfer.lease import Lease
from shoal.kv.transfer.registry import TRANSPORTS, Transports
from shoal.kv.transfer.ticket import Failure, TransferError, unseal
from shoal.kv.view import BlockView
from tests import shared_memory, transport_cases
from tests.kv_cases import contents
from tests.kv_owner import KINDS, MODEL, SPAWN, logical, ranks_of, share_of
from tests.transport_cases import MEMORY, SPEC, empty, owner_process

ACROSS = [kind.name for kind in TRANSPORTS if kind.name != "in_process"]
NAMES = pytest.mark.parametrize("name", transport_cases.transports_here(ACROSS))
# So large that a copy takes some ms
BIG = replace(SPEC, num_heads=8, head_dim=64, block_size=16, num_blocks=512)


@pytest.fixture(autouse=True)
def nothing_in_dev_shm():
    before = shared_memory.names()
    yield
    shared_memory.assert_nothing_left(before)


def owner_of(name, specs=(SPEC,), **options):
    return owner_process().become(specs, 1, MEMORY[name], [name], **options)


def peers_of(name, into):
    return BlockReader(MODEL, Transports([KINDS[name]]), [into])


def release_ended(owner, timeout_s=20):
    """Waits until an offer has ended, and releases its blocks."""
    until = time.monotonic() + timeout_s
    while not (found := owner.release_ended()):
        assert time.monotonic() < until, "the owner still holds its blocks"
        time.sleep(0.01)
    return found


@NAMES
def test_a_killed_owner_can_not_be_read(name):
    transport_cases.check_an_owner_that_was_killed_can_not_be_read(name, host_memory)


@NAMES
def test_blocks_travel_layer_by_layer_between_tensor_parallel_sizes(name):
    """Two ranks compute, one rank reads; and one computes, each of two reads what it lacks."""
    for src_tp, dst_tp in ((2, 1), (1, 2)):
        owner = owner_of(name, ranks_of(SPEC, src_tp))
        sealed, blocks = owner.offer(6, 1)
        ticket_id, content = unseal(sealed).id, logical(SPEC, 1)
        leases = [Lease(sealed) for _ in range(dst_tp)]
        for rank, lease in zip(ranks_of(SPEC, dst_tp), leases):
            into = empty(rank, host_memory)
            expected = contents(into).clone()
            expected[:, [5, 0, 7]] = share_of(content[:, blocks][:, [0, 2, 5]], rank)
            peers = peers_of(name, into)
            with ThreadPoolExecutor(1) as pool:
                reading = pool.submit(peers.fetch, lease, [0, 2, 5], [5, 0, 7])
                for layer in range(1, SPEC.num_layers + 1):
                    owner.advance(ticket_id, 6, layer)
                done = reading.result(60)
            assert torch.equal(contents(into), expected)
            assert done.transport == name and done.num_bytes == 3 * rank.block_bytes
            peers.close()
        leases[0].release()
        assert release_ended(owner) == [(None, 6)]
        assert owner.num_free() == SPEC.num_blocks
        for lease in leases:
            lease.close()


@NAMES
def test_a_fetch_that_comes_too_late_fails(name):
    """The lease ran out, the blocks hold something else, and the reader still has its connection."""
    owner = owner_of(name)
    into = empty(SPEC, host_memory)
    peers = peers_of(name, into)
    sealed, _ = owner.offer(4, 4)
    with Lease(sealed) as lease:
        assert peers.fetch(lease, [0], [0]).num_bytes == SPEC.block_bytes
        owner.skip(31)
        assert release_ended(owner) == [("expired", 4)]
        owner.reuse(7)
        with pytest.raises(TransferError) as caught:
            peers.fetch(lease, [0], [0])
        assert caught.value.failure in (Failure.EXPIRED, Failure.LOST)
    with pytest.raises(TransferError) as caught:
        Lease(sealed)
    assert caught.value.failure is Failure.EXPIRED
    peers.close()


def _read_for_ever(name, sealed, connection):
    """A reader that fetches all blocks of a ticket again and again."""
    into = BlockView.over(BIG, host_memory(BIG.num_bytes))
    peers, lease = peers_of(name, into), Lease(sealed)
    for number in itertools.count():
        positions = range(len(lease.ticket.blocks))
        peers.fetch(lease, positions, positions)
        if number < 100:  # a pipe that nobody reads would be full some time, and the reader stand still
            connection.send("done")


@NAMES
def test_blocks_of_a_killed_reader_are_given_back_at_once(name):
    """Killed while it reads, at any moment; the lease, of an hour, plays no part. The owner lives on."""
    owner = owner_of(name, [BIG], lease_s=3600)
    sealed, _ = owner.offer(400, 400)
    ours, theirs = SPAWN.Pipe()
    reader = SPAWN.Process(target=_read_for_ever, args=(name, sealed, theirs), daemon=True)
    reader.start()
    for _ in range(2):
        assert ours.poll(60)
        ours.recv()
    time.sleep(random.random() / 20)
    reader.kill()
    reader.join()
    assert release_ended(owner) == [("lost", 400)]
    assert owner.num_free() == BIG.num_blocks
    sealed, _ = owner.offer(4, 4)
    into = empty(BIG, host_memory)
    peers = peers_of(name, into)
    with Lease(sealed) as lease:
        peers.fetch(lease, range(4), range(4))
    assert torch.equal(contents(into)[:, :4], logical(BIG, 1)[:, unseal(sealed).blocks])
    peers.close()


@NAMES
def test_an_owner_killed_in_mid_transfer_fails_the_fetch(name):
    """Between layers, and while bytes move: never a wait, never a wrong block."""
    rng = random.Random(2)
    for layers in (1, BIG.num_layers):
        owner = owner_of(name, [BIG])
        sealed, _ = owner.offer(400, 0)
        into = BlockView.over(BIG, host_memory(BIG.num_bytes))
        peers, lease = peers_of(name, into), Lease(sealed)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(peers.fetch, lease, range(400), range(400))
            if layers:
                owner.advance(unseal(sealed).id, 400, layers)
            time.sleep(rng.random() / 20)
            owner.kill()
            failed = reading.exception(60)
        if failed is not None:
            assert failed.failure in (Failure.LOST, Failure.UNREACHABLE)
        else:  # it was quicker: what it has is right
            assert layers == BIG.num_layers
            assert torch.equal(contents(into)[:, :400], logical(BIG, 1)[:, unseal(sealed).blocks])
        lease.close()
        peers.close()


@NAMES
def test_an_owner_that_stands_still_is_given_up(name):
    """A stopped owner keeps its connections open. The fetch ends by its own patience."""
    owner = owner_of(name)
    sealed, _ = owner.offer(4, 2)
    into = empty(SPEC, host_memory)
    peers = peers_of(name, into)
    with Lease(sealed, timeout_s=0.5) as lease:
        owner.signal(signal.SIGSTOP)
        try:
            with pytest.raises(TransferError) as caught:
                peers.fetch(lease, range(4), range(4), patience_s=0.5)
            assert caught.value.failure is Failure.LATE
        finally:
            owner.signal(signal.SIGCONT)
        peers.close()
    assert release_ended(owner) == [("lost", 4)]


@pytest.mark.slow
@NAMES
@pytest.mark.parametrize("seed", range(2))
def test_random_kills_leak_nothing(name, seed):
    """Readers are killed at random moments: before they come, while they read, in between. A killed one that
    never came costs a lease. In the end the owner takes all back."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    owner = owner_of(name, [BIG], lease_s=20)
    readers = []
    for _ in range(20):
        count = rng.randint(1, BIG.num_blocks // 20)
        sealed, _ = owner.offer(count, count)
        ours, theirs = SPAWN.Pipe()
        reader = SPAWN.Process(target=_read_for_ever, args=(name, sealed, theirs), daemon=True)
        reader.start()
        readers.append((reader, ours))
        time.sleep(rng.random() * 4)
        if len(readers) == 3:
            reader, _ = readers.pop(rng.randrange(3))
            reader.kill()
            reader.join()
        owner.release_ended()
    owner.withdraw("the end")
    for reader, _ in readers:
        reader.join(60)
        assert reader.exitcode == 1  # with a TransferError
    until = time.monotonic() + 20
    while owner.num_free() < BIG.num_blocks:
        owner.release_ended()
        assert time.monotonic() < until
        time.sleep(0.05)
