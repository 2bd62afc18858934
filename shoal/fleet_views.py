"""How a fleet looks from outside: views of workers, models, queues and planners, for pages, `shoal top`
and the admin API."""

from __future__ import annotations

import enum

import msgspec

from shoal.stats import Stats
from shoal.telemetry.served import Quantiles, RecentRates


class WorkerState(enum.StrEnum):
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, and gets nothing new
    BROKEN = "broken"  # not reached yet, or failing; probes find out when it is well
    GONE = "gone"  # its lease has ended, or it was removed


class TierView(msgspec.Struct):
    """A worker's place for KV blocks. Counts are since the worker's start."""

    usage: float | None = None  # the share that is in use; None: not known
    used_blocks: int = 0
    total_blocks: int = 0  # 0: not known
    stored_blocks: int = 0  # that came from above
    fetched_blocks: int = 0  # brought back to the device
    failed_blocks: int = 0


class WorkerView(msgspec.Struct, kw_only=True):
    """One worker, as `GET /fleet` shows it; a server without a router is one itself. Blocks are of the
    worker's own size."""

    id: str
    url: str
    role: str  # "both", "prefill", "decode"
    model: str
    state: WorkerState
    why: str = ""  # it gets nothing, where that is not plain
    pid: int | None = None  # of a worker on this host
    tags: list[str] = []
    running: int = 0  # requests that it computes, as it says itself
    waiting: int = 0  # requests that wait in it
    preemptions: int = 0
    kv: dict[str, TierView] = {}  # "device", "host", "disk", "store": those there are
    recent: RecentRates = RecentRates()
    active_requests: int = 0  # of the router's
    active_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    requests: int = 0  # that it was sent, since the router's start
    hit_rate: float = 0.0  # the share of prompt tokens that it had cached
    asleep: bool = False
    weights_version: int = 0
    prefills_done: int = 0  # prompts that it computed for other workers, since the router's start
    # KV blocks, since the worker's start:
    blocks_in: int = 0  # read from other workers
    blocks_out: int = 0  # that others have read here
    bytes_in: int = 0
    bytes_out: int = 0
    transfer_failures: dict[str, int] = {}  # requests that computed blocks which another worker had, by kind
    transfer_GB_s: float = 0.0  # of what it read, in 10^9 bytes a second; 0: nothing yet
    failed: int = 0  # requests that failed at it
    breaks: int = 0  # times that it was found broken, since the router's start

    def tell(self, stats: Stats) -> None:
        """Writes what its engine says of itself into this view."""
        self.running, self.waiting, self.preemptions = (
            stats.num_running,
            stats.num_waiting,
            stats.num_preemptions,
        )
        used = stats.num_blocks - stats.num_free_blocks
        self.kv = {"device": TierView(round(stats.kv_cache_usage, 4), used, stats.num_blocks)}
        for name, tier in stats.kv_tiers.items():
            self.kv[name] = TierView(
                round(tier.used_bytes / tier.capacity_bytes, 4) if tier.capacity_bytes else None,
                tier.used_blocks,
                tier.capacity_blocks,
                tier.stored_blocks,
                tier.fetched_blocks,
                tier.failed_blocks,
            )
        reads, loans = stats.kv_transfers.values(), stats.kv_loans
        self.blocks_in, self.bytes_in = sum(read.blocks for read in reads), sum(r.num_bytes for r in reads)
        seconds = sum(read.seconds for read in reads)
        self.transfer_GB_s = self.bytes_in / seconds / 1e9 if seconds else 0.0
        self.transfer_failures = dict(stats.kv_transfer_failures)
        if loans is not None:
            self.blocks_out, self.bytes_out = loans.blocks_out, loans.bytes_out


class ModelView(msgspec.Struct, kw_only=True):
    """A model that clients may name, over all its workers."""

    name: str
    is_foreign: bool = False  # its workers speak HTTP themselves
    active_requests: int = 0  # of this server: they run or wait
    failed: int = 0  # requests that failed
    refused: int = 0  # requests refused as the queue was full
    recent: RecentRates = RecentRates()  # as this server sees it: the time in the queue counts


class QueueView(msgspec.Struct):
    """Requests that wait for a worker."""

    length: int = 0
    oldest_s: float = 0.0


class PlannedModel(msgspec.Struct):
    """One model, as its planner has it. Counts are by kind, since the planner's start."""

    desired: dict[str, int]  # workers by role, as last decided
    decisions: dict[str, int]
    changes: dict[str, int]  # workers that have come, gone, or changed their role
    failures: dict[str, int]  # workers that should have
    workers: dict[str, int] = {}  # by role: those that are ready
    pending: int = 0  # workers that are starting or ending


class DecisionView(msgspec.Struct):
    """One that changed something, or would have (no_operation)."""

    age_s: float
    model: str
    what: str  # "add 1 decode"
    reason: str


class PlannerView(msgspec.Struct):
    mode: str
    last_decision: str  # its reason
    desired: dict[str, int]  # workers by role
    changing: bool  # whether workers are being added or removed
    decisions: list[DecisionView] = []  # the last ones, the latest at the end
    models: dict[str, PlannedModel] = {}
    max_gpus: int = 0  # that all workers may have together


class Point(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A moment of the past, over all workers or of one."""

    at: float  # seconds since 1970, by the server's clock
    running: int = 0
    waiting: int = 0  # in workers and in the router's queues
    kv_usage: float | None = None  # of the devices; the mean over workers
    prompt_tokens_s: float = 0.0
    output_tokens_s: float = 0.0
    hit_rate: float | None = None
    ttft: Quantiles | None = None
    itl: Quantiles | None = None
    transfer_bytes_s: float = 0.0  # of KV blocks that came from other workers
    failed: int = 0  # requests, since the point before


class FleetView(msgspec.Struct, omit_defaults=True):
    policy: str  # by which requests are routed; "" where there is no router
    workers: list[WorkerView]
    queue: QueueView
    prefill_queue: QueueView  # prompts that wait for a prefill worker
    planner: PlannerView | None = None  # where there is one
    models: list[ModelView] = []
    version: str = ""  # of the server
    at: float = 0.0  # seconds since 1970, by the server's clock
    recent: RecentRates = RecentRates()  # over all models
    history: list[Point] = []  # where it was asked for, the latest at the end


class Selected(msgspec.Struct):
    """Which worker a prompt would go to. Costs are by worker, lower is better."""

    worker: str
    overlap_blocks: int
    costs: dict[str, float]
