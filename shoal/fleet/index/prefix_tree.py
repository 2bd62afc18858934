"""`PrefixTree`: the blocks of all prefixes and the workers that hold them, searched by bisection. indexer.py
converts the workers' own block hashes and KV events.

A block is known by its chain hash, which identifies its content and all before it (shoal/hashing.py), so one
dictionary from chain hashes to bit masks of workers holds all prefixes of all workers. There is one such
dictionary per level, and the levels are nested: level 0 has blocks on the device, level 1 also blocks in host
memory, level 2 also blocks on disk.

A worker that holds block n of a chain ordinarily holds all blocks before it, so the depth of a worker is
found by bisection: some ten look-ups for a prompt of a thousand blocks, where a radix tree takes a thousand.
An engine may also drop a block from the middle of a chain. The next block is then an *orphan* of that worker.
Orphans are kept with their depth: for that worker, a chain through an orphan ends before it, and bisection is
right up to there. So counts stay exact, whatever was removed.

A worker with recurrent layers continues after a block only if it has a snapshot of the states there. Such
blocks are marked, and the worker's depth is cut back to its last marked block.

Chained hashes and the search are ideas of NVIDIA Dynamo's positional index; orphans are Shoal's addition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import compress
from operator import or_

import msgspec

from shoal.hashing import chain_hash

NUM_LEVELS = 3
DEVICE, HOST, DISK = range(NUM_LEVELS)
MAX_MASKS = 1 << 16  # combinations of workers that are kept as one object each


class Node(msgspec.Struct, gc=False, eq=False):
    """A block in the tree. The first block of a chain has `depth` 0 and the parent None.

    Nodes refer to each other by chain hashes: cycles of references would be walked by the garbage collector
    again and again.
    """

    chain: int
    parent: int | None
    depth: int
    seed: int  # the hash seed, from adapter and salt; the same in a whole chain
    # Nearly all blocks have one child, and a dictionary per block would take most of the memory.
    child: int | None = None
    more_children: dict[int, None] | None = None

    @property
    def children(self) -> list[int]:
        found = [] if self.child is None else [self.child]
        return found if self.more_children is None else [*found, *self.more_children]

    def add_child(self, chain: int) -> None:
        if self.child is None:
            self.child = chain
        elif self.more_children is None:
            self.more_children = {chain: None}
        else:
            self.more_children[chain] = None

    def drop_child(self, chain: int) -> None:
        if chain == self.child:
            self.child = self.more_children.popitem()[0] if self.more_children else None
        elif self.more_children is not None:
            del self.more_children[chain]


class PrefixTree:
    """Workers are small integers, chosen by the caller; bit w of a mask stands for worker w."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        # For each tier, and for each level: chain hash -> mask of the workers that hold the block. The lower
        # levels are kept only once there is a lower tier.
        self._in_tier: list[dict[int, int]] = [{} for _ in range(NUM_LEVELS)]
        self._held: list[dict[int, int]] = [self._in_tier[DEVICE]]
        # For each level: worker -> its orphans, and the mask of workers that have any.
        self._orphans: list[dict[int, set[int]]] = [{} for _ in range(NUM_LEVELS)]
        self._with_orphans = [0] * NUM_LEVELS
        # For each tier: chain hash -> mask of the workers that have a snapshot after the block. And the mask
        # of the workers with recurrent layers.
        self._snapshots: list[dict[int, int]] = [{} for _ in range(NUM_LEVELS)]
        self._with_states = 0
        # One object per mask: masks are compared often, and would otherwise be spread over the memory. Beyond
        # MAX_MASKS the table is emptied; equal masks may then be two objects for a while.
        self._masks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def has_lower_tiers(self) -> bool:
        """True once a block was held in host memory or on disk."""
        return len(self._held) > 1

    def holds(self, worker: int, tier: int, node: Node) -> bool:
        return bool(self._in_tier[tier].get(node.chain, 0) >> worker & 1)

    def holds_child(self, worker: int, tier: int, node: Node) -> bool:
        """Returns whether the worker holds a child of this block in this tier."""
        in_tier, bit = self._in_tier[tier], 1 << worker
        return any(in_tier.get(child, 0) & bit for child in node.children)

    def add(self, worker: int, tier: int, chain: int, parent: Node | None, seed: int) -> Node:
        """Adds a block of the worker in this tier, after `parent` (None: the first block of a chain)."""
        bit = 1 << worker
        in_tier = self._in_tier[tier]
        node = self.place(chain, parent, seed)
        if tier != DEVICE and not self.has_lower_tiers:
            self._begin_lower_levels()
        self._set(in_tier, chain, bit)
        for level in range(tier, len(self._held)):
            if level != DEVICE:
                if self._held[level].get(chain, 0) & bit:
                    break  # another tier of this level, and so of all lower ones, has it
                self._set(self._held[level], chain, bit)
            self._entered(level, node, bit, worker)
        return node

    def add_new(
        self,
        worker: int,
        parent: Node | None,
        seed: int,
        names: Sequence[int],
        hashes: Sequence[int],
        by_name: dict[int, Node],
    ) -> tuple[int, Node | None]:
        """The fast path of the most common event: blocks on the device that no worker has yet, with new
        names, after a block that the worker holds there. `hashes` are the blocks' own hashes. Returns the
        number of added blocks, up to the first that is another case, and the last added one (or `parent`)."""
        bit, nodes, in_tier = 1 << worker, self.nodes, self._in_tier[DEVICE]
        if self.has_lower_tiers or (parent is not None and not in_tier.get(parent.chain, 0) & bit):
            return 0, parent
        mask = self._masks.setdefault(bit, bit)
        for number, (name, own) in enumerate(zip(names, hashes)):
            if parent is None:
                chain, depth, before = own, 0, None
            else:
                before = parent.chain
                chain, depth = chain_hash(before, own), parent.depth + 1
            if chain in nodes or name in by_name:
                return number, parent
            node = Node(chain, before, depth, seed)
            if parent is not None:
                if parent.child is None:
                    parent.child = chain
                else:
                    parent.add_child(chain)
            nodes[chain] = by_name[name] = parent = node
            in_tier[chain] = mask
        return len(names), parent

    def mark(self, worker: int, tier: int, node: Node, has_snapshot: bool) -> None:
        """Notes if a worker with recurrent layers has a snapshot after this block of its in this tier."""
        bit = 1 << worker
        self._with_states |= bit
        if has_snapshot:
            self._set(self._snapshots[tier], node.chain, bit)
        else:
            self._clear(self._snapshots[tier], node.chain, bit)

    def place(self, chain: int, parent: Node | None, seed: int) -> Node:
        """Returns the node of a chain, built if it does not exist; no worker holds it by that."""
        node = self.nodes.get(chain)
        if node is None:
            if parent is None:
                node = Node(chain, None, 0, seed)
            else:
                node = Node(chain, parent.chain, parent.depth + 1, seed)
                parent.add_child(chain)
            self.nodes[chain] = node
        return node

    def remove(self, worker: int, tier: int, node: Node) -> None:
        """Removes a block of the worker from this tier."""
        bit = 1 << worker
        self._clear(self._in_tier[tier], node.chain, bit)
        if self._with_states & bit:
            self._clear(self._snapshots[tier], node.chain, bit)
        for level in range(tier, len(self._held)):
            if any(self._in_tier[above].get(node.chain, 0) & bit for above in range(level + 1)):
                break  # another tier of this level, and so of all lower ones, has it
            if level != DEVICE:
                self._clear(self._held[level], node.chain, bit)
            self._left(level, node, bit, worker)
        self._prune(node)

    def depths(self, chain: Sequence[int], level: int) -> dict[int, int]:
        """Returns the number of consecutive blocks of the chain, from its first, that each worker holds on
        this level, and with recurrent layers up to the last snapshot; workers without any are left out."""
        held = self._held[min(level, len(self._held) - 1)]
        mask = held.get(chain[0], 0) if chain else 0
        if not mask:
            return {}
        found: dict[int, int] = {}
        ends_early = mask & self._with_orphans[level]
        while ends_early:
            bit = ends_early & -ends_early
            ends_early ^= bit
            end = self._first_gap(bit.bit_length() - 1, chain, level)
            if end < len(chain):
                mask ^= bit
                _bisect(held, chain, end, bit, found)
        _bisect(held, chain, len(chain), mask, found)
        if self._with_states:
            self._cut_to_snapshots(found, chain, level)
        return found

    def _cut_to_snapshots(self, found: dict[int, int], chain: Sequence[int], level: int) -> None:
        """Cuts the depths of workers with recurrent layers to their last snapshots on this level. Reads the
        chain backwards from each depth up to the first snapshot that is found, by functions in C alone."""
        workers_at: dict[int, int] = {}
        for worker, depth in found.items():
            if bit := self._with_states & 1 << worker:
                workers_at[depth] = workers_at.get(depth, 0) | bit
        depths = sorted(workers_at, reverse=True)
        lacking = 0  # workers that hold the block and have no snapshot yet
        for depth, next_depth in zip(depths, [*depths[1:], 0]):
            lacking |= workers_at[depth]
            for end in self._ends_with_snapshots(chain, next_depth, depth, level):
                here = lacking & self._with_snapshot(chain[end - 1], level)
                lacking ^= here
                while here:
                    bit = here & -here
                    here ^= bit
                    found[bit.bit_length() - 1] = end
                if not lacking:
                    break
        while lacking:
            bit = lacking & -lacking
            lacking ^= bit
            del found[bit.bit_length() - 1]

    def _ends_with_snapshots(self, chain: Sequence[int], start: int, end: int, level: int) -> Iterator[int]:
        """Yields the numbers of blocks, from `end` down to those more than `start`, at whose end any worker
        has a snapshot on this level."""
        blocks = chain[start:end][::-1]
        has_snapshot: Iterator[bool] = map(self._snapshots[DEVICE].__contains__, blocks)
        for tier in range(HOST, level + 1):
            if self._snapshots[tier]:
                has_snapshot = map(or_, has_snapshot, map(self._snapshots[tier].__contains__, blocks))
        return compress(range(end, start, -1), has_snapshot)

    def _with_snapshot(self, chain: int, level: int) -> int:
        """Returns the mask of the workers that have a snapshot after this block on this level."""
        return reduce(or_, (marked.get(chain, 0) for marked in self._snapshots[: level + 1]))

    def forget_worker(self, worker: int, nodes: Iterable[Node]) -> None:
        """Removes all blocks of a worker. `nodes` are all nodes that it holds, in any tier."""
        bit = 1 << worker
        tables = [*self._in_tier, *self._held[1:], *self._snapshots]
        for node in nodes:
            for table in tables:
                self._clear(table, node.chain, bit)
            self._prune(node)
        for level in range(NUM_LEVELS):
            self._orphans[level].pop(worker, None)
            self._with_orphans[level] &= ~bit
        self._with_states &= ~bit

    # Inside

    def _begin_lower_levels(self) -> None:
        self._held += [dict(self._held[DEVICE]) for _ in range(HOST, NUM_LEVELS)]
        for level in range(HOST, NUM_LEVELS):
            self._orphans[level] = {worker: set(of) for worker, of in self._orphans[DEVICE].items()}
            self._with_orphans[level] = self._with_orphans[DEVICE]

    def _set(self, table: dict[int, int], chain: int, bit: int) -> None:
        mask = table.get(chain, 0) | bit
        table[chain] = self._one(mask)

    def _clear(self, table: dict[int, int], chain: int, bit: int) -> None:
        mask = table.get(chain, 0) & ~bit
        if mask:
            table[chain] = self._one(mask)
        else:
            table.pop(chain, None)

    def _one(self, mask: int) -> int:
        masks = self._masks
        if len(masks) >= MAX_MASKS:
            masks.clear()
        return masks.setdefault(mask, mask)

    def _first_gap(self, worker: int, chain: Sequence[int], level: int) -> int:
        """Returns the depth of a block that the worker lacks: the last of its first gap in the chain."""
        end, orphans = len(chain), self._orphans[level][worker]
        if len(orphans) > len(chain):  # a worker may have very many orphans
            return next((depth - 1 for depth, block in enumerate(chain) if block in orphans), end)
        for orphan in orphans:
            depth = self.nodes[orphan].depth
            if depth <= end and depth < len(chain) and chain[depth] == orphan:
                end = depth - 1
        return end

    def _entered(self, level: int, node: Node, bit: int, worker: int) -> None:
        """Updates orphans after the worker got the block: its children stop being orphans, and it may be
        one."""
        parent = node.parent
        orphans = self._orphans[level].get(worker)
        if orphans:
            orphans.difference_update(node.children)
        if parent is not None and not self._held[level].get(parent, 0) & bit:
            self._add_orphan(level, worker, bit, node.chain)
        elif orphans is not None and not orphans:
            self._no_orphans(level, worker, bit)

    def _left(self, level: int, node: Node, bit: int, worker: int) -> None:
        """Updates orphans after the worker lost the block: it stops being an orphan, and its children become
        orphans."""
        orphans = self._orphans[level].get(worker)
        if orphans:
            orphans.discard(node.chain)
        held = self._held[level]
        for child in node.children:
            if held.get(child, 0) & bit:
                orphans = self._add_orphan(level, worker, bit, child)
        if orphans is not None and not orphans:
            self._no_orphans(level, worker, bit)

    def _add_orphan(self, level: int, worker: int, bit: int, chain: int) -> set[int]:
        """Adds an orphan. Returns all orphans of the worker."""
        orphans = self._orphans[level].setdefault(worker, set())
        orphans.add(chain)
        self._with_orphans[level] |= bit
        return orphans

    def _no_orphans(self, level: int, worker: int, bit: int) -> None:
        del self._orphans[level][worker]
        self._with_orphans[level] &= ~bit

    def _prune(self, node: Node) -> None:
        """Drops nodes that no worker holds and that have no children, from here towards the first block."""
        lowest = self._held[-1]
        while node.child is None and node.chain not in lowest and node.chain in self.nodes:
            del self.nodes[node.chain]
            if node.parent is None:
                return
            parent = self.nodes[node.parent]
            parent.drop_child(node.chain)
            node = parent


def _bisect(held: dict[int, int], chain: Sequence[int], end: int, mask: int, found: dict[int, int]) -> None:
    """Finds the depths of workers that all hold block 0 and have no gap before `end`."""
    get = held.get
    # Every worker of a mask holds block `low`, and no worker of it holds block `high`.
    intervals = [(0, end, mask)] if mask else []
    while intervals:
        low, high, mask = intervals.pop()
        while high - low > 1:
            middle = (low + high) >> 1
            there = get(chain[middle], 0) & mask
            if there == mask:
                low = middle
                continue
            if there:
                intervals.append((middle, high, there))
                mask ^= there
            high = middle
        while mask:
            bit = mask & -mask
            mask ^= bit
            found[bit.bit_length() - 1] = high
