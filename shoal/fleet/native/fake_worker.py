"""`FakeWorker`: a native worker in this process, for tests; it fails on demand. It has the methods of a
RemoteEngine (remote_engine.py), and a FakeEngine (fake_engine.py) computes its tokens."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack, aclosing
from typing import Any

from shoal.api import FinishReason, Request
from shoal.collector import Collector
from shoal.control import Command, ReadSleepState
from shoal.errors import BusyError, ShoalError, WorkerFailedError
from shoal.fake_engine import FakeEngine
from shoal.fleet.clock import Clock
from shoal.fleet.native.worker_wire import Report
from shoal.fleet.worker import WorkerInfo, WorkerLoad
from shoal.model_card import ModelCard
from shoal.stats import SleepState, Stats
from shoal.wire import LendKv, TakeBackKv

TOKEN_S = 0.1
FOREVER_S = 1e9

_ports = itertools.count(1)


class FakeWorker:
    """A Link whose requests `engine` computes, one token every TOKEN_S seconds of `clock`.

    Attributes are settings, faults and records, and may be changed while requests run.
    """

    def __init__(self, info: WorkerInfo, clock: Clock, card: ModelCard | None = None) -> None:
        self.info, self.clock, self.card = info, clock, card
        self.address = f"tcp://127.0.0.1:{next(_ports)}"
        self.engine = FakeEngine(vocab_size=512)
        self.report = Report(Stats(num_running=1, num_blocks=10, num_free_blocks=5), SleepState(), 0)
        self.load: list[WorkerLoad] = []
        self.slots = asyncio.Semaphore(1000)  # further requests wait
        self.command_s = 0.0  # duration of a command
        self.lend_s: float | None = 0.0  # time until a KV ticket; None: forever
        # Faults
        self.is_connected = True  # False: like a process that died
        self.is_frozen = False  # answers neither checks nor canaries
        self.is_hung = False  # answers checks, but no canary
        self.is_full = False  # refuses canaries
        self.canary_error: ShoalError | None = None
        self.command_error: ShoalError | None = None
        self.errors: dict[str, ShoalError] = {}  # by request id: raised at its next token
        self.error_at: dict[int, ShoalError] = {}  # by position: raised there in each request
        self.aborted: set[str] = set()  # requests that end as aborted
        self.refuses_kv = False  # gives no KV ticket
        # Records
        self.received: list[Request] = []
        self.commands: list[Command[Any]] = []
        self.log: list[tuple[str, str, int]] = []  # (id, "begins" or "ends", running requests) of commands
        self.lent: list[bytes] = []  # KV tickets
        self.lent_for: list[tuple[int, str | None, str | None]] = []  # (tokens, salt, adapter) of each ticket
        self.returned: list[bytes] = []
        self.num_canaries = self.running = 0
        self.is_closed = False
        self._streams: dict[str, FakeStream] = {}

    @property
    def is_idle(self) -> bool:
        """True if no request is here."""
        return self.running == 0 and self.engine.is_idle

    def kill(self) -> None:
        """Breaks the connection: requests fail at their next token."""
        self.is_connected = False

    # Link

    async def check(self) -> WorkerInfo:
        await self._answer()
        return self.info

    async def canary(self) -> None:
        self.num_canaries += 1
        await self._answer()
        if self.is_hung:
            await self.clock.sleep(FOREVER_S)
        if self.is_full:
            raise BusyError("the worker is full")
        if self.canary_error is not None:
            raise self.canary_error

    async def loads(self) -> list[WorkerLoad]:
        return self.load

    async def close(self) -> None:
        self.is_closed = True

    async def _answer(self) -> None:
        self._check_connected()
        if self.is_frozen:
            await self.clock.sleep(FOREVER_S)

    def _check_connected(self) -> None:
        if not self.is_connected:
            raise WorkerFailedError(f"worker {self.info.id} is not reached", is_absent=True)

    # Requests, as in RemoteEngine

    def open(self, request: Request) -> FakeStream:
        self._check_connected()
        self.received.append(request)
        stream = self._streams[request.request_id] = FakeStream(self, request)
        return stream

    def send_abort(self, request_id: str) -> None:
        if not self.engine.stop(request_id):  # it has not begun
            self.aborted.add(request_id)

    def break_off(self, request_id: str, error: ShoalError) -> None:
        self.errors[request_id] = error
        if self._streams[request_id].is_waiting:
            self._streams[request_id].collector.fail(error)

    def raise_fault(self, request_id: str, position: int) -> None:
        """Raises the error that a request meets at this position of its output, if any."""
        self._check_connected()
        for error in (self.errors.get(request_id), self.error_at.get(position)):
            if error is not None:
                raise error

    # Commands

    async def control(self, command: Command[Any]) -> Any:
        if isinstance(command, ReadSleepState):
            return self.engine.state
        self._check_connected()
        if isinstance(command, LendKv):
            return await self._lend(command)
        self.commands.append(command)
        self.log.append((self.info.id, "begins", self.running))
        await self.clock.sleep(self.command_s)
        self.log.append((self.info.id, "ends", self.running))
        if self.command_error is not None:
            raise self.command_error
        return await self.engine.control(command)

    def send(self, command: Command[Any]) -> None:
        assert isinstance(command, TakeBackKv)
        if self.is_connected:
            self.returned.append(command.ticket)

    async def _lend(self, command: LendKv) -> bytes | None:
        await self.clock.sleep(FOREVER_S if self.lend_s is None else self.lend_s)
        if self.refuses_kv:
            return None
        self.lent.append(f"lent {self.info.id} {len(self.lent)}".encode())
        self.lent_for.append((len(command.token_ids), command.cache_salt, command.adapter))
        return self.lent[-1]


class FakeStream:
    """One request's outputs, like a RemoteStream. A task computes them, whether they are read or not."""

    def __init__(self, worker: FakeWorker, request: Request) -> None:
        self.request_id, self.collector = request.request_id, Collector()
        self.is_waiting = True  # for a slot
        self.get = self.collector.get
        self._task = asyncio.create_task(self._run(worker, request))

    async def _run(self, worker: FakeWorker, request: Request) -> None:
        position, request_id = len(request.output_token_ids), request.request_id
        worker.running += 1
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(worker.slots)
                self.is_waiting = False
                outputs = await stack.enter_async_context(aclosing(worker.engine.generate(request)))
                async for output in outputs:
                    if not output.token_ids and output.finish_reason is None:  # a ticket
                        self.collector.put(output)
                        continue
                    await worker.clock.sleep(TOKEN_S)
                    if request_id in worker.aborted:
                        output.token_ids, output.finish_reason = [], FinishReason.ABORT
                    worker.raise_fault(request_id, position)
                    position += len(output.token_ids)
                    self.collector.put(output)
                    if output.finish_reason is not None:
                        return
        except ShoalError as error:
            self.collector.fail(error)
        finally:
            worker.running -= 1
            worker.errors.pop(request_id, None)

    @property
    def is_under_way(self) -> bool:
        """True until the request has ended here."""
        return not self._task.done()

    def close(self) -> None:
        """Aborts the request if it has not ended."""
        self._task.cancel()
