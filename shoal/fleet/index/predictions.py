"""`Predictions`: blocks that workers will have cached, since requests with them were sent there. KvRouter
(routing/kv_router.py) adds and drops them; blocks that events confirm are in indexer.py."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from shoal.fleet.index.indexer import Overlap, WorkerRank


@dataclass(slots=True)
class _Predicted:
    """The predicted blocks of one worker."""

    until: dict[int, float] = field(default_factory=dict)  # block -> its expiry
    sent: deque[tuple[float, Sequence[int]]] = field(default_factory=deque)  # expiry, chain
    # Blocks that the worker has dropped -> expiry of predicted blocks after them.
    dropped: dict[int, float] = field(default_factory=dict)
    # Blocks that the worker lacked when it was sent them again -> expiry of that prediction. Blocks after
    # them count only if they expire as late.
    renewed: dict[int, float] = field(default_factory=dict)


class Predictions:
    """Blocks that workers will have cached for a while by the requests sent to them: NVIDIA Dynamo's
    approximate index, and its side index of predicted blocks.

    A request brings all blocks of its chain, and each lasts at least as long as the ones after it. So a
    worker's depth is found by bisection, as in the index, and a dictionary per worker is enough."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._workers: dict[WorkerRank, _Predicted] = {}
        # First blocks of chains -> the ranks that were sent them, in order.
        self._holders: dict[int, dict[WorkerRank, None]] = {}
        self._due: list[tuple[float, WorkerRank]] = []  # a heap of expiries

    def add(self, rank: WorkerRank, chain: Sequence[int], ttl_s: float) -> None:
        """Predicts a chain of blocks, as the worker was sent a request with it. `ttl_s` must be the same for
        all requests of a worker."""
        until = self._clock() + ttl_s
        own = self._workers.setdefault(rank, _Predicted())
        own.until.update(zip(chain, repeat(until)))
        own.sent.append((until, chain))
        heapq.heappush(self._due, (until, rank))
        if chain:
            self._holders.setdefault(chain[0], {})[rank] = None
        if own.dropped:
            own.dropped = {block: end for block, end in own.dropped.items() if block not in own.until}

    def find_chain(self, chain: Sequence[int]) -> dict[WorkerRank, Overlap]:
        """Like KvIndexer.find_chain. Predicted blocks count as blocks on the device."""
        self.expire()
        found = {}
        for rank in self._holders.get(chain[0], ()) if chain else ():
            depth = _depth(self._workers[rank], chain)
            if depth:
                found[rank] = Overlap(depth)
        return found

    def num_blocks(self, rank: WorkerRank) -> int:
        own = self._workers.get(rank)
        return 0 if own is None else len(own.until)

    def correct(self, rank: WorkerRank, chain: Sequence[int], num_cached: int) -> None:
        """Corrects a prediction: the worker had only the first `num_cached` blocks of the chain when it was
        sent it. It had dropped the others, with all blocks after them. The chain itself stays predicted, as
        it has been computed since."""
        own = self._workers.get(rank)
        if own is None or num_cached >= len(chain):
            return
        until = own.until.get(chain[-1])
        if until is not None:
            own.renewed[chain[num_cached]] = until

    def drop(self, rank: WorkerRank, block: int) -> None:
        """Ends the prediction of a block that the worker has dropped."""
        own = self._workers.get(rank)
        if own is not None and block in own.until:
            own.dropped[block] = own.until.pop(block)  # later blocks do not last longer

    def remove_worker(self, rank: WorkerRank) -> None:
        own = self._workers.pop(rank, None)
        for _, chain in () if own is None else own.sent:
            self._drop_first(rank, chain)

    def _drop_first(self, rank: WorkerRank, chain: Sequence[int]) -> None:
        holders = self._holders.get(chain[0]) if chain else None
        if holders is not None:
            holders.pop(rank, None)
            if not holders:
                del self._holders[chain[0]]

    def expire(self) -> None:
        """Drops expired predictions."""
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            _, rank = heapq.heappop(self._due)
            own = self._workers.get(rank)
            if own is None or own.sent[0][0] > now:
                continue
            while own.sent and own.sent[0][0] <= now:
                _, chain = own.sent.popleft()
                # Requests share beginnings, which are mostly predicted anew.
                kept = bisect_left(chain, True, key=lambda block: own.until.get(block, 0.0) <= now)
                for block in chain[kept:]:
                    if own.until.get(block, math.inf) <= now:
                        del own.until[block]
                if chain and chain[0] not in own.until:
                    self._drop_first(rank, chain)
            own.dropped = {block: end for block, end in own.dropped.items() if end > now}
            own.renewed = {block: end for block, end in own.renewed.items() if end > now}
            if not own.sent:
                del self._workers[rank]


def _depth(own: _Predicted, chain: Sequence[int]) -> int:
    """Returns the number of consecutive predicted blocks of the chain, from its first."""
    until = own.until
    if not chain or chain[0] not in until:
        return 0
    dropped, renewed = own.dropped, own.renewed  # mostly empty, and isdisjoint reads the whole chain
    if (dropped and not dropped.keys().isdisjoint(chain)) or (
        renewed and not renewed.keys().isdisjoint(chain)
    ):
        least = -math.inf
        for depth, block in enumerate(chain):
            if (end := until.get(block)) is None or end < least:
                return depth
            least = max(least, renewed.get(block, least))
        return len(chain)
    low, high = 0, len(chain)  # block `low` is predicted, and block `high` is not
    while high - low > 1:
        middle = (low + high) >> 1
        if chain[middle] in until:
            low = middle
        else:
            high = middle
    return high
