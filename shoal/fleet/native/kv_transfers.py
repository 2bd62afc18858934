"""`KvTransfers`: KV transfer between workers: leases a request's blocks for the worker that continues it, if
reading is faster than computing. fleet_engine.py sends the ticket along; the workers copy the blocks
(engine/peers).

The worker with the blocks leases them: it gives the router a ticket, as a prefill worker does, with which the
other worker reads them. The blocks of a request that moves in mid-stream are at the worker that it leaves, if
that lives, or at another one that the index names. A new request gets a prefix from another worker only with
`enable_p2p`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import ShoalError
from shoal.fleet.index.indexer import Overlap
from shoal.fleet.native.remote_engine import RemoteEngine
from shoal.fleet.routing.dispatcher import Assignment, RoutingRequest
from shoal.fleet.routing.kv_router import KvRouter
from shoal.fleet.worker import Worker
from shoal.wire import LendKv, TakeBackKv

LEASE_TIMEOUT_S = 1.0  # for a ticket; without one the blocks are computed
# Assumptions until the first measurement: the speed between two GPUs of one host, optimistic since nothing
# would be measured if nothing were transferred, and a GPU that computes 10,000 tokens a second.
BYTES_PER_S = 2e10
PROMPT_TOKEN_S = 1e-4
# A ticket is made between two steps, and the transfer ends between two others.
OVERHEAD_S = 0.02


def is_transfer_faster(num_tokens: int, num_bytes: int, *, bytes_per_s: float, prompt_token_s: float) -> bool:
    """Returns whether reading the KV blocks of `num_tokens` tokens from another worker is faster than
    computing them. prompt_token_s: seconds of computing per prompt token."""
    return OVERHEAD_S + num_bytes / bytes_per_s < num_tokens * prompt_token_s


@dataclass(frozen=True, slots=True)
class KvLease:
    """A ticket for KV blocks, and the worker that holds them for it."""

    source: RemoteEngine
    ticket: bytes

    def release(self) -> None:
        """Has the worker free the blocks. A disconnected worker has freed them already."""
        self.source.send(TakeBackKv(self.ticket))


class KvTransfers:
    """`workers` returns all workers of a model, by id."""

    def __init__(
        self, workers: Callable[[], Mapping[str, Worker[RemoteEngine]]], router: KvRouter, *, enable_p2p: bool
    ) -> None:
        self.enable_p2p = enable_p2p
        self.num_leases: Counter[str] = Counter()  # leases by purpose: "migration", "prefix"
        self.num_refusals = 0  # requests for a lease without a ticket
        self._workers, self._router = workers, router

    async def lease_for(
        self, routing: RoutingRequest, assignment: Assignment[RemoteEngine]
    ) -> KvLease | None:
        """Leases the blocks that the assigned worker lacks from the worker that has most of them. Returns
        None if computing is faster, or no worker gives a ticket."""
        if not (routing.has_begun or self.enable_p2p) or not assignment.worker.info.reads_kv:
            return None
        found = self._router.active_requests.chain_of(routing.request_id)
        if found is None:
            return None
        _, chain, block_size = found
        overlaps = self._router.indexer.find_chain(chain)
        best, most = None, assignment.num_stored_tokens
        for worker in self._workers().values():
            if worker is assignment.worker or not can_lend(worker) or worker.info.block_size != block_size:
                continue
            tokens = block_size * max(overlaps.get(rank, Overlap()).device for rank in worker.ranks)
            if tokens > most:
                best, most = worker, tokens
        if best is None or not self.is_faster(most - assignment.num_stored_tokens, assignment.worker):
            return None
        return await self.request_lease(best, routing.token_ids, routing)

    def is_worth_moving(
        self, worker: Worker[RemoteEngine], num_tokens: int, others: Iterable[Worker[RemoteEngine]]
    ) -> bool:
        """Returns whether one of the others continues a request of `num_tokens` tokens sooner with this
        worker's blocks than without them."""
        return can_lend(worker) and any(
            other.info.reads_kv and self.is_faster(num_tokens, other) for other in others
        )

    def is_faster(self, num_tokens: int, worker: Worker[RemoteEngine]) -> bool:
        """Returns whether this worker reads the blocks of `num_tokens` tokens, with a snapshot of states if
        there are any, faster than it computes them, by its own measurements where it has any."""
        info, stats = worker.info, worker.stats
        bytes_per_s, prompt_token_s = BYTES_PER_S, PROMPT_TOKEN_S
        if stats is not None:
            reads = stats.kv_transfers.values()
            if seconds := sum(read.seconds for read in reads):
                bytes_per_s = max(1.0, sum(read.num_bytes for read in reads) / seconds)
            prompt_token_s = stats.prompt_token_s or PROMPT_TOKEN_S
        num_bytes = num_tokens * info.kv_block_bytes // info.block_size + info.state_bytes
        return is_transfer_faster(
            num_tokens, num_bytes, bytes_per_s=bytes_per_s, prompt_token_s=prompt_token_s
        )

    async def request_lease(
        self, source: Worker[RemoteEngine], token_ids: Sequence[int], routing: RoutingRequest
    ) -> KvLease | None:
        """Leases this worker's blocks of a request's tokens. Returns None without a ticket in
        LEASE_TIMEOUT_S."""
        link = source.link
        command = LendKv(list(token_ids), routing.cache_salt, routing.lora_name)
        asking = asyncio.create_task(link.control(command))
        try:
            ticket = await asyncio.wait_for(asyncio.shield(asking), LEASE_TIMEOUT_S)
        except (ShoalError, TimeoutError, asyncio.CancelledError) as error:
            asking.add_done_callback(lambda done: _return_late(link, done))
            if isinstance(error, asyncio.CancelledError):
                raise
            ticket = None
        if ticket is None:
            self.num_refusals += 1
            return None
        self.num_leases["migration" if routing.has_begun else "prefix"] += 1
        return KvLease(link, ticket)


def can_lend(worker: Worker[RemoteEngine]) -> bool:
    """Returns whether the worker can lease blocks; a draining one can."""
    return worker.is_reached and not worker.is_asleep and worker.info.lends_kv


def _return_late(link: RemoteEngine, asking: asyncio.Task[bytes | None]) -> None:
    """Releases a ticket that came after its request had stopped waiting."""
    if not asking.cancelled() and asking.exception() is None and (ticket := asking.result()) is not None:
        KvLease(link, ticket).release()
