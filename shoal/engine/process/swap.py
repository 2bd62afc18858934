"""`Swapper`: many models on one device: one is awake, the others sleep, and requests wake the models that
they need. Each model is an AsyncLLM (async_llm.py), which sleeps and wakes by Control. Torch-free.

- Turns decides which requests may run, and when another model has its turn, without clock and engine.
- Swapper applies the decisions: it waits for the running requests, puts the awake model to sleep, and
  wakes the wanted one.
- SwappedModel is one of the models, as an Engine with its Control.

The model that goes to sleep keeps its weights in host memory (level 1) while that lasts; then the least
recently used models drop theirs (level 2, read again from their files on waking).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.api import Engine, FinishReason, Output, Request
from shoal.control import CheckWeights, Command, Control, Result, Sleep, UpdateWeights, WakeUp
from shoal.errors import ConfigError, EngineDeadError, ShoalError, UnavailableError
from shoal.memory.available import available_bytes
from shoal.stats import Stats
from shoal.text.request_builder import check_request

logger = logging.getLogger(__name__)

NO_LIMIT = -1  # number of log-probabilities: each engine enforces its own limit

HOST_MARGIN = 0.1  # share of the host's available memory that is never taken for sleeping weights
WEIGHTS = "weights"


class SwapEngine(Engine, Control, Protocol):
    """An engine whose sleep mode is on."""


class Turns:
    """Decides which model's requests run. Times are seconds of any clock.

    A request of the awake model begins at once, unless another model's oldest request has waited for longer
    than `patience`; then it queues, so that the running ones end and the turn passes on. Next is the model
    whose request has waited longest.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.awake: str | None = None
        self.switching = False
        self.running: dict[str, int] = {}
        self.waiting: dict[str, deque[float]] = {}  # arrival times of requests, oldest first
        self.last_used: dict[str, float] = {}

    def may_begin(self, name: str, now: float) -> bool:
        """True if a request that has just arrived begins at once."""
        if self.switching or self.awake != name or self.waiting.get(name):
            return False
        return all(not queue or now - queue[0] <= self.patience for queue in self.waiting.values())

    def next(self) -> str | None:
        """The model whose waiting requests should begin. To be called whenever a request has arrived or
        ended. None: no request waits, or the awake model's requests have to end first."""
        oldest = {name: queue[0] for name, queue in self.waiting.items() if queue}
        if self.switching or not oldest:
            return None
        if self.awake is not None and self.running.get(self.awake, 0) and oldest.keys() != {self.awake}:
            return None
        return min(oldest, key=lambda name: oldest[name])

    def least_recent(self, names: Sequence[str]) -> list[str]:
        return sorted(names, key=lambda name: self.last_used.get(name, 0.0))


@dataclass(slots=True)
class _Swapped:
    """The swapper's state of one model."""

    engine: SwapEngine
    path: str  # where its weights are
    vocab_size: int
    level: int | None = None  # the level at which it sleeps; None: awake
    queue: deque[asyncio.Future[None]] = field(default_factory=deque)  # the requests of Turns.waiting


@dataclass(slots=True)
class Switch:
    """One change of the awake model, in seconds. `drain` counts from the oldest waiting request's arrival."""

    model: str
    drain: float = 0.0
    sleep: float = 0.0
    wake: float = 0.0
    ended: float = 0.0  # time.monotonic()


class Swapper:
    """Changes which model is awake: one at most. The others sleep, as `add` leaves each."""

    def __init__(self, patience: float, available: Callable[[], int] | None = None) -> None:
        """available: bytes of host memory that can be had; default: what the kernel says."""
        self.turns = Turns(patience)
        self.models: dict[str, _Swapped] = {}
        self.last_switch: Switch | None = None
        self._available = available or available_bytes
        self._switch: asyncio.Task[None] | None = None

    async def add(self, name: str, engine: SwapEngine, path: str, vocab_size: int) -> SwappedModel:
        """Takes an awake engine and puts it to sleep, so that the next one has room to start."""
        self.models[name] = _Swapped(engine, path, vocab_size)
        await self._put_to_sleep(name)
        return SwappedModel(self, name)

    # Requests

    async def begin(self, name: str, on_wait: Callable[[asyncio.Future[None]], None] | None = None) -> None:
        """Returns when a request of the model may run; `end` must follow. Raises the error that kept the
        model from waking.

        on_wait: called with the future that is waited for, so that it can be cancelled.
        """
        turns, model, now = self.turns, self.models[name], time.monotonic()
        if not turns.may_begin(name, now):
            turn = asyncio.get_running_loop().create_future()
            turns.waiting.setdefault(name, deque()).append(now)
            model.queue.append(turn)
            if on_wait is not None:
                on_wait(turn)
            self._go_on()
            try:
                await turn
            except BaseException:
                if turn in model.queue:
                    at = model.queue.index(turn)
                    del model.queue[at], turns.waiting[name][at]
                # let in and cancelled in the same moment
                elif turn.done() and not turn.cancelled() and turn.exception() is None:
                    self.end(name)
                self._go_on()
                raise
            return
        turns.running[name] = turns.running.get(name, 0) + 1

    def end(self, name: str) -> None:
        self.turns.running[name] -= 1
        self.turns.last_used[name] = time.monotonic()
        self._go_on()

    def _go_on(self) -> None:
        wanted = self.turns.next()
        if wanted is None:
            return
        if wanted == self.turns.awake:
            self._let_in(wanted)
            return
        self.turns.switching = True
        switch = Switch(wanted, drain=time.monotonic() - self.turns.waiting[wanted][0])
        self._switch = asyncio.get_running_loop().create_task(self._make_awake(switch))

    def _let_in(self, name: str) -> None:
        queue = self.models[name].queue
        self.turns.waiting[name].clear()
        self.turns.running[name] = self.turns.running.get(name, 0) + len(queue)
        while queue:
            turn = queue.popleft()
            if turn.done():  # cancelled, and about to say so
                self.turns.running[name] -= 1
            else:
                turn.set_result(None)

    def _send_away(self, name: str, error: ShoalError) -> None:
        queue = self.models[name].queue
        self.turns.waiting[name].clear()
        while queue:
            turn = queue.popleft()
            if not turn.done():
                turn.set_exception(error)

    # Switching

    async def _make_awake(self, switch: Switch) -> None:
        """Wakes the model and admits its requests. If that fails, it refuses them and leaves its state as
        they were."""
        turns, name = self.turns, switch.model
        try:
            start = time.monotonic()
            for other in [n for n, model in self.models.items() if model.level is None and n != name]:
                await self._retire(other)
            switch.sleep = time.monotonic() - start
            start = time.monotonic()
            await self._wake(name)
            switch.ended = time.monotonic()
            switch.wake = switch.ended - start
            self.last_switch = switch
            logger.info(
                "model %s is awake: waited %.3f s for running requests, sleep %.3f s, wake %.3f s",
                name,
                switch.drain,
                switch.sleep,
                switch.wake,
            )
            self._let_in(name)
        except EngineDeadError as error:
            self._send_away(name, error)
        except Exception as error:  # whatever it is, it must not leave requests waiting for ever
            logger.exception("model %s could not be woken", name)
            self._send_away(
                name,
                UnavailableError(
                    f"the model {name} could not be woken ({type(error).__name__}); try again later"
                ),
            )
        finally:
            turns.switching = False
        self._go_on()

    async def _retire(self, name: str) -> None:
        """Puts an awake model to sleep. A dead engine has given its memory back. One that hangs, or was
        started again, has not, so it still counts as awake, and the next switch tries again."""
        try:
            await self._put_to_sleep(name)
        except EngineDeadError:
            pass
        self.turns.awake = None

    async def _put_to_sleep(self, name: str) -> None:
        model = self.models[name]
        level = 1 if await self._make_host_room(name) else 2
        try:
            await model.engine.sleep(level, None, "wait")
        except UnavailableError:
            if level == 2:
                raise
            logger.warning(
                "model %s found no host memory for its weights; they will be read again from %s",
                name,
                model.path,
            )
            level = 2
            await model.engine.sleep(level, None, "wait")
        model.level = level

    async def _make_host_room(self, name: str) -> bool:
        """True if the model's weights fit into host memory. If necessary, models that slept longer give
        theirs up."""
        needed = await self._host_need(name)
        sleeping = self.turns.least_recent(
            [other for other, model in self.models.items() if model.level == 1]
        )
        while needed > self._room() and sleeping:
            other = self.models[sleeping.pop(0)]
            logger.info(
                "host memory is short: a sleeping model's weights are dropped, and read again from %s when "
                "it wakes",
                other.path,
            )
            try:
                await other.engine.sleep(2, [WEIGHTS], "abort")
                other.level = 2
            except EngineDeadError:
                pass
        return needed <= self._room()

    async def _host_need(self, name: str) -> int:
        usage = (await self.models[name].engine.memory_usage())[WEIGHTS]
        return max(0, usage["device_bytes"] - usage["host_bytes"] - usage["ready_bytes"])

    def _room(self) -> int:
        return int(self._available() * (1 - HOST_MARGIN))

    async def _wake(self, name: str) -> None:
        model = self.models[name]
        await model.engine.wake_up(None)
        if model.level == 2:
            try:
                await model.engine.update_weights(model.path)
            except BaseException:
                await model.engine.sleep(2, None, "abort")
                raise
        model.level = None
        self.turns.awake = name


class SwappedModel(Control):
    """One of the models, as an Engine with its Control. A request wakes it; only the swapper puts it to
    sleep."""

    def __init__(self, swapper: Swapper, name: str) -> None:
        self.swapper, self.name = swapper, name
        self._model = swapper.models[name]
        self._turns: dict[str, asyncio.Future[None]] = {}  # waiting requests by id

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        # Before it waits for its turn: a request that is refused wakes no model.
        check_request(request, self._model.vocab_size, max_logprobs=NO_LIMIT)
        request_id, arrived = request.request_id, time.monotonic()
        try:
            await self.swapper.begin(self.name, lambda turn: self._turns.__setitem__(request_id, turn))
        except asyncio.CancelledError:
            turn = self._turns.get(request_id)
            if turn is None or not turn.cancelled() or _is_cancelled():  # it is the reader that was cancelled
                raise
            yield Output(request_id, [], finish_reason=FinishReason.ABORT)
            return
        finally:
            self._turns.pop(request_id, None)
        try:
            stream = self._model.engine.generate(request)
            try:
                async for output in stream:
                    self._tell_first_token(arrived)
                    yield output
            finally:
                await stream.aclose()
        finally:
            self.swapper.end(self.name)

    def _tell_first_token(self, arrived: float) -> None:
        switch = self.swapper.last_switch
        if switch is not None and switch.model == self.name and switch.ended:
            logger.info(
                "model %s: first token %.3f s after it was awake, %.3f s after its request came",
                self.name,
                time.monotonic() - switch.ended,
                time.monotonic() - arrived,
            )
            switch.ended = 0.0

    async def abort(self, request_id: str) -> None:
        if (turn := self._turns.get(request_id)) is not None:
            turn.cancel()
        else:
            await self._model.engine.abort(request_id)

    async def stats(self) -> Stats:
        stats = await self._model.engine.stats()
        stats.num_waiting += len(self._model.queue)
        stats.num_deferred += len(self._model.queue)
        return stats

    async def control(self, command: Command[Result]) -> Result:
        """Weights that are read or replaced must be on the device, so such a command takes the model's
        turn."""
        if isinstance(command, (Sleep, WakeUp)):
            raise ConfigError(
                "sleep and wake_up are up to the server, which swaps its models (--swap); a request wakes "
                "the one that it names"
            )
        needs_turn = isinstance(command, (UpdateWeights, CheckWeights))
        if not needs_turn:
            return await self._model.engine.control(command)
        await self.swapper.begin(self.name)
        try:
            result = await self._model.engine.control(command)
            if isinstance(command, UpdateWeights):  # from now on these are the model's weights
                self._model.path = command.source
            return result
        finally:
            self.swapper.end(self.name)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
