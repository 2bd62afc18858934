"""From one publisher's numbered batches of KV events to the index.

What was lost is asked for, and what comes twice changes nothing.

`EventFeed` is the logic, without sockets and clocks. `listen` feeds it from a worker's PUB and ROUTER sockets
(vLLM's wire, docs/kv.md). A feed begins by asking for everything, so that a router that starts late or again
learns what is cached. While it asks, live batches wait. What no replay can fill is not guessed: all that the
worker was known to have is forgotten, and the index learns again from what comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import zmq
import zmq.asyncio

from shoal.fleet.indexer import KvIndexer, WorkerRank
from shoal.kv_event_format import END, AllBlocksCleared, EventBatch, decode

logger = logging.getLogger(__name__)

MAX_WAITING = (
    10_000  # live batches that wait for a replay; beyond them the oldest are lost, and asked for again
)
REPLAY_PATIENCE_S = 5.0  # without a batch, a replay has failed
AGAIN_S = 10.0  # after a replay that failed, until the next is tried
MAX_FRAME_BYTES = 1 << 30


class EventFeed:
    """The events of one publisher. `replay_from` is the first number that must be asked for; None: nothing is
    missing."""

    def __init__(self, index: KvIndexer, rank: WorkerRank) -> None:
        """`rank`: whose events these are, unless a batch names another data-parallel rank of the worker."""
        self.replay_from: int | None = 0
        self.num_lost = 0  # gaps that could not be filled
        self.num_unreadable = 0
        self._index, self._rank = index, rank
        self._ranks = {rank}
        self._next = 0
        self._last_ts = float("-inf")
        self._waiting: deque[tuple[int, EventBatch]] = deque(maxlen=MAX_WAITING)

    def heard(self, number: int, payload: bytes) -> None:
        """A live batch."""
        batch = self._decode(payload)
        if self.replay_from is not None:
            self._waiting.append((number, batch))
        else:
            self._take(number, batch)

    def replayed(self, number: int, payload: bytes) -> None:
        """A batch of a replay. One that begins with AllBlocksCleared stands for all before it too, so there a
        number may have gone back: the publisher has started again."""
        batch = self._decode(payload)
        stands_alone = bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)
        if number < self._next and not stands_alone:
            return
        if number > self._next and not stands_alone and self._next > 0:
            self._lose()  # the publisher no longer has those between
        self._apply(number, batch)

    def replay_ended(self) -> None:
        """The publisher has told all that it had. If that was nothing, what is missing is lost, and with it
        what was known."""
        waiting = sorted(self._waiting, key=lambda item: item[0])
        if waiting and self.replay_from == self._next < waiting[0][0]:
            self._lose()
            self._next = waiting[0][0]
        self.replay_from = None
        self._waiting.clear()
        for number, batch in waiting:
            if self.replay_from is None:
                self._take(number, batch)
            else:
                self._waiting.append((number, batch))

    def forget(self) -> None:
        """The worker is gone, or another one has come in its place."""
        for rank in self._ranks:
            self._index.remove_worker(rank)
        self.replay_from, self._next, self._last_ts = 0, 0, float("-inf")
        self._waiting.clear()

    def _take(self, number: int, batch: EventBatch) -> None:
        if number == self._next:
            self._apply(number, batch)
        elif number > self._next:
            self.replay_from = self._next
            self._waiting.append((number, batch))
        elif batch.ts > self._last_ts:  # a number that was, with news: the publisher counts from 0 again
            self.forget()
            self._waiting.append((number, batch))

    def _apply(self, number: int, batch: EventBatch) -> None:
        rank = self._rank
        if batch.data_parallel_rank is not None and batch.data_parallel_rank != rank.rank:
            rank = WorkerRank(rank.worker, batch.data_parallel_rank)
            self._ranks.add(rank)
        for event in batch.events:
            self._index.apply(rank, event)
        self._next, self._last_ts = number + 1, max(self._last_ts, batch.ts)

    def _lose(self) -> None:
        self.num_lost += 1
        for rank in self._ranks:
            self._index.remove_worker(rank)

    def _decode(self, payload: bytes) -> EventBatch:
        try:
            return decode(payload)
        except ValueError as error:
            self.num_unreadable += 1
            if self.num_unreadable == 1:
                logger.warning("worker %s sends KV events that cannot be read: %s", self._rank.worker, error)
            return EventBatch(self._last_ts, [])


async def listen(
    feed: EventFeed,
    context: zmq.asyncio.Context,
    endpoint: str,
    replay_endpoint: str | None,
    topic: str = "",
    secure: Callable[[zmq.asyncio.Socket], None] = lambda socket: None,
) -> None:
    """Feeds `feed` until it is cancelled. `secure` sets the keys of a socket, where the publisher wants some
    (CURVE)."""
    subscriber = _socket(context, zmq.SUB, secure)
    subscriber.subscribe(topic)
    subscriber.rcvhwm = MAX_WAITING
    subscriber.connect(endpoint)
    missing = asyncio.Event()

    async def fill_gaps() -> None:
        while True:
            while feed.replay_from is not None:
                await _replay(feed, context, replay_endpoint, secure)
            missing.clear()
            await missing.wait()

    filling = asyncio.create_task(fill_gaps())
    try:
        while True:
            frames = await subscriber.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == 8:
                feed.heard(int.from_bytes(frames[1], "big"), frames[2])
            else:
                feed.num_unreadable += 1
            if feed.replay_from is not None:
                missing.set()
    finally:
        filling.cancel()
        subscriber.close(0)


async def _replay(
    feed: EventFeed,
    context: zmq.asyncio.Context,
    endpoint: str | None,
    secure: Callable[[zmq.asyncio.Socket], None],
) -> None:
    start = feed.replay_from
    if endpoint is None or start is None:
        feed.replay_ended()
        return
    socket = _socket(context, zmq.DEALER, secure)
    socket.connect(endpoint)
    try:
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            frames = await asyncio.wait_for(socket.recv_multipart(), REPLAY_PATIENCE_S)
            # vLLM's answers have three frames here, ours the topic too.
            number, payload = frames[-2], frames[-1]
            if number == END:
                feed.replay_ended()
                return
            feed.replayed(int.from_bytes(number, "big"), payload)
    except (TimeoutError, IndexError, zmq.ZMQError) as error:
        logger.warning("a replay of KV events from %s failed: %r", endpoint, error)
        feed.replay_ended()
        await asyncio.sleep(AGAIN_S)
    finally:
        socket.close(0)


def _socket(
    context: zmq.asyncio.Context, kind: int, secure: Callable[[zmq.asyncio.Socket], None]
) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = MAX_FRAME_BYTES
    secure(socket)
    return socket
