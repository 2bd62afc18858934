"""A KV block outside of the device: its identity (BlockMeta), and the file that holds it (BlockFormat). A
CacheSpec has the layout of its bytes.

A file: magic with the version (8 bytes), xxh3-128 of all that follows (16), length of the header (4,
little-endian), header (msgpack), zeros up to a whole page, data. A reader knows which block it wants, so it
builds the header itself and compares bytes: version, fingerprint, spec, key, parent, tokens and extra
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
PAGE = 4096  # unit of file systems' space, and alignment that direct I/O needs in files and memory
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """The identity of a full block. `key` alone finds it; the other fields prove that it is the right one."""

    key: bytes
    parent: bytes | None  # key of the block before it; None for a first one
    token_ids: Sequence[int]
    extra: tuple[str | None, str | None] = (None, None)  # adapter, cache salt
    group: int = 0  # the layers whose keys and values it has (kv/groups.py); the key differs, too

    def to_plain(self) -> PlainMeta:
        """The same as plain data, which can be sent to another rank."""
        return self.key, self.parent, array("I", self.token_ids).tobytes(), *self.extra, self.group

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> BlockMeta:
        key, parent, tokens, adapter, salt, group = plain
        return cls(key, parent, array("I", tokens), (adapter, salt), group)


PlainMeta = tuple[bytes, bytes | None, bytes, str | None, str | None, int]
Event = BlockMeta | bytes  # a tier stored this block, or removed the block with this key


def identity(spec: CacheSpec) -> list[str | int]:
    """Returns the layout of a rank's blocks as plain values. Blocks of different layouts can't replace each
    other. The number of blocks does not matter."""
    scales = [spec.scales] if spec.scales else []
    rest: list[str | int] = ["planes", spec.planes, spec.padding] if spec.planes != 2 or spec.padding else []
    return [
        *scales,
        *rest,
        spec.layout.value,
        spec.num_layers,
        spec.num_heads,
        spec.head_dim,
        spec.dtype,
        spec.block_size,
        spec.tp_size,
        spec.tp_rank,
    ]


def spec_name(spec: CacheSpec, other_specs: Sequence[CacheSpec] = ()) -> str:
    """Returns a name that the ranks of an engine share, and that differs for any other layout of any group of
    layers."""
    kind = "".join(repr(identity(one)[:-1]) for one in (spec, *other_specs))
    return f"{spec.dtype}-{spec.block_size}-tp{spec.tp_size}-{xxhash.xxh3_64_hexdigest(kind.encode())}"


class BlockFormat:
    """The files of one model (`fingerprint`: of its weights' content) and one rank's cache. `other_specs`: of
    further groups of layers, whose blocks have as many bytes."""

    def __init__(self, fingerprint: bytes, spec: CacheSpec, other_specs: Sequence[CacheSpec] = ()) -> None:
        self.spec = spec
        self._identity = [fingerprint, *identity(spec), *map(identity, other_specs)]

    def seal(self, meta: BlockMeta, data: Buffer) -> bytes:
        """Returns the front: everything before the data, in whole pages."""
        header = self._header(meta)
        return MAGIC + _checksum(header, data) + header

    def front_bytes(self, meta: BlockMeta) -> int:
        return HEADER_AT + len(self._header(meta))

    @property
    def least_bytes(self) -> int:
        """The size of the shortest file."""
        return PAGE + self.spec.block_bytes

    def problem(self, meta: BlockMeta, front: Buffer, data: Buffer) -> str | None:
        """Returns the reason to reject a file: "damaged", "foreign" (another model's, layout's or version's),
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
    """Returns `num_bytes` rounded up to whole pages, as a file takes them on a disk."""
    return -(-num_bytes // PAGE) * PAGE


def _checksum(header: bytes, data: Buffer) -> bytes:
    hasher = xxhash.xxh3_128(header)
    hasher.update(data)
    return hasher.digest()
