"""The order in which blocks go, and how often they were seen: against naive oracles, and bounded."""

import random
from collections import Counter

import pytest

from shoal.errors import ConfigError
from shoal.kv.tiers.eviction import MAX_USES, EvictionOrder, FrequencySketch


def key(i):
    return random.Random(i).randbytes(16)


def drain(order):
    """Returns all keys in the order of eviction."""
    found = []
    while (coldest := order.coldest()) is not None:
        found.append(coldest)
        order.discard(coldest)
    assert not order.keys()
    return found


def used(policy, *names):
    order = EvictionOrder(policy)
    for name in names:
        order.use(key(name))
    return order


def test_lru_is_the_order_of_last_use():
    order = used("lru", 1, 2, 3, 1, 4, 2)
    order.discard(key(4))
    order.discard(key(9))
    assert drain(order) == [key(3), key(1), key(2)]


def test_lfu_is_the_order_of_uses_then_of_last_use():
    order = used("lfu", 1, 2, 3, 1, 4, 2, 1, 5)
    order.discard(key(4))
    order.discard(key(9))
    assert drain(order) == [key(3), key(5), key(2), key(1)]


def test_lfu_forgets_the_uses_of_what_has_left():
    order = used("lfu", 1, 1, 1, 2, 2)
    order.discard(key(1))
    order.use(key(1))
    assert drain(order) == [key(1), key(2)]


def test_old_fame_fades():
    order = used("lfu", *["star"] * MAX_USES, *range(40), *list(range(40)) * 18)
    assert order.coldest() == key("star"), "all others were used more since"


def test_heads_go_after_the_tails_that_follow_them_and_are_then_as_old_as_they_are():
    order = used("lru", "head", "a1", "a2", "b1", "other", "b2")
    for name, parent in (("a1", "head"), ("a2", "a1"), ("b1", "head"), ("b2", "b1")):
        order.follow(key(name), key(parent))
    order.use(key("head"))
    assert drain(order) == [key(name) for name in ("a2", "a1", "other", "b2", "b1", "head")]


def test_a_parent_may_come_after_its_child():
    order = used("lru", "child")
    order.follow(key("child"), key("parent"))
    order.use(key("parent"))
    order.check()
    assert drain(order) == [key("child"), key("parent")]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("seed", range(5))
def test_random_uses_agree_with_a_naive_order(seed, policy):
    print(f"seed {seed}")
    r, order = random.Random(seed), EvictionOrder(policy)
    uses, last, parents, since = {}, {}, {}, 0
    for now in range(2000):
        i = r.randrange(40)
        k = key(i)
        if r.random() < 0.15:
            order.discard(k)
            for book in (uses, last, parents):
                book.pop(k, None)
        else:
            order.use(k)
            uses[k] = min(uses.get(k, 0) + 1, MAX_USES)
            last[k] = now
            since += 1
            if since >= 10 * max(len(uses), MAX_USES) and policy == "lfu":
                since = 0
                uses = {k: n // 2 for k, n in uses.items()}
            if i and r.random() < 0.3:
                order.follow(k, key((i - 1) // 2))
                parents.setdefault(k, key((i - 1) // 2))
        leaves = uses.keys() - set(parents.values())
        order.check()
        assert order.keys() == uses.keys()
        assert order.coldest() == min(
            leaves, key=lambda k: (uses[k] if policy == "lfu" else 0, last[k]), default=None
        )


def test_an_unknown_policy_is_named():
    with pytest.raises(ConfigError, match=r"kv_eviction_policy must be lru or lfu, got 'mru'"):
        EvictionOrder("mru")


@pytest.mark.parametrize("seed", range(3))
def test_the_sketch_is_never_too_low_and_rarely_too_high(seed):
    print(f"seed {seed}")
    r, sketch, true = random.Random(seed), FrequencySketch(1000), Counter()
    for _ in range(4000):
        k = key(int(r.paretovariate(0.6)) % 2000)
        count = sketch.add(k)
        true[k] += 1
        assert count == sketch.count(k) or count == 255
    assert all(sketch.count(k) >= min(n, 255) for k, n in true.items())
    assert sum(sketch.count(k) > n for k, n in true.items() if n < 255) < len(true) / 20
    assert sum(sketch.count(key(f"new {i}")) > 0 for i in range(1000)) < 200


def test_the_sketch_finds_keys_seen_twice():
    sketch = FrequencySketch(100)
    assert [sketch.add(key(i)) >= 2 for i in (1, 2, 1, 3, 2, 4)] == [False, False, True, False, True, False]


def test_counts_halve_after_ten_additions_for_each_key_of_the_capacity():
    sketch = FrequencySketch(10)
    for _ in range(99):
        sketch.add(key(1))
    assert sketch.count(key(1)) == 99
    sketch.add(key(1))
    assert sketch.count(key(1)) == 50


def test_the_sketch_does_not_grow():
    sketch = FrequencySketch(16)
    sizes = [len(row) for row in sketch._rows]
    for i in range(5000):
        sketch.add(key(i))
    assert [len(row) for row in sketch._rows] == sizes == [32] * 4
