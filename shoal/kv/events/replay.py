"""Answers to listeners that have missed batches, in bounded memory, whoever asks and whoever does not read.

An answer is a place in the numbers of batches, not a copy of them. It goes on as its client takes what comes.
What libzmq has been given and has not sent yet is counted: each message tells when its memory is free again.
One client has WINDOW messages at most, and all together MAX_HELD_BYTES, or one message if that is more.
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

WINDOW = 4  # messages to one client that libzmq holds: its high-water mark
MAX_HELD_BYTES = 256 << 20  # of all clients
MAX_ANSWERS = 1024  # under way; who asks beyond them is not heard
MESSAGE_BYTES = 512  # what libzmq and pyzmq take for a message beside its payload
TURN_MESSAGES, TURN_REQUESTS = 256, 64  # of a turn, after which new batches are published first
PATIENCE_S = 10.0  # without a message that a client takes, its answer ends
SNAPSHOT_SHARE = 0.1  # of the thread's time goes to snapshots


@dataclass(slots=True)
class Answer:
    next: int  # the number of the batch to be sent next
    moved_at: float


@dataclass(slots=True)
class Snapshot:
    number: int  # it stands for all batches up to this one
    payload: bytes
    again_at: float  # the earliest time for the next


class Replay:
    """The ROUTER socket. All calls are the publisher's thread's, which lends its batches: `batch(n)` is the
    payload of number n, None if it is gone or has not been; `num_batches()` how many have been published;
    `snapshot()` the payload of all that is there."""

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
        router.router_mandatory = True  # who is gone or takes nothing is an error, not a loss
        router.copy_threshold = 0  # every payload is shared, and tells when libzmq is done with it

    def turn(self) -> bool:
        """Takes what was asked and goes on with the answers. Whether there was anything to do, so that
        another turn is worth while."""
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
                logger.debug("a listener takes nothing of its replay: it ends")
                self._answers.pop(client, None)
        if not self._answers:
            self._snapshot = None
        return asked or moved

    @property
    def is_busy(self) -> bool:
        return bool(self._answers)

    def _take_requests(self) -> bool:
        """Clients take turns in the order in which they asked. A new request of a client ends the one
        before."""
        count = 0
        while count < TURN_REQUESTS and self.router.poll(0):
            frames = self.router.recv_multipart()
            count += 1
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.debug("no request for a replay: %d frames", len(frames))
            elif frames[0] not in self._answers and len(self._answers) >= MAX_ANSWERS:
                logger.debug("a request for a replay is not heard: %d are under way", MAX_ANSWERS)
            else:
                self._answers[frames[0]] = Answer(int.from_bytes(frames[2], "big"), time.monotonic())
        return count > 0

    def _advance(self, client: bytes, answer: Answer) -> bool:
        """Sends its next message. False: it, or its client, has to wait, or it is at its end."""
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
        except zmq.Again:  # its window is full
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
        """The one under this number; None if it has to wait, as others have been made lately."""
        start = time.monotonic()
        if self._snapshot is not None and self._snapshot.number == number:
            return self._snapshot
        if self._snapshot is not None and start < self._snapshot.again_at:
            return None
        payload = self._make_snapshot()
        took = time.monotonic() - start
        self._snapshot = Snapshot(number, payload, start + took / SNAPSHOT_SHARE)
        return self._snapshot
