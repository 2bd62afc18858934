"""Which worker holds which blocks of which prefixes: a tree of blocks, searched instead of walked.

A block is known by its chain hash, which names its content and all before it (shoal/hashing.py), so one
dictionary from chain hashes to bit masks of workers holds all prefixes of all workers. There is one such
dictionary a level, and the levels are nested: level 0 is what lies on the device, level 1 what lies there or
in host memory, level 2 what lies there, in host memory or on disk.

A worker that holds block n of a chain ordinarily holds all blocks before it, so the depth of a worker is
found by bisection: some ten look-ups for a prompt of a thousand blocks, where a radix tree takes a thousand.
An engine may also drop a block from the middle of a chain. The block below it is then an *orphan* of that
worker. Orphans are remembered with their depth: a chain that runs through an orphan ends, for that worker,
above it, and up to there bisection is right again. So counts stay exact, whatever was removed.

Chained hashes and the search are ideas of NVIDIA Dynamo's positional index; the orphans are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from shoal.hashing import chain_hash

NUM_LEVELS = 3
DEVICE, HOST, DISK = range(NUM_LEVELS)
MAX_MASKS = 1 << 16  # combinations of workers of which one object is kept


class Node(msgspec.Struct, gc=False, eq=False):
    """A block's place in the tree. `depth` is 0 for the first block of a chain, whose parent is None.

    Nodes name each other by their chain hashes, so that no cycles of references lie behind the garbage
    collector, which would walk through all of them again and again.
    """

    chain: int
    parent: int | None
    depth: int
    seed: int  # of its tokens' hash: adapter and salt, the same in a whole chain
    # Nearly all blocks have one child, and a dictionary each would be most of the memory.
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
        # One object a mask: masks are compared often, and would be spread over the memory otherwise. What is
        # beyond MAX_MASKS begins anew; equal masks may then be two objects for a while.
        self._masks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def has_lower_tiers(self) -> bool:
        """Whether anything was ever held in host memory or on disk."""
        return len(self._held) > 1

    def holds(self, worker: int, tier: int, node: Node) -> bool:
        return bool(self._in_tier[tier].get(node.chain, 0) >> worker & 1)

    def holds_child(self, worker: int, tier: int, node: Node) -> bool:
        """Whether the worker holds, in this tier, a block right behind this one."""
        in_tier, bit = self._in_tier[tier], 1 << worker
        return any(in_tier.get(child, 0) & bit for child in node.children)

    def add(self, worker: int, tier: int, chain: int, parent: Node | None, seed: int) -> Node:
        """Worker now holds this block in this tier; it lies behind `parent` (None: it is a chain's first)."""
        bit = 1 << worker
        in_tier = self._in_tier[tier]
        node = self.place(chain, parent, seed)
        if tier != DEVICE and not self.has_lower_tiers:
            self._begin_lower_levels()
        self._set(in_tier, chain, bit)
        for level in range(tier, len(self._held)):
            if level != DEVICE:
                if self._held[level].get(chain, 0) & bit:
                    break  # it lies in another tier of this level, and so of all below
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
        """The quick way of what is told of most often: blocks on the device that nobody has yet, with new
        names, behind a block that the worker holds there. `hashes` are those of the blocks alone. Returns how
        many were taken, up to the first that is something else, and the last of them (or `parent`)."""
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

    def place(self, chain: int, parent: Node | None, seed: int) -> Node:
        """The node of a chain, made if it is not there; nobody holds it by that."""
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
        """Worker no longer holds this block in this tier."""
        bit = 1 << worker
        self._clear(self._in_tier[tier], node.chain, bit)
        for level in range(tier, len(self._held)):
            if any(self._in_tier[above].get(node.chain, 0) & bit for above in range(level + 1)):
                break  # it lies in another tier of this level, and so of all below
            if level != DEVICE:
                self._clear(self._held[level], node.chain, bit)
            self._left(level, node, bit, worker)
        self._prune(node)

    def depths(self, chain: Sequence[int], level: int) -> dict[int, int]:
        """How many blocks of the chain, counted from its first without a gap, each worker holds on this level
        or above; workers that lack the first are left out."""
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
        return found

    def forget_worker(self, worker: int, nodes: Iterable[Node]) -> None:
        """Nothing of this worker is held any more. `nodes` are all nodes that it holds, in any tier."""
        bit = 1 << worker
        books = [*self._in_tier, *self._held[1:]]
        for node in nodes:
            for book in books:
                self._clear(book, node.chain, bit)
            self._prune(node)
        for level in range(NUM_LEVELS):
            self._orphans[level].pop(worker, None)
            self._with_orphans[level] &= ~bit

    # Inside

    def _begin_lower_levels(self) -> None:
        self._held += [dict(self._held[DEVICE]) for _ in range(HOST, NUM_LEVELS)]
        for level in range(HOST, NUM_LEVELS):
            self._orphans[level] = {worker: set(of) for worker, of in self._orphans[DEVICE].items()}
            self._with_orphans[level] = self._with_orphans[DEVICE]

    def _set(self, book: dict[int, int], chain: int, bit: int) -> None:
        mask = book.get(chain, 0) | bit
        book[chain] = self._one(mask)

    def _clear(self, book: dict[int, int], chain: int, bit: int) -> None:
        mask = book.get(chain, 0) & ~bit
        if mask:
            book[chain] = self._one(mask)
        else:
            book.pop(chain, None)

    def _one(self, mask: int) -> int:
        masks = self._masks
        if len(masks) >= MAX_MASKS:
            masks.clear()
        return masks.setdefault(mask, mask)

    def _first_gap(self, worker: int, chain: Sequence[int], level: int) -> int:
        """The depth of a block that the worker lacks, with no gap above but one that reaches down to it."""
        end, orphans = len(chain), self._orphans[level][worker]
        if len(orphans) > len(chain):  # a worker may have very many of them
            return next((depth - 1 for depth, block in enumerate(chain) if block in orphans), end)
        for orphan in orphans:
            depth = self.nodes[orphan].depth
            if depth <= end and depth < len(chain) and chain[depth] == orphan:
                end = depth - 1
        return end

    def _entered(self, level: int, node: Node, bit: int, worker: int) -> None:
        """The worker holds the block on this level now: its children are no orphans, and it may be one."""
        parent = node.parent
        orphans = self._orphans[level].get(worker)
        if orphans:
            orphans.difference_update(node.children)
        if parent is not None and not self._held[level].get(parent, 0) & bit:
            self._add_orphan(level, worker, bit, node.chain)
        elif orphans is not None and not orphans:
            self._no_orphans(level, worker, bit)

    def _left(self, level: int, node: Node, bit: int, worker: int) -> None:
        """The worker lacks the block on this level now: it is no orphan, and its children are."""
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
        """All orphans of the worker, this one among them."""
        orphans = self._orphans[level].setdefault(worker, set())
        orphans.add(chain)
        self._with_orphans[level] |= bit
        return orphans

    def _no_orphans(self, level: int, worker: int, bit: int) -> None:
        del self._orphans[level][worker]
        self._with_orphans[level] &= ~bit

    def _prune(self, node: Node) -> None:
        """Drops nodes that nobody holds and that lead to none, from here to the first block."""
        lowest = self._held[-1]
        while node.child is None and node.chain not in lowest and node.chain in self.nodes:
            del self.nodes[node.chain]
            if node.parent is None:
                return
            parent = self.nodes[node.parent]
            parent.drop_child(node.chain)
            node = parent


def _bisect(held: dict[int, int], chain: Sequence[int], end: int, mask: int, found: dict[int, int]) -> None:
    """The depths of workers that all hold block 0 and have no gap before `end`: who has a block, has all
    before it."""
    get = held.get
    # Every worker of a mask holds block `low`, and none of them holds block `high`.
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
