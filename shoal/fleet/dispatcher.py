"""Requests on their way to workers: one model's queue, and the place that a request gets at a worker.

    async with dispatcher.place(wanted) as place:  # waits while every worker is full
        async for output in place.worker.link.generate(request):
            place.generated(len(output.token_ids))

Leaving the block gives the place back. A WorkerFailedError that leaves the block counts against the worker,
and a BusyError says that the worker is full. Both are raised on: the caller asks for another place, or says
`dispatcher.forget(wanted)`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic

from shoal.errors import BusyError, UnavailableError, WorkerFailedError
from shoal.fleet.clock import Clock
from shoal.fleet.indexer import WorkerRank
from shoal.fleet.kv_router import KvRouter
from shoal.fleet.policy import Choice
from shoal.fleet.route_times import RouteTimes
from shoal.fleet.worker import L, Worker
from shoal.fleet_api import QueueView
from shoal.hashing import chains_by_size

LONG_PROMPT = 16_384  # tokens, from which on a prompt is hashed in a thread
MAX_BLOCKED = 64  # requests that need certain workers, past which others in the queue are looked at

NOBODY = "no worker is ready for this model; start one, or try again later"

Chains = dict[int, list[int]]  # the chain hashes of a prompt, by block size


@dataclass(slots=True, eq=False)
class Wanted:
    """A request, as far as choosing a worker for it goes. The same object asks again after a failure: it
    keeps its place in the queue."""

    request_id: str
    token_ids: Sequence[int]  # prompt and output so far; where no tokens are known, numbers made of the text
    priority: int = 0  # lower runs first
    session: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None  # only workers that offer this adapter
    tags: frozenset[str] = frozenset()  # only workers that have all of them
    tried: set[str] = field(default_factory=set)  # ids of workers that failed at it: others come first
    # The dispatcher's own:
    number: int = -1
    hash_s: float = 0.0  # seconds that hashing took
    has_begun: bool = False  # it has had a token: it waits for another worker, however long the queue is
    queued_at: float | None = None  # since when it waits; None: it never had to, or has its first token

    @property
    def is_choosy(self) -> bool:
        """Whether only some of the workers can take it."""
        return bool(self.tags or self.lora_name or self.tried)


class Place(Generic[L]):
    """What a request holds at its worker.

    `on_broken` is called when the worker breaks while the request is there, and when it is removed. Whoever
    holds the place sets it to what ends the wait for the worker at once with a WorkerFailedError.
    """

    def __init__(self, worker: Worker[L], choice: Choice, wanted: Wanted, dispatcher: Dispatcher[L]) -> None:
        self.worker, self.choice = worker, choice
        self.on_broken: Callable[[], None] = lambda: None
        self._wanted, self._dispatcher = wanted, dispatcher
        self._has_token = False
        self._cached_tokens = min(len(wanted.token_ids), dispatcher.router.num_cached_tokens(choice))
        worker.prompt_tokens += len(wanted.token_ids)
        worker.cached_tokens += self._cached_tokens
        worker.on_broken.add(self.interrupt)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, as they were counted for the choice."""
        return len(self._wanted.token_ids)

    @property
    def num_stored_tokens(self) -> int:
        """Tokens of the prompt that the worker has now, and will not only have soon, as far as is known."""
        return self._dispatcher.router.num_stored_tokens(self.choice, self._wanted.request_id)

    def prefilled_elsewhere(self) -> None:
        """Another worker computes the prompt."""
        self._dispatcher.router.books.first_token(self._wanted.request_id)

    def interrupt(self) -> None:
        self.on_broken()

    def leave(self) -> None:
        """The request has ended here. A prompt of which nothing came is no hit and no miss."""
        self.worker.on_broken.discard(self.interrupt)
        if not self._has_token:
            self.worker.prompt_tokens -= len(self._wanted.token_ids)
            self.worker.cached_tokens -= self._cached_tokens

    def generated(self, num_tokens: int) -> None:
        """The worker has sent so many tokens."""
        self.worker.delivered()
        books = self._dispatcher.router.books
        if not self._has_token:
            self._has_token = self._wanted.has_begun = True
            self._dispatcher.forget(self._wanted)
            books.first_token(self._wanted.request_id)
        books.generated(self._wanted.request_id, num_tokens)

    def cached(self, num_tokens: int) -> None:
        """The worker says how many tokens of the prompt it had cached; until then the router's guess
        stands."""
        self.worker.cached_tokens += num_tokens - self._cached_tokens
        self._cached_tokens = num_tokens
        self._dispatcher.router.was_cached(self._wanted.request_id, num_tokens)


class Dispatcher(Generic[L]):
    """`workers` are in the order of their ids, so that a seed chooses alike whoever was reached first."""

    def __init__(self, router: KvRouter, *, max_queued: int, clock: Clock) -> None:
        self.router, self.max_queued = router, max_queued
        # Wakes a worker that sleeps, if it can: returns whether it is being woken. None: sleepers sleep on.
        self.wake: Callable[[Worker[Any]], bool] | None = None
        self.busy_kv_usage: float | None = None  # a worker beyond it has no room
        self.busy_prefill_tokens: int | None = None  # the same, for prompts under way
        self.num_queued = 0  # requests that had to wait, since the start
        self.num_refused = 0  # requests that found the queue full
        self.times = RouteTimes()
        self.workers: dict[str, Worker[L]] = {}
        self.why_nobody = NOBODY  # what requests are told while no worker is ready
        self._num_placed = 0
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, Wanted, Chains, asyncio.Future[tuple[Worker[L], Choice]]]] = []
        self._queued: set[Wanted] = set()  # those that had to wait, until their first token

    def add(self, worker: Worker[L]) -> None:
        self.workers[worker.id] = worker
        self.workers = dict(sorted(self.workers.items()))
        for rank in worker.ranks:
            self.router.add_worker(rank, has_events=worker.has_events)
        worker.on_change.add(self.changed)
        self.changed()

    def remove(self, worker_id: str) -> None:
        """The worker serves this model no more."""
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            worker.on_change.discard(self.changed)
            for rank in worker.ranks:
                self.router.remove_worker(rank)
        self.changed()

    @property
    def queue(self) -> QueueView:
        since = [wanted.queued_at for wanted in self._queued if wanted.queued_at is not None]
        return QueueView(len(since), max(0.0, self._clock.now() - min(since)) if since else 0.0)

    def forget(self, wanted: Wanted) -> None:
        """The request waits no longer: it has its first token, or its caller gives it up after a failure."""
        self._queued.discard(wanted)
        wanted.queued_at = None

    @asynccontextmanager
    async def place(self, wanted: Wanted) -> AsyncIterator[Place[L]]:
        """Raises BusyError if the request would have to wait and the queue is full, UnavailableError if no
        worker can take it."""
        try:
            worker, choice = await self._find(wanted)
        except BaseException:
            self._queued.discard(wanted)
            raise
        place = Place(worker, choice, wanted, self)
        is_again = False  # the caller comes back with this request
        try:
            yield place
        except BusyError as error:
            is_again = True
            worker.full_until = self._clock.now() + error.retry_after_s
            asyncio.get_running_loop().call_later(error.retry_after_s, worker.changed)
            raise
        except WorkerFailedError as error:
            is_again = True
            wanted.tried.add(worker.id)
            worker.failed(error)
            raise
        finally:
            place.leave()
            worker.active -= 1
            self.router.books.end(wanted.request_id)
            if not is_again:
                self._queued.discard(wanted)
            worker.changed()

    def changed(self) -> None:
        """A worker came, went, or has room: whoever waits may go on."""
        blocked = []
        while self._waiting:
            entry = heapq.heappop(self._waiting)
            _, _, wanted, chains, future = entry
            if future.done():
                continue
            try:
                found = self._pick(wanted, chains)
            except UnavailableError as error:
                future.set_exception(error)
                continue
            if found is not None:
                future.set_result(found)
                continue
            blocked.append(entry)
            if not wanted.is_choosy or len(blocked) >= MAX_BLOCKED:
                break  # there is no room at all, or hardly any
        for entry in blocked:
            heapq.heappush(self._waiting, entry)

    async def _find(self, wanted: Wanted) -> tuple[Worker[L], Choice]:
        chains = await self.chains_of(wanted)
        if wanted.number < 0:
            wanted.number = next(self._numbers)
        if not self._waiting or (wanted.priority, wanted.number) < self._waiting[0][:2]:
            found = self._pick(wanted, chains)
            if found is not None:
                return found
        if wanted not in self._queued:
            if len(self._queued) >= self.max_queued and not wanted.has_begun:
                self.num_refused += 1
                raise BusyError(
                    f"all workers are full, and the queue has {len(self._queued)} of {self.max_queued} "
                    "requests (--max-queued-requests); try again later"
                )
            self._queued.add(wanted)
            self.num_queued += 1
        wanted.queued_at = wanted.queued_at or self._clock.now()
        future: asyncio.Future[tuple[Worker[L], Choice]] = asyncio.get_running_loop().create_future()
        entry = (wanted.priority, wanted.number, wanted, chains, future)
        heapq.heappush(self._waiting, entry)
        self.changed()  # those ahead may wait for workers that this request does not need
        try:
            return await future
        except asyncio.CancelledError:
            if entry in self._waiting:  # its prompt is not kept until its turn would have come
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            elif future.done() and not future.cancelled() and future.exception() is None:
                worker, _ = future.result()  # it was given a place just now
                worker.active -= 1
                self.router.books.end(wanted.request_id)
                worker.changed()  # others may wait for it: those of its other models, and an operator
            future.cancel()
            self.changed()
            raise

    def _pick(self, wanted: Wanted, chains: Chains) -> tuple[Worker[L], Choice] | None:
        """A worker with room, written into the books; None if all are full. Raises UnavailableError if none
        is ready."""
        try:
            ready = self.ready_for(wanted)
        except UnavailableError:
            if self._is_one_coming_back():
                return None
            raise
        fresh = [worker for worker in ready if worker.id not in wanted.tried] or ready
        ranks: list[WorkerRank] = []
        for worker in fresh:
            if worker.has_room(self._num_active(worker)):
                ranks += [rank for rank in worker.ranks if not self._is_busy(rank)]
        if not ranks:
            return None
        begun = time.perf_counter()
        found = self.router.find(chains)
        looked_up = time.perf_counter()
        choice = self.router.choose_among(
            found,
            len(wanted.token_ids),
            chains,
            request_id=wanted.request_id,
            session=wanted.session,
            among=ranks,
            turn=self._num_placed,
        )
        self._num_placed += 1
        self.times.observe(wanted.hash_s, looked_up - begun, time.perf_counter() - looked_up)
        worker = self.workers[choice.rank.worker]
        self.times.overlap.observe(
            min(1.0, self.router.num_cached_tokens(choice) / max(1, len(wanted.token_ids)))
        )
        waited_s = 0.0 if wanted.queued_at is None else self._clock.now() - wanted.queued_at
        self.times.queue.observe(waited_s)
        worker.active += 1
        worker.num_requests += 1
        return worker, choice

    def ready_for(self, wanted: Wanted) -> list[Worker[L]]:
        """The workers that may get the request, full or not. Raises UnavailableError if there is none."""
        ready = [worker for worker in self.workers.values() if worker.takes_requests]
        if not ready and any(worker.is_asleep for worker in self.workers.values()):
            raise UnavailableError(
                "the workers of this model sleep; wake one (POST /wake_up on the admin port), or let "
                "requests do that (wake_on_request)"
            )
        if not ready:
            raise UnavailableError(self.why_nobody)
        fit = [
            worker
            for worker in ready
            if wanted.tags <= worker.info.tags
            and (wanted.lora_name is None or wanted.lora_name in worker.info.adapters)
        ]
        if not fit:
            lacks = f"the tags {', '.join(sorted(wanted.tags))}" if wanted.tags else f"{wanted.lora_name!r}"
            raise UnavailableError(f"no worker that is ready has {lacks}; ask for others, or try again later")
        return fit

    def _num_active(self, worker: Worker[L]) -> int:
        """The requests that it has of this router, or for this model of all routers."""
        if not worker.info.max_running:
            return worker.active
        loads = [self.router.books.load(rank) for rank in worker.ranks]
        return max(worker.active, sum(load.active_requests for load in loads))

    def _is_one_coming_back(self) -> bool:
        """Whether a worker that gets nothing now soon will: an operator's command ends there, or it is woken
        now."""
        if any(worker.is_held for worker in self.workers.values()):
            return True
        # A pause (level 0) is an operator's, who ends it.
        asleep = [worker for worker in self.workers.values() if worker.sleep_level and worker.is_reached]
        return self.wake is not None and any(self.wake(worker) for worker in asleep)

    def _is_busy(self, rank: WorkerRank) -> bool:
        """Whether it is beyond a threshold that is configured."""
        if self.busy_kv_usage is not None and self.router.kv_usage(rank) > self.busy_kv_usage:
            return True
        most = self.busy_prefill_tokens
        return most is not None and self.router.books.load(rank).prefill_tokens > most

    async def chains_of(self, wanted: Wanted) -> Chains:
        """Hashing never holds the loop up for long."""
        sizes = self.router.block_sizes()
        if len(wanted.token_ids) < LONG_PROMPT:
            return _hashed(wanted, sizes)
        return await asyncio.to_thread(_hashed, wanted, sizes)


def _hashed(wanted: Wanted, block_sizes: set[int]) -> Chains:
    begun = time.perf_counter()
    chains = chains_by_size(
        wanted.token_ids, block_sizes, adapter=wanted.lora_name, cache_salt=wanted.cache_salt
    )
    wanted.hash_s = time.perf_counter() - begun
    return chains
