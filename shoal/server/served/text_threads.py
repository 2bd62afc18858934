"""The threads in which text becomes prompts.

They keep a long text, or a template that does not end, from holding up the event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from shoal.errors import RequestError

T = TypeVar("T")

NUM_THREADS = 2  # they are few, so that a burst queues here and not on the cores
GRACE_SECONDS = 0.2  # between two checks of a job whose time is over


class TextThreads:
    """Runs jobs in a few threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def run_bounded(
        self, work: Callable[[], T], seconds: float, what: str, field: str | None = None
    ) -> T:
        """Returns `work()`. After `seconds` it is interrupted: Python code at its next line, other code
        when it returns. Then raises RequestError, which begins with `what`."""
        job = _Job(work)
        future = asyncio.get_running_loop().run_in_executor(self._pool, job.run)
        try:
            while True:
                done, _ = await asyncio.wait((future,), timeout=job.seconds_left(seconds))
                if done:
                    return future.result()
                if job.seconds_left(seconds) <= GRACE_SECONDS:
                    job.end()
        except Overtime:
            raise RequestError(
                f"{what} took longer than {seconds:g} s and was ended; simplify it", field=field
            ) from None
        except asyncio.CancelledError:  # the client has left
            future.cancel()
            job.end()
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Overtime(BaseException):
    """Raised by another thread in the middle of a job. No template can catch it, nor any `except
    Exception`."""


class _Job(Generic[T]):
    """One job, and the thread that runs it.

    The thread is sent Overtime at most once, and `run` returns only after it was raised: the thread's next
    job must not get it.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread: int | None = None  # None: not begun, or over
        self._began: float | None = None
        self._was_sent = False
        self._is_unwanted = False

    def seconds_left(self, seconds: float) -> float:
        """The rest of its time. The time while it waits for a thread does not count."""
        if self._began is None:
            return seconds
        return max(GRACE_SECONDS, self._began + seconds - time.monotonic())

    def run(self) -> T:
        with self._lock:
            if self._is_unwanted:
                raise Overtime
            self._began = time.monotonic()
            self._thread = threading.get_ident()
        try:
            return self._work()
        finally:
            self._thread = None
            with self._lock:  # waits for a concurrent `end`
                pass
            if self._was_sent:
                _spend_time()

    def end(self) -> None:
        """Raises Overtime in its thread: now if it is running, else as soon as it begins."""
        if self._was_sent:
            return
        with self._lock:
            self._is_unwanted = True
            if self._thread is not None:
                self._was_sent = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(Overtime)
                )


def _spend_time() -> None:
    """An exception that another thread has sent is raised at one of the next jumps."""
    for _ in range(1000):
        pass
