"""Questions to tiers that must be asked: what is asked for, group by group, and when a sequence may start."""

from concurrent.futures import Future

import pytest

from shoal.api import Request
from shoal.engine.offload.look_ups import LookUps
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.scheduling.state_blocks import SnapshotRoom, blocks_for
from shoal.hashing import part_key
from shoal.kv.groups import LayerGroup
from shoal.kv.places import Place, key_of
from shoal.sampling_params import SamplingParams

SIZE = 16


class Asked:
    """A tier that has some blocks, and answers when it is told to."""

    must_be_asked = True

    def __init__(self):
        self.has, self.known, self.questions = set(), set(), []

    def look_up(self, keys):
        self.questions.append((list(keys), Future()))
        return self.questions[-1][1]

    def answer(self):
        questions, self.questions = self.questions, []
        for keys, future in questions:
            self.known |= self.has & set(keys)
            future.set_result(0)
        return [keys for keys, _ in questions]


def made(groups, num_tokens=100, snapshots=None):
    blocks, tier = blocks_for(groups, 100, SIZE, True, 64, 1024, snapshots), Asked()
    look_ups = LookUps(blocks, lambda: [tier], lambda key: key in tier.known)
    seq = Sequence(Request("r", list(range(num_tokens)), SamplingParams()), (0,), 200)
    look_ups.begin(seq)

    def keys(group, *numbers):
        return [key_of(Place(group, number), blocks.groups, seq.keys, SIZE) for number in numbers]

    return look_ups, seq, tier, keys


def test_blocks_of_one_group_are_asked_for_once():
    look_ups, seq, tier, keys = made((LayerGroup((0,), SIZE),))
    assert look_ups.is_waiting(seq)
    look_ups.advance()
    assert look_ups.is_waiting(seq) and tier.answer() == [keys(0, *range(6))]
    look_ups.advance()
    assert not look_ups.is_waiting(seq) and not tier.questions


@pytest.mark.parametrize("there", [6, 4, 1, 0])
def test_windows_are_asked_for_where_the_other_groups_end(there):
    """A window of 20 needs the last two blocks, or the one that there is."""
    look_ups, seq, tier, keys = made((LayerGroup((0,), SIZE), LayerGroup((1,), SIZE, 20)))
    tier.has = set(keys(0, *range(there)))
    assert tier.answer() == [keys(0, *range(6))]
    look_ups.advance()
    assert look_ups.is_waiting(seq) == bool(there)
    expected = keys(1, *range(max(0, there - 2), there))
    assert tier.answer() == ([expected] if there else [])
    look_ups.advance()
    assert not look_ups.is_waiting(seq)


def test_groups_of_larger_blocks_are_asked_for_by_their_own():
    look_ups, _, tier, keys = made((LayerGroup((0,), 2 * SIZE), LayerGroup((1,), SIZE, 20)))
    tier.has = set(keys(0, 0, 1))
    assert tier.answer() == [keys(0, 0, 1, 2)]
    look_ups.advance()
    assert tier.answer() == [keys(1, 2, 3)]


@pytest.mark.parametrize("at", [320, 304, 288, 64, 0])
def test_snapshots_are_asked_for_from_the_end_of_the_keys_and_values_on(at):
    """In rounds, until one is found. Windows are asked about there."""
    groups = LayerGroup((0,), SIZE), LayerGroup((1,), SIZE, 20)
    look_ups, seq, tier, keys = made(groups, 401, SnapshotRoom(3))

    def parts(end):
        return [part_key(seq.keys[end // SIZE - 1], part) for part in range(3)]

    tier.has = {*keys(0, *range(20)), *(parts(at) if at else ())}
    assert tier.answer() == [keys(0, *range(25))]
    ends = [range(320, 288, -SIZE), range(288, 160, -SIZE), range(160, 0, -SIZE)]
    for asked in ends:
        look_ups.advance()
        assert tier.answer() == [parts(end) for end in asked]
        if at in asked:
            break
    look_ups.advance()
    if at:
        assert tier.answer() == [keys(1, *range((at + 1 - 20) // SIZE, at // SIZE))]
        look_ups.advance()
    assert not look_ups.is_waiting(seq)


def test_a_prompt_that_is_known_to_lie_below_is_not_asked_for():
    look_ups, _, tier, keys = made((LayerGroup((0,), SIZE),))
    tier.known = set(keys(0, *range(6)))
    other = Sequence(Request("s", list(range(100)), SamplingParams()), (1,), 200)
    look_ups.begin(other)
    assert not look_ups.is_waiting(other)
