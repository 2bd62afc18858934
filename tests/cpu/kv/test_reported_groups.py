"""Blocks of groups that are reported as one are there when all parts are. A failing seed is in the test's output."""

import random

import pytest

from shoal.hashing import extend_keys, group_key, root_key
from shoal.kv.events.reported_groups import LongBlocks, ReportedGroups
from shoal.kv.events.tier_blocks import tier_blocks
from shoal.kv.groups import LayerGroup
from shoal.kv.tiers.block_file import BlockMeta

CHAIN = [bytes([i]) * 16 for i in range(16)]


def test_groups_with_shorter_blocks_are_reported_in_blocks_of_the_first_group():
    """Regression: Gemma 4 31B's layers with a window were not reported, as their blocks are shorter."""
    reported = ReportedGroups([LayerGroup((), 16), LayerGroup((), 4, 32), LayerGroup((), 4, 32)], 4)
    assert reported.units == [16, 16, 16]
    assert reported.alike == [[0], [1, 2], [1, 2]]
    assert reported.parts(CHAIN, 1, 2) == [group_key(key, g) for g in (1, 2) for key in CHAIN[4:8]]
    assert reported.parts(CHAIN, 1, 0) == [CHAIN[7]]


def test_a_group_that_sees_everything_with_longer_blocks_is_not_reported():
    reported = ReportedGroups([LayerGroup((), 4), LayerGroup((), 8), LayerGroup((), 8, 9)], 4)
    assert reported.alike == [[0], [], [2]]
    assert list(tier_blocks(reported)) == [0, 2]


def test_a_block_is_known_by_each_key_in_it():
    long = LongBlocks()
    blocks = CHAIN[:4], [*CHAIN[:2], *CHAIN[8:10]], CHAIN[4:8]
    for keys in blocks:
        long.add(keys)
    assert long.with_key(CHAIN[2]) == [CHAIN[3]]
    assert set(long.with_key(CHAIN[0])) == {CHAIN[3], CHAIN[9]}
    for keys in blocks:
        long.remove(keys[-1])
        assert keys[-1] not in long.with_key(keys[0])
    assert not long._keys and not long._around


@pytest.mark.parametrize("multiples", [(1, 1, 1), (4, 1, 1), (4, 2, 1), (2, 2, 1)], ids=str)
def test_a_block_in_a_tier_is_reported_while_all_groups_have_it(multiples):
    """Three groups, two of them alike, against a naive oracle."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    r, step = random.Random(seed), multiples[0]
    groups = [LayerGroup((), 4 * size, window) for size, window in zip(multiples, (None, 64, 64))]
    blocks = tier_blocks(ReportedGroups(groups, 4))[1]
    chains = []  # (group, number) -> block, of three sequences with common starts
    tokens = [list(range(32)), [*range(24), *range(8)], [*range(9), *range(23)]]
    for ids in tokens:
        keys: list[bytes] = []
        extend_keys(keys, root_key(), ids, 4)
        own = {}
        for g, size in enumerate(multiples):
            for n in range(8 // size):
                key, parent = keys[(n + 1) * size - 1], keys[n * size - 1] if n else None
                part = ids[n * size * 4 : (n + 1) * size * 4]
                own[g, n] = BlockMeta(group_key(key, g), parent and group_key(parent, g), part, group=g)
        chains.append(own)
    there, published = set(), set()
    for _ in range(3000):
        own = r.choice(chains)
        block = own[r.choice(list(own))]
        if r.random() < 0.6:
            there.add(block.key)
            published |= {found.key for found in blocks.stored(block)}
        elif block.key in there:
            there.remove(block.key)
            published -= set(blocks.removed(block.key))
        expected = {
            own[0, n].key
            for own in chains
            for n in range(8 // step)
            if (multiples[1] == step == multiples[2] or own[0, n].key in there)
            and all(
                own[g, i].key in there
                for g in (1, 2)
                for i in range(n * step // multiples[g], (n + 1) * step // multiples[g])
            )
        }
        assert published == expected
