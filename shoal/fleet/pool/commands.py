"""One verb for many workers: sleep, wake_up, update_weights and the rest of `shoal.control`.

At once means at the same time. Rolling means one worker after the other, each without requests meanwhile: it
gets nothing new, ends what it has, carries the verb out, and comes back. The first failure ends it there.
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
    """Raises ConfigError if one of them is foreign: such a worker knows none of these verbs."""
    if foreign := [worker.id for worker in workers if worker.info.is_foreign]:
        raise ConfigError(
            f"{', '.join(foreign)}: {name_of(command)} is for our own workers; name those (?workers=a,b)"
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
    """Other workers take its requests meanwhile. Those that no other can take wait for it."""
    with worker.held():
        await worker.wait_idle()
        return await _run(worker, command)


async def _run(worker: Worker[Any], command: Command[Any]) -> Any:
    """Carries it out, and notes what it means for the choice among workers."""
    if isinstance(command, Sleep):
        worker.set_sleep_level(command.level)  # from now on, so that nothing more is sent there
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
