"""Threads for slow I/O, with a bounded queue. A job's exception is logged and never raised to the waiting
code."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

logger = logging.getLogger(__name__)

RETRY_S, MAX_RETRY_S = 1.0, 300.0
T = TypeVar("T")


class IoThreads:
    """Runs jobs in the order of arrival. A job returns True for success; a job that could not run has failed.
    Threads are daemons, started when first needed: a file system that hangs must not keep the process
    alive."""

    def __init__(self, name: str, threads: int, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._name, self._max_threads = name, threads
        self._threads: list[threading.Thread] = []
        self._jobs: deque[tuple[Callable[[], bool], Future[bool]]] = deque()
        self._running = 0
        self._closed = False
        self._changed = threading.Condition()

    def submit(self, job: Callable[[], bool]) -> Future[bool] | None:
        """Queues a job. Returns None if the queue is full, the threads are closed, or the system allows no
        threads."""
        future: Future[bool] = Future()
        with self._changed:
            if self._closed or len(self._jobs) >= self.max_waiting:
                return None
            if len(self._threads) < self._max_threads and self._running + len(self._jobs) >= len(
                self._threads
            ):
                thread = threading.Thread(
                    target=self._loop, name=f"{self._name}-{len(self._threads)}", daemon=True
                )
                try:
                    thread.start()
                    self._threads.append(thread)
                except RuntimeError:  # the system's limit of threads
                    if not self._threads:
                        return None
            self._jobs.append((job, future))
            self._changed.notify_all()
        return future

    @property
    def pending(self) -> int:
        """Number of jobs that wait or run."""
        return len(self._jobs) + self._running

    def close(self, timeout_s: float = 5.0) -> None:
        """Fails the waiting jobs, and waits for the running ones, at most `timeout_s`."""
        with self._changed:
            self._closed = True
            dropped = list(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        for _, future in dropped:
            if future.set_running_or_notify_cancel():
                future.set_result(False)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job, future = self._jobs.popleft()
                self._running += 1
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except Exception:  # a bug in a job: the block is recomputed, the threads stay
                    logger.exception("%s: a job failed", self._name)
                    future.set_result(False)
            with self._changed:
                self._running -= 1


def close_all(all_threads: Iterable[IoThreads], timeout_s: float) -> None:
    """Closes one after another, all within the time."""
    deadline = time.monotonic() + timeout_s
    for threads in all_threads:
        threads.close(max(0.0, deadline - time.monotonic()))


class Breaker:
    """A circuit breaker (Nygard): after several failures in a row it allows no calls for a while, then one as
    a trial; each failed trial doubles the while. For use under a lock."""

    def __init__(self, failures: int) -> None:
        self._limit, self._failures = failures, 0
        self._closed_until, self._retry_s = 0.0, RETRY_S
        self._trial = False

    def allows(self) -> bool:
        if self._failures < self._limit:
            return True
        now = time.monotonic()
        if now < self._closed_until:
            return False
        # no further call until this one has ended, even if it never does
        self._trial, self._closed_until = True, now + self._retry_s
        return True

    def succeeded(self) -> None:
        self._failures, self._retry_s, self._trial = 0, RETRY_S, False

    def failed(self) -> None:
        self._failures += 1
        if self._failures == self._limit or self._trial:  # calls that were allowed before
            self._closed_until = time.monotonic() + self._retry_s
            self._retry_s, self._trial = min(2 * self._retry_s, MAX_RETRY_S), False


def done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future
