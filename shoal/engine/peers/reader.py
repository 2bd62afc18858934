"""`KvReader`: fetches blocks of prompts that other workers hold: a `Source` in addition to the tiers below
the device. The scheduler begins the fetches; engine/runner/rank_peers.py copies the blocks.

A request brings a ticket. From then on its blocks are held at their owner by a lease, which is renewed until
the request has started and has got what it lacks, or has ended. What can't be had is computed here.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, abc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from shoal.engine.ranks.ranks import Ranks
from shoal.engine.ranks.workers import Pending
from shoal.engine.runner import commands
from shoal.engine.runner.rank_peers import Ended
from shoal.engine.scheduling.fetches import Fetch
from shoal.engine.scheduling.part_state import CompletedFetch
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.sequence import Sequence, SequenceStatus
from shoal.engine.scheduling.state_blocks import StateBlocks
from shoal.hashing import part_key
from shoal.kv.transfer.lease import Lease
from shoal.kv.transfer.ticket import Failure, Ticket, TransferError, unseal
from shoal.stats import KvTransferStats
from shoal.telemetry.logs import about

logger = logging.getLogger(__name__)

MAX_OPENING = 16  # leases that are being opened at the same time
SILENT_S = 10.0  # time for which an owner that has not answered is not asked again
POLL_S = 0.0003  # between polls while nothing can be done but to wait
QUIESCE_S = 60.0
# Time without a step after which a request without room gives up its ticket. This engine's blocks are lent
# then, maybe to a worker whose requests lack the blocks that the ticket holds.
STUCK_S = 10.0


@dataclass(slots=True, eq=False)
class _OpenTicket:
    """A request's ticket, and the lease that it opens."""

    seq: Sequence
    sealed: bytes
    positions: dict[bytes, int]  # key of each block -> its position in the ticket
    opening: Future[Lease]
    lease: Lease | None = None
    renewed_at: float = 0.0
    num_jobs: int = 0  # fetches that read from it

    def positions_of(self, keys: abc.Sequence[bytes]) -> list[int]:
        """Returns the positions of the first of these blocks, as far as the ticket has them and they
        ascend."""
        found: list[int] = []
        for key in keys:
            position = self.positions.get(key, -1)
            if position < 0 or (found and position <= found[-1]):
                break
            found.append(position)
        return found


@dataclass(slots=True, eq=False)
class _Job:
    """A fetch that is under way."""

    fetch: Fetch
    opened: _OpenTicket
    positions: list[int]
    begun_at: float
    ended: list[Ended] = field(default_factory=list)  # results of the ranks that have ended it
    is_cancelled: bool = False


class KvReader:
    """The scheduler's `peers`: tickets, leases and fetches of one engine. All calls are made between
    steps, in the engine's thread."""

    def __init__(
        self, scheduler: Scheduler, ranks: Ranks, lends: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`lends`: this engine lends blocks, too."""
        self._scheduler, self._ranks, self._lends, self._clock = scheduler, ranks, lends, clock
        self._threads = ThreadPoolExecutor(MAX_OPENING, "kv-lease")
        self._silent_until: dict[str, float] = {}  # by the address of an owner that has not answered
        self._opened: list[_OpenTicket] = []
        self._opening: set[Sequence] = set()  # sequences whose lease is being opened
        self._ran_at = clock()  # the time of the last step or fetch
        self._begun: list[_Job] = []  # their transfers begin with the next step
        self._jobs: dict[int, _Job] = {}  # by number
        self._last_number = 0
        self._replies: Pending[list[Ended]] | None = None
        self.transfers: dict[str, KvTransferStats] = {}  # by transport
        self.failures = Counter[str]()

    @property
    def is_busy(self) -> bool:
        return bool(self._opened or self._jobs or self._begun)

    # Requests

    def ask(self, seq: Sequence) -> None:
        """For a new sequence that brings a ticket: it starts when the ticket's owner has answered."""
        sealed = seq.request.kv_ticket
        if sealed is None:
            return
        try:
            positions = self._positions(unseal(sealed))
        except TransferError as error:
            self._failed(seq, error.failure, str(error))
            return
        if not self._opened:
            self._ran_at = self._clock()
        self._opening.add(seq)
        self._opened.append(_OpenTicket(seq, sealed, positions, self._threads.submit(self._open, sealed)))

    def _positions(self, ticket: Ticket) -> dict[bytes, int]:
        """Returns the position of each block of a ticket by its key. If the owner has another
        tensor-parallel size, its snapshot may be in fewer parts than here: further positions are then after
        the ticket's."""
        positions = {key: position for position, key in enumerate(ticket.keys)}
        blocks = self._scheduler.blocks
        if isinstance(blocks, StateBlocks) and ticket.keys and len(blocks.groups) in ticket.groups:
            first = ticket.groups.index(len(blocks.groups))
            key = part_key(ticket.keys[first], 0)  # the snapshot's, as this changes a key and back
            positions |= {part_key(key, part): first + part for part in range(blocks.snapshots.size)}
        return positions

    def is_opening(self, seq: Sequence) -> bool:
        """True if the owner of the sequence's ticket has not answered yet."""
        return seq in self._opening

    def _open(self, sealed: bytes) -> Lease:
        """Runs in one of few threads. Requests that wait for a thread while an owner is silent don't wait for
        the same silence once more."""
        server = unseal(sealed).server
        if self._clock() < self._silent_until.get(server, 0.0):
            raise TransferError(Failure.LATE, f"{server} has not answered others either")
        try:
            return Lease(sealed)
        except TransferError as error:
            if error.failure is Failure.LATE:
                self._silent_until[server] = self._clock() + SILENT_S
            raise

    # Questions of the scheduler

    def lookup(self, keys: abc.Sequence[bytes], start: int, num_tokens: int | None = None) -> int:
        num_blocks = len(self._find(keys[start:])[1])
        return num_blocks if num_tokens is None or start + num_blocks == len(keys) else 0

    def has(self, key: bytes) -> bool:
        return any(opened.lease is not None and key in opened.positions for opened in self._opened)

    def begin(self, fetch: Fetch) -> None:
        opened, positions = self._find(fetch.keys)
        assert opened is not None
        opened.num_jobs += 1
        self._begun.append(_Job(fetch, opened, positions, self._clock()))

    def _find(self, keys: abc.Sequence[bytes]) -> tuple[_OpenTicket | None, list[int]]:
        """The ticket that has the most of the first of these blocks, and their positions in its ticket."""
        best: _OpenTicket | None = None
        found: list[int] = []
        for opened in self._opened:
            if opened.lease is not None and len(positions := opened.positions_of(keys)) > len(found):
                best, found = opened, positions
        return best, found

    # Around a step

    def before_schedule(self) -> None:
        """Takes in what has ended, and keeps leases alive."""
        if self._jobs:
            self._ran_at = self._clock()
            self._poll()
        for opened in list(self._opened):
            if not self._keep(opened):
                self._drop(opened)

    def begin_fetches(self, has_step: bool) -> None:
        """Begins the fetches of the plan that was just made, if `has_step`. The steps and copies that may
        still use their blocks have been launched or are known to the device."""
        if has_step:
            self._ran_at = self._clock()
        begun, self._begun = self._begun, []
        for job in begun:
            self._last_number += 1
            self._jobs[self._last_number] = job
            self._ranks.send(
                commands.PEERS_FETCH, self._last_number, job.opened.sealed, job.positions, job.fetch.blocks
            )

    def _keep(self, opened: _OpenTicket) -> bool:
        """True if the ticket is still needed. Renews its lease."""
        if opened.lease is None:
            if not opened.opening.done():
                return True
            self._opening.remove(opened.seq)
            try:
                opened.lease = opened.opening.result()
            except TransferError as error:
                self._failed(opened.seq, error.failure, str(error))
                return False
            opened.renewed_at = self._clock()
        seq = opened.seq
        has_started = seq.num_admissions > 0 and seq.status is not SequenceStatus.FETCHING
        if not opened.num_jobs and (has_started or seq.status is SequenceStatus.FINISHED):
            return False
        is_idle = self._lends and self._clock() - self._ran_at > STUCK_S
        if is_idle and seq.status is SequenceStatus.WAITING and self._scheduler.blocks.lacks_room(seq):
            opened.lease.release()
            self._failed(seq, Failure.LATE, f"no room for them in {STUCK_S:g} s without a step")
            return False
        if self._clock() - opened.renewed_at > opened.lease.ticket.lease_s / 3:
            opened.renewed_at = self._clock()
            try:
                opened.lease.renew()
            except TransferError as error:
                self._failed(seq, error.failure, str(error))
                return False
        return True

    def _drop(self, opened: _OpenTicket) -> None:
        self._opened.remove(opened)
        if opened.lease is not None and opened.seq.num_admissions:
            opened.lease.release()
        elif opened.lease is not None:
            opened.lease.close()

    def _poll(self) -> None:
        for number, job in self._jobs.items():
            if job.fetch.seq.fetch is not job.fetch and not job.is_cancelled:
                self._cancel(number, job)
        reports = [self._ranks.runner.peers.poll()]
        if self._replies is not None and self._replies.complete:
            reports += self._replies.results()
            self._replies = None
        if self._replies is None:
            self._replies = self._ranks.ask_others(commands.PEERS_POLL)
        for report in reports:
            for of_rank in report:
                ended = Ended(*of_rank)
                job = self._jobs[ended.number]
                job.ended.append(ended)
                if ended.failure and not job.is_cancelled:  # the other ranks' bytes are of no use
                    self._cancel(ended.number, job)
                if len(job.ended) == self._ranks.size:
                    del self._jobs[ended.number]
                    self._end(job)

    def _cancel(self, number: int, job: _Job) -> None:
        job.is_cancelled = True
        self._ranks.send(commands.PEERS_CANCEL, number)

    def _end(self, job: _Job) -> None:
        job.opened.num_jobs -= 1
        num_blocks = len(job.positions)
        failed = [ended for ended in job.ended if ended.failure]
        for ended in failed:
            if ended.failure != Failure.CANCELLED:
                self._failed(job.fetch.seq, ended.failure, ended.message)
                break
        if not failed and job.ended:
            stats = self.transfers.setdefault(job.ended[0].transport, KvTransferStats())
            stats.blocks += num_blocks
            stats.num_bytes += sum(ended.num_bytes for ended in job.ended)
            stats.seconds += max(ended.seconds for ended in job.ended)
        num_intact = num_blocks if job.ended and not failed else 0
        seconds = self._clock() - job.begun_at
        job.fetch.seq.completed_fetches.append(CompletedFetch("worker", job.begun_at, seconds, num_intact))
        self._scheduler.fetched(job.fetch, num_intact)

    def _failed(self, seq: Sequence, failure: str, message: str) -> None:
        """Counts a failure and logs it: the first of a kind as a warning, later ones at debug level."""
        self.failures[failure] += 1
        level = logging.WARNING if self.failures[failure] == 1 else logging.DEBUG
        if logger.isEnabledFor(level):
            text = f"computes KV blocks that another worker has, as they can't be had ({failure}): {message}"
            logger.log(level, about(seq.request.log_id, text, failure=failure))

    # Everything else

    def quiesce(self) -> None:
        """Afterwards nothing is read into the cache. Raises RuntimeError if a rank does not come to an
        end."""
        begun, self._begun = self._begun, []
        for job in begun:
            self._end(job)
        deadline = self._clock() + QUIESCE_S
        for number, job in self._jobs.items():
            if not job.is_cancelled:
                self._cancel(number, job)
        while self._jobs:
            self._poll()
            if self._clock() > deadline:
                raise RuntimeError(f"reads of other workers' KV blocks have not ended within {QUIESCE_S} s")
            if self._jobs:
                time.sleep(POLL_S)

    def abandon(self) -> None:
        """To be called after an interrupt, when it is unknown which fetches a rank has begun, and all
        requests have been aborted. Afterwards nothing is read into the cache. For one rank; the step loop
        ends the fetches."""
        self._ranks.runner.peers.abandon()
        self._begun.clear()
        self._jobs.clear()
        for opened in self._opened:
            opened.num_jobs = 0

    def check(self) -> None:
        """Checks its state by assertions."""
        fetches = [job.fetch for job in (*self._begun, *self._jobs.values())]
        assert all(fetch in self._scheduler.blocks.fetches.under_way for fetch in fetches), (
            "a fetch that the scheduler does not know"
        )
        jobs = Counter(id(job.opened) for job in (*self._begun, *self._jobs.values()))
        assert all(opened.num_jobs == jobs[id(opened)] for opened in self._opened), (
            "fetches of a ticket miscounted"
        )

    def close(self) -> None:
        """Ends all leases, so that the owners release their blocks."""
        self._threads.shutdown(cancel_futures=True)
        for opened in self._opened:
            if not opened.opening.cancelled() and opened.opening.exception() is None:
                opened.opening.result().close()
        self._opened.clear()
