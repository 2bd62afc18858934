"""Admission: a bounded number of requests, and no new ones while the server drains."""

from __future__ import annotations

import asyncio

from shoal.errors import BusyError, RequestError, UnavailableError


class Admission:
    """Counts the sequences of one model that run or wait in its engine."""

    def __init__(self, max_running: int, max_queued: int) -> None:
        self.set_limit(max_running, max_queued)
        self.active = 0
        self.refused = 0  # requests refused for want of room, since the start
        self._drain = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def set_limit(self, max_running: int, max_queued: int) -> None:
        self.limit = max_running + max_queued

    def enter(self, count: int) -> None:
        """Admits `count` sequences. Raises RequestError if they never fit, BusyError if they do not fit
        now, UnavailableError while draining."""
        if self.draining:
            raise UnavailableError("the server is shutting down; send the request to another one")
        if count > self.limit:
            raise RequestError(
                f"n must be at most {self.limit} answers, the size of the queue, got {count}; ask for fewer, "
                "or send fewer prompts at once",
                field="n",
            )
        if self.active + count > self.limit:
            self.refused += count
            raise BusyError(
                f"the queue is full: {self.active} of {self.limit} requests run or wait; try again later"
            )
        self.active += count
        self._idle.clear()

    def leave(self, count: int) -> None:
        self.active -= count
        if not self.active:
            self._idle.set()

    @property
    def draining(self) -> bool:
        """True when nothing is admitted any more, as the server is shutting down."""
        return self._drain.is_set()

    def drain(self) -> None:
        self._drain.set()

    async def wait_draining(self) -> None:
        await self._drain.wait()

    async def wait_idle(self) -> None:
        await self._idle.wait()
