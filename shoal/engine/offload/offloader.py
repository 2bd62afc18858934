"""`Offloader`: which KV blocks leave the device ahead of their eviction, and which ones below are worth
fetching. fetch.py is the way up, writer.py the second half of the way down; transfers.py moves the blocks.

    device block  --copy out-->  host block  --write-->  disk or store        the way down
    device block  <--copy in---  host block  <--read---                       the way up

A host block is the place of one block in the pinned slab. With a host tier, host blocks keep what is copied
there; without one they are a small staging area. The scheduler keeps to its own cache: it calls `lookup` for
blocks in lower tiers, waits for the fetches that it begins, and the pool reports evictions. All transfers run
during the steps and are polled between them. A step that rewrites a block waits, on the device, for the copy
that still reads the block.

The Offloader itself handles device blocks. Whether a fetch pays is decided in engine/offload/costs.py, which
host block is given away next in kv/tiers/host.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shoal.engine.offload.costs import Costs
from shoal.engine.offload.fetch import Fetcher
from shoal.engine.offload.ledger import HOST, Ledger, meta_of, part_meta
from shoal.engine.offload.transfers import Done, Transfers
from shoal.engine.offload.writer import Writer
from shoal.engine.scheduling import sequence
from shoal.engine.scheduling.fetches import Fetch
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.state_blocks import StateBlocks
from shoal.hashing import part_key
from shoal.kv.groups import LayerGroup
from shoal.kv.places import Place, key_of
from shoal.kv.snapshots import StateSnapshot
from shoal.kv.tiers.block_file import BlockMeta
from shoal.kv.tiers.eviction import FrequencySketch
from shoal.kv.tiers.host import HostTier
from shoal.kv.tiers.tier import Tier
from shoal.stats import KvTierStats

SCAN_S = 0.1  # between scans of the coldest blocks, unless blocks are being taken quickly
POLL_S = 0.0003  # between polls while the engine waits for transfers
QUIESCE_S = 60.0  # the longest that copies may take until a sleep or a reset begins


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    block_size: int  # tokens
    block_bytes: int  # over all ranks
    has_host_tier: bool  # otherwise host memory is only a staging area
    watermark: int  # number of the device's coldest blocks to copy to a lower tier ahead of eviction
    # number of the host tier's coldest blocks to write to the persistent tiers ahead of eviction
    host_watermark: int
    max_leaving: int  # blocks that are copied out at the same time
    copy_blocks: int  # blocks of one copy out: a step that takes one of them may have to wait for all
    on_registration: bool = False  # copy out new blocks instead of cold ones
    min_uses: int = 1  # uses of a block before it is offloaded
    always_fetch: bool = False  # even where computing is faster
    bytes_per_s: float | None = None  # bandwidth of copies out; blocks beyond it are lost


@dataclass(frozen=True, slots=True)
class _Scan:
    """The time of a scan of the coldest blocks, and the counts at that time: blocks registered so far, the
    pool's `num_taken` and `num_free`, and in `num_safe` how many blocks may be taken before one that the scan
    did not see."""

    at: float
    num_registered: int
    num_taken: int
    num_free: int
    num_safe: int

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.num_registered, self.num_taken, self.num_free


class Offloader:
    """The tiers as the scheduler's blocks know them: a `Source`, a `BlockWatcher` and the pool's listener.
    `persistent`: the tiers below the host by name, in the order of lookups.

    Around a step: `poll`, `offload`, Scheduler.schedule, `before_step`, the step. When a step has run:
    `step_completed`. Without steps: `tick`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        host: HostTier,
        transfers: Transfers,
        persistent: Mapping[str, Tier],
        policy: OffloadPolicy,
        costs: Costs,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.pool = scheduler.blocks.pool
        self.host = host
        self.transfers = transfers
        self.persistent = persistent
        self.policy = policy
        self.costs = costs
        self.stats = {tier: KvTierStats() for tier in costs.fetch}
        self.num_dropped = 0  # blocks that were evicted from the device and are nowhere else
        self.ledger = Ledger(host, transfers, policy.has_host_tier, costs, self.stats, clock)
        self.fetcher = Fetcher(scheduler, self.ledger)
        self.writer = Writer(self.ledger, persistent, 0 if policy.on_registration else policy.host_watermark)
        self._metas: dict[bytes, BlockMeta] = {}  # metadata of each findable block on the device
        # Findable blocks on the device that lie before the window of their sequence: no tier takes them
        self._behind: set[bytes] = set()
        self._uses = FrequencySketch(self.pool.num_blocks + host.capacity) if policy.min_uses > 1 else None
        self._unready = set(host.take(host.capacity) or ())  # host blocks whose memory is not pinned yet
        self._leaving: dict[bytes, int] = {}  # blocks that are being copied out, with their tickets
        # Device blocks that were taken since the last step, with the metadata of content that is nowhere else
        self._evicted: dict[int, BlockMeta] = {}
        # Ticket of the newest copy out that must end before the next step, because the step may overwrite its
        # source; 0: none. Copies out end in the order of their tickets, so earlier ones have ended too.
        self._must_wait_for = 0
        # With on_registration: keys of new blocks that are to be copied out
        self._fresh: deque[bytes] = deque(maxlen=self.pool.num_blocks)
        self._parts: dict[bytes, StateSnapshot] = {}  # parts of snapshots that are being copied out
        self._flushing = False  # blocks that are copied out are written at once
        self._allowance = 0.0  # with bytes_per_s: bytes that may leave now
        self._allowed_at = clock()  # when the allowance last grew
        self._num_registered = 0  # blocks, since the start
        self._last_scan = _Scan(0.0, 0, 0, -1, 0)
        self._has_more = False  # the last scan found more blocks than there was room for

    # Calls of the scheduler and the pool

    def lookup(self, keys: Sequence[bytes], start: int, num_tokens: int | None = None) -> int:
        """Returns how many of the first blocks of keys[start:] are in lower tiers and worth fetching now.
        With `num_tokens` they are of use only together, in place of computing that many tokens."""
        if self._uses is not None:
            for key in keys[:start]:  # blocks found on the device
                self._uses.add(key)
        run: list[str] = []
        for key in keys[start:]:
            tier = self.where(key)
            if tier is None:
                break
            run.append(tier)
        if num_tokens is not None and start + len(run) < len(keys):
            return 0
        if self.policy.always_fetch:
            return len(run)
        # the evicted blocks are copied out before a fetch may take their place
        num_blocks_ahead = self.fetcher.num_blocks + len(self._evicted)
        fetch_ahead_s = self.costs.fetch[HOST].seconds * num_blocks_ahead
        to_prefill = self.scheduler.num_to_prefill
        if num_tokens is None:
            return self.costs.num_worth_fetching(run, to_prefill, fetch_ahead_s)
        are_worth_it = self.costs.are_worth_fetching(run, num_tokens, to_prefill, fetch_ahead_s)
        return len(run) if are_worth_it else 0

    def has(self, key: bytes) -> bool:
        return self.where(key) is not None

    def where(self, key: bytes) -> str | None:
        """Returns the highest tier that has the block."""
        if self._is_in_host_tier(key):
            return HOST
        return next((name for name, tier in self.persistent.items() if tier.contains(key)), None)

    def begin(self, fetch: Fetch) -> None:
        """Begins a fetch. The device blocks that it fills may still hold content that is nowhere else. This
        content is copied out first, as far as host blocks and bandwidth allow, and the copies in run after
        it.

        The fetch has references on the blocks that it fills, and ends after the copy out. The sequence's
        blocks after these may be read by the copy out too, so the fetch then gets references on them as
        well: if the sequence ends or is preempted, no other sequence rewrites a block that is still being
        read."""
        # first, as it holds the host blocks that the copy out could take otherwise
        job = self.fetcher.begin(fetch, self.where)
        # without the blocks that the sequence found in the cache: a step may be about to write them
        job.after = self._save_evicted(fetch.taken)
        if job.after:
            held = set(fetch.held_blocks)
            rest = [block for block in fetch.taken if block not in held]
            self.pool.hold(rest)
            fetch.held_blocks += rest

    def registered(self, seq: sequence.Sequence, start: int, blocks: Sequence[int], group: int = 0) -> None:
        groups, size, end = self.scheduler.blocks.groups, self.policy.block_size, start + len(blocks)
        for place in (Place(group, number) for number in range(start, end)):
            key = key_of(place, groups, seq.keys, size)
            if key not in self._metas:
                # blocks fetched by way of the host tier are known there
                self._metas[key] = self.host.meta(key) or meta_of(seq, place, groups, size)
            self._behind.discard(key)
            if self._uses is not None:
                self._uses.add(key)
            if self.policy.on_registration:
                self._fresh.append(key)
            if key in self._leaving:  # another block has the content now
                self._must_wait_for = max(self._must_wait_for, self._leaving[key])
        self._num_registered += len(blocks)
        if groups[group].window is not None:
            self._fall_behind(seq, groups[group], group, start, end)

    def _fall_behind(self, seq: sequence.Sequence, of: LayerGroup, group: int, start: int, end: int) -> None:
        """With these full blocks of a group with a window the sequence has moved on. The blocks that it does
        not see any more stay on the device at most, but for those that a next request sees which continues
        after the prompt or after the answer."""
        blocks, num_prompt = self.scheduler.blocks, seq.num_prompt_tokens
        first = of.first_block(max(0, num_prompt - blocks.largest))
        after_prompt = range(first, of.num_blocks(num_prompt))
        seen_from = [of.first_block(max(0, at * of.block_size - blocks.largest)) for at in (start, end)]
        for number in range(*seen_from):
            key = key_of(Place(group, number), blocks.groups, seq.keys, blocks.block_size)
            if number not in after_prompt and key in self._metas:
                self._behind.add(key)

    def released(self, blocks: Sequence[int]) -> None:
        self.ledger.used_until.update(dict.fromkeys(blocks, self.ledger.num_launched))
        if self._leaving:
            for key in map(self.pool.key_of, blocks):
                # a copy has the content from now on, and the block may be rewritten
                if key in self._leaving and self.pool.has_copies(key):
                    self._must_wait_for = max(self._must_wait_for, self._leaving[key])

    def removed(self, key: bytes, block: int) -> None:
        is_behind = key in self._behind
        self._behind.discard(key)
        meta, ticket = self._metas.pop(key, None), self._leaving.get(key)
        if ticket is not None:
            self._must_wait_for = max(self._must_wait_for, ticket)
        elif meta is not None and not is_behind and not self._goes_below(key):
            self._evicted[block] = meta

    def cleared(self) -> None:
        self._must_wait_for = max(self._leaving.values(), default=0)
        self._metas.clear()
        self._behind.clear()
        self._evicted.clear()
        self._fresh.clear()

    # Around a step

    def poll(self) -> bool:
        """Completes the transfers that have ended and begins their follow-ups. Returns whether any has
        ended."""
        ended = self.transfers.poll() if self.ledger.under_way or self._unready else []
        for done in ended:
            self.ledger.complete(done)
        if self._unready and (ready := self.transfers.take_ready()):
            self._unready.difference_update(ready)
            self.host.release(ready)
        self.fetcher.advance()
        self.writer.advance()
        return bool(ended)

    def before_step(self, launches: bool = False) -> None:
        """To be called when the plan is made and blocks have changed hands. `launches`: a step follows."""
        self.num_dropped += len(self._evicted)
        self._evicted.clear()
        if self._must_wait_for:
            self.transfers.order_after(self._must_wait_for)
            self._must_wait_for = 0
        self.fetcher.advance()
        self.ledger.num_launched += launches

    def step_completed(self) -> None:
        """The oldest step in flight has run."""
        self.ledger.num_completed += 1

    def offload(self, idle: bool = False) -> None:
        """Begins copies out, as far as host blocks and bandwidth allow. `idle`: no step will follow soon."""
        if isinstance(self.scheduler.blocks, StateBlocks):
            self._offload_snapshots(self.scheduler.blocks)
        if not self._is_due(idle):
            return
        if self.policy.on_registration:
            blocks, metas = self._new_blocks(self._room())
        else:
            blocks, metas = self._cold_blocks(self._room())
        self._copy_out(blocks, metas)
        self.writer.queue_coldest()
        self.writer.advance()

    def tick(self) -> bool:
        """To be called in place of a step while there is no work. Continues as long as transfers end at once,
        as they do on a CPU. Returns whether a transfer is under way."""
        while True:
            self.poll()
            self.before_step()
            self.offload(idle=True)
            if not self.poll():
                break
        return bool(self.ledger.under_way or self.fetcher.jobs or self._has_more)

    # Everything else

    @property
    def num_unready(self) -> int:
        """Host blocks whose memory cannot be used yet, as it is not pinned."""
        return len(self._unready)

    def quiesce(self) -> None:
        """Waits until no copy to or from the device is under way, and no fetch. Reads and writes of host
        blocks continue. Raises RuntimeError if copies have not ended after QUIESCE_S seconds."""
        self.fetcher.close_all()
        deadline = self.ledger.clock() + QUIESCE_S
        self.poll()
        while self._leaving or self.fetcher.jobs:
            time.sleep(POLL_S)
            self.poll()
            if self.ledger.clock() > deadline:
                raise RuntimeError(f"copies of KV blocks have not ended within {QUIESCE_S:g} s")

    def forget_host(self) -> None:
        """Forgets what the host blocks hold. Transfers under way end, and their blocks are not kept."""
        self.ledger.epoch += 1
        self.host.forget()
        self.writer.forget()

    def flush(self, timeout_s: float) -> int:
        """Writes blocks that no persistent tier has, for at most `timeout_s`. Returns the number of blocks
        left."""
        if not self.persistent:
            return 0
        self.quiesce()
        ledger, writer, num_blocks = self.ledger, self.writer, self.pool.num_blocks
        deadline, self._flushing = ledger.clock() + timeout_s, True
        writer.queue_all()
        blocks, metas = self._candidates(reversed(self.pool.coldest(num_blocks)), num_blocks)
        states = self.scheduler.blocks if isinstance(self.scheduler.blocks, StateBlocks) else None
        snapshots = states.left_behind if states is not None else ()
        while (blocks or snapshots or ledger.under_way or writer.has_waiting) and ledger.clock() < deadline:
            num_left = len(blocks), len(snapshots)
            if states is not None:
                self._offload_snapshots(states)
            if blocks and not self._leaving and (room := self._safe_room()):
                self._copy_out(blocks[:room], metas[:room])
                del blocks[:room], metas[:room]
            if num_left == (len(blocks), len(snapshots)) and not (ledger.under_way or writer.has_waiting):
                break  # the content of the host blocks can't be written
            writer.advance()
            if not self.poll():
                time.sleep(POLL_S)
        self._flushing = False
        return len(blocks) + writer.num_left

    def check(self) -> None:
        """Checks the blocks and transfers. Raises AssertionError."""
        under_way = self.ledger.under_way
        in_use = [host_block for host_blocks, _ in under_way.values() for host_block in host_blocks]
        waiting = [*self.writer.held_host_blocks(), *self.fetcher.held_host_blocks()]
        self.host.check([*self._unready, *in_use, *waiting])
        assert set(self._leaving.values()) <= under_way.keys(), "copies without a transfer"
        assert set(self.pool.cached_keys()) <= self._metas.keys(), (
            "a block on the device whose content is not known"
        )

    # Inside

    def _offload_snapshots(self, blocks: StateBlocks) -> None:
        """Begins copies of the snapshots that sequences have left behind. They are pinned until these end."""
        waiting, size = blocks.left_behind, blocks.snapshots.size
        while waiting:
            snapshot = waiting[0]
            keys = [part_key(snapshot.key, part) for part in range(size)]
            is_there = blocks.snapshots.find(snapshot.key) is snapshot and not any(
                key in self._leaving for key in keys
            )
            has = self._is_in_host_tier if self.policy.has_host_tier else self._goes_below
            if is_there and not all(map(has, keys)):
                if not self._has_room_for(size):
                    return
                blocks.keep(snapshot)
                self._parts.update(dict.fromkeys(keys, snapshot))
                self._copy_out(snapshot.blocks, [part_meta(key, blocks.groups) for key in keys])
            waiting.popleft()

    def _is_due(self, idle: bool) -> bool:
        """True if it is time to look for blocks to copy out. A scan of many blocks takes longer than a step
        should wait, so not every step is followed by one."""
        policy, pool, last = self.policy, self.pool, self._last_scan
        is_time = idle or self.ledger.clock() - last.at >= SCAN_S
        if self._has_more:
            # there are blocks that should leave; a look is worth its time once a whole copy has room
            room = self._room()
            return room >= min(policy.copy_blocks, policy.max_leaving) or (room > 0 and is_time)
        if (self._num_registered, pool.num_taken, pool.num_free) == last.counts:
            return False  # nothing has changed since
        # The next step may take blocks that were freed since. The watermark is two steps of blocks or more.
        num_safe = last.num_safe - (pool.num_taken - last.num_taken)
        return is_time or (num_safe < pool.num_free and 2 * num_safe <= policy.watermark)

    def _has_room_for(self, size: int) -> bool:
        """Returns whether the `size` parts of a snapshot may leave now."""
        if self._flushing:
            return self._safe_room() >= min(size, self.policy.max_leaving) and self.host.num_free >= size
        return self._room() >= min(size, self.policy.max_leaving) and self._allowed() >= size

    def _room(self) -> int:
        """Blocks that may leave now."""
        return max(0, min(self._allowed(), self.policy.max_leaving - len(self._leaving)))

    def _allowed(self) -> int:
        """Blocks for which there are host blocks and bandwidth."""
        policy, now, room = self.policy, self.ledger.clock(), self.host.num_free
        if not policy.has_host_tier:
            room -= self.host.capacity // 2  # half of the staging area is for fetches
        if policy.bytes_per_s is not None:
            most = max(policy.bytes_per_s, policy.block_bytes)
            self._allowance = min(most, self._allowance + (now - self._allowed_at) * policy.bytes_per_s)
            self._allowed_at = now
            room = min(room, int(self._allowance // policy.block_bytes))
        return max(0, room)

    def _safe_room(self) -> int:
        """Blocks that can leave without pushing out of host memory what is not written yet."""
        cold = self.host.coldest(self.host.num_free)
        num_saved = 0
        while num_saved < len(cold) and self.writer.is_saved(cold[num_saved][1].key):
            num_saved += 1
        return min(self.policy.max_leaving, self.host.num_free - len(cold) + num_saved)

    def _save_evicted(self, taken: list[int]) -> int:
        """Copies out the old content of these blocks, which were taken in this order: tails first. If only
        some can be saved, the last ones are, because heads are needed to use tails. Returns the last copy's
        ticket, 0 if there is nothing to copy."""
        blocks = []
        for block in taken:
            meta = self._evicted.get(block)
            if meta is not None and self._is_wanted(meta.key):
                blocks.append(block)
        if not blocks:
            return 0
        blocks = blocks[max(0, len(blocks) - self._allowed()) :]
        return self._copy_out(blocks, [self._evicted.pop(block) for block in blocks])

    def _cold_blocks(self, room: int) -> tuple[list[int], list[BlockMeta]]:
        """Up to `room` of the device's coldest blocks that are to leave."""
        pool, watermark = self.pool, self.policy.watermark
        coldest = pool.coldest(watermark)
        num_safe = watermark if len(coldest) == watermark else pool.num_free
        counts = self._num_registered, pool.num_taken, pool.num_free
        self._last_scan = _Scan(self.ledger.clock(), *counts, num_safe)
        return self._candidates(coldest, room)

    def _new_blocks(self, room: int) -> tuple[list[int], list[BlockMeta]]:
        """Up to `room` of the new blocks that are to leave, those registered first."""
        found: dict[int, BlockMeta] = {}
        while self._fresh and len(found) < room:
            block = self.pool.find(self._fresh.popleft())
            if block is not None and (meta := self._candidate(block)) is not None:
                found[block] = meta
        self._has_more = bool(self._fresh)
        return list(found), list(found.values())

    def _candidates(self, blocks: Iterable[int], room: int) -> tuple[list[int], list[BlockMeta]]:
        """The first of these that are to leave, up to `room`, each with its content."""
        found: list[int] = []
        metas: list[BlockMeta] = []
        self._has_more = False
        for block in blocks:
            if (meta := self._candidate(block)) is not None:
                if len(found) == room:
                    self._has_more = True
                    break
                found.append(block)
                metas.append(meta)
        return found, metas

    def _candidate(self, block: int) -> BlockMeta | None:
        """The block's content if it is to leave."""
        key = self.pool.key_of(block)
        if key is None or key in self._leaving or key in self._behind or not self._is_wanted(key):
            return None
        if self._is_in_host_tier(key) or self.writer.has(key) or self.writer.is_settled(key):
            return None
        return self._metas.get(key)

    def _is_in_host_tier(self, key: bytes) -> bool:
        return self.policy.has_host_tier and self.host.find(key) is not None

    def _goes_below(self, key: bytes) -> bool:
        """True if a tier has the block, or will have it once it is written. A staged block cannot be found
        yet."""
        return self.writer.has(key) or self.where(key) is not None

    def _is_wanted(self, key: bytes) -> bool:
        return self._uses is None or self._uses.count(key) >= self.policy.min_uses

    def _copy_out(self, blocks: list[int], metas: list[BlockMeta]) -> int:
        """Begins copies of these blocks into host blocks. Returns the last copy's ticket, 0 if there is
        none."""
        ticket, ledger, policy = 0, self.ledger, self.policy
        self._allowance -= len(blocks) * policy.block_bytes
        for at in range(0, len(blocks), policy.copy_blocks):
            some, some_metas = blocks[at : at + policy.copy_blocks], metas[at : at + policy.copy_blocks]
            host_blocks = self.host.take(len(some))
            assert host_blocks is not None
            # a step in flight may still write blocks that are new; cold ones are free
            wait = policy.on_registration or bool(self._parts) or ledger.in_use(some)
            ticket = self.transfers.copy_out(some, host_blocks, wait)
            self._leaving.update((meta.key, ticket) for meta in some_metas)
            then = partial(self._was_copied_out, some_metas, host_blocks, ledger.epoch)
            ledger.track(ticket, host_blocks, then)
        return ticket

    def _was_copied_out(self, metas: list[BlockMeta], host_blocks: list[int], epoch: int, done: Done) -> None:
        ended: set[StateSnapshot] = set()
        for meta in metas:
            del self._leaving[meta.key]
            if meta.key in self._parts:
                ended.add(self._parts.pop(meta.key))
        if ended and isinstance(self.scheduler.blocks, StateBlocks):
            for snapshot in ended.difference(self._parts.values()):
                self.scheduler.blocks.unpin(snapshot)
        stats = self.stats[HOST]
        if done.seconds:
            self.costs.store[HOST].add(done.seconds, len(metas))
        is_written_at_once = bool(self.persistent) and (self.policy.on_registration or self._flushing)
        released = []
        for host_block, meta, intact in zip(host_blocks, metas, done.intact):
            stats.failed_blocks += not intact
            if not intact or epoch != self.ledger.epoch:
                released.append(host_block)
            elif self.policy.has_host_tier:
                # put() returns another host block if one has this content already
                stats.stored_blocks += self.host.put(host_block, meta) == host_block
                released.append(host_block)
                if is_written_at_once:
                    self.writer.queue(meta.key)
            else:
                self.writer.stage(host_block, meta)
        # the coldest on the device is the coldest here
        self.host.release(released if self.policy.on_registration else released[::-1])
