"""Turns of the threads that step one LLM, interrupts that wait for the end of a turn, and garbage collection
meanwhile."""

from __future__ import annotations

import gc
import signal
import threading
from typing import Any


class TurnLock:
    """A reentrant lock that goes to a waiting thread next: a thread that keeps stepping would get an ordinary
    lock back before another thread is awake."""

    def __init__(self) -> None:
        self._next, self._lock = threading.Lock(), threading.RLock()

    @property
    def is_mine(self) -> bool:
        """True if this thread holds the lock."""
        return self._lock._is_owned()  # type: ignore[attr-defined]  # as threading.Condition asks

    def __enter__(self) -> None:
        if self.is_mine:
            self._lock.acquire()
        else:
            with self._next:
                self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class LateInterrupts:
    """In the main thread a first Ctrl-C waits for the end of the outermost block, or for `apply` in it; a
    second one acts at once. An interrupted step would lose the tokens of all requests, also of other threads,
    and an interrupt between taking a lock and the block that frees it would never free it."""

    def __init__(self) -> None:
        self._depth = 0  # blocks that the main thread is in
        self._handler: Any = None  # the deferred handler of SIGINT
        self._waiting: list[tuple[int, Any]] = []

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._defer()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth = max(0, self._depth - 1)
            if not self._depth:
                self._apply()

    def apply(self) -> None:
        if self._waiting and threading.current_thread() is threading.main_thread():
            depth = self._depth
            self._apply()
            self._defer()
            self._depth = depth

    def _defer(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and handler != self._wait:
            self._handler = handler
            signal.signal(signal.SIGINT, self._wait)

    def _wait(self, number: int, frame: Any) -> None:
        self._waiting.append((number, frame))
        if len(self._waiting) > 1:
            self._apply()

    def _apply(self) -> None:
        """Calls the handler for the waiting interrupts. From now on none is deferred, even if the handler
        raises."""
        handler, waiting = self._handler, self._waiting
        self._handler, self._waiting, self._depth = None, [], 0
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            for interrupt in waiting:
                handler(*interrupt)


class OnlyYoungGarbage:
    """A context in which Python's full garbage collections wait. A full collection scans all modules and
    requests, which takes 0.1 s in the middle of a batch. (`gc.freeze` would do, but its `unfreeze` undoes
    what others have frozen.)"""

    def __init__(self) -> None:
        self._lock, self._num_inside, self._before = threading.Lock(), 0, gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                self._before = young, middle, old = gc.get_threshold()
                gc.set_threshold(young, middle, min(1000 * old, 2**31 - 1))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                gc.set_threshold(*self._before)


only_young_garbage = OnlyYoungGarbage()
