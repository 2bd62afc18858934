"""`StateBlocks`: `GroupedBlocks` of a model with recurrent layers. It plans which snapshots of state rows are
taken and which are restored.

A state cannot be cut back, so a prefix is found only up to a snapshot (kv/snapshots.py). A snapshot is taken
at the end of a block:

    of a prompt    the last full block, and the one before it, as templates change a prompt's last tokens
                   with the next turn; the last block of the prefix whose KV was found, if it has no snapshot
                   yet, as later prompts will part from the prefix there, too; and the last block that a
                   waiting sequence has in common with this one. Chunks end at these points. At the end of
                   another chunk a snapshot is taken if the tokens since the last one have KV of its size
    of an answer   each full block. The snapshot replaces the one before, so that a sequence that ends or is
                   preempted leaves one

A step has copies between rows and snapshots: rows are restored before it, and snapshots are taken after it.
So later plans can find a snapshot; one of an answer only when the host has seen all of its tokens.

With drafts the host does not know which step passes the end of a block. So every step that may pass it plans
the copy into the same snapshot, and the device copies in the step that does pass it (state_rows.py)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import abc, deque
from dataclasses import dataclass

from shoal.engine.scheduling.grouped_blocks import GroupedBlocks
from shoal.engine.scheduling.part_state import SeqStates, StateCopies, states_of
from shoal.engine.scheduling.seams import SeqPart
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.scheduling.sequence_blocks import NEVER, SequenceBlocks
from shoal.engine.scheduling.state_fetches import StateFetches
from shoal.kv.groups import LayerGroup
from shoal.kv.places import match, measure
from shoal.kv.snapshots import Snapshots, StateSnapshot
from shoal.stats import Stats

# A chunk that ends for the sake of a waiting sequence costs a step, which takes about as long as this many
# tokens of a prompt.
CUT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SnapshotRoom:
    """blocks: the number of blocks of a snapshot. reserved: the number of blocks for snapshots alone, after
    the KV blocks; 0: snapshots and KV share all blocks. drafts: a decode may have several tokens."""

    blocks: int
    reserved: int = 0
    drafts: bool = False


def blocks_for(
    groups: abc.Sequence[LayerGroup],
    num_blocks: int,
    block_size: int,
    enable_prefix_caching: bool,
    chunk: int,
    max_model_len: int,
    snapshots: SnapshotRoom | None = None,
) -> SequenceBlocks:
    """Returns the blocks of a model with these groups. No groups: all layers see everything and share
    blocks. `snapshots`: None if no layer is recurrent."""
    if snapshots is None and all(group.window is None for group in groups) and len(groups) < 2:
        return SequenceBlocks(num_blocks, block_size, enable_prefix_caching)
    args = groups, num_blocks, block_size, enable_prefix_caching, chunk, max_model_len
    return GroupedBlocks(*args) if snapshots is None else StateBlocks(*args, snapshots)


class StateBlocks(GroupedBlocks):
    """`snapshots`: the kept states. `Sequence.states` is written here alone."""

    fetches_class = StateFetches
    fetches: StateFetches

    def __init__(
        self,
        groups: abc.Sequence[LayerGroup],
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        chunk: int,
        max_model_len: int,
        room: SnapshotRoom,
    ) -> None:
        super().__init__(groups, num_blocks, block_size, enable_prefix_caching, chunk, max_model_len)
        self.snapshots = Snapshots(self.pool, room.blocks, room.reserved)
        self._drafts = room.drafts
        self.fetches.snapshots, self.fetches.watchers = self.snapshots, self.watchers
        # With lower tiers: snapshots of sequences that have ended, the oldest first
        self.left_behind: deque[StateSnapshot] = deque(maxlen=num_blocks)
        self._kept: list[StateSnapshot] = []  # by parts of the engine
        # A snapshot takes as many bytes as the KV of this many tokens. At this distance a byte of either
        # saves as much computing, whatever a token costs.
        blocks_a_token = sum(1 / group.block_size for group in groups if group.window is None)
        self._distance = room.blocks / blocks_a_token if blocks_a_token else chunk

    # A sequence's life

    def find(self, seq: Sequence) -> tuple[list[list[int]], int]:
        tables, matched = super().find(seq)
        size, end = self.block_size, matched
        while (found := self.snapshots.longest(seq.keys, end // size) * size) < end:
            tables, end = match(self.pool, self.groups, seq.keys[: found // size], size)
        prompt, whole = (n // self.largest * self.largest for n in (seq.num_prompt_tokens, seq.num_tokens))
        points = sorted({point for point in (prompt - self.largest, prompt, whole, matched) if point > end})
        seq.states = SeqStates(points if self.pool.enable_caching else [], matched, kept_at=end)
        return tables, end

    def fit(self, seq: Sequence, start: int, num_tokens: int) -> int:
        """Ends a chunk at the next point, and else at the end of a block, where a snapshot can be taken."""
        num_tokens = super().fit(seq, start, num_tokens)
        end, size = start + num_tokens, self.largest
        if self.pool.enable_caching and seq.register_at != NEVER:
            point = next((point for point in states_of(seq).points if point > start), end)
            if point < end:
                end = point
            elif start < end // size * size and end < seq.num_tokens:
                end = end // size * size
        return end - start

    def start(self, seq: Sequence, found: list[list[int]], num_cached: int) -> bool:
        snapshot = None
        if num_cached:
            snapshot = self.snapshots.find(seq.keys[num_cached // self.block_size - 1])
            assert snapshot is not None, "a prefix without a snapshot"
            self.snapshots.pin(snapshot)
        if not super().start(seq, found, num_cached):
            if snapshot is None:
                return False
            self.snapshots.unpin(snapshot)
            if self._num_free < self.pool.num_blocks:
                return False
            # No other sequence will give blocks back: this one needs the blocks of the snapshot, too.
            snapshot, num_cached, states_of(seq).kept_at = None, 0, 0
            if not super().start(seq, [[] for _ in self.groups], 0):
                return False
        if snapshot is not None:
            self.snapshots.use(snapshot)
        states = states_of(seq)
        states.restored = snapshot
        if seq.num_admissions == 1:
            seq.num_recomputed_tokens = states.matched - num_cached
        return True

    def computed(self, seq: Sequence) -> None:
        super().computed(seq)
        new = states_of(seq).new
        while new and new[0][0] < seq.register_at:
            end, snapshot = new.pop(0)
            if self.snapshots.is_new(snapshot):
                self._make_snapshot_findable(seq, end, snapshot)

    def copies(self, scheduled: abc.Sequence[SeqPart]) -> StateCopies | None:
        restores: list[tuple[int, list[int]]] = []
        saves: list[tuple[int, list[int]]] = []
        ends: list[int] = []
        # A snapshot that this step takes must not make room for another one of the same step: the device
        # copies all of them at once.
        pinned: list[StateSnapshot] = []
        for entry in scheduled:
            seq, states, end = entry.seq, states_of(entry.seq), entry.start + entry.num_tokens
            if states.restored is not None:
                restores.append((entry.row, states.restored.blocks))
                self.snapshots.begin_use(states.restored)
                self.snapshots.unpin(states.restored)
                states.used.append(states.restored)
                states.restored = None
            if seq.register_at == NEVER:
                continue
            if self._drafts and entry.samples:
                planned = self._plan_saves(seq, end)
            else:
                own = self._save(seq, end) if end % self.largest == 0 else None
                planned = [] if own is None else [(0, own)]
            for due, snapshot in planned:
                saves.append((entry.row, snapshot.blocks))
                ends.append(due)
                if not self.snapshots.is_new(snapshot):
                    self.snapshots.pin(snapshot)
                    pinned.append(snapshot)
        for snapshot in pinned:
            self.snapshots.unpin(snapshot)
        if not (restores or saves):
            return None
        return StateCopies(restores, saves, ends if self._drafts else None)

    def release(self, seq: Sequence) -> None:
        super().release(seq)
        states = states_of(seq)
        if states.restored is not None:
            self.snapshots.unpin(states.restored)
        self._drop_new(states)
        # Its snapshots become as old as its blocks, not older.
        for snapshot in (*states.used, states.latest):
            if snapshot is not None and self.snapshots.end_use(snapshot):
                self.snapshots.use(snapshot)
                if self.fetches.sources:
                    self.left_behind.append(snapshot)
        seq.states = None

    # Snapshots that parts of the engine keep

    def keep(self, snapshot: StateSnapshot) -> None:
        """Keeps the content of a snapshot until `unpin`: it is being copied, is lent, or a request will
        continue from it."""
        self.snapshots.pin(snapshot)
        self._kept.append(snapshot)

    def unpin(self, snapshot: StateSnapshot) -> None:
        self._kept.remove(snapshot)
        self.snapshots.unpin(snapshot)

    # Everything else

    def reset(self, running: abc.Iterable[Sequence]) -> bool:
        running = list(running)
        for seq in running:
            states = states_of(seq)
            self._drop_new(states)
            states.points, states.latest, states.used = [], None, []
        self.snapshots.forget_all()
        return super().reset(running)

    def fill_in(self, stats: Stats) -> None:
        super().fill_in(stats)
        snapshots = self.snapshots
        for blocks in snapshots.held():
            for block in blocks:
                stats.kv_groups[self._group_of[block]].used_blocks -= 1
        stats.num_free_blocks = self._num_free
        stats.num_snapshots, stats.num_free_snapshots = snapshots.num_found, snapshots.num_free

    def check(self, running: abc.Sequence[Sequence]) -> None:
        super().check(running)
        states = [states_of(seq) for seq in running]
        pinned = [own.restored for own in states if own.restored is not None] + self._kept
        pinned += [fetch.snapshot for fetch in self.fetches.under_way if fetch.snapshot is not None]
        new = [snapshot for own in states for _, snapshot in own.new if self.snapshots.is_new(snapshot)]
        users = [one for own in states for one in (*own.used, own.latest) if one is not None]
        self.snapshots.check(pinned, new, users)
        for seq, own in zip(running, states):
            assert all(end >= seq.register_at for end, _ in own.new), "a snapshot that waits for nothing"

    # Inside

    @property
    def _num_free(self) -> int:
        return self.pool.num_free + self.snapshots.num_free_blocks

    def _allocate(self, num_blocks: int, shared: abc.Sequence[int] = ()) -> list[int] | None:
        if num_blocks:
            self.pool.hold(shared)  # found blocks must not be evicted to make room
            self.snapshots.make_room(num_blocks)
            self.pool.release(shared)
        return super()._allocate(num_blocks, shared)

    def _measure(self, seq: Sequence) -> tuple[int, int]:
        end, num_held = super()._measure(seq)
        size = self.block_size
        while (found := self.snapshots.longest(seq.keys, end // size) * size) < end:
            end, num_held = measure(self.pool, self.groups, seq.keys[: found // size], size)
        return end, num_held

    def _num_promises(self, seq: Sequence, index: int, end: int) -> int:
        """Returns how many running sequences will take a snapshot from which this one can begin. Adds a
        snapshot where the tokens of both part, if it saves more than it costs."""
        size, num_promises = self.block_size, 0
        for other in self._prefilling:
            parting = _num_common(seq.keys[:end], other.keys, index) * size // self.largest * self.largest
            # snapshots that were planned in this step are not findable yet
            behind = max(index * size, other.num_computed - 1)
            points = states_of(other).points
            coming = [point for point in points if behind < point <= parting]
            if parting - max([behind, *coming]) >= CUT_TOKENS:
                insort(points, parting)
                coming.append(parting)
            num_promises += bool(coming)
        return num_promises

    def _held_more(self) -> abc.Iterable[list[int]]:
        return self.snapshots.held()

    def _plan_saves(self, seq: Sequence, end: int) -> list[tuple[int, StateSnapshot]]:
        """Plans a snapshot at each end of a block, up to `end`, that a sequence may pass in a step with
        drafts. Returns these ends with their snapshots."""
        states, size = states_of(seq), self.largest
        # An end that an earlier step may have passed without a snapshot gets none.
        first = max(states.planned_to, len(seq.token_ids) - 1) // size * size + size
        planned = []
        for point in range(first, end + 1, size):
            states.planned_to = point
            snapshot = self._save(seq, point)
            if snapshot is not None and point < seq.register_at:
                planned.append((point, snapshot))
        waiting = [(point, snapshot) for point, snapshot in states.new if self.snapshots.is_new(snapshot)]
        return planned + waiting

    def _save(self, seq: Sequence, end: int) -> StateSnapshot | None:
        """Plans the snapshot of a sequence that will have computed `end` tokens. Returns it, or None if there
        is one already, or no room."""
        is_findable = end < seq.register_at
        if is_findable:
            found = self.snapshots.find(seq.keys[end // self.block_size - 1])
            if found is not None:
                self._pass_on(states_of(seq), end, found)
                return None
        snapshot = self.snapshots.take()
        if snapshot is None:
            return None
        if is_findable:
            self._make_snapshot_findable(seq, end, snapshot)
        else:
            states_of(seq).new.append((end, snapshot))
        return snapshot

    def _make_snapshot_findable(self, seq: Sequence, end: int, snapshot: StateSnapshot) -> None:
        states, key = states_of(seq), seq.keys[end // self.block_size - 1]
        found = self.snapshots.find(key)
        if found is not None:
            self.snapshots.drop(snapshot)
            self._pass_on(states, end, found)
            return
        self.snapshots.register(snapshot, key)
        for watcher in self.watchers:
            watcher.kept(seq, end)
        is_kept = end in states.points or end - states.kept_at >= self._distance
        self._pass_on(states, end, snapshot if is_kept else None)
        if not is_kept:
            self.snapshots.begin_use(snapshot)
            states.latest = snapshot

    def _pass_on(self, states: SeqStates, end: int, kept: StateSnapshot | None) -> None:
        """Replaces a sequence's latest snapshot, as there is one at `end` now: `kept`, if that one stays."""
        latest, states.latest = states.latest, None
        is_findable = latest is not None and self.snapshots.end_use(latest)
        if latest is not None and is_findable and not (latest.is_used or latest.num_users):
            self.snapshots.drop(latest)
        if kept is not None:
            self.snapshots.begin_use(kept)
            states.used.append(kept)
            states.kept_at = end

    def _drop_new(self, states: SeqStates) -> None:
        for _, snapshot in states.new:
            if self.snapshots.is_new(snapshot):
                self.snapshots.drop(snapshot)
        states.new = []


def _num_common(keys: list[bytes], others: list[bytes], start: int) -> int:
    """Returns the number of keys that two chains have in common, if that is `start` at least."""
    end = min(len(keys), len(others))
    return start + bisect_left(range(start, end), True, key=lambda i: keys[i] != others[i])
