"""`KvTiers`: the tiers below the device over one engine's life: opened from its options, measured, kept in
step with sleep and new weights, written to the lowest at the end. offloader.py decides which block goes where
and when.

It also publishes the KV events of the tiers. The tiers below host memory are reached through
kv/tiers/tier.py alone, and no name of a tier occurs here.
"""

from __future__ import annotations

import logging
import time
from collections import abc
from dataclasses import replace

from shoal.api import KV_CACHE, Output
from shoal.config import ResolvedConfig
from shoal.engine.offload.costs import Costs, plausible_copy_s
from shoal.engine.offload.ledger import HOST
from shoal.engine.offload.look_ups import LookUps
from shoal.engine.offload.offloader import POLL_S, Offloader, OffloadPolicy
from shoal.engine.offload.tier_events import TierEvents
from shoal.engine.offload.transfers import RankTransfers
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.runner import commands
from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.step_part import StepPart
from shoal.errors import ConfigError
from shoal.kv.events.publisher import KvEvents
from shoal.kv.tiers.host import HostTier
from shoal.kv.tiers.registry import first_read_s, has_tiers
from shoal.kv_events import CPU, STORAGE
from shoal.stats import KvTierStats, Stats
from shoal.weights.fingerprint import weights_fingerprint

logger = logging.getLogger(__name__)

STAGING_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}  # host memory of a rank without host tier
LEAVING_BYTES = {"cuda": 4 << 30, "cpu": 32 << 20}  # copied out at once by a rank: 0.1 s over PCIe
COPY_BYTES = 128 << 20  # bytes of one copy out
LEAST_HOST_BLOCKS = 16
WATERMARK = 2048  # blocks, or half of a small cache
HOST_WATERMARK = 1024
# only steps with at least max_num_batched_tokens / 16 prompt tokens are used to estimate prefill speed
LONG_PROMPT_SHARE = 16


class KvTiers(StepPart):
    """Raises ConfigError for an option that cannot be met. `events`: None if there are no listeners."""

    def __init__(
        self, config: ResolvedConfig, ranks: Ranks, scheduler: Scheduler, events: KvEvents | None
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.scheduler = scheduler
        self.events = None
        if events is not None:
            self.events = TierEvents(events, scheduler.blocks, lambda key: self.offloader.has(key))
        rank_block_bytes = ranks.runner.cache.plan.block_bytes
        num_host_blocks = _num_host_blocks(config, rank_block_bytes)
        ranks.call(commands.KV_OPEN, num_host_blocks)
        measured = ranks.call(commands.KV_MEASURE)
        # rank 0's, which is filled and emptied as tiers open and close
        self.persistent = ranks.runner.kv.tiers
        self._is_stale = False  # the persistent tiers are closed, as the weights have changed
        self._open_persistent()
        self.costs = self._first_costs(measured)
        below = [tier.stats().capacity_blocks for tier in self.persistent.values()]
        self.policy = _policy(
            config,
            scheduler.blocks.pool.num_blocks,
            len(scheduler.blocks.groups),
            num_host_blocks,
            min(filter(None, below), default=0),
            rank_block_bytes,
        )
        self._num_host_blocks = num_host_blocks
        self.transfers = RankTransfers(ranks)
        self.offloader = self._new_offloader()
        self.look_ups = LookUps(
            scheduler.blocks, lambda: self.persistent.values(), lambda key: self.offloader.has(key)
        )
        self._attach()

    def _first_costs(self, measured: list[tuple[float, float]]) -> Costs:
        """From the seconds that each rank has measured, of a token's computing and a block's copy in. The
        slowest rank counts."""
        config, rank_block_bytes = self.config, self.ranks.runner.cache.plan.block_bytes
        token_s = max(token_s for token_s, _ in measured)
        measured_s = max(copy_s for _, copy_s in measured)
        copy_s = plausible_copy_s(measured_s, rank_block_bytes, config.device)
        fetch_s = {HOST: copy_s}
        for name in self.persistent:
            fetch_s[name] = copy_s + first_read_s(name, rank_block_bytes)
        costs = Costs(config.block_size, token_s, fetch_s)
        logger.info(
            "computing a block takes %.3f ms, fetching one %s",
            costs.block_s * 1e3,
            ", ".join(f"{seconds * 1e3:.3f} ms from {name}" for name, seconds in fetch_s.items()),
        )
        if copy_s < measured_s:
            logger.warning(
                "copying a block from host memory took %.3f ms, more than is plausible; taken as %.3f ms "
                "until requests are measured",
                measured_s * 1e3,
                copy_s * 1e3,
            )
        return costs

    def _new_offloader(self, before: Offloader | None = None) -> Offloader:
        """Returns an offloader whose own tiers are empty. It continues the counts of `before`."""
        policy, scheduler = self.config.kv_eviction_policy, self.scheduler
        host = HostTier(self._num_host_blocks, policy, record_events=self.events is not None)
        offloader = Offloader(scheduler, host, self.transfers, self.persistent, self.policy, self.costs)
        if before is not None:
            offloader.stats.update(before.stats)
            offloader.num_dropped = before.num_dropped
        return offloader

    def _attach(self) -> None:
        """From now on the scheduler and its pool know of the tiers."""
        self.scheduler.blocks.fetches.sources.insert(0, self.offloader)  # nearer than other workers
        self.scheduler.blocks.pool.listeners.append(self.offloader)

    def _detach(self) -> None:
        """The opposite of `_attach`."""
        self.scheduler.blocks.fetches.sources.remove(self.offloader)
        self.scheduler.blocks.pool.listeners.remove(self.offloader)

    @property
    def is_pinned(self) -> bool:
        """True if all requested host memory can be used."""
        return self.offloader.num_unready == 0

    # Around a step

    def added(self, seq: Sequence) -> None:
        """Asks those tiers that must be asked what they have of the prompt, unless nearer ones have all of
        it. The sequence starts when they have answered."""
        params = seq.request.params
        if params.prompt_logprobs is not None or params.skip_reading_prefix_cache:
            return
        if seq.request.continues is None:  # otherwise its prefetch request has done the lookup
            self.look_ups.begin(seq)

    def may_start(self, seq: Sequence) -> bool:
        return not self.look_ups.is_waiting(seq)

    def before_schedule(self) -> None:
        if self._is_stale:
            self._reopen_persistent()
        self.look_ups.advance()
        self.offloader.poll()
        self.offloader.offload()
        self._publish()

    def after_schedule(self, plan: StepPlan | None) -> list[Output]:
        self.offloader.before_step(launches=plan is not None)
        return []

    def after_step(self, waits: bool) -> None:
        if waits and self.scheduler.has_work:
            time.sleep(POLL_S)

    def completed(self, plan: StepPlan, seconds: float) -> None:
        """Steps with long prompts are used to estimate prefill speed."""
        self.offloader.step_completed()
        num_tokens = sum(entry.num_tokens for entry in plan.scheduled[plan.num_decodes :])
        if num_tokens >= max(1, self.config.max_num_batched_tokens // LONG_PROMPT_SHARE):
            self.costs.token.add(seconds, num_tokens)

    def tick(self) -> bool:
        under_way = self.offloader.tick()
        self._publish()
        self._flush_events()
        return under_way

    # Blocks of the device

    def registered(self, seq: Sequence, start: int, blocks: abc.Sequence[int], group: int) -> None:
        self.offloader.registered(seq, start, blocks, group)

    def released(self, blocks: abc.Sequence[int]) -> None:
        self.offloader.released(blocks)

    # Listeners

    def _publish(self) -> None:
        """Publishes events of the blocks that the tiers have stored and removed."""
        if self.events is None:
            return
        self.events.publish(CPU, self.offloader.host.take_events())
        for tier in self.persistent.values():
            self.events.publish(STORAGE, tier.take_events())

    def _flush_events(self) -> None:
        if self.events is not None:
            self.events.flush()

    # The weights

    def _open_persistent(self) -> None:
        """Opens what the options name, for the weights as they are now."""
        self._is_stale = False
        if has_tiers(self.config):
            checksums = self.ranks.call(commands.CHECKSUMS)
            runner = self.ranks.runner
            own = weights_fingerprint(checksums, runner.model_config, self.config.max_model_len)
            fingerprint = runner.states.plan.add_to(own)
            self.ranks.call(commands.KV_OPEN_TIERS, fingerprint, self.events is not None)

    def _reopen_persistent(self) -> None:
        try:
            self._open_persistent()
        except ConfigError as error:
            self.ranks.call(commands.KV_CLOSE_TIERS)
            logger.warning("KV blocks are no longer kept on disk or in a store: %s", error)

    def weights_change(self) -> None:
        """Forgets all KV of the old weights. Tiers reopen at the next step, so several updates in a row cost
        one reopening."""
        self.offloader.forget_host()
        self._publish()
        if not self._is_stale:
            self._is_stale = True
            self.ranks.call(commands.KV_CLOSE_TIERS)
            if self.events is not None:
                self.events.cleared(STORAGE)
        self._flush_events()

    # The rest of an engine's life

    def before_sleep(self, tags: abc.Sequence[str]) -> None:
        """Afterwards no copy to or from the device is under way, and no fetch. Lower tiers keep what they
        have, if weights sleep too: these weights computed it."""
        if KV_CACHE in tags:
            self.offloader.quiesce()

    def after_reset(self) -> None:
        """Every tier forgets what is this engine's alone."""
        self.offloader.forget_host()
        for name in self.persistent:
            self.transfers.forget(name)
        self._publish()

    def give_memory_back(self) -> None:
        """Gives the slab back, with its content."""
        self.offloader.quiesce()
        self.weights_change()
        self.ranks.call(commands.KV_CLOSE)

    def take_memory(self) -> None:
        """Takes a slab again. All tiers begin empty."""
        self.ranks.call(commands.KV_REOPEN, self._num_host_blocks)
        self.persistent = self.ranks.runner.kv.tiers
        self.transfers = RankTransfers(self.ranks)
        self._detach()
        self.offloader = self._new_offloader(self.offloader)
        self._attach()

    def start_anew(self) -> None:
        self.transfers.abandon()
        self._detach()
        self.offloader = self._new_offloader(self.offloader)
        self._attach()
        if self.events is not None:
            self.events.cleared(CPU)

    def flush(self) -> None:
        """Writes blocks that no persistent tier has, for kv_flush_timeout seconds at most."""
        config = self.config
        if not self.persistent or not config.kv_flush_timeout:
            return
        start = time.perf_counter()
        left = self.offloader.flush(config.kv_flush_timeout)
        logger.info(
            "wrote KV blocks to %s in %.2f s%s",
            " and ".join(self.persistent),
            time.perf_counter() - start,
            f"; {left} were not written within kv_flush_timeout" if left else "",
        )

    def check(self) -> None:
        self.offloader.check()

    def close(self) -> None:
        self._detach()

    # Figures

    def fill_in(self, stats: Stats) -> None:
        stats.kv_dropped_blocks = self.offloader.num_dropped
        stats.kv_compute_seconds_per_block = self.costs.block_s
        stats.kv_tiers = {}
        for name, counts in self.offloader.stats.items():
            if name != HOST or self.policy.has_host_tier:
                stats.kv_tiers[name] = self._tier_stats(name, counts)

    def _tier_stats(self, name: str, counts: KvTierStats) -> KvTierStats:
        size = self.policy.block_bytes
        used = capacity = used_bytes = capacity_bytes = 0
        if name == HOST:
            used, capacity = self.offloader.host.num_blocks, self._num_host_blocks
            used_bytes, capacity_bytes = used * size, capacity * size
        elif name in self.persistent:
            of_rank = self.persistent[name].stats()
            used, capacity = of_rank.blocks, of_rank.capacity_blocks
            used_bytes = of_rank.num_bytes * self.ranks.size
            capacity_bytes = of_rank.capacity_bytes * self.ranks.size
        return replace(
            counts,
            used_bytes=used_bytes,
            used_blocks=used,
            capacity_bytes=capacity_bytes,
            capacity_blocks=capacity,
            stored_bytes=counts.stored_blocks * size,
            fetched_bytes=counts.fetched_blocks * size,
            fetch_seconds_per_block=self.costs.fetch[name].seconds,
            store_seconds_per_block=self.costs.store[name].seconds,
            trial_fetches=self.costs.trials[name].num_begun,
        )


def _num_host_blocks(config: ResolvedConfig, rank_block_bytes: int) -> int:
    """Returns the number of blocks of the slab. Raises ConfigError."""
    if not config.kv_host_bytes:
        return max(LEAST_HOST_BLOCKS, STAGING_BYTES[config.device] // rank_block_bytes)
    block_bytes = rank_block_bytes * config.tensor_parallel_size
    if config.kv_host_bytes < block_bytes:
        raise ConfigError(
            f"kv_host_bytes {config.kv_host_bytes} is less than one KV block of {block_bytes} bytes; raise "
            "it or leave it out"
        )
    return config.kv_host_bytes // block_bytes


def _policy(
    config: ResolvedConfig,
    num_blocks: int,
    num_groups: int,
    num_host_blocks: int,
    num_below: int,
    rank_block_bytes: int,
) -> OffloadPolicy:
    """`num_blocks`: blocks of the device's cache. `num_groups`: groups of layers. `num_below`: blocks of the
    smallest persistent tier; 0: unknown, or no such tier.

    Blocks copied ahead of their eviction take at most half of a lower tier. If they took all of it, each
    block written there would evict another one of them, without end.
    """
    has_host_tier = config.kv_host_bytes > 0
    blocks_of_a_step = config.max_num_batched_tokens // config.block_size + config.max_num_seqs
    blocks_of_two_steps = 2 * num_groups * blocks_of_a_step
    watermark = max(blocks_of_two_steps, min(WATERMARK, num_blocks // 2))
    watermark = min(watermark, num_blocks)
    host_watermark = min(HOST_WATERMARK, num_host_blocks // 2)
    if has_host_tier:
        watermark = min(watermark, num_host_blocks // 2)
    if num_below:
        host_watermark = min(host_watermark, num_below // 2)
        if not has_host_tier:
            watermark = min(watermark, num_below // 2)
    return OffloadPolicy(
        block_size=config.block_size,
        block_bytes=rank_block_bytes * config.tensor_parallel_size,
        has_host_tier=has_host_tier,
        watermark=max(1, watermark),
        host_watermark=max(1, host_watermark),
        max_leaving=max(LEAST_HOST_BLOCKS // 2, LEAVING_BYTES[config.device] // rank_block_bytes),
        copy_blocks=max(1, COPY_BYTES // rank_block_bytes),
        on_registration=config.kv_offload_policy == "register",
        min_uses=config.kv_offload_min_uses,
        always_fetch=config.kv_load_policy == "always",
        bytes_per_s=config.kv_offload_bandwidth,
    )
