"""Converts the workers of a fleet's file to components for a Ray cluster: command lines, Ray's reservations,
and checks that the cluster can run them.

A worker's ranks are processes of one host, which their launcher connects over the loopback. So each worker
reserves one bundle, which Ray keeps on one node. A `Node` is an entry of `ray.nodes()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from shoal.errors import ConfigError
from shoal.fleet.connectors.connector import Component
from shoal.fleet.file.components import Group, names_of, serve_words
from shoal.fleet.file.fleet_file import ExternalWorkers, NativeWorkers
from shoal.fleet.registry.open import NATS
from shoal.hosts import is_loopback

Node = Mapping[str, Any]


def ray_components(
    groups: Sequence[Group],
    nodes: Iterable[Node],
    plane_url: str,
    *,
    more_words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    prefix: str = "",
) -> list[Component]:
    """Returns a component for each group. `more_words` and `environment`: for each worker; `prefix`: of all
    names. Workers get GPUs if the cluster has any, unless their options differ. Raises ConfigError for
    workers that Ray does not start, and for a worker with more GPUs than any node has."""
    most_gpus = max((gpus_of(node) for node in nodes), default=0)
    components = []
    for number, (group, name) in enumerate(zip(groups, names_of(groups, prefix)), 1):
        try:
            resources = bundle_of(group, most_gpus)
        except ConfigError as error:
            raise ConfigError(f"[[workers]] {number}: {error}") from None
        assert isinstance(group, NativeWorkers)
        words = serve_words(group, plane_url, port="{http_port}")
        words += ["--fleet-key-file", "{fleet_key_file}"]
        if plane_url.startswith(NATS) and "fleet_host" not in group.options:
            words += ["--fleet-host", "{host}"]  # other nodes may join a single host later
        components.append(
            Component(
                name=name,
                command=("{python}", "-m", "shoal", *words, *more_words),
                model=group.served_name,
                role=group.role,
                count=group.count,
                environment=environment or {},
                devices_per_worker=group.devices_per_worker,
                resources=resources,
            )
        )
    return components


def bundle_of(group: Group, most_gpus: int) -> dict[str, float]:
    """Returns Ray's reservation for one worker, on one node. `most_gpus`: GPUs of the cluster's largest node;
    0 without GPUs so far. Raises ConfigError as ray_components does."""
    if isinstance(group, ExternalWorkers):
        raise ConfigError(
            "a command is started on one host alone, not on Ray; start these servers otherwise, and name "
            'them in [router]: worker = ["http://HOST:PORT"]'
        )
    if group.devices is not None:
        raise ConfigError(
            f"devices must be left out on Ray, which chooses the GPUs, got {group.devices}; remove it"
        )
    device = group.options.get("device", "auto")
    if device == "cpu" or (device == "auto" and most_gpus == 0):
        return {"CPU": 1.0, **group.resources}
    wanted = group.devices_per_worker
    if 0 < most_gpus < wanted:
        raise ConfigError(
            f"tensor_parallel_size {wanted} needs {wanted} GPUs of one node, as the ranks of a worker are "
            f"processes of one host, and the largest node has {most_gpus}; lower it to {most_gpus}, or add "
            "larger nodes"
        )
    return {"CPU": 1.0, "GPU": float(wanted), **group.resources}


def gpus_of(node: Node) -> int:
    return int(node["Resources"].get("GPU", 0))


def hosts_of(nodes: Iterable[Node]) -> set[str]:
    """Returns the addresses of the machines; several nodes may share one."""
    return {node["NodeManagerAddress"] for node in nodes}


def check_reach(plane_url: str | None, hosts: set[str]) -> None:
    """Raises ConfigError for a plane that some of these hosts cannot reach. `plane_url`: None: an embedded
    one."""
    if len(hosts) < 2:
        return
    if plane_url is None or not plane_url.startswith(NATS):
        given = "the embedded plane" if plane_url is None else f"plane {plane_url!r}"
        raise ConfigError(
            f"{given} is for one host, and the Ray cluster has {len(hosts)} ({', '.join(sorted(hosts)[:4])}"
            f"{', ...' if len(hosts) > 4 else ''}); start a NATS server that all of them reach, and write "
            '[plane] url = "nats://HOST:4222"'
        )
    for url in plane_url.split(","):
        host = urlsplit(url).hostname or ""
        if is_loopback(host):
            raise ConfigError(
                f"plane {url!r} is another one on each of the Ray cluster's {len(hosts)} hosts; write the "
                "address by which all of them reach the NATS server"
            )
