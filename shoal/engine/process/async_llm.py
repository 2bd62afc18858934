"""`AsyncLLM`: an engine in a process of its own, as an asyncio Engine with its Control. core_process.py is
the process, watchdog.py judges whether it hangs. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar, cast

import msgspec

from shoal.api import Output, Request
from shoal.collector import Collector
from shoal.config import EngineConfig
from shoal.control import Command, Control, UpdateWeights, result_type
from shoal.engine.process.core_process import CoreProcess
from shoal.engine.process.watchdog import Watchdog
from shoal.errors import EngineDeadError, RequestError, ShoalError
from shoal.stats import Stats
from shoal.weights.store import is_url
from shoal.wire import (
    BEAT_S,
    Abort,
    Add,
    Beat,
    Call,
    CheckIntegrity,
    CoreCommand,
    FlushKv,
    FromCore,
    ModelInfo,
    Outputs,
    ReadStats,
    Ready,
    Refused,
    Reply,
)

T = TypeVar("T")

MOST_RESTARTS = 3  # within RESTART_WINDOW_S; then the engine stays dead
RESTART_WINDOW_S = 600.0
FLUSH_GRACE_S = 5.0  # added to kv_flush_timeout, as the step in flight ends first
# The time between two tries while the system has no process or descriptor left. Such tries do not count.
SHORTAGE_PAUSE_S = 5.0
# The pause before each restart. The first one gives a dead process's device memory time to be freed.
RESTART_PAUSES_S = (0.5, 5.0, 30.0)

logger = logging.getLogger(__name__)


class AsyncLLM(Control):
    """Built by `start`; used in the loop that it was started in.

    `info` is what the engine says of itself, a new object when the engine has become another model. `dead` is
    why it does not work, now or for good. With restart=True a dead core is started again, at most
    MOST_RESTARTS times in RESTART_WINDOW_S, with the weights of the last update and awake; the requests that
    it took with it are not repeated. A core hangs after engine_timeout seconds without a sign of life, or
    without the end of a step or of a quick command. It then counts as dead: with restart=True it is killed
    and started again, otherwise it is healthy again as soon as it continues.
    """

    def __init__(self, config: EngineConfig, *, restart: bool, engine_timeout: float) -> None:
        self.config, self.restart, self.engine_timeout = config, restart, engine_timeout
        self.dead: EngineDeadError | None = None
        self.lost = asyncio.Event()  # it is dead, and is not started again
        # Awaited when an update has changed the engine's model, before the update returns.
        self.on_other_model: Callable[[], Awaitable[None]] | None = None
        self._core: CoreProcess
        self.info: ModelInfo
        self._collectors: dict[str, Collector] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._restarts: deque[float] = deque(maxlen=MOST_RESTARTS)  # the times of the last ones
        self._restarting: asyncio.Task[None] | None = None
        self._updating: set[asyncio.Task[Any]] = set()  # The event loop alone would not keep them.
        self._is_hung = False  # the core counts as dead, but its process is still there
        self._watchdog: Watchdog  # a new one for each core
        self._watching: asyncio.TimerHandle | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        restart: bool = False,
        engine_timeout: float = 60.0,
        peer_weights: Awaitable[bytes | None] | None = None,
    ) -> AsyncLLM:
        """Returns when the engine is ready. Raises the UserError that kept it from starting, or
        EngineDeadError.

        engine_timeout: seconds of silence after which the core counts as hung; 0: it never does.
        peer_weights: resolves to another worker's export of its weights (wire.LendWeights), or None. A core
        that is started again reads files.
        """
        self = cls(config, restart=restart, engine_timeout=engine_timeout)
        try:
            await self._start(peer_weights)
        except OSError as error:
            raise EngineDeadError(f"the engine's process cannot be started: {error}") from None
        return self

    async def _start(self, peer_weights: Awaitable[bytes | None] | None = None) -> None:
        self._watchdog = Watchdog(self.engine_timeout)
        self._core = await CoreProcess.start(self.config, peer_weights, self._on_message, self._on_end)
        assert self._core.info is not None
        self.info, self.dead, self._is_hung = self._core.info, None, False
        self._watch(asyncio.get_running_loop().time())

    async def close(self, flush: bool = True) -> None:
        """Ends the engine, with `flush` after it has written its KV blocks to disk or store, as far as
        kv_flush_timeout allows. Requests that run raise EngineDeadError. Safe to call twice."""
        if self._restarting is not None:
            self._restarting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restarting
        if (
            flush
            and self.dead is None
            and self.config.kv_flush_timeout
            and (self.config.kv_disk_path or self.config.kv_store)
        ):
            with contextlib.suppress(TimeoutError, ShoalError):
                await asyncio.wait_for(self._call(FlushKv()), self.config.kv_flush_timeout + FLUSH_GRACE_S)
        self.dead = self.dead or EngineDeadError("the engine was closed")
        self._stop_watching()
        if self._is_hung:
            self._core.kill(self.dead)
        await self._core.close()
        self._fail_all(self.dead)

    # Engine

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        request_id = request.request_id
        if request_id in self._collectors:
            raise RequestError(
                f"request_id {request_id!r} must be unique, but a running request has it; choose another",
                field="request_id",
            )
        try:
            self._send(Add(request))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from None
        collector = self._collectors[request_id] = Collector()
        finished = False
        try:
            while not finished:
                output = await collector.get()
                finished = output.finish_reason is not None
                yield output
        finally:
            del self._collectors[request_id]
            if not finished and collector.error is None:
                await self.abort(request_id)

    async def abort(self, request_id: str) -> None:
        if self.dead is None:
            self._abort([request_id])

    async def stats(self) -> Stats:
        return await self._call(ReadStats())

    # Control

    async def control(self, command: Command[T]) -> T:
        source = command.source if isinstance(command, UpdateWeights) else None
        if source is None:
            return await self._call(command)
        # The core completes an update whose caller has left, so this side does, too.
        updating = asyncio.get_running_loop().create_task(self._update(command, source))
        self._updating.add(updating)
        updating.add_done_callback(self._updating.discard)
        return await asyncio.shield(updating)

    async def _update(self, command: Command[T], source: str) -> T:
        before = self.info
        result = await self._call(command)
        self.config = _with_weights_of(self.config, source)
        if self.info is not before and self.on_other_model is not None:
            await self.on_other_model()
        return result

    async def check(self) -> None:
        """Checks scheduler and tiers, for tests. Raises ShoalError."""
        await self._call(CheckIntegrity())

    # Inside

    def _send(self, message: Add | Call) -> None:
        if self.dead is not None:
            # The same error is raised again and again, and the frames of each time would pile up on it.
            raise self.dead.with_traceback(None)
        self._core.send(message)

    def _abort(self, request_ids: list[str]) -> None:
        with contextlib.suppress(EngineDeadError):  # then there is nothing left to abort
            self._core.send(Abort(request_ids))

    def _watch(self, before: float) -> None:
        """Checks the core every BEAT_S. before: the loop's time at the last check."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._watching = loop.call_later(BEAT_S, self._watch, now)
        wrong = self._watchdog.tick(now - before)
        if wrong is not None and not self._is_hung:
            self._hangs(wrong)

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def _hangs(self, wrong: str) -> None:
        error = EngineDeadError(f"the engine core (pid {self._core.pid}) {wrong} (--engine-timeout)")
        if self.restart:
            self._core.kill(error)
            return
        logger.error("%s; its requests end with an error, and new ones are refused until it continues", error)
        self._is_hung, self.dead = True, error
        self._abort(list(self._collectors))  # read when it continues
        self._fail_all(error)

    def _goes_on(self) -> None:
        if self._watchdog.tick(0.0) is None:
            logger.warning("the engine core (pid %d) continues after its silence", self._core.pid)
            self._is_hung, self.dead = False, None

    async def _call(self, command: Command[T]) -> T:
        call_id = next(self._call_ids)
        self._send(Call(call_id, cast(CoreCommand, command)))
        reply = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            return msgspec.convert(await reply, result_type(command))
        finally:
            del self._calls[call_id]

    def _on_message(self, message: FromCore) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                # None if its reader has left.
                if (collector := self._collectors.get(output.request_id)) is not None:
                    collector.put(output)
        elif isinstance(message, Refused):
            if (collector := self._collectors.get(message.request_id)) is not None:
                collector.fail(message.error.build())
        elif isinstance(message, Beat):
            self._watchdog.beat(message)
            if self._is_hung:
                self._goes_on()
        elif isinstance(message, Ready):
            self.info = message.info
            self.config = self.config.for_model(self.info.model)
        elif isinstance(message, Reply):
            reply = self._calls.get(message.call_id)
            if reply is None or reply.done():  # its caller has left
                return
            if message.error is None:
                reply.set_result(message.result)
            else:
                reply.set_exception(message.error.build())

    def _on_end(self, error: EngineDeadError) -> None:
        logger.error("%s", "\n".join([str(error), *getattr(error, "__notes__", [])]))
        self._stop_watching()
        self.dead, self._is_hung = error, False
        self._fail_all(error)
        if self.restart:
            self._restarting = asyncio.get_running_loop().create_task(self._start_again())
        else:
            self.lost.set()

    def _fail_all(self, error: EngineDeadError) -> None:
        for collector in self._collectors.values():
            collector.fail(error)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)

    async def _start_again(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._core.close()
            now = loop.time()
            recent = [t for t in self._restarts if t > now - RESTART_WINDOW_S]
            if len(recent) == MOST_RESTARTS:
                self.dead = EngineDeadError(
                    f"{self.dead}; it has been started again {MOST_RESTARTS} times in "
                    f"{RESTART_WINDOW_S:.0f} s and is left alone now: restart the server"
                )
                logger.error("%s", self.dead)
                self.lost.set()
                return
            await asyncio.sleep(RESTART_PAUSES_S[len(recent)])
            self._restarts.append(loop.time())
            try:
                await self._start()
            except OSError as error:
                logger.error(
                    "the engine did not start again: %s; the next try is in %g s", error, SHORTAGE_PAUSE_S
                )
                self._restarts.pop()
                await asyncio.sleep(SHORTAGE_PAUSE_S)
                continue
            except ShoalError as error:
                logger.error("the engine did not start again: %s", error)
                if isinstance(error, EngineDeadError):
                    self.dead = error
                else:
                    self.dead = EngineDeadError(f"the engine did not start again: {error}")
                continue
            logger.warning("the engine core was started again (pid %d)", self.info.pid)
            return


def _with_weights_of(config: EngineConfig, source: str) -> EngineConfig:
    """Returns the options of a core that is started again after an update from `source`. A revision belongs
    to the model that was given at the start: kept, it would bring the old weights back. An update from a
    store took the store's newest version, under the same URL, too."""
    same = source == config.model
    return dataclasses.replace(
        config,
        model=source,
        revision=config.revision if same and not is_url(source) else None,
        load_format="auto" if config.load_format == "dummy" and not same else config.load_format,
    )
