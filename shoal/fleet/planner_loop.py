"""The planner at work: it looks at a fleet, decides (fleet/planner.py), and has a connector add and remove
workers.

What it saw and decided can be recorded as JSON lines, from which `shoal plan --replay` decides again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import IO, Protocol

import msgspec

from shoal.errors import ShoalError
from shoal.fleet.clock import Clock
from shoal.fleet.planner import Change, Decision, Observation, PlannerConfig, PlannerState, Recorded, decide
from shoal.fleet_api import PlannerView

logger = logging.getLogger(__name__)


class Connector(Protocol):
    """What starts and ends workers. Calls block until the change is made."""

    def pending(self, model: str) -> int:
        """Workers of the model that should be ready and are not: they start, start again, or end."""
        ...

    async def add(self, model: str, role: str) -> str:
        """Returns the id of a new worker that is ready. One that is not ready in time is taken back: raises
        UnavailableError; ConfigError if there is no such component, or no GPU for it."""
        ...

    async def remove(self, model: str, role: str) -> str:
        """Ends one worker: it drains, and is gone. Returns its id. Raises UnavailableError if no worker of
        this role was started here."""
        ...


class PlannerLoop:
    """`observe` returns what each model's workers do now; the loop adds what the connector knows."""

    def __init__(
        self,
        config: PlannerConfig,
        observe: Callable[[], Mapping[str, Observation]],
        connector: Connector,
        clock: Clock,
        record: IO[bytes] | None = None,
    ) -> None:
        self.config = config
        self._observe, self._connector, self._clock, self._record = observe, connector, clock, record
        self._states: dict[str, PlannerState] = {}
        self._seen: dict[str, list[Observation]] = {}
        self._last: dict[str, Decision] = {}
        self._num_failures: dict[str, int] = {}  # of changes in succession, by model
        self._changing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Runs until it is cancelled; a change under way is cancelled with it."""
        due = self._clock.now() + self.config.adjustment_interval
        try:
            while True:
                await self._clock.sleep(self.config.metric_pulling_interval)
                self._look()
                if self._clock.now() >= due:
                    due = self._clock.now() + self.config.adjustment_interval
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
        return PlannerView(self.config.mode, "; ".join(reasons), desired, self._is_changing)

    @property
    def _is_changing(self) -> bool:
        return self._changing is not None and not self._changing.done()

    def _look(self) -> None:
        for model, seen in self._observe().items():
            pending = max(seen.pending + self._connector.pending(model), int(self._is_changing))
            seen = msgspec.structs.replace(seen, at=round(self._clock.now(), 3), pending=pending)
            self._seen.setdefault(model, []).append(seen)
            self._write(Recorded(model=model, observation=seen))

    def _judge(self) -> None:
        """Decides for one model after the other. What is decided for one counts in the others' budget, so one
        whose workers do not start comes last."""
        changes: list[tuple[str, Change]] = []
        gpus = {model: self._gpus(seen[-1]) for model, seen in self._seen.items()}
        for model in sorted(self._seen, key=lambda name: self._num_failures.get(name, 0)):
            seen = self._seen[model]
            others = sum(count for name, count in gpus.items() if name != model)
            state = self._states.get(model, PlannerState())
            decision, self._states[model] = decide(self.config, state, seen, other_gpus=others)
            gpus[model] += sum(self.config.gpus_of(each.role) * each.count for each in decision.changes)
            self._write(Recorded(model=model, decision=decision, other_gpus=others))
            if decision.changes or model not in self._last or not self._is_changing:
                self._last[model] = decision
            changes += [(model, change) for change in decision.changes]
            for change in decision.changes:
                word = "add" if change.count > 0 else "remove"
                advice = ", which is advice only (no_operation)" if self.config.no_operation else ""
                logger.info(
                    "planner: %s a %s worker of %s%s: %s", word, change.role, model, advice, decision.reason
                )
        self._seen = {}
        if changes and not self.config.no_operation:
            self._changing = asyncio.create_task(self._carry_out(changes))

    def _gpus(self, seen: Observation) -> int:
        decode = self.config.gpus_of(seen.decode_role) * len(seen.decode)
        return decode + self.config.gpus_of("prefill") * seen.prefill_workers

    async def _carry_out(self, changes: list[tuple[str, Change]]) -> None:
        for model, change in changes:
            work = self._connector.add if change.count > 0 else self._connector.remove
            try:
                worker_id = await work(model, change.role)
            except ShoalError as error:  # the next decision begins with what there is then
                logger.error("planner: %s", error)
                self._num_failures[model] = self._num_failures.get(model, 0) + 1
            else:
                self._num_failures.pop(model, None)
                logger.info("planner: %s is %s", worker_id, "ready" if change.count > 0 else "gone")

    def _write(self, entry: Recorded) -> None:
        if self._record is not None:
            self._record.write(msgspec.json.encode(entry) + b"\n")
            self._record.flush()
