"""Views of workers, models, queues and planners, for pages, `shoal top` and the admin API."""

from __future__ import annotations

import enum

import msgspec

from shoal.stats import Stats
from shoal.telemetry.served import Quantiles, RecentRates


class WorkerState(enum.StrEnum):
    READY = "ready"
    DRAINING = "draining"  # finishes its requests and gets no new ones
    BROKEN = "broken"  # not reached yet, or failing; probes find out when it works again
    GONE = "gone"  # its lease has ended, or it was removed


class TierView(msgspec.Struct):
    """One tier of a worker's KV blocks. Counts are since the worker's start."""

    usage: float | None = None  # share in use; None: unknown
    used_blocks: int = 0
    total_blocks: int = 0  # 0: unknown
    stored_blocks: int = 0  # written from the tier above
    fetched_blocks: int = 0  # brought back to the device
    failed_blocks: int = 0


class WorkerView(msgspec.Struct, kw_only=True):
    """One worker of `GET /fleet`; a server without a router is a worker itself. Blocks have the worker's own
    size."""

    id: str
    url: str
    role: str  # "both", "prefill", "decode"
    model: str
    state: WorkerState
    why: str = ""  # why it gets no requests, if its state does not say it
    pid: int | None = None  # only for a worker on this host
    tags: list[str] = []
    running: int = 0  # its running requests, reported by itself
    waiting: int = 0  # its waiting requests
    preemptions: int = 0
    kv: dict[str, TierView] = {}  # by "device", "host", "disk", "store"
    recent: RecentRates = RecentRates()
    active_requests: int = 0  # running or waiting requests of this router
    active_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    requests: int = 0  # sent to it since the router's start
    hit_rate: float = 0.0  # share of prompt tokens in its cache
    asleep: bool = False
    weights_version: int = 0
    prefills_done: int = 0  # prompts computed for other workers since the router's start
    # KV blocks, since the worker's start:
    blocks_in: int = 0  # read from other workers
    blocks_out: int = 0  # read by other workers
    bytes_in: int = 0
    bytes_out: int = 0
    transfer_failures: dict[
        str, int
    ] = {}  # requests that computed blocks of another worker, by kind of failure
    transfer_GB_s: float = 0.0  # speed of its reads, in 10^9 bytes per second; 0: no reads yet
    failed: int = 0  # its failed requests
    breaks: int = 0  # changes to the state broken since the router's start

    def apply(self, stats: Stats) -> None:
        """Copies the engine's figures into this view."""
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
    """A served model, over all its workers."""

    name: str
    is_external: bool = msgspec.field(default=False, name="is_foreign")  # the JSON key that clients know
    active_requests: int = 0  # running or waiting requests of this server
    failed: int = 0  # requests that failed
    refused: int = 0  # requests refused as the queue was full
    recent: RecentRates = RecentRates()  # measured here, with the time in the queue


class QueueView(msgspec.Struct):
    """Requests that wait for a worker."""

    length: int = 0
    oldest_s: float = 0.0


class PlannedModel(msgspec.Struct):
    """The planner's state of one model. Counts are by kind, since the planner's start."""

    desired: dict[str, int]  # workers by role, by the last decision
    decisions: dict[str, int]
    changes: dict[str, int]  # workers that joined, left or changed their role
    failures: dict[str, int]  # changes that failed
    workers: dict[str, int] = {}  # ready workers by role
    pending: int = 0  # workers that are starting or ending


class DecisionView(msgspec.Struct):
    """A decision with a change, or with one that no_operation prevented."""

    age_s: float
    model: str
    what: str  # "add 1 decode"
    reason: str


class PlannerView(msgspec.Struct):
    mode: str
    last_decision: str  # its reason
    desired: dict[str, int]  # workers by role
    changing: bool  # True while workers are added or removed
    decisions: list[DecisionView] = []  # the last decisions, the latest at the end
    models: dict[str, PlannedModel] = {}
    max_gpus: int = 0  # limit for all workers together


class Point(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Figures at one past moment, over all workers or of one."""

    at: float  # seconds since 1970, by the server's clock
    running: int = 0
    waiting: int = 0  # in workers and in the router's queues
    kv_usage: float | None = None  # on the devices; the mean over workers
    prompt_tokens_s: float = 0.0
    output_tokens_s: float = 0.0
    hit_rate: float | None = None
    ttft: Quantiles | None = None
    itl: Quantiles | None = None
    transfer_bytes_s: float = 0.0  # speed of reading KV blocks of other workers
    failed: int = 0  # requests, since the point before


class FleetView(msgspec.Struct, omit_defaults=True):
    policy: str  # routing policy; "" without a router
    workers: list[WorkerView]
    queue: QueueView
    prefill_queue: QueueView  # prompts that wait for a prefill worker
    planner: PlannerView | None = None  # None without a planner
    models: list[ModelView] = []
    version: str = ""  # version of the server
    at: float = 0.0  # seconds since 1970, by the server's clock
    recent: RecentRates = RecentRates()  # over all models
    history: list[Point] = []  # if requested; the latest at the end


class Selected(msgspec.Struct):
    """The worker that would get a prompt. Costs are by worker, lower is better."""

    worker: str
    overlap_blocks: int
    costs: dict[str, float]
