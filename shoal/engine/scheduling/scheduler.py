"""`Scheduler`: chooses the sequences and tokens of each step (a `StepPlan`), and applies the sampled tokens.
Order, preemption victim and prompt budget are policy.py's; which KV blocks a sequence has is
sequence_blocks.py's; engine/step_loop.py runs the plans.

Each sequence has num_tokens tokens, and the KV of num_computed of them is in the cache. A step brings some
sequences nearer to num_computed == num_tokens. First come the decodes: a decode has one token left to
compute, and samples the next. Then come chunks of prompts, as many tokens as the step has room for. A
sequence that runs owns a row of the device's batch state and KV blocks for all its tokens. A sequence that
waits owns nothing.

`schedule` makes a plan and counts it as done at once: the caller must run every plan, in order. It may be
called again before `update` has brought the tokens that earlier plans sample. A decode can be planned
nevertheless: the scheduler only needs to know that there will be a token, and the device has the token
itself. A decode of up to n tokens samples 1 to n of them. Until `update` has brought them, the sequence
counts as n tokens longer, so that it has blocks for all of them. What a plan sends to the device:
engine/runner/batch.py.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import abc
from dataclasses import dataclass
from operator import attrgetter

from shoal.api import FinishReason, Request
from shoal.engine.scheduling import policy
from shoal.engine.scheduling.draft_lengths import DraftLengths, DraftReport
from shoal.engine.scheduling.fetches import Fetch
from shoal.engine.scheduling.part_state import StateCopies
from shoal.engine.scheduling.policy import PromptBudget
from shoal.engine.scheduling.queue_checks import check_progress, check_queues
from shoal.engine.scheduling.seams import Gate, Reserve
from shoal.engine.scheduling.sequence import Sequence, SequenceStatus
from shoal.engine.scheduling.state_blocks import SnapshotRoom, blocks_for
from shoal.engine.scheduling.step_costs import StepCosts
from shoal.errors import RequestError
from shoal.kv.groups import LayerGroup
from shoal.stats import STEP_TOKENS, Stats

WAITING, FETCHING, PREFILL = SequenceStatus.WAITING, SequenceStatus.FETCHING, SequenceStatus.PREFILL
DECODE, FINISHED = SequenceStatus.DECODE, SequenceStatus.FINISHED


@dataclass(slots=True)  # frozen would triple the cost of making one, and a step makes hundreds
class ScheduledSeq:
    """One sequence's part of a step: its tokens [start, start + num_tokens). `start` of a decode is an upper
    bound, as a step in flight may sample fewer tokens than it might. Its block_ids and token_ids must be read
    before the scheduler is called again."""

    seq: Sequence
    row: int
    start: int
    num_tokens: int
    samples: bool  # the step reaches the sequence's last token and samples the next

    @property
    def begins(self) -> bool:
        """True if no earlier step had a part of the sequence. A preempted sequence never begins again."""
        return self.seq.num_admissions == 1 and self.start == self.seq.num_cached_tokens

    @property
    def begins_as_decode(self) -> bool:
        """True if a prompt's chunk is a decode, because the KV of all tokens but the last was cached or
        fetched: the step that begins a sequence sends its row with this token. Hidden states, and layer
        events for readers of the prompt's blocks, need a prefill."""
        request = self.seq.request
        return (
            self.samples
            and self.num_tokens == 1
            and self.start > 0
            and self.begins
            and not (request.embed or request.offers_kv)
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The content of one step. The first `num_decodes` entries are decodes, the longest first: their first
    input token is in their row on the device, or is sent with the row, and they sample at most `num_tokens`
    tokens. The others are chunks of prompts, whose tokens are sent with the step. `num_tokens` is the sum
    over all entries. The step has places for `queries` tokens of each decode, and no decode has more."""

    scheduled: tuple[ScheduledSeq, ...]
    num_decodes: int
    num_tokens: int
    copies: StateCopies | None = None
    queries: int = 1
    head_rests: bool = False  # a draft head makes no drafts


@dataclass(slots=True)
class TokenResult:
    """The tokens of one step that belong to a sequence. `sample` is their index in the step's result, which
    may have more of them: the surplus after the sequence's end."""

    seq: Sequence
    token_ids: list[int]
    sample: int
    finish_reason: FinishReason | None


class Scheduler:
    """The sequences of one engine and their KV blocks. Call `add`, `schedule` and `update`; `finish` ends a
    request from outside.

    Both queues, `waiting` and `running`, are sorted by the turn that the policy gives a request. A sequence
    that is preempted goes from `running` to its place in `waiting`.

    target_itl_s: target duration of a step while sequences decode, in seconds, which bounds its prompt
    tokens; None: no target. step_sizes: the token counts, ascending, for which the runner has captured steps;
    a step that the target shortens prefers one of them. queries: the most tokens of a decode in one step.
    groups: which layers share blocks; none: all of them. snapshots: room for kept states, if layers are
    recurrent.

    Parts of the engine (engine/step_part.py) attach themselves: to `gates`, where they may keep a sequence
    waiting, to `reserves`, where they are asked for blocks that they hold, and to `blocks`.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        scheduling_policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
        target_itl_s: float | None = None,
        step_sizes: abc.Sequence[int] = (),
        queries: int = 1,
        groups: abc.Sequence[LayerGroup] = (),
        snapshots: SnapshotRoom | None = None,
    ) -> None:
        sizes = max_num_batched_tokens, max_model_len
        self.blocks = blocks_for(groups, num_blocks, block_size, enable_prefix_caching, *sizes, snapshots)
        self.gates: list[Gate] = []
        self.reserves: list[Reserve] = []
        self.lengths: DraftLengths | None = None  # chooses how many of its `queries` tokens a decode has
        # the measured costs of steps; without them the target has no effect
        self.costs: StepCosts | None = None
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self.finished_outside: list[Sequence] = []  # the next result of take_finished_outside
        # A heap: the lowest row is given first, so that the rows in use stay dense.
        self._free_rows = list(range(max_num_seqs))
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._turn_of = policy.POLICIES[scheduling_policy]
        self._long_prefill_token_threshold = long_prefill_token_threshold
        self._target_itl_s = target_itl_s
        self._step_sizes = step_sizes
        self._queries = queries
        self.lookahead = 0  # further slots that a draft head fills after a step's tokens
        self._num_added = 0
        self._num_preemptions = 0
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
            cache = f"the whole KV cache of {self.blocks.pool.num_blocks} blocks, {limit} tokens long,"
            what, option = cache, "kv_cache_memory_bytes"
            if limit == self._max_model_len:
                what, option = f"max_model_len {limit}", "max_model_len"
            raise RequestError(
                f"the prompt has {num_tokens} tokens, and {what} must hold it"
                f"{'' if request.embed else ' and at least one more'}; shorten it or raise {option}"
            )

    def add(self, request: Request) -> Sequence:
        """Adds the request to the waiting ones. Raises RequestError if its id is in use, or if it is longer
        than the model or the whole cache allows."""
        self._check_room(request)
        turn = self._turn_of(request, self._num_added)
        self._num_added += 1
        limit, max_tokens = self._max_num_tokens, request.params.max_tokens
        if request.embed:  # it samples one token, which is dropped and needs no room in the cache
            limit, max_tokens = limit + 1, 1
        if max_tokens is not None:
            limit = min(limit, len(request.prompt_token_ids) + max_tokens)
        seq = Sequence(request, turn, limit)
        insort(self.waiting, seq, key=_turn)
        self._sequences[request.request_id] = seq
        return seq

    def give_turn(self, seq: Sequence, turn: policy.Turn) -> None:
        """Moves a waiting sequence to another turn, which no other sequence has."""
        _remove(self.waiting, seq)
        seq.turn = turn
        insort(self.waiting, seq, key=_turn)

    def take_out(self, seq: Sequence) -> None:
        """Ends a sequence for a part of the engine, which reports the end by `finished_outside`."""
        self._finish(seq, FinishReason.LENGTH)

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a request that is no longer wanted, as `finish` does."""
        return self.finish(request_id, FinishReason.ABORT)

    def abort_all(self) -> None:
        for request_id in list(self._sequences):
            self.abort(request_id)

    def preempt_all(self) -> None:
        """Preempts every running sequence, as its KV is about to be lost. No step may be in flight, so that
        all sampled tokens are known."""
        while self.running:
            self._preempt(self.running[-1])

    def finish(
        self,
        request_id: str,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> Sequence | None:
        """Ends a request from outside, whatever its sequence is doing. Tokens of it that are still in flight
        are dropped. Returns None if the request has ended already or never was."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._finish(seq, reason, stop_reason, error)
            self.finished_outside.append(seq)
        return seq

    def take_finished_outside(self) -> list[Sequence]:
        """Returns the sequences that `finish` or an error ended since the last call. `update` does not report
        them."""
        finished, self.finished_outside = self.finished_outside, []
        return finished

    # Steps

    def schedule(self) -> StepPlan | None:
        """Returns the next step, or None if nothing can run before an `update` or `add`."""
        decodes: list[ScheduledSeq] = []
        chunks: list[ScheduledSeq] = []
        queries, head_rests = self._queries, False
        if self.lengths is not None:
            has_room = self._free_rows and self.waiting and not self.blocks.lacks_room(self.waiting[0])
            queries = self.lengths.choose(self.running, may_start=bool(has_room))
            head_rests = self.lengths.head_rests
        num_tokens = self._schedule_decodes(decodes, queries)
        queries = max((entry.num_tokens for entry in decodes), default=1)
        queries = queries if self.lengths is None else self.lengths.places(queries)
        if self.waiting or len(decodes) < len(self.running):
            budget = self._prompt_budget(len(decodes), len(decodes) * queries)
            self._schedule_prompts(chunks, budget)
            self._admit(chunks, budget)
            num_tokens += budget.num_taken
            if queries == 1:  # otherwise each decode has places for several tokens
                decodes += [entry for entry in chunks if entry.begins_as_decode]
                chunks = [entry for entry in chunks if not entry.begins_as_decode]
        if not num_tokens:
            return None
        # Attention begins with the longest, so that the short ones fill the gaps at its end.
        decodes.sort(key=attrgetter("start"), reverse=True)
        entries = (*decodes, *chunks)
        return StepPlan(entries, len(decodes), num_tokens, self.blocks.copies(entries), queries, head_rests)

    def update(
        self, plan: StepPlan, tokens: abc.Sequence[list[int]], reports: abc.Sequence[DraftReport] = ()
    ) -> list[TokenResult]:
        """Applies the tokens that a step has sampled, a list for each of its entries that samples: one token,
        or as many as `num_tokens` of a decode. It must be called for every plan, in the order of the plans.
        `reports`: about the drafts of each of these entries, if the step looked some up.

        Returns the tokens that count. Tokens after a sequence's end are dropped, whether it ended earlier or
        with one of these. A token that a grammar refuses is dropped too, and ends its sequence with an error.
        """
        decodes = zip(plan.scheduled[: plan.num_decodes], reports)
        unused = sum(entry.num_tokens - 1 - report.num_verified for entry, report in decodes)
        self._step_tokens += plan.num_tokens - unused
        self._steps_by_tokens[bisect_left(STEP_TOKENS, plan.num_tokens - unused)] += 1
        results = []
        sample = -1
        for entry in plan.scheduled:
            if not entry.samples:
                continue
            sample += 1
            seq = entry.seq
            if seq.status is FINISHED:
                continue
            token_ids, grammar, known = tokens[sample], seq.grammar, seq.token_ids
            if self.lengths is not None:
                self.lengths.learn(seq, len(token_ids), reports[sample] if reports else None)
            if seq.request.embed:  # a row gives its hidden state only if it samples a token
                self._finish(seq, FinishReason.STOP)
                results.append(TokenResult(seq, token_ids, sample, FinishReason.STOP))
                continue
            if len(token_ids) < entry.num_tokens and sample < plan.num_decodes:
                self._shorten(seq, entry.num_tokens - len(token_ids))
            num_known = len(known)
            reason = stop_reason = error = None
            for token_id in token_ids:
                if grammar is not None and not grammar.accept(token_id):
                    reason, error = FinishReason.ERROR, grammar.error
                    break
                known.append(token_id)
                if grammar is not None and grammar.ended:
                    reason = FinishReason.STOP
                    break
                if (
                    token_id in seq.stop_ids
                    and len(known) - seq.num_prompt_tokens >= seq.request.params.min_tokens
                ):
                    reason, stop_reason = FinishReason.STOP, seq.stop_reason_of(token_id)
                    break
                if len(known) >= seq.max_num_tokens:
                    reason = FinishReason.LENGTH
                    break
            # A block becomes findable when all its tokens are computed, and known, as its key is made of
            # them.
            if seq.num_computed >= seq.register_at and len(known) >= seq.register_at:
                self.blocks.computed(seq)
            if reason is not None:
                token_ids = token_ids[: len(known) - num_known]
                if reason is FinishReason.ERROR:
                    self.finish(seq.request.request_id, reason, "grammar", error)
                    if not token_ids:
                        continue
                    reason = None  # `take_finished_outside` reports it, after these tokens
                else:
                    self._finish(seq, reason, stop_reason)
            results.append(TokenResult(seq, token_ids, sample, reason))
        return results

    @staticmethod
    def _shorten(seq: Sequence, num_tokens: int) -> None:
        """Takes back tokens that a decode might have sampled and did not. The sequence keeps its blocks, as
        it will fill them."""
        seq.num_tokens -= num_tokens
        if seq.status is DECODE:  # otherwise it was preempted, and has computed nothing
            seq.num_computed -= num_tokens

    def fetched(self, fetch: Fetch, num_blocks: int) -> None:
        """Ends a fetch whose first `num_blocks` blocks have arrived intact. The sequence computes the
        others, or starts again with those that it finds then."""
        seq = fetch.seq
        if not self.blocks.fetches.arrived(fetch, num_blocks):
            self._preempt(seq)
            self._num_preemptions -= 1
            seq.num_admissions -= 1
        elif seq.status is FETCHING and seq.fetch is None:
            seq.status = PREFILL

    # Everything else

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def num_to_prefill(self) -> int:
        """Number of tokens left to compute of the prompts that have begun."""
        return sum(seq.num_tokens - seq.num_computed for seq in self.running if seq.status is PREFILL)

    @property
    def num_decoding(self) -> int:
        """Number of sequences that have computed their prompt and decode."""
        return sum(seq.status is DECODE for seq in self.running)

    def stats(self) -> Stats:
        stats = Stats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_deferred=sum(not self._may_start(seq) for seq in self.waiting),
            num_preemptions=self._num_preemptions,
            step_tokens=self._step_tokens,
            steps_by_tokens=list(self._steps_by_tokens),
        )
        self.blocks.fill_in(stats)
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks. Returns False if some are in use: running sequences continue, but no
        other sequence will find their KV."""
        return self.blocks.reset(self.running)

    def check(self) -> None:
        """Checks blocks, references, rows and queues. Raises AssertionError."""
        self.blocks.check(self.running)
        check_queues(self.waiting, self.running, self._sequences, self._free_rows, self._max_num_seqs)
        check_progress(self.running, self.blocks.largest, self._queries > 1 or self.lengths is not None)

    # Inside a step

    def _schedule_decodes(self, scheduled: list[ScheduledSeq], queries: int) -> int:
        """Adds the sequences that can sample their next tokens, at most `queries` each, in turn, within the
        step's token budget. Returns how many tokens they have together."""
        budget = self._max_num_batched_tokens
        # _grow may preempt sequences, which removes them from `running` within this loop. It removes only
        # sequences after `seq`, which the loop has not reached, or `seq` itself, and then the loop ends.
        for seq in self.running:
            if seq.status is not DECODE:
                continue
            if budget < queries:
                if budget == 0:
                    break
                queries = budget
            start = seq.num_computed
            num_tokens = queries if self.lengths is None else min(queries, 1 + seq.most_drafts)
            if start + num_tokens >= seq.max_num_tokens:
                num_tokens = seq.max_num_tokens - 1 - start
                if num_tokens <= 0:
                    continue  # a step in flight samples its last token, or may do so
            if seq.lockstep and (seq.num_pending or seq.is_delayed):
                continue  # its next token depends on a token that the host has not seen, or on its grammar
            end = start + num_tokens
            drafts = self.lengths is not None and num_tokens > 1
            if drafts and seq.room < end and not self.blocks.grow(seq, end):
                num_tokens = max(1, seq.room - start)  # drafts preempt no sequence
                end = start + num_tokens
            if seq.room < end and not self._grow(seq, end):
                if seq.status is DECODE:
                    continue  # it waits for blocks that come back; those after it may need none
                break
            self._look_ahead(seq, end)
            seq.num_computed = end
            seq.num_tokens = end + 1
            scheduled.append(ScheduledSeq(seq, seq.row, start, num_tokens, True))
            budget -= num_tokens
        return self._max_num_batched_tokens - budget

    def _look_ahead(self, seq: Sequence, end: int) -> None:
        """Gives a sequence that samples after `end` tokens blocks for a head's further slots, where some are
        free."""
        if seq.room < (reach := min(end + self.lookahead, seq.max_num_tokens)):
            self.blocks.grow(seq, reach)

    def _grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Gives the sequence blocks for `num_tokens` tokens. Where too few are free, parts give back what
        they hold in reserve, and then sequences are preempted until there are enough. Returns False if `seq`
        itself was preempted, or if no preemption would free a block: the sequence then waits until blocks
        come back that are lent or being fetched."""
        while not self.blocks.grow(seq, num_tokens):
            if any(reserve.give_back() for reserve in self.reserves):
                continue
            # Those before it in turn may be part of the step already. So may all decodes if this is a prompt.
            candidates = self.running[bisect_left(self.running, seq.turn, key=_turn) :]
            if seq.status is PREFILL:
                candidates = [one for one in candidates[1:] if one.status is PREFILL]
            candidates = [one for one in candidates if self.blocks.would_free(one)]
            if not candidates:
                return False
            chosen = candidates[policy.victim(candidates)]
            self._preempt(chosen)
            if chosen is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Puts a running sequence back among the waiting ones. When it runs again it computes all tokens
        whose blocks have left the cache meanwhile."""
        _remove(self.running, seq)
        self._vacate(seq)
        seq.status, seq.num_computed = WAITING, 0
        insort(self.waiting, seq, key=_turn)
        self._num_preemptions += 1

    def _prompt_budget(self, num_decodes: int, num_tokens: int) -> PromptBudget:
        """Returns the budget of prompt tokens of a step with `num_decodes` decodes of `num_tokens` tokens
        together."""
        max_tokens, threshold = self._max_num_batched_tokens, self._long_prefill_token_threshold
        cap = max_tokens
        if threshold:
            num_begun = sum(seq.status is PREFILL for seq in self.running)
            cap = policy.prompt_cap(max_tokens, threshold, num_begun + len(self.waiting))
        tokens = max(0, max_tokens - num_tokens)
        costs = self.costs
        if costs is None or self._target_itl_s is None:
            return PromptBudget(tokens, cap)
        # A decoding sequence may be left out of this step, because it waits for its grammar or for a token in
        # flight. The step delays it nevertheless.
        if not num_decodes and not any(seq.status is DECODE for seq in self.running):
            return PromptBudget(tokens, cap)
        return policy.prompt_budget(
            tokens,
            cap,
            num_decodes,
            num_tokens,
            self._target_itl_s,
            costs,
            self._block_size,
            self._step_sizes,
        )

    def _schedule_prompts(self, scheduled: list[ScheduledSeq], budget: PromptBudget) -> None:
        """Continues the prompts that have begun, in turn."""
        for seq in self.running:
            if budget.is_spent:
                break
            if seq.status is not PREFILL or seq.request.fetches_only:
                continue
            start = seq.num_computed
            num_tokens = self.blocks.fit(seq, start, budget.fit(start, seq.num_tokens - start))
            if num_tokens == 0:
                break
            if seq.room < start + num_tokens and not self._grow(seq, start + num_tokens):
                continue
            self._schedule_chunk(scheduled, seq, num_tokens, budget)

    def _schedule_chunk(
        self, scheduled: list[ScheduledSeq], seq: Sequence, num_tokens: int, budget: PromptBudget
    ) -> None:
        """Adds the sequence's next `num_tokens` prompt tokens, for which it has blocks."""
        start = seq.num_computed
        budget.spend(start, num_tokens)
        seq.num_computed += num_tokens
        samples = seq.num_computed == seq.num_tokens
        self.blocks.computed(seq)
        if samples:
            self.blocks.prompt_ends(seq)
            self._look_ahead(seq, seq.num_computed)
            seq.status = DECODE
            seq.num_tokens += 1
        scheduled.append(ScheduledSeq(seq, seq.row, start, num_tokens, samples))

    def _admit(self, scheduled: list[ScheduledSeq], budget: PromptBudget) -> None:
        """Starts waiting sequences in turn, while budget, rows and blocks last.

        A sequence starts when all its tokens have room, so that half-computed prompts don't preempt each
        other. If a sequence doesn't fit, none after it is tried while any sequence runs. A sequence is
        skipped only while a gate keeps it waiting, or while another sequence computes its prefix.
        """
        if not self._free_rows or budget.is_spent:
            return
        for seq in list(self.waiting):
            if not self._may_start(seq):
                continue
            if seq.num_pending:
                break  # it was preempted while a step in flight samples its token, which it needs to start
            if self.blocks.lacks_room(seq):
                if self.running:
                    break
                continue  # parts hold what it lacks, maybe for a sequence after it, which must be tried
            found, num_cached = self.blocks.find(seq)
            if self.blocks.is_coming(seq, num_cached // self._block_size):
                continue
            num_tokens = budget.fit(num_cached, seq.num_tokens - num_cached)
            num_tokens = self.blocks.fit(seq, num_cached, num_tokens)
            if num_tokens == 0:
                break
            if not self.blocks.start(seq, found, num_cached):
                if self.running:
                    break
                continue
            _remove(self.waiting, seq)
            seq.row = heapq.heappop(self._free_rows)
            insort(self.running, seq, key=_turn)
            seq.status = FETCHING  # a source's lookup must not count it as a prompt that is computed
            if not self.blocks.fetch(seq):
                seq.status = PREFILL
                if not seq.request.fetches_only:
                    self._schedule_chunk(scheduled, seq, num_tokens, budget)
            if not self._free_rows or budget.is_spent:
                break

    def _may_start(self, seq: Sequence) -> bool:
        # A generator would take twice as long, and long queues are asked in each step.
        for gate in self.gates:  # noqa: SIM110
            if not gate.may_start(seq):
                return False
        return True

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        del self._sequences[seq.request.request_id]
        if seq.status is WAITING:
            _remove(self.waiting, seq)
        else:
            _remove(self.running, seq)
            self._vacate(seq)
        if seq.grammar is not None:
            seq.grammar.close()
        seq.status = FINISHED
        seq.finish_reason, seq.stop_reason, seq.error = reason, stop_reason, error

    def _vacate(self, seq: Sequence) -> None:
        """Releases the sequence's row and blocks. Steps in flight may still write there, but the next owner
        writes later."""
        self.blocks.release(seq)
        heapq.heappush(self._free_rows, seq.row)
        seq.row = -1

    @property
    def _max_num_tokens(self) -> int:
        return min(self._max_model_len, self.blocks.room)


def _turn(seq: Sequence) -> policy.Turn:
    return seq.turn


def _remove(queue: list[Sequence], seq: Sequence) -> None:
    del queue[bisect_left(queue, seq.turn, key=_turn)]
