"""Native workers in the registry: a worker's `Member`, and `watch_workers`, by which a router follows them.
The connection to a worker is remote_engine.py's; leases are the registry's (registry/registry.py)."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shoal.errors import ConfigError
from shoal.fleet.key import FleetKey
from shoal.fleet.native.remote_engine import RemoteEngine
from shoal.fleet.native.worker_wire import Report
from shoal.fleet.registry.registry import ROLES, Member, Registry
from shoal.fleet.worker import Worker, WorkerInfo, WorkerLoad
from shoal.hashing import WIRE_SEED
from shoal.model_card import ModelCard

logger = logging.getLogger(__name__)


class WorkerDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The details of a worker's Member."""

    card: ModelCard
    port: str  # where it serves tokens: tcp://HOST:PORT
    pid: int
    host: str  # name of its machine
    hash_seed: int = WIRE_SEED
    is_draining: bool = False
    tags: list[str] = []


def member_of(
    worker_id: str,
    role: str,
    url: str,
    port: str,
    card: ModelCard,
    *,
    tags: Sequence[str] = (),
    is_draining: bool = False,
) -> Member:
    """Returns this process as a worker's member. `url`: its HTTP server's."""
    details = WorkerDetails(
        card=card,
        port=port,
        pid=os.getpid(),
        host=socket.gethostname(),
        is_draining=is_draining,
        tags=list(tags),
    )
    return Member(
        id=worker_id, role=role, address=url, model=card.names[0], details=msgspec.to_builtins(details)
    )


async def watch_workers(
    registry: Registry,
    key: FleetKey | None,
    on_join: Callable[[Worker[RemoteEngine]], None],
    on_leave: Callable[[str], None],
    on_role: Callable[[Worker[RemoteEngine], str], None],
    on_load: Callable[[str, list[WorkerLoad]], None] = lambda worker_id, loads: None,
) -> None:
    """Calls `on_join` for each worker that joins, with a link that connects by itself, and `on_leave` with
    the id of one that has left or died; the callbacks close the link. `on_role` is called when a worker has
    changed its role, and updates its info; `on_load` gets the loads that workers report. Runs until it is
    cancelled.

    A worker whose other fields change leaves and joins again, except for draining, which its Worker shows. A
    member that cannot be read is ignored, and the log names it."""
    known: dict[str, Member] = {}
    workers: dict[str, Worker[RemoteEngine]] = {}
    draining: dict[str, bool] = {}  # as each worker reports it; an operator may drain it here, too
    async for members in registry.watch():
        current = {name: member for name, member in members.items() if member.role in ROLES}
        for worker_id in [name for name in known if name not in current]:
            del known[worker_id]
            if workers.pop(worker_id, None) is not None:
                logger.info("worker %s has left the plane", worker_id)
                on_leave(worker_id)
        for worker_id, member in current.items():
            if known.get(worker_id) == member:
                continue
            known[worker_id] = member
            details = read_details(member)
            found = None
            there = workers.get(worker_id)
            if there is not None and details is not None and _is_same(there, member, details):
                if draining[worker_id] != details.is_draining:
                    draining[worker_id] = details.is_draining
                    there.drain(details.is_draining)
                if there.info.role != member.role:
                    on_role(there, member.role)
                continue
            if there is not None:
                del workers[worker_id]
                on_leave(worker_id)
            if details is not None:
                found = _worker_of(member, details, key, registry.clock.now, on_load)
            if found is not None:
                workers[worker_id], draining[worker_id] = found, found.is_draining
                on_join(found)


def read_details(member: Member) -> WorkerDetails | None:
    """Returns None, and logs it, for details that cannot be read."""
    try:
        return msgspec.convert(member.details, WorkerDetails)
    except msgspec.ValidationError as error:
        logger.warning(
            "worker %s is ignored: its details on the plane cannot be read (%s); is its version another?",
            member.id,
            error,
        )
        return None


def _is_same(worker: Worker[RemoteEngine], member: Member, details: WorkerDetails) -> bool:
    if worker.info.url != member.address:
        return False
    if worker.info.tags != set(details.tags):
        return False
    return worker.link.address == details.port and worker.link.card == details.card


def link_to(member: Member, details: WorkerDetails, key: FleetKey | None) -> RemoteEngine | None:
    """Returns a link that connects by itself; None, and logs it, for an invalid address."""
    card = details.card
    info = WorkerInfo(
        id=member.id,
        url=member.address,
        models=tuple(card.names),
        role=member.role,
        tags=frozenset(details.tags),
        pid=details.pid if details.host == socket.gethostname() else None,
        block_size=card.info.block_size,
        total_blocks=card.info.kv_cache_tokens // card.info.block_size,
        max_running=card.info.max_num_seqs,
        kv_block_bytes=card.info.kv_block_bytes,
        state_bytes=card.info.state_bytes,
        lends_kv=card.info.lends_kv,
        reads_kv=card.info.reads_kv,
        identity=_identity(details),
    )
    try:
        return RemoteEngine(info, card, details.port, key)
    except ConfigError as error:
        logger.warning("worker %s is ignored: %s", member.id, error)
        return None


def _worker_of(
    member: Member,
    details: WorkerDetails,
    key: FleetKey | None,
    clock: Callable[[], float],
    on_load: Callable[[str, list[WorkerLoad]], None],
) -> Worker[RemoteEngine] | None:
    """Returns None for an invalid address."""
    link = link_to(member, details, key)
    if link is None:
        return None
    worker = Worker(link.info, link, clock)
    worker.is_draining = details.is_draining
    link.on_outputs, link.on_lost = worker.delivered, worker.failed

    def reported(report: Report) -> None:
        worker.set_sleep_level(report.sleep.level)
        worker.weights_version = report.weights_version
        worker.stats, worker.served = report.stats, report.served
        on_load(worker.id, link.current_loads())

    link.on_report = reported
    return worker


def _identity(details: WorkerDetails) -> dict[str, Any]:
    return {**details.card.kind, "hash seed": details.hash_seed}
