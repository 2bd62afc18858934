"""asyncio tasks: start and stop of background loops, and waiting for the first of several."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

logger = logging.getLogger(__name__)


def start(loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Returns a task that runs until it is cancelled. Its failure is a bug of Shoal, and logged."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception():
            logger.error("%s failed", task.get_coro(), exc_info=task.exception())

    task = asyncio.create_task(loop)
    task.add_done_callback(ended)
    return task


async def stop(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels until all have ended: before Python 3.12, asyncio.wait_for may swallow a cancellation."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=1.0)


async def first_of(*awaitables: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> None:
    """Waits until one of them ends, and raises its exception if it failed. Tasks among the others continue,
    and coroutines are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task, given in zip(tasks, awaitables):
            if task is not given:
                task.cancel()
