"""`listen`: reads an external worker's KV events from its PUB and ROUTER sockets (vLLM's wire, docs/kv.md).
EventFeed (event_feed.py) puts them in order and applies them."""

from __future__ import annotations

import asyncio
import logging

import zmq
import zmq.asyncio

from shoal.fleet.index.event_feed import MAX_WAITING, EventFeed
from shoal.kv_events import END

logger = logging.getLogger(__name__)

REPLAY_PATIENCE_S = 5.0  # without a batch, a replay has failed
RETRY_S = 10.0  # pause after a failed replay
MAX_FRAME_BYTES = 1 << 30


async def listen(
    feed: EventFeed, context: zmq.asyncio.Context, endpoint: str, replay_endpoint: str | None, topic: str = ""
) -> None:
    """Feeds `feed` until it is cancelled."""
    subscriber = _socket(context, zmq.SUB)
    subscriber.subscribe(topic)
    subscriber.rcvhwm = MAX_WAITING
    subscriber.connect(endpoint)

    async def fill_gaps() -> None:
        while True:
            feed.missing.clear()
            while feed.replay_from is not None:
                await _replay(feed, context, replay_endpoint)
            await feed.missing.wait()

    filling = asyncio.create_task(fill_gaps())
    try:
        while True:
            frames = await subscriber.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == 8:
                feed.receive(int.from_bytes(frames[1], "big"), frames[2])
            else:
                feed.num_unreadable += 1
    finally:
        filling.cancel()
        subscriber.close(0)


async def _replay(feed: EventFeed, context: zmq.asyncio.Context, endpoint: str | None) -> None:
    start = feed.replay_from
    if endpoint is None or start is None:
        feed.replay_ended()
        return
    socket = _socket(context, zmq.DEALER)
    socket.connect(endpoint)
    try:
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            frames = await asyncio.wait_for(socket.recv_multipart(), REPLAY_PATIENCE_S)
            # vLLM answers with three frames; Shoal adds the topic.
            number, payload = frames[-2], frames[-1]
            if number == END:
                feed.replay_ended()
                return
            feed.replayed(int.from_bytes(number, "big"), payload)
    except (TimeoutError, IndexError, zmq.ZMQError) as error:
        logger.warning("a replay of KV events from %s failed: %r", endpoint, error)
        feed.replay_ended()
        await asyncio.sleep(RETRY_S)
    finally:
        socket.close(0)


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = MAX_FRAME_BYTES
    return socket
