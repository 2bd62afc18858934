"""`StateRows`: the states of recurrent layers on one rank: a row for each running sequence. A row is one run
of bytes, in which each layer has its part (`StatePlan`), so that a copy moves all layers at once. A snapshot
of a row is in as many KV blocks as hold its bytes. The scheduler says which row is copied when; the kernels
write rows in place.

With speculation, a state lacks the accepted drafts of the last step. Their inputs are kept in rows of their
own, and the next step applies them (kernels/draft_spans.py). A snapshot lacks none, as they are applied
before the copy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import torch

from shoal.config import ResolvedConfig
from shoal.engine.drafting.device import Drafting
from shoal.engine.runner.cache_plan import plan_cache
from shoal.kernels.draft_spans import DraftSpans
from shoal.kernels.layer_cache import LayerState
from shoal.kernels.ops import Ops
from shoal.kernels.recurrent.sequences import Sequences
from shoal.kernels.state import Field
from shoal.kinds.recurrent import RecurrentKind, ShortConvKind, heads_of_rank
from shoal.kv.transfer.states import HeadRun, RowLayout
from shoal.model_config import ModelConfig
from shoal.models.decoder import Decoder
from shoal.models.decoder_layers.hybrid_layer import HybridLayer

ALIGNMENT = 256  # bytes at whose multiples each part begins


@dataclass(frozen=True, slots=True)
class StatePart:
    """Numbers within a row."""

    start: int  # in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype
    # the first axis: the heads of the whole model, and how many entries each has
    heads: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    def runs(self, tp_size: int) -> list[HeadRun]:
        found, start, entry_bytes = [], self.start, math.prod(self.shape[1:]) * self.dtype.itemsize
        for num_heads, width in self.heads:
            found.append(HeadRun(start, num_heads, width * entry_bytes))
            start += heads_of_rank(num_heads, tp_size) * width * entry_bytes
        return found

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, *shape] of uint8 [rows, bytes of a row]."""
        return rows[:, self.start : self.end].view(self.dtype).unflatten(1, self.shape)


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The layout of a row on one rank: for each recurrent layer, where the inputs of its convolution and its
    state lie. `kept`: the same of the inputs of drafts, which have rows of their own."""

    layers: dict[int, tuple[StatePart, StatePart | None]]
    row_bytes: int  # 0: no layer has a state
    num_blocks: int  # KV blocks of as many bytes together
    block_size: int  # the fewest tokens between two snapshots
    kept: dict[int, tuple[StatePart, StatePart | None]]
    kept_bytes: int  # 0: without speculation

    @property
    def bytes_of_sequence(self) -> int:
        return self.row_bytes + self.kept_bytes

    def row_layout(self, tp_size: int) -> RowLayout:
        """Describes a row to workers of other tensor-parallel sizes. `tp_size`: this plan's."""
        parts = [part for layer in self.layers.values() for part in layer if part is not None]
        runs = tuple(run for part in parts for run in part.runs(tp_size))
        return RowLayout(runs, self.num_blocks, self.row_bytes // self.num_blocks, tp_size)

    def add_to(self, fingerprint: bytes) -> bytes:
        """Returns the fingerprint of files that have snapshots of this layout. Without states it stays."""
        if not self.layers:
            return fingerprint
        layout = [(i, str(conv), str(state)) for i, (conv, state) in self.layers.items()]
        hasher = blake2b(fingerprint, digest_size=len(fingerprint), person=b"shoal-states")
        hasher.update(repr(layout).encode())
        return hasher.digest()

    def views(
        self, rows: torch.Tensor, kept_rows: torch.Tensor, drafts: DraftSpans | None
    ) -> dict[int, LayerState]:
        views = {}
        for i, (conv, state) in self.layers.items():
            kept_conv, kept_state = self.kept.get(i, (None, None))
            views[i] = LayerState(
                conv.view(rows),
                None if state is None else state.view(rows),
                None if kept_conv is None else kept_conv.view(kept_rows),
                None if kept_state is None else kept_state.view(kept_rows),
                drafts,
            )
        return views


def plan_states(config: ResolvedConfig, model: ModelConfig, block_bytes: int) -> StatePlan:
    """Returns the plan of each rank's rows. Ranks have the same shapes. `block_bytes`: a KV block's."""
    layers: dict[int, tuple[StatePart, StatePart | None]] = {}
    kept: dict[int, tuple[StatePart, StatePart | None]] = {}
    size, end, kept_end = config.tensor_parallel_size, 0, 0
    num_drafts = 0 if config.speculative is None else config.speculative.queries - 1
    dtype = getattr(torch, config.dtype)
    for i, kind in enumerate(model.layers):
        mixer = kind.mixer
        if not isinstance(mixer, RecurrentKind):
            continue
        conv = StatePart(end, mixer.conv_shape(size), dtype, mixer.conv_heads)
        kept_conv = StatePart(kept_end, (num_drafts, conv.shape[0]), dtype)
        state, kept_state, end, kept_end = None, None, _aligned(conv.end), _aligned(kept_conv.end)
        if not isinstance(mixer, ShortConvKind):
            shape, given = mixer.state_shape(size), config.mamba_ssm_cache_dtype
            state_dtype = getattr(torch, mixer.dtype if given == "auto" else given)
            state = StatePart(end, shape, state_dtype, ((mixer.state_shape(1)[0], 1),))
            kept_state = StatePart(kept_end, (num_drafts, mixer.input_size(size)), dtype)
            end, kept_end = _aligned(state.end), _aligned(kept_state.end)
        layers[i] = conv, state
        if num_drafts:
            kept[i] = kept_conv, kept_state
    num_blocks = -(-end // block_bytes)
    return StatePlan(layers, num_blocks * block_bytes, num_blocks, config.block_size, kept, kept_end)


def plan_states_of_size(config: ResolvedConfig, model: ModelConfig, tp_size: int) -> StatePlan:
    """Returns the plan of workers that differ in their tensor-parallel size alone. Raises LayoutError if the
    model can't be divided so."""
    config = replace(config, tensor_parallel_size=tp_size)
    return plan_states(config, model, plan_cache(config, model).block_bytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class StateRows:
    """`rows` is uint8 [num_rows + 1, bytes of a row], with a spare row for padding, and `kept` has the inputs
    of drafts in as many rows. `layers`: the views of the layers that have states."""

    def __init__(
        self,
        plan: StatePlan,
        num_rows: int,
        ops: Ops,
        device: torch.device,
        drafting: Drafting | None = None,
        model: Decoder | None = None,
    ) -> None:
        """`drafting` and `model`: with speculation."""
        self.plan, self._ops, self._model = plan, ops, model
        self.rows = torch.zeros(num_rows + 1, plan.row_bytes, dtype=torch.uint8, device=device)
        self.kept = torch.zeros(num_rows + 1, plan.kept_bytes, dtype=torch.uint8, device=device)
        self._drafting = drafting if plan.layers else None
        spans = None if self._drafting is None else self._drafting.spans()
        self.layers = plan.views(self.rows, self.kept, spans)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.kept.nbytes

    def memory_is_new(self) -> None:
        """To be called when the memory of the region has been released and taken again: the spare row must
        hold numbers, as padding computes with it."""
        self.rows[-1].zero_()
        self.kept[-1].zero_()

    def restore(self, copies: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copies snapshots to rows. `copies`: int32s of pack_copies; `blocks`: all KV blocks."""
        parts, sources = copies.unflatten(0, (2, -1)).unbind()
        self._ops.copy_rows(self._parts(blocks), parts, _bytes(blocks), sources)

    def save(self, copies: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copies rows to snapshots. To be called when the step's drafts have been accepted."""
        if self._drafting is None:
            targets, parts = copies.unflatten(0, (2, -1)).unbind()
            self._ops.copy_rows(_bytes(blocks), targets, self._parts(blocks), parts)
            return
        targets, parts, ends = copies.unflatten(0, (3, -1)).unbind()
        size = self.plan.num_blocks
        # the row that each of the snapshots is taken of; -1: padding
        rows_N, ends_N = torch.div(parts[::size], size, rounding_mode="floor"), ends[::size]
        fields_NF = self._drafting.table[rows_N.long()]
        position_N = fields_NF[:, Field.POSITION]
        start_N = position_N - 1 - fields_NF[:, Field.PENDING]
        is_passed_N = (rows_N >= 0) & (ends_N > start_N) & (ends_N <= position_N)
        # A step may pass several ends of a row: then its state is taken from each to the next one.
        turn_N = (ends_N - 1 - start_N) // self.plan.block_size
        for turn in range(-(-self._drafting.queries // self.plan.block_size)):
            is_due_N = is_passed_N & (turn_N == turn)
            self._apply_pending(rows_N, ends_N, is_due_N)
            if turn == 0:  # a chunk of a prompt ends where it is planned to
                is_due_N |= (rows_N >= 0) & (ends_N == 0)
            is_due = is_due_N.repeat_interleave(size)[: len(targets)]
            own = torch.where(is_due, targets, -1)
            self._ops.copy_rows(_bytes(blocks), own, self._parts(blocks), parts)

    def _apply_pending(self, rows_N: torch.Tensor, ends_N: torch.Tensor, is_due_N: torch.Tensor) -> None:
        """Applies pending inputs to the rows that are due, so that their states have the first ends_N
        tokens."""
        assert self._drafting is not None and self._model is not None
        table, rows = self._drafting.table, rows_N.long()
        pending_N = ends_N - table[rows, Field.POSITION] + table[rows, Field.PENDING]
        pending_N = torch.where(is_due_N, pending_N, 0)
        if self.rows.device.type == "cpu" and not pending_N.any():
            return
        none_N = torch.zeros(len(rows_N) + 1, dtype=torch.int32, device=rows_N.device)
        spans = DraftSpans(ends_N.contiguous(), none_N[1:] - 1, pending_N, queries=0)
        sequences = Sequences(rows_N, none_N, none_N[:0], len(rows_N), spans)
        for i, layer in self.layers.items():
            module = self._model.layers[i]
            assert isinstance(module, HybridLayer)
            module.apply_pending(layer, sequences)
        # rows_N has a row once for each end that it may pass
        table[:, Field.PENDING].index_put_((rows,), -pending_N, accumulate=True)

    def _parts(self, blocks: torch.Tensor) -> torch.Tensor:
        return self.rows.view(-1, blocks.shape[1] * blocks.itemsize)


def _bytes(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.uint8)
