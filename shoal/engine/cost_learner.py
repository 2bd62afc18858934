"""`CostLearner`: the part of an engine that has the scheduler know what steps cost, learned from those that
have run. scheduling/step_costs.py is the model of the costs."""

from __future__ import annotations

from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.engine.scheduling.step_costs import StepCosts
from shoal.engine.step_part import StepPart
from shoal.stats import Stats


class CostLearner(StepPart):
    """An engine has it only where there is a target for the gap between tokens."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._costs = scheduler.costs = StepCosts()

    def completed(self, plan: StepPlan, seconds: float) -> None:
        chunks = [(entry.start, entry.num_tokens) for entry in plan.scheduled[plan.num_decodes :]]
        self._costs.learn(len(plan.scheduled), chunks, seconds)

    def fill_in(self, stats: Stats) -> None:
        costs = self._costs
        if costs.num_learned:
            stats.decode_step_s = costs.step_s + self._scheduler.num_decoding * costs.seq_s
            stats.prompt_token_s = costs.token_s
