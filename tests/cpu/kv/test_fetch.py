"""Blocks fetched with a ticket while their owner computes them, in one process: what comes, what fails, and
what it leaves."""

import random
import sys
import threading
import time
from itertools import pairwise

import pytest
import torch

from shoal.kv.storage import host_memory, shared_memory
from shoal.kv.transfer import fetch
from shoal.kv.transfer.fetch import BlockReader, news
from shoal.kv.transfer.in_process import InProcess
from shoal.kv.transfer.lease import Lease
from shoal.kv.transfer.registry import TRANSPORTS, Transports
from shoal.kv.transfer.ticket import Failure, Progress, TransferError, unseal
from shoal.kv.transfer.transport import Reach, TransportError
from shoal.kv.view import BlockView
from tests.kv_cases import contents
from tests.kv_owner import KINDS, MODEL, Owner, fill, logical
from tests.transport_cases import SPEC, empty


@pytest.fixture
def owner():
    made = Owner([SPEC], 1, "host", ["in_process"])
    yield made
    made.close()


@pytest.fixture
def into():
    return empty(SPEC, host_memory)


@pytest.fixture
def peers(into):
    made = BlockReader(MODEL, Transports([InProcess]), [into])
    yield made
    made.close()
    made.close()


def ended(owner, timeout_s=10):
    until = time.monotonic() + timeout_s
    while not (found := owner.release_ended()):
        assert time.monotonic() < until, "no offer has ended"
        time.sleep(0.002)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_layers_are_read_as_they_come(owner, into, peers, seed):
    """The owner computes chunk after chunk, layer after layer. Each layer's bytes are right only once it
    is reported."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    sealed, blocks = owner.offer(9, whole := rng.randint(0, 3))
    view, now = owner.views[0], logical(SPEC, 50)
    now[:, blocks[:whole]] = owner.content[:, blocks[:whole]]
    fill(view, now)
    cuts = sorted({whole, *rng.sample(range(whole + 1, 9), 2), 9})
    positions = sorted(rng.sample(range(9), rng.randint(1, 9)))
    dst_ids = rng.sample(range(SPEC.num_blocks), len(positions))
    expected = contents(into).clone()
    expected[:, dst_ids] = owner.content[:, blocks][:, positions]

    def compute():
        for start, stop in pairwise(cuts):
            for layer in range(SPEC.num_layers):
                ids = blocks[start:stop]
                now[layer, ids] = owner.content[layer, ids]
                fill(view, now)
                owner.advance(unseal(sealed).id, stop, layer + 1)
                time.sleep(rng.choice((0, 0.003)))

    with Lease(sealed) as lease:
        worker = threading.Thread(target=compute)
        worker.start()
        done = peers.fetch(lease, positions, dst_ids)
        worker.join()
        assert torch.equal(contents(into), expected)
        assert (done.transport, done.num_blocks) == ("in_process", len(positions))
        assert done.num_bytes == len(positions) * SPEC.block_bytes
        lease.release()
    assert ended(owner) == [(None, 9)]


def test_a_fetch_of_nothing_asks_the_owner_all_the_same(owner, peers):
    sealed, _ = owner.offer(2, 0)
    with Lease(sealed) as lease:
        assert peers.fetch(lease, [], []).num_bytes == 0
        owner.pool.release(owner.offers._offers[lease.ticket.id].blocks)
        owner.reuse(2)
        with pytest.raises(TransferError) as caught:
            peers.fetch(lease, [], [])
        assert caught.value.failure is Failure.STALE


def test_a_late_read_fails_instead_of_giving_wrong_blocks(owner, into, peers):
    """The owner reuses the blocks while they are being read."""
    sealed, blocks = owner.offer(4, 4)
    with Lease(sealed) as lease:
        owner.pool.release(blocks)
        owner.reuse(2)
        with pytest.raises(TransferError, match="something else was put into block") as caught:
            peers.fetch(lease, range(4), range(4))
        assert (caught.value.failure, caught.value.transport) == (Failure.STALE, "in_process")


def test_a_fetch_is_cancelled_while_it_waits(owner, peers, monkeypatch):
    monkeypatch.setattr(fetch, "WATCH_S", 0.01)
    sealed, _ = owner.offer(4, 2)
    stop = threading.Event()
    timer = threading.Timer(0.05, stop.set)
    timer.start()
    with Lease(sealed) as lease, pytest.raises(TransferError) as caught:
        peers.fetch(lease, range(4), range(4), is_cancelled=stop.is_set)
    assert caught.value.failure is Failure.CANCELLED
    assert ended(owner) == [("lost", 4)]
    timer.join()


def test_a_read_that_cannot_begin_ends_those_that_began_with_it(owner, into):
    class Cut(InProcess):
        def connect(self, exports, into):
            peer = super().connect(exports, into)
            peer.pull = pull
            return peer

    class Begun:
        num_bytes = 0
        is_cancelled = False

        def done(self):
            return False

        def cancel(self):
            self.is_cancelled = True

    begun = []

    def pull(*_):
        if begun:
            raise TransferError(Failure.LOST, "the connection broke")
        begun.append(Begun())
        return begun[0]

    peers = BlockReader(MODEL, Transports([Cut]), [into])
    sealed, _ = owner.offer(4, 2)
    with Lease(sealed) as lease, pytest.raises(TransferError, match="broke"):
        lease.progress = Progress(2, 4, 1)  # two blocks have all layers, and two others the first
        peers.fetch(lease, range(4), range(4))
    assert begun[0].is_cancelled, "it would write into blocks that are others' by now"
    peers.close()


def test_an_owner_that_computes_nothing_is_given_up(owner, into):
    now = [0.0]
    peers = BlockReader(MODEL, Transports([InProcess]), [into], lambda: now[0])
    sealed, _ = owner.offer(4, 2)

    def later():
        now[0] += 1
        return False

    with Lease(sealed) as lease:
        lease.watch = lambda timeout_s: lease.progress
        with pytest.raises(TransferError, match="no new data for 10 s") as caught:
            peers.fetch(lease, range(4), range(4), patience_s=10, is_cancelled=later)
    assert caught.value.failure is Failure.LATE


def test_an_owner_that_takes_its_blocks_back_ends_the_fetch(owner, peers):
    sealed, _ = owner.offer(4, 2)
    timer = threading.Timer(0.05, owner.withdraw, ("the request was aborted",))
    timer.start()
    with Lease(sealed) as lease, pytest.raises(TransferError, match="was aborted") as caught:
        peers.fetch(lease, range(4), range(4))
    assert caught.value.failure is Failure.ENDED
    timer.join()


@pytest.mark.parametrize("progress", [Progress(5, 5, 0), Progress(0, 9, 1), Progress(0, 4, 4)])
def test_more_than_can_be_is_nonsense(owner, peers, progress):
    sealed, _ = owner.offer(4, 4)
    with Lease(sealed) as lease:
        lease.progress = progress
        with pytest.raises(TransferError) as caught:
            peers.fetch(lease, range(4), range(4))
    assert caught.value.failure is Failure.NONSENSE


def test_blocks_of_another_model_are_refused(owner, into):
    """Blocks of other weights may have the same layout."""
    peers = BlockReader(b"other weights", Transports([InProcess]), [into])
    with Lease(owner.offer(1, 1)[0]) as lease, pytest.raises(TransferError, match="other weights") as caught:
        peers.fetch(lease, [0], [0])
    assert caught.value.failure is Failure.INCOMPATIBLE


def test_positions_ascend_and_exist(owner, peers):
    sealed, _ = owner.offer(3, 3)
    with Lease(sealed) as lease:
        for positions, dst_ids in (([1, 0], [0, 1]), ([0, 0], [0, 1]), ([0], [0, 1]), ([3], [0])):
            with pytest.raises(ValueError):
                peers.fetch(lease, positions, dst_ids)


def test_connections_are_kept_and_closed_when_nobody_uses_them(into, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_IDLE_PEERS", 2)
    now, opened, closed = [0.0], [], []

    class Counted(InProcess):
        def connect(self, exports, into):
            peer = super().connect(exports, into)
            opened.append(peer)
            close = peer.close
            peer.close = lambda: (closed.append(peer), close())
            return peer

    peers = BlockReader(MODEL, Transports([Counted]), [into], lambda: now[0])
    owners = [Owner([SPEC], seed, "host", ["in_process"]) for seed in range(3)]

    def fetch_from(owner):
        with Lease(owner.offer(1, 1)[0]) as lease:
            peers.fetch(lease, [0], [0])
            lease.release()
        ended(owner)

    for which in (0, 1, 0, 1):
        fetch_from(owners[which])
    assert len(opened) == 2 and not closed
    fetch_from(owners[2])
    assert closed == [opened[0]]
    now[0] = 61
    peers.tidy()
    assert len(closed) == 3
    fetch_from(owners[1])
    peers.close()
    assert len(opened) == len(closed) == 4
    for owner in owners:
        owner.close()


def test_the_first_transport_that_leads_there_is_taken(into):
    owner = Owner([SPEC], 1, "shared", ["in_process", "shared_memory"])
    assert [address.transport for address in owner.ranks[0]] == ["in_process", "shared_memory"]
    transports = Transports([InProcess, KINDS["shared_memory"]])
    assert transports.connect(owner.ranks, [into])[0] == "in_process"
    [exports] = owner.exports
    exports._exports[0].close()
    name, peer = transports.connect(owner.ranks, [into])
    assert name == "shared_memory"
    peer.close()
    exports.close()
    with pytest.raises(TransferError, match="shared_memory: the export of the blocks was closed") as caught:
        transports.connect(owner.ranks, [into])
    assert caught.value.failure is Failure.UNREACHABLE and "in_process: " in str(caught.value)
    with pytest.raises(TransferError, match="nixl: the owner has no such export"):
        Transports([KINDS["nixl"]]).connect(owner.ranks, [into])
    owner.close()


def test_a_cache_that_no_transport_can_read_is_refused_at_the_start():
    view = BlockView.over(SPEC, host_memory(SPEC.num_bytes))
    transports = Transports([kind for kind in TRANSPORTS if kind.name != "nixl"])
    with pytest.raises(
        TransportError, match=r"on this host .*shared_memory: .*allocate it with shared_memory"
    ):
        transports.export_cache([view])
    assert transports.export_cache([view], Reach.PROCESS).addresses[0].transport == "in_process"


def test_without_nixl_other_hosts_are_refused_with_the_way_out(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nixl", None)
    view = BlockView.over(SPEC, shared_memory(SPEC.num_bytes))
    with pytest.raises(TransportError, match=r"on other hosts .*pip install 'shoal\[nixl\]'"):
        Transports().export_cache([view], Reach.NETWORK)
    exports = Transports().export_cache([view])
    assert [address.transport for address in exports.addresses] == ["in_process", "shared_memory"]
    assert "pip install" in exports.reasons["nixl"]
    exports.close()


def test_each_layer_is_reported_once():
    """Against counting block by block, for steps of random sizes that are looked at now and then."""
    rng, num_layers = random.Random(3), 4
    for _ in range(200):
        cuts = [0, *sorted(rng.sample(range(1, 12), rng.randint(0, 4))), 12]
        steps = [
            Progress(start, stop, layers) if layers < num_layers else Progress(stop, stop, 0)
            for start, stop in pairwise(cuts)
            for layers in range(num_layers + 1)
        ]
        positions = sorted(rng.sample(range(12), rng.randint(0, 12)))
        seen, reported = Progress(), []
        for current in steps:
            if rng.random() < 0.4 or current is steps[-1]:
                for which, new in news(positions, seen, current, num_layers):
                    reported += [(position, layer) for position in positions[which] for layer in new]
                there = {(p, i) for p in positions for i in range(current.layers_of(p, num_layers))}
                assert sorted(reported) == sorted(there)
                seen = current
