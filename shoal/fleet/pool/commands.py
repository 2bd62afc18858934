"""`command_workers`: runs one command of `shoal.control` (sleep, wake_up, update_weights ...) on many
workers. Fleet (fleet.py) selects the workers; each worker's link carries the command out.

At once, all workers run it at the same time. Rolling, one worker after the other runs it without requests:
the worker gets no new ones, ends its present ones, runs the command, and returns. The first failure ends the
rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from shoal.control import Command, ReadSleepState, Sleep, UpdateWeights, WakeUp, name_of
from shoal.errors import ConfigError, ShoalError
from shoal.fleet.worker import Worker
from shoal.fleet_api import CommandResults


async def command_workers(
    workers: Sequence[Worker[Any]], command: Command[Any], *, rolling: bool
) -> CommandResults:
    """Raises ConfigError for an external worker, which has none of these commands."""
    if external := [worker.id for worker in workers if worker.info.is_external]:
        raise ConfigError(
            f"{', '.join(external)}: {name_of(command)} needs native workers; name some (?workers=a,b)"
        )
    found = CommandResults()
    if rolling:
        for worker in workers:
            if not found.errors:
                await _note(worker, _without_requests(worker, command), found)
            else:
                found.not_asked.append(worker.id)
    else:
        await asyncio.gather(*(_note(worker, _run(worker, command), found) for worker in workers))
    if isinstance(command, UpdateWeights):
        found.versions = {worker.id: worker.weights_version for worker in workers}
    return found


async def _note(worker: Worker[Any], running: Coroutine[Any, Any, Any], found: CommandResults) -> None:
    try:
        found.results[worker.id] = await running
    except ShoalError as error:
        found.errors[worker.id] = error


async def _without_requests(worker: Worker[Any], command: Command[Any]) -> Any:
    """Runs the command without requests at the worker. Requests that no other worker can take wait for it."""
    with worker.held():
        await worker.wait_idle()
        return await _run(worker, command)


async def _run(worker: Worker[Any], command: Command[Any]) -> Any:
    """Runs the command, and records the worker's new state for the choice among workers."""
    if isinstance(command, Sleep):
        worker.set_sleep_level(command.level)  # before it sleeps, so that no request is sent there
    worker.num_commands += 1
    try:
        result = await worker.link.control(command)
    finally:
        worker.num_commands -= 1
        if isinstance(command, Sleep | WakeUp):
            state = await worker.link.control(ReadSleepState())
            worker.set_sleep_level(state.level)
    if isinstance(command, UpdateWeights):
        worker.weights_version = result
    return result
