"""The block pool: order of re-use, what is found, what is safe from eviction, and books that balance."""

import random
from collections import Counter

import pytest

from shoal.kv.blocks import BlockPool


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
    full = keyed(pool, 3)                          # 0 1 2: full, findable
    partial = pool.try_allocate(1)                 # 3: the sequence's unfinished tail
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
    pool.release(pool.try_allocate(0, shared=pool.match(keys(2, "b"))))    # a hit makes them young again
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
    assert pool.try_allocate(3, shared=hits) is None        # 4 are free, but 2 of them are the hits
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
    first, second = keyed(pool, 1), keyed(pool, 1)
    assert pool.match(keys(1)) == first
    pool.release(second)
    assert pool.free_blocks()[0] == second[0], "the copy is worth nothing, so it goes first"
    pool.release(first)
    assert pool.match(keys(1)) == first


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


@pytest.mark.parametrize("damage", [
    lambda pool: pool._ref_counts.__setitem__(0, 2),
    lambda pool: pool._keys.__setitem__(0, key("other")),
    lambda pool: pool._next.__setitem__(2, 5),
    lambda pool: setattr(pool, "num_free", 3),
], ids=["reference", "key", "list", "count"])
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
    """What the pool must do, with lists and without cleverness."""

    def __init__(self, num_blocks):
        self.free, self.keys, self.refs = list(range(num_blocks)), {}, Counter()

    def match(self, wanted):
        found = []
        for k in wanted:
            if k not in self.keys.values():
                break
            found.append(next(b for b in self.keys if self.keys[b] == k))
        return found

    def try_allocate(self, n, shared):
        if n > len(set(self.free) - set(shared)):
            return None
        self.free = [b for b in self.free if b not in shared]
        new, self.free = self.free[:n], self.free[n:]
        for block in new:
            self.keys.pop(block, None)
        self.refs.update([*shared, *new])
        return [*shared, *new]

    def register(self, block, k):
        if k not in self.keys.values():
            self.keys[block] = k

    def release(self, blocks):
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free.insert(len(self.free) if block in self.keys else 0, block)


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_agree_with_a_naive_pool(seed):
    print(f"seed {seed}")
    r = random.Random(seed)
    num_blocks = r.randint(1, 12)
    pool, naive = BlockPool(num_blocks), NaivePool(num_blocks)
    held: list[list[int]] = []
    for _ in range(500):
        action = r.random()
        if action < 0.5:
            wanted = keys(r.randint(0, 4), r.choice("ab"))
            hits = pool.match(wanted)
            assert hits == naive.match(wanted)
            n = r.randint(0, 4)
            blocks = pool.try_allocate(n, shared=hits)
            assert blocks == naive.try_allocate(n, hits)
            if blocks is not None:
                held.append(blocks)
                name = r.choice("ab")
                for i in range(len(hits), r.randint(len(hits), len(blocks))):
                    pool.register(blocks[i], key(f"{name}{i}"))
                    naive.register(blocks[i], key(f"{name}{i}"))
        elif action < 0.98 and held:
            blocks = held.pop(r.randrange(len(held)))
            pool.release(blocks)
            naive.release(blocks)
        elif action >= 0.98:
            assert pool.reset() == (not any(held))
            naive.keys.clear()
        pool.check(block for blocks in held for block in blocks)
        assert pool.free_blocks() == naive.free
