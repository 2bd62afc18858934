"""`RayWorkerActor`: the Ray actor of one worker, which runs `shoal serve` in its own process group. ray.py
makes the actor, and restarts the worker.

Ray reserves resources for the actor. Both end together: when the process ends, `run` returns and the
connector ends the actor; when the actor is killed or its connector dies, the kernel and Ray end the process.
The process's output goes to Ray's logs, under the worker's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import ray

from shoal.errors import ConfigError
from shoal.fleet.connectors.processes import dying_with, ended_in_words, kill_group
from shoal.fleet.connectors.ray_metrics import publishing
from shoal.fleet.connectors.state_file import filled


class Place(msgspec.Struct, frozen=True):
    """The node of an actor."""

    node_id: str
    host: str  # the node's address for other nodes


class Launch(msgspec.Struct, frozen=True):
    """The start of a worker on any node.

    command: its words. `{python}` stands for the node's interpreter, `{host}` for its address, `{http_port}`
    for a free port for the worker's HTTP server, and `{fleet_key_file}` for a file with the fleet key, which
    is made on the node. only_host: the address of the only node that can reach the plane; "": all can."""

    command: Sequence[str]
    environment: Mapping[str, str]
    fleet_key: bytes = b""
    only_host: str = ""


class RayWorkerActor:
    """The code of the actor. Ray calls its methods in one event loop."""

    def __init__(self, worker_id: str) -> None:
        self._id = worker_id
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    def __repr__(self) -> str:
        return self._id  # Ray's name for it in the logs

    async def place(self) -> Place:
        """Returns as soon as Ray has found a node for the actor."""
        return place_of_this_process()

    async def run(self, launch: Launch) -> str:
        """Runs the worker and returns how it ended. Raises ConfigError on a node that cannot reach the
        plane."""
        host = place_of_this_process().host
        if launch.only_host not in ("", host):
            raise ConfigError(
                f"node {host} cannot reach the fleet's plane, which is embedded on {launch.only_host}; give "
                'a NATS server that all nodes reach: [plane] url = "nats://HOST:4222"'
            )
        with tempfile.TemporaryDirectory(prefix=f"shoal-{self._id}-") as folder:  # 0700
            key_file = Path(folder, "fleet.key")
            key_file.write_bytes(launch.fleet_key)
            port = _free_port()
            values = {"python": sys.executable, "host": host, "http_port": port, "fleet_key_file": key_file}
            words = [filled(word, values) for word in launch.command]
            async with publishing(self._id, port):
                return await self._live(words, launch.environment)

    async def _live(self, words: Sequence[str], environment: Mapping[str, str]) -> str:
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        self._process = await asyncio.create_subprocess_exec(
            *dying_with(os.getpid(), words),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, **environment, "CUDA_VISIBLE_DEVICES": ",".join(gpus)},
            start_new_session=True,
        )
        if self._stopping.is_set():  # `stop` was called during the start
            self._signal(signal.SIGTERM)
        try:
            return ended_in_words(await self._process.wait())
        finally:
            kill_group(self._process.pid)

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, and kills the worker after `grace_s` seconds. Then `run` returns."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                kill_group(self._process.pid)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def place_of_this_process() -> Place:
    return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
