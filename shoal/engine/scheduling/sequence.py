"""`Sequence`: the engine's state of one request.
scheduler.py writes the fields, sequence_blocks.py those about blocks, unless a field's comment names
another writer.

    num_tokens   [ prompt | outputs that the host has seen | pending ]
    token_ids    [ prompt | outputs that the host has seen ]
    positions    0 ............ num_computed ............ num_tokens

A pending token is sampled by a step that is planned, and the host has not seen it yet. So num_tokens counts
it, and token_ids lacks it. A computed token's KV is in the cache once all planned steps have run.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field

from shoal.api import FinishReason, Request, TokenLogprobs
from shoal.engine.scheduling.part_state import CompletedFetch, DraftHistory, GrammarState, SeqStates, Tail
from shoal.hashing import root_key


class SequenceStatus(enum.Enum):
    # New or preempted. It holds no row and no blocks.
    WAITING = enum.auto()
    # It holds a row and blocks for all its tokens, and waits for some blocks to arrive from a lower tier or
    # another worker.
    FETCHING = enum.auto()
    # It holds a row and blocks for all its tokens. Some of these are still to be computed.
    PREFILL = enum.auto()
    # Only its last token, seen or pending, is still to be computed. The device has it in the sequence's row.
    DECODE = enum.auto()
    FINISHED = enum.auto()


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
    num_recomputed_tokens: int = 0  # more whose KV was found then, though no state (state_blocks.py)
    num_admissions: int = 0  # times it was admitted; each time its row must be sent again
    row: int = -1  # its row of the device's batch state; -1: none
    # its KV blocks, a table for each group of layers, in the order of its tokens; NO_BLOCK (kv/groups.py):
    # the block was given back
    tables: list[list[int]] = field(default_factory=list)
    room: int = 0  # the tokens for which all tables have blocks
    keys: list[bytes] = field(default_factory=list)  # keys of the full blocks of token_ids, made when needed
    root: bytes = field(init=False)  # the first key is derived from it: adapter and salt
    register_at: int = 0  # number of computed and seen tokens at which its next block becomes findable
    stop_ids: frozenset[int] = field(init=False)  # the request's
    lockstep: bool = field(init=False)  # the next token may be sampled only when the host has seen the last
    special: bool = field(init=False)  # sampling it needs more than the fields of a state row
    most_drafts: int = field(init=False)  # that a step may verify for it
    fetch: object = None  # the Fetch (fetches.py) that a FETCHING sequence waits for; None: there is none
    # of a continuation (engine/peers/prefetches.py), until it starts
    tail: Tail | None = None
    was_prefetched: bool = False  # no source is asked for its blocks
    states: SeqStates | None = None  # snapshots of its row (state_blocks.py); None: waiting, or no states
    promised: list[bytes] = field(default_factory=list)  # keys of blocks that its prefill will make findable
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # error text, if the finish reason is ERROR
    # The core and the parts of the engine write these.
    grammar: GrammarState | None = None
    drafts: DraftHistory | None = None
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
        self.most_drafts = 0 if request.embed or self.lockstep else sys.maxsize

    @property
    def block_ids(self) -> list[int]:
        """The table of the first group, which is the only one if all layers share blocks."""
        return self.tables[0] if self.tables else []

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
