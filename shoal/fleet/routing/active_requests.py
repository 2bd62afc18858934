"""`ActiveRequests`: the requests in flight at each worker and the load that they make, as Dynamo's
ActiveSequences. KvRouter (kv_router.py) adds a request; the dispatcher (dispatcher.py) reports its tokens and
its end.

A request is added when its worker is chosen, so that a burst of requests sees the choices before it. Its
prefill is removed at the first token, the rest at its end. A block that several active requests of one worker
share counts once. Recent prefill work counts for a while after it is done: otherwise requests that arrive one
after the other, with nothing in flight, would all see equal loads. Dynamo's has no recent work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from shoal.fleet.index.indexer import WorkerRank

RECENT_HALF_LIFE_S = 10.0
EXPIRY_S = 3600.0  # a request without any news for this long is taken for lost


class Load(msgspec.Struct, frozen=True, gc=False):
    """A worker's load, in tokens unless the name says otherwise."""

    active_requests: int = 0
    prefill_tokens: int = 0  # still to be computed before first tokens
    active_tokens: int = 0  # in the KV cache for active requests
    recent_tokens: float = 0.0  # recent prefill work, halved every RECENT_HALF_LIFE_S


class Change(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A change of a router's active requests, as a message to other routers."""

    request_id: str


class Begun(Change, frozen=True):
    worker: str
    rank: int
    num_tokens: int
    cached_tokens: int
    chain: list[int]
    block_size: int


class FirstToken(Change, frozen=True):
    """The request's prefill is done."""


class Ended(Change, frozen=True):
    pass


AnyChange = Begun | FirstToken | Ended


@dataclass(slots=True)
class _Request:
    rank: WorkerRank
    prefill_tokens: int
    chain: Sequence[int]
    block_size: int
    tail_tokens: int  # in the last, partial block, and generated ones
    heard_at: float
    num_tokens: int
    is_own: bool  # sent by this router, not by another one
    remote_prefill_tokens: int = 0  # prompt tokens that another worker computes


@dataclass(slots=True)
class _WorkerLoad:
    requests: dict[str, _Request] = field(default_factory=dict)
    blocks: Counter[int] = field(default_factory=Counter)  # chain hash -> requests that hold it
    prefill_tokens: int = 0
    block_tokens: int = 0
    tail_tokens: int = 0
    recent_tokens: float = 0.0
    recent_at: float = 0.0


class ActiveRequests:
    """The active requests of one model at all workers, of this router and of its replicas. `on_change` is
    called with each change by this router's own requests."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self.on_change: Callable[[AnyChange], None] | None = None
        self._clock = clock
        self._workers: dict[WorkerRank, _WorkerLoad] = {}
        self._ranks: dict[str, WorkerRank] = {}  # by request

    def begin(
        self,
        request_id: str,
        rank: WorkerRank,
        num_tokens: int,
        cached_tokens: int,
        chain: Sequence[int],
        block_size: int,
        *,
        is_own: bool = True,
    ) -> None:
        """Adds a request of `num_tokens` tokens at a worker that presumably has `cached_tokens` of them. An
        active request moves there. `is_own`: this router has sent it."""
        self.end(request_id)
        now, worker = self._clock(), self._workers.setdefault(rank, _WorkerLoad())
        prefill = max(0, num_tokens - cached_tokens)
        tail = num_tokens - len(chain) * block_size
        request = _Request(rank, prefill, chain, block_size, tail, now, num_tokens, is_own)
        worker.requests[request_id] = request
        self._ranks[request_id] = rank
        num_before = len(worker.blocks)
        worker.blocks.update(chain)  # counts in C; prompts have hundreds of blocks
        worker.block_tokens += (len(worker.blocks) - num_before) * block_size
        worker.tail_tokens += request.tail_tokens
        worker.prefill_tokens += prefill
        self._add_recent(worker, prefill)
        if is_own and self.on_change is not None:
            self.on_change(_begun(request_id, request))

    def first_token(self, request_id: str) -> None:
        """Removes the request's prefill from the load, as it is done."""
        found = self._find(request_id)
        if found is not None:
            worker, request = found
            worker.prefill_tokens -= request.prefill_tokens
            request.prefill_tokens = 0
            if request.is_own and self.on_change is not None:
                self.on_change(FirstToken(request_id))

    def prefill_remotely(self, request_id: str) -> None:
        """Removes the prefill from the load, recent load included, as another worker computes the prompt."""
        found = self._find(request_id)
        if found is not None:
            worker, request = found
            request.remote_prefill_tokens = request.prefill_tokens
            self._add_recent(worker, -request.prefill_tokens)
            self.first_token(request_id)

    def prefill_locally(self, request_id: str) -> None:
        """Undoes `prefill_remotely`: this worker computes the prompt after all."""
        found = self._find(request_id)
        if found is not None:
            worker, request = found
            request.prefill_tokens, request.remote_prefill_tokens = request.remote_prefill_tokens, 0
            worker.prefill_tokens += request.prefill_tokens
            self._add_recent(worker, request.prefill_tokens)
            if request.is_own and self.on_change is not None:
                self.on_change(_begun(request_id, request))

    def generated(self, request_id: str, num_tokens: int) -> None:
        """Adds `num_tokens` generated tokens."""
        found = self._find(request_id)
        if found is not None:
            worker, request = found
            request.tail_tokens += num_tokens
            worker.tail_tokens += num_tokens

    def touch(self, request_id: str) -> None:
        """Notes that the request still runs, so that it does not expire."""
        self._find(request_id)  # records the time

    def end(self, request_id: str) -> None:
        """Removes a request that has ended or moved. An unknown id changes nothing."""
        rank = self._ranks.pop(request_id, None)
        if rank is None:
            return
        worker = self._workers[rank]
        request = worker.requests.pop(request_id)
        worker.prefill_tokens -= request.prefill_tokens
        worker.tail_tokens -= request.tail_tokens
        blocks, num_before = worker.blocks, len(worker.blocks)
        for block in request.chain:
            count = blocks[block]
            if count == 1:
                blocks.pop(block)  # a Counter's `del` is not in C
            else:
                blocks[block] = count - 1
        worker.block_tokens -= (num_before - len(blocks)) * request.block_size
        if request.is_own and self.on_change is not None:
            self.on_change(Ended(request_id))

    @property
    def is_idle(self) -> bool:
        """True if no request is active at any worker."""
        return not self._ranks

    def own_requests(self) -> list[str]:
        """Returns the ids of the requests that this router has sent."""
        return [
            request_id
            for worker in self._workers.values()
            for request_id, request in worker.requests.items()
            if request.is_own
        ]

    def changes_of(self, request_id: str) -> list[AnyChange]:
        """Returns the changes that lead to the state of an active request; [] for an unknown id."""
        rank = self._ranks.get(request_id)
        if rank is None:
            return []
        request = self._workers[rank].requests[request_id]
        begun = _begun(request_id, request)
        return [begun] if request.prefill_tokens else [begun, FirstToken(request_id)]

    def chain_of(self, request_id: str) -> tuple[WorkerRank, Sequence[int], int] | None:
        """Returns where a request runs, its chain of blocks, and the block size."""
        rank = self._ranks.get(request_id)
        if rank is None:
            return None
        request = self._workers[rank].requests[request_id]
        return rank, request.chain, request.block_size

    def num_active(self, rank: WorkerRank) -> int:
        """Returns the number of requests at the rank."""
        worker = self._workers.get(rank)
        return 0 if worker is None else len(worker.requests)

    def load(self, rank: WorkerRank, now: float | None = None) -> Load:
        """Returns the rank's load. now: the time, from a caller that reads the clock once for many ranks."""
        worker = self._workers.get(rank)
        if worker is None:
            return Load()
        return Load(
            len(worker.requests),
            worker.prefill_tokens,
            worker.block_tokens + worker.tail_tokens,
            _decayed(worker, self._clock() if now is None else now),
        )

    def remove_worker(self, rank: WorkerRank) -> list[str]:
        """Removes a worker. Returns the ids of its requests."""
        worker = self._workers.pop(rank, None)
        lost = [] if worker is None else list(worker.requests)
        for request_id in lost:
            del self._ranks[request_id]
        return lost

    def expire(self) -> list[str]:
        """Ends requests without news for EXPIRY_S seconds, and returns their ids. Each token is news, so a
        long stream does not expire."""
        now = self._clock()
        lost = [
            request_id
            for worker in self._workers.values()
            for request_id, request in worker.requests.items()
            if now - request.heard_at > EXPIRY_S
        ]
        for request_id in lost:
            self.end(request_id)
        return lost

    def _add_recent(self, worker: _WorkerLoad, num_tokens: int) -> None:
        now = self._clock()
        worker.recent_tokens, worker.recent_at = max(0.0, _decayed(worker, now) + num_tokens), now

    def _find(self, request_id: str) -> tuple[_WorkerLoad, _Request] | None:
        rank = self._ranks.get(request_id)
        if rank is None:
            return None
        worker = self._workers[rank]
        request = worker.requests[request_id]
        request.heard_at = self._clock()
        return worker, request


def _begun(request_id: str, request: _Request) -> Begun:
    rank, cached = request.rank, request.num_tokens - request.prefill_tokens
    return Begun(
        request_id,
        rank.worker,
        rank.rank,
        request.num_tokens,
        cached,
        list(request.chain),
        request.block_size,
    )


def _decayed(worker: _WorkerLoad, now: float) -> float:
    return worker.recent_tokens * 0.5 ** ((now - worker.recent_at) / RECENT_HALF_LIFE_S)
