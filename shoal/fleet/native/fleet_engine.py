"""`FleetEngine`: the native workers of one model as one Engine, with retry and migration of requests.
Dispatcher (routing/dispatcher.py) assigns the worker, RemoteEngine (remote_engine.py) sends, disagg.py does
remote prefill.

The dispatcher assigns a request to a worker. If that worker fails before the first token, another one gets
the request anew. After the first token the request migrates: another worker gets it with the tokens so far as
`output_token_ids`, and continues as the first one would have. A sampled token depends on seed and position
alone, and penalties, min_tokens, grammars and limits include those tokens. Stop strings and tool calls are
found in the text of the whole stream, so a migration does not affect them.
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
from shoal.fleet.native.kv_transfers import KvLease, KvTransfers
from shoal.fleet.native.remote_engine import RemoteEngine, RemoteStream
from shoal.fleet.native.summed_stats import SummedStats
from shoal.fleet.routing.dispatcher import Assignment, Dispatcher, RoutingRequest
from shoal.fleet.worker import MovedError, RefusedError, at_worker, errors_of
from shoal.sampling_params import SamplingParams
from shoal.stats import SleepState, Stats
from shoal.tasks import start
from shoal.telemetry.logs import about
from shoal.text.request_builder import copy_params

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TRIES = 4  # workers that may fail a request before its first token; migration_limit counts later ones
RECORDED_TOKENS = 8  # tokens of a stream per update of the active requests, whose unit is a block
MAX_REFUSALS = 10  # refusals by sleeping or stopping workers, until the request fails


class FleetEngine(Control):
    """One model's native workers as one Engine. A request of a worker that fails continues at another one."""

    def __init__(
        self,
        dispatcher: Dispatcher[RemoteEngine],
        prefills: PrefillPool | None = None,
        transfers: KvTransfers | None = None,
        *,
        migration_limit: int,
    ) -> None:
        """dispatcher: for the workers that generate. prefills: the workers that compute long prompts for
        them. transfers: brings KV blocks along with a request; None: they are computed again.
        migration_limit: how many workers may fail a request with tokens before it ends with an error."""
        self.num_migrations = 0  # streams that continued at another worker
        self.num_retries = 0  # requests without a token that were sent to another worker
        self._dispatcher, self._prefills, self._transfers = dispatcher, prefills, transfers
        self._migration_limit = migration_limit
        self._sums = SummedStats()
        self._running: dict[str, _Progress] = {}
        self._leaving: set[_Progress] = set()  # requests that leave a draining worker

    # Engine

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Raises BusyError if all workers and the queue are full, and UnavailableError if no worker is ready
        or too many workers have failed the request."""
        if request.request_id in self._running:
            raise RequestError(
                f"request_id must be unused, got {request.request_id!r} of a running request; choose another",
                field="request_id",
            )
        progress = self._running[request.request_id] = _Progress(request)
        routing = RoutingRequest(
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
                assignment: Assignment[RemoteEngine] | None = None
                try:
                    async with self._dispatcher.assign(routing) as assignment:
                        self._leaving.discard(progress)
                        progress.arrived(assignment)
                        first = await self._first_token(progress, routing, assignment)
                        if first is not None and not progress.has_prefetch:
                            yield first
                            if progress.has_ended:
                                return
                            first = None
                        await self._bring_blocks(progress, routing, assignment)
                        with errors_of(assignment.worker.id), contextlib.ExitStack() as stack:
                            try:
                                stream = stack.enter_context(closing(progress.begin(assignment)))
                            except ShoalError:
                                if first is not None:
                                    yield first
                                raise
                            self._move_when_draining(progress, routing, assignment)
                            if first is not None:  # The worker begins while this output is read.
                                yield first
                            while not progress.has_ended:
                                output = progress.take(await stream.get(), assignment)
                                if output.token_ids or progress.has_ended:
                                    yield output
                                if progress.must_move:
                                    raise RefusedError("it aborted its requests, to sleep or to stop")
                except MovedError as error:
                    progress.left(assignment, error)
                except RefusedError as error:
                    progress.left(assignment, error)
                    progress.refused(error)
                except BusyError as error:
                    if assignment is None:  # the queue is full
                        raise
                    progress.left(assignment, error)
                    progress.was_not_taken()
                except WorkerFailedError as error:
                    progress.left(assignment, error)
                    self._count(progress, error)
                routing.token_ids = progress.token_ids
        finally:
            del self._running[request.request_id]
            self._leaving.discard(progress)
            # The active requests get tokens several at a time, and the last ones not at all.
            routing.num_generated = len(progress.output_ids) - len(request.output_token_ids)
            self._dispatcher.end(routing)
            progress.end()

    async def abort(self, request_id: str) -> None:
        """Aborts a request. One that still waits for a worker ends as soon as it gets one."""
        progress = self._running.get(request_id)
        if progress is not None:
            progress.is_aborted = True
            if progress.link is not None:
                progress.link.send_abort(progress.attempt_id)

    async def stats(self) -> Stats:
        """Returns sums of the last reports of all workers, with the counts of workers that left. Requests
        queued in the router are included in num_waiting."""
        workers = self._dispatcher.workers
        if self._prefills is not None:  # a worker may be in both
            workers = workers | self._prefills.dispatcher.workers
        links = [worker.link for worker in workers.values()]
        stats = self._sums.of({link.address: link.report.stats for link in links if link.report is not None})
        stats.num_waiting += self._dispatcher.queue.length
        return stats

    @property
    def is_idle(self) -> bool:
        """True if no request runs or moves."""
        return not (self._running or self._leaving)

    # Control

    async def control(self, command: Command[T]) -> T:
        """Answers ReadSleepState for the workers that generate: awake if one of them is. Raises ConfigError
        for other commands, which are for workers by name."""
        if not isinstance(command, ReadSleepState):
            raise ConfigError(
                "commands for workers of a fleet must go to the router's admin port, under /fleet"
            )
        reports = [worker.link.report for worker in self._dispatcher.workers.values()]
        states = [report.sleep for report in reports if report is not None]
        state = min(states, key=_sleep_depth, default=SleepState())
        return cast(T, state)

    # Inside

    async def _first_token(
        self, progress: _Progress, routing: RoutingRequest, assignment: Assignment[RemoteEngine]
    ) -> Output | None:
        """Returns the first token from a prefill worker, which is tried once for a request; None if the
        assigned worker computes the prompt."""
        prefills = self._prefills
        if prefills is None or progress.is_local or progress.has_tokens:
            return None
        if not prefills.takes(progress.request, assignment):
            return None
        progress.is_local = True
        assignment.prefill_remotely()
        found = await prefills.first_token(
            progress.request,
            routing,
            assignment,
            progress.sent,
            functools.partial(progress.prefetch, assignment),
        )
        if found is None:
            progress.drop_prefetch()
            assignment.prefill_locally()
            return None
        worker_id, output = found
        if output.token_ids:
            self._dispatcher.began(routing)
        output = progress.take_first(output, worker_id, assignment)
        routing.token_ids = progress.token_ids
        return output

    async def _bring_blocks(
        self, progress: _Progress, routing: RoutingRequest, assignment: Assignment[RemoteEngine]
    ) -> None:
        """Leases another worker's KV blocks for the assigned worker, if reading is faster than computing."""
        progress.drop_spent_lease(assignment.worker.link)
        if self._transfers is not None and progress.lease is None and progress.reads_cache:
            progress.take_lease(await self._transfers.lease_for(routing, assignment))

    def _move_when_draining(
        self, progress: _Progress, routing: RoutingRequest, assignment: Assignment[RemoteEngine]
    ) -> None:
        """Has the request leave the assigned worker when that drains, if other workers have room and get its
        blocks faster than they compute them. Otherwise the request ends there."""
        transfers = self._transfers
        if transfers is None:
            return

        def leave() -> None:
            if not progress.has_tokens or progress.lease is not None or progress in self._leaving:
                return
            others = self._dispatcher.others(assignment.worker, routing)
            requests, tokens = self._dispatcher.room_at(others)
            tokens -= sum(one.num_tokens for one in self._leaving)
            if len(self._leaving) >= requests or progress.num_tokens > tokens:
                return
            if transfers.is_worth_moving(assignment.worker, progress.num_tokens, others):
                self._leaving.add(progress)
                start(self._leave(transfers, progress, routing, assignment))

        assignment.on_draining = leave

    async def _leave(
        self,
        transfers: KvTransfers,
        progress: _Progress,
        routing: RoutingRequest,
        assignment: Assignment[RemoteEngine],
    ) -> None:
        """Moves the request from a draining worker, which continues until it has leased its blocks."""
        worker, attempt_id = assignment.worker, progress.attempt_id
        lease = await transfers.request_lease(worker, progress.token_ids, routing)
        if lease is None:
            self._leaving.discard(progress)
        elif progress.has_ended or progress.attempt_id != attempt_id:
            lease.release()
        else:
            progress.take_lease(lease)
            worker.link.break_off(attempt_id, RefusedError(f"worker {worker.id} is draining"))

    def _count(self, progress: _Progress, error: WorkerFailedError) -> None:
        """Counts a failure. Raises UnavailableError if it is one too many."""
        if not progress.was_sent:
            return  # the worker was not connected, and is not chosen again
        if progress.has_tokens:
            progress.num_migrations += 1
            if progress.num_migrations > self._migration_limit:
                raise UnavailableError(
                    f"{error}; workers failed this request {progress.num_migrations} times after its first "
                    f"token, and --migration-limit is {self._migration_limit}"
                ) from None
            self.num_migrations += 1
        else:
            progress.num_failures += 1
            if progress.num_failures >= MAX_TRIES:
                raise UnavailableError(
                    f"{error}; {progress.num_failures} workers failed this request before its first token, "
                    "so the request may be the cause"
                ) from None
            self.num_retries += 1


class _Progress:
    """The state of a request over all its workers."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.output_ids = list(request.output_token_ids)
        self.has_tokens = self.has_ended = self.is_aborted = False
        self.num_migrations = self.num_failures = self.num_refusals = 0
        self.was_sent = False  # the present attempt went to a connected worker
        self.must_move = False  # the present worker has aborted it
        self.is_local = False  # no prefill worker is tried (again)
        self.link: RemoteEngine | None = None
        self.attempt_id = request.request_id
        self._num_attempts = 0
        self._has_output = False  # from the present attempt
        self._num_unrecorded = 0
        self._num_cached = 0  # tokens cached at the worker of the first token
        self._has_prompt_logprobs = False
        self.lease: KvLease | None = None  # for the worker that continues, until it has read the blocks
        self._reader: RemoteEngine | None = None  # the worker that was given its ticket
        # Brings the blocks to the decode worker while they are computed.
        self._prefetch: RemoteStream | None = None
        self._prefetch_link: RemoteEngine | None = None
        self._num_prefetches = 0
        self._departure: tuple[float, Span] | None = None  # when it left its worker, and the span of its move
        self._migrations: list[tuple[float, Span]] = []  # spans for the next output, with their ends

    def arrived(self, assignment: Assignment[RemoteEngine]) -> None:
        """Logs the assignment."""
        logger.debug(
            about(self.request.log_id, f"goes to worker {assignment.worker.id}", worker=assignment.worker.id)
        )

    def left(self, assignment: Assignment[RemoteEngine] | None, error: ShoalError) -> None:
        """Begins the span of a move to another worker, and logs it."""
        if assignment is None:
            return
        num_tokens, worker_id = (
            len(self.output_ids) - len(self.request.output_token_ids),
            assignment.worker.id,
        )
        self._end_move(assignment)
        move: dict[str, str | int | float] = {
            "from": worker_id,
            "why": str(error),
            "output_tokens": num_tokens,
        }
        self._departure = assignment.now, Span("migration", 0.0, 0.0, attributes=move)
        text = f"leaves worker {worker_id} after {num_tokens} tokens: {error}"
        logger.info(about(self.request.log_id, text, worker=worker_id))

    def _end_move(self, assignment: Assignment[RemoteEngine]) -> None:
        if self._departure is not None:
            then, span = self._departure
            span.seconds, span.worker = assignment.now - then, assignment.worker.id
            self._migrations.append((then, span))
            self._departure = None

    def _spans(self, output: Output, assignment: Assignment[RemoteEngine], spans: list[Span]) -> None:
        """Puts spans into the output: the moves and waits up to the assignment, then the worker's `spans`."""
        self._end_move(assignment)
        for then, span in self._migrations:
            span.ago_s = assignment.now - then
        output.spans = [*[span for _, span in self._migrations], *assignment.take_spans(), *spans]
        self._migrations.clear()

    def end(self) -> None:
        """Releases what the request holds."""
        self.has_ended = True
        self.drop_prefetch()
        if self.lease is not None:
            self.lease.release()

    def take_lease(self, lease: KvLease | None) -> None:
        """Keeps the lease for the next worker, and releases the present one."""
        if self.lease is not None:
            self.lease.release()
        self.lease, self._reader = lease, None

    def was_not_taken(self) -> None:
        """Notes that the worker refused the request, so that it has read no blocks."""
        self._reader = None

    def drop_spent_lease(self, link: RemoteEngine) -> None:
        """Releases a lease whose reader is not `link`, where the request continues: one worker reads a
        ticket."""
        if self._reader not in (None, link):
            self.take_lease(None)

    @property
    def reads_cache(self) -> bool:
        """True if a worker would use cached blocks of the prompt."""
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
        """Records the prefill worker that has the request, and the id there."""
        self.link, self.attempt_id = link, attempt_id
        if self.is_aborted:
            link.send_abort(attempt_id)

    def prefetch(self, assignment: Assignment[RemoteEngine], ticket: bytes) -> None:
        """Sends a prefetch request: the assigned worker reads blocks while the prefill worker computes
        them."""
        self.drop_prefetch()
        self._num_prefetches += 1
        prefetch = dataclasses.replace(
            self.request,
            request_id=f"{self.request.request_id}.kv{self._num_prefetches}",
            params=SamplingParams(max_tokens=1),
            bad_word_ids=(),
            kv_ticket=ticket,
            fetches_only=True,
        )
        link = assignment.worker.link
        with contextlib.suppress(WorkerFailedError):  # `begin` notices
            self._prefetch, self._prefetch_link = link.open(prefetch), link
            self._reader = link

    @property
    def has_prefetch(self) -> bool:
        """True if the blocks are at the worker that continues, or on their way there."""
        return self._prefetch is not None and self.lease is not None and not self.has_ended

    def drop_prefetch(self) -> None:
        """Ends the prefetch request: its continuation has begun, or the blocks are not needed."""
        if self._prefetch is not None:
            self._prefetch.close()
            self._prefetch = self._prefetch_link = None

    def take_first(self, output: Output, prefill_worker: str, assignment: Assignment[RemoteEngine]) -> Output:
        """Returns a prefill worker's output for the reader. assignment: where the request continues."""
        self._num_attempts += 1
        self._spans(output, assignment, output.spans or [])
        self.has_ended = output.finish_reason is not None
        if output.kv_ticket is not None:
            assert self.link is not None
            self.lease, output.kv_ticket = KvLease(self.link, output.kv_ticket), None
        self._has_prompt_logprobs = output.prompt_logprobs is not None
        self.output_ids += output.token_ids
        if output.token_ids:
            self.has_tokens, self._num_cached = True, output.num_cached_tokens
            self.request.worker, self.request.prefill_worker = assignment.worker.id, prefill_worker
        output.request_id = self.request.request_id
        return output

    def begin(self, assignment: Assignment[RemoteEngine]) -> RemoteStream:
        """Sends the request to the assigned worker. Each attempt has its own id, as the worker may still have
        the previous attempt. Raises the errors of RemoteEngine.open."""
        worker, link = assignment.worker, assignment.worker.link
        self.link, self.was_sent, self.must_move = link, link.is_connected and worker.is_reached, False
        self._has_output, self._num_unrecorded, self._num_attempts = False, 0, self._num_attempts + 1
        if not worker.is_reached:  # it broke while a prefill worker computed the prompt
            raise WorkerFailedError(f"worker {worker.id}: {worker.why}")
        request, params = self.request, self.request.params
        if not self.has_tokens:
            request.worker = worker.id
        if self._prefetch_link is not link:
            self.drop_prefetch()
        if self._num_attempts > 1 or self.lease is not None:
            if self._has_prompt_logprobs:
                params = copy_params(params)
                params.prompt_logprobs = None
            request = dataclasses.replace(
                request,
                request_id=f"{request.request_id}.{self._num_attempts}",
                params=params,
                output_token_ids=list(self.output_ids),
                kv_ticket=None if self.lease is None else self.lease.ticket,
            )
            if self._prefetch is not None and self._prefetch.is_under_way:
                request.kv_ticket, request.continues = None, self._prefetch.request_id
        attempt_id = self.attempt_id = request.request_id
        assignment.on_broken = lambda: link.break_off(
            attempt_id, WorkerFailedError(f"worker {worker.id} was abandoned: {worker.why}")
        )

        def move() -> bool:
            if self._has_output or self.attempt_id != attempt_id:
                return False
            link.break_off(
                attempt_id, MovedError(f"it waits at worker {worker.id}, and another would run it at once")
            )
            return True

        if not self.has_tokens and self.lease is None and self._prefetch is None:
            assignment.on_moving = move
        stream = link.open(request)
        self._reader = link
        if self.is_aborted:
            link.send_abort(attempt_id)
        return stream

    def take(self, output: Output, assignment: Assignment[RemoteEngine]) -> Output:
        """Returns an output for the reader. It reports the cached tokens of the first worker. Sets
        `must_move` if the worker aborted the request by itself."""
        self._num_unrecorded += len(output.token_ids)
        if not self._has_output:
            self._has_output = True
            self._spans(output, assignment, at_worker(output.spans, assignment.worker.id))
            if self._reader is not None:  # else the lease is new, and for the next worker
                self.lease = None
            self.drop_prefetch()
            assignment.cached(output.num_cached_tokens)
            self._record(assignment)
        elif self._num_unrecorded >= RECORDED_TOKENS:
            self._record(assignment)
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

    def _record(self, assignment: Assignment[RemoteEngine]) -> None:
        assignment.generated(self._num_unrecorded)
        self._num_unrecorded = 0

    def refused(self, error: RefusedError) -> None:
        """Counts a refusal. Raises UnavailableError after MAX_REFUSALS."""
        self.num_refusals += 1
        if self.num_refusals >= MAX_REFUSALS:
            raise UnavailableError(
                f"{error}; {self.num_refusals - 1} earlier tries were refused, too"
            ) from None


def _sleep_depth(state: SleepState) -> int:
    return -1 if state.level is None else state.level
