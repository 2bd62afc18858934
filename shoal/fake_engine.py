"""FakeEngine: an Engine and its Control without a model, for tests and measurements of the code above
engines."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never, cast

from shoal.api import MEMORY_TAGS, FinishReason, Logprob, Output, Request, Span, TokenLogprobs, check_tags
from shoal.control import (
    AnyCommand,
    CheckWeights,
    Command,
    Control,
    MemoryUsage,
    ReadSleepState,
    ResetPrefixCache,
    Result,
    Sleep,
    StartProfile,
    StopProfile,
    UpdateWeights,
    WakeUp,
)
from shoal.errors import ConfigError, EngineDeadError, RequestError, UnavailableError
from shoal.stats import MemoryReport, SleepState, Stats
from shoal.text.request_builder import check_request

MAX_LOGPROBS = 20


@dataclass(eq=False)
class FakeEngine(Control):
    """Answers every request with `reply`, repeated until max_tokens, or once, followed by an end-of-text id,
    if `ends`.

    Settings may be changed while it runs. Sampling parameters do not change the answer.
    """

    vocab_size: int
    reply: Sequence[int] = (72, 101, 108, 108, 111, 32)
    ends: bool = False
    token_seconds: float = 0.0  # between tokens; a slow reader gets all due tokens in one output
    prefill_seconds: float = 0.0
    hidden_size: int = 64
    num_blocks: int = 1024
    cached_tokens: int = 0  # called with each request
    error_after: int | None = None  # number of tokens after which a request ends with FinishReason.ERROR
    refuses: str | None = None  # message of a RequestError for every new request

    state: SleepState = field(default_factory=SleepState)
    weights_version: int = 0
    seen: list[Request] = field(default_factory=list)  # the last requests
    _running: dict[str, asyncio.Event] = field(default_factory=dict)
    _dead: EngineDeadError | None = None
    _profiling: str | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    # Engine

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        self._check_alive()
        came_at = time.monotonic()
        if self.refuses is not None:
            raise RequestError(self.refuses)
        check_request(request, self.vocab_size, MAX_LOGPROBS)
        if self.state.is_sleeping:
            raise UnavailableError(f"the engine sleeps at level {self.state.level}; wake it up first")
        self.seen = [*self.seen[-99:], request]
        self._running[request.request_id] = stopped = asyncio.Event()
        try:
            if request.continues is not None:
                await self.abort(request.continues)
            if request.fetches_only:
                await stopped.wait()
                yield Output(request.request_id, [], finish_reason=FinishReason.LENGTH)
                return
            if request.offers_kv:
                yield Output(request.request_id, [], kv_ticket=f"KV of {request.request_id}".encode())
            await self._pause(stopped, self.prefill_seconds)
            if request.embed and not stopped.is_set():
                yield Output(
                    request.request_id,
                    [],
                    finish_reason=FinishReason.STOP,
                    embedding=self._embedding(request),
                )
                return
            start, limit = time.monotonic(), request.params.max_tokens or 16
            done = given = len(request.output_token_ids)
            while not stopped.is_set():
                while self.state.is_sleeping and not stopped.is_set():  # waits for the wake-up
                    await self._changed.wait()
                if self.token_seconds:
                    due = given + int((time.monotonic() - start) / self.token_seconds) + 1
                    if due <= done:
                        next_at = start + (done - given) * self.token_seconds
                        await self._pause(stopped, next_at - time.monotonic())
                        continue
                else:
                    due = done + 1
                    await asyncio.sleep(0)
                output = self._output(request, done, min(due, limit), limit)
                if done == given:
                    seconds = time.monotonic() - came_at
                    output.spans = [Span("queue", seconds, 0.0), Span("prefill", seconds, seconds)]
                done += len(output.token_ids)
                yield output
                if output.finish_reason is not None:
                    return
            self._check_alive()
            yield Output(request.request_id, [], finish_reason=FinishReason.ABORT)
        finally:
            self._running.pop(request.request_id, None)
            self._announce()

    async def abort(self, request_id: str) -> None:
        self.stop(request_id)

    def stop(self, request_id: str) -> bool:
        """Like `abort`, without awaiting. Returns False for a request that does not run."""
        if request_id not in self._running:
            return False
        self._running[request_id].set()
        self._announce()
        return True

    @property
    def is_idle(self) -> bool:
        """True if no request runs."""
        return not self._running

    async def stats(self) -> Stats:
        self._check_alive()
        running = len(self._running)
        return Stats(
            num_running=running, num_blocks=self.num_blocks, num_free_blocks=max(0, self.num_blocks - running)
        )

    def kill(self) -> None:
        """Makes the engine die: running requests and all later calls raise EngineDeadError."""
        self._dead = EngineDeadError("the engine's process died (signal 9)")
        self._stop_all()

    # Control

    async def control(self, command: Command[Result]) -> Result:
        self._check_alive()
        return cast(Result, await self._run(cast(AnyCommand, command)))

    async def _run(self, command: AnyCommand) -> Any:
        match command:
            case Sleep():
                return await self._sleep(command)
            case WakeUp(tags):
                return self._wake_up(tags)
            case ReadSleepState():
                return self.state
            case ResetPrefixCache():
                return not self._running
            case UpdateWeights(source):
                if not source.strip("/."):
                    raise ConfigError(
                        f"the model path {source!r} does not exist; give the path of a checkpoint"
                    )
                self.weights_version += 1
                return self.weights_version
            case CheckWeights():
                return {"rank0.embed": f"{self.weights_version:016x}"}
            case MemoryUsage():
                return self._memory_usage()
            case StartProfile(folder):
                self._profiling = folder
                return None
            case StopProfile():
                if self._profiling is None:
                    raise ConfigError("stop_profile needs a running trace; begin one with start_profile")
                folder, self._profiling = self._profiling, None
                return [f"{folder}/fake.trace.json.gz"]
            case _:
                assert_never(command)

    async def _sleep(self, command: Sleep) -> MemoryReport:
        level, chosen = command.level, check_tags(command.tags)
        if command.mode == "wait":
            while self._running:
                await self._changed.wait()
        state = self.state
        going = set(chosen) - state.asleep if level else set()
        if level == 2 and "weights" in chosen:
            state.kept = ""
        elif "weights" in going:
            state.kept = "host"
        state.level = max(level, state.level or 0)
        state.asleep |= going
        if command.mode == "abort":
            self._stop_all()
        return MemoryReport(freed_bytes=len(going) << 30)

    def _wake_up(self, tags: list[str] | None) -> MemoryReport:
        woken = self.state.asleep & set(check_tags(tags))
        self.state.asleep -= woken
        if "weights" in woken:
            self.state.kept = ""
        if not self.state.asleep:
            self.state.level = None
        self._announce()
        return MemoryReport(taken_bytes=len(woken) << 30)

    def _memory_usage(self) -> dict[str, dict[str, int]]:
        kept = {"weights"} if self.state.kept == "host" else set()
        return {
            tag: {
                "device_bytes": 0 if tag in self.state.asleep else 1 << 30,
                "reserved_bytes": 1 << 30,
                "host_bytes": 1 << 30 if tag in kept else 0,
                "ready_bytes": 0,
            }
            for tag in MEMORY_TAGS
        }

    # Inside

    def _output(self, request: Request, done: int, end: int, limit: int) -> Output:
        params = request.params
        ids = [self.reply[i % len(self.reply)] for i in range(done, end)]
        reason: FinishReason | None = FinishReason.LENGTH if end == limit else None
        if self.ends and not params.ignore_eos and end > len(self.reply):
            ids = [*ids[: len(self.reply) - done], *request.eos_token_ids[:1]]
            reason = FinishReason.STOP
        if self.error_after is not None and end >= self.error_after:
            return Output(
                request.request_id,
                [],
                finish_reason=FinishReason.ERROR,
                error="the fake engine was set to fail",
            )
        logprobs = None if params.logprobs is None else [self._logprobs(i, params.logprobs) for i in ids]
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None and not done:
            prompt_logprobs = [
                None,
                *[self._logprobs(i, params.prompt_logprobs) for i in request.prompt_token_ids[1:]],
            ]
        return Output(
            request.request_id, ids, logprobs, prompt_logprobs, reason, num_cached_tokens=self.cached_tokens
        )

    def _logprobs(self, token_id: int, count: int) -> TokenLogprobs:
        """Returns log-probabilities: the token is the best; the next ids of the vocabulary follow, each half
        as likely."""
        ids = [(token_id + k) % self.vocab_size for k in range(max(1, count))]
        return {i: Logprob(-math.log(2.0) * (k + 1), rank=k + 1) for k, i in enumerate(ids)}

    def _embedding(self, request: Request) -> list[float]:
        values = [math.sin(sum(request.prompt_token_ids) + i) for i in range(self.hidden_size)]
        length = math.sqrt(sum(v * v for v in values))
        return [v / length for v in values]

    async def _pause(self, stopped: asyncio.Event, seconds: float) -> None:
        if seconds <= 0:
            return
        try:
            await asyncio.wait_for(stopped.wait(), seconds)
        except TimeoutError:
            pass

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _stop_all(self) -> None:
        for stopped in self._running.values():
            stopped.set()
        self._announce()

    def _announce(self) -> None:
        """Wakes all waiters for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
