"""Layout of the batch state on the device: one flat int32 tensor, which the host changes by
(address, value) pairs alone.

- The active decode rows, in batch order; -1 is padding.
- What decodes share: for each decode, in batch order, how many of its first tokens its group shares (0:
  none); the members of the groups, one group after the other, as indices into the batch; the table of groups.
- One row for each sequence: its fields, then its block tables, one for each group of layers (kv/groups.py).
- A spare row that is nobody's. What is written through index -1 ends up there.

The host's mirror of it is in engine/runner/batch.py. The kernels read it. There is no Triton here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch


class Field(IntEnum):
    """Columns of a state row before its block tables. Floats are stored as their bits."""

    TOKEN = 0  # the last sampled id, which is the next input
    POSITION = 1  # the position of that token, which is the number of tokens in the cache before it
    SEED_LOW = 2
    SEED_HIGH = 3
    TEMPERATURE = 4  # float32 bits; below MIN_TEMPERATURE the row is greedy
    TOP_K = 5  # 0: off
    TOP_P = 6  # float32 bits; 1: off
    MIN_P = 7  # float32 bits; 0: off
    # With speculation alone (kernels/drafting):
    MAX_TOKENS = 8  # the most tokens of the row's next decode, as planned
    NUM_DRAFTS = 9  # the tokens that are drafted after TOKEN
    ROOM = 10  # for how many tokens the row has blocks
    PENDING = 11  # the accepted drafts before POSITION that recurrent states lack (kernels/recurrent)


class DecodeGroupField(IntEnum):
    """Columns of the table of decode groups. The sequences of a group have the same first blocks. An unused
    group has 0 members and length 0."""

    START = 0  # where its members begin in the list of all members
    COUNT = 1  # the number of its members
    LENGTH = 2  # the tokens that they share, in whole blocks
    ROW = 3  # the state row of one member, whose block table is read for all


MAX_DECODE_GROUPS = 32  # A warp has as many threads, so it looks at all of them at once.
FIELDS = 16  # int32s before the block tables: 64 bytes, so that block tables are aligned
MIN_TEMPERATURE = 1e-5  # As in vLLM: below it, dividing by the temperature means nothing.
_ALIGNMENT = 16  # int32s: rows start at multiples of 64 bytes


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Addresses in the flat state of `num_rows` rows with `num_tables` block tables of at least `max_blocks`
    entries each."""

    num_rows: int
    max_blocks: int
    num_tables: int = 1

    @property
    def active_address(self) -> int:
        return 0

    @property
    def row_stride(self) -> int:
        return FIELDS + self.num_tables * self.table_stride

    @property
    def table_stride(self) -> int:
        return _aligned(self.max_blocks)

    @property
    def prefix_address(self) -> int:
        return _aligned(self.num_rows)

    @property
    def prefix_spans(self) -> tuple[slice, slice, slice]:
        """Returns the addresses of lengths, members and decode groups in the `prefix_size` ints from
        `prefix_address` on."""
        stride = _aligned(self.num_rows)
        return (
            slice(0, self.num_rows),
            slice(stride, stride + self.num_rows),
            slice(2 * stride, self.prefix_size),
        )

    @property
    def prefix_size(self) -> int:
        return 2 * _aligned(self.num_rows) + MAX_DECODE_GROUPS * len(DecodeGroupField)

    def row_address(self, row: int) -> int:
        return self.prefix_address + self.prefix_size + row * self.row_stride

    @property
    def size(self) -> int:
        return self.row_address(self.num_rows + 1)

    def active(self, state: torch.Tensor) -> torch.Tensor:
        """rows_B: [num_rows]."""
        return state[: self.num_rows]

    def prefixes(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """prefix_lens_B and members_B, [num_rows] each, and the decode groups, [MAX_DECODE_GROUPS, 4]."""
        lens_B, members_B, groups = (state[self.prefix_address :][span] for span in self.prefix_spans)
        return lens_B, members_B, groups.view(MAX_DECODE_GROUPS, len(DecodeGroupField))

    def table(self, state: torch.Tensor) -> torch.Tensor:
        """[num_rows + 1, row_stride]: what `sample` and `begin_decode` take."""
        return state[self.row_address(0) :].view(self.num_rows + 1, self.row_stride)

    def block_tables(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """block_tables_RM of each group of layers: strided views of `table`."""
        return self.table(state)[:, FIELDS:].split(self.table_stride, dim=1)


def seed_words(seed: int) -> tuple[int, int]:
    """A seed's low and high 32 bits as int32. Seeds that are equal modulo 2**64 are one seed."""
    return signed(seed), signed(seed >> 32)


def signed(value: int) -> int:
    """The int32 with the low 32 bits of `value`."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
