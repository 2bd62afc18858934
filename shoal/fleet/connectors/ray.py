"""Workers on a Ray cluster: an actor each (fleet/connectors/ray_worker.py), in a placement group of its own.

The group reserves what the worker needs on one node, keeps it while the worker is started again there, moves
to another node when its node is lost, and tells Ray's autoscaler what is missing. Actors and groups end with
the process that made them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import ray
from ray import PlacementGroupID
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shoal.fleet.connectors.connector import ConnectorContext
from shoal.fleet.connectors.local import LocalConnector, Running, WorkersById
from shoal.fleet.connectors.ray_worker import Launch, Place, RayWorkerActor
from shoal.fleet.connectors.restarts import Restarts
from shoal.fleet.connectors.state_file import Placement, ProcessId
from shoal.fleet.tasks import start

logger = logging.getLogger(__name__)

SPARE_S = 10.0  # beyond a worker's grace, for an actor to say that its process has ended
ROOM_LOG_S = 10.0  # without a place, after which the log says so


class RayWorker:
    """One worker: its placement group, its actor, and the one after that."""

    def __init__(self, worker_id: str, resources: Mapping[str, float], launch: Launch) -> None:
        self.id = worker_id
        self._resources, self._launch = dict(resources), launch
        self._actor: Any = None
        self._place: Place | None = None  # where it lives, while it does
        self._began = asyncio.get_running_loop().time()  # its last life
        self._stopping = asyncio.Event()
        self.task = start(self._keep_alive())

    @property
    def is_crash_looping(self) -> bool:
        return self.task.done() and not self._stopping.is_set()

    async def stop(self, grace_s: float) -> None:
        """Returns when it has ended: by itself within `grace_s` seconds, or killed. It may be called again,
        with less, while it runs."""
        self._stopping.set()
        if self._actor is not None and self._place is not None and grace_s > 0:
            # A lost node does not answer. Then the task below ends by itself.
            asking = asyncio.create_task(_quietly(self._actor.stop.remote(grace_s)))
            await asyncio.wait([self.task], timeout=grace_s + SPARE_S)
            asking.cancel()
        self.task.cancel()  # changes nothing where it has ended
        await asyncio.gather(self.task, return_exceptions=True)

    async def _keep_alive(self) -> None:
        restarts = Restarts(self.id)
        while not self._stopping.is_set():
            try:
                async with _reserved(self._resources) as group:
                    while await self._may_live_again(restarts, await self._live(group)):
                        pass
                return
            except RayError as error:
                if not await self._may_live_again(restarts, f"Ray reserves nothing for it: {error}"):
                    return

    async def _may_live_again(self, restarts: Restarts, how: str | None) -> bool:
        """Waits until it may start again; False if it may not. `how`: it ended; None: its node was lost."""
        if self._stopping.is_set():
            return False
        if how is None:
            logger.error("%s has lost its node; it is started on another one", self.id)
            return True
        delay_s = restarts.delay_after(asyncio.get_running_loop().time() - self._began, how)
        if delay_s is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
        return delay_s is not None and not self._stopping.is_set()

    async def _live(self, group: PlacementGroup) -> str | None:
        """Runs it once. Returns how it ended; None if its node was lost."""
        self._actor = actor = await asyncio.to_thread(self._new_actor, group)
        try:
            placing = asyncio.ensure_future(actor.place.remote())
            if not (await asyncio.wait([placing], timeout=ROOM_LOG_S))[0]:
                logger.warning(
                    "%s waits for a node with room for %s; the cluster has free %s",
                    self.id,
                    self._resources,
                    await asyncio.to_thread(ray.available_resources),
                )
            self._place, self._began = await placing, asyncio.get_running_loop().time()
            logger.info("%s starts on node %s", self.id, self._place.host)
            return await actor.run.remote(self._launch)
        except RayTaskError as error:
            return str(error.cause)
        except RayError as error:
            nodes = await asyncio.to_thread(ray.nodes)
            alive = {node["NodeID"] for node in nodes if node["Alive"]}
            if self._place is not None and self._place.node_id not in alive:
                return None
            return f"its actor died: {str(error).strip().splitlines()[-1]}"
        finally:
            self._actor = self._place = None
            await asyncio.to_thread(ray.kill, actor)

    def _new_actor(self, group: PlacementGroup) -> Any:
        resources = dict(self._resources)
        return (
            ray.remote(RayWorkerActor)
            .options(
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            .remote(self.id)
        )


@contextlib.asynccontextmanager
async def _reserved(resources: Mapping[str, float]) -> AsyncIterator[PlacementGroup]:
    """Inside of the block these are reserved on one node, as soon as one has them."""
    # It has no name, as Ray may send the order twice, and refuses a name that is there.
    making = asyncio.create_task(
        asyncio.to_thread(placement_group, [dict(resources)], strategy="STRICT_PACK")
    )
    try:
        yield await asyncio.shield(making)
    finally:
        await asyncio.to_thread(remove_placement_group, await making)


class RayActors(WorkersById[RayWorker]):
    """All workers that this process has started on the cluster: a Supervisor. `fleet_key`: what they are
    given; `only_host`: as in Launch."""

    def __init__(self, fleet_key: bytes, only_host: str) -> None:
        super().__init__()
        self._fleet_key, self._only_host = fleet_key, only_host

    async def open(self, leftovers: Sequence[ProcessId]) -> None:
        """Gives back what a router before this one had reserved: Ray ends actors with the process that made
        them, but not always their groups."""
        await asyncio.to_thread(_remove_groups_of_this_job)

    async def running(self) -> dict[str, Running]:
        return {name: Running(None, worker.is_crash_looping) for name, worker in self._workers.items()}

    async def start(self, placement: Placement) -> None:
        launch = Launch(placement.command, dict(placement.environment), self._fleet_key, self._only_host)
        self._workers[placement.id] = RayWorker(placement.id, placement.component.resources, launch)


def ray_connector(context: ConnectorContext, fleet_key: bytes = b"", only_host: str = "") -> LocalConnector:
    """A Connector, for a process that is connected to the cluster. The rest is as in RayActors."""
    return LocalConnector(context, RayActors(fleet_key, only_host))


def _remove_groups_of_this_job() -> None:
    job = ray.get_runtime_context().get_job_id()  # a group's id ends with that of its job
    for name, group in placement_group_table().items():
        if name.endswith(job) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))


async def _quietly(asked: Any) -> None:
    with contextlib.suppress(RayError):
        await asked
