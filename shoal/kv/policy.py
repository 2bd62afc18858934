"""Which block goes first, and which is worth keeping at all. Bookkeeping is bounded; keys are hashes, 16 uniformly random bytes."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Protocol

from shoal.errors import ConfigError

MAX_USES = 15    # that are told apart: 4 bits, as in TinyLFU


class Order(Protocol):
    """The keys that are there, in the order in which they go."""

    def use(self, key: bytes) -> None:
        """It came, or was wanted again."""
    def discard(self, key: bytes) -> None: ...
    def __iter__(self) -> Iterator[bytes]:
        """Coldest first."""
    def __len__(self) -> int: ...


def make_order(policy: str) -> Order:
    """Raises ConfigError for a policy that does not exist."""
    orders: dict[str, type[Order]] = {"lru": LruOrder, "lfu": LfuOrder}
    if policy not in orders:
        raise ConfigError(f"eviction policy {policy!r} does not exist; choose lru or lfu")
    return orders[policy]()


class LruOrder(Order):
    """The least recently used key goes first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def use(self, key: bytes) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)

    def discard(self, key: bytes) -> None:
        self._keys.pop(key, None)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class LfuOrder(Order):
    """The key with the fewest uses goes first, of equals the least recently used. A list of keys for each count, so that every operation is
    O(1) (Shah, Mitra and Matani 2010); counts end at MAX_USES and are halved after 10 uses a key, so that old fame fades."""

    def __init__(self) -> None:
        self._uses: dict[bytes, int] = {}
        self._with: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(MAX_USES + 1)]    # by uses
        self._since_halving = 0

    def use(self, key: bytes) -> None:
        uses = self._uses.get(key, 0)
        self._with[uses].pop(key, None)
        self._uses[key] = uses = min(uses + 1, MAX_USES)
        self._with[uses][key] = None
        self._since_halving += 1
        if self._since_halving >= 10 * max(len(self._uses), MAX_USES):
            self._halve()

    def discard(self, key: bytes) -> None:
        self._with[self._uses.pop(key, 0)].pop(key, None)

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._with)

    def __len__(self) -> int:
        return len(self._uses)

    def _halve(self) -> None:
        self._since_halving = 0
        halved: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in self._with]
        for uses, keys in enumerate(self._with):
            halved[max(1, uses // 2)].update(keys)
        self._with = halved
        self._uses = {key: uses for uses, keys in enumerate(halved) for key in keys}


class FrequencySketch:
    """About how often each key was added lately, in 8 to 16 bytes a key of `capacity`: a count-min sketch (Cormode and Muthukrishnan 2005)
    whose counts are halved every 10 * capacity additions (TinyLFU: Einziger, Friedman and Manes 2017). Too high at times; too low never,
    but for the halving."""

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
                if row[place] == count:    # raising the others would only make other keys' counts worse
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
        return [word & mask for word in struct.unpack("<4I", key)]    # keys are hashes: their words serve as the four hash functions


HALVED = bytes(count // 2 for count in range(256))
