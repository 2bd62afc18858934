"""`EventFeed`: puts one publisher's numbered batches of KV events in order, and applies them to the index.
Pure: sockets are event_listener.py's (external workers) and RemoteEngine's (native/remote_engine.py).

Lost batches are replayed, and duplicates change nothing. A feed begins with a replay of everything, so that a
router that starts late learns the cached blocks. Live batches wait during a replay. A gap that no replay can
fill is not guessed: all blocks of the worker are forgotten, and the index learns again from the following
batches.

A publisher that restarts counts from 0, with an empty cache. So a replay begins with the last known batch: if
the publisher has another batch under its number, or none, it is a new publisher.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from shoal.fleet.index.indexer import WorkerRank
from shoal.kv_events import AllBlocksCleared, EventBatch, KVEvent, decode

logger = logging.getLogger(__name__)

# Live batches that wait for a replay; beyond this many the oldest are dropped, and replayed later.
MAX_WAITING = 10_000
MAX_DIGESTS = 1024  # recent batches whose digests are kept
MAX_RANKS = 1024  # data-parallel ranks that batches may name
MAX_REPLAYS = 2  # replays without news, until a gap is accepted


class BlockSink(Protocol):
    """Applies events: a KvIndexer or a KvRouter."""

    def apply(self, rank: WorkerRank, event: KVEvent) -> None: ...


class _Batch(NamedTuple):
    number: int
    digest: int
    content: EventBatch


class EventFeed:
    """The events of one publisher. `replay_from` is the first number to replay; None: nothing is missing.
    `missing` is set with it; the part that requests replays clears it."""

    def __init__(self, sink: BlockSink, rank: WorkerRank, num_ranks: int | None = None) -> None:
        """`rank`: the events' rank, unless a batch names another of the worker's `num_ranks` data-parallel
        ranks; None: their number is unknown."""
        self.replay_from: int | None = 0
        self.missing = asyncio.Event()
        self.missing.set()
        self.num_lost = 0  # gaps that could not be filled
        self.num_unreadable = 0
        self.num_batches = 0
        self._sink, self._rank, self._num_ranks = sink, rank, num_ranks
        self._ranks = {rank}  # ranks with events so far
        self._next = 0
        self._last_ts = float("-inf")
        self._digests: dict[int, int] = {}
        self._waiting: deque[_Batch] = deque(maxlen=MAX_WAITING)
        self._is_confirmed = False  # this replay comes from the known publisher
        self._is_other = False  # this replay comes from another publisher
        self._num_replays = 0  # successive replays without news

    def receive(self, number: int, payload: bytes) -> None:
        """Takes a live batch."""
        content = self._decode(payload)
        if content is None:
            if self.replay_from is None and number == self._next:
                self._advance(number)
            return
        batch = _Batch(number, xxh3_64_intdigest(payload), content)
        if self.replay_from is not None:
            self._waiting.append(batch)
        else:
            self._take(batch)

    def replayed(self, number: int, payload: bytes) -> None:
        """Takes a batch of a replay. One that begins with AllBlocksCleared is a snapshot and replaces all
        before it, also if its number is lower after a restart of the publisher."""
        if self._is_other:
            return
        content = self._decode(payload)
        batch = _Batch(number, xxh3_64_intdigest(payload), content or EventBatch(self._last_ts, []))
        if batch.content.events and isinstance(batch.content.events[0], AllBlocksCleared):
            self._digests.clear()
            self._apply(batch, is_live=False)
        elif number < self._next:
            if not self._is_known(batch):
                self._is_other = True
                return
            self._is_confirmed |= number == self._next - 1
        else:
            if self._next > 0 and not (self._is_confirmed and number == self._next):
                self._lose()  # the publisher has dropped the batches between
            self._apply(batch)
        self._is_confirmed |= number >= self._next - 1

    def replay_ended(self) -> None:
        """Ends a replay. Without the known batch in it, all known blocks are forgotten. A remaining gap is
        replayed again, and accepted after MAX_REPLAYS."""
        if self._is_other or (self._next > 0 and not self._is_confirmed):
            self._lose()
            self._restart()
            return
        # A waiting batch that is older than the replay and not part of it comes from an earlier publisher.
        waiting = [
            batch
            for batch in self._waiting
            if batch.number >= self._next and batch.content.ts >= self._last_ts
        ]
        waiting.sort(key=_number)
        is_known, self.replay_from, self._is_confirmed = self._is_confirmed, None, False
        self._waiting.clear()
        if waiting and waiting[0].number > self._next:
            self._num_replays += 1
            if not is_known or self._num_replays >= MAX_REPLAYS:
                self._lose()
                self._next, self._last_ts = waiting[0].number, float("-inf")
        for batch in waiting:
            if self.replay_from is not None:
                self._waiting.append(batch)
            elif batch.number >= self._next:
                self._take(batch)

    def check(self) -> None:
        """Requests a replay after the worker was unreachable, as it may have restarted."""
        if self.replay_from is None:
            self._request_replay()

    def _take(self, batch: _Batch) -> None:
        if batch.number == self._next and batch.content.ts >= self._last_ts:
            self._apply(batch)
            return
        known = self._digests.get(batch.number)
        if known == batch.digest:
            return  # a duplicate
        if known is not None:  # another batch under a known number: the publisher has restarted
            self._clear()
            self._restart()
        else:  # a gap, a very old number, or a clock that was set back
            self._request_replay()
        self._waiting.append(batch)

    def _is_known(self, batch: _Batch) -> bool:
        """Returns whether this batch equals the one already applied under its number. For batches covered by
        a snapshot only the timestamp can be compared."""
        known = self._digests.get(batch.number)
        if known is None:
            return batch.number < self._next - 1 or batch.content.ts <= self._last_ts
        return known == batch.digest

    def _request_replay(self) -> None:
        self.replay_from = max(0, self._next - 1)
        self.missing.set()

    def _restart(self) -> None:
        self._next, self._last_ts, self._num_replays = 0, float("-inf"), 0
        self._is_confirmed = self._is_other = False
        self._digests.clear()
        self._request_replay()

    def _apply(self, batch: _Batch, is_live: bool = True) -> None:
        """`is_live`: the same bytes are also sent as a live batch."""
        rank = self._rank_of(batch.content)
        if rank is not None:
            self._ranks.add(rank)
            for event in batch.content.events:
                self._sink.apply(rank, event)
        self._last_ts = batch.content.ts
        self._advance(batch.number)
        if is_live:
            self._digests[batch.number] = batch.digest
            if len(self._digests) > MAX_DIGESTS:
                del self._digests[next(iter(self._digests))]

    def _advance(self, number: int) -> None:
        self.num_batches += 1
        self._next, self._num_replays = number + 1, 0

    def _rank_of(self, batch: EventBatch) -> WorkerRank | None:
        """Returns the rank of the events; None for a rank that the worker does not have."""
        named, most = batch.data_parallel_rank, MAX_RANKS if self._num_ranks is None else self._num_ranks
        if named is None or named == self._rank.rank or most == 1:
            return self._rank
        if 0 <= named < most:
            return WorkerRank(self._rank.worker, named)
        self._skip(f"data-parallel rank must be below {most} (dp_size), got {named}")
        return None

    def _lose(self) -> None:
        if self._next > 0:
            self.num_lost += 1
            self._clear()

    def _clear(self) -> None:
        for rank in self._ranks:
            self._sink.apply(rank, AllBlocksCleared())

    def _decode(self, payload: bytes) -> EventBatch | None:
        try:
            return decode(payload)
        except ValueError as error:
            self._skip(str(error))
            return None

    def _skip(self, why: str) -> None:
        self.num_unreadable += 1
        if self.num_unreadable == 1:
            logger.warning("KV events of worker %s cannot be read: %s", self._rank.worker, why)


def _number(batch: _Batch) -> int:
    return batch.number
