"""The tiers below the device of one engine: built from its options, kept in step with sleep and new weights,
emptied into the lowest at the end. What goes where: engine/offload/offloader.py."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from dataclasses import replace

from shoal.api import KvTierStats, Stats
from shoal.config import ResolvedConfig
from shoal.engine.offload.fetch import HOST
from shoal.engine.offload.offloader import POLL_S, Offloader, OffloadPolicy
from shoal.engine.offload.transfers import RankTransfers
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.runner import commands
from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.engine.scheduling.sequence import Sequence
from shoal.errors import ConfigError
from shoal.hashing import extend_keys
from shoal.kv.disk import DiskTier
from shoal.kv.event_publisher import KvEvents
from shoal.kv.fingerprint import weights_fingerprint
from shoal.kv.host import HostTier
from shoal.kv.store import StoreTier
from shoal.kv_event_format import CPU, STORAGE

logger = logging.getLogger(__name__)

STAGING_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}  # of a rank without host tier
LEAVING_BYTES = {"cuda": 4 << 30, "cpu": 32 << 20}  # of a rank, copied out at once: 0.1 s over PCIe
COPY_BYTES = 128 << 20  # of one copy out
# seconds a byte, until one was read: so high that the tier is tried
FIRST_BYTE_S = {"disk": 1 / 8e9, "store": 1 / 1e9}
LEAST_SLOTS = 16
WATERMARK = 2048  # blocks, or half of a small cache


class KvTiers:
    """An engine's, whose options, ranks, scheduler and KV events it is given. Raises ConfigError where an
    option can't be met."""

    def __init__(
        self, config: ResolvedConfig, ranks: Ranks, scheduler: Scheduler, events: KvEvents | None
    ) -> None:
        self.config, self.ranks, self.scheduler, self.events = config, ranks, scheduler, events
        runner = ranks.runner
        block_bytes, keeps = runner.block_bytes * config.tensor_parallel_size, config.kv_host_bytes > 0
        num_slots = (
            config.kv_host_bytes // block_bytes
            if keeps
            else max(LEAST_SLOTS, STAGING_BYTES[config.device] // runner.block_bytes)
        )
        if not num_slots:
            raise ConfigError(
                f"kv_host_bytes {config.kv_host_bytes} is less than one KV block of {block_bytes} bytes; "
                "raise it or leave "
                "it out"
            )
        ranks.call(commands.KV_OPEN, num_slots)
        self.num_slots = num_slots
        self.persistent = runner.kv.tiers  # of rank 0, as they are opened and closed
        self.stale = False  # they are closed, as the weights have changed
        self.asking: list[tuple[Sequence, Future[int]]] = []
        self.completed_at = 0.0  # when a step last was, seconds
        self.open_persistent()
        token_s, block_s = 0.0, dict.fromkeys((HOST, *self.persistent), 0.0)
        if config.kv_load_policy == "cost":
            measured = ranks.call(commands.KV_MEASURE)
            token_s, host_s = (max(figures) for figures in zip(*measured))
            block_s = {
                HOST: host_s,
                **{name: host_s + runner.block_bytes * FIRST_BYTE_S[name] for name in self.persistent},
            }
            logger.info(
                "computing a block takes %.3f ms, fetching one %s",
                token_s * config.block_size * 1e3,
                ", ".join(f"{seconds * 1e3:.3f} ms from {name}" for name, seconds in block_s.items()),
            )
        num_blocks = scheduler.pool.num_blocks
        # what two may take
        steps = 2 * (config.max_num_batched_tokens // config.block_size + config.max_num_seqs)
        policy = OffloadPolicy(
            block_size=config.block_size,
            block_bytes=block_bytes,
            keeps=keeps,
            watermark=max(
                1,
                min(
                    num_blocks,
                    num_slots if keeps else num_blocks,
                    max(steps, min(WATERMARK, num_blocks // 2)),
                ),
            ),
            max_leaving=max(LEAST_SLOTS // 2, LEAVING_BYTES[config.device] // runner.block_bytes),
            copy_blocks=max(1, COPY_BYTES // runner.block_bytes),
            on_registration=config.kv_offload_policy == "register",
            min_uses=config.kv_offload_min_uses,
            always_fetch=config.kv_load_policy == "always",
            bytes_per_s=config.kv_offload_bandwidth,
        )
        self.policy, self.token_s, self.block_s = policy, token_s, block_s
        self.transfers = RankTransfers(ranks)
        self.offloader = self._new_offloader()

    def _new_offloader(self) -> Offloader:
        scheduler, policy = self.scheduler, self.config.kv_eviction_policy
        slots = HostTier(self.num_slots, policy, record_events=self.events is not None)
        offloader = Offloader(
            scheduler, slots, self.transfers, self.persistent, self.policy, self.token_s, self.block_s
        )
        scheduler.tiers = offloader
        scheduler.pool.listeners.append(offloader)
        return offloader

    # Around a step

    def before_schedule(self) -> None:
        if self.stale:
            self._reopen_persistent()
        for entry in [entry for entry in self.asking if entry[1].done()]:
            self.asking.remove(entry)
            entry[0].asking = False
        self.offloader.poll()
        self._tell()

    def before_step(self, launches: bool) -> None:
        self.offloader.before_step(launches)

    def after_step(self, waits: bool) -> None:
        """`waits`: the step had nothing to do."""
        if not self.scheduler.has_work:
            return  # `tick` comes when the last outputs have been passed on
        self.offloader.offload()
        if waits:
            time.sleep(POLL_S)

    def completed(self, plan: StepPlan, launched_at: float) -> None:
        """A step has run. Those with long prompts tell how quickly prompts are computed."""
        self.offloader.books.num_completed += 1
        now, config = time.monotonic(), self.config
        num_tokens = plan.num_tokens - plan.num_decodes
        if num_tokens >= max(1, config.max_num_batched_tokens // 16):
            self.offloader.token.add(now - max(launched_at, self.completed_at), num_tokens)
        self.completed_at = now

    def tick(self) -> bool:
        under_way = self.offloader.tick()
        self._tell()
        self._flush_events()
        return under_way

    def _flush_events(self) -> None:
        if self.events is not None:
            self.events.flush()

    def _tell(self) -> None:
        """Listeners, of what lower tiers have."""
        events = self.events
        if events is None:
            return
        disk = self.persistent.get("disk")
        for tier, news in (
            (CPU, self.offloader.slots.take_events()),
            (STORAGE, disk.take_events() if isinstance(disk, DiskTier) else []),
        ):
            for item in news:
                if isinstance(item, bytes):
                    events.removed_below(item, tier)
                else:
                    events.stored([item.key], item.parent, item.token_ids, *item.extra, tier)

    def ask(self, seq: Sequence) -> None:
        """What the store has of a prompt, if nothing nearer has all of it: its sequence starts when that is
        known."""
        store, params = self.persistent.get("store"), seq.request.params
        if (
            not isinstance(store, StoreTier)
            or params.prompt_logprobs is not None
            or params.skip_reading_prefix_cache
        ):
            return
        block_size = self.config.block_size
        extend_keys(seq.keys, seq.root, seq.token_ids, block_size)
        keys = seq.keys[: (seq.num_tokens - 1) // block_size]
        if any(self.scheduler.pool.find(key) is None and self.offloader.where(key) is None for key in keys):
            seq.asking = True
            self.asking.append((seq, store.look_up(keys)))

    # The weights

    def open_persistent(self) -> None:
        """For the weights as they are now."""
        self.stale = False
        if self.config.kv_disk_path is not None or self.config.kv_store is not None:
            checksums = self.ranks.call(commands.CHECKSUMS)
            self.ranks.call(
                commands.KV_OPEN_TIERS,
                weights_fingerprint(checksums, self.ranks.runner.model_config),
                self.events is not None,
            )

    def _reopen_persistent(self) -> None:
        try:
            self.open_persistent()
        except ConfigError as error:
            self.ranks.call(commands.KV_CLOSE_TIERS)
            logger.warning("KV blocks are no longer kept on disk or in a store: %s", error)

    def quiesce(self) -> None:
        """Ends what uses the cache on the device, which is about to be given back."""
        self.offloader.quiesce()

    def weights_changed(self) -> None:
        """What other weights computed is not found any more. There may be many changes before the next step,
        which opens what then fits."""
        self.offloader.forget_slots()
        self._tell()
        if not self.stale:
            self.stale = True
            self.ranks.call(commands.KV_CLOSE_TIERS)
            if self.events is not None:
                self.events.cleared(STORAGE)
        self._flush_events()

    # The rest of an engine's life

    def reset(self) -> None:
        """As `LLM.reset_prefix_cache`: everything but a shared store forgets."""
        self.offloader.forget_slots()
        for name in self.persistent:
            if name != "store":
                self.transfers.forget(name)
        self._tell()

    def start_anew(self) -> None:
        """After an interrupt, nobody knows where. The requests are gone."""
        self.transfers.abandon()
        self.scheduler.pool.listeners.remove(self.offloader)
        for fetch in list(self.scheduler.fetches):
            self.scheduler.fetched(fetch, 0)
        self.offloader = self._new_offloader()
        if self.events is not None:
            self.events.cleared(CPU)

    def flush(self) -> None:
        """As far as there is time."""
        config = self.config
        if self.persistent and config.kv_flush_timeout:
            start = time.perf_counter()
            left = self.offloader.flush(config.kv_flush_timeout)
            logger.info(
                "wrote KV blocks to %s in %.2f s%s",
                " and ".join(self.persistent),
                time.perf_counter() - start,
                f"; {left} were not written within kv_flush_timeout" if left else "",
            )

    def check(self) -> None:
        """Proves the books."""
        self.offloader.check()

    def fill_in(self, stats: Stats) -> Stats:
        stats.kv_tiers, stats.kv_dropped_blocks = self._tier_stats(), self.offloader.num_dropped
        return stats

    def _tier_stats(self) -> dict[str, KvTierStats]:
        block_bytes, found = self.policy.block_bytes, {}
        for name, stats in self.offloader.stats.items():
            if name == HOST:
                if not self.policy.keeps:
                    continue
                num_blocks, capacity = self.offloader.slots.num_blocks, self.num_slots * block_bytes
                found[name] = replace(
                    stats,
                    block_bytes=block_bytes,
                    used_bytes=num_blocks * block_bytes,
                    capacity_bytes=capacity,
                )
            else:
                num_bytes = self.persistent[name].stats().num_bytes if name in self.persistent else 0
                found[name] = replace(
                    stats,
                    block_bytes=block_bytes,
                    used_bytes=num_bytes * self.config.tensor_parallel_size,
                    capacity_bytes=self.config.kv_disk_bytes if name == "disk" else 0,
                )
        return found
