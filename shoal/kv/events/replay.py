"""Answers to listeners that have missed batches, in bounded memory for any number of clients, slow ones
included.

An answer is a position in the numbers of batches, not a copy of them. It continues as its client reads.
Messages that libzmq has not sent yet are counted: each reports when its memory is free again. One client has
HIGH_WATER_MARK messages at most, and all together MAX_HELD_BYTES, or one message if that is more.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from shoal.kv_events import END

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 4  # messages to one client that libzmq holds
MAX_HELD_BYTES = 256 << 20  # sum over all clients
MAX_ANSWERS = 1024  # in progress; further requests are ignored
MESSAGE_BYTES = 512  # overhead of libzmq and pyzmq for a message
TURN_MESSAGES, TURN_REQUESTS = 256, 64  # limits of a turn; then new batches are published first
PATIENCE_S = 10.0  # an answer ends if its client reads no message for this long
SNAPSHOT_SHARE = 0.1  # share of the thread's time for snapshots


@dataclass(slots=True)
class Answer:
    next: int  # number of the next batch to send
    moved_at: float


@dataclass(slots=True)
class Snapshot:
    number: int  # replaces all batches up to this one
    payload: bytes
    again_at: float  # the earliest time for the next


class Replay:
    """The ROUTER socket, for the publisher's thread alone. `batch(n)` returns the payload of number n, None
    if it is gone or not published yet; `num_batches()` the number of published batches; `snapshot()` the
    payload of all cached blocks."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        topic: bytes,
        batch: Callable[[int], bytes | None],
        num_batches: Callable[[], int],
        snapshot: Callable[[], bytes],
    ) -> None:
        self.router, self._topic = router, topic
        self._batch, self._num_batches, self._make_snapshot = batch, num_batches, snapshot
        self._answers: dict[bytes, Answer] = {}
        self._held: list[tuple[zmq.MessageTracker, int]] = []  # given to libzmq, with its bytes
        self._snapshot: Snapshot | None = None
        self.num_held_bytes = 0
        router.router_mandatory = True  # a client that is gone or full is an error, not a silent loss
        router.copy_threshold = 0  # every payload is shared, with a tracker of its end

    def turn(self) -> bool:
        """Accepts requests and continues the answers. Returns True if there was anything to do, so that
        another turn is worthwhile."""
        asked = self._take_requests()
        self._held = [held for held in self._held if not held[0].done]
        self.num_held_bytes = sum(size for _, size in self._held)
        left, moved = TURN_MESSAGES, False
        for client, answer in list(self._answers.items()):
            before = left
            while left and client in self._answers and self._advance(client, answer):
                left -= 1
            if left < before:
                answer.moved_at, moved = time.monotonic(), True
            elif time.monotonic() - answer.moved_at > PATIENCE_S:
                logger.debug("a listener does not read its replay, which ends")
                self._answers.pop(client, None)
        if not self._answers:
            self._snapshot = None
        return asked or moved

    @property
    def is_busy(self) -> bool:
        return bool(self._answers)

    def _take_requests(self) -> bool:
        """Queues requests in the order of arrival. A new request of a client replaces the one before."""
        count = 0
        while count < TURN_REQUESTS and self.router.poll(0):
            frames = self.router.recv_multipart()
            count += 1
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.debug("not a request for a replay: %d frames", len(frames))
            elif frames[0] not in self._answers and len(self._answers) >= MAX_ANSWERS:
                logger.debug("a request for a replay is ignored: %d are in progress", MAX_ANSWERS)
            else:
                self._answers[frames[0]] = Answer(int.from_bytes(frames[2], "big"), time.monotonic())
        return count > 0

    def _advance(self, client: bytes, answer: Answer) -> bool:
        """Sends an answer's next message. False: it must wait, or it has ended."""
        end = self._num_batches()
        if answer.next == end or not end:
            if self._send(client, b"", END, b""):
                self._answers.pop(client, None)
            return False
        number, payload = answer.next, self._batch(answer.next)
        if payload is None:
            snapshot = self._recent_snapshot(end - 1)
            if snapshot is None:
                return False
            number, payload = snapshot.number, snapshot.payload
        if self._held and self.num_held_bytes + len(payload) + MESSAGE_BYTES > MAX_HELD_BYTES:
            return False
        if not self._send(client, self._topic, number.to_bytes(8, "big"), payload):
            return False
        answer.next = number + 1
        return True

    def _send(self, client: bytes, topic: bytes, number: bytes, payload: bytes) -> bool:
        try:
            self.router.send_multipart((client, b"", topic, number), zmq.DONTWAIT | zmq.SNDMORE, copy=True)
        except zmq.Again:  # its high-water mark is reached
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._answers.pop(client, None)
            return False
        tracker = self.router.send(payload, zmq.DONTWAIT, copy=False, track=True)
        assert tracker is not None
        self._held.append((tracker, len(payload) + MESSAGE_BYTES))
        self.num_held_bytes += len(payload) + MESSAGE_BYTES
        return True

    def _recent_snapshot(self, number: int) -> Snapshot | None:
        """Returns the snapshot with this number; None if it must wait because of other recent snapshots."""
        start = time.monotonic()
        if self._snapshot is not None and self._snapshot.number == number:
            return self._snapshot
        if self._snapshot is not None and start < self._snapshot.again_at:
            return None
        payload = self._make_snapshot()
        took = time.monotonic() - start
        self._snapshot = Snapshot(number, payload, start + took / SNAPSHOT_SHARE)
        return self._snapshot
