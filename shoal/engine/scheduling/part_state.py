"""State that parts of an engine keep in a sequence: its grammar, its completed fetches, a prefetched tail,
the snapshots of its states, and how its drafts did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from shoal.kv.snapshots import StateSnapshot


class GrammarState(Protocol):
    """A grammar as the scheduler uses it (engine/scheduling/grammar.py)."""

    ended: bool
    error: str | None

    @property
    def is_ready(self) -> bool:
        """True if a step may sample the next token now. False while the mask of allowed tokens is computed in
        the background."""
        ...

    def begin_slow(self) -> None:
        """Begins to compute the next mask in the background if it is slow. To be called between steps."""
        ...

    def draft(self, looked_up: list[int], most: int) -> tuple[list[int], int]:
        """Returns at most `most` drafts of the next tokens, and how many of the first are forced: the grammar
        allows no other text, though other tokens of it. After these come tokens of `looked_up`, as far as the
        grammar allows them."""
        ...

    def accept(self, token_id: int) -> bool:
        """Applies a sampled token. Returns False and sets `error` if the sequence cannot continue. After the
        last token `ended` is true."""
        ...

    def close(self) -> None:
        """Frees the grammar after the sequence has ended."""
        ...


@dataclass(slots=True)
class GrammarRow:
    """A sample whose token must fit a grammar, and must be allowed and not banned by the request too."""

    sample: int
    grammar: GrammarState
    banned: list[int]
    allowed: list[int] | None
    # The drafts before the sample. The samples of a sequence follow each other; the first has none before it.
    after: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CompletedFetch:
    """A completed fetch of KV blocks for a sequence. `begun_at`: seconds of the core's clock."""

    source: str  # tiers below the device, or "worker"
    begun_at: float
    seconds: float
    num_blocks: int  # 0: none arrived, so they are computed


@dataclass(frozen=True, slots=True)
class Tail:
    """The blocks of a prompt, of which the last ones are not full: they have the KV of the tokens after the
    last full ones."""

    tables: list[list[int]]  # a table for each group of layers
    end: int  # number of tokens up to the tail's last
    keys: list[bytes]  # keys of the prompt's blocks, with the tail's last
    generation: int  # the pool's, of `block`: another one if the block was taken for something else

    @property
    def block(self) -> int:
        """The last block of the first table."""
        return self.tables[0][-1]


@dataclass(slots=True)
class SeqStates:
    """The snapshots of one sequence: those that it will take, and those that it has taken or restored."""

    points: list[int] = field(
        default_factory=list
    )  # token counts at which chunks of its prompt end, ascending
    # tokens of its prefix whose KV the cache had, with or without a snapshot
    matched: int = 0
    kept_at: int = 0  # tokens up to its last snapshot that is not replaced by later ones
    restored: StateSnapshot | None = None  # from which its row begins; the restore is not planned yet
    # taken but not findable yet, as the host has not seen all tokens: the number of tokens, and the snapshot
    new: list[tuple[int, StateSnapshot]] = field(default_factory=list)
    planned_to: int = 0  # with drafts: tokens up to the last end of a block for which a save was planned
    latest: StateSnapshot | None = None  # which the next one replaces
    used: list[StateSnapshot] = field(default_factory=list)  # the others


class HasStates(Protocol):
    """Sequence has its states, or none."""

    states: SeqStates | None


def states_of(seq: HasStates) -> SeqStates:
    """Returns the snapshots of a sequence that has any, or will take some."""
    assert seq.states is not None
    return seq.states


@dataclass(frozen=True, slots=True)
class StateCopies:
    """Copies between state rows and snapshots: (row, the snapshot's blocks) of each."""

    restores: list[tuple[int, list[int]]]  # before the step
    saves: list[tuple[int, list[int]]]  # after it
    # With drafts: for each save, the number of tokens at which it is due. It is left out if the row does not
    # pass it in the step, which the device alone knows. 0: it is always due
    ends: list[int] | None = None


@dataclass(slots=True)
class DraftHistory:
    """The success of a sequence's drafts (draft_lengths.py)."""

    first: float  # estimated probability that the first draft of a step is accepted,
    further: float  # and a further one if those before it are
    num_drafts: int = 0  # drafts that the next step may verify
    drafts: list[int] = field(default_factory=list)  # the last that the host has seen
    num_forced: int = 0  # the first of them, if a grammar allows nothing else
    is_cut: bool = False  # they are as the sequence's grammar wants them
    gains: list[float] = field(default_factory=list)  # expected accepted drafts, by size of a step
    num_steps: int = 0  # steps that verified drafts
    num_verified: int = 0
    num_accepted: int = 0
