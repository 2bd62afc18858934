"""`HeadClock`: the seconds that a draft head takes in each step of a CPU. On a GPU the head is a part of the
step's graph, and has no time of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

MOST_STEPS = 64  # far more than are in flight; ranks other than 0 measure and never take


class HeadClock:
    """Steps are taken in the order in which they ran. `runs` False: each of them takes 0 seconds."""

    def __init__(self, runs: bool) -> None:
        self.runs = runs
        self._seconds: deque[float] = deque(maxlen=MOST_STEPS)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measures what a step's head does inside this context."""
        begin = time.perf_counter()
        yield
        if self.runs:
            self._seconds.append(time.perf_counter() - begin)

    def take(self) -> float:
        """Returns the seconds of the oldest step, which has run."""
        return self._seconds.popleft() if self._seconds else 0.0

    def clear(self) -> None:
        """Forgets steps that were lost."""
        self._seconds.clear()
