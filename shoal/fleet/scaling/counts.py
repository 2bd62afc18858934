"""`PlannerCounts`: the planner's counters, a part of its view. loop.py counts; pool/metrics.py exports them
for Prometheus, even if the planner is another process."""

from __future__ import annotations

from shoal.fleet.planner.observation import Decision, Observation, counts_of
from shoal.fleet_views import PlannedModel

CHANGES = ("add", "remove", "move")  # move: a worker changes its role


class PlannerCounts:
    """Counters by model name. Each model has all kinds from the start, so that a rate sees the first
    event."""

    def __init__(self) -> None:
        self.models: dict[str, PlannedModel] = {}

    def looked(self, model: str, seen: Observation) -> None:
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = PlannedModel(
                desired=counts_of(seen),
                decisions=dict.fromkeys((*CHANGES, "none", "held"), 0),
                changes=dict.fromkeys(CHANGES, 0),
                failures=dict.fromkeys(CHANGES, 0),
            )
        found.workers, found.pending = counts_of(seen), seen.pending

    def decided(self, model: str, decision: Decision) -> None:
        """Counts a decision. While workers start or end nothing is decided, and the previous numbers stay
        desired."""
        found = self.models[model]
        kinds = {"add" if change.count > 0 else "remove" for change in decision.changes}
        if decision.moves:
            kinds.add("move")
        is_held = not kinds and found.pending > 0
        if not is_held:
            found.desired = decision.desired
        for kind in kinds or {"held" if is_held else "none"}:
            found.decisions[kind] += 1

    def changed(self, model: str, kind: str, *, has_failed: bool) -> None:
        """Counts a change of one worker, or its failure."""
        found = self.models[model]
        (found.failures if has_failed else found.changes)[kind] += 1
