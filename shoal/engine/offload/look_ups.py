"""`LookUps`: asks tiers such as a store which blocks of a prompt they have (kv/tiers/tier.py). The sequence
waits for the answers.

First come the blocks of groups that see all tokens, as tiers have those from the start of a prompt on. With
recurrent layers the last snapshot among these blocks follows: as few blocks have one, each round of questions
goes further back, and asks about more of them. At the end that was found, groups with a window come last, by
the blocks that they need there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import takewhile

from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.scheduling.sequence_blocks import SequenceBlocks
from shoal.engine.scheduling.state_blocks import StateBlocks
from shoal.hashing import extend_keys, part_key
from shoal.kv.places import Place, key_of, places
from shoal.kv.tiers.tier import Tier

# The number of snapshots in each round of questions. Most often there is one of the first two: at the end of
# the last turn's answer, or of its prompt. A store that answers in 20 ms takes half a second for all rounds.
ROUNDS = (2, 8, 32, 128)

Questions = Iterator[list[list[bytes]]]  # keys to be asked about at once, each list in the order of a prompt


class LookUps:
    """`tiers()` returns the tiers that are open. `is_below(key)` says whether a tier is known to have a
    block."""

    def __init__(
        self, blocks: SequenceBlocks, tiers: Callable[[], Iterable[Tier]], is_below: Callable[[bytes], bool]
    ) -> None:
        self._blocks, self._tiers, self._is_below = blocks, tiers, is_below
        # for each sequence that waits: the answers, and the questions that follow
        self._waiting: dict[Sequence, tuple[list[Future[int]], Questions]] = {}

    def begin(self, seq: Sequence) -> None:
        """Asks about a prompt, unless the device and the tiers are known to have all of it."""
        if any(tier.must_be_asked for tier in self._tiers()):
            extend_keys(seq.keys, seq.root, seq.token_ids, self._blocks.block_size)
            self._ask(seq, self._questions(seq))

    def is_waiting(self, seq: Sequence) -> bool:
        return seq in self._waiting

    def advance(self) -> None:
        """Takes in the answers that have arrived, and asks the questions that follow."""
        for seq, (answers, questions) in list(self._waiting.items()):
            if all(answer.done() for answer in answers):
                del self._waiting[seq]
                self._ask(seq, questions)

    def _ask(self, seq: Sequence, questions: Questions) -> None:
        """Asks the next questions, if there are any for a tier."""
        for keys in questions:
            tiers = [tier for tier in self._tiers() if tier.must_be_asked]
            answers = [tier.look_up(own) for tier in tiers for own in keys if own]
            if answers:
                self._waiting[seq] = answers, questions
                return

    def _questions(self, seq: Sequence) -> Questions:
        """Yields questions. Each is answered before the next one is made."""
        size = self._blocks.block_size
        end = (seq.num_tokens - 1) // size * size
        if not all(self._is_here(seq, place) for place in places(self._blocks.groups, end)):
            yield [self._keys(seq, own) for own in self._first_blocks(seq, lambda place: True)]
        end = self._end(seq)
        if isinstance(self._blocks, StateBlocks):
            for ends in self._rounds(end):
                asked_for = [at for at in ends if not self._has_state(seq, at)]
                yield [self._parts(seq, at) for at in asked_for]
                found = [at for at in ends if self._has_state(seq, at)]
                if found:
                    end = found[0]
                    break
            else:
                return
        needed = places(self._blocks.groups, end)
        lacking = [place for place in needed if not self._is_here(seq, place)]
        yield [
            self._keys(seq, [place for place in lacking if place.group == g])
            for g, group in enumerate(self._blocks.groups)
            if group.window is not None
        ]

    def _keys(self, seq: Sequence, asked_for: list[Place]) -> list[bytes]:
        groups, size = self._blocks.groups, self._blocks.block_size
        return [key_of(place, groups, seq.keys, size) for place in asked_for]

    def _first_blocks(self, seq: Sequence, has: Callable[[Place], bool]) -> list[list[Place]]:
        """Returns the first full blocks of each group without a window, up to the first that lacks `has`."""
        return [
            list(takewhile(has, (Place(g, i) for i in range((seq.num_tokens - 1) // group.block_size))))
            for g, group in enumerate(self._blocks.groups)
            if group.window is None
        ]

    def _end(self, seq: Sequence) -> int:
        """Returns the most tokens for which groups without a window have all blocks."""
        groups, largest, end = self._blocks.groups, self._blocks.largest, seq.num_tokens - 1
        for own in self._first_blocks(seq, lambda place: self._is_here(seq, place)):
            end = min(end, len(own) * groups[own[0].group].block_size if own else 0)
        return end // largest * largest

    def _rounds(self, end: int) -> Iterator[range]:
        """Yields for each round the ends of blocks that it asks about, from `end` backwards."""
        largest = self._blocks.largest
        for num in ROUNDS:
            least = max(0, end - num * largest)
            yield range(end, least, -largest)
            end = least

    def _parts(self, seq: Sequence, end: int) -> list[bytes]:
        """Returns the keys of the parts of a snapshot after `end` tokens."""
        assert isinstance(self._blocks, StateBlocks)
        key = seq.keys[end // self._blocks.block_size - 1]
        return [part_key(key, part) for part in range(self._blocks.snapshots.size)]

    def _has_state(self, seq: Sequence, end: int) -> bool:
        assert isinstance(self._blocks, StateBlocks)
        key = seq.keys[end // self._blocks.block_size - 1]
        return self._blocks.snapshots.find(key) is not None or all(map(self._is_below, self._parts(seq, end)))

    def _is_here(self, seq: Sequence, place: Place) -> bool:
        key = key_of(place, self._blocks.groups, seq.keys, self._blocks.block_size)
        return self._blocks.pool.find(key) is not None or self._is_below(key)
