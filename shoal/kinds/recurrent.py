"""RecurrentKind: a layer that keeps one state for a sequence instead of keys and values, by numbers: a gated
delta net, Mamba-2, or a short convolution. No torch. kernels/recurrent/ computes with these numbers.

Each kind says what it keeps of a sequence on a rank: `conv_shape`, the channels of its convolution and how
many of their last inputs, and, but for short convolutions, `state_shape`, a matrix for each head.
`conv_heads` says which heads the channels belong to, by which ranks divide them. Numbers of heads are for the
whole model, not for one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def heads_of_rank(num_heads: int, tp_size: int) -> int:
    """Ranks share heads in order. Where there are more ranks than heads, neighbours have a copy each."""
    return max(1, num_heads // tp_size)


def _num_channels(sections: Sequence[tuple[int, int]], tp_size: int) -> int:
    """Returns the channels of a rank's convolution."""
    return sum(heads_of_rank(num_heads, tp_size) * width for num_heads, width in sections)


@dataclass(frozen=True, slots=True)
class DeltaKind:
    """A gated delta net (Qwen3-Next). Each key head's q and k serve as many value heads as there are for
    it."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # the numbers of a head of q or of k
    value_dim: int
    conv_width: int
    dtype: str = "float32"  # the states' in the checkpoint's config, by torch's name

    @property
    def part_sizes(self) -> tuple[int, int, int]:
        """The channels of q, k and v, which the convolution takes in this order."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def conv_heads(self) -> tuple[tuple[int, int], ...]:
        """The heads of q, k and v, and the channels of one."""
        keys = self.num_key_heads, self.key_dim
        return keys, keys, (self.num_value_heads, self.value_dim)

    def conv_shape(self, tp_size: int) -> tuple[int, int]:
        return _num_channels(self.conv_heads, tp_size), self.conv_width - 1

    def state_shape(self, tp_size: int) -> tuple[int, int, int]:
        return self.num_value_heads // tp_size, self.key_dim, self.value_dim

    def input_size(self, tp_size: int) -> int:
        """Returns the numbers that change a state by one token: k, v, a and b."""
        _, keys, values = self.part_sizes
        return (keys + values + 2 * self.num_value_heads) // tp_size


@dataclass(frozen=True, slots=True)
class ChannelDeltaKind(DeltaKind):
    """A gated delta net in which each channel of a key forgets by a gate of its own (Kimi Linear). The gates
    of keys and of results are made by two matrices each."""

    gate_rank: int = 1  # the numbers between the two

    def input_size(self, tp_size: int) -> int:
        """Returns the numbers that change a state by one token: k, v, a for each channel, and b."""
        keys, _, values = self.part_sizes
        return (2 * keys + values + self.num_value_heads) // tp_size


@dataclass(frozen=True, slots=True)
class Mamba2Kind:
    """Mamba-2. Heads of a group share B and C, and their results are normed together."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int
    conv_bias: bool = True
    bias: bool = False  # in the projections
    # dt, after its softplus, is kept within them
    least_dt: float = 0.0
    most_dt: float = float("inf")
    dtype: str = "float32"  # the states' in the checkpoint's config, by torch's name

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    def groups_per_rank(self, tp_size: int) -> int:
        """Ranks that share a group have a copy of it each."""
        return heads_of_rank(self.num_groups, tp_size)

    @property
    def conv_heads(self) -> tuple[tuple[int, int], ...]:
        """The heads of x and the groups of B and C, and the channels of one."""
        groups = self.num_groups, self.state_size
        return (self.num_heads, self.head_dim), groups, groups

    def conv_shape(self, tp_size: int) -> tuple[int, int]:
        return _num_channels(self.conv_heads, tp_size), self.conv_width - 1

    def state_shape(self, tp_size: int) -> tuple[int, int, int]:
        return self.num_heads // tp_size, self.head_dim, self.state_size

    def input_size(self, tp_size: int) -> int:
        """Returns the numbers that change a state by one token: x, B and dt."""
        shared = self.groups_per_rank(tp_size) * self.state_size
        return (self.inner_size + self.num_heads) // tp_size + shared


@dataclass(frozen=True, slots=True)
class ShortConvKind:
    """A gated short convolution (LFM2)."""

    size: int  # channels
    conv_width: int
    bias: bool = False  # in the convolution and the projections

    @property
    def conv_heads(self) -> tuple[tuple[int, int], ...]:
        """Channels are divided one by one."""
        return ((self.size, 1),)

    def conv_shape(self, tp_size: int) -> tuple[int, int]:
        return _num_channels(self.conv_heads, tp_size), self.conv_width - 1


RecurrentKind = DeltaKind | Mamba2Kind | ShortConvKind
