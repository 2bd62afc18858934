"""`LookUps`: the questions to tiers that must be asked what they have of a prompt (kv/tiers/tier.py). A
sequence waits until they are answered.

Groups of layers that see everything are asked about first, as their blocks are written from the start of a
prompt. Groups with a window are asked about the blocks that are needed where the others end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import takewhile

from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.scheduling.sequence_blocks import SequenceBlocks
from shoal.hashing import extend_keys
from shoal.kv.places import Place, key_of, places
from shoal.kv.tiers.tier import Tier


class LookUps:
    """`tiers()` returns the tiers that are open. `is_below(key)` says whether a tier is known to have a
    block."""

    def __init__(
        self, blocks: SequenceBlocks, tiers: Callable[[], Iterable[Tier]], is_below: Callable[[bytes], bool]
    ) -> None:
        self._blocks, self._tiers, self._is_below = blocks, tiers, is_below
        # for each sequence that waits: the answers, and whether they are about groups with a window
        self._waiting: dict[Sequence, tuple[list[Future[int]], bool]] = {}

    def begin(self, seq: Sequence) -> None:
        """Asks about a prompt, unless the device and the tiers are known to have all of it."""
        if not any(tier.must_be_asked for tier in self._tiers()):
            return
        size = self._blocks.block_size
        extend_keys(seq.keys, seq.root, seq.token_ids, size)
        end = (seq.num_tokens - 1) // size * size
        if not all(self._is_here(seq, place) for place in places(self._blocks.groups, end)):
            self._ask(seq, self._first_blocks(seq, lambda place: True), False)

    def is_waiting(self, seq: Sequence) -> bool:
        return seq in self._waiting

    def advance(self) -> None:
        """Notes the answers."""
        for seq, (answers, is_last) in list(self._waiting.items()):
            if not all(answer.done() for answer in answers):
                continue
            del self._waiting[seq]
            if not is_last and any(group.window is not None for group in self._blocks.groups):
                self._ask(seq, self._last_blocks(seq), True)

    def _ask(self, seq: Sequence, asked_for: list[list[Place]], is_last: bool) -> None:
        """Asks for the blocks at these places, group by group."""
        groups, size = self._blocks.groups, self._blocks.block_size
        keys = [[key_of(place, groups, seq.keys, size) for place in own] for own in asked_for]
        tiers = [tier for tier in self._tiers() if tier.must_be_asked]
        self._waiting[seq] = [tier.look_up(own) for tier in tiers for own in keys if own], is_last

    def _first_blocks(self, seq: Sequence, has: Callable[[Place], bool]) -> list[list[Place]]:
        """Returns the first full blocks of each group without a window, as far as `has` says yes."""
        return [
            list(takewhile(has, (Place(g, i) for i in range((seq.num_tokens - 1) // group.block_size))))
            for g, group in enumerate(self._blocks.groups)
            if group.window is None
        ]

    def _last_blocks(self, seq: Sequence) -> list[list[Place]]:
        """Returns the blocks that groups with a window lack where the other groups end."""
        groups, largest = self._blocks.groups, self._blocks.largest
        end = seq.num_tokens - 1
        for own in self._first_blocks(seq, lambda place: self._is_here(seq, place)):
            end = min(end, len(own) * groups[own[0].group].block_size if own else 0)
        needed = places(groups, end // largest * largest)
        lacking = [place for place in needed if not self._is_here(seq, place)]
        return [[place for place in lacking if place.group == g] for g in range(len(groups))]

    def _is_here(self, seq: Sequence, place: Place) -> bool:
        key = key_of(place, self._blocks.groups, seq.keys, self._blocks.block_size)
        return self._blocks.pool.find(key) is not None or self._is_below(key)
