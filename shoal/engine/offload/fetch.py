"""`Fetcher`: the way up: brings blocks that a sequence waits for from lower tiers to the device. offloader.py
decides which blocks; transfers.py moves them.

    disk or store  --read-->  host block  --copy in-->  device block

Blocks of the host tier are copied in at once. Blocks of persistent tiers are first read into host blocks, a
few at a time, while the ones before are copied in. A fetch ends when every block of it has arrived or failed;
the scheduler then uses its leading blocks that are intact. A fetch whose sequence has left reads no further.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from shoal.engine.offload.costs import Throughput
from shoal.engine.offload.ledger import HOST, Ledger, meta_of, part_meta
from shoal.engine.offload.transfers import Done
from shoal.engine.scheduling.fetches import Fetch
from shoal.engine.scheduling.part_state import CompletedFetch
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.kv.tiers.block_file import BlockMeta

READ_BLOCKS = 16  # blocks of one read
MAX_READING = 256  # blocks being read at once, for all fetches: the queue of a tier holds that many
PATIENCE_S = 10.0  # after this time the sequence computes what has not been read


@dataclass(slots=True, eq=False)
class FetchJob:
    """A fetch at work. Its blocks are counted from the fetch's first one."""

    fetch: Fetch
    metas: list[BlockMeta]
    in_host: list[tuple[int, int]]  # blocks whose copy has not begun, each with its host block, which is held
    unread: deque[tuple[int, str]]  # blocks that are to be read, each with its tier
    end: int  # this block and the blocks after it are abandoned
    begun_at: float
    arrived: list[bool]  # whether each block is on the device
    tiers: str  # tiers of the blocks
    # Ticket of the copy out that saves the old content of the fetch's device blocks; 0: none is needed.
    # Copies in run after it.
    after: int = 0
    num_reads: int = 0  # under way
    num_copies: int = 0  # under way
    closed: bool = False  # nothing more is begun; what is still read goes to the host tier at best


class Fetcher:
    """All fetches of one engine."""

    def __init__(self, scheduler: Scheduler, ledger: Ledger) -> None:
        self.scheduler = scheduler
        self.ledger = ledger
        self.jobs: list[FetchJob] = []
        self._num_reading = 0  # blocks
        self._reads = {tier: Throughput(rate) for tier, rate in ledger.costs.fetch.items()}

    def begin(self, fetch: Fetch, where: Callable[[bytes], str | None]) -> FetchJob:
        """Adds a fetch and holds its host blocks; `advance` begins the transfers. `where` returns the tier
        that has a block."""
        ledger, known = self.ledger, self.scheduler.blocks
        metas: list[BlockMeta] = []
        in_host: list[tuple[int, int]] = []
        unread: deque[tuple[int, str]] = deque()
        for i, key in enumerate(fetch.keys):
            host_block = ledger.host.find(key) if ledger.has_host_tier else None
            meta = None if host_block is None else ledger.host.meta(key)
            if host_block is not None and meta is not None:
                in_host.append((i, host_block))
                metas.append(meta)
            elif (tier := where(key)) is None:
                break  # evicted since the look-up: it and the blocks after it are computed
            else:
                unread.append((i, tier))
                if fetch.places[i].group == len(known.groups):
                    metas.append(part_meta(key, known.groups))
                else:
                    metas.append(meta_of(fetch.seq, fetch.places[i], known.groups, known.block_size))
        ledger.host.hold([host_block for _, host_block in in_host])
        num_blocks = len(fetch.keys)
        tiers = dict.fromkeys(([HOST] if in_host else []) + [tier for _, tier in unread])
        job = FetchJob(
            fetch, metas, in_host, unread, num_blocks, ledger.clock(), [False] * num_blocks, "+".join(tiers)
        )
        self.jobs.append(job)
        return job

    def advance(self) -> None:
        """Begins what can begin and ends what has ended. Steps and copies that must run before have been
        launched."""
        for reads in self._reads.values():
            reads.update_rate()
        for job in list(self.jobs):
            if job.fetch.seq.fetch is not job.fetch or self.ledger.clock() > job.begun_at + PATIENCE_S:
                self._close(job)
            if job.in_host:
                in_host, job.in_host = job.in_host, []
                blocks, host_blocks = [i for i, _ in in_host], [host_block for _, host_block in in_host]
                self._copy_in(job, HOST, blocks, host_blocks)
            while job.unread and not job.closed and self._read(job):
                pass
            is_copying = job.num_copies or job.after in self.ledger.under_way
            if not is_copying and (job.closed or not (job.unread or job.num_reads)):
                self.jobs.remove(job)
                job.closed = True
                num_intact = (job.arrived + [False]).index(False)
                seconds = self.ledger.clock() - job.begun_at
                job.fetch.seq.completed_fetches.append(
                    CompletedFetch(job.tiers, job.begun_at, seconds, num_intact)
                )
                self.scheduler.fetched(job.fetch, num_intact)

    def close_all(self) -> None:
        """From now on `advance` only ends what is under way."""
        for job in self.jobs:
            self._close(job)

    @property
    def num_blocks(self) -> int:
        """Blocks of all fetches that have not ended."""
        return sum(len(job.metas) for job in self.jobs)

    def held_host_blocks(self) -> Iterable[int]:
        """Held host blocks that no transfer uses yet."""
        return (host_block for job in self.jobs for _, host_block in job.in_host)

    def _close(self, job: FetchJob) -> None:
        job.closed = True
        job.unread.clear()
        self.ledger.host.release([host_block for _, host_block in job.in_host])
        job.in_host.clear()

    def _read(self, job: FetchJob) -> bool:
        """Begins one read, of blocks of one tier. False if none can begin now."""
        ledger, tier = self.ledger, job.unread[0][1]
        most = min(READ_BLOCKS, ledger.host.num_free, MAX_READING - self._num_reading)
        blocks: list[int] = []
        while job.unread and len(blocks) < most and job.unread[0][1] == tier:
            i, _ = job.unread.popleft()
            if i < job.end:
                blocks.append(i)
        if not blocks:
            return bool(most)  # the blocks taken off the queue had been abandoned
        host_blocks = ledger.host.take(len(blocks))
        assert host_blocks is not None
        job.num_reads += 1
        self._num_reading += len(blocks)
        begun = ledger.clock()
        self._reads[tier].begun(begun)
        ticket = ledger.transfers.read(tier, [job.metas[i] for i in blocks], host_blocks)
        then = partial(self._was_read, job, tier, blocks, host_blocks, ledger.epoch, begun)
        ledger.track(ticket, host_blocks, then)
        return True

    def _was_read(
        self,
        job: FetchJob,
        tier: str,
        blocks: list[int],
        host_blocks: list[int],
        epoch: int,
        begun: float,
        done: Done,
    ) -> None:
        ledger = self.ledger
        self._reads[tier].ended(begun + done.seconds, sum(done.intact))
        job.num_reads -= 1
        self._num_reading -= len(blocks)
        good = [(i, host_block) for i, host_block, intact in zip(blocks, host_blocks, done.intact) if intact]
        if len(good) < len(blocks):
            bad = [i for i, intact in zip(blocks, done.intact) if not intact]
            job.end = min(job.end, bad[0])
            ledger.stats[tier].failed_blocks += len(bad)
            ledger.transfers.disown(tier, [job.metas[i].key for i in bad])
            ledger.host.release([block for block, intact in zip(host_blocks, done.intact) if not intact])
        if ledger.has_host_tier and epoch == ledger.epoch:
            for i, host_block in good:
                ledger.host.put(host_block, job.metas[i])
        good_host_blocks = [host_block for _, host_block in good]
        if job.closed or not good or good[0][0] >= job.end:
            ledger.host.release(good_host_blocks)
        else:
            self._copy_in(job, tier, [i for i, _ in good], good_host_blocks)

    def _copy_in(self, job: FetchJob, tier: str, blocks: list[int], host_blocks: list[int]) -> None:
        ledger, of_fetch = self.ledger, job.fetch.blocks
        job.num_copies += 1
        into = [of_fetch[i] for i in blocks]
        # A step in flight may still write a snapshot there that was dropped.
        wait = ledger.in_use(into) or job.fetch.snapshot is not None
        ticket = ledger.transfers.copy_in(host_blocks, into, wait, job.after)
        ledger.track(ticket, host_blocks, partial(self._was_copied_in, job, tier, blocks, host_blocks))

    def _was_copied_in(
        self, job: FetchJob, tier: str, blocks: list[int], host_blocks: list[int], done: Done
    ) -> None:
        ledger = self.ledger
        job.num_copies -= 1
        ledger.host.release(host_blocks)
        if done.seconds:
            ledger.costs.fetch[HOST].add(done.seconds, len(blocks))
        stats = ledger.stats[tier]
        for i, intact in zip(blocks, done.intact):
            job.arrived[i] = intact
            stats.fetched_blocks += intact
            stats.failed_blocks += not intact
