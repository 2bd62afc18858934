"""`DecodeGroups`: forms groups of running sequences that share their first KV blocks, as for vLLM's cascade
attention. `DecodePrefixes` sends them to the device for batch.py; the scheduler does not use them.

Attention reads the shared blocks once for a group and not once for each sequence
(kernels/attention/prefix_attention.py). A sequence is in one group at most. In a tree of prefixes (a system
prompt, documents below it) the groups that save the most reads are formed. There is no torch here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from shoal.kernels.state import MAX_DECODE_GROUPS, DecodeGroupField, StateLayout

# A smaller group costs more than it saves: a tile of 128 queries takes as long as reading its keys two or
# three times.
MIN_MEMBERS = 4
MIN_SHARED = 128  # tokens that all members begin with
MIN_SAVED = 8192  # tokens whose keys a step need not read again


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences, by their state rows, whose first `num_blocks` KV blocks are the same."""

    rows: list[int]
    num_blocks: int


class DecodeGroups:
    """The state rows, sorted by their lists of block ids, and how many first blocks each has in common with
    the next. Rows that share a prefix are neighbours.

    A row is placed when its sequence is admitted. The blocks that it has then do not change, and later ones
    are its own. The row of a sequence that has left stays until it is placed again; it is not read
    meanwhile.
    """

    def __init__(self, block_size: int, max_groups: int) -> None:
        self._block_size, self._max_groups = block_size, max_groups
        self._sorted: list[tuple[tuple[int, ...], int]] = []  # (blocks, row)
        self._common: list[int] = []  # how many blocks entries i and i + 1 begin with; 0 for the last
        self._placed: dict[int, tuple[int, ...]] = {}

    def place(self, row: int, block_ids: list[int]) -> None:
        """Enters a row with the blocks of all tokens that its sequence had at its admission. The last block
        is left out: it may be incomplete, and the sequence writes more keys into it."""
        if row in self._placed:
            self._remove(row)
        blocks = tuple(block_ids[:-1])
        entry = (blocks, row)
        self._placed[row] = blocks
        i = bisect_left(self._sorted, entry)
        if i:
            self._common[i - 1] = num_common(self._sorted[i - 1][0], blocks)
        self._common.insert(i, num_common(blocks, self._sorted[i][0]) if i < len(self._sorted) else 0)
        self._sorted.insert(i, entry)

    def _remove(self, row: int) -> None:
        i = bisect_left(self._sorted, (self._placed[row], row))
        if i:
            self._common[i - 1] = min(self._common[i - 1], self._common[i])
        del self._sorted[i], self._common[i]

    def groups(self, rows: Iterable[int]) -> list[DecodeGroup]:
        """The groups among these rows that are worth it, at most `max_groups` of them. The rows must have
        been placed."""
        if not any(self._common):
            return []
        wanted = set(rows)
        order: list[int] = []
        common: list[int] = []  # how many blocks neighbours in `order` begin with
        least = 0  # how many blocks all rows since the last wanted one begin with
        for (_, row), shared in zip(self._sorted, self._common):
            if row in wanted:
                if order:
                    common.append(least)
                order.append(row)
                least = shared
            elif shared < least:
                least = shared
        found = best_runs(common, self._worth)
        if len(found) > self._max_groups:
            found = sorted(found, key=lambda run: self._worth(run[1] - run[0], run[2]))[-self._max_groups :]
        return [DecodeGroup(order[start:end], num_blocks) for start, end, num_blocks in found]

    def _worth(self, num_members: int, num_blocks: int) -> int:
        """Returns how many tokens' keys a step saves reading with a group of `num_members`; 0 if the group
        does not pay."""
        shared = num_blocks * self._block_size
        saved = (num_members - 1) * shared
        return saved if num_members >= MIN_MEMBERS and shared >= MIN_SHARED and saved >= MIN_SAVED else 0


class DecodePrefixes:
    """The host's mirror of the part of the batch state that has the decode groups. All full-attention layers
    use groups of the first block table: sequences that share its first blocks began with the same tokens, so
    their blocks in other tables have the same content."""

    def __init__(self, layout: StateLayout, block_size: int, share_from: int) -> None:
        """`block_size`: of the first table. `share_from`: the fewest decodes for which groups are formed."""
        self.layout, self.block_size, self.share_from = layout, block_size, share_from
        self.groups = DecodeGroups(block_size, MAX_DECODE_GROUPS)
        self.num_groups = 0  # in the last step
        # rows of the last step's decodes; -1 where a row has a new owner
        self._rows = np.zeros(0, np.int32)
        self.sent = np.zeros(layout.prefix_size, np.int32)  # the device's numbers at prefix_address

    def place(self, row: int, block_ids: list[int]) -> None:
        """A sequence with these blocks gets the row."""
        self.groups.place(row, block_ids)
        # It may decode in the step after the row's previous owner's last one, whose groups do not know it.
        self._rows = np.where(self._rows == row, -1, self._rows)

    def update(self, decode_rows: np.ndarray, addresses: list[int], values: list[int]) -> None:
        """Sends the groups again if other sequences decode than in the last step."""
        if np.array_equal(decode_rows, self._rows):
            return
        self._rows = decode_rows
        rows = decode_rows.tolist()
        groups = self.groups.groups(rows) if len(rows) >= self.share_from else []
        if not groups and not self.num_groups:
            return
        self.num_groups = len(groups)
        index = {row: i for i, row in enumerate(rows)}
        wanted = np.zeros(self.layout.prefix_size, np.int32)
        lens, members, table = (wanted[span] for span in self.layout.prefix_spans)
        start = 0
        for group, fields in zip(groups, table.reshape(MAX_DECODE_GROUPS, len(DecodeGroupField))):
            indices, end = [index[row] for row in group.rows], start + len(group.rows)
            fields[:] = start, len(indices), group.num_blocks * self.block_size, group.rows[0]
            members[start:end] = indices
            lens[indices] = fields[DecodeGroupField.LENGTH]
            start = end
        changed = np.flatnonzero(self.sent != wanted)
        self.sent = wanted
        addresses.extend((changed + self.layout.prefix_address).tolist())
        values.extend(wanted[changed].tolist())


@dataclass(slots=True)
class _Node:
    """A node of the tree of common prefixes: the neighbours from `start` on, which begin with `common` equal
    blocks. `runs` are the best groups among its finished branches, and `saved` is their worth."""

    common: int
    start: int
    saved: int
    runs: list[tuple[int, int, int]]


def best_runs(common: list[int], worth: Callable[[int, int], int]) -> list[tuple[int, int, int]]:
    """The disjoint runs (start, end, blocks) of neighbours that are worth the most together. common[i] is how
    many blocks sequences i and i + 1 begin with. worth(members, blocks) is what a group saves.

    The tree of common prefixes is walked from its leaves to its root. At each node either all its sequences
    are one group, or the best groups of its branches stay.
    """
    stack = [_Node(0, 0, 0, [])]
    for i, shared in enumerate([*common, 0]):
        start, saved = i, 0
        runs: list[tuple[int, int, int]] = []
        while shared < stack[-1].common:
            node = stack.pop()
            start, saved, runs = node.start, node.saved + saved, node.runs + runs
            whole = worth(i + 1 - start, node.common)
            if whole > saved:  # where both are worth the same, the branches share longer prefixes
                saved, runs = whole, [(start, i + 1, node.common)]
        if shared > stack[-1].common:
            stack.append(_Node(shared, start, saved, runs))
        else:
            stack[-1].saved += saved
            stack[-1].runs += runs
    return stack[0].runs


def num_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """The length of the longest common prefix. A binary search, because comparing two slices is fast."""
    if a[:1] != b[:1]:
        return 0
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
