"""Numbers that an engine reports: load, cache, tiers, transfers, memory and what is asleep."""

from __future__ import annotations

from dataclasses import dataclass, field

# Upper bounds of the histogram of step sizes; vLLM has the same.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


SINCE_START = {"since_start": True}  # marks a counter since the start of the engine, which never decreases


@dataclass(slots=True)
class KvGroupStats:
    """Layers that share KV blocks, and these blocks on the device."""

    num_layers: int = 0
    window: int | None = None  # positions that a token sees, with its own; None: all before it
    block_size: int = 0  # tokens
    used_blocks: int = 0


@dataclass(slots=True)
class KvTierStats:
    """One tier below the device, summed over ranks."""

    capacity_bytes: int = 0
    capacity_blocks: int = 0
    used_bytes: int = 0
    used_blocks: int = 0
    stored_blocks: int = field(default=0, metadata=SINCE_START)  # written from the tier above
    stored_bytes: int = field(default=0, metadata=SINCE_START)  # their size
    fetched_blocks: int = field(default=0, metadata=SINCE_START)  # brought back to the device
    fetched_bytes: int = field(default=0, metadata=SINCE_START)  # their size
    # Blocks whose transfer failed: they were computed again, or dropped.
    failed_blocks: int = field(default=0, metadata=SINCE_START)
    fetch_seconds_per_block: float = 0.0  # to the device, measured recently
    store_seconds_per_block: float = 0.0  # into the tier; 0 until a block was stored
    # Fetches from a tier that looked slower than computing, to measure it again.
    trial_fetches: int = field(default=0, metadata=SINCE_START)


@dataclass(slots=True)
class KvTransferStats:
    """KV blocks read from other workers by one transport."""

    blocks: int = field(default=0, metadata=SINCE_START)
    num_bytes: int = field(default=0, metadata=SINCE_START)  # over all ranks
    # From the first requested byte to the last received one, summed over the reads.
    seconds: float = field(default=0.0, metadata=SINCE_START)


@dataclass(slots=True)
class KvLoans:
    """KV blocks of prompts that other workers may read here."""

    offers: int = 0  # now
    held_blocks: int = 0  # now; a block counts once for each offer
    blocks_out: int = field(default=0, metadata=SINCE_START)  # blocks in offers that a reader has finished
    bytes_out: int = field(default=0, metadata=SINCE_START)  # their size
    # Ended offers by outcome: "done", or the kind of failure (kv/transfer/ticket.py).
    ended: dict[str, int] = field(default_factory=dict, metadata=SINCE_START)


@dataclass(slots=True)
class Stats:
    """The engine at one moment."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = (
        0  # waiting for a grammar, a store, another worker or a sleeping model; part of num_waiting
    )
    num_blocks: int = 0
    num_free_blocks: int = 0  # free or evictable
    kv_groups: list[KvGroupStats] = field(default_factory=list)  # none where all layers share all blocks
    # Kept states of recurrent layers, and how many more there is room for if nothing else were cached.
    num_snapshots: int = 0
    num_free_snapshots: int = 0
    num_preemptions: int = field(default=0, metadata=SINCE_START)
    prefix_cache_queries: int = field(default=0, metadata=SINCE_START)  # tokens looked up
    prefix_cache_hits: int = field(default=0, metadata=SINCE_START)  # tokens found
    # Tokens that the prefix cache lacks and that were looked up in the tiers below; and the fetched ones.
    external_prefix_cache_queries: int = field(default=0, metadata=SINCE_START)
    external_prefix_cache_hits: int = field(default=0, metadata=SINCE_START)
    # Blocks that were evicted from the device and exist in no other tier.
    kv_dropped_blocks: int = field(default=0, metadata=SINCE_START)
    kv_compute_seconds_per_block: float = 0.0  # time to compute a block, measured recently; 0 without tiers
    kv_tiers: dict[str, KvTierStats] = field(default_factory=dict)  # by "host", "disk", "store"
    kv_loans: KvLoans | None = None  # None: the engine lends no blocks
    kv_transfers: dict[str, KvTransferStats] = field(default_factory=dict)  # by transport
    # Requests that computed blocks in place of reading them, by the kind of failure.
    kv_transfer_failures: dict[str, int] = field(default_factory=dict, metadata=SINCE_START)
    step_tokens: int = field(default=0, metadata=SINCE_START)  # computed in all steps
    # Measured by an engine with target_itl_ms; 0: no measurement yet.
    decode_step_s: float = 0.0  # time of a step with the current decodes
    prompt_token_s: float = 0.0  # time of each prompt token in a step
    steps_by_tokens: list[int] = field(
        default_factory=lambda: [0] * (len(STEP_TOKENS) + 1), metadata=SINCE_START
    )

    @property
    def kv_cache_usage(self) -> float:
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(slots=True)
class MemoryReport:
    """Result of `sleep` or `wake_up`, summed over ranks.

    `in_use_bytes` minus `region_bytes` and `process_bytes` is the part of CUDA contexts (some 0.5 GiB per
    process) and of other processes. On the CPU only regions are counted. A call that changes no region
    reports only its seconds.
    """

    seconds: float = 0.0
    freed_bytes: int = 0  # device memory released by sleep
    taken_bytes: int = 0  # device memory taken again by wake_up
    host_bytes: int = 0  # kept in host memory now
    in_use_bytes: int = 0  # device memory of all processes
    region_bytes: int = 0  # the part of in_use_bytes in the regions
    process_bytes: int = 0  # the part of in_use_bytes that PyTorch holds here outside of the regions


@dataclass(slots=True)
class SleepState:
    """The parts of a worker that are asleep: the actual state, not the last request."""

    level: int | None = None  # the deepest level since all was awake; 0: only paused; None: awake
    asleep: set[str] = field(default_factory=set)  # tags of the released regions
    kept: str = ""  # where the sleeping weights are: "host", "file"; "": dropped, or awake

    @property
    def is_sleeping(self) -> bool:
        return self.level is not None
