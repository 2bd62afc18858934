"""The clock of the fleet's timers, and runs of asyncio on virtual time for tests and the simulator."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    def now(self) -> float:
        """Seconds from an arbitrary start. It never goes back."""

    async def sleep(self, seconds: float) -> None: ...


class LoopClock:
    """The clock of the event loop that it is first used in: monotonic time, or virtual time under
    `run_virtual`."""

    def __init__(self) -> None:
        self._time: Callable[[], float] | None = None

    def now(self) -> float:
        if self._time is None:  # asked for once, as each token asks for the time
            self._time = asyncio.get_running_loop().time
        return self._time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _JumpingSelector(selectors.SelectSelector):
    """Where the loop would wait for its next timer, the time jumps there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits for another one, and no timer is left: a deadlock")
        self.now += timeout
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _JumpingSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on virtual time, which begins at 0: what would sleep for an hour takes no time. The
    coroutine may not wait for sockets or other processes, as nothing waits for them here."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)
