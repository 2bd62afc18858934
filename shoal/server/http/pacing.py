"""Request pacing: how many new requests one pass of the event loop begins.

A thousand requests may arrive at once. If one pass began all of them, every running answer would wait. So a
pass begins a few, and sends the engine's tokens before the next few.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

TURNS_A_PASS = 8  # a turn that begins a request costs well below a millisecond


class RequestPacing:
    """Grants turns in order of arrival, TURNS_A_PASS in one pass of the event loop."""

    def __init__(self) -> None:
        self._num_left = TURNS_A_PASS  # in this pass
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_counting = False  # _next_pass will be called in the next pass

    def take(self, later: Callable[[], None]) -> bool:
        """Returns whether the caller has a turn now. If not, `later` is called when it has one."""
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._next_pass)
        if self._num_left == 0 or self._waiting:
            self._waiting.append(later)
            return False
        self._num_left -= 1
        return True

    def _next_pass(self) -> None:
        loop = asyncio.get_running_loop()
        num_begun = min(TURNS_A_PASS, len(self._waiting))
        for _ in range(num_begun):
            loop.call_soon(self._waiting.popleft())
        self._num_left = TURNS_A_PASS - num_begun
        self._is_counting = num_begun > 0
        if self._is_counting:
            loop.call_soon(self._next_pass)
