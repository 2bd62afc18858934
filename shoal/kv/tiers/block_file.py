"""A KV block outside of the device: what it is (BlockMeta), and the file that holds it (BlockFormat). How its
bytes are meant is a CacheSpec.

A file: magic with the version (8 bytes), xxh3-128 of all that follows (16), length of the header (4,
little-endian), header (msgpack), zeros up to a whole page, data. Who reads a file knows which block it wants,
so it builds the header itself and compares bytes: version, fingerprint, spec, key, parent, tokens and extra
keys at once. Functions of bytes: no I/O, no torch.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from shoal.kv.layout import CacheSpec

MAGIC = b"SHOALKV2"
HEADER_AT = len(MAGIC) + 16  # its length and itself; before them the checksum
PAGE = 4096  # file systems give space, and direct I/O wants places in files and memory, in such pieces
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What a full block is. `key` alone is enough to find it; the rest proves that it is the one that is
    meant."""

    key: bytes
    parent: bytes | None  # key of the block before it; None for a first one
    token_ids: Sequence[int]
    extra: tuple[str | None, str | None] = (None, None)  # adapter, cache salt

    def to_plain(self) -> PlainMeta:
        """The same as plain data, which can be sent to another rank."""
        return self.key, self.parent, array("I", self.token_ids).tobytes(), *self.extra

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> BlockMeta:
        key, parent, tokens, adapter, salt = plain
        return cls(key, parent, array("I", tokens), (adapter, salt))


PlainMeta = tuple[bytes, bytes | None, bytes, str | None, str | None]
Event = BlockMeta | bytes  # of a tier: a block was stored, or the one of this key was removed


def identity(spec: CacheSpec) -> list[str | int]:
    """How the bytes of a rank's blocks are meant, as plain values. Blocks of different ones are of no use to
    each other. How many blocks the rank has does not matter."""
    scales = [spec.scales] if spec.scales else []
    return [
        *scales,
        spec.layout.value,
        spec.num_layers,
        spec.num_heads,
        spec.head_dim,
        spec.dtype,
        spec.block_size,
        spec.tp_size,
        spec.tp_rank,
    ]


def spec_name(spec: CacheSpec) -> str:
    """A name that the ranks of an engine share, and nobody with blocks of another kind."""
    kind = repr(identity(spec)[:-1])
    return f"{spec.dtype}-{spec.block_size}-tp{spec.tp_size}-{xxhash.xxh3_64_hexdigest(kind.encode())}"


class BlockFormat:
    """The files of one model (`fingerprint`: of its weights' content) and one rank's cache."""

    def __init__(self, fingerprint: bytes, spec: CacheSpec) -> None:
        self.spec = spec
        self._identity = [fingerprint, *identity(spec)]

    def seal(self, meta: BlockMeta, data: Buffer) -> bytes:
        """The front: all that stands before the data, in whole pages."""
        header = self._header(meta)
        return MAGIC + _checksum(header, data) + header

    def front_bytes(self, meta: BlockMeta) -> int:
        return HEADER_AT + len(self._header(meta))

    @property
    def least_bytes(self) -> int:
        """No file is shorter."""
        return PAGE + self.spec.block_bytes

    def problem(self, meta: BlockMeta, front: Buffer, data: Buffer) -> str | None:
        """What is wrong with a file: "damaged", "foreign" (another model's, layout's or version's),
        "different" (another block's). None: it is this block. Nothing in it is trusted."""
        front = bytes(front)
        if front[: len(MAGIC)] != MAGIC:
            return "foreign" if front.startswith(MAGIC[:-1]) else "damaged"
        header = front[HEADER_AT:]
        if front[len(MAGIC) : HEADER_AT] != _checksum(header, data):
            return "damaged"
        if header == self._header(meta):
            return None
        try:
            found: Any = msgspec.msgpack.decode(header[4 : 4 + int.from_bytes(header[:4], "little")])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return "damaged"
        ours = isinstance(found, list) and found[: len(self._identity)] == self._identity
        return "different" if ours else "foreign"

    def _header(self, meta: BlockMeta) -> bytes:
        tokens = array("I", meta.token_ids)
        if sys.byteorder == "big":
            tokens.byteswap()
        extra = [part and part.encode("utf-8", "surrogatepass") for part in meta.extra]  # as in the keys
        header = msgspec.msgpack.encode([*self._identity, meta.key, meta.parent, tokens.tobytes(), *extra])
        header = len(header).to_bytes(4, "little") + header
        return header + bytes(-(HEADER_AT + len(header)) % PAGE)


def in_pages(num_bytes: int) -> int:
    """What a file of so many bytes takes on a disk."""
    return -(-num_bytes // PAGE) * PAGE


def _checksum(header: bytes, data: Buffer) -> bytes:
    hasher = xxhash.xxh3_128(header)
    hasher.update(data)
    return hasher.digest()
