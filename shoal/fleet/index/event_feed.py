"""From one publisher's numbered batches of KV events to the index.

What was lost is asked for, and what comes twice changes nothing.

`EventFeed` is the logic, without sockets and clocks. `listen` feeds it from a worker's PUB and ROUTER sockets
(vLLM's wire, docs/kv.md). A feed begins by asking for everything, so that a router that starts late or again
learns what is cached. While it asks, live batches wait. What no replay can fill is not guessed: all that the
worker was known to have is forgotten, and the index learns again from what comes.

A publisher that starts again counts from 0, with nothing cached. So a replay begins with the last batch that
is known: if the publisher tells another one under its number, or none, it is another publisher.
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

# Live batches that wait for a replay; beyond them the oldest are lost, and asked for again.
MAX_WAITING = 10_000
MAX_DIGESTS = 1024  # batches of which it is known what they held
MAX_RANKS = 1024  # data-parallel ranks that batches may name
MAX_REPLAYS = 2  # that bring nothing new, until what is missing is given up


class BlockSink(Protocol):
    """Whoever takes in events: a KvIndexer, a KvRouter."""

    def apply(self, rank: WorkerRank, event: KVEvent) -> None: ...


class _Batch(NamedTuple):
    number: int
    digest: int
    content: EventBatch


class EventFeed:
    """The events of one publisher. `replay_from` is the first number that must be asked for; None: nothing is
    missing. `missing` is set with it, and cleared by whoever asks."""

    def __init__(self, sink: BlockSink, rank: WorkerRank, num_ranks: int | None = None) -> None:
        """`rank`: whose events these are, unless a batch names another of the worker's `num_ranks`
        data-parallel ranks. None: it is not known how many there are."""
        self.replay_from: int | None = 0
        self.missing = asyncio.Event()
        self.missing.set()
        self.num_lost = 0  # gaps that could not be filled
        self.num_unreadable = 0
        self.num_batches = 0
        self._sink, self._rank, self._num_ranks = sink, rank, num_ranks
        self._ranks = {rank}  # those that have told of something
        self._next = 0
        self._last_ts = float("-inf")
        self._digests: dict[int, int] = {}
        self._waiting: deque[_Batch] = deque(maxlen=MAX_WAITING)
        self._is_confirmed = False  # this replay has told of something, by the publisher that is known
        self._is_other = False  # this replay is told by another publisher
        self._num_replays = 0  # one after the other, that have brought nothing new

    def heard(self, number: int, payload: bytes) -> None:
        """A live batch."""
        content = self._decode(payload)
        if content is None:
            if self.replay_from is None and number == self._next:
                self._pass(number)
            return
        batch = _Batch(number, xxh3_64_intdigest(payload), content)
        if self.replay_from is not None:
            self._waiting.append(batch)
        else:
            self._take(batch)

    def replayed(self, number: int, payload: bytes) -> None:
        """A batch of a replay. One that begins with AllBlocksCleared stands for all before it too, so there a
        number may have gone back: the publisher has started again."""
        if self._is_other:
            return
        content = self._decode(payload)
        batch = _Batch(number, xxh3_64_intdigest(payload), content or EventBatch(self._last_ts, []))
        if batch.content.events and isinstance(batch.content.events[0], AllBlocksCleared):
            self._digests.clear()
            self._apply(batch, is_told_live=False)
        elif number < self._next:
            if not self._is_known(batch):
                self._is_other = True
                return
            self._is_confirmed |= number == self._next - 1
        else:
            if self._next > 0 and not (self._is_confirmed and number == self._next):
                self._lose()  # the publisher no longer has those between
            self._apply(batch)
        self._is_confirmed |= number >= self._next - 1

    def replay_ended(self) -> None:
        """The publisher has told all that it had. If what is known was not among that, it is forgotten. What
        is still missing is asked for again, and at last given up."""
        if self._is_other or (self._next > 0 and not self._is_confirmed):
            self._lose()
            self._begin_anew()
            return
        # A batch that is older than what was just told, and was not among it, is of a predecessor.
        waiting = [
            batch
            for batch in self._waiting
            if batch.number >= self._next and batch.content.ts >= self._last_ts
        ]
        waiting.sort(key=_number)
        is_told, self.replay_from, self._is_confirmed = self._is_confirmed, None, False
        self._waiting.clear()
        if waiting and waiting[0].number > self._next:
            self._num_replays += 1
            if not is_told or self._num_replays >= MAX_REPLAYS:
                self._lose()
                self._next, self._last_ts = waiting[0].number, float("-inf")
        for batch in waiting:
            if self.replay_from is not None:
                self._waiting.append(batch)
            elif batch.number >= self._next:
                self._take(batch)

    def check(self) -> None:
        """The worker was away: what it has is asked for, and whether it is the same."""
        if self.replay_from is None:
            self._ask()

    def _take(self, batch: _Batch) -> None:
        if batch.number == self._next and batch.content.ts >= self._last_ts:
            self._apply(batch)
            return
        known = self._digests.get(batch.number)
        if known == batch.digest:
            return  # it comes twice
        if known is not None:  # a number that was, with news: the publisher counts from 0 again
            self._clear()
            self._begin_anew()
        else:  # a gap, a number of long ago, or a clock that went back
            self._ask()
        self._waiting.append(batch)

    def _is_known(self, batch: _Batch) -> bool:
        """Whether this is what the publisher that is known has told under this number. Of what a snapshot
        stood for, only the time is known: it was before the snapshot."""
        known = self._digests.get(batch.number)
        if known is None:
            return batch.number < self._next - 1 or batch.content.ts <= self._last_ts
        return known == batch.digest

    def _ask(self) -> None:
        self.replay_from = max(0, self._next - 1)
        self.missing.set()

    def _begin_anew(self) -> None:
        self._next, self._last_ts, self._num_replays = 0, float("-inf"), 0
        self._is_confirmed = self._is_other = False
        self._digests.clear()
        self._ask()

    def _apply(self, batch: _Batch, is_told_live: bool = True) -> None:
        """`is_told_live`: the same bytes come, or came, as a live batch."""
        rank = self._rank_of(batch.content)
        if rank is not None:
            self._ranks.add(rank)
            for event in batch.content.events:
                self._sink.apply(rank, event)
        self._last_ts = batch.content.ts
        self._pass(batch.number)
        if is_told_live:
            self._digests[batch.number] = batch.digest
            if len(self._digests) > MAX_DIGESTS:
                del self._digests[next(iter(self._digests))]

    def _pass(self, number: int) -> None:
        self.num_batches += 1
        self._next, self._num_replays = number + 1, 0

    def _rank_of(self, batch: EventBatch) -> WorkerRank | None:
        """Whose the events are; None for a rank that the worker does not have."""
        named, most = batch.data_parallel_rank, MAX_RANKS if self._num_ranks is None else self._num_ranks
        if named is None or named == self._rank.rank or most == 1:
            return self._rank
        if 0 <= named < most:
            return WorkerRank(self._rank.worker, named)
        self._skip(f"data-parallel rank {named} is none of {most} (dp_size)")
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
            logger.warning("worker %s sends KV events that cannot be read: %s", self._rank.worker, why)


def _number(batch: _Batch) -> int:
    return batch.number
