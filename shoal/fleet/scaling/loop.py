"""`PlannerLoop`: observes a fleet, decides (planner/planner.py), and has workers added and removed.
scaled_fleet.py is the fleet that it changes, in this process or in another.

Observations and decisions can be recorded as JSON lines, from which `shoal plan --replay` decides again.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import IO

import msgspec

from shoal.errors import ShoalError, UnavailableError
from shoal.fleet.clock import Clock
from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.planner.engine_profile import EngineProfile
from shoal.fleet.planner.observation import Decision, Failure
from shoal.fleet.planner.planner import Planner, Recorded
from shoal.fleet.scaling.counts import PlannerCounts
from shoal.fleet.scaling.scaled_fleet import PlannedFleet
from shoal.fleet_views import DecisionView, PlannerView
from shoal.tasks import start

logger = logging.getLogger(__name__)

COUNTS = {"add": 1, "remove": -1, "move": 0}  # the `count` in Failure
SHOWN_DECISIONS = 20  # latest decisions with a change


@dataclass(slots=True)
class Batch:
    """The decisions of an interval while they are carried out; batches of other models may overlap. `left`:
    number of unfinished changes by model. `num_gpus`: GPUs of all workers after all changes. `failed`: model,
    role and COUNTS of the batch's failed changes."""

    decisions: list[tuple[str, Decision]]
    left: collections.Counter[str]
    num_gpus: int
    failed: set[tuple[str, str, int]] = field(default_factory=set)

    def workers(self, sign: int) -> list[tuple[str, str]]:
        """Returns model and role of each worker to add (sign 1) or to remove (sign -1)."""
        return [
            (model, change.role)
            for model, decision in self.decisions
            for change in decision.changes
            for _ in range(sign * change.count)
        ]


class PlannerLoop:
    """Observes the fleet at intervals, has the planner decide, and carries out each decision as a batch of
    changes. A failed change is reported to the planner, whose next decision starts from the fleet then."""

    def __init__(
        self,
        config: PlannerConfig,
        fleet: PlannedFleet,
        clock: Clock,
        record: IO[bytes] | None = None,
        profiles: Mapping[str, EngineProfile] | None = None,
    ) -> None:
        """`profiles`: as in Planner."""
        self.config = config
        self._fleet, self._clock, self._record = fleet, clock, record
        self._planner = Planner(config, profiles)
        self._counts = PlannerCounts()
        self._last: dict[str, Decision] = {}
        self._decisions: collections.deque[tuple[str, Decision]] = collections.deque(maxlen=SHOWN_DECISIONS)
        # Failed changes that have not succeeded since, by model, and by role and COUNTS.
        self._failures: dict[str, dict[tuple[str, int], Failure]] = collections.defaultdict(dict)
        self._batches: dict[asyncio.Task[None], Batch] = {}
        self._lacks_record = False  # the last write to it failed
        fleet.show(self.view)

    async def run(self) -> None:
        """Runs until it is cancelled, which also cancels changes in flight."""
        interval_s = self.config.judging_interval
        self._write(Recorded(config=msgspec.to_builtins(self.config)))
        due, is_blind = self._clock.now() + interval_s, False
        try:
            while True:
                await self._clock.sleep(self.config.metric_pulling_interval)
                try:
                    await self._look()
                except (UnavailableError, OSError) as error:  # the next observation may succeed
                    if not is_blind:
                        logger.error(
                            "planner: %s; nothing is decided until the fleet can be observed again", error
                        )
                        self._write(Recorded(is_gap=True))
                    is_blind, due = True, self._clock.now() + interval_s
                    self._planner.forget()
                    continue
                is_blind, late_s = False, self._clock.now() - due
                if late_s >= 0:
                    due += interval_s * (1 + late_s // interval_s)
                    self._judge()
        finally:
            for task in self._batches:
                task.cancel()

    def view(self) -> PlannerView:
        """Returns the last decisions and the desired numbers; before any decision these are the present
        ones."""
        desired: dict[str, int] = {}
        for decision in self._last.values():
            for role, count in decision.desired.items():
                desired[role] = desired.get(role, 0) + count
        reasons = [f"{name}: {decision.reason}" for name, decision in self._last.items()]
        return PlannerView(
            self.config.mode,
            "; ".join(reasons),
            desired,
            bool(self._batches),
            [self._shown(model, decision) for model, decision in self._decisions],
            models=self._counts.models,
            max_gpus=self.config.max_gpu_budget,
        )

    def _shown(self, model: str, decision: Decision) -> DecisionView:
        age_s = round(self._clock.now() - decision.at, 1)
        return DecisionView(age_s, model, _in_words(decision), decision.reason)

    def _now(self) -> float:
        """Returns the time as it is recorded."""
        return round(self._clock.now(), 3)

    def _under_way(self, model: str) -> int:
        """Returns the number of unfinished changes of the model's workers."""
        return sum(batch.left[model] for batch in self._batches.values())

    async def _look(self) -> None:
        for model, seen in (await self._fleet.observe()).items():
            pending = max(seen.pending, self._under_way(model))
            failures = list(self._failures[model].values())
            at = self._now()
            seen = msgspec.structs.replace(seen, at=at, pending=pending, failures=failures)
            self._planner.see(model, seen)
            self._counts.looked(model, seen)
            self._write(Recorded(model=model, observation=seen))

    def _judge(self) -> None:
        """Decides for all models; models whose workers fail to start come last."""
        times = {
            model: sum(each.times for each in found.values() if each.count > 0)
            for model, found in self._failures.items()
        }
        failed = sorted((model for model in times if times[model]), key=lambda model: times[model])
        decisions: list[tuple[str, Decision]] = []
        for model, decision, other_gpus in self._planner.judge(failed):
            self._counts.decided(model, decision)
            self._write(Recorded(model=model, decision=decision, other_gpus=other_gpus))
            is_change = bool(decision.changes or decision.moves)
            if is_change or model not in self._last or not self._under_way(model):
                self._last[model] = decision
            if is_change:
                decisions.append((model, decision))
                self._decisions.append((model, decision))
                advice = ", which is advice only (no_operation)" if self.config.no_operation else ""
                logger.info("planner: %s of %s%s: %s", _in_words(decision), model, advice, decision.reason)
        if decisions and not self.config.no_operation:
            left = collections.Counter({model: _num_changes(decision) for model, decision in decisions})
            batch = Batch(decisions, left, self._planner.num_gpus)
            task = start(self._carry_out(batch))
            self._batches[task] = batch
            task.add_done_callback(self._batches.pop)

    async def _carry_out(self, batch: Batch) -> None:
        """Changes roles first. Then removes workers one after the other and at the same time starts workers
        for which GPUs are free; the others start on freed GPUs. If a removal fails, additions are limited to
        the budget that is left."""
        for model, decision in batch.decisions:
            for move in decision.moves:
                for _ in range(move.count):
                    work = self._fleet.change_role(model, move.role, move.to)
                    outcome = f"has the role {move.to}"
                    await self._carry_out_one(batch, "move", model, move.role, work, outcome)
        removed, added = batch.workers(-1), batch.workers(1)
        gpus = batch.num_gpus  # GPUs of all workers, including starting ones
        gpus += sum(self.config.gpus_of(role) for _, role in removed)
        gpus -= sum(self.config.gpus_of(role) for _, role in added)
        async with asyncio.TaskGroup() as group:
            late = []
            for model, role in added:
                if gpus + self.config.gpus_of(role) > self.config.max_gpu_budget:
                    late.append((model, role))
                    continue
                gpus += self.config.gpus_of(role)
                group.create_task(self._add(batch, model, role))
            for model, role in removed:
                work = self._fleet.remove(model, role)
                if await self._carry_out_one(batch, "remove", model, role, work, "has ended or sleeps"):
                    gpus -= self.config.gpus_of(role)
            for model, role in late:
                if gpus + self.config.gpus_of(role) > self.config.max_gpu_budget:
                    logger.error(
                        "planner: no %s worker of %s is added, as a removal for it failed", role, model
                    )
                    batch.left[model] -= 1
                    continue
                gpus += self.config.gpus_of(role)
                group.create_task(self._add(batch, model, role))

    async def _add(self, batch: Batch, model: str, role: str) -> None:
        await self._carry_out_one(batch, "add", model, role, self._fleet.add(model, role), "is ready")

    async def _carry_out_one(
        self, batch: Batch, kind: str, model: str, role: str, work: Awaitable[str], outcome: str
    ) -> bool:
        """Returns True if the change succeeded."""
        key = role, COUNTS[kind]
        failures = self._failures[model]
        try:
            worker_id = await work
        except (ShoalError, OSError) as error:  # the next decision starts from the fleet at that time
            logger.error("planner: %s", error)
            times = failures[key].times if key in failures else 0
            if (model, *key) not in batch.failed:  # workers that start at the same time count as one try
                times += 1
            batch.failed.add((model, *key))
            failures[key] = Failure(*key, max(1, times), self._now())
            self._counts.changed(model, kind, has_failed=True)
            return False
        finally:
            batch.left[model] -= 1
        failures.pop(key, None)
        self._counts.changed(model, kind, has_failed=False)
        logger.info("planner: %s %s", worker_id, outcome)
        return True

    def _write(self, entry: Recorded) -> None:
        """Writes a line of the record. A failed write is only logged, as sizing must continue."""
        if self._record is None:
            return
        try:
            self._record.write(msgspec.json.encode(entry) + b"\n")
            self._record.flush()
            self._lacks_record = False
        except OSError as error:
            if not self._lacks_record:
                logger.error(
                    "planner: the record cannot be written, and lines may be missing in it: %s", error
                )
            self._lacks_record = True


def _num_changes(decision: Decision) -> int:
    return sum(each.count for each in decision.moves) + sum(abs(each.count) for each in decision.changes)


def _in_words(decision: Decision) -> str:
    words = [f"{each.count} {each.role} become {each.to}" for each in decision.moves]
    words += [
        f"{'add' if each.count > 0 else 'remove'} {abs(each.count)} {each.role}" for each in decision.changes
    ]
    return ", ".join(words)
