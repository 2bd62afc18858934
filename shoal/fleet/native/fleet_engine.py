"""FleetEngine: our own workers of one model as one Engine.

A request goes where the dispatcher places it. If its worker breaks off before the first token, another one
gets it anew. After that it migrates: another worker gets the same request with the tokens so far as
`output_token_ids`, and goes on as the first one would have. A draw depends on seed and position alone, and
penalties, min_tokens, grammars and limits count those tokens as their own. Stop strings and tool calls are
read from the text of the one unbroken stream, so they do not notice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import TypeVar, cast

from shoal.api import FinishReason, Output, Request, Span
from shoal.control import Command, Control, ReadSleepState
from shoal.errors import BusyError, ConfigError, RequestError, ShoalError, UnavailableError, WorkerFailedError
from shoal.fleet.native.disagg import PrefillPool
from shoal.fleet.native.kv_transfers import KvLoan, KvMoves
from shoal.fleet.native.remote_engine import RemoteEngine, RemoteStream
from shoal.fleet.native.summed_stats import WorkerSums
from shoal.fleet.routing.dispatcher import Dispatcher, Place, Wanted
from shoal.fleet.tasks import start
from shoal.fleet.worker import MovedError, RefusedError, at_worker, errors_of
from shoal.sampling_params import SamplingParams
from shoal.stats import SleepState, Stats
from shoal.telemetry.logs import about
from shoal.text.request_builder import copy_params

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TRIES = 4  # workers that may fail a request before its first token, whatever the limit of migrations
BOOKED_TOKENS = 8  # of a stream are told to the router's books at a time, which count in blocks
MAX_REFUSALS = 10  # by workers that take nothing just now, until the request is told so


class FleetEngine(Control):
    def __init__(
        self,
        dispatcher: Dispatcher[RemoteEngine],
        prefills: PrefillPool | None = None,
        moves: KvMoves | None = None,
        *,
        migration_limit: int,
    ) -> None:
        """dispatcher: of the workers that generate. prefills: those that compute long prompts for them.
        moves: how KV blocks go along with a request; None: they are computed.
        migration_limit: workers that may fail a request which has tokens, before it ends with an error."""
        self.num_migrations = 0  # of streams that went on at another worker
        self.num_retries = 0  # of requests without a token
        self.num_drained = 0  # of streams that left a worker which drains
        self._dispatcher, self._prefills, self._moves = dispatcher, prefills, moves
        self._migration_limit = migration_limit
        self._sums = WorkerSums()
        self._running: dict[str, _Progress] = {}
        self._leaving: set[_Progress] = set()  # those that leave a worker and have no other place yet

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
            tags=frozenset(request.tags),
        )
        try:
            while not progress.has_ended:
                place: Place[RemoteEngine] | None = None
                try:
                    async with self._dispatcher.place(wanted) as place:
                        self._leaving.discard(progress)
                        progress.arrived(place)
                        first = await self._first_token(progress, wanted, place)
                        if first is not None and not progress.has_forerunner:
                            yield first
                            if progress.has_ended:
                                return
                            first = None
                        await self._bring_blocks(progress, wanted, place)
                        with errors_of(place.worker.id), contextlib.ExitStack() as stack:
                            try:
                                stream = stack.enter_context(closing(progress.begin(place)))
                            except ShoalError:
                                if first is not None:
                                    yield first
                                raise
                            self._may_leave(progress, wanted, place)
                            if first is not None:  # The worker has begun while this one is read.
                                yield first
                            while not progress.has_ended:
                                output = progress.take(await stream.get(), place)
                                if output.token_ids or progress.has_ended:
                                    yield output
                                if progress.must_move:
                                    raise RefusedError("it has ended its requests, to sleep or to stop")
                except MovedError as error:
                    progress.left(place, error)
                except RefusedError as error:
                    progress.left(place, error)
                    progress.refused(error)
                except BusyError as error:
                    if place is None:  # the queue is full
                        raise
                    progress.left(place, error)
                    progress.was_not_taken()
                except WorkerFailedError as error:
                    progress.left(place, error)
                    self._count(progress, error)
                wanted.token_ids = progress.token_ids
        finally:
            del self._running[request.request_id]
            self._leaving.discard(progress)
            # The router's books are told of tokens several at a time, and not of the last ones.
            wanted.num_generated = len(progress.output_ids) - len(request.output_token_ids)
            self._dispatcher.end(wanted)
            progress.end()

    async def abort(self, request_id: str) -> None:
        """A request that still waits for a worker ends there, as soon as it gets one."""
        progress = self._running.get(request_id)
        if progress is not None:
            progress.is_aborted = True
            if progress.link is not None:
                progress.link.tell_abort(progress.attempt_id)

    async def stats(self) -> Stats:
        """The sums over all workers, as they have reported lately; what those that are gone had counted is
        counted still. Who waits here waits, too."""
        workers = self._dispatcher.workers
        if self._prefills is not None:  # a worker may be in either
            workers = workers | self._prefills.dispatcher.workers
        links = [worker.link for worker in workers.values()]
        stats = self._sums.of({link.address: link.report.stats for link in links if link.report is not None})
        stats.num_waiting += self._dispatcher.queue.length
        return stats

    # Control

    async def control(self, command: Command[T]) -> T:
        """The state of sleep is told for the workers that generate together: awake if one is. Every other
        command is for workers by name, and not for their sum: raises ConfigError."""
        if not isinstance(command, ReadSleepState):
            raise ConfigError("the workers of a fleet get commands by the router's admin port, under /fleet")
        reports = [worker.link.report for worker in self._dispatcher.workers.values()]
        states = [report.sleep for report in reports if report is not None]
        state = min(states, key=_depth, default=SleepState())
        return cast(T, state)

    # Inside

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
        found = await prefills.first_token(
            progress.request, wanted, place, progress.sent, functools.partial(progress.fetch_ahead, place)
        )
        if found is None:
            progress.drop_forerunner()
            place.prefilled_here()
            return None
        worker_id, output = found
        if output.token_ids:
            self._dispatcher.began(wanted)
        output = progress.take_first(output, worker_id, place)
        wanted.token_ids = progress.token_ids
        return output

    async def _bring_blocks(self, progress: _Progress, wanted: Wanted, place: Place[RemoteEngine]) -> None:
        """Another worker's KV blocks for the worker of `place`, where that is quicker than computing."""
        progress.drop_spent_loan(place.worker.link)
        if self._moves is not None and progress.loan is None and progress.reads_cache:
            progress.take_loan(await self._moves.loan_for(wanted, place))

    def _may_leave(self, progress: _Progress, wanted: Wanted, place: Place[RemoteEngine]) -> None:
        """From now on the request leaves the worker of `place` when that drains, if others have room, and if
        it can take its blocks along sooner than they are computed anew. Else it ends there."""
        moves = self._moves
        if moves is None:
            return

        def leave() -> None:
            if not progress.has_tokens or progress.loan is not None or progress in self._leaving:
                return
            others = self._dispatcher.others(place.worker, wanted)
            requests, tokens = self._dispatcher.room_at(others)
            tokens -= sum(one.num_tokens for one in self._leaving)
            if len(self._leaving) >= requests or progress.num_tokens > tokens:
                return
            if moves.may_leave(place.worker, progress.num_tokens, others):
                self._leaving.add(progress)
                start(self._leave(moves, progress, wanted, place))

        place.on_draining = leave

    async def _leave(
        self, moves: KvMoves, progress: _Progress, wanted: Wanted, place: Place[RemoteEngine]
    ) -> None:
        """The worker goes on with the request until it has promised its blocks."""
        worker, attempt_id = place.worker, progress.attempt_id
        loan = await moves.borrow(worker, progress.token_ids, wanted)
        if loan is None:
            self._leaving.discard(progress)
        elif progress.has_ended or progress.attempt_id != attempt_id:
            loan.give_back()
        else:
            progress.take_loan(loan)
            self.num_drained += 1
            worker.link.break_off(attempt_id, RefusedError(f"worker {worker.id} drains"))

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
        self.loan: KvLoan | None = None  # for the worker that goes on, until it has read the blocks
        self._reader: RemoteEngine | None = None  # who was given its ticket
        # What brings those blocks in there, while they are computed
        self._forerunner: RemoteStream | None = None
        self._forerunner_link: RemoteEngine | None = None
        self._num_forerunners = 0
        self._departure: tuple[float, Span] | None = None  # when it left its worker, and the move that began
        self._moves: list[tuple[float, Span]] = []  # that are to be told, with the times of their ends

    def arrived(self, place: Place[RemoteEngine]) -> None:
        """It has a place at a worker."""
        logger.debug(about(self.request.log_id, f"goes to worker {place.worker.id}", worker=place.worker.id))

    def left(self, place: Place[RemoteEngine] | None, error: ShoalError) -> None:
        """It goes on at another worker."""
        if place is None:
            return
        num_tokens, worker_id = len(self.output_ids) - len(self.request.output_token_ids), place.worker.id
        self._end_move(place)
        move: dict[str, str | int | float] = {
            "from": worker_id,
            "why": str(error),
            "output_tokens": num_tokens,
        }
        self._departure = place.now, Span("migration", 0.0, 0.0, attributes=move)
        text = f"leaves worker {worker_id} after {num_tokens} tokens: {error}"
        logger.info(about(self.request.log_id, text, worker=worker_id))

    def _end_move(self, place: Place[RemoteEngine]) -> None:
        if self._departure is not None:
            then, span = self._departure
            span.seconds, span.worker = place.now - then, place.worker.id
            self._moves.append((then, span))
            self._departure = None

    def _spans(self, output: Output, place: Place[RemoteEngine], told: list[Span]) -> None:
        """Tells with this output how the request came to `place`, and then what is told of it there."""
        self._end_move(place)
        for then, span in self._moves:
            span.ago_s = place.now - then
        output.spans = [*[span for _, span in self._moves], *place.take_spans(), *told]
        self._moves.clear()

    def end(self) -> None:
        """Nobody reads the answer any more."""
        self.has_ended = True
        self.drop_forerunner()
        if self.loan is not None:
            self.loan.give_back()

    def take_loan(self, loan: KvLoan | None) -> None:
        """For the next worker, in place of one that it may have by now."""
        if self.loan is not None:
            self.loan.give_back()
        self.loan, self._reader = loan, None

    def was_not_taken(self) -> None:
        """The worker had no room, and has read nothing."""
        self._reader = None

    def drop_spent_loan(self, link: RemoteEngine) -> None:
        """A ticket ends with the worker that has begun to read by it. `link`: where the request goes on."""
        if self._reader not in (None, link):
            self.take_loan(None)

    @property
    def reads_cache(self) -> bool:
        """Whether a worker would use blocks that it has of the prompt."""
        params = self.request.params
        needs_prompt = params.prompt_logprobs is not None and not self._has_prompt_logprobs
        return not (needs_prompt or params.skip_reading_prefix_cache or self.request.embed)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        prompt = self.request.prompt_token_ids
        return prompt + self.output_ids if self.output_ids else prompt

    def sent(self, link: RemoteEngine, attempt_id: str) -> None:
        """A prefill worker has the request, by this id."""
        self.link, self.attempt_id = link, attempt_id
        if self.is_aborted:
            link.tell_abort(attempt_id)

    def fetch_ahead(self, place: Place[RemoteEngine], ticket: bytes) -> None:
        """A prefill worker has begun with the prompt: the worker of `place` begins to read its blocks."""
        self.drop_forerunner()
        self._num_forerunners += 1
        forerunner = dataclasses.replace(
            self.request,
            request_id=f"{self.request.request_id}.kv{self._num_forerunners}",
            params=SamplingParams(max_tokens=1),
            bad_word_ids=(),
            kv_ticket=ticket,
            fetches_only=True,
        )
        link = place.worker.link
        with contextlib.suppress(WorkerFailedError):  # `begin` notices
            self._forerunner, self._forerunner_link = link.open(forerunner), link
            self._reader = link

    @property
    def has_forerunner(self) -> bool:
        """Whether its blocks are in place, or on their way, where it goes on with the next token."""
        return self._forerunner is not None and self.loan is not None and not self.has_ended

    def drop_forerunner(self) -> None:
        """It has a successor by now, or nobody needs the blocks."""
        if self._forerunner is not None:
            self._forerunner.close()
            self._forerunner = self._forerunner_link = None

    def take_first(self, output: Output, prefill_worker: str, place: Place[RemoteEngine]) -> Output:
        """What the reader gets of a prefill worker's answer. place: where the request goes on."""
        self._num_attempts += 1
        self._spans(output, place, output.spans or [])
        self.has_ended = output.finish_reason is not None
        if output.kv_ticket is not None:
            assert self.link is not None
            self.loan, output.kv_ticket = KvLoan(self.link, output.kv_ticket), None
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
        if self._forerunner_link is not link:
            self.drop_forerunner()
        if self._num_attempts > 1 or self.loan is not None:
            if self._has_prompt_logprobs:
                params = copy_params(params)
                params.prompt_logprobs = None
            request = dataclasses.replace(
                request,
                request_id=f"{request.request_id}.{self._num_attempts}",
                params=params,
                output_token_ids=list(self.output_ids),
                kv_ticket=None if self.loan is None else self.loan.ticket,
            )
            if self._forerunner is not None and self._forerunner.is_under_way:
                request.kv_ticket, request.continues = None, self._forerunner.request_id
        attempt_id = self.attempt_id = request.request_id
        place.on_broken = lambda: link.break_off(
            attempt_id, WorkerFailedError(f"worker {worker.id} was given up: {worker.why}")
        )

        def move() -> bool:
            if self._is_told or self.attempt_id != attempt_id:
                return False
            link.break_off(
                attempt_id, MovedError(f"it waits at worker {worker.id}, and another would run it at once")
            )
            return True

        if not self.has_tokens and self.loan is None and self._forerunner is None:
            place.on_moving = move
        stream = link.open(request)
        self._reader = link
        if self.is_aborted:
            link.tell_abort(attempt_id)
        return stream

    def take(self, output: Output, place: Place[RemoteEngine]) -> Output:
        """What the reader gets. The prompt and its cached tokens are told once, whoever computes it again.
        `must_move` is set where the worker has aborted what nobody asked it to."""
        self._num_unbooked += len(output.token_ids)
        if not self._is_told:
            self._is_told = True
            self._spans(output, place, at_worker(output.spans, place.worker.id))
            if self._reader is not None:  # else the ticket came since, and is for the next worker
                self.loan = None
            self.drop_forerunner()
            place.cached(output.num_cached_tokens)
            self._book(place)
        elif self._num_unbooked >= BOOKED_TOKENS:
            self._book(place)
        if self.has_tokens:
            output.num_cached_tokens = self._num_cached
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
