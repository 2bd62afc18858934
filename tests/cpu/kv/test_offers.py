"""Offers: the readers of each, and when blocks are released, on a fake clock."""

import random

import pytest

from shoal.kv.blocks import BlockPool
from shoal.kv.layout import CacheSpec, Layout
from shoal.kv.transfer.offers import Offers
from shoal.kv.transfer.ticket import ExportAddress, Failure, Progress, TransferError, digest_of, unseal

SPEC = CacheSpec(Layout.WHOLE_BLOCKS, 3, 4, 8, "bfloat16", 4, num_blocks=32)
RANKS = [[ExportAddress("in_process", (SPEC,), b"")]]


class Owner:
    def __init__(self, num_blocks=32, lease_s=30.0):
        self.now = 100.0
        self.pool = BlockPool(num_blocks)
        self.offers = Offers(b"m", RANKS, self.pool.generation, lambda: self.now, lease_s)

    def offer(self, num_blocks, whole=0):
        blocks = self.pool.try_allocate(num_blocks)
        sealed = self.offers.offer(blocks, whole)
        return sealed, unseal(sealed).id, blocks

    def release_ended(self):
        ended = self.offers.take_ended()
        for one in ended:
            self.pool.release(one.blocks)
        self.pool.check(self.offers.held())
        return [one.failure for one in ended]

    def failure(self, call, *arguments):
        with pytest.raises(TransferError) as caught:
            call(*arguments)
        return caught.value.failure


def test_a_ticket_says_all_that_a_reader_needs():
    owner = Owner()
    owner.offers.server = "127.0.0.1:9"
    sealed, _, blocks = owner.offer(3)
    ticket = unseal(sealed)
    assert list(ticket.blocks) == blocks and ticket.specs == (SPEC,) and ticket.server == "127.0.0.1:9"
    assert list(ticket.generations) == [owner.pool.generation(block) for block in blocks]
    assert ticket.id != unseal(owner.offer(3)[0]).id


def test_progress_counts_blocks_and_layers_and_never_goes_back():
    owner = Owner()
    sealed, ticket_id, _ = owner.offer(6, whole=1)
    progress = owner.offers.open(ticket_id, digest_of(sealed), "r")
    assert progress == Progress(1, 1, 0)
    seen = []
    for blocks, layers in ((3, 1), (3, 2), (3, 3), (6, 1), (2, 2), (6, 3), (6, 1)):
        owner.offers.advance(ticket_id, blocks, layers)
        seen.append(owner.offers.progress(ticket_id))
    assert seen == [
        Progress(1, 3, 1),
        Progress(1, 3, 2),
        Progress(3, 3, 0),
        Progress(3, 6, 1),
        Progress(3, 6, 1),
        Progress(6, 6, 0),
        Progress(6, 6, 0),
    ]


def test_a_lease_ends_unless_it_is_renewed():
    owner = Owner(lease_s=30)
    sealed, ticket_id, _ = owner.offer(4)
    owner.now += 29
    owner.offers.open(ticket_id, digest_of(sealed), "r")
    for call in (owner.offers.renew, owner.offers.verify):
        owner.now += 29
        call(ticket_id)
    owner.offers.expire()
    assert owner.release_ended() == []
    owner.now += 30
    assert owner.failure(owner.offers.renew, ticket_id) is Failure.EXPIRED
    assert owner.release_ended() == [Failure.EXPIRED] and owner.pool.num_free == 32


def test_a_ticket_that_nobody_used_expires():
    owner = Owner(lease_s=5)
    sealed, ticket_id, _ = owner.offer(4)
    owner.now += 5
    owner.offers.expire()
    assert owner.release_ended() == [Failure.EXPIRED]
    assert owner.failure(owner.offers.open, ticket_id, digest_of(sealed), "r") is Failure.EXPIRED


def test_blocks_are_held_until_the_last_reader_has_left():
    owner = Owner()
    sealed, ticket_id, _ = owner.offer(4)
    for reader in ("rank 0", "rank 1"):
        owner.offers.open(ticket_id, digest_of(sealed), reader)
    owner.offers.leave(ticket_id, "rank 1")
    owner.offers.leave(ticket_id, "rank 1")
    assert owner.release_ended() == []
    owner.offers.leave(ticket_id, "rank 0")
    assert owner.release_ended() == [Failure.LOST]


def test_a_release_ends_the_offer_for_all():
    owner = Owner()
    sealed, ticket_id, _ = owner.offer(4)
    owner.offers.open(ticket_id, digest_of(sealed), "r")
    owner.offers.release(ticket_id)
    owner.offers.leave(ticket_id, "r")
    assert owner.release_ended() == [None]
    assert owner.failure(owner.offers.verify, ticket_id) is Failure.ENDED


def test_the_owner_takes_one_offer_back_or_all():
    owner = Owner()
    first, second, third = (owner.offer(2)[1] for _ in range(3))
    owner.offers.withdraw("the request was aborted", second)
    assert owner.release_ended() == [Failure.ENDED]
    with pytest.raises(TransferError, match="the request was aborted"):
        owner.offers.verify(second)
    owner.offers.withdraw("new weights")
    assert owner.release_ended() == [Failure.ENDED] * 2
    assert {owner.failure(owner.offers.progress, one) for one in (first, third)} == {Failure.ENDED}


def test_blocks_that_hold_something_else_are_stale():
    """The owner released offered blocks by mistake, and they were reused."""
    owner = Owner(num_blocks=4)
    sealed, ticket_id, blocks = owner.offer(4)
    owner.offers.open(ticket_id, digest_of(sealed), "r")
    owner.offers.verify(ticket_id)
    owner.pool.release(blocks)
    owner.offers.verify(ticket_id)  # nobody has taken them yet
    owner.pool.try_allocate(1)
    assert owner.failure(owner.offers.verify, ticket_id) is Failure.STALE
    assert owner.failure(owner.offers.open, ticket_id, digest_of(sealed), "s") is Failure.STALE


@pytest.mark.parametrize("keys", [None, [b"k"]])
def test_a_reset_of_the_cache_makes_offers_stale(keys):
    """After new weights the bytes of held blocks stay, but belong to the old weights."""
    owner = Owner()
    _, ticket_id, blocks = owner.offer(2)
    owner.pool.register(blocks[1], b"k")
    owner.pool.reset(keys)
    assert owner.failure(owner.offers.verify, ticket_id) is Failure.STALE


def test_another_ticket_under_the_same_id_is_forged():
    owner = Owner()
    sealed, ticket_id, _ = owner.offer(2)
    wrong = bytes(16)
    assert owner.failure(owner.offers.open, ticket_id, wrong, "r") is Failure.FORGED
    assert owner.failure(owner.offers.open, bytes(16), digest_of(sealed), "r") is Failure.UNKNOWN
    owner.offers.leave(ticket_id, "r")  # a reader that was not let in can't end anything
    owner.offers.verify(ticket_id)


def test_what_is_remembered_of_ended_offers_has_a_bound(monkeypatch):
    monkeypatch.setattr("shoal.kv.transfer.offers.REMEMBERED", 3)
    owner = Owner()
    ids = []
    for _ in range(5):
        ids.append(owner.offer(1)[1])
        owner.offers.withdraw("over")
        owner.release_ended()
    assert [owner.failure(owner.offers.progress, one) for one in ids] == [
        *[Failure.UNKNOWN] * 2,
        *[Failure.ENDED] * 3,
    ]


@pytest.mark.parametrize("seed", range(20))
def test_random_traces_lose_no_block(seed):
    """Requests share prefixes, are offered, read, left, renewed and forgotten; the pool's counts agree after
    each step, and a verify fails exactly when the offer has ended."""
    print(f"seed {seed}")
    rng, owner = random.Random(seed), Owner(num_blocks=24, lease_s=10)
    live, readers = {}, {}
    for step in range(300):
        owner.now += rng.choice((0, 0.1, 3))
        action = rng.randrange(7)
        if action == 0:
            shared = rng.sample(rng.choice(list(live.values()))[1], 1) if live and rng.random() < 0.5 else []
            blocks = owner.pool.try_allocate(rng.randint(1, 4), shared)
            if blocks is not None:
                sealed = owner.offers.offer(blocks)
                live[unseal(sealed).id] = (sealed, blocks)
        elif live:
            ticket_id = rng.choice(list(live))
            sealed, _ = live[ticket_id]
            try:
                if action == 1:
                    owner.offers.open(ticket_id, digest_of(sealed), step)
                    readers.setdefault(ticket_id, []).append(step)
                elif action == 2 and readers.get(ticket_id):
                    owner.offers.leave(ticket_id, readers[ticket_id].pop())
                elif action == 3:
                    owner.offers.release(ticket_id)
                elif action == 4:
                    owner.offers.advance(ticket_id, rng.randint(0, 4), rng.randint(0, 3))
                    owner.offers.renew(ticket_id)
                elif action == 5:
                    owner.offers.withdraw("over", ticket_id)
                else:
                    owner.offers.verify(ticket_id)
            except TransferError as error:
                assert error.failure in (Failure.EXPIRED, Failure.ENDED, Failure.LOST)
        owner.offers.expire()
        gone = {one.id for one in owner.offers._ended}
        for ticket_id in gone:
            assert owner.failure(owner.offers.verify, ticket_id) is not Failure.UNKNOWN
            del live[ticket_id]
        owner.release_ended()
    owner.now += 10
    owner.offers.expire()
    owner.release_ended()
    assert owner.pool.num_free == 24 and owner.offers.held() == []
