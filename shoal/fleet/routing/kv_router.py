"""`KvRouter`: chooses a worker for a prompt by cached prefix and load, and records the choice as an active
request. KvIndexer (fleet/index) has the prefixes, active_requests.py the load, policy.py the costs; requests
wait in dispatcher.py.

    index = KvIndexer(block_size=16)
    router = KvRouter(index, workers=["a", "b"])
    choice = router.schedule(token_ids, request_id="1")     # -> Choice(rank, overlap, costs)
    router.active_requests.first_token("1")
    router.active_requests.end("1")

It has no socket, and its clock is passed in, so the simulator, the served router and other programs run the
same code.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

import msgspec

from shoal.errors import UnavailableError
from shoal.fleet.index.indexer import KvIndexer, Overlap, WorkerRank
from shoal.fleet.index.predictions import Predictions
from shoal.fleet.routing.active_requests import ActiveRequests, AnyChange, Ended, FirstToken, Load
from shoal.fleet.routing.policy import Candidate, Choice, PolicyRequest, RouterWeights, check_policy, choose
from shoal.hashing import chains_by_size
from shoal.kv_events import AllBlocksCleared, BlockRemoved, KVEvent

APPROXIMATE_TTL_S = 120.0  # life of a prediction for a worker without events
PREDICTED_TTL_S = 5.0  # life of a prediction for a worker with events
LOAD_TTL_S = 10.0  # life of a worker's published load
PREDICTS = ("kv", "kv_approx")  # policies that count blocks before their events come

# Among more workers than SAMPLE_ABOVE, a choice looks at NUM_BEST workers that have a part of the
# prompt and at NUM_SAMPLED others, with these policies.
SAMPLE_ABOVE, NUM_BEST, NUM_SAMPLED = 64, 16, 32
SAMPLED = ("kv", "kv_approx", "kv_logit", "random", "least_loaded", "power_of_two")

NOTHING = Overlap()


@dataclass(frozen=True, slots=True)
class _Published:
    """The part of a worker's published load that this router did not cause."""

    until: float
    other_requests: int
    other_tokens: int


class KvRouter:
    """The choice among one model's workers. Not thread-safe."""

    def __init__(
        self,
        indexer: KvIndexer,
        *,
        workers: Iterable[str | WorkerRank] = (),
        policy: str = "kv",
        weights: RouterWeights | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for an unknown policy."""
        check_policy(policy)
        self.indexer = indexer
        self.active_requests = ActiveRequests(clock)
        self.candidates: dict[WorkerRank, Candidate] = {}
        self.predictions = Predictions(clock)
        self._clock = clock
        self._published: dict[WorkerRank, _Published] = {}
        self._without_events: set[WorkerRank] = set()
        self._policy = policy
        self._weights = weights or RouterWeights()
        self._rng = Random(seed)
        self._turn = 0
        for worker in workers:
            self.add_worker(worker if isinstance(worker, WorkerRank) else WorkerRank(worker))

    def add_worker(self, rank: WorkerRank, *, has_events: bool = True) -> None:
        """Adds a candidate. `has_events`: it publishes what it caches; otherwise predictions from the
        router's own decisions are used."""
        self.candidates.setdefault(rank, Candidate(rank))
        if not has_events:
            self._without_events.add(rank)

    def remove_worker(self, rank: WorkerRank) -> list[str]:
        """Removes a worker with its blocks. Returns the ids of its requests."""
        self.candidates.pop(rank, None)
        self._published.pop(rank, None)
        self._without_events.discard(rank)
        self.forget_blocks(rank)
        return self.active_requests.remove_worker(rank)

    def forget_blocks(self, rank: WorkerRank) -> None:
        """Forgets all that the worker was known or predicted to have cached."""
        self.indexer.remove_worker(rank)
        self.predictions.remove_worker(rank)

    def apply(self, rank: WorkerRank, event: KVEvent) -> None:
        """Applies one event of a worker. Predictions of blocks that the worker has dropped end, too."""
        if isinstance(event, BlockRemoved) and self.predictions.num_blocks(rank):
            for name in event.block_hashes:
                block = self.indexer.block_of(rank, name)
                if block is not None:
                    self.predictions.drop(rank, block)
        elif isinstance(event, AllBlocksCleared):
            self.predictions.remove_worker(rank)
        self.indexer.apply(rank, event)

    def correct_cached(self, request_id: str, num_tokens: int, num_expected: int) -> None:
        """Corrects the predictions for a worker without events that reports fewer cached tokens of a running
        request's prompt than the `num_expected` expected ones."""
        found = self.active_requests.chain_of(request_id)
        if found is not None:
            rank, chain, block_size = found
            num_cached = num_tokens // block_size
            # A worker that has the whole prompt computes its last token all the same, and may not count that
            # token's block.
            if rank in self._without_events and num_cached < min(num_expected // block_size, len(chain) - 1):
                self.predictions.correct(rank, chain, num_cached)

    def num_cached_tokens(self, choice: Choice) -> int:
        """Returns how many tokens of the prompt the chosen worker has by the index and the predictions."""
        return choice.overlap.total * self.indexer.block_size_of(choice.rank)

    def num_stored_tokens(self, choice: Choice, request_id: str) -> int:
        """Returns how many tokens of a running request's prompt the chosen worker has now. Predictions count
        only for a worker without events."""
        found = self.active_requests.chain_of(request_id)
        if found is None or choice.rank in self._without_events:
            return self.num_cached_tokens(choice)
        rank, chain, block_size = found
        return self.indexer.find_chain(chain).get(rank, NOTHING).total * block_size

    @property
    def weighs_blocks(self) -> bool:
        """True if costs count blocks to compute and to hold, so that costs of different sets of workers can
        be compared."""
        return self._policy in PREDICTS

    def num_cached_blocks(self, rank: WorkerRank) -> int:
        """Returns how many blocks the rank is known or predicted to have."""
        return max(self.indexer.num_blocks(rank), self.predictions.num_blocks(rank))

    def published(
        self, rank: WorkerRank, kv_usage: float, num_waiting: int, num_running: int = 0, kv_tokens: int = 0
    ) -> None:
        """Records the load that a worker publishes, for LOAD_TTL_S seconds. `kv_tokens`: capacity of its KV
        cache, 0 if unknown. A usage that is not finite is ignored."""
        candidate = self.candidates.get(rank)
        if candidate is None or not math.isfinite(kv_usage):
            return
        candidate.kv_usage, candidate.num_waiting = kv_usage, num_waiting
        own = self.active_requests.load(rank)
        self._published[rank] = _Published(
            self._clock() + LOAD_TTL_S,
            max(0, num_running + num_waiting - own.active_requests),
            max(0, round(kv_usage * kv_tokens) - own.active_tokens),
        )

    def kv_usage(self, rank: WorkerRank) -> float:
        """Returns the published share of the KV cache in use; 0 if none was published lately."""
        candidate = self.candidates.get(rank)
        if candidate is None:
            return 0.0
        self._load_of(candidate, self._clock())
        return candidate.kv_usage

    def _load_of(self, candidate: Candidate, now: float) -> Load:
        """Returns the load from this router's own requests plus reported load that others caused."""
        load = self.active_requests.load(candidate.rank, now)
        published = self._published.get(candidate.rank)
        if published is None:
            return load
        if now >= published.until:  # nothing published lately
            del self._published[candidate.rank]
            candidate.kv_usage, candidate.num_waiting = 0.0, 0
            return load
        if not published.other_requests and not published.other_tokens:
            return load
        return msgspec.structs.replace(
            load,
            active_requests=load.active_requests + published.other_requests,
            active_tokens=load.active_tokens + published.other_tokens,
        )

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
        """Chooses the worker for a prompt. With a `request_id` the choice is recorded in `active_requests`,
        whose `first_token` and `end` the caller must call later; without one nothing changes. `among`: the
        ranks to choose from; None: all. Raises UnavailableError without a candidate."""
        chains = chains_by_size(token_ids, self.block_sizes(), adapter=lora_name, cache_salt=cache_salt)
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
        """Like `schedule`, for a prompt of `num_tokens` tokens with known chain hashes, by block size."""
        found = self.find(chains)
        ranks = list(self.candidates if among is None else among)
        return self.choose_among(
            found, num_tokens, chains, request_id=request_id, session=session, among=self.sample(found, ranks)
        )

    def sample(self, found: dict[WorkerRank, Overlap], ranks: Sequence[WorkerRank]) -> list[WorkerRank]:
        """Returns all these ranks if they are few. Among many, returns the ranks that have most of the prompt
        and a random sample: the best of a sample is nearly the best of all (Mitzenmacher 2001), so a choice
        costs hardly more in a large fleet. Policies that must see all workers get all."""
        if len(ranks) <= SAMPLE_ABOVE or self._policy not in SAMPLED:
            return list(ranks)
        own = set(ranks)
        best = heapq.nlargest(NUM_BEST, found.items(), key=lambda item: item[1].total)
        chosen = [rank for rank, _ in best if rank in own]
        return list(dict.fromkeys([*chosen, *self._rng.sample(ranks, NUM_SAMPLED)]))

    def find(self, chains: dict[int, list[int]]) -> dict[WorkerRank, Overlap]:
        """Returns how much of the prompt each rank has, by its events or by predictions."""
        found: dict[WorkerRank, Overlap] = {}
        for chain in chains.values():
            found |= self.indexer.find_chain(chain)
            for rank, overlap in self.predictions.find_chain(chain).items():
                if overlap.total > found.get(rank, NOTHING).total:
                    found[rank] = overlap
        return found

    def choose_among(
        self,
        found: dict[WorkerRank, Overlap],
        num_tokens: int,
        chains: dict[int, list[int]],
        *,
        request_id: str | None = None,
        session: str | None = None,
        among: Iterable[WorkerRank] | None = None,
        turn: int | None = None,
    ) -> Choice:
        """Chooses with the result of `find`. turn: the request's number for round robin, where these workers
        have a count of their own; None: this router's count."""
        candidates, now, block_size_of = [], self._clock(), self.indexer.block_size_of
        for rank in self.candidates if among is None else among:
            candidate = self.candidates.get(rank)
            if candidate is None:  # removed meanwhile
                continue
            candidate.overlap = found.get(rank, NOTHING)
            candidate.block_size = block_size_of(rank)
            candidate.load = self._load_of(candidate, now)
            candidates.append(candidate)
        if not candidates:
            raise UnavailableError("no worker can take the request; start one, or try again later")
        request = PolicyRequest(num_tokens, session, self._turn if turn is None else turn)
        choice = choose(self._policy, request, candidates, self._weights, self._rng, self.indexer.block_size)
        if request_id is not None:
            self._record(request_id, choice, num_tokens, chains)
        return choice

    def block_sizes(self) -> set[int]:
        """Returns the block sizes of all workers."""
        return self.indexer.block_sizes(self.candidates)

    def _record(self, request_id: str, choice: Choice, num_tokens: int, chains: dict[int, list[int]]) -> None:
        size = self.indexer.block_size_of(choice.rank)
        chain = chains.get(size, [])  # [] for a size that appeared after the prompt was hashed
        self._turn += 1
        self.active_requests.begin(
            request_id, choice.rank, num_tokens, choice.overlap.total * size, chain, size
        )
        self._predict(choice.rank, chain)

    def take(self, change: AnyChange, own_id: str) -> None:
        """Applies a change of another router's active requests. `own_id`: the request's id in this router."""
        if isinstance(change, Ended):
            self.active_requests.end(own_id)
        elif isinstance(change, FirstToken):
            self.active_requests.first_token(own_id)
        else:
            rank, chain = WorkerRank(change.worker, change.rank), change.chain
            if rank in self.candidates:
                size = change.block_size
                self.active_requests.begin(
                    own_id, rank, change.num_tokens, change.cached_tokens, chain, size, is_own=False
                )
                self._predict(rank, chain)

    def _predict(self, rank: WorkerRank, chain: Sequence[int]) -> None:
        """Predicts that the rank will have these blocks."""
        is_alone = self._policy == "kv_approx" or rank in self._without_events
        if self._policy in PREDICTS or (is_alone and self._policy == "kv_logit"):
            self.predictions.add(rank, chain, APPROXIMATE_TTL_S if is_alone else PREDICTED_TTL_S)
