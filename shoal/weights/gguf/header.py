"""The head of a GGUF file: its metadata, and the position of each tensor. No torch, so that the tokenizer may
start from it.

The reader of the `gguf` package makes a numpy array of each token of a vocabulary, which takes seconds, so
this file has its own. Everything is checked against the file's size, so that a damaged file is an error here
and not a crash later.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError
from shoal.kernels.quant.ggml_types import TYPES

MAGIC = b"GGUF"
# GGUF's number of a value type -> struct code
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# a tensor of numbers by which rotary frequencies are divided (Llama 3's scaling)
ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # longrope's
ROPE_TENSORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
# The bounds of the header before the tensors' data. The largest published vocabularies take 10 MiB and a
# million values.
MAX_HEADER_BYTES = 256 << 20
MAX_VALUES = 4 << 20
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NESTING = 4  # arrays in arrays
MAX_ALIGNMENT = 1 << 20
MAX_ROPE_FACTORS = 1 << 12


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    kind: str  # a name in kernels/quant/ggml_types.py
    shape: tuple[int, ...]  # the slowest dimension first, as torch has it (the file has it last)
    offset: int  # its first byte in the file
    num_bytes: int

    def span(self, path: Path) -> tuple[Path, int, int]:
        """Its place in the file of this path: its first byte, and its end."""
        return path, self.offset, self.offset + self.num_bytes


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    left_out: int = 0  # tensors of other parts than the text model (weights/gguf/ollama.py)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {info.name: info.shape for info in self.tensors.values()}


def read_header(path: Path) -> GGUFHeader:
    """Reads a file's header. Raises CheckpointError naming the file, and the tensor if it concerns one."""
    try:
        if not path.is_file():  # a pipe would never answer
            raise FileNotFoundError("no such file")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (OSError, ValueError) as error:  # ValueError: mmap of an empty file
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot read the GGUF file {path}: {error}") from None


def read_longrope(header: GGUFHeader) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns longrope's short and long factors; () for what the file lacks."""
    return read_rope_factors(header, SHORT_FACTORS), read_rope_factors(header, LONG_FACTORS)


def read_rope_factors(header: GGUFHeader, name: str = ROPE_FACTORS) -> tuple[float, ...]:
    """Returns the divisor of each rotary frequency; () if the file has no such tensor. Raises CheckpointError
    for anything but a row of positive numbers."""
    info = header.tensors.get(name)
    if info is None:
        return ()
    if info.kind != "F32" or len(info.shape) != 1 or info.shape[0] > MAX_ROPE_FACTORS:
        raise CheckpointError(
            f"{header.path}: the tensor {info.name} is {info.kind} of shape "
            f"{list(info.shape)} instead of a row of F32"
        )
    with header.path.open("rb") as file:
        file.seek(info.offset)
        factors = struct.unpack(f"<{info.shape[0]}f", file.read(info.num_bytes))
    if not all(0 < factor < math.inf for factor in factors):
        raise CheckpointError(
            f"{header.path}: the tensor {info.name} must hold positive numbers; fetch the file again"
        )
    return factors


def _parse(path: Path, data: mmap.mmap) -> GGUFHeader:
    if data[:4] != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it starts with {data[:4]!r} instead of {MAGIC!r}")
    cursor = _Cursor(data, 4)
    metadata: dict[str, Any] = {}
    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    part = "header"
    try:
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise CheckpointError(
                f"{path}: GGUF version {version} is not supported (little-endian 2 and 3 are)"
            )
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        # a name's length, dimensions, one of them, a type, an offset
        cursor.announce(num_tensors, 32, "tensors")
        cursor.announce(num_values, 13, "key-value pairs")
        for _ in range(num_values):
            part = f"metadata after {len(metadata)} keys"
            key = cursor.string()
            part = f"metadata key {key!r}"
            if key in metadata:
                raise EOFError("it is there twice")
            metadata[key] = cursor.value(cursor.scalar("I"))
        for _ in range(num_tensors):
            part = f"list of tensors after {len(infos)}"
            name, info = cursor.tensor()
            part = f"tensor {name!r}"
            if name in infos:
                raise EOFError("it is there twice")
            infos[name] = info
    except (struct.error, UnicodeDecodeError, EOFError) as error:
        raise CheckpointError(
            f"{path}: the GGUF header is damaged or truncated near byte "
            f"{cursor.position}, {part} ({error}); fetch the file again"
        ) from None
    parts = metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts > 1:
        raise CheckpointError(
            f"{path} is one of {parts!r} parts (split.count); join them with llama-gguf-split --merge"
        )
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
        raise CheckpointError(
            f"{path}: general.alignment {alignment!r} is not a multiple of 8 up to {MAX_ALIGNMENT}"
        )
    start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: _locate(path, len(data), name, shape, number, start, offset, alignment)
        for name, (shape, number, offset) in infos.items()
    }
    _refuse_overlaps(path, tensors)
    return GGUFHeader(path, metadata, tensors)


def _locate(
    path: Path,
    file_size: int,
    name: str,
    shape: tuple[int, ...],
    number: int,
    start: int,
    offset: int,
    alignment: int,
) -> TensorInfo:
    """Returns a tensor's position in the file. `offset` counts from `start`, the first byte after the
    header."""
    if number not in TYPES:
        supported = ", ".join(kind for kind, *_ in TYPES.values())
        raise CheckpointError(
            f"{path}: the tensor {name} has type {type_name(number)}, which is not supported; these are: "
            f"{supported}"
        )
    kind, group_size, group_bytes = TYPES[number]
    if not all(shape) or shape[-1] % group_size:
        raise CheckpointError(
            f"{path}: the tensor {name} of shape {list(shape)} does not divide into {kind} groups of "
            f"{group_size}"
        )
    if offset % alignment:
        raise CheckpointError(
            f"{path}: the tensor {name} begins at byte {offset} of the data, which is not "
            f"a multiple of {alignment}"
        )
    first, num_bytes = start + offset, math.prod(shape) // group_size * group_bytes
    if first + num_bytes > file_size:
        raise CheckpointError(
            f"{path} is truncated: the tensor {name} of shape {list(shape)} ends at byte "
            f"{first + num_bytes}, the file at {file_size}; fetch it again"
        )
    return TensorInfo(name, kind, shape, first, num_bytes)


def _refuse_overlaps(path: Path, tensors: dict[str, TensorInfo]) -> None:
    previous: TensorInfo | None = None
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        if previous is not None and previous.offset + previous.num_bytes > info.offset:
            raise CheckpointError(
                f"{path}: the tensors {previous.name} and {info.name} overlap at byte "
                f"{info.offset}; fetch it again"
            )
        previous = info


def type_name(number: int) -> str:
    """ggml's name of a tensor type, for errors; the number if it has none."""
    # Imported here, for an error's text alone: it takes 50 ms.
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(number).name if number in list(GGMLQuantizationType) else str(number)


class _Cursor:
    """Reads value after value. Raises struct.error or EOFError past the end of the header, or for more than a
    header may hold."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data, self.position = data, position
        self.end = min(len(data), MAX_HEADER_BYTES)
        self.values_left = MAX_VALUES

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
        """Reads `count` strings. A large vocabulary spends its start in this loop."""
        self._require(8 * count)
        data, position, end = self.data, self.position, self.end
        length_at, result = struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            start = position + 8
            if start > end:
                raise EOFError("a string begins after the end of the header")
            position = start + length_at(data, position)[0]
            if position > end:
                raise EOFError(f"a string of {position - start} bytes ends after the end of the header")
            result.append(data[start:position].decode())
        self.position = position
        return result

    def value(self, number: int, depth: int = 0) -> Any:
        if number == STRING:
            return self.string()
        if number == ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            if element == STRING:
                self.announce(count, 8, "strings of an array")
                return self.strings(count)
            if element == ARRAY:
                if depth == MAX_NESTING:
                    raise EOFError(f"arrays are nested more than {MAX_NESTING} deep")
                self.announce(count, 12, "arrays of an array")
                return [self.value(ARRAY, depth + 1) for _ in range(count)]
            code = self._code(element)
            self.announce(count, struct.calcsize("<" + code), "values of an array")
            return list(self.scalars(code, count))
        return self.scalar(self._code(number))

    def tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """name, (shape, type number, offset in the data)"""
        name, num_dims = self.string(), self.scalar("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise EOFError(f"the tensor {name!r:.80} has {num_dims} dimensions, not 1 to {MAX_DIMS}")
        shape = self.scalars("Q", num_dims)[::-1]
        return name, (shape, self.scalar("I"), self.scalar("Q"))

    def announce(self, count: int, least_bytes: int, what: str) -> None:
        """Called before anything is made for `count` things of at least `least_bytes` each, as a damaged
        count can be astronomic."""
        if count > self.values_left or count * least_bytes > self.end - self.position:
            raise EOFError(
                f"{count} {what} are announced, but {self.end - self.position} bytes and "
                f"{self.values_left} values are left"
            )
        self.values_left -= count

    def _code(self, number: int) -> str:
        if number not in SCALARS:
            raise EOFError(f"value type {number} does not exist")
        return SCALARS[number]

    def _require(self, num_bytes: int) -> None:
        if num_bytes > self.end - self.position:
            raise EOFError(f"{num_bytes} bytes are announced, {self.end - self.position} are left")
