"""The order of eviction (EvictionOrder), and how often a key was used lately (FrequencySketch). Memory is
bounded; keys are hashes, 16 uniformly random bytes."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from shoal.errors import ConfigError

MAX_USES = 15  # counts saturate here: 4 bits, as in TinyLFU


def check_policy(policy: str) -> None:
    """Raises ConfigError for a policy that does not exist."""
    if policy not in ("lru", "lfu"):
        raise ConfigError(f"kv_eviction_policy must be lru or lfu, got {policy!r}; choose one")


class EvictionOrder:
    """Chooses the next key to evict: leaves only (a block is useless without its parent), least recently used
    first ("lru"), or least frequently used first, ties by recency ("lfu": uses while the key is here, up to
    MAX_USES, halved after 10 uses a key, so that old popularity fades). Raises ConfigError for another
    policy."""

    def __init__(self, policy: str) -> None:
        check_policy(policy)
        self._counts = policy == "lfu"
        self._ranks: dict[bytes, tuple[int, int]] = {}  # uses that count, time of the last
        self._parents: dict[bytes, bytes] = {}  # as far as known
        self._num_children: Counter[bytes] = Counter()  # also for parents that are not here
        # The keys without children, and some entries that are out of date
        self._heap: list[tuple[tuple[int, int], bytes]] = []
        self._clock = self._since_halving = 0

    def use(self, key: bytes) -> None:
        """Adds the key, or counts another use of it."""
        self._clock += 1
        uses, _ = self._ranks.get(key, (0, 0))
        self._ranks[key] = (min(uses + 1, MAX_USES) if self._counts else 0, self._clock)
        self._since_halving += 1
        if self._counts and self._since_halving >= 10 * max(len(self._ranks), MAX_USES):
            self._since_halving = 0
            self._ranks = {key: (uses // 2, time) for key, (uses, time) in self._ranks.items()}
            self._rebuild()
        self._push(key)

    def follow(self, key: bytes, parent: bytes) -> None:
        """`key`, which is here, follows `parent`, which may be."""
        if key not in self._parents:
            self._parents[key] = parent
            self._num_children[parent] += 1

    def discard(self, key: bytes) -> None:
        self._ranks.pop(key, None)
        parent = self._parents.pop(key, None)
        if parent is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
                if parent in self._ranks:
                    self._push(parent)
        self._trim()

    def coldest(self) -> bytes | None:
        """Returns the next key to evict and leaves it in place; the caller discards it."""
        while self._heap:
            rank, key = self._heap[0]
            if self._ranks.get(key) == rank and key not in self._num_children:
                return key
            heappop(self._heap)
        return None

    def keys(self) -> set[bytes]:
        return set(self._ranks)

    def check(self) -> None:
        """Checks that the heap, the ranks and the children agree."""
        assert (
            self._parents.keys() <= self._ranks.keys()
            and Counter(self._parents.values()) == self._num_children
        )
        entries = set(self._heap)
        assert all(
            (rank, key) in entries for key, rank in self._ranks.items() if key not in self._num_children
        ), "a key can't be evicted"
        assert len(self._heap) <= 2 * len(self._ranks) + 64

    def _push(self, key: bytes) -> None:
        if key not in self._num_children:
            heappush(self._heap, (self._ranks[key], key))
            self._trim()

    def _trim(self) -> None:
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(rank, key) for key, rank in self._ranks.items() if key not in self._num_children]
        heapify(self._heap)


class FrequencySketch:
    """About how often each key was added lately, in 8 to 16 bytes a key of `capacity`: a count-min sketch
    (Cormode and Muthukrishnan 2005) whose counts are halved every 10 * capacity additions (TinyLFU: Einziger,
    Friedman and Manes 2017). Too high at times; too low never, but for the halving."""

    def __init__(self, capacity: int) -> None:
        self._width = 1 << max(4, (2 * capacity - 1).bit_length())
        self._rows = [bytearray(self._width) for _ in range(4)]
        self._additions, self._halve_at = 0, 10 * max(1, capacity)

    def add(self, key: bytes) -> int:
        """Returns the count with this one."""
        places = self._places(key)
        count = min(row[place] for row, place in zip(self._rows, places))
        if count < 255:
            for row, place in zip(self._rows, places):
                if row[place] == count:  # raising the others would only make other keys' counts worse
                    row[place] = count + 1
        self._additions += 1
        if self._additions >= self._halve_at:
            self._additions = 0
            self._rows = [row.translate(HALVED) for row in self._rows]
        return min(count + 1, 255)

    def count(self, key: bytes) -> int:
        return min(row[place] for row, place in zip(self._rows, self._places(key)))

    def _places(self, key: bytes) -> Iterable[int]:
        mask = self._width - 1
        # keys are hashes: their words serve as the four hash functions
        return [word & mask for word in struct.unpack("<4I", key)]


HALVED = bytes(count // 2 for count in range(256))
