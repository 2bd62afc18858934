"""The calls of the scheduler and SequenceBlocks to the parts that an engine may have: a `Gate` keeps a
sequence waiting, a `Reserve` gives blocks back, a `BlockWatcher` is notified of blocks. A part overrides
StepPart (engine/step_part.py). Sources of KV blocks: fetches.py. SequenceBlocks sees a step as `SeqPart`s.
"""

from __future__ import annotations

from collections import abc
from typing import Protocol

from shoal.engine.scheduling.sequence import Sequence


class Gate(Protocol):
    """A part of the engine that may keep a sequence waiting (engine/step_part.py)."""

    def may_start(self, seq: Sequence) -> bool:
        """Returns whether a waiting sequence may start. Asked any number of times, it changes nothing."""
        ...


class Reserve(Protocol):
    """A part of the engine that may hold blocks in reserve (engine/step_part.py)."""

    def give_back(self) -> bool:
        """Gives some blocks back that the part can do without. Returns False if it holds none."""
        ...


class BlockWatcher(Protocol):
    """A part of the engine that is notified of the sequences' blocks (engine/step_part.py)."""

    def registered(self, seq: Sequence, start: int, blocks: abc.Sequence[int], group: int) -> None:
        """The sequence's full blocks from the one at `start` on in the table of a group, which are `blocks`,
        are findable now. Blocks whose content was findable already, in other blocks, are among them."""
        ...

    def kept(self, seq: Sequence, end: int) -> None:
        """A snapshot of the sequence's states after `end` tokens is findable now. Until then its last blocks
        are of no use to others. Without recurrent layers there are no snapshots."""
        ...

    def released(self, blocks: abc.Sequence[int]) -> None:
        """A sequence, a fetch or a reader has given these blocks back. Steps in flight may still use
        them."""
        ...


class SeqPart(Protocol):
    """One sequence's part of a step (scheduler.ScheduledSeq)."""

    seq: Sequence
    row: int
    start: int
    num_tokens: int
    samples: bool
