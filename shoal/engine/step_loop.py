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

from shoal.api import Output
from shoal.config import ResolvedConfig
from shoal.engine.pause_state import PauseState
from shoal.engine.profile import span
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.runner.batch import BatchBuilder
from shoal.engine.runner.step_buffers import RING
from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.engine.step_outputs import InFlight, outputs_of
from shoal.engine.step_part import Parts
from shoal.errors import EngineDeadError


class StepLoop:
    """Runs the scheduler's sequences, one `step` at a time.

    A failure of the device or of a rank ends the ranks: the call raises EngineDeadError, and so does every
    later one. An interrupt, or a lack of memory, loses the steps in flight and aborts all requests.
    """

    def __init__(
        self, config: ResolvedConfig, ranks: Ranks, scheduler: Scheduler, parts: Parts, paused: PauseState
    ) -> None:
        self.ranks, self.scheduler = ranks, scheduler
        self._parts, self._paused = parts, paused
        self._completed_at = 0.0  # when a step was completed last, seconds of the monotonic clock
        self._block_size = config.block_size
        self._depth = 1 if config.async_scheduling else 0  # steps in flight while the next one is scheduled
        assert self._depth + 1 < RING, (
            f"more than {RING - 2} steps in flight: tokens would be overwritten before they are read"
        )
        self._in_flight: deque[InFlight] = deque()
        self._late: list[Output] = []  # outputs of drained steps, and of a step that was interrupted
        self.builder = self._new_builder()

    @property
    def has_work(self) -> bool:
        """True if a step would do anything. Requests that are kept while the engine is paused do not
        count."""
        unreported = self._in_flight or self.scheduler.finished_outside or self._late
        return bool(unreported) or (self._paused.reason is None and self.scheduler.has_work)

    def step(self) -> list[Output]:
        """Schedules and launches one step, then returns the outputs of the oldest that is due. While the
        engine is paused, no step is in flight, and this returns the outputs that are there."""
        self.ranks.check_usable()
        if self._paused.reason is not None:
            return self._take_unreported()
        parts = self._parts
        with self._guarded():
            for part in parts.before_schedule:
                part.before_schedule()
            outputs = self._late = self._take_unreported()  # an interrupt loses none of them
            with span("schedule"):
                plan = self.scheduler.schedule()
            for part in parts.after_schedule:
                outputs += part.after_schedule(plan)
            if plan is not None:
                with span("launch"):
                    self._in_flight.append(self._launch(plan))
            if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
                with span("complete"):
                    outputs += self._complete(self._in_flight.popleft())
            waits = plan is None and not (self._in_flight or outputs)
            for part in parts.after_step:
                part.after_step(waits)
            self._late = []
        return outputs

    def _take_unreported(self) -> list[Output]:
        """Returns the outputs that no step has returned: of drained steps, and the ends of requests that were
        finished from outside."""
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
        return outputs

    def tick(self) -> bool:
        """To be called while there is no work: parts do what needs no step. Returns whether it should be
        called again soon."""
        if self.ranks.error is not None:
            return False
        has_more = False
        with self._guarded():
            for part in reversed(self._parts):
                has_more |= part.tick()
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

    # Inside

    def _launch(self, plan: StepPlan) -> InFlight:
        packed, options = self.builder.build(plan, self.ranks.runner.padded_decodes(plan))
        for entry in plan.scheduled[plan.num_decodes :]:
            if entry.seq.started_at is None:
                entry.seq.started_at = time.monotonic()
        for part in self._parts.before_launch:
            part.before_launch(options)
        launched_at = time.monotonic()
        result = self.ranks.step(packed, options or None)
        ran_until = time.monotonic() if result.done is None else None
        return InFlight(plan, result, options.embeds, launched_at, ran_until)

    def _new_builder(self) -> BatchBuilder:
        runner = self.ranks.runner
        several = self.ranks.size > 1
        drafts = None if runner.drafting is None else runner.drafting.new_sender(runner.layout)
        return BatchBuilder(
            runner.layout,
            runner.cache.plan.groups[0].block_size,
            runner.share_from,
            runner.mixed_shapes,
            runner.whole_row_sizes,
            splits_sampling=several,
            drafts=drafts,
        )

    def _complete(self, step: InFlight) -> list[Output]:
        tokens = self.ranks.wait(step.result)
        now = step.ran_until or time.monotonic()
        # It began when it was launched, or when the step before it ended.
        seconds, self._completed_at = now - max(step.launched_at, self._completed_at), now
        results = self.scheduler.update(step.plan, tokens, step.result.reports)
        for part in self._parts.completed:
            part.completed(step.plan, seconds)
        return outputs_of(step, results, tokens)

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
        try:
            for part in self._parts:
                part.start_anew()
        except TimeoutError:  # a disk that hangs
            return
        for fetch in list(self.scheduler.blocks.fetches.under_way):
            self.scheduler.fetched(fetch, 0)
        self._in_flight.clear()
        self.builder = self._new_builder()
        self.ranks.runner.state.reset()
        self.ranks.runner.whole_rows.memory_is_new()  # it may have been interrupted between two kernels
        self.ranks.error = None
