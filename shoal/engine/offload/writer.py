"""`Writer`: the second half of the way down: writes host blocks to the persistent tiers. offloader.py brings
blocks to the host; transfers.py writes them.

Two kinds of host blocks come here. Blocks of the host tier are queued by key and stay findable there; those
that are evicted before their turn are lost. Blocks of a staging area, where there is no host tier, are held
until they are written. Every block goes to every tier that has not got it yet.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from functools import partial

from shoal.engine.offload.costs import Throughput
from shoal.engine.offload.ledger import Ledger
from shoal.engine.offload.transfers import Done
from shoal.kv.tiers.block_file import BlockMeta
from shoal.kv.tiers.tier import Tier

WRITE_BLOCKS = 16  # blocks of one write
MAX_WRITING = 48  # blocks that are written at once: fewer than a tier lets wait
WRITE_REST_S = 1.0  # pause after a failed write, before blocks that another tier has are written again


class Writer:
    """`watermark`: number of the host tier's coldest blocks that are written ahead of their eviction; 0: only
    queued blocks are written."""

    def __init__(self, ledger: Ledger, persistent: Mapping[str, Tier], watermark: int) -> None:
        self.ledger = ledger
        self.persistent = persistent
        self._watermark = watermark
        self._staged: deque[tuple[int, BlockMeta]] = deque()  # held host blocks of a staging area
        self._queued: deque[bytes] = deque(maxlen=ledger.host.capacity)  # keys of blocks in the host tier
        # Keys, each counted as often as it is staged, in a batch or being written
        self._in_hand: Counter[bytes] = Counter()
        self._num_writing = 0  # blocks, once for each tier
        self._max_writing = MAX_WRITING
        if ledger.has_host_tier:
            # Blocks that are being written hold their place. In the few that were left, what is cold on the
            # device would push itself out again and again.
            self._max_writing = min(MAX_WRITING, max(1, ledger.host.capacity // 4))
        self._failed_at = -math.inf  # when a write last failed
        self._writes = {tier: Throughput(rate) for tier, rate in ledger.costs.store.items()}

    def is_saved(self, key: bytes) -> bool:
        """True if every persistent tier has the block."""
        return all(tier.contains(key) for tier in self.persistent.values())

    def has(self, key: bytes) -> bool:
        """True if the block is staged or being written."""
        return key in self._in_hand

    def is_settled(self, key: bytes) -> bool:
        """True if a persistent tier has the block, and all tiers below that one have it, too. While nothing
        is written, as a write has just failed, the one is enough."""
        has_it = [tier.contains(key) for tier in self.persistent.values()]
        return any(has_it) and (all(has_it[has_it.index(True) :]) or self._rests)

    @property
    def _rests(self) -> bool:
        """True if a write has just failed."""
        return self.ledger.clock() - self._failed_at < WRITE_REST_S

    @property
    def has_waiting(self) -> bool:
        return bool(self._staged or self._queued)

    @property
    def num_left(self) -> int:
        """Blocks that wait or are being written."""
        return len(self._staged) + len(self._queued) + self._num_writing

    def held_host_blocks(self) -> Iterable[int]:
        """Held host blocks that no transfer uses yet."""
        return (host_block for host_block, _ in self._staged)

    def stage(self, host_block: int, meta: BlockMeta) -> None:
        """Takes a reference on a host block of the staging area."""
        self._staged.append((host_block, meta))
        self._in_hand[meta.key] += 1

    def queue(self, key: bytes) -> None:
        """A block of the host tier is to be written."""
        self._queued.append(key)

    def queue_coldest(self) -> None:
        """Queues what the host tier will evict next, unless blocks wait already or a write has just
        failed."""
        ledger = self.ledger
        if not (ledger.has_host_tier and self.persistent and self._watermark) or self._queued:
            return
        if not self._rests:
            cold = ledger.host.coldest(self._watermark)
            self._queued.extend(meta.key for _, meta in cold if not self.is_saved(meta.key))

    def queue_all(self) -> None:
        """Queues all that the host tier has and a persistent tier has not, the last to be evicted first."""
        cold = self.ledger.host.coldest(self.ledger.host.capacity)
        self._queued.extend(meta.key for _, meta in reversed(cold) if not self.is_saved(meta.key))

    def forget(self) -> None:
        """Drops waiting blocks. Writes under way continue."""
        self._queued.clear()
        self._release(self._staged)
        self._staged.clear()

    def advance(self) -> None:
        """Applies the ends of writes, and begins others."""
        for writes in self._writes.values():
            writes.update_rate()
        while self.has_waiting and self._num_writing < self._max_writing:
            batch = self._next_batch()
            for name, tier in self.persistent.items():
                new = [(block, meta) for block, meta in batch if not tier.contains(meta.key)]
                if new:
                    self._write(name, new)
            self._release(batch)

    def _next_batch(self) -> list[tuple[int, BlockMeta]]:
        """Host blocks, each with a reference of its own."""
        host = self.ledger.host
        batch: list[tuple[int, BlockMeta]] = []
        most = min(WRITE_BLOCKS, self._max_writing - self._num_writing)
        while self._staged and len(batch) < most:
            batch.append(self._staged.popleft())
        while self._queued and len(batch) < most:
            key = self._queued.popleft()
            host_block, meta = host.find(key), host.meta(key)
            if host_block is not None and meta is not None:
                self._hold([(host_block, meta)])
                batch.append((host_block, meta))
        return batch

    def _write(self, tier: str, batch: list[tuple[int, BlockMeta]]) -> None:
        ledger = self.ledger
        host_blocks, metas = [block for block, _ in batch], [meta for _, meta in batch]
        self._hold(batch)
        self._num_writing += len(batch)
        begun = ledger.clock()
        self._writes[tier].begun(begun)
        ticket = ledger.transfers.write(tier, metas, host_blocks)
        ledger.track(ticket, host_blocks, partial(self._was_written, tier, batch, begun))

    def _was_written(self, tier: str, batch: list[tuple[int, BlockMeta]], begun: float, done: Done) -> None:
        ledger = self.ledger
        self._num_writing -= len(batch)
        self._writes[tier].ended(begun + done.seconds, sum(done.intact))
        self._release(batch)
        bad = [meta.key for (_, meta), intact in zip(batch, done.intact) if not intact]
        ledger.stats[tier].stored_blocks += len(batch) - len(bad)
        ledger.stats[tier].failed_blocks += len(bad)
        if bad:
            self._failed_at = ledger.clock()
            ledger.transfers.disown(tier, bad)

    def _hold(self, batch: Iterable[tuple[int, BlockMeta]]) -> None:
        self.ledger.host.hold([host_block for host_block, _ in batch], use=False)
        self._in_hand.update(meta.key for _, meta in batch)

    def _release(self, batch: Iterable[tuple[int, BlockMeta]]) -> None:
        """Releases host blocks. Blocks written ahead of their eviction were the coldest, and are again."""
        self.ledger.host.release([host_block for host_block, _ in batch], coldest=self._watermark > 0)
        self._in_hand -= Counter(meta.key for _, meta in batch)
