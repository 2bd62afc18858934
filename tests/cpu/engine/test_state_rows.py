"""Rows of states: layers have parts of their own, one copy moves all of them, and ranks share them out."""

import dataclasses

import pytest
import torch

from shoal.engine.runner.state_rows import ALIGNMENT, StateRows, plan_states
from shoal.kernels.cpu import ops
from shoal.kinds.recurrent import DeltaKind, Mamba2Kind, ShortConvKind
from shoal.model_config import AttentionKind, LayerKind, ModelConfig

DELTA = DeltaKind(2, 4, key_dim=16, value_dim=8, conv_width=4)
MAMBA = Mamba2Kind(8, 4, num_groups=1, state_size=16, conv_width=4, dtype="bfloat16")
CONV = ShortConvKind(48, conv_width=3)
ATTENTION = AttentionKind(4, 2, 16, 0.25, None)
MODEL = ModelConfig(
    "llama", 100, 48, 96, 512, 1e-5, tuple(map(LayerKind, (DELTA, ATTENTION, MAMBA, None, CONV)))
)


@dataclasses.dataclass
class Options:
    tensor_parallel_size: int = 1
    dtype: str = "bfloat16"
    mamba_ssm_cache_dtype: str = "auto"


def test_each_layer_has_a_view_of_its_own_part_of_a_row():
    rows = StateRows(plan_states(Options(), MODEL), 3, ops, torch.device("cpu"))
    assert sorted(rows.layers) == [0, 2, 4] and rows.rows.shape == (4, rows.plan.row_bytes)
    delta, mamba, conv = (rows.layers[i] for i in (0, 2, 4))
    assert delta.conv_RCW.shape == (4, 2 * 32 + 32, 3) and delta.state_R.shape == (4, 4, 16, 8)
    assert mamba.conv_RCW.shape == (4, 32 + 2 * 16, 3) and mamba.state_R.shape == (4, 8, 4, 16)
    assert conv.conv_RCW.shape == (4, 48, 2) and conv.state_R is None
    assert (delta.state_R.dtype, mamba.state_R.dtype) == (torch.float32, torch.bfloat16)
    views = [delta.conv_RCW, delta.state_R, mamba.conv_RCW, mamba.state_R, conv.conv_RCW]
    for i, view in enumerate(views):
        assert view[0].is_contiguous() and view[0].data_ptr() % 16 == 0
        view.fill_(i + 1)
    assert all((view == i + 1).all() for i, view in enumerate(views))
    assert rows.plan.row_bytes % ALIGNMENT == 0


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_heads_and_channels(size):
    whole, part = (plan_states(Options(tensor_parallel_size=n), MODEL).layers for n in (1, size))
    for i, (conv, state) in whole.items():
        shared = 2 * 16 if i == 2 else 0  # Mamba's only group, which each rank has a copy of
        assert part[i][0].shape == ((conv.shape[0] - shared) // size + shared, conv.shape[1])
        if state is not None:
            assert part[i][1].shape == (state.shape[0] // size, *state.shape[1:])


def test_the_dtype_of_states_can_be_chosen():
    for given in ("float32", "bfloat16"):
        layers = plan_states(Options(mamba_ssm_cache_dtype=given), MODEL).layers.values()
        assert {state.dtype for _, state in layers if state is not None} == {getattr(torch, given)}
        assert {conv.dtype for conv, _ in layers} == {torch.bfloat16}


def test_a_copy_moves_a_row_to_a_slot_and_back():
    rows = StateRows(plan_states(Options(), MODEL), 3, ops, torch.device("cpu"))
    rows.allocate(2)
    rows.rows.copy_(torch.arange(4)[:, None])
    ints = [torch.tensor(values, dtype=torch.int32) for values in ([2, 0], [1, -1], [0, 1])]
    rows.save(ints[0], ints[1])
    assert rows.snapshots[:, 0].tolist() == [0, 2] and (rows.snapshots[1] == 2).all()
    rows.restore(ints[2], torch.tensor([-1, 0], dtype=torch.int32))
    assert rows.rows[:, -1].tolist() == [2, 1, 2, 3]


def test_a_model_without_recurrent_layers_has_no_bytes():
    model = dataclasses.replace(MODEL, layers=(LayerKind(ATTENTION),))
    rows = StateRows(plan_states(Options(), model), 3, ops, torch.device("cpu"))
    assert rows.plan.row_bytes == rows.rows.numel() == 0 and not rows.layers
