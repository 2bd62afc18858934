"""What each worker is doing, as far as this router has sent it: the books of active sequences.

A request enters with the choice of its worker, so that a burst of requests sees what was chosen before it.
Its prefill leaves at the first token, the rest at its end. Blocks that several active requests of one worker
share count once. Prefill work that a worker was given lately counts for a while after it is done: without
it, requests that come one after the other, with nothing in flight, would all meet equal loads. NVIDIA Dynamo
keeps the same books (ActiveSequences), without the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from shoal.fleet.index.indexer import WorkerRank

RECENT_HALF_LIFE_S = 10.0
EXPIRY_S = 3600.0  # a request of which nothing was heard for so long is taken for lost


class Load(msgspec.Struct, frozen=True, gc=False):
    """A worker's load, in tokens where a unit is not named."""

    active_requests: int = 0
    prefill_tokens: int = 0  # to be computed before the first tokens of active requests
    active_tokens: int = 0  # whose KV active requests hold
    recent_tokens: float = 0.0  # prefill work given lately, halved every RECENT_HALF_LIFE_S


class Change(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """What a router writes into its books, as others hear of it."""

    request_id: str


class Begun(Change, frozen=True):
    worker: str
    rank: int
    num_tokens: int
    cached_tokens: int
    chain: list[int]
    block_size: int


class FirstToken(Change, frozen=True):
    """Its prefill is done."""


class Ended(Change, frozen=True):
    pass


AnyChange = Begun | FirstToken | Ended


@dataclass(slots=True)
class _Request:
    rank: WorkerRank
    prefill_tokens: int
    chain: Sequence[int]
    block_size: int
    tail_tokens: int  # of the block that is not full, and of what was generated
    heard_at: float
    num_tokens: int
    is_own: bool  # this router's, and no other's
    remote_prefill_tokens: int = 0  # of the prompt, that another worker computes


@dataclass(slots=True)
class _Worker:
    requests: dict[str, _Request] = field(default_factory=dict)
    blocks: Counter[int] = field(default_factory=Counter)  # chain hash -> requests that hold it
    prefill_tokens: int = 0
    block_tokens: int = 0
    tail_tokens: int = 0
    recent_tokens: float = 0.0
    recent_at: float = 0.0


class ActiveRequests:
    """`on_change` is called with what this router's own requests change here."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds that only grow."""
        self.on_change: Callable[[AnyChange], None] | None = None
        self._clock = clock
        self._workers: dict[WorkerRank, _Worker] = {}
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
        """A request of `num_tokens` tokens goes to this worker, which is thought to have `cached_tokens` of
        them. A request that is in the books already moves. `is_own`: this router has sent it."""
        self.end(request_id)
        now, worker = self._clock(), self._workers.setdefault(rank, _Worker())
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
        """Its prefill is done."""
        found = self._find(request_id)
        if found is not None:
            worker, request = found
            worker.prefill_tokens -= request.prefill_tokens
            request.prefill_tokens = 0
            if request.is_own and self.on_change is not None:
                self.on_change(FirstToken(request_id))

    def prefill_remotely(self, request_id: str) -> None:
        """Another worker computes its prompt: that is no work of this one, and was none lately."""
        found = self._find(request_id)
        if found is not None:
            worker, request = found
            request.remote_prefill_tokens = request.prefill_tokens
            self._add_recent(worker, -request.prefill_tokens)
            self.first_token(request_id)

    def prefill_locally(self, request_id: str) -> None:
        """The other worker has not computed the prompt, and this one does."""
        found = self._find(request_id)
        if found is not None:
            worker, request = found
            request.prefill_tokens, request.remote_prefill_tokens = request.remote_prefill_tokens, 0
            worker.prefill_tokens += request.prefill_tokens
            self._add_recent(worker, request.prefill_tokens)
            if request.is_own and self.on_change is not None:
                self.on_change(_begun(request_id, request))

    def generated(self, request_id: str, num_tokens: int) -> None:
        """It has so many more tokens."""
        found = self._find(request_id)
        if found is not None:
            worker, request = found
            request.tail_tokens += num_tokens
            worker.tail_tokens += num_tokens

    def touch(self, request_id: str) -> None:
        """It is known to run, whatever it has generated."""
        self._find(request_id)  # which notes the time

    def end(self, request_id: str) -> None:
        """It has ended, left or moved. A request that is not in the books changes nothing."""
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

    def own_requests(self) -> list[str]:
        """The ids of the requests that this router has sent."""
        return [
            request_id
            for worker in self._workers.values()
            for request_id, request in worker.requests.items()
            if request.is_own
        ]

    def changes_of(self, request_id: str) -> list[AnyChange]:
        """What has been written of a request that runs."""
        rank = self._ranks.get(request_id)
        if rank is None:
            return []
        request = self._workers[rank].requests[request_id]
        begun = _begun(request_id, request)
        return [begun] if request.prefill_tokens else [begun, FirstToken(request_id)]

    def chain_of(self, request_id: str) -> tuple[WorkerRank, Sequence[int], int] | None:
        """Where a request runs, its chain of blocks, and their size."""
        rank = self._ranks.get(request_id)
        if rank is None:
            return None
        request = self._workers[rank].requests[request_id]
        return rank, request.chain, request.block_size

    def num_active(self, rank: WorkerRank) -> int:
        """How many requests it has."""
        worker = self._workers.get(rank)
        return 0 if worker is None else len(worker.requests)

    def load(self, rank: WorkerRank, now: float | None = None) -> Load:
        """now: what the clock says, from who asks for many workers at once."""
        worker = self._workers.get(rank)
        if worker is None:
            return Load()
        return Load(
            len(worker.requests),
            worker.prefill_tokens,
            worker.block_tokens + worker.tail_tokens,
            _faded(worker, self._clock() if now is None else now),
        )

    def remove_worker(self, rank: WorkerRank) -> list[str]:
        """The worker is gone; returns the requests that it had."""
        worker = self._workers.pop(rank, None)
        lost = [] if worker is None else list(worker.requests)
        for request_id in lost:
            del self._ranks[request_id]
        return lost

    def expire(self) -> list[str]:
        """Ends requests of which nothing was heard for long, and returns them. A stream that goes on is heard
        of with each token, however long it runs."""
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

    def _add_recent(self, worker: _Worker, num_tokens: int) -> None:
        now = self._clock()
        worker.recent_tokens, worker.recent_at = max(0.0, _faded(worker, now) + num_tokens), now

    def _find(self, request_id: str) -> tuple[_Worker, _Request] | None:
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


def _faded(worker: _Worker, now: float) -> float:
    return worker.recent_tokens * 0.5 ** ((now - worker.recent_at) / RECENT_HALF_LIFE_S)
