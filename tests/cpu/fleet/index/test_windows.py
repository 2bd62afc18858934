"""A prefix that windows cut is as long as the worker itself counts it. A failing seed is in the test's output."""

import random

from shoal.fleet.index.indexer import KvIndexer, Overlap, WorkerRank
from shoal.fleet.index.windows import WindowBlocks
from shoal.kv.groups import LayerGroup
from shoal.kv.places import longest_end
from shoal.kv_events import CPU, GPU, BlockRemoved, BlockStored

SIZE = 4
RANK = WorkerRank("a")


def test_random_windows_leave_as_much_as_the_worker_counts():
    for seed in range(2000):
        r = random.Random(seed)
        chain = [r.randrange(2**64) for _ in range(r.randint(0, 40))]
        own, groups, held = WindowBlocks(SIZE), [], []
        for g in range(r.randint(1, 3)):
            window, multiple, share = (
                r.choice((1, 2, 5, 9, 30)),
                r.choice((1, 2, 4)),
                r.choice((0.3, 0.7, 0.95)),
            )
            there = {i for i in range(len(chain) // multiple) if r.random() < share}
            own.store(g, window, multiple, ((i, chain[(i + 1) * multiple - 1]) for i in there))
            groups.append(LayerGroup((), SIZE * multiple, window))
            held.append(there)
        expected = longest_end(groups, len(chain) * SIZE, lambda place: place.number in held[place.group])  # noqa: B023
        assert own.longest(chain, len(chain)) * SIZE == expected, seed


def test_a_removed_block_ends_a_prefix_within_the_window_alone():
    chain = list(range(100, 120))
    own = WindowBlocks(16)
    own.store(0, 33, 1, ((block - 100, block) for block in chain))
    own.remove(0, 4)
    assert own.longest(chain, 20) == 20
    assert own.longest(chain, 7) == 7
    assert own.longest(chain, 6) == 4
    own.remove(0, 99)
    assert own.longest(chain, 4) == 4


def test_a_block_stays_until_its_last_name_is_removed() -> None:
    """Regression: the removal of one of two names took the block away."""
    blocks = WindowBlocks(16)
    blocks.store(1, 16, 1, [(1, 100), (2, 100), (2, 100)])
    blocks.remove(1, 2)
    assert blocks.longest([100], 1) == 1
    blocks.remove(1, 1)
    assert blocks.longest([100], 1) == 0


def run_of(tokens, names, parent=None, medium=GPU, group=None, window=None):
    event = BlockStored(names, parent, tokens, SIZE, None, medium, None)
    event.group_idx, event.kv_cache_spec_sliding_window = group, window
    return event


def test_a_removal_in_an_unknown_group_takes_no_block_of_the_first():
    """Regression: blocks have the same names in all groups, so a listener that had not heard of a group lost the
    first group's blocks with that group's."""
    index, tokens, names = KvIndexer(SIZE), list(range(12)), [1, 2, 3]
    index.apply(RANK, run_of(tokens, names))
    index.apply(RANK, BlockRemoved([1, 2], GPU, 1))
    assert index.find_matches(tokens) == {RANK: Overlap(3)}
    index.apply(RANK, BlockRemoved([3], GPU))
    assert index.find_matches(tokens) == {RANK: Overlap(2)}


def test_windows_cut_the_blocks_of_lower_tiers():
    """Regression: a prefix in host memory counted whole, though the blocks of its windows were nowhere."""
    index, tokens, names = KvIndexer(SIZE), list(range(16)), [1, 2, 3, 4]
    index.apply(RANK, run_of(tokens, names))
    index.apply(RANK, run_of(tokens, names, group=1, window=6))
    index.apply(RANK, run_of(tokens, names, medium=CPU))
    index.apply(RANK, run_of(tokens[:8], names[:2], medium=CPU, group=1, window=6))
    assert index.find_matches(tokens) == {RANK: Overlap(4)}
    index.apply(RANK, BlockRemoved(names, GPU))
    index.apply(RANK, BlockRemoved([2, 4], GPU, 1))
    assert index.find_matches(tokens) == {RANK: Overlap(0, 3)}  # block 3 is on the device, block 2 below
    index.apply(RANK, BlockRemoved([3], GPU, 1))
    assert index.find_matches(tokens) == {RANK: Overlap(0, 2)}
    index.apply(RANK, BlockRemoved([2], CPU, 1))
    assert index.find_matches(tokens) == {RANK: Overlap(0, 1)}


def test_windows_of_all_layers_are_counted_in_lower_tiers():
    index, tokens, names = KvIndexer(SIZE), list(range(16)), [1, 2, 3, 4]
    for medium in (GPU, CPU):
        index.apply(RANK, run_of(tokens, names, medium=medium, window=6))
    index.apply(RANK, BlockRemoved([1, 2], GPU))
    index.apply(RANK, BlockRemoved([1], CPU))
    assert index.find_matches(tokens) == {RANK: Overlap(4)}
    assert index.find_matches(tokens[:12]) == {RANK: Overlap(0, 3)}
    assert index.find_matches(tokens[:8]) == {}


def test_an_engine_that_reports_no_windows_below_the_device_is_not_cut_there():
    index, tokens, names = KvIndexer(SIZE), list(range(16)), [1, 2, 3, 4]
    index.apply(RANK, run_of(tokens, names))
    index.apply(RANK, run_of(tokens[:8], names[:2], group=1, window=6))
    assert index.find_matches(tokens) == {RANK: Overlap(2)}
    index.apply(RANK, run_of(tokens, names, medium=CPU))
    assert index.find_matches(tokens) == {RANK: Overlap(2, 2)}


def test_blocks_that_the_index_forgets_leave_the_windows_of_their_tier():
    """Regression: a block forgotten for the bound on a lower tier stayed in the windows there."""
    index, tokens = KvIndexer(SIZE, max_blocks=4), list(range(8 * SIZE))
    for first in range(8):
        own = tokens[first * SIZE : (first + 1) * SIZE]
        index.apply(RANK, run_of(own, [first + 1], medium=CPU, window=6))
    assert index.num_blocks(RANK) == 4
    found = [index.find_matches(tokens[i * SIZE : (i + 1) * SIZE]) for i in range(8)]
    assert found == [{}] * 4 + [{RANK: Overlap(0, 1)}] * 4
