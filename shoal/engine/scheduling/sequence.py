"""A sequence: one request on its way through the engine.

    token_ids    [ prompt | outputs that the host has seen ][ pending ]
    positions    0 ............ num_computed ............... num_tokens

A pending token is drawn by a step that is planned, and the host has not seen it yet. So num_tokens counts it,
and token_ids does not have it. A computed token's KV is in the cache once all planned steps have run.

The scheduler writes the fields, except for those that say otherwise.
"""

from __future__ import annotations

import enum
from collections import abc
from dataclasses import dataclass, field
from typing import Protocol

from shoal.api import FinishReason, Request, TokenLogprobs
from shoal.hashing import root_key


class SequenceStatus(enum.Enum):
    # It is new, or it was preempted. It holds no row and no blocks.
    WAITING = enum.auto()
    # It holds a row and blocks for all its tokens, and waits for some blocks to arrive from a lower tier.
    FETCHING = enum.auto()
    # It holds a row and blocks for all its tokens. Some of these are still to be computed.
    PREFILL = enum.auto()
    # It holds a row and blocks for all its tokens, some of which have come from elsewhere, until its
    # continuation takes its place. It computes nothing.
    HOLDING = enum.auto()
    # Only its last token, seen or pending, is still to be computed. The device has it in the sequence's row.
    DECODE = enum.auto()
    FINISHED = enum.auto()


class GrammarState(Protocol):
    """What the scheduler needs of a grammar (engine/scheduling/grammar.py)."""

    ended: bool
    error: str | None

    @property
    def is_ready(self) -> bool:
        """Whether a step may draw the next token now. It may not while the mask of the tokens that may follow
        is computed beside the steps."""
        ...

    def accept(self, token_id: int) -> bool:
        """Takes a drawn token. Returns False and sets `error` if the sequence cannot go on. After the last
        token `ended` is true."""
        ...

    def close(self) -> None:
        """The sequence has ended."""
        ...


@dataclass(slots=True)
class GrammarRow:
    """A sample whose token must fit a grammar, and must be allowed and not banned by the request too."""

    sample: int
    grammar: GrammarState
    banned: list[int]
    allowed: list[int] | None


@dataclass(frozen=True, slots=True)
class Transfer:
    """KV blocks that came from elsewhere for a sequence. `begun_at`: seconds of the core's clock."""

    source: str  # tiers below the device, or "worker"
    begun_at: float
    seconds: float
    num_blocks: int  # 0: they did not come, and are computed


@dataclass(slots=True, eq=False)
class Sequence:
    """What the engine knows of one request. Times are seconds of the core's clock."""

    request: Request
    turn: tuple[float, ...]  # the smaller runs first; no two sequences have the same (policy.py)
    max_num_tokens: int  # prompt and outputs; the sequence ends with LENGTH when it has so many
    status: SequenceStatus = SequenceStatus.WAITING
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)  # with the pending ones
    num_computed: int = 0
    num_cached_tokens: int = 0  # how many were found in a cache when it started first
    num_admissions: int = 0  # how often it started; each time it has a row that knows nothing of it
    row: int = -1  # its row of the device's batch state; -1: none
    block_ids: list[int] = field(default_factory=list)  # its KV blocks, in the order of its tokens
    keys: list[bytes] = field(default_factory=list)  # keys of the full blocks of token_ids, made when needed
    root: bytes = field(init=False)  # what the first key is derived from: adapter and salt
    register_at: int = 0  # its next block becomes findable when so many tokens are computed and seen
    stop_ids: frozenset[int] = field(init=False)  # the request's
    lockstep: bool = field(init=False)  # the next token may be drawn only when the host has seen the last
    special: bool = field(init=False)  # sampling it needs more than the fields of a state row
    fetch: Fetch | None = None  # what a FETCHING sequence waits for
    promised: list[bytes] = field(default_factory=list)  # keys of blocks that its prefill will make findable
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # what was wrong, where the finish reason is ERROR
    # The core writes these.
    waits_for_grammar: bool = False  # it must not start yet, as its grammar is being compiled
    grammar: GrammarState | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    added_at: float = 0.0  # when it came
    started_at: float | None = None  # when a step first held part of it
    transfers: list[Transfer] = field(default_factory=list)  # that have ended; their sources write them
    # It must not start yet, as so many are asked what they have of the prompt: a store, or a worker that gave
    # out a ticket. Whoever asks counts here.
    num_lookups: int = 0

    def __post_init__(self) -> None:
        request, params = self.request, self.request.params
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        if request.fetches_only:
            self.token_ids.append(0)  # keeps room for the first token, which is drawn elsewhere
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_tokens = len(self.token_ids)
        self.root = root_key(request.adapter, request.cache_salt)
        self.stop_ids = request.stop_ids
        self.lockstep = params.structured_outputs is not None or any(
            len(word) > 1 for word in request.bad_word_ids
        )
        self.special = bool(params.needs_sampler_options or request.bad_word_ids or request.embed)

    @property
    def is_delayed(self) -> bool:
        """Whether its grammar is not ready for the next token."""
        return self.grammar is not None and not self.grammar.is_ready

    @property
    def num_pending(self) -> int:
        """How many of its tokens the host has not seen yet."""
        return self.num_tokens - len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The outputs that the host has seen."""
        return self.token_ids[self.num_prompt_tokens :]

    def stop_reason_of(self, token_id: int) -> int | None:
        """What is told as the reason when a token of `stop_ids` ends the sequence: None for an end-of-text
        token, otherwise the token."""
        params = self.request.params
        return None if not params.ignore_eos and token_id in self.request.eos_token_ids else token_id


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks of one sequence on their way from a source. The fetch has references of its own on them
    and on the sequence's blocks before them. So whatever happens to the sequence, nobody else gets these
    blocks before `Scheduler.fetched`."""

    seq: Sequence
    start: int  # the first block on its way, counted in the sequence's blocks
    keys: list[bytes]  # keys of the blocks on their way
    num_full: int  # how many of them are full; one behind them has the rest, up to the sequence's last token
    held_blocks: list[int]  # the blocks that it has references on
    next_sources: abc.Sequence[Source]  # who is asked for the blocks behind these when they have arrived
    findable: bool = True  # whether others may find the blocks when they have arrived; not after a reset

    @property
    def blocks(self) -> list[int]:
        """The blocks on their way."""
        return self.held_blocks[self.start : self.start + len(self.keys)]


class Source(Protocol):
    """Where blocks come from that the device lacks: lower tiers (engine/offload/offloader.py), or other
    workers (engine/peers/reader.py)."""

    def lookup(self, keys: abc.Sequence[bytes], start: int) -> int:
        """How many of the first blocks of keys[start:] lie there and are worth fetching now. The last key may
        be that of a tail (hashing.py), which only other workers have."""
        ...

    def begin(self, fetch: Fetch) -> None:
        """Begins a fetch. Scheduler.fetched ends it, some time later."""
        ...


class Tiers(Source, Protocol):
    """What the scheduler needs of the tiers below the device, beside that."""

    def registered(self, seq: Sequence, start: int, end: int) -> None:
        """The sequence's blocks from `start` to `end` are findable now."""
        ...

    def released(self, blocks: list[int]) -> None:
        """A sequence has given these blocks back. Steps in flight may still use them."""
        ...
