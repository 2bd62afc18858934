"""Which running sequences share their first KV blocks, so that attention reads these once a group. What a
group is worth, who is in which.

One level: a sequence is in one group at most. In a tree of prefixes (a system prompt, documents under it)
that is the partition which saves the most reads. Pure Python; engine/runner/batch.py tells the device,
kernels/prefix_attention.py makes use of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# Below these a group costs more than it saves: a tile of 128 queries takes as long as reading its keys two or
# three times.
MIN_MEMBERS = 4
MIN_SHARED = 128  # tokens
MIN_SAVED = 8192  # tokens whose keys need not be read again, a step


@dataclass(frozen=True, slots=True)
class Group:
    rows: list[int]
    num_blocks: int  # that all of them begin with


class PrefixTree:
    """The state rows in the order of their block ids, and how many first blocks each has in common with the
    next.

    A row is placed when its sequence is admitted: its blocks of then do not change, and later ones are its
    own. A row whose sequence has left stays, and is not asked for, until it is placed again.
    """

    def __init__(self, block_size: int, max_groups: int) -> None:
        self._block_size, self._max_groups = block_size, max_groups
        self._sorted: list[tuple[tuple[int, ...], int]] = []  # (blocks, row)
        self._common: list[int] = []  # blocks that entry i and entry i + 1 begin with; 0 for the last
        self._placed: dict[int, tuple[int, ...]] = {}

    def place(self, row: int, block_ids: list[int]) -> None:
        """`block_ids`: of all tokens known at admission. The last may be incomplete and is left out: whoever
        decodes sees a key more."""
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

    def groups(self, rows: Iterable[int]) -> list[Group]:
        """The groups among these rows, which have been placed, that are worth it; no more than
        `max_groups`."""
        if not any(self._common):
            return []
        wanted = set(rows)
        order: list[int] = []
        common: list[int] = []  # between neighbours in `order`
        least = 0
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
        return [Group(order[start:end], num_blocks) for start, end, num_blocks in found]

    def _worth(self, num_members: int, num_blocks: int) -> int:
        """Tokens whose keys need not be read again; 0: not worth it."""
        shared = num_blocks * self._block_size
        saved = (num_members - 1) * shared
        return saved if num_members >= MIN_MEMBERS and shared >= MIN_SHARED and saved >= MIN_SAVED else 0


@dataclass(slots=True)
class _Node:
    """Neighbours that begin with `common` equal blocks, from `start` on; what is best among those already
    passed."""

    common: int
    start: int
    saved: int
    runs: list[tuple[int, int, int]]


def best_runs(common: list[int], worth: Callable[[int, int], int]) -> list[tuple[int, int, int]]:
    """Disjoint runs (start, end, blocks) of sequences that are worth the most together. `common[i]`: blocks
    that i and i + 1 begin with.

    From the leaves of the tree of common prefixes to its root: a node is either one group or what is best in
    its branches.
    """
    stack = [_Node(0, 0, 0, [])]
    for i, shared in enumerate([*common, 0]):
        start, saved = i, 0
        runs: list[tuple[int, int, int]] = []
        while shared < stack[-1].common:
            node = stack.pop()
            start, saved, runs = node.start, node.saved + saved, node.runs + runs
            whole = worth(i + 1 - start, node.common)
            if whole > saved:  # of equals the branches, which are longer
                saved, runs = whole, [(start, i + 1, node.common)]
        if shared > stack[-1].common:
            stack.append(_Node(shared, start, saved, runs))
        else:
            stack[-1].saved += saved
            stack[-1].runs += runs
    return stack[0].runs


def num_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the longest common prefix. Halves, as comparing slices is C."""
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
