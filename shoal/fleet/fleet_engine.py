"""FleetEngine: our own workers of one model as one Engine.

A request goes where the dispatcher places it. If its worker breaks off before the first token, another one
gets it anew. After that it migrates: another worker gets the same request with the tokens so far as
`output_token_ids`, and goes on as the first one would have. A draw depends on seed and position alone, and
penalties, min_tokens, grammars and limits count those tokens as their own. Stop strings and tool calls are
read from the text of the one unbroken stream, so they do not notice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import closing
from typing import Any, TypeVar, cast

from shoal.api import FinishReason, Output, Request, SleepState, Stats
from shoal.control import Command, Control, ReadSleepState
from shoal.errors import BusyError, ConfigError, RequestError, UnavailableError, WorkerFailedError
from shoal.fleet.disagg import PrefillPool
from shoal.fleet.dispatcher import Dispatcher, Place, Wanted
from shoal.fleet.remote_engine import RemoteEngine, RemoteStream
from shoal.fleet.worker import RefusedError, errors_of
from shoal.request_builder import copy_params

T = TypeVar("T")

MAX_TRIES = 4  # workers that may fail a request before its first token, whatever the limit of migrations
BOOKED_TOKENS = 8  # of a stream are told to the router's books at a time, which count in blocks
MAX_REFUSALS = 10  # by workers that take nothing just now, until the request is told so


class FleetEngine(Control):
    def __init__(
        self,
        dispatcher: Dispatcher[RemoteEngine],
        prefills: PrefillPool | None = None,
        *,
        migration_limit: int,
    ) -> None:
        """dispatcher: of the workers that generate. prefills: those that compute long prompts for them.
        migration_limit: workers that may fail a request which has tokens, before it ends with an error."""
        self.num_migrations = 0  # of streams that went on at another worker
        self.num_retries = 0  # of requests without a token
        self._dispatcher, self._prefills, self._migration_limit = dispatcher, prefills, migration_limit
        self._running: dict[str, _Progress] = {}

    # Engine

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Raises BusyError if all workers and the queue are full, and UnavailableError if no worker is ready,
        or so many have failed the request that it is given up."""
        if request.request_id in self._running:
            raise RequestError(
                f"request_id {request.request_id!r} is that of a request that runs; choose another"
            )
        progress = self._running[request.request_id] = _Progress(request)
        wanted = Wanted(
            request.request_id,
            progress.token_ids,
            priority=request.priority,
            session=request.session,
            cache_salt=request.cache_salt,
            lora_name=request.adapter,
        )
        try:
            while not progress.has_ended:
                place: Place[RemoteEngine] | None = None
                try:
                    async with self._dispatcher.place(wanted) as place:
                        if (first := await self._first_token(progress, wanted, place)) is not None:
                            yield first
                            if progress.has_ended:
                                return
                        with errors_of(place.worker.id), closing(progress.begin(place)) as stream:
                            while not progress.has_ended:
                                output = progress.take(await stream.get(), place)
                                if output.token_ids or progress.has_ended:
                                    yield output
                                if progress.must_move:
                                    raise RefusedError("it has ended its requests, to sleep or to stop")
                except RefusedError as error:
                    progress.refused(error)
                except BusyError:
                    if place is None:  # the queue is full
                        raise
                except WorkerFailedError as error:
                    self._count(progress, error)
                wanted.token_ids = progress.token_ids
        finally:
            del self._running[request.request_id]
            self._dispatcher.forget(wanted)

    async def abort(self, request_id: str) -> None:
        """A request that still waits for a worker ends there, as soon as it gets one."""
        progress = self._running.get(request_id)
        if progress is not None:
            progress.is_aborted = True
            if progress.link is not None:
                progress.link.tell_abort(progress.attempt_id)

    async def stats(self) -> Stats:
        """The sums over all workers, as they have reported lately; who waits here waits, too."""
        links = self._links(self._dispatcher)
        if self._prefills is not None:
            links += self._links(self._prefills.dispatcher)
        stats = sum_of([link.report.stats for link in links if link.report is not None])
        stats.num_waiting += self._dispatcher.queue.length
        return stats

    # Control

    async def control(self, command: Command[T]) -> T:
        """The state of sleep is told for the workers that generate together: awake if one is. Every other
        command is for workers by name, and not for their sum: raises ConfigError."""
        if not isinstance(command, ReadSleepState):
            raise ConfigError("the workers of a fleet get commands by the router's admin port, under /fleet")
        links = self._links(self._dispatcher)
        states = [link.report.sleep for link in links if link.report is not None]
        state = min(states, key=_depth, default=SleepState())
        return cast(T, state)

    # Inside

    def _links(self, dispatcher: Dispatcher[RemoteEngine]) -> list[RemoteEngine]:
        return [worker.link for worker in dispatcher.workers.values()]

    async def _first_token(
        self, progress: _Progress, wanted: Wanted, place: Place[RemoteEngine]
    ) -> Output | None:
        """From a prefill worker, if the prompt is to be computed by one; it is tried once. None: the worker
        of `place` does all."""
        prefills = self._prefills
        if prefills is None or progress.is_local or progress.has_tokens:
            return None
        if not prefills.takes(progress.request, place):
            return None
        progress.is_local = True
        place.prefilled_elsewhere()
        found = await prefills.first_token(progress.request, wanted, progress.sent)
        if found is None:
            return None
        worker_id, output = found
        if output.token_ids:
            wanted.has_begun = True
        output = progress.take_first(output, worker_id, place)
        wanted.token_ids = progress.token_ids
        return output

    def _count(self, progress: _Progress, error: WorkerFailedError) -> None:
        """Raises UnavailableError if the request ends here."""
        if not progress.was_sent:
            return  # the worker is known to be away now, and is not chosen again
        if progress.has_tokens:
            progress.num_migrations += 1
            if progress.num_migrations > self._migration_limit:
                raise UnavailableError(
                    f"{error}; workers failed this request {progress.num_migrations} times after its first "
                    f"token, and the limit is {self._migration_limit} (--migration-limit): it is given up"
                ) from None
            self.num_migrations += 1
        else:
            progress.num_failures += 1
            if progress.num_failures >= MAX_TRIES:
                raise UnavailableError(
                    f"{error}; {progress.num_failures} workers failed this request before its first token: "
                    "it may be what they fail at, so it is given up"
                ) from None
            self.num_retries += 1


class _Progress:
    """What has become of a request, over all its workers."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.output_ids = list(request.output_token_ids)
        self.has_tokens = self.has_ended = self.is_aborted = False
        self.num_migrations = self.num_failures = self.num_refusals = 0
        self.was_sent = False  # by the attempt of now, to a worker that was there
        self.must_move = False  # the worker of now does no more for it
        self.is_local = False  # prefill workers are not asked for it any more
        self.link: RemoteEngine | None = None
        self.attempt_id = request.request_id
        self._num_attempts = 0
        self._is_told = False  # what this worker had cached
        self._num_unbooked = 0
        self._num_cached = 0  # what the worker of the first token had cached
        self._has_prompt_logprobs = False
        self._kv_ticket: bytes | None = None  # for the worker that decodes, until it has read the blocks

    @property
    def token_ids(self) -> list[int]:
        prompt = self.request.prompt_token_ids
        return prompt + self.output_ids if self.output_ids else prompt

    def sent(self, link: RemoteEngine, attempt_id: str) -> None:
        """A prefill worker has the request, by this id."""
        self.link, self.attempt_id = link, attempt_id
        if self.is_aborted:
            link.tell_abort(attempt_id)

    def take_first(self, output: Output, prefill_worker: str, place: Place[RemoteEngine]) -> Output:
        """What the reader gets of a prefill worker's answer. place: where the request goes on."""
        self._num_attempts += 1
        self.has_ended = output.finish_reason is not None
        self._kv_ticket, output.kv_ticket = output.kv_ticket, None
        self._has_prompt_logprobs = output.prompt_logprobs is not None
        self.output_ids += output.token_ids
        if output.token_ids:
            self.has_tokens, self._num_cached = True, output.num_cached_tokens
            self.request.worker, self.request.prefill_worker = place.worker.id, prefill_worker
        output.request_id = self.request.request_id
        return output

    def begin(self, place: Place[RemoteEngine]) -> RemoteStream:
        """Sends the request to the worker. Every attempt has an id of its own, as the worker may be one that
        still has the attempt before. Raises what RemoteEngine.open raises."""
        worker, link = place.worker, place.worker.link
        self.link, self.was_sent, self.must_move = link, link.is_connected and worker.is_reached, False
        self._is_told, self._num_unbooked, self._num_attempts = False, 0, self._num_attempts + 1
        if not worker.is_reached:  # it broke while another one computed the prompt
            raise WorkerFailedError(f"worker {worker.id}: {worker.why}")
        request, params = self.request, self.request.params
        if not self.has_tokens:
            request.worker = worker.id
        if self._num_attempts > 1:
            if self._has_prompt_logprobs:
                params = copy_params(params)
                params.prompt_logprobs = None
            request = dataclasses.replace(
                request,
                request_id=f"{request.request_id}.{self._num_attempts}",
                params=params,
                output_token_ids=list(self.output_ids),
                kv_ticket=self._kv_ticket,
            )
        attempt_id = self.attempt_id = request.request_id
        place.on_broken = lambda: link.break_off(
            attempt_id, WorkerFailedError(f"worker {worker.id} was given up: {worker.why}")
        )
        stream = link.open(request)
        if self.is_aborted:
            link.tell_abort(attempt_id)
        return stream

    def take(self, output: Output, place: Place[RemoteEngine]) -> Output:
        """What the reader gets. The prompt and its cached tokens are told once, whoever computes it again.
        `must_move` is set where the worker has aborted what nobody asked it to."""
        self._num_unbooked += len(output.token_ids)
        if not self._is_told:
            self._is_told, self._kv_ticket = True, None
            place.cached(output.num_cached_tokens)
            self._book(place)
        elif self._num_unbooked >= BOOKED_TOKENS:
            self._book(place)
        if self.has_tokens:
            output.num_cached_tokens, output.queued_seconds = self._num_cached, 0.0
        elif output.token_ids:
            self.has_tokens, self._num_cached = True, output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self._has_prompt_logprobs = True
        self.output_ids += output.token_ids
        output.request_id = self.request.request_id
        if output.finish_reason is not None:
            self.must_move = output.finish_reason == FinishReason.ABORT and not self.is_aborted
            self.has_ended = not self.must_move
            if self.must_move:
                output.finish_reason = None
        return output

    def _book(self, place: Place[RemoteEngine]) -> None:
        place.generated(self._num_unbooked)
        self._num_unbooked = 0

    def refused(self, error: RefusedError) -> None:
        """Raises UnavailableError if that was often enough."""
        self.num_refusals += 1
        if self.num_refusals >= MAX_REFUSALS:
            raise UnavailableError(f"{error}; so did {self.num_refusals - 1} tries before") from None


def _depth(state: SleepState) -> int:
    return -1 if state.level is None else state.level


def sum_of(parts: Sequence[Stats]) -> Stats:
    """Stats of several engines as those of one: counts are added, measured times are averages."""
    return cast(Stats, _sum_of(parts)) if parts else Stats()


def _sum_of(parts: Sequence[Any]) -> Any:
    parts = [one for one in parts if one is not None]  # of an engine that has no such thing
    if not parts:
        return None
    first = parts[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(**{name: _sum_of([getattr(one, name) for one in parts]) for name in names})
    if isinstance(first, dict):
        keys = dict.fromkeys(key for one in parts for key in one)
        return {key: _sum_of([one[key] for one in parts if key in one]) for key in keys}
    if isinstance(first, list):
        return [sum(values) for values in zip(*parts)]
    return sum(parts) / len(parts) if isinstance(first, float) else sum(parts)
