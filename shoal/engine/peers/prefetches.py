"""`Prefetches`: a prefetch request brings in the KV blocks of a prompt that another worker computes. This
part holds the blocks from the moment when they are there until the request's continuation starts with them.

    prefetch request   waiting -> fetching -> held here, without a row --------------> reported as ended
    continuation                              waiting (may_start: False until then) -> starts with the blocks

The scheduler runs both like any other sequences, but a prefetch request computes nothing. The full blocks
are in the prefix cache, with a snapshot if layers are recurrent; references keep them there. The tokens after
the last full block, the tail, have no key, so the continuation gets the tail's block by number
(Sequence.tail), one for each group of layers.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

from shoal.api import KV_CACHE, FinishReason, Output
from shoal.engine.scheduling.part_state import Tail, states_of
from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.engine.scheduling.sequence import Sequence, SequenceStatus
from shoal.engine.scheduling.sequence_blocks import NEVER
from shoal.engine.scheduling.state_blocks import StateBlocks
from shoal.engine.step_part import StepPart
from shoal.errors import RequestError
from shoal.hashing import keys_with_tail
from shoal.kv.groups import NO_BLOCK
from shoal.kv.places import places
from shoal.kv.snapshots import StateSnapshot

HOLD_S = 30.0  # a continuation comes within milliseconds, unless its router has died


@dataclass(slots=True)
class _Held:
    """The blocks of a prefetch request that has them all."""

    seq: Sequence
    blocks: list[int]
    tail: Tail | None
    snapshot: StateSnapshot | None  # with recurrent layers: the one after its last block
    until: float


class Prefetches(StepPart):
    """The prefetch requests of one engine. Times are seconds of `clock`."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._arriving: dict[str, Sequence] = {}  # requests whose blocks are not all there, by request id
        self._held: dict[str, _Held] = {}  # by request id
        self._continuations: dict[str, Sequence] = {}  # that have not started, by id of the prefetch request

    def added(self, seq: Sequence) -> None:
        request = seq.request
        if request.request_id in self._held:
            raise RequestError(
                f"request id {request.request_id!r} is in use; choose another or wait until that request "
                "has ended"
            )
        if request.fetches_only:
            self._arriving[request.request_id] = seq
        name = request.continues
        if name is None or name in self._continuations:
            return
        held = self._held.get(name)
        prefetch = self._arriving.get(name) if held is None else held.seq
        if prefetch is None:
            return  # it has ended, so its continuation is a request like any other
        self._continuations[name] = seq
        self._scheduler.give_turn(seq, (*prefetch.turn, 1))  # directly after the prefetch request
        if held is not None:
            self._hand_on(held, seq)

    def may_start(self, seq: Sequence) -> bool:
        return seq.request.continues not in self._arriving

    def before_schedule(self) -> None:
        for name, seq in list(self._arriving.items()):
            if seq.status is SequenceStatus.WAITING and seq.num_admissions:  # preempted
                self._scheduler.finish(name, FinishReason.LENGTH)
            if seq.status is SequenceStatus.FINISHED:
                del self._arriving[name]
            elif seq.status is SequenceStatus.PREFILL:
                del self._arriving[name]
                self._hold(name, seq)
        self._end_late_ones()

    def tick(self) -> bool:
        """Returns True while blocks are held, which may be for too long."""
        self._end_late_ones()
        return bool(self._held)

    def after_schedule(self, plan: StepPlan | None) -> list[Output]:
        """Ends the requests whose continuations have started, or have ended without that."""
        for name, seq in list(self._continuations.items()):
            if seq.num_admissions or seq.status is SequenceStatus.FINISHED:
                del self._continuations[name]
                if name in self._held:
                    self._end(name, FinishReason.LENGTH)
        return []

    def give_back(self) -> bool:
        """Ends the request whose blocks were held last. Its full blocks stay in the prefix cache until others
        need them."""
        if not self._held:
            return False
        self._end(next(reversed(self._held)), FinishReason.LENGTH)
        return True

    def aborted(self, request_id: str) -> None:
        if request_id in self._held:
            self._end(request_id, FinishReason.ABORT)

    def all_aborted(self) -> None:
        self._end_all(FinishReason.ABORT)

    def after_reset(self) -> None:
        self._end_all(FinishReason.LENGTH)

    def before_sleep(self, tags: abc.Sequence[str]) -> None:
        if KV_CACHE in tags:
            self._end_all(FinishReason.LENGTH)

    def weights_change(self) -> None:
        self._end_all(FinishReason.LENGTH)

    def start_anew(self) -> None:
        self._end_all(FinishReason.ABORT)

    def close(self) -> None:
        self._end_all(FinishReason.ABORT)

    def held_blocks(self) -> list[int]:
        """The blocks that are held, once for each request."""
        return [block for held in self._held.values() for block in held.blocks]

    def _end_late_ones(self) -> None:
        for name, held in list(self._held.items()):
            continuation = self._continuations.get(name)
            # Blocks of another prompt, or of a cache that was reset, may be just what it lacks.
            is_stuck = (
                continuation is not None
                and not self._scheduler.running
                and self._scheduler.blocks.lacks_room(continuation)
            )
            if is_stuck or self._clock() > held.until:
                self._end(name, FinishReason.LENGTH)

    def _hold(self, name: str, seq: Sequence) -> None:
        """Takes a sequence that has all the blocks it can get from the scheduler."""
        blocks, end = self._scheduler.blocks, seq.num_computed
        needed = places(blocks.groups, end)
        tail = None
        if end % blocks.largest and seq.register_at != NEVER:  # otherwise the cache was reset
            tables = []
            for group, table in zip(blocks.groups, seq.tables):
                first, num = group.first_block(end), group.num_blocks(end)
                tables.append([NO_BLOCK] * min(first, num) + table[first:num])
            keys = keys_with_tail(seq.keys, seq.root, seq.token_ids[:end], blocks.block_size)
            tail = Tail(tables, end, keys, blocks.pool.generation(tables[0][-1]))
        own = [seq.tables[group][number] for group, number in needed]
        snapshot = states_of(seq).restored if isinstance(blocks, StateBlocks) else None
        held = _Held(seq, own, tail, snapshot, self._clock() + HOLD_S)
        blocks.hold(held.blocks)
        if snapshot is not None and isinstance(blocks, StateBlocks):
            blocks.keep(snapshot)
        self._scheduler.take_out(seq)
        self._held[name] = held
        if name in self._continuations:
            self._hand_on(held, self._continuations[name])

    @staticmethod
    def _hand_on(held: _Held, continuation: Sequence) -> None:
        continuation.tail, continuation.was_prefetched = held.tail, True
        continuation.completed_fetches = held.seq.completed_fetches

    def _end(self, name: str, reason: FinishReason) -> None:
        """Releases the blocks of a prefetch request, and has its end reported."""
        held = self._held.pop(name)
        continuation = self._continuations.pop(name, None)
        if continuation is not None:
            continuation.tail, continuation.was_prefetched = None, False
        blocks = self._scheduler.blocks
        blocks.unhold(held.blocks)
        if held.snapshot is not None and isinstance(blocks, StateBlocks):
            blocks.unpin(held.snapshot)
        held.seq.finish_reason = reason
        self._scheduler.finished_outside.append(held.seq)

    def _end_all(self, reason: FinishReason) -> None:
        for name in list(self._held):
            self._end(name, reason)
