"""`VirtualConnector`: writes desired counts for another orchestrator, which starts and ends the workers, and
waits for its confirmation, as the VirtualConnector of NVIDIA Dynamo does:

    decision.json    written here: {"decision_id": 7, "workers": {"m": {"decode": 3, "prefill": 1}}, ...}
    scaled.json      written by the orchestrator after scaling: {"scaled_decision_id": 7}

Both files are in the fleet's folder (on a shared file system, if the orchestrator is on another host), so an
orchestrator may be written in any language. VirtualClient is for one in Python:

    client = VirtualClient(folder)
    while True:
        decision = await client.wait()
        ...                                # scale to decision.workers
        client.complete(decision)
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.errors import ConfigError, UnavailableError
from shoal.fleet.connectors.connector import LOOK_S, ConnectorContext, InFlight, component_of, poll_until

logger = logging.getLogger(__name__)

T = TypeVar("T")

DECISION, SCALED = "decision.json", "scaled.json"


class ScalingDecision(msgspec.Struct, frozen=True):
    """`workers`: desired counts, by model and role. `counts`: the counts of the fleet's file at that time. A
    decision replaces the ones with lower ids."""

    decision_id: int
    workers: dict[str, dict[str, int]]
    counts: dict[str, dict[str, int]] = {}


class Scaled(msgspec.Struct, frozen=True):
    scaled_decision_id: int


class VirtualClient:
    """The orchestrator's side. `folder`: the folder of decisions, which `shoal fleet up` logs."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    async def wait(self) -> ScalingDecision:
        """Waits for an unconfirmed decision and returns the latest."""
        while True:
            decision = _read(self._folder / DECISION, ScalingDecision)
            if decision is not None and decision.decision_id > _scaled_id(self._folder):
                return decision
            await asyncio.sleep(LOOK_S)

    def complete(self, decision: ScalingDecision) -> None:
        """Confirms the decision: its workers are running or starting."""
        _write(self._folder / SCALED, Scaled(decision.decision_id))


class VirtualConnector:
    """A Connector. The orchestrator owns the workers, so their counts outlive the connector: `start`
    continues with them unless the counts in the fleet's file have changed, and `close` leaves them."""

    def __init__(self, context: ConnectorContext) -> None:
        self._components, self._router = context.components, context.router
        self._clock, self._start_timeout_s = context.clock, context.start_timeout_s
        self._folder = context.folder
        self._decision = ScalingDecision(0, {})
        self._decided_at: dict[str, float] = {}  # by model
        self._deciding = asyncio.Lock()
        self._changes: dict[str, InFlight] = collections.defaultdict(InFlight)  # by model
        self._scaled = 0  # last decision that is known to be confirmed
        self._logged = ""  # why confirmations cannot be read now
        # Workers that present calls of `add` return, by model.
        self._claimed: dict[str, set[str]] = collections.defaultdict(set)

    async def start(self) -> None:
        counts: dict[str, dict[str, int]] = {}
        for one in self._components:
            roles = counts.setdefault(one.model, {})
            roles[one.role] = roles.get(one.role, 0) + one.count
        path = self._folder / DECISION
        before = _read(path, ScalingDecision)
        if before is None and path.exists():
            raise ConfigError(
                f"{path} must hold a planner's decision; remove the file, and ids continue after the last "
                "confirmed one"
            )
        logger.info("decisions are written to %s and confirmed in %s", path, self._folder / SCALED)
        self._decision, self._scaled = before or self._decision, _scaled_id(self._folder)
        if self._decision.counts != counts:
            self._write(msgspec.structs.replace(self._decision, workers=counts, counts=counts))
            self._decided_at = dict.fromkeys(counts, self._clock.now())

    def pending(self, model: str) -> int:
        if self._clock.now() - self._decided_at.get(model, 0.0) >= self._start_timeout_s:
            return 0
        wanted = self._decision.workers.get(model, {})
        return sum(max(0, count - len(self._router.ready(model, role))) for role, count in wanted.items())

    async def add(self, model: str, role: str) -> str:
        component_of(self._components, model, role)
        deadline = self._clock.now() + self._start_timeout_s
        before = set(self._router.ready(model, role))
        claimed = self._claimed[model]
        if not self._changes[model].count:
            claimed.clear()
        with self._changes[model].one_more():
            decision_id = await self._decide(model, role, 1, deadline)
            with self._taken_back_if_it_fails(model, role):

                def new_workers() -> list[str]:
                    new = [one for one in self._router.ready(model, role) if one not in before | claimed]
                    return new if self._is_confirmed(decision_id) else []

                new = await poll_until(self._clock, new_workers, deadline - self._clock.now())
                if new:
                    claimed.add(new[0])
                    return new[0]
                raise UnavailableError(
                    f"decision {decision_id}, one more {role} worker of {model}, had no ready worker "
                    f"within {self._start_timeout_s:g} s (start_timeout) and is taken back; "
                    f"{self._confirmation(decision_id)}"
                )

    async def remove(self, model: str, role: str) -> str:
        component_of(self._components, model, role)
        deadline = self._clock.now() + self._start_timeout_s
        before = self._router.ready(model, role)
        if not before:
            raise UnavailableError(f"this fleet has no {role} worker of {model} to remove")
        with self._changes[model].one_more():
            decision_id = await self._decide(model, role, -1, deadline)

            def ended_workers() -> list[str]:
                ended = [one for one in before if self._router.state_of(one) is None]
                return ended if self._is_confirmed(decision_id) else []

            ended = await poll_until(self._clock, ended_workers, deadline - self._clock.now())
            if ended:
                return ended[-1]
            raise UnavailableError(
                f"decision {decision_id}, one {role} worker of {model} fewer, ended no worker within "
                f"{self._start_timeout_s:g} s (start_timeout); {self._confirmation(decision_id)}"
            )

    async def wait_until_all_failed(self) -> None:
        await asyncio.Event().wait()

    async def close(self, grace_s: float) -> None:
        """Leaves the workers to the orchestrator."""

    async def _decide(self, model: str, role: str, by: int, deadline: float) -> int:
        """Waits until the previous decision is confirmed, writes the next one and returns its id."""
        async with self._deciding:
            last = self._decision.decision_id
            if not await poll_until(
                self._clock, lambda: self._is_confirmed(last), deadline - self._clock.now()
            ):
                raise UnavailableError(
                    f"no decision is made after decision {last}: {self._confirmation(last)}; check that the "
                    "orchestrator is running"
                )
            if self._changes[model].count == 1 and not self.pending(model):
                # Keeps workers that a person has added or removed since.
                self._change(model, role, by, len(self._router.ready(model, role)))
            else:
                self._change(model, role, by)
            return self._decision.decision_id

    @contextlib.contextmanager
    def _taken_back_if_it_fails(self, model: str, role: str) -> Iterator[None]:
        """Reverts the decision for one more worker if the block fails."""
        try:
            yield
        except BaseException:  # a cancellation, too
            try:
                self._change(model, role, -1)
            except OSError as error:
                logger.error("a surplus %s worker of %s stays decided: %s", role, model, error)
            raise

    def _change(self, model: str, role: str, by: int, count: int | None = None) -> None:
        """Writes a decision that differs by `by` workers. `count`: the present number; None: the desired
        one."""
        roles = dict(self._decision.workers.get(model, {}))
        roles[role] = max(0, (roles.get(role, 0) if count is None else count) + by)
        workers = {**self._decision.workers, model: roles}
        self._write(msgspec.structs.replace(self._decision, workers=workers))
        self._decided_at[model] = self._clock.now()

    def _write(self, decision: ScalingDecision) -> None:
        """Makes this the present decision, with an unconfirmed id. A decision that cannot be written does not
        count, as its confirmation would never come."""
        number = 1 + max(self._decision.decision_id, self._scaled_id())
        decision = msgspec.structs.replace(decision, decision_id=number)
        _write(self._folder / DECISION, decision)
        self._decision = decision

    def _is_confirmed(self, decision_id: int) -> bool:
        return self._scaled_id() >= decision_id

    def _scaled_id(self) -> int:
        """Returns the id of the last confirmed decision, or the last one known while a shared file system is
        unavailable."""
        try:
            self._scaled, failure = _scaled_id(self._folder), ""
        except OSError as error:
            failure = str(error)
            if failure != self._logged:
                logger.warning("confirmations cannot be read, retrying: %s", error)
        self._logged = failure
        return self._scaled

    def _confirmation(self, decision_id: int) -> str:
        path = self._folder / SCALED
        try:
            is_unreadable = path.exists() and _read(path, Scaled) is None
        except OSError as error:
            return f"its confirmation cannot be read: {error}"
        if is_unreadable:
            return f'its confirmation cannot be read in {path}, where {{"scaled_decision_id": N}} is expected'
        return f"it {'is' if self._is_confirmed(decision_id) else 'is not'} confirmed in {path}"


def _scaled_id(folder: Path) -> int:
    """Returns the id of the last confirmed decision, or 0."""
    scaled = _read(folder / SCALED, Scaled)
    return 0 if scaled is None else scaled.scaled_decision_id


def _read(path: Path, type_: type[T]) -> T | None:
    """Returns None for a missing file, and for an unreadable content, as an orchestrator may be writing it.
    Other disk errors are raised as OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _write(path: Path, content: msgspec.Struct) -> None:
    """Replaces the file as a whole, so that readers see no part of it."""
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(content) + b"\n")
    new.replace(path)
