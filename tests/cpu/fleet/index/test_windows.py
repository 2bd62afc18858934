"""A prefix that windows cut is as long as the worker itself counts it. A failing seed is in the test's output."""

import random

from shoal.fleet.index.windows import WindowBlocks
from shoal.kv.groups import LayerGroup
from shoal.kv.places import longest_end

SIZE = 4


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
