"""`DraftLearner`: the part of an engine with speculation that has the scheduler choose how many drafts a step
verifies. scheduling/draft_lengths.py is the choice."""

from __future__ import annotations

from shoal.config import ResolvedConfig, SpeculativeConfig
from shoal.engine.drafting.head_clock import HeadClock
from shoal.engine.drafting.step_sizes import draft_sizes
from shoal.engine.scheduling.draft_lengths import DraftLengths
from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.engine.step_part import StepPart


class DraftLearner(StepPart):
    def __init__(
        self, config: ResolvedConfig, options: SpeculativeConfig, scheduler: Scheduler, clock: HeadClock
    ) -> None:
        self._clock = clock
        if options.has_head:  # it runs as many slots after the last token of a step
            scheduler.lookahead = options.num_speculative_tokens - 1
        self._lengths = scheduler.lengths = DraftLengths(
            options.queries - 1,
            config.max_num_batched_tokens,
            options.enable_adaptive_verification,
            draft_sizes(config),
            clock.runs,
        )

    def completed(self, plan: StepPlan, seconds: float) -> None:
        num_prompt_tokens = sum(entry.num_tokens for entry in plan.scheduled[plan.num_decodes :])
        sizes = plan.num_decodes, plan.queries
        self._lengths.completed(*sizes, seconds, num_prompt_tokens, self._clock.take())

    def start_anew(self) -> None:
        self._clock.clear()
