"""`Dispatcher`: the queue of one model's requests, and their assignments to workers that have room. KvRouter
(kv_router.py) chooses the worker; the caller (native/fleet_engine.py, external/forwarder.py) sends the
request there.

    async with dispatcher.assign(routing) as assignment:  # a RoutingRequest; waits while every worker is full
        async for output in assignment.worker.link.generate(request):
            assignment.generated(len(output.token_ids))

Leaving the block releases the assignment. A WorkerFailedError that leaves the block counts against the
worker, and a BusyError marks the worker as full. Both reach the caller, which asks for another assignment, or
calls `dispatcher.forget(request)`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic

from shoal.api import Span
from shoal.errors import BusyError, UnavailableError, WorkerFailedError
from shoal.fleet.clock import Clock
from shoal.fleet.index.indexer import Overlap, WorkerRank
from shoal.fleet.routing.kv_router import SAMPLE_ABOVE, KvRouter
from shoal.fleet.routing.policy import Choice
from shoal.fleet.routing.timings import RouteTimes
from shoal.fleet.traffic import Traffic
from shoal.fleet.worker import L, Worker, WorkerInfo
from shoal.fleet_views import QueueView
from shoal.hashing import chains_by_size

LONG_PROMPT = 16_384  # tokens; longer prompts are hashed in a thread
MOVE_AFTER_S = 1.0  # a request that has waited this long at a worker may move to an idle one
MAX_BLOCKED = 64  # requests without a worker that fits them, until the search of the queue stops

NO_WORKER = "no worker is ready for this model; start one, or try again later"

Chains = dict[int, list[int]]  # the chain hashes of a prompt, by block size


# priority, number, request, the prompt's chains, and the future that gets the choice
Waiting = tuple[int, int, "RoutingRequest", Chains, asyncio.Future[tuple[Worker[L], Choice]]]


@dataclass(slots=True, eq=False)
class RoutingRequest:
    """The facts about a request that the choice of a worker needs. After a failure the caller uses the same
    object again, so that the request keeps its position in the queue."""

    request_id: str
    token_ids: Sequence[int]  # prompt and output so far; hashes of the text where tokens are unknown
    priority: int = 0  # lower runs first
    session: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None  # only workers that offer this adapter
    tags: frozenset[str] = frozenset()  # only workers that have all of them
    excluded_worker: str | None = None  # the id of a worker that must not get it
    tried: set[str] = field(default_factory=set)  # ids of workers that failed it: others are preferred
    # Set by the dispatcher:
    next_worker: str | None = None  # the id of the worker that it moves to
    num_passed: int = 0  # requests that overtook it while it was the oldest
    number: int = -1
    hash_s: float = 0.0  # seconds of hashing
    routing_s: float = 0.0  # seconds of the whole choice, hashing included
    has_failed: bool = False  # at a connected worker, since its last token
    blamed: Worker[Any] | None = None  # the worker that this failure counts against
    has_begun: bool = False  # it has a token, so a full queue does not refuse it
    queued_at: float | None = None  # when its wait began; None: it did not wait, or has its first token
    asked_at: float = 0.0
    began_at: float = 0.0  # time of its first token
    num_generated: int = 0

    @property
    def is_restricted(self) -> bool:
        """True if only some of the workers can take it."""
        return bool(self.tags or self.lora_name or self.tried or self.excluded_worker)

    def fits(self, worker: WorkerInfo) -> bool:
        """Returns whether the worker has the adapter and the tags of the request."""
        if worker.id == self.excluded_worker or not self.tags <= worker.tags:
            return False
        return self.lora_name is None or self.lora_name in worker.adapters


class Assignment(Generic[L]):
    """A request's slot at a worker.

    The caller sets three callbacks. `on_broken` is called when the worker breaks or is removed: it must end
    the wait for the worker at once with a WorkerFailedError. `on_moving` ends the wait with a MovedError and
    returns True, or returns False if the worker has begun. `on_draining` is called when the worker drains:
    the request may stay, or continue at another worker.
    """

    def __init__(
        self,
        worker: Worker[L],
        choice: Choice,
        request: RoutingRequest,
        dispatcher: Dispatcher[L],
        asked_at: float,
    ) -> None:
        self.worker, self.choice = worker, choice
        self._asked_at, self._assigned_at = asked_at, dispatcher.clock.now()
        self._has_spans = True  # until take_spans returns them
        self.on_broken: Callable[[], None] = lambda: None
        self.on_draining: Callable[[], None] = lambda: None
        self.on_moving: Callable[[], bool] = lambda: False
        self.request, self._dispatcher = request, dispatcher
        self._has_token = False
        self._last_at = 0.0  # time of the last tokens of an external worker's stream
        self._cached_tokens = min(len(request.token_ids), dispatcher.router.num_cached_tokens(choice))
        self._expected_tokens = self._cached_tokens
        worker.prompt_tokens += len(request.token_ids)
        worker.cached_tokens += self._cached_tokens
        worker.on_broken.add(self.interrupt)
        worker.on_draining.add(self.notify_draining)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def now(self) -> float:
        """Seconds of the dispatcher's clock."""
        return self._dispatcher.clock.now()

    def take_spans(self) -> list[Span]:
        """Returns the wait and the choice as spans, at the first call; [] later."""
        if not self._has_spans:
            return []
        self._has_spans = False
        ago_s, waited_s = self.now - self._assigned_at, self._assigned_at - self._asked_at
        routing_s = min(self.request.routing_s, waited_s)
        attributes: dict[str, str | int | float] = {
            "cached_tokens": self._expected_tokens,
            "cost": self.choice.costs.get(self.choice.rank, 0.0),
        }
        return [
            Span("queue", ago_s + waited_s, waited_s - routing_s),
            Span("routing", ago_s + routing_s, routing_s, self.worker.id, attributes),
        ]

    @property
    def may_move(self) -> bool:
        """True if the request has no token after MOVE_AFTER_S seconds at the worker."""
        return not self.request.has_begun and self.now - self._assigned_at >= MOVE_AFTER_S

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt and of the output so far, as of the choice."""
        return len(self.request.token_ids)

    @property
    def num_stored_tokens(self) -> int:
        """Tokens of the prompt that the worker has now, by its events; predictions do not count."""
        return self._dispatcher.router.num_stored_tokens(self.choice, self.request.request_id)

    def prefill_remotely(self) -> None:
        """Records that another worker computes the prompt."""
        self._dispatcher.router.active_requests.prefill_remotely(self.request.request_id)

    def prefill_locally(self) -> None:
        """Records that this worker computes the prompt after all, as the other one did not."""
        self._dispatcher.router.active_requests.prefill_locally(self.request.request_id)

    def interrupt(self) -> None:
        self.on_broken()

    def notify_draining(self) -> None:
        self.on_draining()

    def move(self, worker_id: str) -> bool:
        """Moves the request to another worker. Returns False if this worker has begun with it."""
        is_leaving = self.on_moving()
        if is_leaving:
            self.request.next_worker = worker_id
        return is_leaving

    def release(self) -> None:
        """Ends the assignment. A prompt without output counts neither as a cache hit nor as a miss."""
        self.worker.on_broken.discard(self.interrupt)
        self.worker.on_draining.discard(self.notify_draining)
        if not self._has_token:
            self.worker.prompt_tokens -= len(self.request.token_ids)
            self.worker.cached_tokens -= self._cached_tokens

    def generated(self, num_tokens: int) -> None:
        """Records `num_tokens` new tokens of the worker."""
        self.worker.delivered()
        active_requests = self._dispatcher.router.active_requests
        if not self._has_token:
            self._has_token = True
            self._dispatcher.began(self.request)
            self.request.has_failed, self.request.blamed = False, None
            self._dispatcher.forget(self.request)
            active_requests.first_token(self.request.request_id)
        self.request.num_generated += num_tokens
        active_requests.generated(self.request.request_id, num_tokens)

    def streamed(self, num_tokens: int) -> None:
        """Like `generated`, and records the times between tokens of an external worker. Native workers
        report theirs."""
        served, now = self.worker.served, self._dispatcher.clock.now()
        assert served is not None, "an external worker is built with it"
        if self._has_token:
            served.add_further(now - self._last_at, num_tokens)
        else:
            served.add_first(now - self.request.asked_at, num_tokens)
        self._last_at = now
        self.generated(num_tokens)

    def cached(self, num_tokens: int) -> None:
        """Replaces the router's guess of cached tokens by the number that the worker reports."""
        num_expected, self._cached_tokens = self._cached_tokens, num_tokens
        self.worker.cached_tokens += num_tokens - num_expected
        self._dispatcher.router.correct_cached(self.request.request_id, num_tokens, num_expected)


class Dispatcher(Generic[L]):
    """The workers of one model that take requests, and the requests that wait for one. `workers` are
    sorted by id, so that a seed gives the same choices in whatever order workers join."""

    def __init__(self, router: KvRouter, *, max_queued: int, clock: Clock) -> None:
        self.router, self.max_queued = router, max_queued
        # Wakes a sleeping worker; returns whether it is being woken. None: requests wake no worker.
        self.wake: Callable[[Worker[Any]], bool] | None = None
        self.busy_kv_usage: float | None = None  # above it, a worker takes no request
        self.busy_prefill_tokens: int | None = None  # the same for tokens of prompts in flight
        # Among this many of the oldest, the request goes next whose prompt a worker has cached best.
        self.look_ahead = 1
        self.num_refused = 0  # requests refused because the queue was full
        self.times = RouteTimes()
        self.traffic = Traffic()
        self.workers: dict[str, Worker[L]] = {}
        self.unavailable_reason = NO_WORKER  # the error text while no worker is ready
        self._assignments: dict[Assignment[L], None] = {}  # the oldest first
        self._num_assigned = 0
        self._ranks: list[WorkerRank] = []  # all workers' ranks
        self.clock = clock
        self._numbers = itertools.count()
        self._waiting: list[Waiting[L]] = []  # a heap
        self._queued: set[RoutingRequest] = set()  # requests that had to wait, until their first token

    def add(self, worker: Worker[L]) -> None:
        self.workers[worker.id] = worker
        self.workers = dict(sorted(self.workers.items()))
        self._ranks = [rank for one in self.workers.values() for rank in one.ranks]
        for rank in worker.ranks:
            self.router.add_worker(rank, has_events=worker.has_events)
        worker.on_change.add(self.changed)
        self.changed()

    def rename_ranks(self, worker: Worker[L], old: Sequence[WorkerRank]) -> None:
        """Replaces the worker's data-parallel ranks, which were `old`. Its requests continue."""
        self._ranks = [rank for one in self.workers.values() for rank in one.ranks]
        for rank in worker.ranks:
            self.router.add_worker(rank, has_events=worker.has_events)
        for rank in set(old) - set(worker.ranks):
            self.router.remove_worker(rank)

    def remove(self, worker_id: str) -> None:
        """Removes a worker that no longer serves this model, with its blocks and requests."""
        worker = self.dismiss(worker_id)
        if worker is not None:
            for rank in worker.ranks:
                self.router.remove_worker(rank)

    def dismiss(self, worker_id: str) -> Worker[L] | None:
        """Gives the worker no more requests; its present ones continue. Returns None for an unknown id."""
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            self._ranks = [rank for one in self.workers.values() for rank in one.ranks]
            worker.on_change.discard(self.changed)
            self.changed()
        return worker

    @property
    def is_idle(self) -> bool:
        """True if no request waits here or has an assignment."""
        is_waiting = any(not future.done() for *_, future in self._waiting)
        return not (self._queued or self._assignments or is_waiting)

    @property
    def queue(self) -> QueueView:
        since = [request.queued_at for request in self._queued if request.queued_at is not None]
        return QueueView(len(since), max(0.0, self.clock.now() - min(since)) if since else 0.0)

    def forget(self, request: RoutingRequest) -> None:
        """Ends the request's wait: it has its first token, or its caller abandons it after a failure."""
        self._queued.discard(request)
        request.queued_at = None

    def end(self, request: RoutingRequest) -> None:
        """Records the end of a request, with or without success."""
        self.forget(request)
        if request.num_generated:
            self.traffic.ended(request.num_generated, self.clock.now() - request.began_at)

    def began(self, request: RoutingRequest) -> None:
        """Records the request's first token, from any worker."""
        if not request.has_begun:
            request.has_begun, request.began_at = True, self.clock.now()
            self.traffic.began(request.began_at - request.asked_at)

    @asynccontextmanager
    async def assign(self, request: RoutingRequest) -> AsyncIterator[Assignment[L]]:
        """Raises BusyError if the request would have to wait and the queue is full, UnavailableError if no
        worker can take it."""
        asked_at = self.clock.now()
        try:
            worker, choice = await self._find(request)
        except BaseException:
            self._queued.discard(request)
            raise
        assignment = Assignment(worker, choice, request, self, asked_at)
        self._assignments[assignment] = None
        is_again = False  # the caller asks for another assignment
        try:
            yield assignment
        except BusyError as error:
            is_again = True
            worker.full_until = self.clock.now() + error.retry_after_s
            asyncio.get_running_loop().call_later(error.retry_after_s, worker.changed)
            raise
        except WorkerFailedError as error:
            is_again = True
            self._blame(worker, request, error)
            raise
        finally:
            assignment.release()
            del self._assignments[assignment]
            worker.active -= 1
            self.router.active_requests.end(request.request_id)
            if not is_again:
                self._queued.discard(request)
            worker.changed()

    def _blame(self, worker: Worker[L], request: RoutingRequest, error: WorkerFailedError) -> None:
        """Counts a failed request against the worker. If the request fails at a second worker before it has a
        token, the request may be the cause: it then counts against neither, unless a worker was not
        connected, and a probe of each shows whether it works."""
        request.tried.add(worker.id)
        worker.num_failed += 1
        if error.is_absent:
            worker.failed(error)
        elif not request.has_failed:
            request.has_failed, request.blamed = True, worker
            worker.failed(error)
        elif request.blamed is not worker:
            worker.suspected.set()
            if request.blamed is not None:
                request.blamed.forgive()
                request.blamed.suspected.set()
                request.blamed = None

    def changed(self) -> None:
        """Assigns waiting requests, as a worker joined, left, or has room."""
        blocked = []
        while self._waiting:
            entry = self._take_next()
            _, _, request, chains, future = entry
            if future.done():
                continue
            try:
                found = self._pick(request, chains)
            except UnavailableError as error:
                future.set_exception(error)
                continue
            if found is not None:
                future.set_result(found)
                continue
            blocked.append(entry)
            if not request.is_restricted or len(blocked) >= MAX_BLOCKED:
                break  # the workers are full, or nearly
        for entry in blocked:
            heapq.heappush(self._waiting, entry)

    def rebalance(self) -> None:
        """Moves requests that wait at a worker to workers that would run them at once: no request waits
        there, and fewer are active than run at the first worker.

        Workers report how many requests wait, not which. The newest requests without a token are taken for
        the waiting ones; if one of them has begun, its first prompt tokens are computed twice.
        """
        num_waiting = {one.id: sum(load.num_waiting for load in one.loads) for one in self.workers.values()}
        if not any(num_waiting.values()):
            return
        idle = {
            worker.id: self._num_active(worker)
            for worker in self.workers.values()
            if worker.takes_requests and not num_waiting[worker.id] and self._ranks_with_room([worker])
        }
        assignments: dict[str, list[Assignment[L]]] = {}
        for assignment in self._assignments if idle else ():
            if num_waiting.get(assignment.worker.id) and assignment.may_move:
                assignments.setdefault(assignment.worker.id, []).append(assignment)
        for worker_id, found in assignments.items():
            num_running = sum(load.num_running for load in self.workers[worker_id].loads)
            found.sort(key=lambda assignment: (assignment.request.priority, assignment.request.number))
            for assignment in found[-num_waiting[worker_id] :]:
                quick = [
                    one
                    for one, num_active in idle.items()
                    if num_active < num_running and assignment.request.fits(self.workers[one].info)
                ]
                target = min(quick, key=lambda one: idle[one], default=None)
                if target is not None and assignment.move(target):
                    idle[target] += 1

    def _take_next(self) -> Waiting[L]:
        """Removes the next request from the queue. At most `look_ahead` others overtake the oldest one."""
        waiting, head = self._waiting, self._waiting[0]
        may_pass = head[2].num_passed < self.look_ahead
        if self.look_ahead > 1 and may_pass and len(waiting) > 1:
            ready = [worker for worker in self.workers.values() if worker.takes_requests]
            if ranks := self._ranks_with_room(ready):
                oldest = [one for one in heapq.nsmallest(self.look_ahead, waiting) if one[0] == head[0]]
                best = max(oldest, key=lambda one: self._most_cached(one[3], ranks))
                if best is not head:
                    head[2].num_passed += 1
                    waiting.remove(best)
                    heapq.heapify(waiting)
                    return best
        return heapq.heappop(waiting)

    def _most_cached(self, chains: Chains, ranks: Sequence[WorkerRank]) -> int:
        """Returns the most tokens of the prompt that one of these ranks has cached."""
        found, block_size_of = self.router.find(chains), self.router.indexer.block_size_of
        return max((found[rank].total * block_size_of(rank) for rank in ranks if rank in found), default=0)

    async def _find(self, request: RoutingRequest) -> tuple[Worker[L], Choice]:
        chains = await self.chains_of(request)
        if request.number < 0:
            request.number, request.asked_at = next(self._numbers), self.clock.now()
            self.traffic.arrived(len(request.token_ids))
        if not self._waiting or (request.priority, request.number) < self._waiting[0][:2]:
            found = self._pick(request, chains)
            if found is not None:
                return found
        if request not in self._queued:
            if len(self._queued) >= self.max_queued and not request.has_begun:
                self.num_refused += 1
                raise BusyError(
                    f"all workers are full, and the queue has {len(self._queued)} of {self.max_queued} "
                    "requests (--max-queued-requests); try again later"
                )
            self._queued.add(request)
        request.queued_at = request.queued_at or self.clock.now()
        future: asyncio.Future[tuple[Worker[L], Choice]] = asyncio.get_running_loop().create_future()
        entry = (request.priority, request.number, request, chains, future)
        heapq.heappush(self._waiting, entry)
        self.changed()  # requests ahead may wait for workers that this one does not need
        try:
            return await future
        except asyncio.CancelledError:
            if entry in self._waiting:  # frees its prompt now
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            elif future.done() and not future.cancelled() and future.exception() is None:
                worker, _ = future.result()  # it has just been assigned
                worker.active -= 1
                self.router.active_requests.end(request.request_id)
                worker.changed()  # requests of its other models may wait for it, or an operator
            future.cancel()
            self.changed()
            raise

    def _pick(self, request: RoutingRequest, chains: Chains) -> tuple[Worker[L], Choice] | None:
        """Chooses a worker with room and records the request there. Returns None if all are full. Raises
        UnavailableError if no worker is ready."""
        begun = time.perf_counter()
        found = self.router.find(chains)
        looked_up = time.perf_counter()
        ranks = self._next_with_room(request)
        ranks = ranks or self._some_with_room(request, found) or self._all_with_room(request)
        if not ranks:
            return None
        choice = self.router.choose_among(
            found,
            len(request.token_ids),
            chains,
            request_id=request.request_id,
            session=request.session,
            among=ranks,
            turn=self._num_assigned,
        )
        self._num_assigned += 1
        chosen = time.perf_counter()
        self.times.observe(request.hash_s, looked_up - begun, chosen - looked_up)
        request.routing_s = request.hash_s + chosen - begun
        worker = self.workers[choice.rank.worker]
        self.times.overlap.observe(
            min(1.0, self.router.num_cached_tokens(choice) / max(1, len(request.token_ids)))
        )
        waited_s = 0.0 if request.queued_at is None else self.clock.now() - request.queued_at
        self.times.queue.observe(waited_s)
        worker.active += 1
        worker.num_requests += 1
        return worker, choice

    def _next_with_room(self, request: RoutingRequest) -> list[WorkerRank]:
        """Returns the ranks of the worker that the request moves to; [] if that one is full by now."""
        worker = None if request.next_worker is None else self.workers.get(request.next_worker)
        request.next_worker = None
        is_ready = worker is not None and worker.takes_requests and request.fits(worker.info)
        return self._ranks_with_room([worker]) if worker is not None and is_ready else []

    def _some_with_room(self, request: RoutingRequest, found: dict[WorkerRank, Overlap]) -> list[WorkerRank]:
        """Returns ranks of a sample of the workers that have room, in a large fleet; [] in a small one."""
        if len(self._ranks) <= SAMPLE_ABOVE:
            return []
        ranks = self.router.sample(found, self._ranks)
        if len(ranks) == len(self._ranks):
            return []
        some = {rank.worker: self.workers[rank.worker] for rank in ranks}
        ready = [worker for worker in some.values() if worker.takes_requests and request.fits(worker.info)]
        return self._ranks_with_room(worker for worker in ready if worker.id not in request.tried)

    def _all_with_room(self, request: RoutingRequest) -> list[WorkerRank]:
        """Raises UnavailableError if no worker is ready."""
        try:
            ready = self.ready_for(request)
        except UnavailableError:
            if self._has_returning_worker():
                return []
            raise
        return self._ranks_with_room([one for one in ready if one.id not in request.tried] or ready)

    def _ranks_with_room(self, workers: Iterable[Worker[L]]) -> list[WorkerRank]:
        """Returns the ranks of these workers that have room for a request now."""
        now = self.clock.now()
        ranks = [rank for one in workers if one.has_room(self._num_active(one), now) for rank in one.ranks]
        if self.busy_kv_usage is not None or self.busy_prefill_tokens is not None:
            ranks = [rank for rank in ranks if not self._is_busy(rank)]
        return ranks

    def ready_for(self, request: RoutingRequest) -> list[Worker[L]]:
        """Returns the workers that may get the request, full or not. Raises UnavailableError without one."""
        ready = [worker for worker in self.workers.values() if worker.takes_requests]
        if not ready and self._is_paused:
            raise UnavailableError(
                "the workers of this model are paused; resume them (POST /resume on the admin port)"
            )
        if not ready and any(worker.is_asleep for worker in self.workers.values()):
            raise UnavailableError(
                "the workers of this model sleep; wake one (POST /wake_up on the admin port), or set "
                "wake_on_request"
            )
        if not ready:
            raise UnavailableError(self.unavailable_reason)
        if not request.tags and request.lora_name is None and request.excluded_worker is None:
            return ready
        fit = [worker for worker in ready if request.fits(worker.info)]
        if not fit and request.excluded_worker is not None:
            raise UnavailableError(
                f"no worker but {request.excluded_worker} is ready; start another, or try again later"
            )
        if not fit:
            lacks = (
                f"the tags {', '.join(sorted(request.tags))}" if request.tags else f"{request.lora_name!r}"
            )
            raise UnavailableError(f"no ready worker has {lacks}; ask for others, or try again later")
        return fit

    def others(self, worker: Worker[L], request: RoutingRequest) -> list[Worker[L]]:
        """Returns the other workers that would take the request now."""
        return [
            other
            for other in self.workers.values()
            if other is not worker
            and other.takes_requests
            and request.fits(other.info)
            and other.has_room(self._num_active(other), self.clock.now())
        ]

    def room_at(self, workers: Iterable[Worker[L]]) -> tuple[float, float]:
        """Returns how many more requests, and how many tokens, these workers have room for."""
        requests = tokens = 0.0
        for worker in workers:
            info = worker.info
            requests += info.max_running - self._num_active(worker) if info.max_running else math.inf
            held = sum(self.router.active_requests.load(rank).active_tokens for rank in worker.ranks)
            tokens += max(0, info.total_blocks * info.block_size - held) if info.total_blocks else math.inf
        return requests, tokens

    def _num_active(self, worker: Worker[L]) -> int:
        """Returns the worker's requests: all of this router, or of this model from all routers if more."""
        if not worker.info.max_running:
            return worker.active
        return max(worker.active, sum(map(self.router.active_requests.num_active, worker.ranks)))

    def _has_returning_worker(self) -> bool:
        """Returns whether a worker will soon take requests again: a command is at work there, or it is being
        woken."""
        if any(worker.num_holds for worker in self.workers.values()):
            return True
        asleep = [
            worker
            for worker in self.workers.values()
            if worker.is_asleep and worker.is_reached and not worker.is_paused
        ]
        return self.wake is not None and any(self.wake(worker) for worker in asleep)

    @property
    def _is_paused(self) -> bool:
        """True if an operator has paused all workers that are reached."""
        reached = [worker for worker in self.workers.values() if worker.is_reached]
        return bool(reached) and all(worker.is_paused for worker in reached)

    def _is_busy(self, rank: WorkerRank) -> bool:
        """Returns whether the rank is above a configured threshold."""
        if self.busy_kv_usage is not None and self.router.kv_usage(rank) > self.busy_kv_usage:
            return True
        most = self.busy_prefill_tokens
        return most is not None and self.router.active_requests.load(rank).prefill_tokens > most

    async def chains_of(self, request: RoutingRequest) -> Chains:
        """Returns the prompt's chain hashes. A long prompt is hashed in a thread, not to hold up the loop."""
        sizes = self.router.block_sizes()
        if len(request.token_ids) < LONG_PROMPT:
            return _hashed(request, sizes)
        return await asyncio.to_thread(_hashed, request, sizes)


def _hashed(request: RoutingRequest, block_sizes: set[int]) -> Chains:
    begun = time.perf_counter()
    chains = chains_by_size(
        request.token_ids, block_sizes, adapter=request.lora_name, cache_salt=request.cache_salt
    )
    request.hash_s = time.perf_counter() - begun
    return chains
