"""The host tier's index: eviction, its order, and held blocks that are never reused."""

import itertools
import random
from collections import Counter

import pytest

from shoal.errors import ConfigError
from shoal.kv.tiers.host import HostTier
from tests.made_blocks import chain, keys_of


def store(tier, metas):
    """Stores blocks, as the end of a copy from the device does."""
    host_blocks = tier.take(len(metas))
    assert host_blocks is not None
    for host_block, meta in zip(host_blocks, metas):
        tier.put(host_block, meta)
    tier.release(host_blocks)
    return host_blocks


def find(tier, metas):
    """Returns the host blocks of the first of these blocks, up to one that is not stored."""
    return list(itertools.takewhile(lambda found: found is not None, (tier.find(meta.key) for meta in metas)))


def test_what_was_put_is_found_with_its_metadata():
    tier, metas = HostTier(4), chain(3)
    host_blocks = store(tier, metas)
    assert find(tier, metas) == host_blocks and tier.find(b"?" * 16) is None
    assert tier.meta(metas[2].key) is metas[2] and tier.meta(b"?" * 16) is None
    assert tier.num_free == 4 and tier.num_blocks == 3
    tier.check([])


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_cold_blocks_that_are_written_to_a_file_stay_cold(policy):
    tier, a, b = HostTier(6, policy), chain(3, "a"), chain(3, "b")
    store(tier, a)
    store(tier, b)
    before = tier.coldest(9)
    written = [host_block for host_block, _ in before[:4]]
    tier.hold(written, use=False)
    tier.hold(written[:2], use=False)
    tier.release(written, coldest=True)
    tier.release(written[:2], coldest=True)
    assert tier.coldest(9) == before
    tier.check([])


def test_the_least_recently_used_goes_first_and_tails_before_heads():
    tier, a, b = HostTier(6), chain(3, "a"), chain(3, "b")
    store(tier, a)
    store(tier, b)
    hits = find(tier, a)
    tier.hold(hits)
    tier.release(hits)
    assert [meta for _, meta in tier.coldest(9)] == [*reversed(b), *reversed(a)]
    tier.take(4)
    assert find(tier, b) == [] and find(tier, a) == hits[:2]


def test_lfu_keeps_what_is_used_often_though_long_ago():
    tier, often, lately = HostTier(4, "lfu"), chain(2, "a"), chain(2, "b")
    store(tier, often)
    for _ in range(3):
        hits = find(tier, often)
        tier.hold(hits)
        tier.release(hits)
    store(tier, lately)
    assert [meta for _, meta in tier.coldest(9)] == [*reversed(lately), *reversed(often)]
    tier.check([])


def test_lfu_fame_fades():
    tier, star, others = HostTier(4, "lfu"), chain(1, "star"), chain(3, "others")
    store(tier, star)
    for _ in range(20):
        tier.hold(host_blocks := find(tier, star))
        tier.release(host_blocks)
    store(tier, others)
    for _ in range(60):
        tier.hold(host_blocks := find(tier, others))
        tier.release(host_blocks)
    tier.check([])
    assert tier.coldest(1)[0][1] == star[0]


def test_held_host_blocks_are_never_given_away():
    tier, metas = HostTier(3), chain(2)
    host_blocks = store(tier, metas)
    tier.hold(host_blocks[:1])
    assert tier.take(3) is None and tier.take(2) is not None
    assert tier.find(metas[0].key) == host_blocks[0] and tier.find(metas[1].key) is None


def test_a_host_block_that_is_being_filled_is_not_found_before_it_is_put():
    tier, metas = HostTier(2), chain(1)
    host_blocks = tier.take(1)
    assert find(tier, metas) == [] and tier.num_free == 1
    tier.release(host_blocks)  # the copy failed
    assert tier.num_free == 2 and tier.num_blocks == 0
    tier.check([])


def test_of_two_host_blocks_with_one_content_the_first_that_is_held_is_found():
    tier, metas = HostTier(3), chain(1)
    first, second = tier.take(2)
    assert tier.put(first, metas[0]) == first and tier.put(second, metas[0]) == first
    tier.release([first])
    assert tier.find(metas[0].key) == second and tier.meta(metas[0].key) == metas[0]
    tier.release([second])
    tier.check([])
    assert tier.num_blocks == 1


def test_forgotten_blocks_are_not_found_and_held_ones_stay_held():
    tier, metas = HostTier(4), chain(3)
    host_blocks = store(tier, metas)
    tier.hold(host_blocks[:1])
    tier.forget()
    assert tier.num_blocks == 0 and all(tier.find(meta.key) is None for meta in metas)
    tier.check(host_blocks[:1])
    tier.release(host_blocks[:1])
    tier.check([])


def test_events_say_what_came_and_went():
    tier, metas = HostTier(2, record_events=True), chain(3)
    store(tier, metas[:2])
    store(tier, metas[2:])
    tier.forget()
    assert (
        tier.take_events() == [*metas[:2], metas[1].key, metas[2], metas[0].key, metas[2].key]
        and tier.take_events() == []
    )


def test_without_recording_there_are_no_events():
    tier = HostTier(2)
    store(tier, chain(2))
    assert tier.take_events() == []


def test_an_unknown_policy_is_named():
    with pytest.raises(ConfigError, match=r"kv_eviction_policy must be lru or lfu, got 'fifo'"):
        HostTier(2, "fifo")


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("seed", range(6))
def test_random_operations_never_lose_or_mix_blocks(seed, policy):
    """A slab of plain Python beside it: what a host block that is found holds must be the block it is found
    for."""
    print(f"seed {seed}")
    r = random.Random(seed)
    tier = HostTier(r.randint(1, 12), policy, record_events=True)
    metas = [meta for s in range(4) for meta in chain(5, s)]
    slab: list[object] = [None] * tier.capacity
    copies: list[tuple[list[int], list]] = []  # host_blocks that are being filled, and with what
    readers: list[list[int]] = []
    reported = set()
    for _ in range(1500):
        action = r.random()
        if action < 0.3:
            wanted = r.sample(metas, r.randint(1, 3))
            busy = {s for c, _ in copies for s in c} | {s for c in readers for s in c}
            host_blocks = tier.take(len(wanted))
            assert (host_blocks is None) == (len(wanted) > tier.capacity - len(busy))
            if host_blocks is not None:
                for host_block in host_blocks:
                    slab[host_block] = "garbage"
                copies.append((host_blocks, wanted))
        elif action < 0.55 and copies:
            host_blocks, wanted = copies.pop(r.randrange(len(copies)))
            if r.random() < 0.8:  # else the copy failed
                for host_block, meta in zip(host_blocks, wanted):
                    slab[host_block] = meta.key
                    tier.put(host_block, meta)
            tier.release(host_blocks)
        elif action < 0.75:
            chosen = chain(5, r.randrange(4))
            host_blocks = find(tier, chosen)
            assert [slab[host_block] for host_block in host_blocks] == keys_of(chosen)[: len(host_blocks)]
            if host_blocks:
                tier.hold(host_blocks)
                readers.append(host_blocks)
        elif action < 0.95 and readers:
            host_blocks = readers.pop(r.randrange(len(readers)))
            tier.release(host_blocks)
        elif action > 0.994:
            tier.forget()
        for event in tier.take_events():
            if isinstance(event, bytes):
                reported.remove(event)
            else:
                reported.add(event.key)
        held = Counter(s for c, _ in copies for s in c) + Counter(s for c in readers for s in c)
        tier.check(held.elements())
        found = {meta.key: host_block for meta in metas if (host_block := tier.find(meta.key)) is not None}
        assert reported == found.keys() and all(slab[host_block] == key for key, host_block in found.items())
