"""The reference of recurrent layers against transformers, and the C kernels against the reference.

The reference computes float32 sums token by token. transformers sums in another order, and in chunks: 2e-5 of
values near 1. C sums only reorder: 2e-5 too, as states add up hundreds of tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import GraniteMoeHybridConfig, Lfm2Config
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from shoal.kernels.cpu import build as cpu_build
from shoal.kernels.cpu import ops as cpu_ops
from shoal.kernels.recurrent import reference
from tests.recurrent_drafts import CHANNELS, draft_cases, follow_drafts
from tests.recurrent_steps import (
    STEPS,
    Heads,
    compare,
    conv_inputs,
    delta_inputs,
    make_sequences,
    mamba_inputs,
    rows_of_states,
)

CLOSE = dict(rtol=2e-5, atol=2e-5)
STEP = pytest.mark.parametrize("step", STEPS)
SHAPES = [Heads(2, 4, 16, 8), Heads(3, 3, 20, 37)]
HEADS = pytest.mark.parametrize("heads", SHAPES, ids=str)
NEEDS_C = pytest.mark.skipif(cpu_build.load() is None, reason="needs a C compiler")
STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def seed() -> None:
    print("seed", torch.manual_seed(1234).initial_seed())


@STEP
@pytest.mark.parametrize("heads", [*SHAPES, CHANNELS], ids=str)
def test_the_delta_rule_is_the_one_of_transformers(step: str, heads: Heads) -> None:
    sequences, rows = make_sequences(step)
    inputs = delta_inputs(sequences, rows, heads, torch.float32, torch.float32)
    before = inputs["states_RHNV"].clone()
    out_THV = reference.gated_delta(**inputs)
    rate_H, functions = (
        -inputs["a_log_H"].exp(),
        (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule),
    )
    if heads.has_channel_gates:
        rate_H, functions = rate_H[:, None], (chunk_kimi_delta_attention, recurrent_kimi_delta_attention)
    g_TH = rate_H * F.softplus(inputs["a_TH"] + inputs["dt_bias_H"])
    tokens = (inputs["q_TKN"], inputs["k_TKN"], inputs["v_THV"], g_TH, inputs["b_TH"].sigmoid())
    shared = heads.heads // heads.keys
    starts = sequences.starts_S.tolist()
    for row, first, last in zip(sequences.rows_S.tolist(), starts, starts[1:]):
        if row < 0 or first == last:
            continue
        q, k, v, g, beta = (x[None, first:last] for x in tokens)
        state = None if sequences.positions_T[first] == 0 else before[None, row]
        for function in functions:
            want, last_state = function(
                q.repeat_interleave(shared, 2),
                k.repeat_interleave(shared, 2),
                v,
                g,
                beta,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            torch.testing.assert_close(out_THV[first:last], want[0], **CLOSE)
            torch.testing.assert_close(inputs["states_RHNV"][row], last_state[0], **CLOSE)


@STEP
@pytest.mark.parametrize(("width", "bias"), [(4, True), (3, False), (7, True)])
def test_the_convolution_continues_from_its_last_inputs(step: str, width: int, bias: bool) -> None:
    sequences, rows = make_sequences(step)
    inputs = conv_inputs(sequences, rows, 13, width, bias, torch.float32)
    before, x_TC = inputs["inputs_RCW"].clone(), inputs["x_TC"]
    out_TC = reference.causal_conv(**inputs)
    starts = sequences.starts_S.tolist()
    for row, first, last in zip(sequences.rows_S.tolist(), starts, starts[1:]):
        if row < 0 or first == last:
            continue
        old = before[row] * bool(sequences.positions_T[first] > 0)
        padded = torch.cat((old, x_TC[first:last].T), dim=1)
        want = F.conv1d(padded[None], inputs["weight_CW"][:, None], inputs["bias_C"], groups=13)[0].T
        torch.testing.assert_close(out_TC[first:last], F.silu(want) if bias else want, **CLOSE)
        assert torch.equal(inputs["inputs_RCW"][row], padded[:, -(width - 1) :])


def test_short_convolutions_are_the_ones_of_transformers() -> None:
    config = Lfm2Config(hidden_size=16, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=3)
    layer = Lfm2ShortConv(config, 0)
    hidden = torch.randn(1, 9, 16)
    with torch.no_grad():
        want = layer(hidden)[0]
        b, c, x = layer.in_proj(hidden)[0].chunk(3, dim=-1)
        spans = [("a", 0, 5), ("b", 5, 9)]
        inputs_RCW, outs = torch.randn(2, 16, 2), []
        for _, first, last in spans:
            sequences = reference.Sequences(
                torch.tensor([0], dtype=torch.int32),
                torch.tensor([0, last - first], dtype=torch.int32),
                torch.arange(first, last, dtype=torch.int32),
                0,
            )
            outs.append(
                reference.causal_conv(
                    (b * x)[first:last], layer.conv.weight[:, 0], None, False, inputs_RCW, sequences
                )
            )
        torch.testing.assert_close(layer.out_proj(c * torch.cat(outs)), want, **CLOSE)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("lengths", [[300], [1, 1, 1], [130, 1, 1, 63]], ids=str)
def test_mamba2_and_its_norm_are_the_ones_of_transformers(groups: int, lengths: list[int]) -> None:
    """A prompt in chunks of these lengths is the same as in one."""
    heads, head_dim, size = 4, 8, 16
    config = GraniteMoeHybridConfig(
        hidden_size=heads * head_dim,
        num_hidden_layers=1,
        layer_types=["mamba"],
        mamba_n_heads=heads,
        mamba_d_head=head_dim,
        mamba_d_state=size,
        mamba_n_groups=groups,
        mamba_expand=1,
        mamba_d_conv=4,
    )
    layer = GraniteMoeHybridMambaLayer(config, 0)
    inner = heads * head_dim
    with torch.no_grad():
        for parameter in (layer.dt_bias, layer.D, layer.norm.weight, layer.conv1d.bias):
            parameter.copy_(torch.randn(parameter.shape))
        hidden = torch.randn(1, sum(lengths), inner)
        want = layer(hidden)[0]
        z, xbc, dt = layer.in_proj(hidden)[0].split((inner, layer.conv_dim, heads), dim=-1)
        conv_RCW, states, outs, done = (
            torch.randn(2, layer.conv_dim, 3),
            torch.randn(2, heads, head_dim, size),
            [],
            0,
        )
        for length in lengths:
            own = slice(done, done + length)
            sequences = reference.Sequences(
                torch.tensor([0], dtype=torch.int32),
                torch.tensor([0, length], dtype=torch.int32),
                torch.arange(done, done + length, dtype=torch.int32),
                0,
            )
            mixed = reference.causal_conv(
                xbc[own], layer.conv1d.weight[:, 0], layer.conv1d.bias, True, conv_RCW, sequences
            )
            x, b, c = mixed.split((inner, groups * size, groups * size), dim=1)
            out = reference.mamba2(
                x.unflatten(1, (heads, -1)),
                dt[own],
                b.unflatten(1, (groups, -1)),
                c.unflatten(1, (groups, -1)),
                layer.A_log,
                layer.D,
                layer.dt_bias,
                (0.0, float("inf")),
                states,
                sequences,
            )
            outs.append(
                reference.gated_norm(
                    out.flatten(1), z[own], layer.norm.weight, 1e-6, inner // groups, gate_first=True
                )
            )
            done += length
        torch.testing.assert_close(layer.out_proj(torch.cat(outs)), want, **CLOSE)


def test_the_norm_before_a_gate_is_the_one_of_transformers() -> None:
    norm = Qwen3NextRMSNormGated(12, eps=1e-6)
    x, gate = torch.randn(7, 36), torch.randn(7, 36)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(12))
        want = norm(x.view(-1, 12), gate.view(-1, 12)).view(7, 36)
        got = reference.gated_norm(x, gate, norm.weight, 1e-6, 12, gate_first=False)
    torch.testing.assert_close(got, want, **CLOSE)


@NEEDS_C
@STEP
@pytest.mark.parametrize("heads", [*SHAPES, CHANNELS], ids=str)
@STATES
def test_the_c_delta_rule_is_the_references(step: str, heads: Heads, state_dtype: torch.dtype) -> None:
    sequences, rows = make_sequences(step, spare_tokens=2)
    inputs = delta_inputs(sequences, rows, heads, torch.float32, state_dtype)
    tolerance = CLOSE if state_dtype == torch.float32 else dict(rtol=2**-7, atol=1e-4)
    compare(cpu_ops.gated_delta, reference.gated_delta, inputs, "states_RHNV", **tolerance)


@NEEDS_C
@STEP
@HEADS
@STATES
def test_the_c_state_space_is_the_references(step: str, heads: Heads, state_dtype: torch.dtype) -> None:
    sequences, rows = make_sequences(step, spare_tokens=2)
    inputs = mamba_inputs(sequences, rows, heads, torch.float32, state_dtype)
    tolerance = CLOSE if state_dtype == torch.float32 else dict(rtol=2**-7, atol=1e-4)
    compare(cpu_ops.mamba2, reference.mamba2, inputs, "states_RHVN", **tolerance)


@NEEDS_C
@STEP
@pytest.mark.parametrize(("width", "bias"), [(4, True), (3, False), (7, True), (2, False)])
def test_the_c_convolution_is_the_references(step: str, width: int, bias: bool) -> None:
    sequences, rows = make_sequences(step, spare_tokens=2)
    inputs = conv_inputs(sequences, rows, 77, width, bias, torch.float32)
    compare(cpu_ops.causal_conv, reference.causal_conv, inputs, "inputs_RCW", **CLOSE)


@NEEDS_C
@pytest.mark.parametrize(("gate_first", "activation"), [(False, "silu"), (True, "silu"), (False, "sigmoid")])
@pytest.mark.parametrize(("size", "weights"), [(12, 12), (12, 36), (36, 36)])
def test_the_c_gated_norm_is_the_references(
    size: int, weights: int, gate_first: bool, activation: str
) -> None:
    x, gate, weight = torch.randn(7, 36), torch.randn(7, 40)[:, 3:39], torch.randn(weights)
    torch.testing.assert_close(
        cpu_ops.gated_norm(x, gate, weight, 1e-6, size, gate_first, activation),
        reference.gated_norm(x, gate, weight, 1e-6, size, gate_first, activation),
        **CLOSE,
    )


def test_float16_layers_take_the_reference_on_a_cpu() -> None:
    sequences, rows = make_sequences("decodes beside prompts")
    inputs = delta_inputs(sequences, rows, Heads(1, 2, 8, 8), torch.float16, torch.float32)
    compare(cpu_ops.gated_delta, reference.gated_delta, inputs, "states_RHNV", rtol=0, atol=0)
    states = rows_of_states(2, 4, 2, dtype=torch.float16)
    assert states.shape == (2, 4, 2) and not states.is_contiguous()


@pytest.mark.parametrize("op", ["causal_conv", "gated_delta", "mamba2"])
@pytest.mark.parametrize("seed", range(6))
@STATES
def test_rejected_drafts_leave_no_trace_in_the_reference(
    op: str, seed: int, state_dtype: torch.dtype
) -> None:
    state, make = draft_cases(torch.float32, state_dtype)[op]
    function = getattr(reference, op)
    tolerance = CLOSE if state_dtype == torch.float32 else dict(rtol=2**-6, atol=1e-2)
    follow_drafts(function, function, make, state, seed, **tolerance)


@NEEDS_C
@pytest.mark.parametrize("op", ["causal_conv", "gated_delta", "mamba2"])
@pytest.mark.parametrize("seed", range(6))
@STATES
def test_rejected_drafts_leave_no_trace_in_c(op: str, seed: int, state_dtype: torch.dtype) -> None:
    """Not one bit: a sequence with drafts computes the same sums."""
    state, make = draft_cases(torch.float32, state_dtype)[op]
    function = getattr(cpu_ops, op)
    follow_drafts(function, function, make, state, seed, rtol=0, atol=0)


@NEEDS_C
@pytest.mark.parametrize("seed", range(3))
def test_rejected_drafts_leave_no_trace_in_states_with_channel_gates(seed: int) -> None:
    state, make = draft_cases(torch.float32, torch.float32, CHANNELS)["gated_delta"]
    follow_drafts(cpu_ops.gated_delta, cpu_ops.gated_delta, make, state, seed, rtol=0, atol=0)
    follow_drafts(cpu_ops.gated_delta, reference.gated_delta, make, state, seed, **CLOSE)
