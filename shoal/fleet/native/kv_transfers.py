"""KV blocks that go along with a request, from a worker that has them to the one that goes on with it, where
that is quicker than computing them.

The worker that has them gives the router a ticket, as a prefill worker does, and the other one reads them
with it. A request that moves in mid-stream finds them at the worker that it leaves, if that lives, or at any
other that the index names. A new request gets a prefix from another worker only with `enable_p2p`.
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

LEASE_TIMEOUT_S = 1.0  # a worker that gives no ticket within it is done without
# What is assumed until it is measured: a transfer between two GPUs of one host, which a first one that is
# slower corrects (nothing would ever be measured if nothing moved), and a GPU that computes 10,000 tokens a
# second.
BYTES_PER_S = 2e10
PROMPT_TOKEN_S = 1e-4
# A ticket is made between two steps, and the transfer ends between two others.
OVERHEAD_S = 0.02


def is_transfer_faster(num_tokens: int, num_bytes: int, *, bytes_per_s: float, prompt_token_s: float) -> bool:
    """Whether the KV blocks of so many tokens are there sooner if they are read from another worker than if
    they are computed. prompt_token_s: seconds that a worker computes at one token of a prompt."""
    return OVERHEAD_S + num_bytes / bytes_per_s < num_tokens * prompt_token_s


@dataclass(frozen=True, slots=True)
class KvLease:
    """A ticket for KV blocks, and the worker that holds them for it."""

    source: RemoteEngine
    ticket: bytes

    def release(self) -> None:
        """Nobody will use it. A worker that is gone needs no word."""
        self.source.tell(TakeBackKv(self.ticket))


class KvTransfers:
    """`workers`: all of a model, by id."""

    def __init__(
        self, workers: Callable[[], Mapping[str, Worker[RemoteEngine]]], router: KvRouter, *, enable_p2p: bool
    ) -> None:
        self.enable_p2p = enable_p2p
        self.num_leases: Counter[str] = Counter()  # tickets given, by what for: "migration", "prefix"
        self.num_refusals = 0  # of workers that were asked for one
        self._workers, self._router = workers, router

    async def lease_for(
        self, routing: RoutingRequest, assignment: Assignment[RemoteEngine]
    ) -> KvLease | None:
        """A ticket for what the worker of `place` lacks of the request's tokens, from the worker that has
        most of them. None where computing is quicker, or nobody lends."""
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
        """Whether a request of so many tokens goes on sooner at one of the others with this worker's blocks
        than without them."""
        return can_lend(worker) and any(
            other.info.reads_kv and self.is_faster(num_tokens, other) for other in others
        )

    def is_faster(self, num_tokens: int, worker: Worker[RemoteEngine]) -> bool:
        """Whether this worker has so many tokens' blocks sooner by reading them than by computing them, as
        far as it has measured either."""
        info, stats = worker.info, worker.stats
        bytes_per_s, prompt_token_s = BYTES_PER_S, PROMPT_TOKEN_S
        if stats is not None:
            reads = stats.kv_transfers.values()
            if seconds := sum(read.seconds for read in reads):
                bytes_per_s = max(1.0, sum(read.num_bytes for read in reads) / seconds)
            prompt_token_s = stats.prompt_token_s or PROMPT_TOKEN_S
        num_bytes = num_tokens * info.kv_block_bytes // info.block_size
        return is_transfer_faster(
            num_tokens, num_bytes, bytes_per_s=bytes_per_s, prompt_token_s=prompt_token_s
        )

    async def request_lease(
        self, source: Worker[RemoteEngine], token_ids: Sequence[int], routing: RoutingRequest
    ) -> KvLease | None:
        """A ticket for what this worker has of these tokens of a request, if it gives one soon."""
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
    """Whether it may be asked for blocks: one that drains may."""
    return worker.is_reached and not worker.is_asleep and worker.info.lends_kv


def _return_late(link: RemoteEngine, asking: asyncio.Task[bytes | None]) -> None:
    """Gives a ticket back that came when nobody waited for it any more."""
    if not asking.cancelled() and asking.exception() is None and (ticket := asking.result()) is not None:
        KvLease(link, ticket).release()
