"""`Predictions`: blocks that workers will have cached, since requests with them were sent there."""

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
    """What is predicted of one worker."""

    until: dict[int, float] = field(default_factory=dict)  # block -> when it is forgotten
    sent: deque[tuple[float, Sequence[int]]] = field(default_factory=deque)  # until when, chain
    # Blocks that the worker has dropped, and until when others behind them may be predicted.
    dropped: dict[int, float] = field(default_factory=dict)
    # Blocks that the worker lacked when it was sent them again, and until when that sending stands. What lies
    # behind them counts only if it was sent as late.
    renewed: dict[int, float] = field(default_factory=dict)


class Predictions:
    """What workers will have cached by what they were sent, for a while: NVIDIA Dynamo's approximate index,
    and its side index of predicted blocks.

    A request brings all blocks of its chain, and each lasts at least as long as those behind it. So a
    worker's depth is found by bisection, as in the index, and a dictionary for each worker is enough."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._workers: dict[WorkerRank, _Predicted] = {}
        # First blocks of chains that were sent, and to whom, the first of them first.
        self._having: dict[int, dict[WorkerRank, None]] = {}
        self._due: list[
            tuple[float, WorkerRank]
        ] = []  # a heap of when something of a worker has had its time

    def add(self, rank: WorkerRank, chain: Sequence[int], ttl_s: float) -> None:
        """The worker was sent a request with this chain of blocks. `ttl_s` is the same for all requests of a
        worker."""
        until = self._clock() + ttl_s
        mine = self._workers.setdefault(rank, _Predicted())
        mine.until.update(zip(chain, repeat(until)))
        mine.sent.append((until, chain))
        heapq.heappush(self._due, (until, rank))
        if chain:
            self._having.setdefault(chain[0], {})[rank] = None
        if mine.dropped:
            mine.dropped = {block: end for block, end in mine.dropped.items() if block not in mine.until}

    def find_chain(self, chain: Sequence[int]) -> dict[WorkerRank, Overlap]:
        """As KvIndexer.find_chain; all that is predicted counts as lying on the device."""
        self.expire()
        found = {}
        for rank in self._having.get(chain[0], ()) if chain else ():
            depth = _depth(self._workers[rank], chain)
            if depth:
                found[rank] = Overlap(depth)
        return found

    def num_blocks(self, rank: WorkerRank) -> int:
        mine = self._workers.get(rank)
        return 0 if mine is None else len(mine.until)

    def correct(self, rank: WorkerRank, chain: Sequence[int], num_cached: int) -> None:
        """The worker had the first `num_cached` blocks of this chain when it was sent it. If more were
        predicted, it has dropped the others, and with them all that lay behind them. What it was sent itself
        stays: it has been computed since."""
        mine = self._workers.get(rank)
        if mine is None or num_cached >= len(chain):
            return
        until = mine.until.get(chain[-1])
        if until is not None:
            mine.renewed[chain[num_cached]] = until

    def drop(self, rank: WorkerRank, block: int) -> None:
        """The worker has dropped this block."""
        mine = self._workers.get(rank)
        if mine is not None and block in mine.until:
            mine.dropped[block] = mine.until.pop(block)  # those behind it do not last longer

    def remove_worker(self, rank: WorkerRank) -> None:
        mine = self._workers.pop(rank, None)
        for _, chain in () if mine is None else mine.sent:
            self._forget_first(rank, chain)

    def _forget_first(self, rank: WorkerRank, chain: Sequence[int]) -> None:
        having = self._having.get(chain[0]) if chain else None
        if having is not None:
            having.pop(rank, None)
            if not having:
                del self._having[chain[0]]

    def expire(self) -> None:
        """Forgets what has had its time."""
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            _, rank = heapq.heappop(self._due)
            mine = self._workers.get(rank)
            if mine is None or mine.sent[0][0] > now:
                continue
            while mine.sent and mine.sent[0][0] <= now:
                _, chain = mine.sent.popleft()
                # What requests have in common is mostly predicted anew, and lies at the beginning.
                kept = bisect_left(chain, True, key=lambda block: mine.until.get(block, 0.0) <= now)
                for block in chain[kept:]:
                    if mine.until.get(block, math.inf) <= now:
                        del mine.until[block]
                if chain and chain[0] not in mine.until:
                    self._forget_first(rank, chain)
            mine.dropped = {block: end for block, end in mine.dropped.items() if end > now}
            mine.renewed = {block: end for block, end in mine.renewed.items() if end > now}
            if not mine.sent:
                del self._workers[rank]


def _depth(mine: _Predicted, chain: Sequence[int]) -> int:
    """How many blocks of the chain are predicted, from the first without a gap."""
    until = mine.until
    if not chain or chain[0] not in until:
        return 0
    dropped, renewed = mine.dropped, mine.renewed  # mostly empty, and isdisjoint looks at all of the chain
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
