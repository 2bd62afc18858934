"""The planner at work: it looks at a fleet, decides (fleet/planner.py), and has workers added and removed.

What it saw and decided can be recorded as JSON lines, from which `shoal plan --replay` decides again.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Awaitable, Mapping
from typing import IO

import msgspec

from shoal.errors import ShoalError, UnavailableError
from shoal.fleet.clock import Clock
from shoal.fleet.engine_profile import EngineProfile
from shoal.fleet.observation import Decision
from shoal.fleet.plane_inbox import start
from shoal.fleet.planned_fleet import PlannedFleet
from shoal.fleet.planner import Planner, Recorded
from shoal.fleet.planner_config import PlannerConfig
from shoal.fleet.planner_metrics import PlannerCounts
from shoal.fleet_api import DecisionView, PlannerView

logger = logging.getLogger(__name__)

SHOWN_DECISIONS = 20  # that changed something


class PlannerLoop:
    def __init__(
        self,
        config: PlannerConfig,
        fleet: PlannedFleet,
        clock: Clock,
        record: IO[bytes] | None = None,
        profiles: Mapping[str, EngineProfile] | None = None,
    ) -> None:
        """`profiles`: as a Planner's."""
        self.config = config
        self._fleet, self._clock, self._record = fleet, clock, record
        self._planner = Planner(config, profiles)
        self._counts = PlannerCounts()
        self._last: dict[str, Decision] = {}
        self._decisions: collections.deque[tuple[str, Decision]] = collections.deque(maxlen=SHOWN_DECISIONS)
        self._num_failures: dict[str, int] = {}  # of changes in succession, by model
        self._changing: asyncio.Task[None] | None = None
        self._lacks_record = False  # what was last to be written in it is not there
        fleet.show(self.view)

    async def run(self) -> None:
        """Runs until it is cancelled; a change under way is cancelled with it."""
        interval_s = self.config.judging_interval
        self._write(Recorded(config=msgspec.to_builtins(self.config)))
        due, is_blind = self._clock.now() + interval_s, False
        try:
            while True:
                await self._clock.sleep(self.config.metric_pulling_interval)
                try:
                    await self._look()
                except (UnavailableError, OSError) as error:  # it may be back when the loop looks next
                    if not is_blind:
                        logger.error("planner: %s; nothing is decided until the fleet is seen again", error)
                        self._write(Recorded(is_gap=True))
                    is_blind, due = True, self._clock.now() + interval_s
                    self._planner.forget()
                    continue
                is_blind, late_s = False, self._clock.now() - due
                if late_s >= 0:
                    due += interval_s * (1 + late_s // interval_s)
                    self._judge()
        finally:
            if self._changing is not None:
                self._changing.cancel()

    def view(self) -> PlannerView:
        """The last decision, and what is wanted: as decided, or as it is before any decision."""
        desired: dict[str, int] = {}
        for decision in self._last.values():
            for role, count in decision.desired.items():
                desired[role] = desired.get(role, 0) + count
        reasons = [f"{name}: {decision.reason}" for name, decision in self._last.items()]
        return PlannerView(
            self.config.mode,
            "; ".join(reasons),
            desired,
            self._is_changing,
            [self._shown(model, decision) for model, decision in self._decisions],
            models=self._counts.models,
            max_gpus=self.config.max_gpu_budget,
        )

    def _shown(self, model: str, decision: Decision) -> DecisionView:
        age_s = round(self._clock.now() - decision.at, 1)
        return DecisionView(age_s, model, _in_words(decision), decision.reason)

    @property
    def _is_changing(self) -> bool:
        return self._changing is not None and not self._changing.done()

    async def _look(self) -> None:
        for model, seen in (await self._fleet.observe()).items():
            pending = max(seen.pending, int(self._is_changing))
            seen = msgspec.structs.replace(seen, at=round(self._clock.now(), 3), pending=pending)
            self._planner.see(model, seen)
            self._counts.looked(model, seen)
            self._write(Recorded(model=model, observation=seen))

    def _judge(self) -> None:
        """A model whose workers do not start comes last."""
        failed = sorted(self._num_failures, key=lambda name: self._num_failures[name])
        decisions: list[tuple[str, Decision]] = []
        for model, decision, other_gpus in self._planner.judge(failed):
            self._counts.decided(model, decision)
            self._write(Recorded(model=model, decision=decision, other_gpus=other_gpus))
            is_change = bool(decision.changes or decision.moves)
            if is_change or model not in self._last or not self._is_changing:
                self._last[model] = decision
            if is_change:
                decisions.append((model, decision))
                self._decisions.append((model, decision))
                advice = ", which is advice only (no_operation)" if self.config.no_operation else ""
                logger.info("planner: %s of %s%s: %s", _in_words(decision), model, advice, decision.reason)
        if decisions and not self.config.no_operation:
            self._changing = start(self._carry_out(decisions))

    async def _carry_out(self, decisions: list[tuple[str, Decision]]) -> None:
        """Workers change their role; others end one after the other, which makes room; then those that are
        added start side by side. Nothing is added where a worker that was to make room for it has stayed."""
        for model, decision in decisions:
            for move in decision.moves:
                for _ in range(move.count):
                    changing = self._fleet.change_role(model, move.role, move.to)
                    await self._carry_out_one(model, "move", changing, f"has the role {move.to}")
        has_room = True
        for model, decision in decisions:
            for change in decision.changes:
                for _ in range(-change.count):
                    removing = self._fleet.remove(model, change.role)
                    has_room &= await self._carry_out_one(model, "remove", removing, "serves no more")
        if not has_room:
            return
        async with asyncio.TaskGroup() as group:
            for model, decision in decisions:
                for change in decision.changes:
                    for _ in range(change.count):
                        adding = self._fleet.add(model, change.role)
                        group.create_task(self._carry_out_one(model, "add", adding, "is ready"))

    async def _carry_out_one(self, model: str, kind: str, work: Awaitable[str], outcome: str) -> bool:
        """Whether it was done."""
        try:
            worker_id = await work
        except (ShoalError, OSError) as error:  # the next decision begins with what there is then
            logger.error("planner: %s", error)
            self._num_failures[model] = self._num_failures.get(model, 0) + 1
            self._counts.changed(model, kind, has_failed=True)
            return False
        self._num_failures.pop(model, None)
        self._counts.changed(model, kind, has_failed=False)
        logger.info("planner: %s %s", worker_id, outcome)
        return True

    def _write(self, entry: Recorded) -> None:
        """A record that cannot be written keeps no fleet from being sized."""
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


def _in_words(decision: Decision) -> str:
    words = [f"{each.count} {each.role} become {each.to}" for each in decision.moves]
    words += [
        f"{'add' if each.count > 0 else 'remove'} {abs(each.count)} {each.role}" for each in decision.changes
    ]
    return ", ".join(words)
