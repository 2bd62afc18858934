"""`Sequence`: the engine's state of one request; `Fetch` and `Source`: KV blocks on their way to the device.
scheduler.py writes the fields, unless a field's comment names another writer.

    num_tokens   [ prompt | outputs that the host has seen | pending ]
    token_ids    [ prompt | outputs that the host has seen ]
    positions    0 ............ num_computed ............ num_tokens

A pending token is sampled by a step that is planned, and the host has not seen it yet. So num_tokens counts
it, and token_ids lacks it. A computed token's KV is in the cache once all planned steps have run.
"""

from __future__ import annotations

import enum
from collections import abc
from dataclasses import dataclass, field
from typing import Protocol

from shoal.api import FinishReason, Request, TokenLogprobs
from shoal.hashing import root_key


class SequenceStatus(enum.Enum):
    # New or preempted. It holds no row and no blocks.
    WAITING = enum.auto()
    # It holds a row and blocks for all its tokens, and waits for some blocks to arrive from a lower tier.
    FETCHING = enum.auto()
    # It holds a row and blocks for all its tokens. Some of these are still to be computed.
    PREFILL = enum.auto()
    # Only its last token, seen or pending, is still to be computed. The device has it in the sequence's row.
    DECODE = enum.auto()
    FINISHED = enum.auto()


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


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's state of one request. Times are seconds of the core's clock."""

    request: Request
    turn: tuple[float, ...]  # the smaller runs first; each sequence has another (policy.py)
    max_num_tokens: int  # limit of prompt and output tokens, at which the sequence ends with LENGTH
    status: SequenceStatus = SequenceStatus.WAITING
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)  # pending ones included
    num_computed: int = 0
    num_cached_tokens: int = 0  # how many were found in a cache when it started first
    num_admissions: int = 0  # times it was admitted; each time its row must be sent again
    row: int = -1  # its row of the device's batch state; -1: none
    block_ids: list[int] = field(default_factory=list)  # its KV blocks, in the order of its tokens
    keys: list[bytes] = field(default_factory=list)  # keys of the full blocks of token_ids, made when needed
    root: bytes = field(init=False)  # what the first key is derived from: adapter and salt
    register_at: int = 0  # number of computed and seen tokens at which its next block becomes findable
    stop_ids: frozenset[int] = field(init=False)  # the request's
    lockstep: bool = field(init=False)  # the next token may be sampled only when the host has seen the last
    special: bool = field(init=False)  # sampling it needs more than the fields of a state row
    fetch: Fetch | None = None  # the fetch that a FETCHING sequence waits for
    # of a continuation (engine/peers/prefetches.py), until it starts
    tail: Tail | None = None
    was_prefetched: bool = False  # no source is asked for its blocks
    promised: list[bytes] = field(default_factory=list)  # keys of blocks that its prefill will make findable
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # error text, if the finish reason is ERROR
    # The core writes these.
    grammar: GrammarState | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    added_at: float = 0.0  # when it was added
    started_at: float | None = None  # when a step first held part of it
    completed_fetches: list[CompletedFetch] = field(
        default_factory=list
    )  # that have ended; their sources write them

    def __post_init__(self) -> None:
        request, params = self.request, self.request.params
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        if request.fetches_only:
            self.token_ids.append(0)  # keeps room for the first token, which another worker samples
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_tokens = len(self.token_ids)
        self.root = root_key(request.adapter, request.cache_salt)
        self.stop_ids = request.stop_ids
        self.lockstep = params.structured_outputs is not None
        self.special = bool(params.needs_sampler_options or request.bad_word_ids or request.embed)

    @property
    def is_delayed(self) -> bool:
        """True if its grammar is not ready for the next token."""
        return self.grammar is not None and not self.grammar.is_ready

    @property
    def num_pending(self) -> int:
        """Number of its tokens that the host has not seen yet."""
        return self.num_tokens - len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The outputs that the host has seen."""
        return self.token_ids[self.num_prompt_tokens :]

    def stop_reason_of(self, token_id: int) -> int | None:
        """Returns the stop reason if a token of `stop_ids` ends the sequence: None for an end-of-text token,
        otherwise the token."""
        params = self.request.params
        return None if not params.ignore_eos and token_id in self.request.eos_token_ids else token_id


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
