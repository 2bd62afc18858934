"""What a worker says of the weights that it lends to another one, which starts with the same: plain data that
crosses processes and hosts as bytes. No torch.

The reader copies whole tensors as they lie in the owner's memory: sharded, merged and packed. So the two must
lay them out alike (`layout`), and checksums prove what was read: an owner that dies, sleeps or takes new
weights meanwhile makes a failed loan, and never a wrong number.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from shoal.errors import CheckpointError

T = TypeVar("T", "WeightsLoan", "RankLoan")


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
