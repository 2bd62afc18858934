"""`KvRouter`: which worker gets a request, as a library. The index says who has its prefix, the books who is
busy, a policy chooses, and the books are written with the choice.

    index = KvIndexer(block_size=16)
    router = KvRouter(index, workers=["a", "b"])
    choice = router.schedule(token_ids, request_id="1")     # -> Choice(rank, overlap, costs)
    router.books.first_token("1")
    router.books.end("1")

No socket and no clock but the one that is given: the simulator and the served router run this same code.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from random import Random

from shoal.errors import UnavailableError
from shoal.fleet.books import Books
from shoal.fleet.indexer import KvIndexer, Overlap, WorkerRank
from shoal.fleet.policy import Ask, Candidate, Choice, RouterWeights, check_policy, choose
from shoal.hashing import block_hashes, sequence_hashes, wire_seed

APPROXIMATE_TTL_S = 120.0  # how long the router's own decisions stand for events that never come
PREDICTED_TTL_S = 5.0  # how long they stand until the event comes

Selector = Callable[[Ask, Sequence[Candidate]], Choice]


class Predictions:
    """What workers will have cached by what they were sent, for a while: NVIDIA Dynamo's approximate index,
    and its side index of predicted blocks."""

    def __init__(self, clock: Callable[[], float], ttl_s: float) -> None:
        self._clock, self._ttl_s = clock, ttl_s
        self._index = KvIndexer()
        self._until: dict[tuple[WorkerRank, int], float] = {}
        self._due: deque[tuple[float, WorkerRank, Sequence[int]]] = deque()

    def add(self, rank: WorkerRank, chain: Sequence[int]) -> None:
        """Worker was sent a request with this chain of blocks."""
        until = self._clock() + self._ttl_s
        self._index.store_chain(rank, chain)
        for block in chain:
            self._until[rank, block] = until
        self._due.append((until, rank, chain))

    def find_chain(self, chain: Sequence[int]) -> dict[WorkerRank, Overlap]:
        self._expire()
        return self._index.find_chain(chain)

    def remove_worker(self, rank: WorkerRank) -> None:
        self._index.remove_worker(rank)
        self._until = {key: until for key, until in self._until.items() if key[0] != rank}

    def _expire(self) -> None:
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            _, rank, chain = self._due.popleft()
            for block in reversed(chain):
                if self._until.get((rank, block), now + 1) <= now:
                    self._drop(rank, block)

    def _drop(self, rank: WorkerRank, block: int) -> None:
        if self._until.pop((rank, block), None) is not None:
            self._index.remove(rank, 0, block)


class KvRouter:
    """One model's workers. Not for several threads at once."""

    def __init__(
        self,
        indexer: KvIndexer,
        selector: Selector | None = None,
        *,
        workers: Iterable[str | WorkerRank] = (),
        policy: str = "kv",
        weights: RouterWeights | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`selector` replaces the policy: it gets a request and the candidates and returns its choice. Raises
        ConfigError for an unknown policy."""
        check_policy(policy)
        self.indexer = indexer
        self.books = Books(clock)
        self.candidates: dict[WorkerRank, Candidate] = {}
        ttl_s = APPROXIMATE_TTL_S if policy == "kv_approx" else PREDICTED_TTL_S
        self.predictions = Predictions(clock, ttl_s)
        self._policy = policy
        self._weights = weights or RouterWeights()
        self._rng = Random(seed)
        self._selector = selector or self._choose
        self._turn = 0
        for worker in workers:
            self.add_worker(worker if isinstance(worker, WorkerRank) else WorkerRank(worker))

    def add_worker(self, rank: WorkerRank) -> None:
        """A worker may be chosen from now on."""
        self.candidates.setdefault(rank, Candidate(rank))

    def remove_worker(self, rank: WorkerRank) -> list[str]:
        """A worker is gone, with its blocks. Returns the ids of the requests that it had."""
        self.candidates.pop(rank, None)
        self.indexer.remove_worker(rank)
        self.predictions.remove_worker(rank)
        return self.books.remove_worker(rank)

    def published(self, rank: WorkerRank, kv_usage: float, num_waiting: int) -> None:
        """What a worker says of itself. A usage that is no finite number changes nothing."""
        candidate = self.candidates.get(rank)
        if candidate is not None and math.isfinite(kv_usage):
            candidate.kv_usage, candidate.num_waiting = kv_usage, num_waiting

    def schedule(
        self,
        token_ids: Sequence[int],
        *,
        request_id: str | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        session: str | None = None,
        among: Iterable[WorkerRank] | None = None,
    ) -> Choice:
        """Chooses the worker for a prompt. With a `request_id` the choice is written into the books, to be
        followed by `books.first_token` and `books.end`; without one nothing changes. `among`: the workers
        that may be chosen, if not all. Raises UnavailableError where there is none."""
        chains = self._chains(token_ids, wire_seed(lora_name, cache_salt))
        return self.schedule_chains(
            len(token_ids), chains, request_id=request_id, session=session, among=among
        )

    def schedule_chains(
        self,
        num_tokens: int,
        chains: dict[int, list[int]],
        *,
        request_id: str | None = None,
        session: str | None = None,
        among: Iterable[WorkerRank] | None = None,
    ) -> Choice:
        """The same for a prompt of `num_tokens` tokens whose chain hashes are known, for each block size that
        a worker has."""
        found: dict[WorkerRank, Overlap] = {}
        for chain in chains.values():
            found |= self.indexer.find_chain(chain)
            for rank, overlap in self.predictions.find_chain(chain).items():
                if overlap.total > found.get(rank, Overlap()).total:
                    found[rank] = overlap
        candidates = []
        for rank in self.candidates if among is None else among:
            candidate = self.candidates.get(rank)
            if candidate is None:  # it has just been removed
                continue
            candidate.overlap = found.get(rank, Overlap())
            candidate.block_size = self.indexer.block_size_of(rank)
            candidate.load = self.books.load(rank)
            candidates.append(candidate)
        if not candidates:
            raise UnavailableError("no worker can take the request; start one, or try again later")
        choice = self._selector(Ask(num_tokens, session, self._turn), candidates)
        if request_id is not None:
            self._write(request_id, choice, num_tokens, chains)
        return choice

    def block_sizes(self) -> set[int]:
        """Each block size that a worker has."""
        return {self.indexer.block_size_of(rank) for rank in self.candidates}

    def _write(self, request_id: str, choice: Choice, num_tokens: int, chains: dict[int, list[int]]) -> None:
        size = self.indexer.block_size_of(choice.rank)
        chain = chains[size]
        self._turn += 1
        self.books.begin(request_id, choice.rank, num_tokens, choice.overlap.total * size, chain, size)
        if self._policy in ("kv", "kv_approx"):
            self.predictions.add(choice.rank, chain)

    def _choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        return choose(self._policy, ask, candidates, self._weights, self._rng, self.indexer.block_size)

    def _chains(self, token_ids: Sequence[int], seed: int) -> dict[int, list[int]]:
        """The chain hashes of the prompt for each block size that a worker has."""
        sizes = self.block_sizes()
        return {size: sequence_hashes(block_hashes(token_ids, size, seed)) for size in sizes}
