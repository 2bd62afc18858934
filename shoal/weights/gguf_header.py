"""The head of a GGUF file: its metadata, and where each tensor lies. No torch, so that the tokenizer may start from it.

A reader of our own: the `gguf` package's makes a numpy array of each of a vocabulary's tokens, seconds where this takes milliseconds.
Everything is checked against the file's size, so a damaged file is an error here and not a crash later.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError

MAGIC = b"GGUF"
# ggml's number of a tensor type -> (name, weights and bytes of a group)
TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34),
         12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210)}
# GGUF's number of a value type -> struct code
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
ROPE_FACTORS = "rope_freqs.weight"    # Llama 3's scaling: what each rotary frequency is divided by


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    kind: str                 # a name in TYPES
    shape: tuple[int, ...]    # the slowest dimension first, as torch has it (the file has it last)
    offset: int               # of its first byte in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {info.name: info.shape for info in self.tensors.values()}


def read_header(path: Path) -> GGUFHeader:
    """Raises CheckpointError naming the file, and the tensor where there is one."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (OSError, ValueError) as error:    # ValueError: mmap of an empty file
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot read the GGUF file {path}: {error}") from None


def read_rope_factors(header: GGUFHeader) -> tuple[float, ...]:
    """() if the file holds none."""
    info = header.tensors.get(ROPE_FACTORS)
    if info is None:
        return ()
    if info.kind != "F32":
        raise CheckpointError(f"{header.path}: the tensor {info.name} has type {info.kind} instead of F32")
    with header.path.open("rb") as file:
        file.seek(info.offset)
        return struct.unpack(f"<{info.num_bytes // 4}f", file.read(info.num_bytes))


def _parse(path: Path, data: mmap.mmap) -> GGUFHeader:
    if data[:4] != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it starts with {data[:4]!r} instead of {MAGIC!r}")
    cursor = _Cursor(data, 4)
    try:
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise CheckpointError(f"{path}: GGUF version {version} is not supported (little-endian 2 and 3 are)")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {}
        for _ in range(num_values):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        infos = [cursor.tensor() for _ in range(num_tensors)]
    except (struct.error, UnicodeDecodeError, EOFError) as error:
        raise CheckpointError(f"{path}: the GGUF header is damaged or truncated near byte {cursor.position} ({error}); "
                              "fetch the file again") from None
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError(f"{path} is one of {metadata['split.count']} parts; join them with llama-gguf-split --merge")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        raise CheckpointError(f"{path}: general.alignment {alignment!r} is not a multiple of 8")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, number, offset in infos:
        if name in tensors:
            raise CheckpointError(f"{path}: the tensor {name} is there twice")
        tensors[name] = _locate(path, len(data), name, shape, number, start + offset)
    return GGUFHeader(path, metadata, tensors)


def _locate(path: Path, file_size: int, name: str, shape: tuple[int, ...], number: int, offset: int) -> TensorInfo:
    if number not in TYPES:
        supported = ", ".join(kind for kind, *_ in TYPES.values())
        raise CheckpointError(f"{path}: the tensor {name} has type {type_name(number)}, which is not supported; these are: {supported}")
    kind, group_size, group_bytes = TYPES[number]
    if not shape or shape[-1] % group_size:
        raise CheckpointError(f"{path}: the tensor {name} of shape {list(shape)} does not divide into {kind} groups of {group_size}")
    num_bytes = math.prod(shape) // group_size * group_bytes
    if offset + num_bytes > file_size:
        raise CheckpointError(f"{path} is truncated: the tensor {name} of shape {list(shape)} ends at byte {offset + num_bytes}, "
                              f"the file at {file_size}; fetch it again")
    return TensorInfo(name, kind, shape, offset, num_bytes)


def type_name(number: int) -> str:
    # Imported here, for an error's text alone: it takes 50 ms.
    from gguf import GGMLQuantizationType
    return GGMLQuantizationType(number).name if number in list(GGMLQuantizationType) else str(number)


class _Cursor:
    """Reads value after value. Raises struct.error or EOFError past the end of the file."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data, self.position = data, position

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        self._require(count * struct.calcsize("<" + code))
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """The loop that the start-up time of a large vocabulary hangs on."""
        self._require(8 * count)
        data, position, size = self.data, self.position, len(self.data)
        length_at, result = struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            start = position + 8
            position = start + length_at(data, position)[0]
            if position > size:
                raise EOFError("a string ends behind the end of the file")
            result.append(data[start:position].decode())
        self.position = position
        return result

    def value(self, number: int) -> Any:
        if number == STRING:
            return self.string()
        if number == ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            if element == STRING:
                return self.strings(count)
            if element == ARRAY:
                self._require(12 * count)
                return [self.value(ARRAY) for _ in range(count)]
            return list(self.scalars(self._code(element), count))
        return self.scalar(self._code(number))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape, type number, offset in the data)"""
        name, num_dims = self.string(), self.scalar("I")
        shape = self.scalars("Q", num_dims)[::-1]
        return name, shape, self.scalar("I"), self.scalar("Q")

    def _code(self, number: int) -> str:
        if number not in SCALARS:
            raise EOFError(f"value type {number} does not exist")
        return SCALARS[number]

    def _require(self, num_bytes: int) -> None:
        """Before anything is allocated: a damaged count can be astronomic."""
        if num_bytes > len(self.data) - self.position:
            raise EOFError(f"{num_bytes} bytes are announced, {len(self.data) - self.position} are left")
