"""Rows of states: layers have parts of their own, one copy moves all of them, and ranks share them out."""

import dataclasses

import pytest
import torch

from shoal.config import SpeculativeConfig
from shoal.engine.runner.packed_step import pack_copies
from shoal.engine.runner.state_rows import StateRows, plan_states
from shoal.engine.scheduling.part_state import StateCopies
from shoal.kernels.cpu import ops
from shoal.kinds.recurrent import DeltaKind, Mamba2Kind, ShortConvKind
from shoal.model_config import AttentionKind, LayerKind, ModelConfig

DELTA = DeltaKind(4, 4, key_dim=16, value_dim=8, conv_width=4)
MAMBA = Mamba2Kind(8, 4, num_groups=1, state_size=16, conv_width=4, dtype="bfloat16")
CONV = ShortConvKind(48, conv_width=3)
BLOCK_BYTES = 4096
ATTENTION = AttentionKind(4, 2, 16, 0.25, None)
MODEL = ModelConfig(
    "llama", 100, 48, 96, 512, 1e-5, tuple(map(LayerKind, (DELTA, ATTENTION, MAMBA, None, CONV)))
)


@dataclasses.dataclass
class Options:
    tensor_parallel_size: int = 1
    dtype: str = "bfloat16"
    mamba_ssm_cache_dtype: str = "auto"
    block_size: int = 16
    speculative: SpeculativeConfig | None = None


def test_each_layer_has_a_view_of_its_own_part_of_a_row():
    rows = StateRows(plan_states(Options(), MODEL, BLOCK_BYTES), 3, ops, torch.device("cpu"))
    assert sorted(rows.layers) == [0, 2, 4] and rows.rows.shape == (4, rows.plan.row_bytes)
    delta, mamba, conv = (rows.layers[i] for i in (0, 2, 4))
    assert delta.conv_RCW.shape == (4, 2 * 64 + 32, 3) and delta.state_R.shape == (4, 4, 16, 8)
    assert mamba.conv_RCW.shape == (4, 32 + 2 * 16, 3) and mamba.state_R.shape == (4, 8, 4, 16)
    assert conv.conv_RCW.shape == (4, 48, 2) and conv.state_R is None
    assert (delta.state_R.dtype, mamba.state_R.dtype) == (torch.float32, torch.bfloat16)
    views = [delta.conv_RCW, delta.state_R, mamba.conv_RCW, mamba.state_R, conv.conv_RCW]
    for i, view in enumerate(views):
        assert view[0].is_contiguous() and view[0].data_ptr() % 16 == 0
        view.fill_(i + 1)
    assert all((view == i + 1).all() for i, view in enumerate(views))
    assert rows.plan.row_bytes == rows.plan.num_blocks * BLOCK_BYTES > BLOCK_BYTES


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_heads_and_channels(size):
    whole, part = (plan_states(Options(tensor_parallel_size=n), MODEL, BLOCK_BYTES).layers for n in (1, size))
    for i, (conv, state) in whole.items():
        shared = 2 * 16 if i == 2 else 0  # Mamba's only group, which each rank has a copy of
        assert part[i][0].shape == ((conv.shape[0] - shared) // size + shared, conv.shape[1])
        if state is not None:
            assert part[i][1].shape == (state.shape[0] // size, *state.shape[1:])


def test_the_dtype_of_states_can_be_chosen():
    for given in ("float32", "bfloat16"):
        layers = plan_states(Options(mamba_ssm_cache_dtype=given), MODEL, BLOCK_BYTES).layers.values()
        assert {state.dtype for _, state in layers if state is not None} == {getattr(torch, given)}
        assert {conv.dtype for conv, _ in layers} == {torch.bfloat16}


def test_a_copy_moves_rows_to_blocks_and_back():
    rows = StateRows(plan_states(Options(), MODEL, BLOCK_BYTES), 3, ops, torch.device("cpu"))
    size = rows.plan.num_blocks
    blocks = torch.zeros(20, BLOCK_BYTES // 2, dtype=torch.bfloat16)
    rows.rows.copy_(torch.arange(rows.rows.numel()).view_as(rows.rows) // 7 + torch.arange(4)[:, None])
    before = rows.rows.clone()
    taken = [[*range(i, 3 * size, 3)] for i in range(2)]
    copies = StateCopies(restores=[], saves=[(2, taken[0]), (0, taken[1])])
    packed, num_restores = pack_copies(copies)
    assert num_restores == 0 and len(packed) % 8 == 0
    rows.save(torch.from_numpy(packed), blocks)
    assert torch.equal(blocks.view(torch.uint8)[taken[0]].flatten(), before[2])
    rows.rows.zero_()
    copies = StateCopies(restores=[(1, taken[0]), (2, taken[1])], saves=[(3, taken[0])])
    packed, num_restores = pack_copies(copies)
    rows.restore(torch.from_numpy(packed[:num_restores]), blocks)
    assert torch.equal(rows.rows[1], before[2]) and torch.equal(rows.rows[2], before[0])
    assert not rows.rows[0].any() and not rows.rows[3].any()


def test_a_model_without_recurrent_layers_has_no_bytes():
    model = dataclasses.replace(MODEL, layers=(LayerKind(ATTENTION),))
    rows = StateRows(plan_states(Options(), model, BLOCK_BYTES), 3, ops, torch.device("cpu"))
    assert rows.plan.row_bytes == rows.rows.numel() == 0 and not rows.layers
