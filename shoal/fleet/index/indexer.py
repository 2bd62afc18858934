"""`KvIndexer`: each worker's cached part of a prefix, and its tier, from the KV events of all workers
(Dynamo's KvIndexer). prefix_tree.py stores and searches the blocks; event_feed.py brings the events.

A worker's block hash is an opaque name: blocks are found by Shoal's hash of the tokens in events, and removed
by the worker's name. Blocks stored after a parent that the worker never published cannot be placed, and are
left out.

The blocks of layers with a window are in windows.py, and cut a worker's part of a prefix to what they leave.

Events carry block size, adapter and salt, so workers of several block sizes and adapters share one index:
their chain hashes differ. A block whose identity includes more (an image) gets a chain hash that no query of
tokens has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from shoal.fleet.index.prefix_tree import DEVICE, DISK, HOST, NUM_LEVELS, Node, PrefixTree
from shoal.fleet.index.windows import WindowBlocks
from shoal.hashing import WIRE_SEED, block_hashes, chain_hash, chains_by_size, wire_seed
from shoal.kv_events import CPU, GPU, STORAGE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

TIERS = {GPU: DEVICE, CPU: HOST, STORAGE: DISK}
MAX_BLOCKS = 10_000_000  # over all workers: some 3 GB of a router's memory


class WorkerRank(NamedTuple):
    """A data-parallel rank of a worker, with a cache of its own. It is a tuple, whose hash is computed in C,
    as it is the key of every answer."""

    worker: str
    rank: int = 0


class Overlap(msgspec.Struct, frozen=True, gc=False):
    """The consecutive blocks of a prefix, from its first, that a worker has: first on the device, then in
    host memory, then on disk. A block on the device after blocks in a lower tier counts to the lower tier."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


class _IndexedWorker:
    """The blocks of one rank of one worker."""

    __slots__ = ("block_size", "doubles", "groups", "names", "number", "windows")

    def __init__(self, number: int, block_size: int) -> None:
        self.number = number
        self.block_size = block_size
        # For each tier: the worker's own name of a block -> its node, least recently stored first.
        self.names: list[dict[int, Node]] = [{} for _ in range(NUM_LEVELS)]
        # (tier, node) -> number of further names of this worker for the same block there.
        self.doubles: dict[tuple[int, Node], int] = {}
        self.groups = {0}  # the groups of layers whose blocks are in `names`
        self.windows: WindowBlocks | None = None  # None: no layer has a window

    @property
    def num_blocks(self) -> int:
        return sum(len(names) for names in self.names)

    def find(self, name: int) -> Node | None:
        for names in self.names:
            node = names.get(name)
            if node is not None:
                return node
        return None


class KvIndexer:
    """Not thread-safe. Reads no clock and does no I/O."""

    def __init__(self, block_size: int = 16, max_blocks: int = MAX_BLOCKS) -> None:
        """`block_size`: for workers without events so far. `max_blocks`: beyond it the worker with the most
        blocks loses its least recently stored ones, ends of chains first."""
        self.block_size = block_size
        self.max_blocks = max_blocks
        self._tree = PrefixTree()
        self._workers: dict[WorkerRank, _IndexedWorker] = {}
        self._ranks: dict[int, WorkerRank] = {}  # by number
        self._free_numbers: list[int] = []
        self._with_windows: dict[int, _IndexedWorker] = {}  # by number
        self._num_blocks = 0
        self._has_other_sizes = False  # a worker has, or had, blocks of another size than `block_size`

    # Queries

    def find_matches(
        self, token_ids: Sequence[int], *, lora_name: str | None = None, cache_salt: str | None = None
    ) -> dict[WorkerRank, Overlap]:
        """Returns how much of these tokens each rank has, in blocks of its own size (`block_size_of`). Ranks
        without any are left out."""
        sizes = {worker.block_size for worker in self._workers.values()}
        chains = chains_by_size(token_ids, sizes, adapter=lora_name, cache_salt=cache_salt)
        found: dict[WorkerRank, Overlap] = {}
        for chain in chains.values():
            found |= self.find_chain(chain)
        return found

    def find_chain(self, chain: Sequence[int]) -> dict[WorkerRank, Overlap]:
        """Like `find_matches`, for chain hashes (shoal.hashing.sequence_hashes of the blocks' hashes)."""
        tree, ranks = self._tree, self._ranks
        device = self._depths(chain, DEVICE)
        if not tree.has_lower_tiers:
            return {ranks[number]: Overlap(depth) for number, depth in device.items()}
        host, disk = self._depths(chain, HOST), self._depths(chain, DISK)
        found = {}
        for number in disk | device:
            on_device = device.get(number, 0)
            in_memory = max(host.get(number, 0), on_device)
            total = max(disk.get(number, 0), in_memory)
            if total:
                found[ranks[number]] = Overlap(on_device, in_memory - on_device, total - in_memory)
        return found

    def _depths(self, chain: Sequence[int], level: int) -> dict[int, int]:
        """Returns how many blocks of the chain each worker can use from this level, by number: with
        windows, up to where these have their blocks. Where all layers have a window, the first blocks of the
        chain may be gone."""
        found = self._tree.depths(chain, level)
        for number, worker in self._with_windows.items():
            assert worker.windows is not None
            own_level = level if any(worker.names[HOST:]) else DEVICE
            groups = worker.windows.groups_at(own_level)
            depth = found.pop(number, 0)
            end = len(chain) if 0 in groups else depth
            if end := worker.windows.longest(chain, end, own_level):
                found[number] = end
        return found

    def block_size_of(self, rank: WorkerRank) -> int:
        """Returns the number of tokens per block of this worker."""
        worker = self._workers.get(rank)
        return self.block_size if worker is None else worker.block_size

    def block_sizes(self, ranks: Collection[WorkerRank]) -> set[int]:
        """Returns the block sizes of these workers."""
        if not self._has_other_sizes:  # the common case is cheap
            return {self.block_size} if ranks else set()
        return {self.block_size_of(rank) for rank in ranks}

    def block_of(self, rank: WorkerRank, name: int) -> int | None:
        """Returns the chain hash of a block by the worker's name; None for an unknown one."""
        worker = self._workers.get(rank)
        node = None if worker is None else worker.find(name)
        return None if node is None else node.chain

    def num_blocks(self, rank: WorkerRank | None = None) -> int:
        """Returns the number of known blocks, of all workers or of one; a block in two tiers counts twice."""
        if rank is None:
            return self._num_blocks
        worker = self._workers.get(rank)
        return 0 if worker is None else worker.num_blocks

    @property
    def ranks(self) -> set[WorkerRank]:
        return set(self._workers)

    # Events

    def apply(self, rank: WorkerRank, event: KVEvent) -> None:
        """Applies one event of a worker. A duplicate, or a removal of an unknown block, changes nothing."""
        if isinstance(event, BlockStored):
            self._apply_stored(rank, event)
        elif isinstance(event, BlockRemoved):
            self._apply_removed(rank, event)
        elif isinstance(event, AllBlocksCleared):
            self.remove_worker(rank)

    def store(
        self,
        rank: WorkerRank,
        tier: int,
        names: Sequence[int],
        hashes: Sequence[int],
        parent: int | None,
        seed: int = WIRE_SEED,
    ) -> None:
        """Stores a run of blocks: the worker's names, the hash of each block's own tokens, and the worker's
        name of the block before the first (None: a sequence starts)."""
        worker = self._worker(rank, None)
        before = None
        if parent is not None:
            before = worker.find(parent)
            if before is None:
                return
        self._store(worker, tier, names, hashes, before, seed)

    def remove(self, rank: WorkerRank, tier: int, name: int) -> None:
        """Removes a block from one tier by the worker's name for it; an unknown name changes nothing."""
        worker = self._workers.get(rank)
        node = None if worker is None else worker.names[tier].pop(name, None)
        if worker is not None and node is not None:
            self._drop(worker, tier, node)

    def remove_worker(self, rank: WorkerRank) -> None:
        """Forgets all blocks of a worker that has cleared its cache or left."""
        worker = self._workers.pop(rank, None)
        if worker is None:
            return
        self._num_blocks -= worker.num_blocks
        self._with_windows.pop(worker.number, None)
        self._tree.forget_worker(worker.number, [node for names in worker.names for node in names.values()])
        del self._ranks[worker.number]
        self._free_numbers.append(worker.number)

    # Inside

    def _worker(self, rank: WorkerRank, block_size: int | None) -> _IndexedWorker:
        worker = self._workers.get(rank)
        if worker is not None and block_size not in (None, worker.block_size):
            self.remove_worker(rank)  # another worker under the same name
            worker = None
        if worker is None:
            number = self._free_numbers.pop() if self._free_numbers else len(self._ranks)
            worker = self._workers[rank] = _IndexedWorker(number, block_size or self.block_size)
            self._has_other_sizes |= worker.block_size != self.block_size
            self._ranks[number] = rank
        return worker

    def _apply_stored(self, rank: WorkerRank, event: BlockStored) -> None:
        tier, window = TIERS.get(event.medium or GPU), event.kv_cache_spec_sliding_window
        if tier is None:
            return
        if window is not None and event.group_idx:
            self._apply_window(rank, event, event.group_idx, window, tier)
            return
        worker = self._worker(rank, event.block_size)
        worker.groups.add(event.group_idx or 0)
        before = None
        seed = wire_seed(event.lora_name, event.cache_salt)
        if event.parent_block_hash is not None:
            before = worker.find(event.parent_block_hash)
            if before is None:
                return
            seed = before.seed  # events carry a salt only at the start of a sequence
        hashes = block_hashes(event.token_ids, event.block_size, seed)
        for number, extra in enumerate((event.extra_keys or ())[: len(hashes)]):
            hashes[number] = _with_extra(hashes[number], extra)
        self._store(worker, tier, event.block_hashes, hashes, before, seed)
        if window is not None:
            nodes = worker.names[tier]
            stored = [(name, nodes[name].chain) for name in event.block_hashes if name in nodes]
            self._windows_of(worker).store(0, window, 1, stored, tier)
        if event.snapshot_hashes is not None:
            kept = set(event.snapshot_hashes)
            for name in event.block_hashes:
                if (node := worker.names[tier].get(name)) is not None:
                    self._tree.mark(worker.number, tier, node, name in kept)

    def _apply_window(self, rank: WorkerRank, event: BlockStored, group: int, window: int, tier: int) -> None:
        """Applies blocks of a further group, whose layers see a window. Blocks are named as the first
        group's, and there the block before them is found."""
        worker = self._workers.get(rank)
        if worker is None or event.block_size % worker.block_size:
            return
        chain, seed = None, wire_seed(event.lora_name, event.cache_salt)
        step, ends, windows = event.block_size // worker.block_size, [], self._windows_of(worker)
        # The group is known, though this block may have no place.
        windows.store(group, window, step, (), tier)
        if event.parent_block_hash is not None:
            before = worker.find(event.parent_block_hash)
            if before is None:
                return
            chain, seed = before.chain, before.seed
        for number, own in enumerate(block_hashes(event.token_ids, worker.block_size, seed)):
            extra = (event.extra_keys or ())[number : number + 1] if step == 1 else ()
            own = _with_extra(own, extra[0]) if extra else own
            chain = own if chain is None else chain_hash(chain, own)
            ends.append(chain)
        windows.store(group, window, step, zip(event.block_hashes, ends[step - 1 :: step]), tier)

    def _windows_of(self, worker: _IndexedWorker) -> WindowBlocks:
        if worker.windows is None:
            worker.windows = WindowBlocks(worker.block_size)
            self._with_windows[worker.number] = worker
        return worker.windows

    def _apply_removed(self, rank: WorkerRank, event: BlockRemoved) -> None:
        tier, worker = TIERS.get(event.medium or GPU), self._workers.get(rank)
        if tier is None or worker is None:
            return
        group = event.group_idx or 0
        if worker.windows is not None:
            for name in event.block_hashes:
                worker.windows.remove(group, name, tier)
        if group in worker.groups:  # blocks have the same names in all groups
            for name in event.block_hashes:
                self.remove(rank, tier, name)

    def _store(
        self,
        worker: _IndexedWorker,
        tier: int,
        names: Sequence[int],
        hashes: Sequence[int],
        before: Node | None,
        seed: int,
    ) -> None:
        names = names[: len(hashes)]  # the event may have too few tokens for its blocks
        first = 0
        if tier == DEVICE:
            first, before = self._tree.add_new(worker.number, before, seed, names, hashes, worker.names[tier])
            self._num_blocks += first
        for name, own in zip(names[first:], hashes[first:]):
            chain = own if before is None else chain_hash(before.chain, own)
            before = self._place(worker, tier, name, chain, before, seed)
        if self._num_blocks > self.max_blocks:
            self._forget_oldest()

    def _place(
        self, worker: _IndexedWorker, tier: int, name: int, chain: int, before: Node | None, seed: int
    ) -> Node:
        names = worker.names[tier]
        old = names.pop(name, None)
        node = self._tree.nodes.get(chain)
        if node is not None and node is old:
            names[name] = node  # known: now the most recently stored
            return node
        if node is not None and self._tree.holds(worker.number, tier, node):
            worker.doubles[tier, node] = worker.doubles.get((tier, node), 0) + 1
        else:
            node = self._tree.add(worker.number, tier, chain, before, seed)
        names[name] = node
        self._num_blocks += 1
        if old is not None:  # the worker has given the name to another block
            self._drop(worker, tier, old)
        return node

    def _drop(self, worker: _IndexedWorker, tier: int, node: Node) -> None:
        """Drops one name of a block in a tier, and the block with its last name."""
        self._num_blocks -= 1
        others = worker.doubles.get((tier, node), 0)
        if others == 0:
            self._tree.remove(worker.number, tier, node)
        elif others == 1:
            del worker.doubles[tier, node]
        else:
            worker.doubles[tier, node] = others - 1

    def _forget_oldest(self) -> None:
        """Forgets the least recently stored blocks, several at a time, until the bound holds. A block with a
        child of the same worker and tier is kept for later, so that chains shrink from their ends."""
        while self._num_blocks > self.max_blocks:
            worker = max(self._workers.values(), key=lambda worker: worker.num_blocks)
            tier = max(range(NUM_LEVELS), key=lambda tier: len(worker.names[tier]))
            names = worker.names[tier]
            oldest = list(islice(names.items(), 1 + self.max_blocks // 1000))
            oldest.sort(key=lambda entry: entry[1].depth, reverse=True)
            for name, node in oldest:
                del names[name]
                if self._tree.holds_child(worker.number, tier, node):
                    names[name] = node
                    continue
                self._drop(worker, tier, node)
                if worker.windows is not None:
                    worker.windows.remove(0, name, tier)


def _with_extra(own: int, extra: Sequence[dict[str, Any]] | None) -> int:
    """Returns the block's hash, changed by parts of its identity other than tokens, adapter and salt."""
    others = [key for key in extra or () if key.get("type") not in ("lora", "cache_salt")]
    if not others:
        return own
    return own ^ xxh3_64_intdigest(msgspec.msgpack.encode(others, order="deterministic"), WIRE_SEED)
