"""Numbers that an engine reports: load, cache, tiers, transfers, memory and what is asleep."""

from __future__ import annotations

from dataclasses import dataclass, field

# Upper bounds by which steps are counted: vLLM's.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


SINCE_START = {"since_start": True}  # a field that counts since the start of its engine, and never falls


@dataclass(slots=True)
class KvTierStats:
    """A tier below the device, all ranks together."""

    capacity_bytes: int = 0
    capacity_blocks: int = 0
    used_bytes: int = 0
    used_blocks: int = 0
    stored_blocks: int = field(default=0, metadata=SINCE_START)  # that came from above
    stored_bytes: int = field(default=0, metadata=SINCE_START)  # of these
    fetched_blocks: int = field(default=0, metadata=SINCE_START)  # brought back to the device
    fetched_bytes: int = field(default=0, metadata=SINCE_START)  # of these
    # Blocks whose transfer failed: they were computed again, or are lost here.
    failed_blocks: int = field(default=0, metadata=SINCE_START)
    fetch_seconds_per_block: float = 0.0  # to the device, as measured lately
    store_seconds_per_block: float = 0.0  # into the tier; 0 until something was stored
    # Fetches that were begun though the tier looked slower than computing, to measure it again.
    trial_fetches: int = field(default=0, metadata=SINCE_START)


@dataclass(slots=True)
class KvTransferStats:
    """KV blocks that were read from other workers by one transport."""

    blocks: int = field(default=0, metadata=SINCE_START)
    num_bytes: int = field(default=0, metadata=SINCE_START)  # over all ranks
    # From the first byte asked for to the last one that came, summed over the reads.
    seconds: float = field(default=0.0, metadata=SINCE_START)


@dataclass(slots=True)
class KvLoans:
    """KV blocks of prompts that other workers may read here."""

    offers: int = 0  # now
    held_blocks: int = 0  # now; a block counts once for each offer
    blocks_out: int = field(default=0, metadata=SINCE_START)  # of offers that a reader was done with
    bytes_out: int = field(default=0, metadata=SINCE_START)  # likewise
    # Offers that have ended, by how: "done", or the failure's kind (kv/transfer/ticket.py).
    ended: dict[str, int] = field(default_factory=dict, metadata=SINCE_START)


@dataclass(slots=True)
class Stats:
    """The engine at one moment."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0  # of those: for a grammar, a store, another worker, a sleeping model
    num_blocks: int = 0
    num_free_blocks: int = 0  # free or evictable
    num_preemptions: int = field(default=0, metadata=SINCE_START)
    prefix_cache_queries: int = field(default=0, metadata=SINCE_START)  # tokens looked up
    prefix_cache_hits: int = field(default=0, metadata=SINCE_START)  # tokens found
    # Tokens that were not found there and looked up in the tiers below, and those fetched.
    external_prefix_cache_queries: int = field(default=0, metadata=SINCE_START)
    external_prefix_cache_hits: int = field(default=0, metadata=SINCE_START)
    # Blocks that were evicted from the device, and are kept nowhere else.
    kv_dropped_blocks: int = field(default=0, metadata=SINCE_START)
    kv_compute_seconds_per_block: float = 0.0  # of a prompt, as measured lately; 0 without such tiers
    kv_tiers: dict[str, KvTierStats] = field(default_factory=dict)  # "host", "disk", "store", those there are
    kv_loans: KvLoans | None = None  # None: others read nothing here
    kv_transfers: dict[str, KvTransferStats] = field(default_factory=dict)  # by transport
    # Requests that computed instead of reading, by what went wrong.
    kv_transfer_failures: dict[str, int] = field(default_factory=dict, metadata=SINCE_START)
    step_tokens: int = field(default=0, metadata=SINCE_START)  # computed in all steps
    # What the engine has measured, where it has a target for the gap between tokens; 0: nothing yet.
    decode_step_s: float = 0.0  # of a step with the decodes that run now
    prompt_token_s: float = 0.0  # of each prompt token in a step
    steps_by_tokens: list[int] = field(
        default_factory=lambda: [0] * (len(STEP_TOKENS) + 1), metadata=SINCE_START
    )

    @property
    def kv_cache_usage(self) -> float:
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(slots=True)
class MemoryReport:
    """What `sleep` or `wake_up` did, summed over ranks. Bytes and seconds.

    Of what is in use now the regions' and this process's parts are told; the rest is that of contexts (of
    CUDA, some 0.5 GiB a process) and of other processes. On the CPU regions alone are counted. An engine's
    call that changes no region tells its seconds alone.
    """

    seconds: float = 0.0
    freed_bytes: int = 0  # of device memory given back (sleep) ...
    taken_bytes: int = 0  # ... or taken again (wake_up)
    host_bytes: int = 0  # kept in host memory now
    in_use_bytes: int = 0  # of device memory, by whomever ...
    region_bytes: int = 0  # ... of them in these regions ...
    process_bytes: int = 0  # ... and in what else PyTorch holds in this process


@dataclass(slots=True)
class SleepState:
    """What of a worker sleeps. Whoever is asked says what is so, not what was asked for last."""

    level: int | None = None  # the deepest since all was awake; 0: only paused; None: awake
    asleep: set[str] = field(default_factory=set)  # tags of the regions that are given back
    kept: str = ""  # where the sleeping weights are: "host", "file"; "": dropped, or awake

    @property
    def is_sleeping(self) -> bool:
        return self.level is not None
