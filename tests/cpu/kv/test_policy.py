"""The order in which blocks go, and how often they were seen: against naive oracles, and bounded."""

import random
from collections import Counter

import pytest

from shoal.errors import ConfigError
from shoal.kv.policy import MAX_USES, FrequencySketch, LfuOrder, LruOrder, make_order


def key(i):
    return random.Random(i).randbytes(16)


def test_lru_is_the_order_of_last_use():
    order = LruOrder()
    for i in (1, 2, 3, 1, 4, 2):
        order.use(key(i))
    order.discard(key(4))
    order.discard(key(9))
    assert list(order) == [key(3), key(1), key(2)] and len(order) == 3


def test_lfu_is_the_order_of_uses_then_of_last_use():
    order = LfuOrder()
    for i in (1, 2, 3, 1, 4, 2, 1, 5):
        order.use(key(i))
    order.discard(key(4))
    order.discard(key(9))
    assert list(order) == [key(3), key(5), key(2), key(1)] and len(order) == 4


def test_lfu_forgets_the_uses_of_what_has_left():
    order = LfuOrder()
    for i in (1, 1, 1, 2, 2):
        order.use(key(i))
    order.discard(key(1))
    order.use(key(1))
    assert list(order) == [key(1), key(2)]


def test_old_fame_fades():
    order = LfuOrder()
    for _ in range(MAX_USES):
        order.use(key("star"))
    for i in range(40):
        order.use(key(i))
    for _ in range(8):
        for i in range(40):
            order.use(key(i))
    for _ in range(10):
        for i in range(40):
            order.use(key(i))
    assert next(iter(order)) == key("star"), "all others were used more since"


@pytest.mark.parametrize("seed", range(5))
def test_lfu_agrees_with_a_naive_order(seed):
    print(f"seed {seed}")
    r, order, uses, last = random.Random(seed), LfuOrder(), {}, {}
    since = 0
    for now in range(3000):
        k = key(r.randrange(30))
        if r.random() < 0.1:
            order.discard(k)
            uses.pop(k, None)
            last.pop(k, None)
            continue
        order.use(k)
        uses[k] = min(uses.get(k, 0) + 1, MAX_USES)
        last[k] = now
        since += 1
        if since >= 10 * max(len(uses), MAX_USES):
            since = 0
            ranked = sorted(uses, key=lambda k: (uses[k], last[k]))
            uses = {k: max(1, n // 2) for k, n in uses.items()}
            last = {k: i - len(ranked) for i, k in enumerate(ranked)}    # of now equal ones, the former lesser goes first
        assert list(order) == sorted(uses, key=lambda k: (uses[k], last[k]))


def test_an_unknown_policy_is_named():
    with pytest.raises(ConfigError, match=r"'mru'.*lru or lfu"):
        make_order("mru")
    assert isinstance(make_order("lru"), LruOrder) and isinstance(make_order("lfu"), LfuOrder)


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


def test_the_sketch_tells_who_was_seen_twice():
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
