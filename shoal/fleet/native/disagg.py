"""`PrefillPool`: disaggregated prefill: a prefill worker computes the prompt, and a decode worker continues.
routing/remote_prefill.py has the threshold; fleet_engine.py calls it and sends the rest to the decode worker.

The decode worker is chosen first, since its cache decides how much there is to compute. A prefill worker then
returns a ticket when it begins with the prompt, and the first token at its end. With the ticket the decode
worker reads the KV blocks that it lacks, layer by layer while later layers are computed. If anything fails,
the decode worker computes the prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing

from shoal.api import FinishReason, Output, Request
from shoal.collector import merge
from shoal.errors import ShoalError, WorkerFailedError
from shoal.fleet.clock import Clock
from shoal.fleet.config import FleetConfig
from shoal.fleet.native.kv_transfers import KvLease
from shoal.fleet.native.remote_engine import RemoteEngine
from shoal.fleet.routing.dispatcher import Assignment, Dispatcher, RoutingRequest
from shoal.fleet.routing.kv_router import KvRouter
from shoal.fleet.routing.remote_prefill import TOKENS_AHEAD, is_remote
from shoal.fleet.worker import Worker, at_worker, errors_of
from shoal.telemetry.logs import about
from shoal.text.request_builder import copy_params

logger = logging.getLogger(__name__)

PREFILL_WORKERS = 2  # after this many failed the prompt, the decode worker computes it
# Among this many of the oldest prompts, the one with the longest prefix cached on a free worker goes next.
LOOK_AHEAD = 16


class PrefillPool:
    """The prefill workers of one model, and the prompts that wait for them."""

    def __init__(self, router: KvRouter, config: FleetConfig, clock: Clock) -> None:
        self.max_local_prefill_length = config.max_local_prefill_length
        self.num_done = 0  # prompts computed by prefill workers
        self.fall_backs: Counter[str] = Counter()  # prompts left to decode workers, by reason
        self.dispatcher: Dispatcher[RemoteEngine] = Dispatcher(
            router, max_queued=config.max_prefill_queue_size, clock=clock
        )
        self.dispatcher.busy_prefill_tokens = TOKENS_AHEAD
        self.dispatcher.look_ahead = LOOK_AHEAD
        self._timeout_s = config.prefill_timeout

    def takes(self, request: Request, assignment: Assignment[RemoteEngine]) -> bool:
        """Returns whether a prefill worker should compute the prompt. assignment: at the decode worker."""
        dispatcher = self.dispatcher
        if assignment.num_prompt_tokens <= self.max_local_prefill_length:  # the common case is cheap
            return False
        if not assignment.worker.info.reads_kv:
            return False
        if request.embed or request.output_token_ids or request.params.skip_reading_prefix_cache:
            return False
        if not any(self._others(assignment)):
            return False
        # The decode worker needs room for one more token after the first.
        if assignment.num_prompt_tokens + 2 > _most_tokens(assignment):
            return False
        if not is_remote(
            assignment.num_prompt_tokens,
            assignment.num_stored_tokens,
            dispatcher.queue.length,
            max_local_prefill_length=self.max_local_prefill_length,
            max_prefill_queue_size=dispatcher.max_queued,
        ):
            return False
        return assignment.worker.info.role == "decode" or self._has_cheaper(assignment)

    def _others(self, assignment: Assignment[RemoteEngine]) -> Iterator[Worker[RemoteEngine]]:
        """Yields the workers that could compute the prompt for the assigned worker now."""
        for worker in self.dispatcher.workers.values():
            if (
                worker is not assignment.worker
                and worker.takes_requests
                and assignment.request.fits(worker.info)
            ):
                yield worker

    def _has_cheaper(self, assignment: Assignment[RemoteEngine]) -> bool:
        """Returns whether another worker computes the prompt at less cost than the assigned one, whose role
        is `both`. At equal cost the prompt stays, as no block needs to travel then."""
        router = self.dispatcher.router
        found = router.active_requests.chain_of(assignment.request_id)
        if not router.weighs_blocks or found is None:
            return False
        _, chain, block_size = found
        chains = {block_size: list(chain)}
        ranks = [rank for worker in self._others(assignment) for rank in worker.ranks]
        costs = router.choose_among(
            router.find(chains), assignment.num_prompt_tokens, chains, among=ranks
        ).costs
        return min(costs.values()) < assignment.choice.costs[assignment.choice.rank]

    async def first_token(
        self,
        request: Request,
        routing: RoutingRequest,
        assignment: Assignment[RemoteEngine],
        sent: Callable[[RemoteEngine, str], None],
        begun: Callable[[bytes], None],
    ) -> tuple[str, Output] | None:
        """Returns the prefill worker's id, and an Output with the first token and the ticket; the Output has
        a finish reason if the request ends with that token. Returns None if the decode worker has to compute
        the prompt, or to end an aborted request.

        routing, assignment: for the decode worker. sent: called with each worker that gets the request,
        and the request's id there. begun: called with the ticket when a worker begins with the prompt."""
        own = RoutingRequest(
            f"{request.request_id}.prefill",
            routing.token_ids,
            priority=routing.priority,
            session=routing.session,
            cache_salt=routing.cache_salt,
            lora_name=routing.lora_name,
            tags=routing.tags,
            excluded_worker=assignment.worker.id if assignment.worker.id in self.dispatcher.workers else None,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                worker_id, output = await self._from_any(request, own, sent, begun)
        except TimeoutError:
            self._fall_back(request, assignment, "late")
            return None
        except WorkerFailedError:
            self._fall_back(request, assignment, "failed")
            return None
        except ShoalError:  # it is full or asleep, or the request is invalid
            self._fall_back(request, assignment, "refused")
            return None
        finally:
            self.dispatcher.forget(own)
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            kind = "failed" if output.finish_reason == FinishReason.ERROR else "aborted"
            self._fall_back(request, assignment, kind)
            return None
        self.num_done += 1
        if output.finish_reason == FinishReason.LENGTH and request.params.max_tokens != 1:
            output.finish_reason = None
        if output.finish_reason is None and output.kv_ticket is None:
            self.fall_backs["no_ticket"] += 1
        return worker_id, output

    def _fall_back(self, request: Request, assignment: Assignment[RemoteEngine], kind: str) -> None:
        """Counts and logs that the decode worker computes the prompt after all."""
        self.fall_backs[kind] += 1
        text = f"is computed by worker {assignment.worker.id}: no prefill worker did ({kind})"
        logger.info(about(request.log_id, text, worker=assignment.worker.id, kind=kind))

    async def _from_any(
        self,
        request: Request,
        routing: RoutingRequest,
        sent: Callable[[RemoteEngine, str], None],
        begun: Callable[[bytes], None],
    ) -> tuple[str, Output]:
        """Like `_from_one`, with another worker if the first one fails. Raises ShoalError."""
        attempt = 0
        while True:
            attempt += 1
            asked = _for_prefill(request, f"{routing.request_id}{attempt}")
            try:
                return await self._from_one(asked, routing, sent, begun)
            except WorkerFailedError:
                if attempt >= PREFILL_WORKERS or not self._has_fresh_worker(routing):
                    raise

    def _has_fresh_worker(self, routing: RoutingRequest) -> bool:
        workers = self.dispatcher.workers.values()
        return any(
            worker.takes_requests and worker.id not in routing.tried and routing.fits(worker.info)
            for worker in workers
        )

    async def _from_one(
        self,
        asked: Request,
        routing: RoutingRequest,
        sent: Callable[[RemoteEngine, str], None],
        begun: Callable[[bytes], None],
    ) -> tuple[str, Output]:
        async with self.dispatcher.assign(routing) as assignment:
            self.dispatcher.forget(routing)  # its wait has ended
            worker, link = assignment.worker, assignment.worker.link
            assignment.on_broken = lambda: link.break_off(
                asked.request_id, WorkerFailedError(f"worker {worker.id} was abandoned: {worker.why}")
            )
            logger.debug(about(asked.log_id, f"goes to prefill worker {worker.id}", worker=worker.id))
            with errors_of(worker.id), closing(link.open(asked)) as stream:
                sent(link, asked.request_id)
                output = await stream.get()
                try:
                    if output.kv_ticket is not None and output.finish_reason is None:
                        begun(output.kv_ticket)
                    while output.finish_reason is None:
                        merge(output, await stream.get())
                except BaseException:  # nobody will read the blocks, for example as the client has left
                    if output.kv_ticket is not None:
                        KvLease(link, output.kv_ticket).release()
                    raise
            output.spans = [*assignment.take_spans(), *at_worker(output.spans, worker.id)]
            if output.token_ids:
                assignment.cached(output.num_cached_tokens)
                assignment.generated(len(output.token_ids))
                worker.num_prefills += 1
            return worker.id, output


def _for_prefill(request: Request, request_id: str) -> Request:
    """Returns the request up to its first token. It offers its blocks only if it continues after that."""
    params = copy_params(request.params)
    params.max_tokens, params.min_tokens = 1, min(1, params.min_tokens)
    offers_kv = request.params.max_tokens != 1
    return dataclasses.replace(request, request_id=request_id, params=params, offers_kv=offers_kv)


def _most_tokens(assignment: Assignment[RemoteEngine]) -> int:
    """Returns the maximum number of tokens of a request at the worker."""
    info = assignment.worker.link.card.info
    return min(info.max_model_len, info.kv_cache_tokens)
