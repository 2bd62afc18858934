"""`SocketReader`: reads a ZMQ socket in an asyncio loop, at less cost per message than pyzmq's asyncio
sockets. remote_engine.py and worker_server.py decode the frames and send."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import zmq

logger = logging.getLogger(__name__)

MESSAGES_A_TURN = 64  # messages read before other tasks get a turn
# Plain ints: enum look-ups would cost as much as the calls.
EVENTS, POLLIN, NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)


class SocketReader:
    """Calls `take` with the frames of each message that the socket receives, until `close`."""

    def __init__(self, socket: zmq.Socket[Any], take: Callable[[list[bytes]], None]) -> None:
        self._socket, self._take = socket, take
        self._loop = asyncio.get_running_loop()
        self._fd: int = socket.fileno()
        self._is_closed = self._is_scheduled = False
        self._loop.add_reader(self._fd, self._read)
        self.poll()

    def poll(self) -> None:
        """Must be called after each sent message: the file descriptor signals an event once, and sending may
        consume that signal."""
        if not self._is_scheduled and not self._is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self._read)

    def read_all(self) -> None:
        """Reads all messages that have arrived."""
        while self._read_one():
            pass

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)

    def _read(self) -> None:
        self._is_scheduled = False
        for _ in range(MESSAGES_A_TURN):
            if not self._read_one():
                return
        self.poll()

    def _read_one(self) -> bool:
        if self._is_closed:
            return False
        try:
            if not int(self._socket.get(EVENTS)) & POLLIN:  # costs less than the error of an empty socket
                return False
            frames = self._socket.recv_multipart(NOBLOCK)
        except zmq.ZMQError:  # the socket is closed
            return False
        try:
            self._take(frames)
        except Exception:
            logger.exception("a message could not be handled")
        return True
