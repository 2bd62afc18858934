"""Waits for what other threads and processes do. A condition that never comes true fails its test."""

import asyncio
import time

PATIENCE_S = 240
FIRST_POLL_S, LAST_POLL_S = 0.005, 0.1  # polls of what takes long come at longer intervals


def eventually(condition, say=lambda: "it never came true", patience_s=PATIENCE_S):
    """Returns the first true result of the condition. Fails with the text of `say`."""
    deadline, pause = time.monotonic() + patience_s, FIRST_POLL_S
    while not (found := condition()):
        assert time.monotonic() < deadline, say()
        time.sleep(pause)
        pause = min(1.2 * pause, LAST_POLL_S)
    return found


async def until(condition, say=lambda: "it never came true", patience_s=PATIENCE_S):
    """As `eventually`, for what runs in this event loop."""
    deadline, pause = time.monotonic() + patience_s, FIRST_POLL_S
    while not (found := condition()):
        assert time.monotonic() < deadline, say()
        await asyncio.sleep(pause)
        pause = min(1.2 * pause, LAST_POLL_S)
    return found
