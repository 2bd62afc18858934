"""`BlockEvents`: the part of an engine that publishes which KV blocks its device has, one batch a step.
kv/events/publisher.py sends the batches; the tiers below the device report their own blocks to it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.engine.scheduling.sequence import Sequence as EngineSequence
from shoal.engine.scheduling.sequence_blocks import SequenceBlocks
from shoal.engine.step_part import StepPart
from shoal.kv.events.publisher import KvEvents


class BlockEvents(StepPart):
    """`events` outlives the engine if another model takes its place, so it is not closed here."""

    def __init__(self, events: KvEvents, blocks: SequenceBlocks) -> None:
        self._events, self._blocks = events, blocks
        blocks.pool.listeners.append(self)

    def registered(self, seq: EngineSequence, start: int, blocks: Sequence[int], group: int) -> None:
        """An event has a run of adjacent findable blocks: a block that stays a copy ends the run, which began
        at `run`. Events report the blocks of the first group."""
        if group:
            return
        step = self._blocks.groups[0].block_size // self._blocks.block_size  # keys of the chain for a block
        size, end, run = self._blocks.groups[0].block_size, start + len(blocks), start
        for i in range(start, end + 1):
            if i < end and self._blocks.pool.key_of(blocks[i - start]) is not None:
                continue
            if run < i:
                self._events.stored(
                    seq.keys[(run + 1) * step - 1 : i * step : step],
                    seq.keys[run * step - 1] if run else None,
                    seq.token_ids[run * size : i * size],
                    seq.request.adapter,
                    seq.request.cache_salt,
                )
            run = i + 1

    # Calls of the pool

    def removed(self, key: bytes, block: int) -> None:
        self._events.removed(key, block)

    def cleared(self) -> None:
        self._events.cleared()
        self._events.flush()  # the next step, which would do it, may be far away

    # Around a step, and the rest

    def after_step(self, waits: bool) -> None:
        self._events.flush()

    def tick(self) -> bool:
        self._events.flush()
        return False

    def after_reset(self) -> None:
        self._events.flush()

    def start_anew(self) -> None:
        self._events.flush()

    def check(self) -> None:
        self._events.check(self._blocks.pool.cached_keys(), has_others=len(self._blocks.groups) > 1)

    def close(self) -> None:
        self._blocks.pool.listeners.remove(self)
