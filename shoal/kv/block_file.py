"""A KV block outside of the device: what it is (BlockMeta), how its bytes are meant (BlockSpec), and the file that holds it (BlockFormat).

A file: magic with the version (8 bytes), xxh3-128 of all that follows (16), length of the header (4, little-endian), header (msgpack),
data. Who reads a file knows which block it wants, so it builds the header itself and compares bytes: version, fingerprint, spec, key,
parent, tokens and extra keys at once. Functions of bytes: no I/O, no torch.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import msgspec
import xxhash

MAGIC = b"SHOALKV1"
CHECKSUM_BYTES = 16
FRONT_BYTES = len(MAGIC) + CHECKSUM_BYTES + 4    # before the header
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What a full block is. `key` alone is enough to find it; the rest proves that it is the one that is meant."""

    key: bytes
    parent: bytes | None                                  # key of the block before it; None for a first one
    token_ids: Sequence[int]
    extra: tuple[str | None, str | None] = (None, None)   # adapter, cache salt


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """How the bytes of a rank's blocks are meant. Blocks of different specs are of no use to each other."""

    layout: str         # order of the dimensions and their sizes, such as "[36, 2, 8, 16, 128]"
    dtype: str
    block_bytes: int
    block_size: int     # tokens
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def group(self) -> str:
        """A name that the ranks of an engine share, and nobody with blocks of another kind."""
        kind = xxhash.xxh3_64_hexdigest(repr((self.layout, self.dtype, self.block_bytes, self.block_size, self.tp_size)).encode())
        return f"{self.dtype}-{self.block_size}-tp{self.tp_size}-{kind}"


class BlockFormat:
    """The files of one model (`fingerprint`: of its weights' content) and one spec."""

    def __init__(self, fingerprint: bytes, spec: BlockSpec) -> None:
        self.spec = spec
        self._identity = [fingerprint, *astuple(spec)]

    def header(self, meta: BlockMeta) -> bytes:
        """With its length before it."""
        tokens = array("I", meta.token_ids)
        if sys.byteorder == "big":
            tokens.byteswap()
        header = msgspec.msgpack.encode([*self._identity, meta.key, meta.parent, tokens.tobytes(), *meta.extra])
        return len(header).to_bytes(4, "little") + header

    def seal(self, meta: BlockMeta, data: Buffer) -> bytes:
        """All that stands before the data."""
        header = self.header(meta)
        return MAGIC + _checksum(header, data) + header

    def num_bytes(self, meta: BlockMeta) -> int:
        """Of the whole file."""
        return self.front_bytes(meta) + self.spec.block_bytes

    def front_bytes(self, meta: BlockMeta) -> int:
        """Of what stands before the data."""
        return len(MAGIC) + CHECKSUM_BYTES + len(self.header(meta))

    @property
    def least_bytes(self) -> int:
        """No file is shorter."""
        return FRONT_BYTES + self.spec.block_bytes

    def problem(self, meta: BlockMeta, front: Buffer, data: Buffer | None) -> str | None:
        """What is wrong with a file whose bytes before the data are `front`: "foreign" (another model's, layout's or version's),
        "different" (another block's), "torn" (this one's, but `data` is None: not its length), "damaged". None: it is this block, whole."""
        header = self.header(meta)
        front = bytes(front)
        if front[:len(MAGIC)] != MAGIC or front[len(MAGIC) + CHECKSUM_BYTES:][:len(header)] != header:
            return self._diagnose(front)
        if data is None:
            return "torn"
        return None if front[len(MAGIC):][:CHECKSUM_BYTES] == _checksum(header, data) else "damaged"

    def _diagnose(self, front: bytes) -> str:
        """Of a file that is not the wanted one, by its first bytes, which may be anything."""
        if front[:len(MAGIC)] != MAGIC:
            return "foreign" if front.startswith(MAGIC[:-1]) else "damaged"
        length = int.from_bytes(front[FRONT_BYTES - 4:FRONT_BYTES], "little")
        try:
            found: Any = msgspec.msgpack.decode(front[FRONT_BYTES:FRONT_BYTES + length])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return "damaged"
        known = isinstance(found, list) and len(found) == len(self._identity) + 5
        return "damaged" if not known else "different" if found[:len(self._identity)] == self._identity else "foreign"


def _checksum(header: bytes, data: Buffer) -> bytes:
    hasher = xxhash.xxh3_128(header)
    hasher.update(data)
    return hasher.digest()
