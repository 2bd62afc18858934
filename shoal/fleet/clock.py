"""`Clock`: the time of the fleet's timers; also runs asyncio on virtual time for tests and the simulator."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    def now(self) -> float:
        """Returns monotonic seconds from an arbitrary start."""

    async def sleep(self, seconds: float) -> None: ...


class LoopClock:
    """The clock of the event loop in which it is first used: monotonic time, or virtual time under
    `run_virtual`."""

    def __init__(self) -> None:
        self._time: Callable[[], float] | None = None

    def now(self) -> float:
        if self._time is None:  # looked up once, as each token reads the time
            self._time = asyncio.get_running_loop().time
        return self._time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _JumpingSelector(selectors.SelectSelector):
    """Advances the time to the loop's next timer instead of waiting for it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: every task waits for another one, and no timer is left")
        self.now += timeout
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _JumpingSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, on virtual time from 0: a sleep of an hour takes no time. The coroutine must not wait
    for sockets or other processes, as the loop never does."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)
