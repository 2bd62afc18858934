"""Random inputs of recurrent layers' kernels, and one call of each op with them, for tests on CPU and GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shoal.kernels.layer_cache import LayerState
from shoal.kernels.recurrent import reference
from shoal.kernels.recurrent.mixers import DeltaWeights, MambaWeights, delta_in_parts, mamba_in_parts
from shoal.kernels.recurrent.sequences import Sequences

DELTA_WIDTH, MAMBA_WIDTH = 4, 3


@dataclass(frozen=True)
class Heads:
    """K key heads or groups, H heads, N numbers of a key or of a state, V numbers of a value."""

    keys: int
    heads: int
    key_dim: int
    value_dim: int
    has_channel_gates: bool = False  # each number of a key forgets by itself


# (row, first position, tokens) of each sequence; the first `decodes` ones decode
STEPS = {
    "one decode": ([(2, 7, 1)], 1),
    "decodes with padding and beginnings": ([(3, 5, 1), (-1, -1, 1), (0, 0, 1), (1, 900, 1)], 4),
    "decodes in some places": ([(5, 11, 1), (2, 3, 1), (-1, -1, 0), (-1, -1, 0)], 4),
    "one prompt": ([(1, 0, 70)], 0),
    "prompts of all lengths": ([(4, 0, 1), (0, 64, 64), (2, 0, 65), (1, 3, 129), (3, 17, 2)], 0),
    "decodes beside prompts": ([(5, 11, 1), (0, 2, 1), (2, 0, 31), (4, 100, 40)], 2),
    "places without sequences": ([(5, 11, 1), (-1, -1, 0), (2, 0, 3), (-1, -1, 0), (-1, -1, 0)], 2),
}


def make_sequences(step: str, spare_tokens: int = 0, device: str = "cpu") -> tuple[Sequences, int]:
    """Returns a step's sequences, and how many rows their states need, with the spare one. `spare_tokens`
    belong to no sequence."""
    spans, decodes = STEPS[step]
    starts, positions = [0], []
    for _, first, tokens in spans:
        starts.append(starts[-1] + tokens)
        positions += [first + i if first >= 0 else -1 for i in range(tokens)]
    positions += [-1] * spare_tokens
    sequences = Sequences(
        *(
            torch.tensor(values, dtype=torch.int32, device=device)
            for values in ([row for row, _, _ in spans], starts, positions)
        ),
        num_decodes=decodes,
    )
    return sequences, max(row for row, _, _ in spans) + 2


def rows_of_states(rows: int, *shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Returns one layer's states, which are a part of each row, as in the memory of all layers."""
    return torch.randn(rows, 3, *shape, device=device).to(dtype)[:, 1]


def conv_inputs(
    sequences: Sequences, rows: int, channels: int, width: int, bias: bool, dtype: torch.dtype
) -> dict[str, Any]:
    device = str(sequences.rows_S.device)
    tokens = len(sequences.positions_T)
    return dict(
        x_TC=torch.randn(tokens, channels + 5, device=device).to(dtype)[:, :channels],
        weight_CW=torch.randn(channels, width, device=device).to(dtype),
        bias_C=torch.randn(channels, device=device).to(dtype) if bias else None,
        silu=bias,
        inputs_RCW=rows_of_states(rows, channels, width - 1, dtype=dtype, device=device),
        sequences=sequences,
    )


def delta_inputs(
    sequences: Sequences, rows: int, heads: Heads, dtype: torch.dtype, state_dtype: torch.dtype
) -> dict[str, Any]:
    device = str(sequences.rows_S.device)
    tokens, keys = len(sequences.positions_T), heads.keys * heads.key_dim
    mixed = torch.randn(tokens, 2 * keys + heads.heads * heads.value_dim, device=device).to(dtype)
    q, k, v = mixed.split((keys, keys, heads.heads * heads.value_dim), dim=1)
    b_TH, a_TH = torch.randn(tokens, 2 * heads.heads, device=device).to(dtype).chunk(2, dim=1)
    dt_bias = torch.randn(heads.heads, device=device)
    if heads.has_channel_gates:
        a_TH = torch.randn(tokens, heads.heads, heads.key_dim, device=device).to(dtype)
        dt_bias = torch.randn(heads.heads, heads.key_dim, device=device)
    return dict(
        q_TKN=q.unflatten(1, (heads.keys, -1)),
        k_TKN=k.unflatten(1, (heads.keys, -1)),
        v_THV=v.unflatten(1, (heads.heads, -1)),
        a_TH=a_TH,
        b_TH=b_TH,
        a_log_H=torch.rand(heads.heads, device=device) * 2 - 2,
        dt_bias_H=dt_bias,
        states_RHNV=rows_of_states(
            rows, heads.heads, heads.key_dim, heads.value_dim, dtype=state_dtype, device=device
        ),
        sequences=sequences,
    )


def mamba_inputs(
    sequences: Sequences, rows: int, heads: Heads, dtype: torch.dtype, state_dtype: torch.dtype
) -> dict[str, Any]:
    device = str(sequences.rows_S.device)
    tokens, inner, shared = (
        len(sequences.positions_T),
        heads.heads * heads.value_dim,
        heads.keys * heads.key_dim,
    )
    mixed = torch.randn(tokens, inner + 2 * shared, device=device).to(dtype)
    x, b, c = mixed.split((inner, shared, shared), dim=1)
    return dict(
        x_THV=x.unflatten(1, (heads.heads, -1)),
        dt_TH=torch.randn(tokens, heads.heads + 3, device=device).to(dtype)[:, 3:],
        b_TGN=b.unflatten(1, (heads.keys, -1)),
        c_TGN=c.unflatten(1, (heads.keys, -1)) / heads.key_dim**0.5,
        a_log_H=torch.rand(heads.heads, device=device) * 2 - 2,
        d_H=torch.randn(heads.heads, device=device),
        dt_bias_H=torch.randn(heads.heads, device=device) - 1,
        limits=(0.01, 2.0),
        states_RHVN=rows_of_states(
            rows, heads.heads, heads.value_dim, heads.key_dim, dtype=state_dtype, device=device
        ),
        sequences=sequences,
    )


def compare(ours: Any, oracle: Any, inputs: dict[str, Any], state: str, **tolerance: float) -> None:
    """Calls both with the inputs, and compares their outputs and what they leave in the rows `state`, but in
    the spare row, which nobody reads."""
    sequences = inputs["sequences"]
    theirs = {**inputs, state: inputs[state].clone()}
    # A copy that is a part of its rows too.
    memory = torch.stack([inputs[state]] * 3, dim=1)
    mine = {**inputs, state: memory[:, 1]}
    want, got = oracle(**theirs), ours(**mine)
    used = int(sequences.starts_S[-1])
    real_T = sequences.positions_T[:used] >= 0
    torch.testing.assert_close(got[:used][real_T], want[:used][real_T], **tolerance)
    torch.testing.assert_close(mine[state][:-1], theirs[state][:-1], **tolerance)
    assert torch.equal(memory[:, 0], inputs[state]) and torch.equal(memory[:, 2], inputs[state])


def conv_and_gate(
    sequences: Sequences, rows: int, heads: Heads, width: int, has_bias: bool, dtype: torch.dtype
) -> tuple[dict[str, Any], torch.Tensor]:
    """Returns a mixer's inputs of its convolution, and its gates z, whose rows are not contiguous."""
    inner = heads.heads * heads.value_dim
    conv = conv_inputs(sequences, rows, 2 * heads.keys * heads.key_dim + inner, width, has_bias, dtype)
    x_TC = conv["x_TC"]
    return conv, torch.randn(len(x_TC), inner + 3, device=x_TC.device).to(dtype)[:, 3:]


def delta_mixer_inputs(
    sequences: Sequences, rows: int, heads: Heads, dtype: torch.dtype, state_dtype: torch.dtype
) -> dict[str, Any]:
    inputs = delta_inputs(sequences, rows, heads, dtype, state_dtype)
    conv, z_TX = conv_and_gate(sequences, rows, heads, DELTA_WIDTH, False, dtype)
    return dict(
        qkv_TC=conv["x_TC"],
        z_TX=z_TX,
        a_TH=inputs["a_TH"],
        b_TH=inputs["b_TH"],
        weights=DeltaWeights(
            conv["weight_CW"],
            inputs["a_log_H"],
            inputs["dt_bias_H"],
            torch.randn(heads.value_dim, device=z_TX.device),
            1e-6,
        ),
        memory=LayerState(conv["inputs_RCW"], inputs["states_RHNV"]),
        sequences=sequences,
    )


def mamba_mixer_inputs(
    sequences: Sequences, rows: int, heads: Heads, dtype: torch.dtype, state_dtype: torch.dtype
) -> dict[str, Any]:
    inputs = mamba_inputs(sequences, rows, heads, dtype, state_dtype)
    conv, z_TX = conv_and_gate(sequences, rows, heads, MAMBA_WIDTH, True, dtype)
    return dict(
        xbc_TC=conv["x_TC"],
        z_TX=z_TX,
        dt_TH=inputs["dt_TH"],
        weights=MambaWeights(
            conv["weight_CW"],
            conv["bias_C"],
            inputs["a_log_H"],
            inputs["d_H"],
            inputs["dt_bias_H"],
            inputs["limits"],
            torch.randn(z_TX.shape[1], device=z_TX.device).to(dtype),
            1e-6,
        ),
        memory=LayerState(conv["inputs_RCW"], inputs["states_RHVN"]),
        sequences=sequences,
    )


MIXERS = {
    "delta_mixer": (
        delta_mixer_inputs,
        partial(delta_in_parts, (reference.causal_conv, reference.gated_delta, reference.gated_norm)),
    ),
    "mamba_mixer": (
        mamba_mixer_inputs,
        partial(mamba_in_parts, (reference.causal_conv, reference.mamba2, reference.gated_norm)),
    ),
}


def compare_mixers(ours: Any, oracle: Any, inputs: dict[str, Any], **tolerance: float) -> None:
    """As `compare`, for both states of a layer."""
    sequences, memory = inputs["sequences"], inputs["memory"]
    assert memory.state_R is not None
    theirs = LayerState(memory.conv_RCW.clone(), memory.state_R.clone())
    want = oracle(**{**inputs, "memory": theirs})
    for _ in range(2):  # the first call leaves the counters as the second one needs them
        mine = LayerState(memory.conv_RCW.clone(), memory.state_R.clone())
        got = ours(**{**inputs, "memory": mine})
        used = int(sequences.starts_S[-1])
        real_T = sequences.positions_T[:used] >= 0
        torch.testing.assert_close(got[:used][real_T], want[:used][real_T], **tolerance)
        for got_state, want_state in ((mine.conv_RCW, theirs.conv_RCW), (mine.state_R, theirs.state_R)):
            assert got_state is not None and want_state is not None
            torch.testing.assert_close(got_state[:-1], want_state[:-1], **tolerance)
