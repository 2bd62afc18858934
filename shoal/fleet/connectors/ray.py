"""`RayActors`: a Supervisor of workers on a Ray cluster, each with an actor in its own placement group.
ray_worker.py runs in the actor; local.py records the workers.

The group reserves the worker's resources on one node, keeps them while the worker restarts, moves to another
node when its node is lost, and reports missing resources to Ray's autoscaler. Actors and groups end with the
process that made them.
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
from shoal.tasks import start

logger = logging.getLogger(__name__)

SPARE_S = 10.0  # after a worker's grace, for its actor to report the end of the process
ROOM_LOG_S = 10.0  # waiting time for a node after which the log says so


class RayWorker:
    """One worker: its placement group, its actor, and the following ones after restarts."""

    def __init__(self, worker_id: str, resources: Mapping[str, float], launch: Launch) -> None:
        self.id = worker_id
        self._resources, self._launch = dict(resources), launch
        self._actor: Any = None
        self._place: Place | None = None  # the actor's node, while it runs
        self._began = asyncio.get_running_loop().time()  # start of the last process
        self._stopping = asyncio.Event()
        self.task = start(self._keep_alive())

    @property
    def is_crash_looping(self) -> bool:
        return self.task.done() and not self._stopping.is_set()

    async def stop(self, grace_s: float) -> None:
        """Ends the worker, kills it after `grace_s` seconds, and returns when it has ended. May be called
        again with a shorter grace while it runs."""
        self._stopping.set()
        if self._actor is not None and self._place is not None and grace_s > 0:
            # A lost node does not answer; then the task ends by itself.
            asking = asyncio.create_task(_quietly(self._actor.stop.remote(grace_s)))
            await asyncio.wait([self.task], timeout=grace_s + SPARE_S)
            asking.cancel()
        self.task.cancel()  # no effect if it has ended
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
                if not await self._may_live_again(restarts, f"Ray has not reserved its resources: {error}"):
                    return

    async def _may_live_again(self, restarts: Restarts, how: str | None) -> bool:
        """Waits until the worker may restart; returns False if it may not. `how`: the kind of its end; None:
        its node was lost."""
        if self._stopping.is_set():
            return False
        if how is None:
            logger.error("%s has lost its node; it is restarted on another one", self.id)
            return True
        delay_s = restarts.delay_after(asyncio.get_running_loop().time() - self._began, how)
        if delay_s is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
        return delay_s is not None and not self._stopping.is_set()

    async def _live(self, group: PlacementGroup) -> str | None:
        """Runs the worker once. Returns how it ended; None if its node was lost."""
        self._actor = actor = await asyncio.to_thread(self._new_actor, group)
        try:
            placing = asyncio.ensure_future(actor.place.remote())
            if not (await asyncio.wait([placing], timeout=ROOM_LOG_S))[0]:
                logger.warning(
                    "%s waits for a node with free %s; the cluster has free %s",
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
    """Reserves these resources on one node, as soon as one has them free, until the block is left."""
    # Without a name, as Ray may send the request twice and refuses a name that exists.
    making = asyncio.create_task(
        asyncio.to_thread(placement_group, [dict(resources)], strategy="STRICT_PACK")
    )
    try:
        yield await asyncio.shield(making)
    finally:
        await asyncio.to_thread(remove_placement_group, await making)


class RayActors(WorkersById[RayWorker]):
    """A Supervisor of the workers that this process has started on the cluster. `fleet_key` is passed to the
    workers; `only_host`: as in Launch."""

    def __init__(self, fleet_key: bytes, only_host: str) -> None:
        super().__init__()
        self._fleet_key, self._only_host = fleet_key, only_host

    async def open(self, leftovers: Sequence[ProcessId]) -> None:
        """Releases the reservations of a previous router: Ray ends actors with the process that made them,
        but not always their groups."""
        await asyncio.to_thread(_remove_groups_of_this_job)

    async def running(self) -> dict[str, Running]:
        return {name: Running(None, worker.is_crash_looping) for name, worker in self._workers.items()}

    async def start(self, placement: Placement) -> None:
        launch = Launch(placement.command, dict(placement.environment), self._fleet_key, self._only_host)
        self._workers[placement.id] = RayWorker(placement.id, placement.component.resources, launch)


def ray_connector(context: ConnectorContext, fleet_key: bytes = b"", only_host: str = "") -> LocalConnector:
    """Returns a Connector for a process that is connected to the cluster. Other arguments: as in
    RayActors."""
    return LocalConnector(context, RayActors(fleet_key, only_host))


def _remove_groups_of_this_job() -> None:
    job = ray.get_runtime_context().get_job_id()  # a group's id ends with its job's id
    for name, group in placement_group_table().items():
        if name.endswith(job) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))


async def _quietly(asked: Any) -> None:
    with contextlib.suppress(RayError):
        await asked
