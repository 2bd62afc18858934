"""Generation: from token ids to text deltas, for all APIs.

    async with exchange.generate(model, [prompt], params) as answers:
        async for deltas in answers:        # all that is ready
            ...

It is admitted to the queue, keeps the deadline and counts for the metrics. request_builder.py makes the
requests, and answer.py reads the outputs. The end of the block aborts requests that still run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from shoal.api import FinishReason, Output, Request, TokenLogprobs
from shoal.errors import EngineDeadError, UnavailableError, UserError
from shoal.outputs import CompletionOutput
from shoal.sampling_params import SamplingParams
from shoal.server.errors import ApiError, context_overflow
from shoal.server.served.model import Prompt, ServedModel
from shoal.telemetry.metrics import RequestTimes
from shoal.telemetry.timeline import Timeline
from shoal.text.answer import Answer, Delta, add_to


@dataclass(slots=True)
class Usage:
    """Tokens so far, over all answers. A prompt counts once, whatever n is."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that the prefix cache held
    # verified drafts, and those that became tokens of the answers; None: the model runs without drafts
    drafted: tuple[int, int] | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Generation:
    """Generates `params.n` answers to each prompt.

    Entering raises UserError for an impossible request and ApiError (429) if the queue is full. Iterating
    raises what the engine raises. At the deadline the block ends with ApiError (504).
    """

    def __init__(
        self,
        model: ServedModel,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        line: Timeline,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
        session: str | None = None,
        tags: tuple[str, ...] = (),
        embed: bool = False,
        cuts_max_tokens: bool = False,
    ) -> None:
        """line: the request's timeline. params.max_tokens: None is as many tokens as fit. timeout: seconds
        from entering; the model's own limit holds too. session, tags: see Request. cuts_max_tokens: lowers a
        max_tokens that does not fit, which is refused otherwise.
        """
        self.model, self.prompts, self.params, self.request_id = model, prompts, params, request_id
        self.priority, self.cache_salt, self.session, self.tags = priority, cache_salt, session, tags
        self.embed = embed
        self.cuts_max_tokens = cuts_max_tokens
        limits = [t for t in (timeout, model.request_timeout) if t is not None]
        self.seconds = min(limits) if limits else None
        self.usage = Usage(prompt_tokens=sum(len(p.token_ids) for p in prompts))
        if model.loaded.most_drafts:
            self.usage.drafted = (0, 0)
        self.line = line
        line.params, line.prompt_tokens = params, self.usage.prompt_tokens
        self._running: list[_Running] = []
        self._num_ended = 0
        self._num_slots = 0  # slots in the queue: the most answers that are in the engine at once
        self._streams: list[AsyncGenerator[Output, None]] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._timeout = asyncio.timeout(self.seconds)

    async def __aenter__(self) -> Generation:
        params = self.params
        if params.structured_outputs is not None:
            # This runs in a thread, because even a short grammar may take long.
            await self.model.in_thread(functools.partial(self.model.builder.check_grammar, params))
        count = len(self.prompts) * params.n
        if self.embed:  # OpenAI's clients send 2,048 inputs at once: a share of the queue computes them all
            count = min(count, max(1, self.model.admission.limit // 2))
        self.model.admission.enter(count)  # comes before anything is built, as n may be a million
        self._num_slots = count
        try:
            self._running = [_Running(i, r, self.model, self.line) for i, r in enumerate(self._requests())]
        except BaseException:
            self.model.admission.leave(self._num_slots)
            raise
        self.model.metrics.answers.observe(params.n)
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # This comes first: from here on the deadline interrupts nothing.
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise ApiError(504, f"the request took longer than its {self.seconds:g} s") from None
        finally:
            await self._leave()

    async def _leave(self) -> None:
        """Ends running requests and releases the queue's slots, even if it is cancelled meanwhile."""
        try:
            for pump in self._pumps:
                pump.cancel()
            if self._pumps:
                await asyncio.gather(*self._pumps, return_exceptions=True)
            for stream in self._streams:
                await stream.aclose()  # aborts what still runs
        finally:
            for running in self._running:
                running.close()
            for i in range(0, len(self._running), self.params.n):
                self.model.metrics.end(self.times[i : i + self.params.n])
            self.model.admission.leave(self._num_slots)

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        """Yields all deltas that are ready, at least one. The engine merges outputs while nothing reads."""
        self._streams = [self._stream(i, running.request) for i, running in enumerate(self._running)]
        if len(self._running) == 1:
            async for delta in self._deltas(0):
                yield [delta]
            return
        ready: list[Delta] = []
        arrived, taken = asyncio.Event(), asyncio.Event()
        num_running = len(self._running)
        places = asyncio.Semaphore(self._num_slots)
        failure: BaseException | None = None

        async def pump(i: int) -> None:
            """Moves one answer's deltas to `ready`, one for each step of the reader."""
            nonlocal num_running, failure
            try:
                async with places:
                    async for delta in self._deltas(i):
                        ready.append(delta)
                        arrived.set()
                        await taken.wait()
            except Exception as error:  # noqa: BLE001 - the reader raises it
                failure = failure or error
            num_running -= 1
            arrived.set()

        self._pumps = [asyncio.create_task(pump(i)) for i in range(len(self._running))]
        while num_running or ready:
            await arrived.wait()
            if failure is not None:
                raise failure
            arrived.clear()
            deltas, ready = ready, []
            taken.set()
            taken = asyncio.Event()
            if deltas:
                yield deltas

    async def collect(self) -> list[CompletionOutput]:
        """Reads all answers to their ends. Prompt log-probabilities are in `prompt_logprobs` then."""
        texts: list[list[str]] = [[] for _ in self._running]
        wants_logprobs = self.params.logprobs is not None
        wholes = [
            CompletionOutput(i, "", [], logprobs=[] if wants_logprobs else None)
            for i in range(len(self._running))
        ]
        async for deltas in self:
            for delta in deltas:
                texts[delta.index].append(delta.text)
                add_to(wholes[delta.index], delta, "")
        for whole, parts in zip(wholes, texts):
            whole.text = "".join(parts)
        return wholes

    async def warm(self) -> str | None:
        """Puts the prompt into the prefix cache, and returns the finish reason. The one token that the
        engine generates is not counted."""
        for prompt in self.prompts:
            prompt.budget = None  # an end of reasoning that is due at once would leave nothing to generate
        [whole] = await self.collect()
        self.usage.completion_tokens = 0
        return whole.finish_reason

    @property
    def has_ended(self) -> bool:
        """True when all answers have ended."""
        return self._num_ended > 0 and self._num_ended == len(self._running)

    @property
    def times(self) -> list[RequestTimes]:
        """The times of each answer, once the block is entered."""
        return [running.times for running in self._running]

    @property
    def worker(self) -> str:
        """The worker of a fleet that generates the first answer; "" without a fleet, or before it is
        chosen."""
        return self._running[0].request.worker if self._running else ""

    @property
    def prefill_worker(self) -> str:
        """The worker that has computed the first answer's prompt; "" if `worker` did."""
        return self._running[0].request.prefill_worker if self._running else ""

    @property
    def prompt_logprobs(self) -> list[list[TokenLogprobs | None] | None]:
        """The prompt log-probabilities of each answer, after its first token."""
        return [running.answer.prompt_logprobs for running in self._running]

    def _stream(self, i: int, request: Request) -> AsyncGenerator[Output, None]:
        engine, budget = self.model.engine, self.prompts[i // self.params.n].budget
        return engine.generate(request) if budget is None else budget.generate(engine.generate, request)

    async def _deltas(self, i: int) -> AsyncIterator[Delta]:
        """Yields one answer's deltas up to its end."""
        running, started = self._running[i], False
        try:
            async for output in self._streams[i]:
                started = True
                if output.finish_reason == FinishReason.ERROR:
                    running.fail(output)
                    if output.stop_reason == "grammar":
                        raise ApiError(
                            400, output.error or "the grammar cannot be followed", param="structured_outputs"
                        )
                    raise ApiError(500, output.error or "the engine failed this request", code="engine_error")
                is_first_of_prompt = i % self.params.n == 0 and not running.answer.num_cached_tokens
                if is_first_of_prompt:
                    self.usage.cached_tokens += output.num_cached_tokens
                    self.line.cached_tokens = self.usage.cached_tokens
                delta = running.push(output)
                self.usage.completion_tokens += len(delta.token_ids)
                if output.drafted is not None:
                    verified, accepted = self.usage.drafted or (0, 0)
                    now = output.drafted.num_verified, output.drafted.num_accepted
                    self.line.drafted = self.usage.drafted = (verified + now[0], accepted + now[1])
                if delta.finish_reason is not None:
                    self._num_ended += 1
                    # The engine does not know of a stop string and would continue; others may run long.
                    await self._streams[i].aclose()
                yield delta
                if delta.finish_reason is not None:
                    return
        except (UserError, UnavailableError):
            if started:  # a fleet could not continue
                running.times.finish(FinishReason.ERROR)
            running.times.forget()
            raise
        except EngineDeadError as error:
            running.times.finish(FinishReason.ERROR)
            # A request that had no token yet can be sent again as it is; half an answer cannot.
            raise ApiError(500 if started else 503, str(error), code="engine_dead") from None
        raise ApiError(500, "the engine ended a request without a reason", code="engine_error")

    def _requests(self) -> list[Request]:
        numbers = self.model.numbers
        # Clients may send one request id twice, so the engine gets ids of its own.
        own_ids = (f"{self.request_id}-{i}-{next(numbers)}" for i in itertools.count())
        return self.model.builder.build(
            [prompt.token_ids for prompt in self.prompts],
            self.params,
            own_ids,
            arrival=time.monotonic(),
            max_tokens=[self._max_tokens(prompt) for prompt in self.prompts],
            priority=self.priority,
            cache_salt=self.cache_salt,
            embed=self.embed,
            session=self.session,
            tags=self.tags,
            external_id=self.line.id,
            trace_headers=self.line.trace_headers,
        )

    def _max_tokens(self, prompt: Prompt) -> int:
        """Returns the most tokens that may follow the prompt. Raises ApiError for a prompt that is too
        long."""
        model, ids, asked = self.model, prompt.token_ids, self.params.max_tokens
        room = model.max_model_len - len(ids)
        if self.embed:
            if room < 0:
                raise context_overflow(model.max_model_len, len(ids), embeds=True)
            return 1
        if room < 1:
            raise context_overflow(model.max_model_len, len(ids), asked)
        most = model.loaded.most_new_tokens
        if asked is None:
            return min(room, model.loaded.default_max_tokens or room)
        if most is not None and asked > most:
            asked = most
        if asked > room and self.cuts_max_tokens:
            return room
        if asked > room:
            raise context_overflow(model.max_model_len, len(ids), asked)
        return asked


class _Running:
    """A running answer, and its times for the metrics."""

    def __init__(self, index: int, request: Request, model: ServedModel, line: Timeline) -> None:
        self.index, self.request = index, request
        self.answer = Answer(request, model.loaded.tokenizer)
        self.times = model.metrics.begin(request)
        self.line = line.answer(request)

    def push(self, output: Output) -> Delta:
        text = self.answer.push(output)
        finish = output.finish_reason
        # A request that was aborted before its first token never waited for that token.
        if output.token_ids or finish != FinishReason.ABORT:
            self.times.tokens(len(output.token_ids), output.num_cached_tokens, output.queued_seconds)
        if output.drafted is not None:
            self.times.drafted(output.drafted)
        self.line.push(output, self.times.last)
        if finish is not None:
            self.times.finish(finish)
        return Delta(
            self.index,
            text,
            output.token_ids,
            output.logprobs,
            output.prompt_logprobs,
            None if finish is None else str(finish),
            output.stop_reason,
            output.embedding,
        )

    def fail(self, output: Output) -> None:
        """Ends the answer after an error of the engine. The tokens of that output are dropped."""
        self.times.finish(FinishReason.ERROR)
        self.line.push(dataclasses.replace(output, token_ids=[]), time.perf_counter())

    def close(self) -> None:
        """Counts an unfinished answer as aborted."""
        self.times.finish(FinishReason.ABORT)
