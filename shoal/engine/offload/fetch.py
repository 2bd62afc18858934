"""The way up: fetches at work. Blocks of the host tier are copied in at once; those of persistent tiers are
read into slots first, a few at a time, while the ones before are copied in.

A fetch ends when all of it has come or failed; the scheduler then uses its leading intact blocks. One whose
sequence has left reads no further. Rank 0 alone, between steps. The way down, and who is asked for what:
engine/offload/offloader.py.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from shoal.api import KvTierStats
from shoal.engine.offload.costs import Costs, Throughput
from shoal.engine.offload.transfers import Done, Transfers
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.sequence import Fetch
from shoal.kv.block_file import BlockMeta
from shoal.kv.host import HostTier

HOST = "host"
READ_BLOCKS = 16  # of one read
MAX_READING = 256  # blocks, of all jobs: a tier lets so many wait
PATIENCE_S = 10.0  # with reads: then the sequence computes what has not come


@dataclass(slots=True)
class Books:
    """What both ways share."""

    slots: HostTier
    transfers: Transfers
    keeps: bool  # whether slots keep blocks: there is a host tier. Else they are a staging area
    costs: Costs
    stats: dict[str, KvTierStats]
    clock: Callable[[], float]
    epoch: int = 0  # resets so far: what was begun before the last is not kept
    # slots in use, and what follows
    tickets: dict[int, tuple[list[int], Callable[[Done], None]]] = field(default_factory=dict)
    num_launched: int = 0  # steps ...
    num_completed: int = 0  # ... whose end the host knows of: in order
    # block -> steps launched when a sequence let it go
    used_until: dict[int, int] = field(default_factory=dict)

    def track(self, ticket: int, slots: list[int], then: Callable[[Done], None]) -> None:
        self.tickets[ticket] = slots, then

    def in_use(self, blocks: Iterable[int]) -> bool:
        """Whether a step in flight may read or write one of these blocks, which no sequence had when they
        were taken."""
        return any(self.used_until.get(block, 0) > self.num_completed for block in blocks)

    def settle(self, done: Done) -> None:
        self.tickets.pop(done.ticket)[1](done)


@dataclass(slots=True, eq=False)
class Job:
    """Blocks are counted from the fetch's first; those from `end` on are given up."""

    fetch: Fetch
    metas: list[BlockMeta]
    host: list[tuple[int, int]]  # (block, slot), held and not yet begun
    unread: deque[tuple[int, str]]  # (block, tier)
    end: int
    expires: float
    arrived: list[bool]
    # the copy out of what these blocks have held until now, if there is one: copies in come after it
    behind: int = 0
    num_reading: int = 0
    num_copying: int = 0
    closed: bool = False  # nothing more is begun; what is still read goes to the host tier at best


class Fetcher:
    def __init__(self, scheduler: Scheduler, books: Books) -> None:
        self.scheduler, self.books = scheduler, books
        self.jobs: list[Job] = []
        self._num_reading = 0  # blocks
        self._reads = {tier: Throughput(rate) for tier, rate in books.costs.fetch.items()}

    def begin(self, fetch: Fetch, where: Callable[[bytes], str | None], block_size: int) -> Job:
        """Takes it in; `advance` begins the transfers."""
        books, slots = self.books, self.books.slots
        metas, host, unread = [], [], deque[tuple[int, str]]()
        seq, request = fetch.seq, fetch.seq.request
        for i, key in enumerate(fetch.keys):
            slot = slots.find(key) if books.keeps else None
            meta = None if slot is None else slots.meta(key)
            if slot is not None and meta is not None:
                host.append((i, slot))
                metas.append(meta)
            elif (tier := where(key)) is None:
                break  # evicted since the look-up: it and those behind are computed
            else:
                unread.append((i, tier))
                metas.append(
                    make_meta(
                        seq.keys,
                        fetch.start + i,
                        seq.token_ids,
                        block_size,
                        request.adapter,
                        request.cache_salt,
                    )
                )
        slots.hold([slot for _, slot in host])
        count = len(fetch.keys)
        job = Job(fetch, metas, host, unread, count, books.clock() + PATIENCE_S, [False] * count)
        self.jobs.append(job)
        return job

    def advance(self) -> None:
        """Begins what can begin, ends what has ended. Steps and copies that must run before have been
        launched."""
        for reads in self._reads.values():
            reads.settle()
        for job in list(self.jobs):
            if job.fetch.seq.fetch is not job.fetch or self.books.clock() > job.expires:
                self._close(job)
            if job.host:
                host, job.host = job.host, []
                self._copy_in(job, HOST, [i for i, _ in host], [slot for _, slot in host])
            while job.unread and not job.closed and self._read(job):
                pass
            under_way = job.num_copying or job.behind in self.books.tickets
            if not under_way and (job.closed or not (job.unread or job.num_reading)):
                self.jobs.remove(job)
                job.closed = True
                self.scheduler.fetched(job.fetch, (job.arrived + [False]).index(False))

    def close_all(self) -> None:
        """From now on `advance` only ends what is under way."""
        for job in self.jobs:
            self._close(job)

    @property
    def num_blocks(self) -> int:
        """That are still to come."""
        return sum(len(job.metas) for job in self.jobs)

    def held_slots(self) -> Iterable[int]:
        return (slot for job in self.jobs for _, slot in job.host)

    def _close(self, job: Job) -> None:
        job.closed = True
        job.unread.clear()
        self.books.slots.release([slot for _, slot in job.host])
        job.host.clear()

    def _read(self, job: Job) -> bool:
        """Begins one read, of blocks of one tier. False: not now."""
        books, tier = self.books, job.unread[0][1]
        most = min(READ_BLOCKS, books.slots.num_free, MAX_READING - self._num_reading)
        blocks: list[int] = []
        while job.unread and len(blocks) < most and job.unread[0][1] == tier:
            i, _ = job.unread.popleft()
            if i < job.end:
                blocks.append(i)
        if not blocks:
            return bool(most)  # the rest was given up
        slots = books.slots.take(len(blocks))
        assert slots is not None
        job.num_reading += 1
        self._num_reading += len(blocks)
        begun = books.clock()
        self._reads[tier].begun(begun)
        ticket = books.transfers.read(tier, [job.metas[i] for i in blocks], slots)
        books.track(ticket, slots, partial(self._was_read, job, tier, blocks, slots, books.epoch, begun))
        return True

    def _was_read(
        self, job: Job, tier: str, blocks: list[int], slots: list[int], epoch: int, begun: float, done: Done
    ) -> None:
        books = self.books
        self._reads[tier].ended(begun + done.seconds, sum(done.intact))
        job.num_reading -= 1
        self._num_reading -= len(blocks)
        good = [(i, slot) for i, slot, intact in zip(blocks, slots, done.intact) if intact]
        if len(good) < len(blocks):
            bad = [i for i, intact in zip(blocks, done.intact) if not intact]
            job.end = min(job.end, bad[0])
            books.stats[tier].failed_blocks += len(bad)
            books.transfers.disown(tier, [job.metas[i].key for i in bad])
            books.slots.release([slot for slot, intact in zip(slots, done.intact) if not intact])
        if books.keeps and epoch == books.epoch:
            for i, slot in good:
                books.slots.put(slot, job.metas[i])
        good_slots = [slot for _, slot in good]
        if job.closed or not good or good[0][0] >= job.end:
            books.slots.release(good_slots)
        else:
            self._copy_in(job, tier, [i for i, _ in good], good_slots)

    def _copy_in(self, job: Job, tier: str, blocks: list[int], slots: list[int]) -> None:
        job.num_copying += 1
        of_fetch = job.fetch.blocks
        into = [of_fetch[i] for i in blocks]
        ticket = self.books.transfers.copy_in(slots, into, self.books.in_use(into), job.behind)
        self.books.track(ticket, slots, partial(self._was_copied_in, job, tier, blocks, slots))

    def _was_copied_in(self, job: Job, tier: str, blocks: list[int], slots: list[int], done: Done) -> None:
        books = self.books
        job.num_copying -= 1
        books.slots.release(slots)
        if done.seconds:
            books.costs.fetch[HOST].add(done.seconds, len(blocks))
        stats = books.stats[tier]
        for i, intact in zip(blocks, done.intact):
            job.arrived[i] = intact
            stats.fetched_blocks += intact
            stats.failed_blocks += not intact


def make_meta(
    keys: list[bytes],
    i: int,
    token_ids: list[int],
    block_size: int,
    adapter: str | None,
    cache_salt: str | None,
) -> BlockMeta:
    tokens = array("I", token_ids[i * block_size : (i + 1) * block_size])
    return BlockMeta(keys[i], keys[i - 1] if i else None, tokens, (adapter, cache_salt))
