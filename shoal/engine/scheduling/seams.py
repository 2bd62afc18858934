"""Declares how the scheduler knows the parts that an engine may have: grammars, sources of KV blocks, gates,
reserves and watchers. A part overrides StepPart (engine/step_part.py).
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shoal.engine.scheduling.sequence import Sequence


class GrammarState(Protocol):
    """A grammar as the scheduler uses it (engine/scheduling/grammar.py)."""

    ended: bool
    error: str | None

    @property
    def is_ready(self) -> bool:
        """True if a step may sample the next token now. False while the mask of allowed tokens is computed in
        the background."""
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


@dataclass(frozen=True, slots=True)
class CompletedFetch:
    """A completed fetch of KV blocks for a sequence. `begun_at`: seconds of the core's clock."""

    source: str  # tiers below the device, or "worker"
    begun_at: float
    seconds: float
    num_blocks: int  # 0: none arrived, so they are computed


@dataclass(frozen=True, slots=True)
class Tail:
    """A block that is not full, with the KV of the tokens after a prompt's last full block."""

    block: int
    end: int  # number of tokens up to the tail's last
    keys: list[bytes]  # keys of the prompt's blocks, with the tail's last
    generation: int  # the pool's, of the block: another one if the block was taken for something else


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks of one sequence that a source is copying to the device:

        block_ids    [ held before `start` ][ start ... start + len(keys): on their way ][ others ]

    From its begin to its end the fetch has its own references on the blocks on their way and on all blocks
    before them (`held_blocks`). So no other sequence can get these blocks meanwhile, even if this sequence
    ends or is preempted."""

    seq: Sequence
    start: int  # the first block on its way, counted in the sequence's blocks
    keys: list[bytes]  # keys of the blocks on their way
    # number of full blocks among them; a block after these has the tail, up to the sequence's last token
    num_full: int
    held_blocks: list[int]  # blocks with a reference of this fetch
    next_sources: abc.Sequence[Source]  # sources to ask for the blocks after these
    findable: bool = True  # whether others may find the blocks when they have arrived; not after a reset

    @property
    def blocks(self) -> list[int]:
        """The blocks on their way."""
        return self.held_blocks[self.start : self.start + len(self.keys)]


class Source(Protocol):
    """A source of blocks that the device lacks: lower tiers (engine/offload/offloader.py), or other workers
    (engine/peers/reader.py)."""

    def lookup(self, keys: abc.Sequence[bytes], start: int) -> int:
        """Returns how many of the first blocks of keys[start:] this source has and are worth fetching now.
        The last key may be a tail's (hashing.py), which only other workers have."""
        ...

    def begin(self, fetch: Fetch) -> None:
        """Begins a fetch. Scheduler.fetched ends it, some time later."""
        ...


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

    def registered(self, seq: Sequence, start: int, blocks: abc.Sequence[int]) -> None:
        """The sequence's full blocks from the one at `start` on, which are `blocks`, are findable now. Blocks
        whose content was findable already, in other blocks, are among them."""
        ...

    def released(self, blocks: abc.Sequence[int]) -> None:
        """A sequence, a fetch or a reader has given these blocks back. Steps in flight may still use
        them."""
        ...
