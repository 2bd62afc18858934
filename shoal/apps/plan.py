"""`shoal plan FILE`: the planner of a running fleet, as a process of its own. Torch-free.

It observes and sizes the fleet by requests in the registry (fleet/scaling/scaled_fleet.py), so the fleet
continues when it ends, and another planner can take its place. A signal ends it; its changes continue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from typing import IO

from shoal.apps.fleet import fleet_name, open_record, place_of, plane_of, read_fleet
from shoal.errors import ConfigError
from shoal.fleet.clock import LoopClock
from shoal.fleet.connectors.state_file import fleet_folder
from shoal.fleet.file.fleet_file import FleetFile
from shoal.fleet.key import FleetKey
from shoal.fleet.registry.open import open_registry
from shoal.fleet.registry.registry import Registry
from shoal.fleet.scaling.loop import PlannerLoop
from shoal.fleet.scaling.scaled_fleet import RemoteFleet, become_planner, find_fleet
from shoal.server.run import heeding_signals
from shoal.tasks import stop
from shoal.telemetry import logs

logger = logging.getLogger(__name__)


def plan_fleet(
    path: str, state_dir: str | None = None, verbose: bool = False, *, no_operation: bool = False
) -> int:
    """Plans until a signal; returns the exit code. `state_dir`: the one of `shoal fleet up`. `no_operation`:
    it only advises, whatever the file says. Raises ShoalError for a fleet that cannot be planned, or has
    another planner."""
    file = read_fleet(path)
    if no_operation:
        file = dataclasses.replace(file, planner=dataclasses.replace(file.planner, no_operation=True))
    if file.planner.enabled:
        raise ConfigError(
            f"{path}: [planner] enabled must be left out for `shoal plan`, got true; remove it, as "
            "`shoal fleet up` plans itself with it"
        )
    try:
        file.check_planner()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    folder = fleet_folder(path, state_dir)
    url, name = plane_of(file, folder), fleet_name(place_of(path))
    logs.set_up(logging.DEBUG if verbose else logging.INFO, file.server.log_format, sys.stderr)
    with open_record(file.planner) as record:
        return asyncio.run(_until_signal(file, url, name, record))


async def _until_signal(file: FleetFile, url: str, name: str, record: IO[bytes] | None) -> int:
    drain, force = asyncio.Event(), asyncio.Event()
    key = FleetKey.read(file.router.fleet_key_file)
    with heeding_signals(drain, force):
        registry = open_registry(url, lease_s=file.router.lease, key=key)
        planning = asyncio.create_task(_plan(file, registry, name, record))
        waiting = asyncio.create_task(drain.wait())
        try:
            await asyncio.wait([planning, waiting], return_when=asyncio.FIRST_COMPLETED)
            if planning.done():
                planning.result()
        finally:
            await stop([planning, waiting])
            await registry.close()
    return 0


async def _plan(file: FleetFile, registry: Registry, own: str, record: IO[bytes] | None) -> None:
    logger.info("the planner looks for its fleet on the plane")
    name = await find_fleet(registry, own)
    await become_planner(registry, name)
    logger.info("planning for the fleet %s, mode %s", name, file.planner.mode)
    await PlannerLoop(file.planner, RemoteFleet(registry, name), LoopClock(), record).run()
