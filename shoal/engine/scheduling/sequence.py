"""A sequence: one request on its way through the engine. The scheduler owns every field; others read.

token_ids   [ prompt | seen outputs ][ pending ]      pending: drawn by a scheduled step, not yet seen by the
host
            0 ....... num_computed ..... num_tokens   computed: its KV is in the cache once all scheduled
            steps have run
"""

from __future__ import annotations

import enum
from collections import abc
from dataclasses import dataclass, field
from typing import Protocol

from shoal.api import FinishReason, Request, TokenLogprobs
from shoal.hashing import root_key


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()  # new or preempted: holds nothing
    # as PREFILL, but nothing of it is computed until blocks have arrived from a lower tier
    FETCHING = enum.auto()
    PREFILL = enum.auto()  # holds a row and blocks for all its known tokens; some are still to be computed
    # its last token, seen or pending, is the next input; the device has it in the sequence's row
    DECODE = enum.auto()
    FINISHED = enum.auto()


class Grammar(Protocol):
    """What the scheduler needs of a grammar (engine/scheduling/grammar.py)."""

    ended: bool
    error: str | None

    @property
    def is_ready(self) -> bool:
        """Whether a step may draw the next token now; False while what may follow is worked out beside the
        steps."""
        ...

    def accept(self, token_id: int) -> bool:
        """Takes a drawn token. False, with `error` set, if the sequence cannot go on; `ended` is true after
        its last token."""
        ...

    def close(self) -> None:
        """The sequence has ended."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """`turn` is unique and orders all sequences: the smaller runs first, the larger is preempted first."""

    request: Request
    turn: tuple[float, ...]
    max_num_tokens: int  # prompt and outputs; reached, the sequence ends with LENGTH
    status: SequenceStatus = SequenceStatus.WAITING
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)  # pending ones included
    num_computed: int = 0
    num_cached_tokens: int = 0  # found in the prefix cache at the first admission
    num_admissions: int = 0  # a row belongs to one admission: nothing on the device outlives it
    row: int = -1  # of the device's batch state
    block_ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of the full blocks of token_ids, extended when needed
    root: bytes = field(init=False)  # parent of the first key
    register_at: int = 0  # the next block is registered when this many tokens are computed and seen
    stop_ids: frozenset[int] = field(init=False)  # end-of-text ids and stop ids
    lockstep: bool = field(init=False)  # the next token may be drawn only when the host has seen the last
    special: bool = field(init=False)  # sampling needs more than the fields of a state row
    held: bool = False  # not to be admitted yet: its grammar is being compiled
    asking: bool = False  # not to be admitted yet: a store is asked what it has of the prompt
    grammar: Grammar | None = None
    fetch: Fetch | None = None  # what a FETCHING one waits for
    promised: list[bytes] = field(default_factory=list)  # keys of blocks that its prefill will make findable
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # gathered by the core
    added_at: float = 0.0  # seconds, as the core's clock: when it came,
    started_at: float | None = None  # and when a step first held it
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # why, where the finish reason is ERROR

    def __post_init__(self) -> None:
        request, params = self.request, self.request.params
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_tokens = len(self.token_ids)
        self.root = root_key(request.adapter, request.cache_salt)
        self.stop_ids = frozenset(
            (*(params.stop_token_ids or ()), *(() if params.ignore_eos else request.eos_token_ids))
        )
        self.lockstep = params.structured_outputs is not None or any(
            len(word) > 1 for word in request.bad_word_ids
        )
        self.special = bool(params.needs_extras or request.bad_word_ids or request.embed)

    @property
    def is_delayed(self) -> bool:
        """Its grammar is not ready for the next token."""
        return self.grammar is not None and not self.grammar.is_ready

    @property
    def num_pending(self) -> int:
        return self.num_tokens - len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Those the host has seen."""
        return self.token_ids[self.num_prompt_tokens :]

    def stop_reason_of(self, token_id: int) -> int | None:
        """Of an id in `stop_ids`: None for an end-of-text id, otherwise the id."""
        params = self.request.params
        return None if not params.ignore_eos and token_id in self.request.eos_token_ids else token_id


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks on their way up from lower tiers, for one sequence. It has references of its own on them and on
    those before them: whatever happens to the sequence meanwhile, they are nobody else's before
    `Scheduler.fetched`."""

    seq: Sequence
    start: int  # which of the sequence's blocks is the first
    keys: list[bytes]  # of the blocks on their way
    held: list[int]  # the sequence's blocks from its first to the last of these at least
    findable: bool = True  # when it has arrived; False since a reset

    @property
    def blocks(self) -> list[int]:
        return self.held[self.start : self.start + len(self.keys)]


class Tiers(Protocol):
    """What the scheduler needs of the tiers below the device (engine/offload/offloader.py)."""

    def lookup(self, keys: abc.Sequence[bytes], start: int) -> int:
        """How many of keys[start:], the first ones, lie below and are worth fetching now."""
        ...

    def begin(self, fetch: Fetch) -> None:
        """To be ended by Scheduler.fetched, some time later."""
        ...

    def registered(self, seq: Sequence, start: int, end: int) -> None:
        """These of the sequence's blocks are findable now."""
        ...

    def released(self, blocks: list[int]) -> None:
        """A sequence has let them go; steps in flight may still use them."""
        ...
