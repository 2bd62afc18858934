"""The KV blocks of prompts that this engine lends to other workers: it holds them, gives out tickets for
them, and lets go of them when they have been read or nobody wants them any more."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from shoal.api import KvLoans
from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.hashing import extend_keys
from shoal.kv.offer_server import OfferServer
from shoal.kv.offers import Offers
from shoal.kv.ticket import WindowAddress, unseal

DONE = "done"  # how an offer ends that a reader was done with


class KvLender:
    """All calls are made between steps, in the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        windows: Sequence[Sequence[WindowAddress]],
        block_size: int,
        host: str,
        port: int,
        lease_s: float,
    ) -> None:
        """`windows` are the addresses of each rank's cache. Readers ask at `host` and `port`. Raises
        ConfigError if that address can't be had."""
        self._scheduler, self._block_size = scheduler, block_size
        self._block_bytes = sum(rank[0].spec.block_bytes for rank in windows)
        self.offers = Offers(b"", windows, scheduler.pool.generation, time.monotonic, lease_s)
        self._server = OfferServer(self.offers, host, port)
        self._ended = Counter[str]()
        self._blocks_out = 0

    def offer(self, plan: StepPlan) -> dict[str, bytes]:
        """Offers the prompts that this step, which has run, has brought to their end. It must be called
        before the scheduler takes in the step's tokens. Returns a ticket for each request."""
        tickets = {}
        for entry in plan.scheduled[plan.num_decodes :]:
            seq = entry.seq
            num_full = (entry.start + entry.num_tokens) // self._block_size
            # A sequence without blocks has ended, or was preempted, since the step was launched.
            if not (seq.request.offers_kv and entry.samples and num_full and seq.block_ids):
                continue
            extend_keys(seq.keys, seq.root, seq.token_ids, self._block_size)
            blocks = seq.block_ids[:num_full]
            self._scheduler.lend(blocks)
            tickets[seq.request.request_id] = self.offers.offer(blocks, num_full, seq.keys[:num_full])
        return tickets

    def withdraw(self, ticket: bytes, why: str) -> None:
        """Takes back the blocks of a ticket that nobody was given."""
        self.offers.withdraw(why, unseal(ticket).id)

    def withdraw_all(self, why: str) -> None:
        self.offers.withdraw(why)
        self.settle()

    def settle(self) -> None:
        """Lets go of the blocks whose offers have ended."""
        self.offers.expire()
        for ended in self.offers.take_ended():
            self._scheduler.take_back(ended.blocks)
            self._ended[ended.failure or DONE] += 1
            if ended.failure is None:
                self._blocks_out += len(ended.blocks)

    def loans(self) -> KvLoans:
        self.settle()
        held = len(self.offers.held())
        blocks_out = self._blocks_out
        return KvLoans(
            self.offers.num_live, held, blocks_out, blocks_out * self._block_bytes, dict(self._ended)
        )

    def close(self) -> None:
        """Readers lose their connections. Safe to call twice."""
        self._server.close()
        self.withdraw_all("the engine was ended")
