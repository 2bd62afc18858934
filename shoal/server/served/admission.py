"""Who gets in: a bounded number of requests, none while the server drains."""

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
        """Counts so many sequences in. Raises RequestError if they never fit, BusyError if they do not fit
        now, UnavailableError while draining."""
        if self.draining:
            raise UnavailableError("the server is shutting down; send the request to another one")
        if count > self.limit:
            raise RequestError(
                f"n: the request asks for {count} answers, and the queue takes {self.limit}; ask for fewer, "
                "or send fewer prompts at once"
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
        """Whether nobody gets in any more, as the server is shutting down."""
        return self._drain.is_set()

    def drain(self) -> None:
        self._drain.set()

    async def wait_draining(self) -> None:
        await self._drain.wait()

    async def wait_idle(self) -> None:
        await self._idle.wait()
