"""The block pool: order of re-use, what is found, what is safe from eviction, and counts that add up."""

import random
from collections import Counter

import pytest

from shoal.errors import NoFreeBlocksError
from shoal.kv.blocks import PRIORITIES, BlockPool
from shoal.kv.library.handles import prepare_prefill


def key(name):
    return str(name).encode()


def keyed(pool, num_blocks, name="k"):
    """Allocates blocks and registers them as name0, name1, ..."""
    blocks = pool.try_allocate(num_blocks)
    for i, block in enumerate(blocks):
        pool.register(block, key(f"{name}{i}"))
    return blocks


def keys(n, name="k"):
    return [key(f"{name}{i}") for i in range(n)]


class Listener:
    """A listener that records its calls."""

    def __init__(self):
        self.events = []

    def removed(self, key, block):
        self.events.append(key)

    def cleared(self):
        self.events.append("cleared")


def test_a_new_pool_hands_out_blocks_in_order():
    pool = BlockPool(4)
    assert pool.try_allocate(3) == [0, 1, 2] and pool.num_free == 1
    pool.check([0, 1, 2])


def test_allocation_is_all_or_nothing():
    pool = BlockPool(3)
    pool.try_allocate(2)
    assert pool.try_allocate(2) is None and pool.num_free == 1
    assert pool.try_allocate(0) == []
    pool.check([0, 1])


def test_freed_blocks_are_reused_keyless_ones_first_and_keyed_ones_tail_first():
    pool = BlockPool(10)
    full = keyed(pool, 3)  # 0 1 2: full, findable
    partial = pool.try_allocate(1)  # 3: the sequence's unfinished tail
    pool.release(full + partial)
    assert pool.free_blocks() == [3, 4, 5, 6, 7, 8, 9, 2, 1, 0]


def test_keyless_blocks_are_reused_last_freed_first():
    pool = BlockPool(3)
    a, b, c = pool.try_allocate(3)
    for block in (b, a, c):
        pool.release([block])
    assert pool.free_blocks() == [c, a, b]


def test_keyed_blocks_are_evicted_least_recently_freed_first():
    pool = BlockPool(4)
    first, second = keyed(pool, 2, "a"), keyed(pool, 2, "b")
    pool.release(second)
    pool.release(first)
    assert pool.free_blocks() == [3, 2, 1, 0]
    pool.release(pool.try_allocate(0, shared=pool.match(keys(2, "b"))))  # a hit makes them young again
    assert pool.free_blocks() == [1, 0, 3, 2]


def test_a_freed_block_stays_findable_until_it_is_reused():
    pool = BlockPool(3)
    pool.release(keyed(pool, 2))
    assert pool.match(keys(2)) == [0, 1]
    assert pool.try_allocate(1) == [2] and pool.match(keys(2)) == [0, 1]
    assert pool.try_allocate(1) == [1] and pool.match(keys(2)) == [0]
    assert pool.try_allocate(1) == [0] and pool.match(keys(2)) == []
    pool.check([0, 1, 2])


def test_match_is_the_longest_prefix_and_takes_nothing():
    pool = BlockPool(8)
    blocks = keyed(pool, 4)
    pool.release(blocks)
    assert pool.match([*keys(2), key("other"), key("k3")]) == blocks[:2]
    assert pool.match([key("other"), *keys(4)]) == []
    assert pool.match([]) == [] and pool.num_free == 8
    pool.check([])


def test_shared_blocks_have_one_reference_a_holder():
    pool = BlockPool(6)
    mine = keyed(pool, 2)
    yours = pool.try_allocate(2, shared=pool.match(keys(2)))
    assert yours[:2] == mine and pool.num_free == 2
    pool.check(mine + yours)
    pool.release(mine)
    assert pool.num_free == 2
    pool.release(yours)
    assert pool.num_free == 6
    pool.check([])


def test_hits_are_not_evicted_to_make_room_for_the_rest_of_their_own_sequence():
    pool = BlockPool(4)
    pool.release(keyed(pool, 2))
    hits = pool.match(keys(2))
    assert pool.try_allocate(3, shared=hits) is None  # 4 are free, but 2 of them are the hits
    assert pool.num_free == 4 and pool.match(keys(2)) == hits
    pool.check([])
    assert pool.try_allocate(2, shared=hits) == [0, 1, 2, 3]
    pool.check([0, 1, 2, 3])


def test_hits_held_by_others_do_not_count_as_free():
    pool = BlockPool(4)
    held = keyed(pool, 2)
    assert pool.try_allocate(2, shared=held) is not None and pool.num_free == 0
    pool.check([0, 1, 0, 1, 2, 3])


def test_of_two_blocks_with_equal_content_the_first_stays_findable():
    pool = BlockPool(4)
    [first], [second] = pool.try_allocate(1), pool.try_allocate(1)
    assert pool.register(first, key("k0")) == first
    assert pool.register(second, key("k0")) == first, "the second registration yields the first"
    assert pool.match(keys(1)) == [first]
    pool.release([second])
    assert pool.free_blocks()[0] == second, "the copy is worth nothing, so it goes first"
    pool.release([first])
    assert pool.match(keys(1)) == [first]


def test_a_copy_that_is_still_held_takes_over_when_the_first_is_free():
    listener = Listener()
    pool = BlockPool(4, listener=listener)
    first, second, third = keyed(pool, 1), keyed(pool, 1), keyed(pool, 1)
    pool.check([0, 1, 2])
    pool.release(first)
    assert pool.match(keys(1)) == second and pool.free_blocks()[0] == first[0]
    pool.release(second)
    assert pool.match(keys(1)) == third
    pool.release(third)
    assert pool.match(keys(1)) == third and pool.free_blocks() == [1, 0, 3, 2]
    assert not listener.events, "the content was there all the time"
    pool.check([])


def test_a_held_block_takes_the_key_of_a_free_one_with_equal_content():
    pool = BlockPool(3)
    pool.release(keyed(pool, 1))
    [block] = pool.try_allocate(1)
    assert pool.register(block, key("k0")) == block and pool.match(keys(1)) == [block]
    assert pool.free_blocks() == [0, 2]
    pool.check([block])


def test_what_can_be_found_is_never_evicted_before_its_children():
    """Even if a sequence holds the child, and only a copy of the parent."""
    pool = BlockPool(5)
    parent = keyed(pool, 1, "p")
    own = pool.try_allocate(2)
    pool.register(own[0], key("p0"))
    pool.register(own[1], key("child"))
    pool.release(parent)
    pool.release(own)
    assert [pool.key_of(block) for block in pool.coldest(9)] == [key("child"), key("p0")]
    pool.check([])


def test_the_lowest_priority_is_used_first_and_of_equal_ones_the_oldest():
    def tokens(*priorities):
        pool = BlockPool(4)
        blocks = pool.try_allocate(4)
        # named by the first token of a block of two
        for block, name, priority in zip(blocks, (1, 3, 5, 7), priorities):
            pool.register(block, key(name))
            pool.set_priority([block], priority)
        pool.release(blocks)
        pool.check([])
        return pool

    def order(pool):
        return [int(pool.key_of(block)) for block in pool.coldest(4)]

    pool = tokens(0, 0, 0, 0)
    assert order(pool) == [7, 5, 3, 1]
    pool.set_priority([key(7), key(5)], 1)
    assert order(pool) == [3, 1, 7, 5], "priorities come first, ages stay"
    assert order(tokens(0, 0, 1, 1)) == [3, 1, 7, 5]
    pool.set_priority([key(1)], 1)
    pool.set_priority([key(3), key(9), 0], -1)  # no block has key 9, and block 0 has key 1
    assert order(pool) == [3, 1, 7, 5]
    pool.set_priority(pool.cached_keys(), 0)
    assert order(pool) == [7, 5, 3, 1] == [int(pool.key_of(b)) for b in pool.coldest(2)] + [3, 1]
    taken = pool.try_allocate(4)
    assert taken == [3, 2, 1, 0]
    pool.check(taken)


def test_a_priority_holds_until_the_content_is_forgotten():
    pool = BlockPool(2)
    a, b = keyed(pool, 1, "a"), keyed(pool, 1, "b")
    pool.set_priority(a, 1)  # while it is held
    pool.release(a)
    pool.release(b)
    assert pool.free_blocks() == [1, 0]
    pool.release(pool.try_allocate(0, shared=a))
    assert pool.free_blocks() == [1, 0]
    pool.release(keyed(pool, 2, "c"))
    assert pool.free_blocks() == [0, 1]


@pytest.mark.parametrize("priority", [PRIORITIES[0] - 1, PRIORITIES[-1] + 1, 0.5, None])
def test_an_impossible_priority_is_refused(priority):
    with pytest.raises(ValueError, match=r"priority .* is not an integer from -128 to 127"):
        BlockPool(1).set_priority([], priority)


def test_a_listener_hears_of_evictions_and_resets_only():
    listener = Listener()
    pool = BlockPool(3, listener=listener)
    blocks = keyed(pool, 3)
    pool.release(blocks)
    pool.release(pool.try_allocate(0, shared=pool.match(keys(3))))
    assert listener.events == []
    pool.release(pool.try_allocate(2))
    assert listener.events == [key("k2"), key("k1")]
    assert pool.reset([key("k0"), key("k1")]) and listener.events[2:] == [key("k0")]
    pool.reset()
    assert listener.events[3:] == ["cleared"]


def test_some_keys_can_be_reset():
    pool = BlockPool(4)
    free, held = keyed(pool, 2, "a"), keyed(pool, 1, "b")
    copy = keyed(pool, 1, "b")
    pool.release(free)
    assert pool.reset([key("a1"), key("nobody's")]) is True
    assert pool.match(keys(2, "a")) == free[:1] and pool.free_blocks() == [1, 0]
    assert pool.reset([key("a0"), key("b0")]) is False
    assert pool.cached_keys() == []
    pool.check(held + copy)
    pool.release(held + copy)
    assert pool.free_blocks() == [2, 3, 0, 1]


def test_a_generation_grows_when_a_block_holds_something_else_and_not_before():
    pool = BlockPool(3)
    blocks = keyed(pool, 3, "a")
    before = [pool.generation(block) for block in blocks]

    def grown():
        return [pool.generation(block) - was for block, was in zip(blocks, before)]

    pool.release(blocks)
    pool.hold(pool.match(keys(3, "a")))
    pool.release(blocks)
    assert grown() == [0, 0, 0]
    [taken] = pool.try_allocate(1)
    assert grown() == [int(block == taken) for block in blocks] and sum(grown()) == 1
    pool.release([taken])
    copies = [pool.try_allocate(1)[0] for _ in range(2)]
    before = [pool.generation(block) for block in blocks]
    for copy in copies:
        pool.register(copy, key("b"))
    pool.reset([key("b"), key("nobody's")])
    assert grown() == [int(block in copies) for block in blocks]
    pool.reset()
    assert grown() == [1 + int(block in copies) for block in blocks]


def test_a_prefill_is_prepared_in_one_transaction():
    pool = BlockPool(7)
    held, free = keyed(pool, 2), pool.try_allocate(2)
    pool.register(free[0], key("k2"))
    pool.register(free[1], key("k3"))
    pool.release(free)
    prefill = prepare_prefill(pool, keys(4), 6)  # four full blocks, and two for the rest and its tail
    assert (prefill.in_flight, prefill.matched, prefill.remaining) == (held, free, [4, 5])
    pool.check(held + prefill.blocks)
    pool.release(prefill.blocks)
    with pytest.raises(NoFreeBlocksError, match="4 KV blocks are needed and 3 of 7 are free"):
        prepare_prefill(pool, keys(4), 8)
    pool.check(held)
    assert prepare_prefill(pool, keys(4), 1).blocks == held[:1], "no more than was asked for"
    assert prepare_prefill(pool, [], 0).blocks == []
    with pytest.raises(ValueError, match="-1 blocks"):
        prepare_prefill(pool, keys(4), -1)
    pool.check([*held, *held[:1]])


def test_what_is_where():
    pool = BlockPool(2)
    [block] = keyed(pool, 1)
    assert pool.find(key("k0")) == block and pool.find(key("k1")) is None
    assert pool.key_of(block) == key("k0") and pool.key_of(1) is None
    assert pool.is_held(block) and not pool.is_held(1) and pool.coldest(9) == []
    pool.release([block])
    assert not pool.is_held(block) and pool.coldest(9) == [block] and pool.coldest(0) == []


def test_without_caching_nothing_is_ever_found():
    pool = BlockPool(2, enable_caching=False)
    pool.release(keyed(pool, 2))
    assert pool.match(keys(2)) == []
    assert pool.free_blocks() == [0, 1]


def test_reset_forgets_all_and_says_whether_blocks_were_in_use():
    pool = BlockPool(4)
    pool.release(keyed(pool, 2, "a"))
    held = keyed(pool, 1, "b")
    assert pool.reset() is False
    assert pool.match(keys(2, "a")) == [] and pool.match(keys(1, "b")) == []
    pool.release(held)
    assert pool.reset() is True
    pool.check([])


def test_a_block_is_registered_again_after_a_reset():
    pool = BlockPool(1)
    block = keyed(pool, 1, "a")
    pool.reset()
    pool.register(block[0], key("b"))
    assert pool.match([key("b")]) == block and pool.match([key("a0")]) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._ref_counts.__setitem__(0, 2),
        lambda pool: pool._keys.__setitem__(0, key("other")),
        lambda pool: pool._next.__setitem__(2, 5),
        lambda pool: setattr(pool, "num_free", 3),
    ],
    ids=["reference", "key", "list", "count"],
)
def test_check_sees_damage(damage):
    pool = BlockPool(6)
    held = keyed(pool, 2)
    pool.check(held)
    damage(pool)
    with pytest.raises((AssertionError, KeyError)):
        pool.check(held)


def test_releasing_more_than_is_held_is_caught():
    pool = BlockPool(2)
    blocks = pool.try_allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


class NaivePool:
    """A reference pool that uses lists alone."""

    def __init__(self, num_blocks):
        # free blocks: without key in order, with key by age
        self.without, self.cached = list(range(num_blocks)), []
        # contents: of held copies, too
        self.contents, self.priorities, self.refs, self.reported = {}, Counter(), Counter(), []
        self.findable = {}

    @property
    def free(self):
        return self.without + sorted(self.cached, key=self.priorities.__getitem__)

    def match(self, wanted):
        found = []
        for k in wanted:
            if k not in self.findable:
                break
            found.append(self.findable[k])
        return found

    def try_allocate(self, n, shared):
        if n > len(set(self.free) - set(shared)):
            return None
        new = [b for b in self.free if b not in shared][:n]
        for block in new:
            self.forget(block)
        for blocks in (self.without, self.cached):
            blocks[:] = [b for b in blocks if b not in (*shared, *new)]
        self.refs.update([*shared, *new])
        return [*shared, *new]

    def forget(self, block):
        self.priorities.pop(block, None)
        k = self.contents.pop(block, None)
        if k is not None and self.findable[k] == block:
            del self.findable[k]
            self.reported.append(k)

    def register(self, block, k):
        self.contents[block] = k
        first = self.findable.setdefault(k, block)
        if first != block and not self.refs[first]:
            self.hand_over(first, block)
            self.cached.remove(first)
            self.without.insert(0, first)
        return self.findable[k]

    def hand_over(self, block, heir):
        k = self.contents.pop(block)
        self.findable[k], self.priorities[heir] = heir, self.priorities.pop(block, 0)

    def release(self, blocks, coldest=False):
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            k = self.contents.get(block)
            heirs = [b for b, other in self.contents.items() if other == k and b != block and self.refs[b]]
            if k is not None and self.findable[k] != block:
                del self.contents[block]
            elif k is not None and heirs:
                self.hand_over(block, heirs[0])
            if block in self.contents:
                self.cached.insert(0 if coldest else len(self.cached), block)
            else:
                self.without.insert(0, block)

    def set_priority(self, wanted, priority):
        for k in wanted:
            if k in self.findable:
                self.priorities[self.findable[k]] = priority

    def reset(self, wanted):
        if wanted is None:
            self.without, self.cached = self.free, []
            self.contents, self.findable, self.priorities = {}, {}, Counter()
            self.reported.append("cleared")
            return not +self.refs
        idle = True
        for k in wanted:
            block = self.findable.get(k)
            if block is None:
                continue
            self.forget(block)
            self.contents = {b: other for b, other in self.contents.items() if other != k}
            idle &= not self.refs[block]
            if not self.refs[block]:
                self.cached.remove(block)
                self.without.insert(0, block)
        return idle


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_agree_with_a_naive_pool(seed):
    print(f"seed {seed}")
    r = random.Random(seed)
    num_blocks, listener = r.randint(1, 12), Listener()
    pool, naive = BlockPool(num_blocks, listener=listener), NaivePool(num_blocks)
    held: list[list[int]] = []
    for _ in range(1000):
        action = r.random()
        if action < 0.45:
            wanted, n, name = keys(r.randint(0, 4), r.choice("ab")), r.randint(0, 4), r.choice("ab")
            hits = pool.match(wanted)
            assert hits == naive.match(wanted)
            num_in_flight = next((i for i, block in enumerate(hits) if not naive.refs[block]), len(hits))
            expected = naive.try_allocate(n, hits)
            if r.random() < 0.5:
                blocks = pool.try_allocate(n, shared=hits)
            else:
                try:
                    prefill = prepare_prefill(pool, wanted, len(hits) + n)
                    assert [len(prefill.in_flight), len(prefill.remaining)] == [num_in_flight, n]
                    blocks = prefill.blocks
                except NoFreeBlocksError:
                    blocks = None
            assert blocks == expected
            if blocks is not None:
                held.append(blocks)
                for i in range(len(hits), r.randint(len(hits), len(blocks))):
                    assert pool.register(blocks[i], key(f"{name}{i}")) == naive.register(
                        blocks[i], key(f"{name}{i}")
                    )
        elif action < 0.9 and held:
            blocks, coldest = held.pop(r.randrange(len(held))), seed % 2 and r.random() < 0.3
            pool.release(blocks, coldest)
            naive.release(blocks, coldest)
        # `coldest` and ages of other priorities have no common order
        elif 0.9 <= action < 0.96 and not seed % 2:
            wanted, priority = keys(r.randint(0, 8), r.choice("ab")), r.randint(-1, 1)
            pool.set_priority(
                [pool.find(k) if pool.find(k) is not None and r.random() < 0.5 else k for k in wanted],
                priority,
            )
            naive.set_priority(wanted, priority)
        elif action >= 0.96:
            wanted = None if action > 0.98 else [key(f"{r.choice('ab')}{r.randrange(8)}") for _ in range(3)]
            assert pool.reset(wanted) == naive.reset(wanted)
        pool.check(block for blocks in held for block in blocks)
        assert (
            pool.free_blocks() == naive.free
            and pool.coldest(3) == [b for b in naive.free if b in naive.findable.values()][:3]
        )
        assert pool._key_to_block == naive.findable and listener.events == naive.reported
