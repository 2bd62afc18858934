"""Checks of what is reached by sockets: our own ports, the plane, other engines' workers, a cluster."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp
import zmq

from shoal.doctor.finding import CheckTarget, Finding, Findings, fails, limited, works
from shoal.errors import ConfigError, ShoalError
from shoal.files.object_store import shown
from shoal.fleet.file.components import components_of_pods
from shoal.fleet.key import FleetKey
from shoal.fleet.registry.open import NATS, check_plane
from shoal.server.http.keys import check_admin_port
from shoal.server.run import check_tls, open_ports

if TYPE_CHECKING:
    from nats.aio.client import Client

ANSWER_S = 5.0  # for a server to answer
LEAST_PAYLOAD = 1 << 20  # bytes of a message, which is what NATS has if nobody says else
ROUND_TRIPS = 5  # the least of them is the distance; a busy machine is late for some
SLOW_S = 0.05  # a round trip to the plane; leases are renewed and requests sent by it
MOST_SKEW_S = 2.0
KUBECONFIG = os.path.expanduser("~/.kube/config")
RAYS_OWN = ("auto", "local")  # words for a cluster that Ray finds or starts on this host
POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def ports(asked: CheckTarget) -> Findings:
    server = asked.server
    about = f"port {server.port}" if server.uds is None else server.uds
    if server.admin_port is not None:
        about += f", admin port {server.admin_port}"
    is_asked = asked.is_given("port")
    try:
        check_admin_port(server)
        check_tls(server)
        for port in open_ports(server):
            port.close()
    except ConfigError as error:
        remedy = "Choose another --port (0: any that is free), or end what has it (ss -ltnp)."
        yield fails(about, str(error), "A server does not start here.", remedy, is_asked=is_asked)
    else:
        yield works(about, f"free, on {server.host}", is_asked=is_asked)


def plane(asked: CheckTarget) -> Findings:
    """The plane, and the fleet's key, which is read without a plane, too: a fleet that is started by its file
    has one that nobody names."""
    url, key_file = asked.router.plane, asked.router.fleet_key_file
    try:
        key = FleetKey.read(key_file)
    except ConfigError as error:
        yield fails("fleet key", str(error), "No process joins the fleet.", "Name another --fleet-key-file.")
        return
    if key is not None:
        yield works("fleet key", f"{key_file} holds one")
    if url is None:
        return
    about = f"plane {shown(url)}"
    try:
        check_plane(url, key)
    except ConfigError as error:
        yield fails(about, str(error), "No process joins the fleet.", "Change the URL, or give the key.")
        return
    if url.startswith(NATS):
        found = asyncio.run(_of_servers(url.split(",")))
        are_all_down = all(finding.verdict == "fails" for finding in found)
        for finding in found:
            yield finding if are_all_down or finding.verdict != "fails" else _one_of_many(finding)
    elif url.startswith("tcp://"):
        yield _embedded(about, url)
    else:
        yield _in_folder(about, Path(url.removeprefix("ipc://")))


def _one_of_many(finding: Finding) -> Finding:
    means = "The plane works by its other servers, and has one fewer to lose."
    return limited(finding.about, finding.found, means, finding.remedy)


async def _of_servers(urls: list[str]) -> list[Finding]:
    return await asyncio.gather(*(_nats(url) for url in urls))


async def _nats(url: str) -> Finding:
    about, means = f"plane {shown(url)}", "No worker joins the fleet, and no router sees one."
    try:
        from nats.aio.client import Client
        from nats.errors import Error
        from nats.js.errors import Error as JetStreamError
    except ImportError as error:
        return fails(about, f"nats-py cannot be imported: {error}", means, "pip install 'shoal[nats]'")
    client = Client()
    start = "Start it (nats-server -js), or correct the address, its user and its password."
    try:
        async with asyncio.timeout(ANSWER_S):
            await client.connect(url, allow_reconnect=False, connect_timeout=ANSWER_S, error_cb=_give_up)  # type: ignore[arg-type]
        round_trip_s = float("inf")
        for _ in range(ROUND_TRIPS):
            async with asyncio.timeout(ANSWER_S):
                round_trip_s = min(round_trip_s, await _round_trip_s(client))
    except TimeoutError:
        return fails(about, f"it does not answer within {ANSWER_S:g} s", means, start)
    except (OSError, Error) as error:
        return fails(about, f"it refuses: {str(error) or type(error).__name__}", means, start)
    try:
        async with asyncio.timeout(ANSWER_S):
            account = await client.jetstream().account_info()
    except (Error, JetStreamError, TimeoutError) as error:
        found = f"it answers, and JetStream does not: {str(error) or type(error).__name__}"
        return fails(about, found, means, "Start it with JetStream: nats-server -js.")
    finally:
        await client.close()
    found = f"{round_trip_s * 1000:.1f} ms away, JetStream with {account.streams} streams"
    if client.max_payload < LEAST_PAYLOAD:
        means = f"It takes messages of {client.max_payload} bytes at most, and long prompts are longer."
        return limited(
            about, found, means, "Raise max_payload in the server's configuration, to 1 MiB or more."
        )
    if round_trip_s > SLOW_S:
        means = "Each request's way to a worker takes that much longer."
        return limited(about, found, means, "Put the plane, routers and workers into one network.")
    return works(about, found)


async def _round_trip_s(client: Client) -> float:
    began = time.perf_counter()
    await client.flush()
    return time.perf_counter() - began


async def _give_up(error: Exception) -> None:
    """Has nats-py try once, where it would try on."""
    raise error


def _embedded(about: str, url: str) -> Finding:
    """Checks that this host's router can bind its plane there."""
    place = urlsplit(url)
    family = socket.AF_INET6 if ":" in (place.hostname or "") else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((place.hostname or "127.0.0.1", place.port or 0))
        except OSError as error:
            means = "If a router of this fleet runs already, it is there; else no worker can join."
            remedy = "End what has the port (ss -ltnp), or choose another."
            return limited(about, f"taken: {error.strerror}", means, remedy)
    return works(about, "free; the router makes it")


def _in_folder(about: str, path: Path) -> Finding:
    """Checks that this host's router can make its plane there: a socket, and a lock file beside it."""
    means = "No router can make it, so no process joins the fleet."
    if (length := len(os.fsencode(path))) > zmq.IPC_PATH_MAX_LEN:
        found = f"its path has {length} bytes, and a socket's path at most {zmq.IPC_PATH_MAX_LEN}"
        return fails(about, found, means, "Name a shorter path.")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        found = f"nothing can be made in {path.parent}: {error.strerror}"
        return fails(about, found, means, "Make that folder, writable for the router, or name another path.")
    return works(about, "of this host; the router makes it")


def workers(asked: CheckTarget) -> Findings:
    """The other engines' servers that a router begins with, and whether their clocks agree with ours."""
    if asked.router.workers:
        yield from asyncio.run(_of_workers(asked))


async def _of_workers(asked: CheckTarget) -> list[Finding]:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return [
            finding
            for findings in await asyncio.gather(
                *(_of_worker(session, spec.url, spec.api_key) for spec in asked.router.workers)
            )
            for finding in findings
        ]


async def _of_worker(session: aiohttp.ClientSession, url: str, api_key: str | None) -> list[Finding]:
    about, means = f"worker {url}", "The router leaves it out until it answers."
    remedy = "Start it, or correct its URL or its key (api_key_file)."
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    began = time.perf_counter()
    try:
        async with session.get(f"{url}/v1/models", headers=headers) as answer:
            await answer.read()
    except TimeoutError:
        return [fails(about, f"it does not answer within {ANSWER_S:g} s", means, remedy)]
    except aiohttp.ClientError as error:
        return [fails(about, f"it cannot be reached: {error}", means, remedy)]
    if answer.status != 200:
        return [fails(about, f"/v1/models is answered with {answer.status}", means, remedy)]
    found = [works(about, f"answers in {(time.perf_counter() - began) * 1000:.0f} ms")]
    if (date := answer.headers.get("Date")) is not None:
        found += _skew(url, date)
    return found


def _skew(url: str, date: str) -> list[Finding]:
    """`date` has whole seconds."""
    try:
        skew_s = parsedate_to_datetime(date).timestamp() + 0.5 - time.time()
    except ValueError:
        return []
    if abs(skew_s) <= MOST_SKEW_S:
        return []
    means = "Log lines and metrics of the two machines are out of order when they are sorted by time."
    found = f"{skew_s:+.0f} s from this machine's"
    return [limited(f"clock of {url}", found, means, "Run chrony or systemd-timesyncd on both hosts.")]


def kubernetes(asked: CheckTarget) -> Findings:
    """Checks that the connector could patch the Deployments of the fleet's workers."""
    is_asked = asked.planner.connector == "kubernetes"
    if not is_asked:
        where = os.environ.get("KUBECONFIG") or (KUBECONFIG if os.path.exists(KUBECONFIG) else None)
        if POD.exists() or where is not None:
            yield works("Kubernetes", f"access by {'this pod' if POD.exists() else where}", is_asked=False)
        return
    means = "The fleet does not start."
    try:
        asyncio.run(_deployments(asked))
    except ModuleNotFoundError as error:
        yield fails("Kubernetes", str(error), means, "pip install 'shoal[kubernetes]'")
    except TimeoutError:
        remedy = "Is the cluster's API server reachable from here?"
        yield fails("Kubernetes", f"no answer within {ANSWER_S:g} s", means, remedy)
    except (ShoalError, aiohttp.ClientError) as error:
        remedy = "Apply the manifests (deploy/kubernetes), and the Role that may patch their scale."
        yield fails("Kubernetes", str(error), means, remedy)
    else:
        yield works("Kubernetes", "the fleet's Deployments are there, and their scale can be read")


async def _deployments(asked: CheckTarget) -> None:
    from shoal.fleet.connectors.kubernetes import Cluster, deployment_of

    async with asyncio.timeout(ANSWER_S):
        cluster = await Cluster.connect()
        try:
            for component in components_of_pods(asked.fleet.workers, asked.router.plane):
                await cluster.replicas(deployment_of(component))
        finally:
            await cluster.close()


def ray(asked: CheckTarget) -> Findings:
    """Checks that the cluster that RAY_ADDRESS names takes connections."""
    address = os.environ.get("RAY_ADDRESS")
    if asked.planner.connector != "ray" or address in (None, *RAYS_OWN):
        return
    means = "shoal fleet up --on ray finds no cluster."
    remedy = "Start it (ray start --head), or correct RAY_ADDRESS."
    try:
        place = urlsplit(address if "://" in address else f"ray://{address}")
        with socket.create_connection((place.hostname or "", place.port or 6379), ANSWER_S):
            yield works(f"Ray at {address}", "takes connections")
    except (OSError, ValueError) as error:
        yield fails(f"Ray at {address}", f"it cannot be reached: {error}", means, remedy)
