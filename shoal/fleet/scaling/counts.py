"""What a planner counts, as part of its view, and what Prometheus reads of that. The view travels: the router
exports it, also where the planner is another process."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from shoal.fleet.planner.observation import Decision, Observation, counts_of
from shoal.fleet.pool.metrics import OF_MODEL, Row, counter, gauge, one_gauge
from shoal.fleet_views import PlannedModel, PlannerView

CHANGES = ("add", "remove", "move")  # move: a worker changes its role


class PlannerCounts:
    """`models`: by name. Each has all kinds from the start, so that a rate sees the first event of a kind."""

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
        """While workers come or go nothing can be decided, and what was decided before is still wanted."""
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
        """One worker has come, gone, or changed its role, or should have."""
        found = self.models[model]
        (found.failures if has_failed else found.changes)[kind] += 1


def of_planner(view: PlannerView) -> Iterable[Metric]:
    models = view.models.items()

    def by(label: str, field: str) -> tuple[tuple[str, str], list[Row]]:
        rows: list[Row] = [
            ([name, key], n) for name, found in models for key, n in getattr(found, field).items()
        ]
        return (*OF_MODEL, label), rows

    yield gauge("shoal:planner_workers", "Workers that are ready.", *by("role", "workers"))
    yield gauge("shoal:planner_desired_workers", "Workers as last decided.", *by("role", "desired"))
    yield gauge(
        "shoal:planner_pending_workers",
        "Workers that are starting or ending, or have died and come again.",
        OF_MODEL,
        [([name], found.pending) for name, found in models],
    )
    yield counter(
        "shoal:planner_decisions",
        "Decisions: to add, remove or move (to another role) workers, none, or held as workers came or went.",
        *by("kind", "decisions"),
    )
    yield counter(
        "shoal:planner_changes",
        "Workers that the planner has added, removed or moved.",
        *by("kind", "changes"),
    )
    yield counter(
        "shoal:planner_failures", "Workers that it could not add, remove or move.", *by("kind", "failures")
    )
    yield one_gauge("shoal:planner_max_gpus", "GPUs that all workers may have together.", view.max_gpus)
