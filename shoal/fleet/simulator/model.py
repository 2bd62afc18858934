"""`SimModel`: one model of a simulated fleet, with its workers by role, its router, and the prompts that wait
for a prefill worker."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.fleet.index.indexer import KvIndexer, WorkerRank
from shoal.fleet.index.prefix_tree import DEVICE, HOST
from shoal.fleet.planner.engine_profile import read_profile
from shoal.fleet.planner.observation import DecodeLoad, Observation
from shoal.fleet.routing.kv_router import KvRouter
from shoal.fleet.routing.policy import Choice
from shoal.fleet.routing.remote_prefill import TOKENS_AHEAD, is_remote
from shoal.fleet.simulator.config import SimConfig, SimWorkers
from shoal.fleet.simulator.timing import ProfileTiming, StepTiming, Timing, find_timing
from shoal.fleet.simulator.trace import TraceRequest
from shoal.fleet.simulator.worker import Links, Progress, SimRequest, SimWorker
from shoal.fleet.traffic import Traffic
from shoal.hashing import sequence_hashes

TRANSFER_LATENCY_S = 0.001  # from the first token to the first block's arrival, without the transfer of bytes


@dataclass(slots=True)
class Role:
    """The workers of one role. Workers in `leaving` finish their requests; workers in `ready` get new
    ones."""

    group: SimWorkers
    workers: dict[WorkerRank, SimWorker] = field(default_factory=dict)
    ready: list[WorkerRank] = field(default_factory=list)
    leaving: set[WorkerRank] = field(default_factory=set)
    num_starting: int = 0

    @property
    def num_workers(self) -> int:
        """All workers that hold GPUs."""
        return len(self.workers) + self.num_starting


class SimModel:
    """`name`: in the trace. `number_of`: numbers the workers of the whole fleet."""

    def __init__(
        self,
        name: str,
        config: SimConfig,
        block_size: int,
        clock: Callable[[], float],
        number_of: Callable[[], int],
    ) -> None:
        self.name, self.traffic = name, Traffic()
        self.roles: dict[str, Role] = {}
        self.num_remote = 0  # prompts computed by a prefill worker
        self._config, self._block_size, self._clock, self._number_of = config, block_size, clock, number_of
        self._timings: dict[str, Timing] = {}
        self._measured = None if config.profile is None else ProfileTiming(read_profile(config.profile))
        # Requests that wait for a prefill worker, with their decode workers.
        self._waiting: deque[tuple[SimRequest, WorkerRank]] = deque()
        self._decoding_at: dict[
            str, tuple[SimRequest, WorkerRank]
        ] = {}  # while a prefill worker computes the prompt
        groups = [group for group in config.workers if config.name_of(group) == name]
        for group in groups:
            role = self.roles.setdefault(group.role, Role(group))
            for _ in range(group.count):
                self._make(role, group)
        self.router = KvRouter(
            KvIndexer(block_size),
            workers=[rank for role in self.roles.values() for rank in role.ready],
            policy=config.policy,
            weights=config.weights,
            seed=config.seed,
            clock=clock,
        )

    @property
    def decode_role(self) -> str:
        return "decode" if "decode" in self.roles else "both"

    def timing_of(self, group: SimWorkers) -> Timing:
        model = group.model or self._config.model
        if model not in self._timings:
            self._timings[model] = find_timing(self._config.gpu, model)
        return self._timings[model]

    def cache_tokens_of(self, group: SimWorkers) -> int:
        if self._config.cache_tokens is not None:
            return self._config.cache_tokens
        if self._measured is not None:
            return self._measured.data.max_kv_tokens
        return self.timing_of(group).cache_tokens(group.gpu_memory_utilization)

    # Changes of workers

    def _make(self, role: Role, group: SimWorkers) -> WorkerRank:
        timing: StepTiming
        if self._measured is not None:
            timing, links = self._measured, Links()
            max_num_seqs = min(group.max_num_seqs, self._measured.data.max_num_seqs)
        else:
            timing, max_num_seqs = self.timing_of(group), group.max_num_seqs
            links = Links(
                host_tokens=group.kv_host_bytes // timing.kv_bytes,
                host_token_s=timing.host_token_s,
                peer_token_s=timing.kv_bytes / (self._config.transfer_GB_s * 1e9),
                peer_latency_s=TRANSFER_LATENCY_S,
            )
        rank = WorkerRank(f"sim-{self._number_of()}")
        role.workers[rank] = SimWorker(
            timing,
            self.cache_tokens_of(group),
            self._block_size,
            max_num_seqs,
            group.max_num_batched_tokens,
            links,
        )
        role.ready.append(rank)
        return rank

    def started(self, name: str) -> None:
        """Makes a new worker of this role serve."""
        role = self.roles[name]
        role.num_starting -= 1
        self.router.add_worker(self._make(role, role.group))

    def dismiss(self, name: str) -> WorkerRank | None:
        """Drains the least loaded worker of this role. Returns it if it is already idle."""
        role = self.roles[name]
        least_loaded = self._least_loaded(role)
        role.ready.remove(least_loaded)
        role.leaving.add(least_loaded)
        return least_loaded if self.may_leave(least_loaded) else None

    def change_role(self, name: str, to: str) -> None:
        """Changes the role of the least loaded worker from `name` to `to`. Its requests continue."""
        role, new = self.roles[name], self.roles[to]
        least_loaded = self._least_loaded(role)
        role.ready.remove(least_loaded)
        new.workers[least_loaded] = role.workers.pop(least_loaded)
        new.ready.append(least_loaded)

    def leavers(self) -> list[WorkerRank]:
        """Returns the idle draining workers."""
        leaving = [rank for role in self.roles.values() for rank in role.leaving]
        return [rank for rank in sorted(leaving) if self.may_leave(rank)]

    def may_leave(self, rank: WorkerRank) -> bool:
        """Returns True if the worker drains and is idle."""
        role = self._role_of(rank)
        if rank not in role.leaving or not role.workers[rank].is_idle:
            return False
        # Requests whose prompts are computed elsewhere already belong to the worker.
        return not self.router.active_requests.load(rank).active_requests

    def leave(self, rank: WorkerRank) -> None:
        role = self._role_of(rank)
        role.leaving.discard(rank)
        del role.workers[rank]
        self.router.remove_worker(rank)

    def _least_loaded(self, role: Role) -> WorkerRank:
        return min(role.ready, key=lambda rank: (role.workers[rank].kv_usage, rank))

    def _role_of(self, rank: WorkerRank) -> Role:
        return next(role for role in self.roles.values() if rank in role.workers)

    def worker(self, rank: WorkerRank) -> SimWorker | None:
        for role in self.roles.values():
            if (found := role.workers.get(rank)) is not None:
                return found
        return None

    def observe(self) -> Observation:
        """Returns the planner's observation."""
        decode, prefill = self.roles[self.decode_role], self.roles.get("prefill")
        return Observation(
            at=self._clock(),
            decode=[
                DecodeLoad(round(worker.kv_usage, 6), len(worker.waiting))
                for worker in map(decode.workers.__getitem__, decode.ready)
            ],
            decode_role=self.decode_role,
            prefill_workers=0 if prefill is None else len(prefill.ready),
            prefill_queue=len(self._waiting),
            pending=sum(role.num_starting + len(role.leaving) for role in self.roles.values()),
            traffic=copy.copy(self.traffic),
        )

    # Requests. Methods return the workers that have received one.

    def arrive(self, name: str, asked: TraceRequest) -> list[WorkerRank]:
        chain = sequence_hashes(asked.hash_ids)
        request = SimRequest(
            name, self._clock(), asked.input_length, asked.output_length, chain, asked.hash_ids, asked.session
        )
        self.traffic.arrived(request.num_tokens)
        choice = self._choose(request, request.id, self.roles[self.decode_role].ready)
        rank = choice.rank
        if self._is_remote(request, choice):
            self.router.active_requests.prefill_remotely(request.id)
            self._waiting.append((request, rank))
            return self.send_prompts()
        self._add(rank, request)
        return [rank]

    def _choose(self, request: SimRequest, request_id: str, among: list[WorkerRank]) -> Choice:
        chains = {self._block_size: list(request.chain)}
        return self.router.schedule_chains(
            request.num_tokens, chains, request_id=request_id, session=request.session, among=among
        )

    def _is_remote(self, request: SimRequest, choice: Choice) -> bool:
        prefill, most = self.roles.get("prefill"), self._config.max_local_prefill_length
        if prefill is None or not prefill.ready or request.num_tokens <= most:
            return False
        return is_remote(
            request.num_tokens,
            self.router.num_stored_tokens(choice, request.id),
            len(self._waiting),
            max_local_prefill_length=most,
            max_prefill_queue_size=self._config.max_prefill_queue_size,
        )

    def send_prompts(self) -> list[WorkerRank]:
        """Sends waiting prompts to prefill workers, up to their limits. Without prefill workers, the decode
        workers compute them."""
        got = []
        while self._waiting:
            if not self.roles["prefill"].ready:
                request, decode_rank = self._waiting.popleft()
                self.router.active_requests.prefill_locally(request.id)
                self._add(decode_rank, request)
                got.append(decode_rank)
                continue
            load = self.router.active_requests.load
            free = [r for r in self.roles["prefill"].ready if load(r).prefill_tokens <= TOKENS_AHEAD]
            if not free:
                break
            request, decode_rank = self._waiting.popleft()
            prompt_id = f"{request.id}.prefill"
            rank = self._choose(request, prompt_id, free).rank
            self._decoding_at[prompt_id] = request, decode_rank
            prompt = SimRequest(
                prompt_id, request.arrival_s, request.num_tokens, 1, request.chain, request.own_hashes
            )
            self._add(rank, prompt)
            got.append(rank)
        return got

    def _add(self, rank: WorkerRank, request: SimRequest) -> None:
        worker = self.worker(rank)
        assert worker is not None
        worker.add(request)

    # Results of a run

    def keep_books(self, progress: Progress) -> tuple[list[SimRequest], list[WorkerRank]]:
        """Returns the finished requests, and the workers with new requests."""
        active_requests = self.router.active_requests
        ended, got = [], []
        for request in progress.first:
            active_requests.first_token(request.id)
            if request.id not in self._decoding_at:
                self.traffic.began(request.first_token_s - request.arrival_s)
        for request in progress.decoded:
            active_requests.generated(request.id, progress.num_steps)
        for request in progress.ended:
            active_requests.end(request.id)
            if request.id in self._decoding_at:
                request, rank = self._prefilled(request)
                if request.end_s < 0:
                    got.append(rank)
                    continue
            self.traffic.ended(request.num_generated, request.end_s - request.first_token_s)
            ended.append(request)
        if self._waiting:
            got += self.send_prompts()
        return ended, got

    def _prefilled(self, prompt: SimRequest) -> tuple[SimRequest, WorkerRank]:
        """Continues a request at its decode worker after its prompt and first token."""
        request, rank = self._decoding_at.pop(prompt.id)
        self.num_remote += 1
        request.first_token_s = request.last_token_s = prompt.end_s
        request.cached_tokens, request.host_tokens = prompt.cached_tokens, prompt.host_tokens
        request.num_generated = 1
        self.traffic.began(request.first_token_s - request.arrival_s)
        if request.output_length == 1:
            request.end_s = prompt.end_s
            self.router.active_requests.end(request.id)
        else:
            request.is_remote = True
            self._add(rank, request)
        return request, rank

    def publish(self, rank: WorkerRank, worker: SimWorker) -> None:
        self.router.published(rank, worker.kv_usage, len(worker.waiting))

    def apply_kv_events(self, rank: WorkerRank, progress: Progress) -> None:
        """Applies the KV events of a run, unless the policy is `kv_approx`, which has none."""
        if self._config.policy == "kv_approx" or self.worker(rank) is None:
            return
        index = self.router.indexer
        for block, own_hash, parent in progress.host_stored:
            index.store(rank, HOST, [block], [own_hash], parent)
        for block in progress.host_removed:
            index.remove(rank, HOST, block)
        for block in progress.removed:
            index.remove(rank, DEVICE, block)
        for request, start, end in progress.stored:
            parent = request.chain[start - 1] if start else None
            index.store(rank, DEVICE, request.chain[start:end], request.own_hashes[start:end], parent)
