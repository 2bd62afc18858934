"""What a worker says of the weights that it lends to another one, which starts with the same: plain data that
crosses processes and hosts as bytes. No torch.

The reader copies whole tensors as they lie in the owner's memory: sharded, merged and packed. So the two must
lay them out alike (`layout`), and checksums prove what was read: an owner that dies, sleeps or takes new
weights meanwhile makes a failed loan, and never a wrong number.
"""

from __future__ import annotations

import os
from typing import TypeVar

import msgspec
import xxhash

from shoal.errors import CheckpointError
from shoal.weights.fingerprint import fields_that_count, weight_files
from shoal.weights.quantized import EVERY_DTYPE
from shoal.weights.safetensors import tensor_spans
from shoal.weights.source import CheckpointFiles

T = TypeVar("T", "WeightsLoan", "RankLoan")

SAMPLES = 16384  # of a checkpoint
MOST_SAMPLES, SAMPLE_BYTES = 32, 512  # of a tensor
WHOLE_BYTES = 1 << 16  # A tensor of at most so many is hashed whole.


class LentTensor(msgspec.Struct, array_like=True, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: str


class RankLoan(msgspec.Struct, array_like=True, frozen=True):
    """The tensors of one rank. `ways`: by a way's name, the address at which it reads them."""

    tensors: list[LentTensor]
    ways: dict[str, bytes]


class WeightsLoan(msgspec.Struct, array_like=True, frozen=True):
    layout: str  # everything that decides how weights lie in memory
    ranks: list[bytes]  # a RankLoan each


def encode(loan: WeightsLoan | RankLoan) -> bytes:
    return msgspec.msgpack.encode(loan)


def decode(data: bytes, kind: type[T]) -> T:
    """Raises CheckpointError for anything else."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"no loan of weights: {error}; is the other worker of another version?"
        ) from None


def name_of(files: CheckpointFiles) -> bytes:
    """Names the weights of a folder, which two workers may have in common. It reads headers and some bytes of
    each tensor, as the files may be on a slow disk: checkpoints that differ in a few rows of large matrices
    alone may have one name. Raises CheckpointError, OSError."""
    hasher = xxhash.xxh3_128(msgspec.msgpack.encode(fields_that_count(files.config)))
    spans = {path: tensor_spans(path, EVERY_DTYPE) for path in weight_files(files)}
    samples = min(MOST_SAMPLES, max(2, SAMPLES // sum(map(len, spans.values()))))
    for path, tensors in spans.items():
        with open(path, "rb", buffering=0) as file:
            hasher.update(os.pread(file.fileno(), tensors[0][0], 0))  # names, types and shapes
            for start, end in tensors:
                if end - start <= WHOLE_BYTES:
                    hasher.update(os.pread(file.fileno(), end - start, start))
                    continue
                last = end - start - SAMPLE_BYTES
                for i in range(samples):
                    offset = start + i * last // (samples - 1)
                    hasher.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
    return hasher.digest()
