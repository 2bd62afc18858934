"""Schedules the steps of one engine, launches them on the ranks, and completes them: their tokens become
outputs.

With asynchronous scheduling step n+1 is scheduled and launched before the tokens of step n are read, so the
device never waits for the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.api import Logprob, Output, Span, TokenLogprobs
from shoal.config import ResolvedConfig
from shoal.engine.offload.tiers import KvTiers
from shoal.engine.peers.peers import KvPeers
from shoal.engine.profile import span
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.runner.batch import BatchBuilder, num_prompt_targets
from shoal.engine.runner.runner import StepResult
from shoal.engine.runner.sampling import LogprobLists
from shoal.engine.runner.step_buffers import RING
from shoal.engine.scheduling.grammar import GrammarAdmission, Grammars
from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.scheduling.step_costs import StepCosts
from shoal.errors import EngineDeadError
from shoal.kv.events.publisher import KvEvents
from shoal.stats import SleepState


class PauseState:
    """Why an engine computes nothing: it sleeps, or its weights are incomplete. Sleeper and Weights write it;
    the core and its step loop read it."""

    def __init__(self) -> None:
        self.sleep = SleepState()  # written by Sleeper
        self.weights_lost: str | None = None  # written by Weights: why the weights cannot be used

    @property
    def reason(self) -> str | None:
        """The error text for requests that cannot run now. None: the engine runs."""
        if not self.sleep.is_sleeping:
            return self.weights_lost
        what = f": {' and '.join(sorted(self.sleep.asleep))}" if self.sleep.asleep else ""
        return f"the engine sleeps (level {self.sleep.level}{what}); wake it up first"


@dataclass(slots=True)
class InFlight:
    """A step that was launched and is not completed yet."""

    plan: StepPlan
    result: StepResult
    embeds: list[int]  # indices of the samples that result.embeddings holds, in its order
    launched_at: float  # seconds of the monotonic clock


class StepLoop:
    """Runs the scheduler's sequences, one `step` at a time.

    A failure of the device or of a rank ends the ranks: the call raises EngineDeadError, and so does every
    later one. An interrupt (any other exception) loses the steps in flight and aborts all requests.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        ranks: Ranks,
        scheduler: Scheduler,
        grammars: Grammars,
        admission: GrammarAdmission,
        tiers: KvTiers | None,
        peers: KvPeers | None,
        events: KvEvents | None,
        paused: PauseState,
        costs: StepCosts | None,
    ) -> None:
        """`costs`: learns the cost of steps; None: the engine has no use for it."""
        self.ranks, self.scheduler, self.tiers = ranks, scheduler, tiers
        self.peers = peers
        self._grammars, self._admission, self._events = grammars, admission, events
        self._paused = paused
        self._costs = costs
        self._completed_at = 0.0  # when a step was completed last, seconds of the monotonic clock
        self._block_size = config.block_size
        self._depth = 1 if config.async_scheduling else 0  # steps in flight while the next one is scheduled
        assert self._depth + 1 < RING, "tokens of a step would be overwritten before they are read"
        self._in_flight: deque[InFlight] = deque()
        self._late: list[Output] = []  # outputs of the steps that `drain` completed
        self.builder = self._new_builder()

    @property
    def has_work(self) -> bool:
        """True if a step would do anything. Requests that are kept while the engine is paused do not
        count."""
        unreported = self._in_flight or self.scheduler.finished_outside or self._late
        return bool(unreported) or (self._paused.reason is None and self.scheduler.has_work)

    def step(self) -> list[Output]:
        """Schedules and launches one step, then returns the outputs of the oldest that is due."""
        self.ranks.check_usable()
        self._admission.release()
        outputs, self._late = self._late, []
        for seq in self.scheduler.take_finished_outside():
            outputs.append(
                Output(
                    seq.request.request_id,
                    [],
                    finish_reason=seq.finish_reason,
                    stop_reason=seq.stop_reason,
                    error=seq.error,
                )
            )
        runs = self._paused.reason is None
        with self._guarded():
            tiers, peers = (self.tiers, self.peers) if runs else (None, None)
            if tiers is not None:
                tiers.before_schedule()
            if peers is not None:
                peers.before_schedule()
            with span("schedule"):
                plan = self.scheduler.schedule(self._costs) if runs else None
            if tiers is not None:
                tiers.before_step(launches=plan is not None)
            if peers is not None:
                peers.before_step()
            if plan is not None:
                if peers is not None:
                    outputs += peers.begin(plan)
                with span("launch"):
                    self._in_flight.append(self._launch(plan))
            if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
                with span("complete"):
                    outputs += self._complete(self._in_flight.popleft())
            elif self._admission.is_busy and not outputs:
                self._admission.wait()
            waits = plan is None and not (self._in_flight or outputs)
            if tiers is not None:
                tiers.after_step(waits)
            if peers is not None:
                peers.after_step(waits)
        if self._events is not None:
            self._events.flush()
        return outputs

    def tick(self) -> bool:
        """To be called while there is no work: moves KV blocks to lower tiers, and renews leases of other
        workers' blocks. Returns whether it should be called again soon."""
        if self.ranks.error is not None:
            return False
        with self._guarded():
            has_more = self.peers is not None and self.peers.tick()
            if self.tiers is not None:
                has_more |= self.tiers.tick()
        return has_more

    def drain(self) -> None:
        """Completes the steps in flight. The next `step` returns their outputs."""
        self.ranks.check_usable()
        with self._guarded():
            while self._in_flight:
                self._late += self._complete(self._in_flight.popleft())

    def report(self, outputs: list[Output]) -> None:
        """Adds outputs of another core's requests to what the next `step` returns."""
        self._late += outputs

    # Launching

    def _launch(self, plan: StepPlan) -> InFlight:
        packed, options = self.builder.build(plan, self.ranks.runner.padded_decodes(plan.num_decodes))
        for entry in plan.scheduled[plan.num_decodes :]:
            if entry.seq.started_at is None:
                entry.seq.started_at = time.monotonic()
        if options.grammars:
            options.masks = self._grammars.masks(options.grammars)
        launched_at = time.monotonic()
        return InFlight(plan, self.ranks.step(packed, options or None), options.embeds, launched_at)

    def _new_builder(self) -> BatchBuilder:
        runner = self.ranks.runner
        several = self.ranks.size > 1
        return BatchBuilder(
            runner.layout, self._block_size, runner.share_from, runner.mixed_shapes, splits_sampling=several
        )

    # Completing

    def _complete(self, step: InFlight) -> list[Output]:
        tokens, result = self.ranks.wait(step.result), step.result
        if self._costs is not None:
            self._learn(self._costs, step)
        if self.tiers is not None:
            self.tiers.completed(step.plan, step.launched_at)
        logprobs = result.logprobs.to_lists() if result.logprobs is not None else None
        if result.prompt_logprobs is not None:
            _keep_prompt_logprobs(step.plan, result.prompt_logprobs.to_lists())
        embeddings: dict[int, list[float]] = {}
        if result.embeddings is not None:
            embeddings = dict(zip(step.embeds, result.embeddings.tolist()))
        outputs = []
        results = self.scheduler.update(step.plan, tokens)
        if self.peers is not None:
            self.peers.completed(step.plan)
        for sampled in results:
            seq, params = sampled.seq, sampled.seq.request.params
            num_given = seq.num_prompt_tokens + len(seq.request.output_token_ids)
            is_first = len(seq.token_ids) == num_given + 1
            if is_first and seq.started_at is None:  # It began as a decode.
                seq.started_at = step.launched_at
            spans = _spans_of(seq, num_given, time.monotonic()) if is_first else None
            if seq.request.embed:
                outputs.append(
                    Output(
                        seq.request.request_id,
                        [],
                        finish_reason=sampled.finish_reason,
                        embedding=embeddings[sampled.sample],
                        num_cached_tokens=seq.num_cached_tokens,
                        spans=spans,
                    )
                )
                continue
            figures = None
            if logprobs is not None and params.logprobs is not None:
                figures = [_token_logprobs(logprobs, sampled.sample, sampled.token_id, params.logprobs)]
            prompt_logprobs = None
            if params.prompt_logprobs is not None and is_first:
                prompt_logprobs = seq.prompt_logprobs or [None]
            outputs.append(
                Output(
                    seq.request.request_id,
                    [sampled.token_id],
                    finish_reason=sampled.finish_reason,
                    stop_reason=seq.stop_reason,
                    logprobs=figures,
                    prompt_logprobs=prompt_logprobs,
                    num_cached_tokens=seq.num_cached_tokens,
                    spans=spans,
                )
            )
        return outputs

    def _learn(self, costs: StepCosts, step: InFlight) -> None:
        """Learns from a step that has just ended. It began when it was launched, or when the step before it
        ended."""
        now = time.monotonic()
        seconds = now - max(step.launched_at, self._completed_at)
        self._completed_at = now
        plan = step.plan
        chunks = [(entry.start, entry.num_tokens) for entry in plan.scheduled[plan.num_decodes :]]
        costs.learn(len(plan.scheduled), chunks, seconds)

    # Failures

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Interrupts (Ctrl-C, an exit, a lack of memory) lose the steps in flight. Any other exception ends
        the ranks: after a bug, such as an AssertionError, the scheduler's state may be wrong."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, MemoryError):
                raise self.ranks.failed(error) from error
            self._start_anew()
            raise

    def _start_anew(self) -> None:
        """Resets the engine after an interrupt or a lack of memory in the middle of a step, because it is
        unknown how much of the step reached the device. So every request is aborted, and no block of the step
        may be found later. With several ranks the engine ends, because the ranks cannot be brought back to
        one state."""
        if self.ranks.size > 1:
            self.ranks.error = EngineDeadError(
                "interrupted in the middle of a tensor-parallel step; build a new engine"
            )
            return
        # This error stays if the code below is interrupted.
        self.ranks.error = EngineDeadError(
            "interrupted in the middle of a step, and its transfers did not end; build a new engine"
        )
        self.scheduler.abort_all()
        self.scheduler.reset_prefix_cache()
        if self.peers is not None:
            self.peers.abandon()
        if self.tiers is not None:
            try:
                self.tiers.start_anew()
            except TimeoutError:  # a disk that hangs
                return
        for fetch in list(self.scheduler.blocks.fetches):
            self.scheduler.fetched(fetch, 0)
        if self._events is not None:
            self._events.flush()
        self._in_flight.clear()
        self._late.clear()
        self.builder = self._new_builder()
        self.ranks.runner.state.reset()
        self.ranks.error = None


def _spans_of(seq: Sequence, num_given: int, now: float) -> list[Span]:
    """Returns the spans of the time up to the first token, which has just been sampled. A request is queued
    until its first step or its first fetch; fetches of its prefetch request that began before the request was
    added do not count. `num_given`: tokens that the request had when it was added."""
    assert seq.started_at is not None, "a token of no step"
    begun = [one.begun_at for one in seq.completed_fetches if one.begun_at >= seq.added_at]
    spans = [Span("queue", now - seq.added_at, min([seq.started_at, *begun]) - seq.added_at)]
    for one in seq.completed_fetches:
        attributes: dict[str, str | int | float] = {"from": one.source, "blocks": one.num_blocks}
        spans.append(Span("transfer", now - one.begun_at, one.seconds, attributes=attributes))
    seconds = now - seq.started_at
    spans.append(Span("prefill", seconds, seconds, attributes={"tokens": num_given - seq.num_cached_tokens}))
    return spans


def _keep_prompt_logprobs(plan: StepPlan, found: LogprobLists) -> None:
    """Adds a step's log-probabilities of prompt tokens to their sequences."""
    at = 0
    for entry in plan.scheduled:
        seq, k = entry.seq, entry.seq.request.params.prompt_logprobs
        if k is None:
            continue
        if entry.start == 0 or seq.prompt_logprobs is None:
            seq.prompt_logprobs = [None]
        for i in range(num_prompt_targets(entry)):
            target = seq.token_ids[entry.start + 1 + i]
            seq.prompt_logprobs.append(_token_logprobs(found, at + i, target, k))
        at += num_prompt_targets(entry)


def _token_logprobs(found: LogprobLists, i: int, token_id: int, k: int) -> TokenLogprobs:
    """vLLM's map for one token: itself with its rank, and the k best (all of them for k = -1)."""
    best_ids, best = found.top_ids[i], found.top[i]
    if k >= 0:
        best_ids, best = best_ids[:k], best[:k]
    ranked = {
        token: Logprob(logprob, rank) for rank, (token, logprob) in enumerate(zip(best_ids, best), start=1)
    }
    return {token_id: Logprob(found.chosen[i], found.ranks[i])} | ranked
