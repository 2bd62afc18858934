"""The tiers below the device, as rank 0 runs them: which blocks leave the cache ahead of their eviction,
which are worth fetching.

Slots of the host slab keep what is copied out, if there is a host tier; else they are a small staging area on
the way to disk or store. All transfers run beside the steps (engine/offload/transfers.py) and are polled
between them; a step that rewrites a block waits, on the device, for the copy that still reads it. The way up:
engine/offload/fetch.py. Which slot goes next: kv/host.py.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from shoal.api import KvTierStats
from shoal.engine.offload.costs import Costs, Throughput
from shoal.engine.offload.fetch import HOST, Books, Fetcher, make_meta
from shoal.engine.offload.transfers import Done, Transfers
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.sequence import Fetch
from shoal.engine.scheduling.sequence import Sequence as QueuedSequence
from shoal.kv.block_file import BlockMeta
from shoal.kv.host import HostTier
from shoal.kv.policy import FrequencySketch

SCAN_S = 0.1  # between looks at the coldest blocks while nothing presses
WRITE_BLOCKS = 16  # of one write
MAX_WRITING = 48  # blocks: fewer than a tier lets wait
WRITE_REST_S = 1.0  # after a write that failed, before the host tier's coldest are looked at again
HOST_WATERMARK = 1024  # of the coldest blocks in the host tier, so many are to lie below it too
POLL_S = 0.0003


class LowerTier(Protocol):
    """A persistent tier (kv/disk.py, kv/store.py), as far as it is asked between steps: no I/O."""

    def contains(self, key: bytes) -> bool: ...


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    block_size: int  # tokens
    block_bytes: int  # over all ranks
    keeps: bool  # there is a host tier
    watermark: int  # of the coldest blocks on the device, so many are to lie below it too
    max_leaving: int  # blocks that are copied out at once ...
    copy_blocks: int  # ... in copies of so many: what a step that takes one of them may have to wait for
    on_registration: bool = False  # copy what is new instead of what is cold
    min_uses: int = 1  # of a block, before it is worth keeping
    always_fetch: bool = False  # whatever computing it would cost
    bytes_per_s: float | None = None  # that leave the device; beyond it blocks are lost


class Offloader:
    """The scheduler's `tiers` and its pool's listener. `persistent`: the tiers below the slots, in the order
    in which they are asked.

    Around a step: `poll`, Scheduler.schedule, `before_step`, the step, `offload`. Without steps: `tick`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        slots: HostTier,
        transfers: Transfers,
        persistent: Mapping[str, LowerTier],
        policy: OffloadPolicy,
        costs: Costs,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.pool, self.slots, self.transfers, self.persistent, self.policy = (
            scheduler.pool,
            slots,
            transfers,
            persistent,
            policy,
        )
        self.costs = costs
        self.stats = {name: KvTierStats() for name in costs.fetch}
        self.num_dropped = 0  # evicted from the device, and nowhere else
        self.books = Books(slots, transfers, policy.keeps, costs, self.stats, clock)
        self.fetcher = Fetcher(scheduler, self.books)
        self._metas: dict[bytes, BlockMeta] = {}  # of what can be found on the device
        self._uses = FrequencySketch(self.pool.num_blocks + slots.num_slots) if policy.min_uses > 1 else None
        self._unready = set(slots.take(slots.num_slots) or ())
        self._leaving: dict[bytes, int] = {}  # blocks that are being copied out, and their tickets
        self._evicted: dict[int, BlockMeta] = {}  # taken since the last step, what they held is nowhere else
        self._overtaken = 0  # the last ticket one of whose blocks may be rewritten
        # registered, to be copied out; without those that are long gone
        self._fresh: deque[bytes] = deque(maxlen=self.pool.num_blocks)
        self._staged: deque[tuple[int, BlockMeta]] = deque()  # held slots of a staging area, to be written
        self._kept: deque[bytes] = deque(maxlen=slots.num_slots)  # in the host tier, to be written
        self._num_writing = 0  # blocks, once for each tier
        self._writes = {name: Throughput(rate) for name, rate in costs.store.items()}
        self._failed_at = -math.inf  # when a write last did
        self._flushing = False  # what is copied out is written at once
        self._allowance, self._allowed_at = 0.0, clock()
        self._num_registered = self._num_evicted = 0
        self._scanned: tuple[float, int, int, int] = (0.0, 0, 0, -1)  # when, and the counts of then
        self._cut_short = False  # the last scan found more than there was room for

    # What the scheduler asks and tells

    def lookup(self, keys: Sequence[bytes], start: int) -> int:
        """How many of keys[start:], the first ones, lie below and are worth fetching now."""
        if self._uses is not None:
            for key in keys[:start]:
                self._uses.add(key)
        run: list[str] = []
        for key in keys[start:]:
            tier = self.where(key)
            if tier is None:
                break
            run.append(tier)
        if self.policy.always_fetch:
            return len(run)
        # the evicted blocks are copied out before a fetch may take their place
        num_blocks_ahead = self.fetcher.num_blocks + len(self._evicted)
        fetch_ahead_s = self.costs.fetch[HOST].seconds * num_blocks_ahead
        return self.costs.num_worth_fetching(run, self.scheduler.num_to_prefill, fetch_ahead_s)

    def where(self, key: bytes) -> str | None:
        """The highest tier that has it."""
        if self.policy.keeps and self.slots.find(key) is not None:
            return HOST
        return next((name for name, tier in self.persistent.items() if tier.contains(key)), None)

    def begin(self, fetch: Fetch) -> None:
        """Blocks that the sequence has taken before they were copied out are now, as far as slots and
        bandwidth allow, and what is fetched comes behind that. Until it has ended nobody else gets any of the
        sequence's blocks."""
        job = self.fetcher.begin(fetch, self.where, self.policy.block_size)  # which holds its slots
        # not of its hits: a step may be about to write them
        job.behind = self._save_evicted(fetch.seq.block_ids[fetch.start :])
        if job.behind:
            rest = fetch.seq.block_ids[len(fetch.held) :]
            self.pool.try_allocate(0, shared=rest)
            fetch.held += rest

    def registered(self, seq: QueuedSequence, start: int, end: int) -> None:
        request = seq.request
        for i in range(start, end):
            key = seq.keys[i]
            if key not in self._metas:
                self._metas[key] = make_meta(
                    seq.keys, i, seq.token_ids, self.policy.block_size, request.adapter, request.cache_salt
                )
            if self._uses is not None:
                self._uses.add(key)
            if self.policy.on_registration:
                self._fresh.append(key)
            if key in self._leaving:  # another block has the content now
                self._overtaken = max(self._overtaken, self._leaving[key])
        self._num_registered += end - start

    def released(self, blocks: list[int]) -> None:
        self.books.used_until.update(dict.fromkeys(blocks, self.books.num_launched))
        if self._leaving:
            for key in map(self.pool.key_of, blocks):
                # which have the content from now on: the block may be rewritten
                if key in self._leaving and self.pool.has_copies(key):
                    self._overtaken = max(self._overtaken, self._leaving[key])

    def removed(self, key: bytes, block: int) -> None:
        self._num_evicted += 1
        meta, ticket = self._metas.pop(key, None), self._leaving.get(key)
        if ticket is not None:
            self._overtaken = max(self._overtaken, ticket)
        elif meta is not None and self.where(key) is None:
            self._evicted[block] = meta

    def cleared(self) -> None:
        self._overtaken = max(self._leaving.values(), default=0)
        self._metas.clear()
        self._evicted.clear()
        self._fresh.clear()

    # Around a step

    def poll(self) -> bool:
        """Takes in what has ended and begins what follows from it. Whether anything has ended."""
        ended = self.transfers.poll() if self.books.tickets or self._unready else []
        for done in ended:
            self.books.settle(done)
        for writes in self._writes.values():
            writes.settle()
        if self._unready and (ready := self.transfers.take_ready_slots()):
            self._unready.difference_update(ready)
            self.slots.release(ready)
        self.fetcher.advance()
        self._write()
        return bool(ended)

    def before_step(self, launches: bool = False) -> None:
        """When the plan is made, and blocks have changed hands. `launches`: a step follows;
        `books.num_completed` is to tell of its end."""
        self.num_dropped += len(self._evicted)
        self._evicted.clear()
        if self._overtaken:  # copies out end in the order of their tickets
            self.transfers.order_behind(self._overtaken)
            self._overtaken = 0
        self.fetcher.advance()
        self.books.num_launched += launches

    def offload(self, idle: bool = False) -> None:
        """Begins to copy out what should leave, as far as slots and bandwidth allow. `idle`: no step will
        follow soon."""
        if self._is_due(idle):
            room = self._room()
            self._copy_out(
                *(self._new_blocks(room) if self.policy.on_registration else self._cold_blocks(room))
            )
            self._look_at_host()
            self._write()

    def tick(self) -> bool:
        """Instead of a step. Whether something is under way."""
        ended = True
        while ended:
            self.poll()
            self.before_step()
            self.offload(idle=True)
            ended = self.poll()
        return bool(self.books.tickets or self.fetcher.jobs or self._cut_short)

    # Everything else

    def quiesce(self, timeout_s: float = 60.0) -> None:
        """Afterwards no copy to or from the device is under way, and no fetch. Reads and writes of slots go
        on."""
        self.fetcher.close_all()
        deadline = self.books.clock() + timeout_s
        self.poll()
        while self._leaving or self.fetcher.jobs:
            time.sleep(POLL_S)
            self.poll()
            if self.books.clock() > deadline:
                raise RuntimeError(f"copies of KV blocks have not ended within {timeout_s} s")

    def forget_slots(self) -> None:
        """What the slots hold. What is under way ends, and is not kept."""
        self.books.epoch += 1
        self.slots.forget()
        self._kept.clear()
        self.slots.release([slot for slot, _ in self._staged])
        self._staged.clear()

    def flush(self, timeout_s: float) -> int:
        """Writes what lies above the persistent tiers only, for no longer than this. Returns how many blocks
        were left."""
        if not self.persistent:
            return 0
        self.quiesce()
        deadline, self._flushing = self.books.clock() + timeout_s, True
        self._kept.extend(
            meta.key
            for _, meta in reversed(self.slots.coldest(self.slots.num_slots))
            if not self._is_saved(meta.key)
        )
        blocks, metas = self._candidates(
            reversed(self.pool.coldest(self.pool.num_blocks)), self.pool.num_blocks
        )
        while (blocks or self.books.tickets or self._staged or self._kept) and self.books.clock() < deadline:
            if blocks and not self._leaving:
                if room := self._safe_room():
                    self._copy_out(blocks[:room], metas[:room])
                    del blocks[:room], metas[:room]
                elif not (self.books.tickets or self._staged or self._kept):
                    break  # what lies in the slots can't be written
            self._write()
            if not self.poll():
                time.sleep(POLL_S)
        self._flushing = False
        return len(blocks) + len(self._staged) + len(self._kept) + self._num_writing

    def check(self) -> None:
        """Proves the books."""
        in_use = [slot for slots, _ in self.books.tickets.values() for slot in slots]
        self.slots.check(
            [*self._unready, *in_use, *(slot for slot, _ in self._staged), *self.fetcher.held_slots()]
        )
        assert set(self._leaving.values()) <= self.books.tickets.keys(), "copies that nobody waits for"
        assert set(self.pool.cached_keys()) <= self._metas.keys(), (
            "a block on the device whose content is not known"
        )

    # Inside

    def _is_saved(self, key: bytes) -> bool:
        return all(tier.contains(key) for tier in self.persistent.values())

    def _is_due(self, idle: bool) -> bool:
        """Whether to look for blocks to copy out: not after every step where that takes long."""
        counts = (self._num_registered, self._num_evicted, self.pool.num_free)
        at, *then = self._scanned
        if self._cut_short:  # a look costs more than a few blocks are worth
            room, one_copy = self._room(), min(self.policy.copy_blocks, self.policy.max_leaving)
            return room >= one_copy or (room > 0 and (idle or self.books.clock() - at >= SCAN_S))
        if counts == tuple(then):
            return False
        pressed = self._num_evicted - then[1] >= self.policy.watermark // 4
        return idle or pressed or self.policy.watermark <= 256 or self.books.clock() - at >= SCAN_S

    def _room(self) -> int:
        """Blocks that may leave now."""
        return max(0, min(self._allowed(), self.policy.max_leaving - len(self._leaving)))

    def _allowed(self) -> int:
        """Blocks for which there are slots and bandwidth."""
        policy, now = self.policy, self.books.clock()
        # half are for what comes up
        room = self.slots.num_free if policy.keeps else self.slots.num_free - self.slots.num_slots // 2
        if policy.bytes_per_s is not None:
            most = max(policy.bytes_per_s, policy.block_bytes)
            self._allowance = min(most, self._allowance + (now - self._allowed_at) * policy.bytes_per_s)
            self._allowed_at = now
            room = min(room, int(self._allowance // policy.block_bytes))
        return max(0, room)

    def _safe_room(self) -> int:
        """Blocks that can leave without pushing out of the slots what is not written yet."""
        cold = self.slots.coldest(self.slots.num_free)
        num_saved = next((i for i, (_, meta) in enumerate(cold) if not self._is_saved(meta.key)), len(cold))
        return min(self.policy.max_leaving, self.slots.num_free - len(cold) + num_saved)

    def _save_evicted(self, taken: list[int]) -> int:
        """Copies out what these blocks, taken in this order, still hold. Returns the last copy's ticket, 0 if
        there is nothing to copy."""
        blocks = [
            block for block in taken if block in self._evicted and self._is_wanted(self._evicted[block].key)
        ]
        if not blocks:
            return 0
        # heads are taken last, and a tail is nothing without them
        blocks = blocks[max(0, len(blocks) - self._allowed()) :]
        return self._copy_out(blocks, [self._evicted.pop(block) for block in blocks])

    def _cold_blocks(self, room: int) -> tuple[list[int], list[BlockMeta]]:
        self._scanned = (self.books.clock(), self._num_registered, self._num_evicted, self.pool.num_free)
        return self._candidates(self.pool.coldest(self.policy.watermark), room)

    def _new_blocks(self, room: int) -> tuple[list[int], list[BlockMeta]]:
        """Those registered first."""
        found: dict[int, BlockMeta] = {}
        while self._fresh and len(found) < room:
            block = self.pool.find(self._fresh.popleft())
            if block is not None and (meta := self._candidate(block)) is not None:
                found[block] = meta
        self._cut_short = bool(self._fresh)
        return list(found), list(found.values())

    def _candidates(self, blocks: Iterable[int], room: int) -> tuple[list[int], list[BlockMeta]]:
        """The first of these that are to leave."""
        found: list[int] = []
        metas: list[BlockMeta] = []
        self._cut_short = False
        for block in blocks:
            if (meta := self._candidate(block)) is not None:
                if len(found) == room:
                    self._cut_short = True
                    break
                found.append(block)
                metas.append(meta)
        return found, metas

    def _candidate(self, block: int) -> BlockMeta | None:
        key = self.pool.key_of(block)
        if key is None or key in self._leaving or self.where(key) is not None or not self._is_wanted(key):
            return None
        return self._metas.get(key)

    def _is_wanted(self, key: bytes) -> bool:
        return self._uses is None or self._uses.count(key) >= self.policy.min_uses

    def _copy_out(self, blocks: list[int], metas: list[BlockMeta]) -> int:
        """Returns the last copy's ticket, 0 without any."""
        ticket = 0
        self._allowance -= len(blocks) * self.policy.block_bytes
        for at in range(0, len(blocks), self.policy.copy_blocks):
            some = slice(at, at + self.policy.copy_blocks)
            slots = self.slots.take(len(blocks[some]))
            assert slots is not None
            wait = self.policy.on_registration or self.books.in_use(blocks[some])  # else all of them are free
            ticket = self.transfers.copy_out(blocks[some], slots, wait)
            self._leaving.update((meta.key, ticket) for meta in metas[some])
            self.books.track(
                ticket, slots, partial(self._was_copied_out, metas[some], slots, self.books.epoch)
            )
        return ticket

    def _was_copied_out(self, metas: list[BlockMeta], slots: list[int], epoch: int, done: Done) -> None:
        for meta in metas:
            del self._leaving[meta.key]
        stats, keeps = self.stats[HOST], self.policy.keeps
        if done.seconds:
            self.costs.store[HOST].add(done.seconds, len(metas))
        through = bool(self.persistent) and (self.policy.on_registration or self._flushing)
        free = []
        for slot, meta, intact in zip(slots, metas, done.intact):
            stats.failed_blocks += not intact
            if not intact or epoch != self.books.epoch:
                free.append(slot)
            elif keeps:
                stats.stored_blocks += self.slots.put(slot, meta) == slot
                free.append(slot)
                if through:
                    self._kept.append(meta.key)
            else:
                self._staged.append((slot, meta))
        # the coldest on the device is the coldest here
        self.slots.release(free if self.policy.on_registration else free[::-1])

    def _look_at_host(self) -> None:
        """What is the coldest there is to be written ahead of its eviction."""
        if (
            self.policy.keeps
            and self.persistent
            and not self.policy.on_registration
            and not self._kept
            and (self.books.clock() - self._failed_at >= WRITE_REST_S)
        ):
            cold = self.slots.coldest(min(HOST_WATERMARK, self.slots.num_slots // 2))
            self._kept.extend(meta.key for _, meta in cold if not self._is_saved(meta.key))

    def _write(self) -> None:
        while (self._staged or self._kept) and self._num_writing < MAX_WRITING:
            batch: list[tuple[int, BlockMeta]] = []
            while self._staged and len(batch) < WRITE_BLOCKS:
                batch.append(self._staged.popleft())
            while self._kept and len(batch) < WRITE_BLOCKS:
                slot = self.slots.find(key := self._kept.popleft())
                if slot is not None and (meta := self.slots.meta(key)) is not None:
                    self.slots.hold([slot], use=False)
                    batch.append((slot, meta))
            for name, tier in self.persistent.items():
                new = [(slot, meta) for slot, meta in batch if not tier.contains(meta.key)]
                if new:
                    slots, metas = [slot for slot, _ in new], [meta for _, meta in new]
                    self.slots.hold(slots, use=False)
                    self._num_writing += len(new)
                    begun = self.books.clock()
                    self._writes[name].begun(begun)
                    ticket = self.transfers.write(name, metas, slots)
                    self.books.track(ticket, slots, partial(self._was_written, name, metas, slots, begun))
            self._release_written([slot for slot, _ in batch])

    def _release_written(self, slots: list[int]) -> None:
        """Those that were written ahead of their eviction were the coldest, and are again."""
        self.slots.release(slots, coldest=not self.policy.on_registration)

    def _was_written(
        self, name: str, metas: list[BlockMeta], slots: list[int], begun: float, done: Done
    ) -> None:
        self._num_writing -= len(metas)
        self._writes[name].ended(begun + done.seconds, sum(done.intact))
        self._release_written(slots)
        bad = [meta.key for meta, intact in zip(metas, done.intact) if not intact]
        self.stats[name].stored_blocks += len(metas) - len(bad)
        self.stats[name].failed_blocks += len(bad)
        if bad:
            self._failed_at = self.books.clock()
            self.transfers.disown(name, bad)
