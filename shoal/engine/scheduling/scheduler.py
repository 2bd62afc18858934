"""The scheduler: which tokens of which sequences the next step computes, and what its drawn tokens mean.

A sequence catches num_computed up with num_tokens; one token budget a step is shared by all. `schedule` may
be called again before `update` has told the tokens of earlier steps (at any depth): a decode needs to know
that a token will be there, not which. Every plan must be run, in order. Which block is where: kv/blocks.py.
What goes to the device: engine/runner/batch.py.
"""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

from shoal.api import STEP_TOKENS, FinishReason, Request, Stats
from shoal.engine.scheduling.sequence import Fetch, Sequence, SequenceStatus, Tiers
from shoal.errors import RequestError
from shoal.hashing import common_length, extend_keys
from shoal.kv.blocks import BlockPool

if TYPE_CHECKING:
    from shoal.kv.event_publisher import KvEvents

WAITING, FETCHING, PREFILL = SequenceStatus.WAITING, SequenceStatus.FETCHING, SequenceStatus.PREFILL
DECODE, FINISHED = SequenceStatus.DECODE, SequenceStatus.FINISHED
NEVER = sys.maxsize


@dataclass(slots=True)  # frozen would triple the cost of making one, and a step makes hundreds
class ScheduledSeq:
    """Tokens [start, start + num_tokens) of a sequence. Read its block_ids and token_ids before the scheduler
    is called again."""

    seq: Sequence
    row: int
    start: int
    num_tokens: int
    samples: bool  # reaches the sequence's last token, so the next one is drawn


@dataclass(frozen=True, slots=True)
class StepPlan:
    """First `num_decodes` sequences whose one input token lies in their row on the device, the longest first,
    then prefill chunks."""

    scheduled: tuple[ScheduledSeq, ...]
    num_decodes: int
    num_tokens: int


@dataclass(slots=True)
class TokenResult:
    """A token that counts. `sample`: which of the step's drawn tokens it was."""

    seq: Sequence
    token_id: int
    sample: int
    finish_reason: FinishReason | None


class Scheduler:
    """`waiting` and `running` are sorted by turn: whoever is preempted comes from the end of `running` and
    finds its place in `waiting`."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
        events: KvEvents | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, enable_prefix_caching, events)
        self.events = events
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self.tiers: Tiers | None = None
        self.fetches: list[Fetch] = []  # under way, also for sequences that have left meanwhile
        self._arriving: set[bytes] = set()  # keys of those that will be findable
        self._promised: dict[bytes, int] = {}  # keys -> prefills that will make them findable
        self.ended: list[Sequence] = []  # from outside, and not yet told (take_ended)
        # a heap: the lowest is given first, so that the rows in use stay dense
        self._free_rows = list(range(max_num_seqs))
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._by_priority = policy == "priority"
        self._long_prefill_token_threshold = long_prefill_token_threshold
        # a prompt's root, tokens and keys
        self._last_looked_up: tuple[bytes, list[int], list[bytes]] = b"", [], []
        self._num_added = 0
        self._num_preemptions = 0
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0
        self._external_queries = 0
        self._external_hits = 0
        self._step_tokens = 0
        self._steps_by_tokens = [0] * (len(STEP_TOKENS) + 1)

    # Requests

    def _check_room(self, request: Request) -> None:
        """Raises RequestError if the request could never run here."""
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        limit = self._max_num_tokens
        if request.request_id in self._sequences:
            raise RequestError(
                f"request id {request.request_id!r} is in use; choose another or wait until that request "
                "has ended"
            )
        if num_tokens + (not request.embed) > limit:
            cache = f"the whole KV cache ({self.pool.num_blocks} blocks of {self._block_size})"
            what = "max_model_len" if limit == self._max_model_len else cache
            raise RequestError(
                f"the prompt has {num_tokens} tokens, and {what} {limit} must hold it"
                f"{'' if request.embed else ' and at least one more'}; shorten it or raise the limit"
            )

    def add(self, request: Request) -> Sequence:
        """Raises RequestError if the request could never run here: its id is in use, or it is longer than the
        model or the whole cache allows."""
        self._check_room(request)
        order, max_tokens = self._num_added, 1 if request.embed else request.params.max_tokens
        self._num_added += 1
        turn = (request.priority, request.arrival, order) if self._by_priority else (order,)
        # the token that an embedding draws, for nobody, is never an input
        limit = self._max_num_tokens + request.embed
        seq = Sequence(
            request,
            turn,
            limit if max_tokens is None else min(limit, len(request.prompt_token_ids) + max_tokens),
        )
        insort(self.waiting, seq, key=_turn)
        self._sequences[request.request_id] = seq
        return seq

    def abort(self, request_id: str) -> Sequence | None:
        return self.finish(request_id, FinishReason.ABORT)

    def abort_all(self) -> None:
        for request_id in list(self._sequences):
            self.abort(request_id)

    def preempt_all(self) -> None:
        """Puts every running sequence back among the waiting ones, empty-handed: its KV is about to be lost.
        To be called with no step in flight, so that all drawn tokens are known."""
        while self.running:
            self._preempt_last()

    def finish(
        self,
        request_id: str,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> Sequence | None:
        """Ends a request from outside, wherever it is; tokens still in flight are dropped. None if it has
        ended already or never was."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._finish(seq, reason, stop_reason, error)
            self.ended.append(seq)
        return seq

    def take_ended(self) -> list[Sequence]:
        """Those ended from outside or with an error since the last call: no `update` tells of them."""
        ended, self.ended = self.ended, []
        return ended

    # Steps

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run before an `update` (or `add`)."""
        scheduled: list[ScheduledSeq] = []
        budget = self._schedule_decodes(scheduled, self._max_num_batched_tokens)
        # attention begins with the longest and ends with short ones
        scheduled.sort(key=attrgetter("start"), reverse=True)
        num_decodes = len(scheduled)
        cap = self._prefill_cap()
        for seq in self.running:
            if budget == 0:
                break
            if seq.status is PREFILL:
                budget -= self._schedule_chunk(scheduled, seq, min(budget, cap))
        budget = self._admit(scheduled, budget, cap)
        if not scheduled:
            return None
        num_tokens = self._max_num_batched_tokens - budget
        self._step_tokens += num_tokens
        self._steps_by_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1
        return StepPlan(tuple(scheduled), num_decodes, num_tokens)

    def update(self, plan: StepPlan, token_ids: list[int]) -> list[TokenResult]:
        """Takes in the tokens that a step has drawn, one for each of its entries that samples. Plans are
        updated in order.

        Tokens of sequences that have ended meanwhile are dropped, and those that a grammar does not take:
        they end their sequence.
        """
        results = []
        sample = -1
        for entry in plan.scheduled:
            if not entry.samples:
                continue
            sample += 1
            seq = entry.seq
            if seq.status is FINISHED:
                continue
            token_id, grammar = token_ids[sample], seq.grammar
            if seq.request.embed:  # drawn only because sampled rows give their hidden state
                self._finish(seq, FinishReason.STOP)
                results.append(TokenResult(seq, token_id, sample, FinishReason.STOP))
                continue
            if grammar is not None and not grammar.accept(token_id):
                self.finish(seq.request.request_id, FinishReason.ERROR, "grammar", grammar.error)
                continue
            known = seq.token_ids
            known.append(token_id)
            if seq.num_computed >= seq.register_at <= len(known):
                self._register(seq)
            reason = None
            if grammar is not None and grammar.ended:
                reason = FinishReason.STOP
                self._finish(seq, reason)
            elif (
                token_id in seq.stop_ids
                and len(known) - seq.num_prompt_tokens >= seq.request.params.min_tokens
            ):
                reason = FinishReason.STOP
                self._finish(seq, reason, seq.stop_reason_of(token_id))
            elif len(known) >= seq.max_num_tokens:
                reason = FinishReason.LENGTH
                self._finish(seq, reason)
            results.append(TokenResult(seq, token_id, sample, reason))
        return results

    def fetched(self, fetch: Fetch, num_blocks: int) -> None:
        """Its first `num_blocks` have arrived intact, the others will not: the sequence computes them."""
        self.fetches.remove(fetch)
        if fetch.findable:
            self._arriving.difference_update(fetch.keys)
            self._make_findable(fetch.seq, fetch.start, fetch.blocks[:num_blocks])
        seq = fetch.seq
        if seq.fetch is fetch:
            seq.fetch, seq.status = None, PREFILL
            num_tokens = num_blocks * self._block_size
            seq.num_computed += num_tokens
            if seq.register_at != NEVER:
                seq.register_at += num_tokens
            if seq.num_admissions == 1:
                seq.num_cached_tokens += num_tokens
                self._external_hits += num_tokens
        if self.tiers is not None:
            self.tiers.released(fetch.held)
        self.pool.release(fetch.held)

    # Everything else

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def num_to_prefill(self) -> int:
        """Tokens of prompts that are being computed."""
        return sum(seq.num_tokens - seq.num_computed for seq in self.running if seq.status is PREFILL)

    def stats(self) -> Stats:
        return Stats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_deferred=sum(seq.held or seq.asking for seq in self.waiting),
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_free,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._prefix_cache_queries,
            prefix_cache_hits=self._prefix_cache_hits,
            external_prefix_cache_queries=self._external_queries,
            external_prefix_cache_hits=self._external_hits,
            step_tokens=self._step_tokens,
            steps_by_tokens=list(self._steps_by_tokens),
        )

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks; False if some are in use. What runs now goes on, but none of its KV will
        be found by others."""
        for seq in self.running:
            self._keep_promises(seq)
            seq.register_at = NEVER
        for fetch in self.fetches:
            fetch.findable = False
        self._arriving.clear()
        idle = self.pool.reset()
        if self.events is not None:
            self.events.flush()  # there may be no step for long
        return idle

    def check(self) -> None:
        """Proves the books: blocks, references, rows, queues."""
        size = self._block_size
        self.pool.check(
            [
                block
                for blocks in (
                    *(seq.block_ids for seq in self.running),
                    *(fetch.held for fetch in self.fetches),
                )
                for block in blocks
            ]
        )
        assert self._promised == Counter(key for seq in self.running for key in seq.promised), (
            "promises of nobody"
        )
        rows = [seq.row for seq in self.running]
        assert sorted(rows + self._free_rows) == list(range(self._max_num_seqs)), "rows lost or given twice"
        for queue in (self.waiting, self.running):
            assert all(a.turn < b.turn for a, b in pairwise(queue)), "a queue is out of turn"
        assert {id(s) for s in self._sequences.values()} == {id(s) for s in (*self.waiting, *self.running)}, (
            "sequences lost"
        )
        for seq in self.waiting:
            assert seq.status is WAITING and seq.row == -1 and not seq.block_ids and seq.num_computed == 0, (
                "waiting, but not empty-handed"
            )
        for seq in self.running:
            assert (
                len(seq.token_ids) <= seq.num_tokens <= seq.max_num_tokens
                and seq.num_computed < seq.num_tokens
            ), "tokens miscounted"
            assert (seq.status is FETCHING) == (seq.fetch in self.fetches), (
                "fetches and those who wait for them differ"
            )
            assert not seq.promised or (seq.status in (FETCHING, PREFILL) and seq.register_at != NEVER), (
                "a promise that is not kept"
            )
            if seq.status in (FETCHING, PREFILL):
                assert seq.num_pending == 0 and len(seq.block_ids) == -(-seq.num_tokens // size), (
                    "a prefill without all its blocks"
                )
            else:
                assert seq.status is DECODE and seq.num_computed == seq.num_tokens - 1, (
                    "a decode with more than one token to compute"
                )
                assert len(seq.block_ids) == -(-seq.num_computed // size), "blocks and computed tokens differ"

    # Inside a step

    def _schedule_decodes(self, scheduled: list[ScheduledSeq], budget: int) -> int:
        """Returns what is left of the budget."""
        block_size = self._block_size
        # preemption shortens it at its end meanwhile: by `seq` at worst, never by one that is scheduled
        for seq in self.running:
            if seq.status is not DECODE:
                continue
            if budget == 0:
                break
            start = seq.num_computed
            if start + 1 >= seq.max_num_tokens:
                continue  # its last token is on the way
            if seq.lockstep and (seq.num_tokens > len(seq.token_ids) or seq.is_delayed):
                continue
            if start % block_size == 0 and not self._grow(seq):
                break
            seq.num_computed = start + 1
            seq.num_tokens = start + 2
            scheduled.append(ScheduledSeq(seq, seq.row, start, 1, True))
            budget -= 1
        return budget

    def _grow(self, seq: Sequence) -> bool:
        """One block more, if need be at the cost of those behind. False if that put out `seq` itself: it was
        the last."""
        while (blocks := self.pool.try_allocate(1)) is None:
            victim = self._preempt_last()
            if victim is seq:
                return False
        seq.block_ids += blocks
        return True

    def _preempt_last(self) -> Sequence:
        victim = self.running.pop()
        self._let_go(victim)
        victim.status, victim.num_computed = WAITING, 0
        insort(self.waiting, victim, key=_turn)
        self._num_preemptions += 1
        return victim

    def _schedule_chunk(self, scheduled: list[ScheduledSeq], seq: Sequence, budget: int) -> int:
        """Returns the number of tokens scheduled. Blocks are there since admission."""
        start = seq.num_computed
        num_tokens = min(budget, seq.num_tokens - start)
        seq.num_computed += num_tokens
        samples = seq.num_computed == seq.num_tokens
        if seq.num_computed >= seq.register_at:
            # already: no later step, nor a later sequence of this one, can read the block before it is
            # written
            self._register(seq)
        if samples:
            self._keep_promises(seq)
            seq.status = DECODE
            seq.num_tokens += 1
        scheduled.append(ScheduledSeq(seq, seq.row, start, num_tokens, samples))
        return num_tokens

    def _admit(self, scheduled: list[ScheduledSeq], budget: int, cap: int) -> int:
        """Starts waiting sequences in turn while budget, rows and blocks last. Returns what is left of the
        budget.

        A sequence starts when all its tokens have room, so that prompts half done don't put each other out.
        None overtakes one that lacks room; only whoever waits for its grammar, for a store's answer, or for a
        prefix that is being computed, is passed over.
        """
        index = 0
        while budget and self._free_rows and index < len(self.waiting):
            seq = self.waiting[index]
            if seq.held or seq.asking or seq.is_delayed:
                index += 1
                continue
            if seq.num_pending:
                break  # preempted with a token in flight
            hits = self._find_prefix(seq)
            if self._is_being_computed(seq, len(hits)):
                index += 1
                continue
            blocks = self.pool.try_allocate(-(-seq.num_tokens // self._block_size) - len(hits), shared=hits)
            if blocks is None:
                break
            del self.waiting[index]
            self._start(seq, blocks, len(hits))
            if not self._fetch(seq, len(hits)):
                budget -= self._schedule_chunk(scheduled, seq, min(budget, cap))
        return budget

    def _fetch(self, seq: Sequence, start: int) -> bool:
        """Whether a sequence that has just started waits for its next blocks to come from a lower tier."""
        if self.tiers is None or not self._looks_up(seq):
            return False
        seq.status = FETCHING
        num_blocks = self.tiers.lookup(seq.keys[: (seq.num_tokens - 1) // self._block_size], start)
        if seq.num_admissions == 1:
            self._external_queries += seq.num_tokens - seq.num_computed
        if not num_blocks:
            seq.status = PREFILL
            return False
        end = start + num_blocks
        seq.fetch = fetch = Fetch(seq, start, seq.keys[start:end], seq.block_ids[:end])
        self.pool.try_allocate(0, shared=fetch.held)
        self.fetches.append(fetch)
        self._arriving.update(fetch.keys)
        self.tiers.begin(fetch)
        return True

    def _start(self, seq: Sequence, blocks: list[int], num_hits: int) -> None:
        seq.status = PREFILL
        seq.row = heapq.heappop(self._free_rows)
        seq.block_ids = blocks
        seq.num_computed = num_hits * self._block_size
        seq.register_at = seq.num_computed + self._block_size if self.pool.enable_caching else NEVER
        seq.num_admissions += 1
        if seq.register_at != NEVER:
            extend_keys(seq.keys, seq.root, seq.token_ids, self._block_size)
            seq.promised = seq.keys[num_hits:]
            for key in seq.promised:
                self._promised[key] = self._promised.get(key, 0) + 1
        insort(self.running, seq, key=_turn)
        if seq.num_admissions == 1 and self._looks_up(seq):  # what a preempted one finds is mostly its own
            seq.num_cached_tokens = seq.num_computed
            self._prefix_cache_queries += seq.num_tokens
            self._prefix_cache_hits += seq.num_computed

    def _looks_up(self, seq: Sequence) -> bool:
        """Prompt logprobs need every prompt token computed."""
        params = seq.request.params
        return (
            self.pool.enable_caching
            and params.prompt_logprobs is None
            and not params.skip_reading_prefix_cache
        )

    def _find_prefix(self, seq: Sequence) -> list[int]:
        """Cached blocks of its longest prefix, short of the last token: its logits are needed, so it is
        always computed."""
        if not self._looks_up(seq):
            return []
        root, token_ids, keys = self._last_looked_up
        if not seq.keys and root == seq.root:  # hashing takes many times as long as comparing
            seq.keys = keys[: common_length(seq.token_ids, token_ids) // self._block_size]
        self._last_looked_up = seq.root, seq.token_ids, seq.keys
        extend_keys(seq.keys, seq.root, seq.token_ids, self._block_size)
        return self.pool.match(seq.keys[: (seq.num_tokens - 1) // self._block_size])

    def _is_being_computed(self, seq: Sequence, index: int) -> bool:
        """Whether a sequence that has started will compute, or fetch, and register the block `index` of this
        one. A key implies its position."""
        if not self._looks_up(seq) or index >= (seq.num_tokens - 1) // self._block_size:
            return False
        key = seq.keys[index]
        return key in self._arriving or key in self._promised

    def _keep_promises(self, seq: Sequence) -> None:
        """Or not: its prefill has ended, one way or another."""
        for key in seq.promised:
            self._promised[key] -= 1
            if not self._promised[key]:
                del self._promised[key]
        seq.promised = []

    def _prefill_cap(self) -> int:
        """The most tokens one prompt may take from a step: others are to have a share while they wait."""
        cap = self._long_prefill_token_threshold
        if cap and len(self.waiting) + sum(seq.status is PREFILL for seq in self.running) > 1:
            return cap
        return self._max_num_batched_tokens

    def _register(self, seq: Sequence) -> None:
        """Makes the full blocks findable that are computed, or scheduled to be, and whose tokens are
        known."""
        size = self._block_size
        num_full = min(seq.num_computed, len(seq.token_ids)) // size
        extend_keys(seq.keys, seq.root, seq.token_ids, size)
        start = seq.register_at // size - 1
        self._make_findable(seq, start, seq.block_ids[start:num_full])
        seq.register_at = (num_full + 1) * size

    def _make_findable(self, seq: Sequence, start: int, blocks: list[int]) -> None:
        """The sequence's full blocks from `start` on. One whose content is findable already stays with the
        sequence, as a copy."""
        for block, key in zip(blocks, seq.keys[start:]):
            self.pool.register(block, key)
        if self.tiers is not None:
            self.tiers.registered(seq, start, start + len(blocks))
        if self.events is None:
            return
        size, end, run = self._block_size, start + len(blocks), start
        for i in range(start, end + 1):
            if i < end and self.pool.key_of(blocks[i - start]) is not None:
                continue
            if run < i:
                self.events.stored(
                    seq.keys[run:i],
                    seq.keys[run - 1] if run else None,
                    seq.token_ids[run * size : i * size],
                    seq.request.adapter,
                    seq.request.cache_salt,
                )
            run = i + 1

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        del self._sequences[seq.request.request_id]
        queue = self.waiting if seq.status is WAITING else self.running
        del queue[bisect_left(queue, seq.turn, key=_turn)]
        if seq.status is not WAITING:
            self._let_go(seq)
        if seq.grammar is not None:
            seq.grammar.close()
        seq.status, seq.finish_reason, seq.stop_reason, seq.error = FINISHED, reason, stop_reason, error

    def _let_go(self, seq: Sequence) -> None:
        """Gives back row and blocks. Steps in flight may still write there; whoever gets them next writes
        later."""
        if self.tiers is not None:
            self.tiers.released(seq.block_ids)
        self._keep_promises(seq)
        self.pool.release(seq.block_ids)
        heapq.heappush(self._free_rows, seq.row)
        seq.block_ids, seq.row, seq.fetch = [], -1, None

    @property
    def _max_num_tokens(self) -> int:
        return min(self._max_model_len, self.pool.num_blocks * self._block_size)


def _turn(seq: Sequence) -> tuple[float, ...]:
    return seq.turn
