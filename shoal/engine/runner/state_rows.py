"""`StateRows`: the states of recurrent layers on one rank: a row for each running sequence. A row is one run
of bytes, in which each layer has its part (`StatePlan`), so that a copy moves all layers at once. A snapshot
of a row is in as many KV blocks as hold its bytes. The scheduler says which row is copied when; the kernels
write rows in place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b

import torch

from shoal.config import ResolvedConfig
from shoal.kernels.layer_cache import LayerState
from shoal.kernels.ops import Ops
from shoal.kinds.recurrent import RecurrentKind, ShortConvKind
from shoal.model_config import ModelConfig

ALIGNMENT = 256  # bytes at whose multiples each part begins


@dataclass(frozen=True, slots=True)
class StatePart:
    """Numbers within a row."""

    start: int  # in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, *shape] of uint8 [rows, bytes of a row]."""
        return rows[:, self.start : self.end].view(self.dtype).unflatten(1, self.shape)


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The layout of a row on one rank: for each recurrent layer, where the inputs of its convolution and its
    state lie."""

    layers: dict[int, tuple[StatePart, StatePart | None]]
    row_bytes: int  # 0: no layer has a state
    num_blocks: int  # KV blocks of as many bytes together

    def add_to(self, fingerprint: bytes) -> bytes:
        """Returns the fingerprint of files that have snapshots of this layout. Without states it stays."""
        if not self.layers:
            return fingerprint
        layout = [(i, str(conv), str(state)) for i, (conv, state) in self.layers.items()]
        hasher = blake2b(fingerprint, digest_size=len(fingerprint), person=b"shoal-states")
        hasher.update(repr(layout).encode())
        return hasher.digest()

    def views(self, rows: torch.Tensor) -> dict[int, LayerState]:
        return {
            i: LayerState(conv.view(rows), None if state is None else state.view(rows))
            for i, (conv, state) in self.layers.items()
        }


def plan_states(config: ResolvedConfig, model: ModelConfig, block_bytes: int) -> StatePlan:
    """Returns the plan of each rank's rows. Ranks have the same shapes. `block_bytes`: a KV block's."""
    layers: dict[int, tuple[StatePart, StatePart | None]] = {}
    size, end = config.tensor_parallel_size, 0
    for i, kind in enumerate(model.layers):
        mixer = kind.mixer
        if not isinstance(mixer, RecurrentKind):
            continue
        conv = StatePart(end, mixer.conv_shape(size), getattr(torch, config.dtype))
        state, end = None, _aligned(conv.end)
        if not isinstance(mixer, ShortConvKind):
            shape, given = mixer.state_shape(size), config.mamba_ssm_cache_dtype
            state = StatePart(end, shape, getattr(torch, mixer.dtype if given == "auto" else given))
            end = _aligned(state.end)
        layers[i] = conv, state
    num_blocks = -(-end // block_bytes)
    return StatePlan(layers, num_blocks * block_bytes, num_blocks)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class StateRows:
    """`rows` is uint8 [num_rows + 1, bytes of a row], with a spare row for padding. `layers`: the views of
    the layers that have states."""

    def __init__(self, plan: StatePlan, num_rows: int, ops: Ops, device: torch.device) -> None:
        self.plan, self._ops = plan, ops
        self.rows = torch.zeros(num_rows + 1, plan.row_bytes, dtype=torch.uint8, device=device)
        self.layers = plan.views(self.rows)

    def memory_is_new(self) -> None:
        """To be called when the memory of the region has been released and taken again: the spare row must
        hold numbers, as padding computes with it."""
        self.rows[-1].zero_()

    def restore(self, copies: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copies snapshots to rows. `copies`: int32s of pack_copies; `blocks`: all KV blocks."""
        parts, sources = copies.unflatten(0, (2, -1)).unbind()
        self._ops.copy_rows(self._parts(blocks), parts, _bytes(blocks), sources)

    def save(self, copies: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copies rows to snapshots."""
        targets, parts = copies.unflatten(0, (2, -1)).unbind()
        self._ops.copy_rows(_bytes(blocks), targets, self._parts(blocks), parts)

    def _parts(self, blocks: torch.Tensor) -> torch.Tensor:
        return self.rows.view(-1, blocks.shape[1] * blocks.itemsize)


def _bytes(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.uint8)
