"""Blocks of groups that are reported as one are there when all parts are. A failing seed is in the test's output."""

import random

from shoal.hashing import group_key
from shoal.kv.events.reported_groups import LongBlocks, ReportedGroups, TierBlocks
from shoal.kv.groups import LayerGroup

CHAIN = [bytes([i]) * 16 for i in range(16)]


def test_groups_with_shorter_blocks_are_reported_in_blocks_of_the_first_group():
    """Regression: Gemma 4 31B's layers with a window were not reported, as their blocks are shorter."""
    reported = ReportedGroups([LayerGroup((), 16), LayerGroup((), 4, 32), LayerGroup((), 4, 32)], 4)
    assert reported.units == [16, 16, 16]
    assert reported.alike == [[0], [1, 2], [1, 2]]
    assert reported.parts(CHAIN, 1, 2) == [group_key(key, g) for g in (1, 2) for key in CHAIN[4:8]]
    assert reported.parts(CHAIN, 1, 0) == [CHAIN[7]]
    assert reported.in_tiers() == {0: [0]}


def test_a_group_that_sees_everything_with_longer_blocks_is_not_reported():
    reported = ReportedGroups([LayerGroup((), 4), LayerGroup((), 8), LayerGroup((), 8, 9)], 4)
    assert reported.alike == [[0], [], [2]]
    assert reported.in_tiers() == {0: [0], 2: [2]}


def test_a_long_block_ends_with_the_first_of_its_parts_that_is_lost():
    long = LongBlocks()
    long.add(CHAIN[:4])
    long.add([*CHAIN[:2], *CHAIN[8:10]])
    long.add(CHAIN[4:8])
    assert long.around(CHAIN[2]) == [CHAIN[3]]
    assert long.around(CHAIN[0]) == [CHAIN[9]]
    assert long.around(CHAIN[0]) == long.around(CHAIN[3]) == []
    assert long.around(CHAIN[7]) == [CHAIN[7]]
    assert not long._keys and not long._around


def test_a_block_in_a_tier_is_reported_while_all_groups_have_it():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    r = random.Random(seed)
    blocks, there, is_published = TierBlocks([1, 3]), set(), set()
    for _ in range(2000):
        of_chain, group = r.choice(CHAIN[:5]), r.choice((1, 3))
        key = group_key(of_chain, group)
        if r.random() < 0.5:
            there.add((of_chain, group))
            if blocks.stored(key, group):
                is_published.add(of_chain)
        elif (of_chain, group) in there:
            there.remove((of_chain, group))
            is_published.discard(blocks.removed(key))
        else:
            assert blocks.removed(key) is None
        assert is_published == {key for key in CHAIN if {(key, 1), (key, 3)} <= there}
