"""Triton kernels of recurrent layers against the reference, in the interpreter.

float32 sums are reordered, and chunks solve what the reference adds token by token: 5e-5 of values near 1."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels import triton_ops
from shoal.kernels.recurrent import delta, mamba, reference
from tests.recurrent_drafts import CHANNELS, draft_cases, follow_drafts, mixer_case
from tests.recurrent_steps import (
    MIXERS,
    STEPS,
    Heads,
    compare,
    compare_mixers,
    conv_inputs,
    delta_inputs,
    make_sequences,
    mamba_inputs,
)

CLOSE = dict(rtol=5e-5, atol=5e-5)
HALF = dict(rtol=2e-2, atol=2e-2)  # float16 numbers are rounded before matmuls, relative to results near 1
SMALL = Heads(1, 2, 8, 8)
CHUNKS = pytest.mark.parametrize("in_chunks", [False, True], ids=["by_token", "in_chunks"])
STEP = pytest.mark.parametrize("step", STEPS)
SHAPES = [Heads(1, 2, 16, 8), Heads(2, 2, 20, 37)]
HEADS = pytest.mark.parametrize("heads", SHAPES, ids=str)


@pytest.fixture(autouse=True)
def seed() -> None:
    print("seed", torch.manual_seed(1234).initial_seed())


@STEP
@pytest.mark.parametrize(("width", "bias"), [(4, True), (3, False)])
def test_convolutions_equal_the_reference(step: str, width: int, bias: bool) -> None:
    sequences, rows = make_sequences(step, spare_tokens=2)
    inputs = conv_inputs(sequences, rows, 133, width, bias, torch.float32)
    compare(triton_ops.causal_conv, reference.causal_conv, inputs, "inputs_RCW", **CLOSE)


@STEP
@pytest.mark.parametrize("heads", [*SHAPES, CHANNELS], ids=str)
@CHUNKS
def test_delta_rules_equal_the_reference(
    step: str, heads: Heads, in_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are for 16 bits; the interpreter's matmuls are exact, so float32 shows more."""
    monkeypatch.setattr(delta, "takes_chunks", lambda dtype: in_chunks)
    sequences, rows = make_sequences(step, spare_tokens=2)
    inputs = delta_inputs(sequences, rows, heads, torch.float32, torch.float32)
    compare(triton_ops.gated_delta, reference.gated_delta, inputs, "states_RHNV", **CLOSE)


def test_repeated_tokens_do_not_grow_the_inverse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are all equal, without decay: powers of the matrix that is inverted reach 1e18."""
    monkeypatch.setattr(delta, "takes_chunks", lambda dtype: True)
    sequences, rows = make_sequences("one prompt")
    inputs = delta_inputs(sequences, rows, Heads(1, 1, 16, 16), torch.float32, torch.float32)
    for name in ("q_TKN", "k_TKN"):
        inputs[name] = inputs[name][:1].expand_as(inputs[name]).contiguous()
    inputs["a_TH"] = torch.full_like(inputs["a_TH"], -30.0)
    inputs["b_TH"] = torch.full_like(inputs["b_TH"], 10.0)
    compare(triton_ops.gated_delta, reference.gated_delta, inputs, "states_RHNV", **CLOSE)


@STEP
@HEADS
@CHUNKS
def test_state_spaces_equal_the_reference(
    step: str, heads: Heads, in_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mamba, "takes_chunks", lambda dtype: in_chunks)
    sequences, rows = make_sequences(step, spare_tokens=2)
    inputs = mamba_inputs(sequences, rows, heads, torch.float32, torch.float32)
    compare(triton_ops.mamba2, reference.mamba2, inputs, "states_RHVN", **CLOSE)


@pytest.mark.parametrize(
    "step", ["decodes with padding and beginnings", "decodes in some places", "decodes beside prompts"]
)
@pytest.mark.parametrize("heads", [Heads(2, 2, 20, 37), Heads(1, 3, 8, 12)], ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
def test_mixers_equal_their_parts(step: str, heads: Heads, mixer: str) -> None:
    make_inputs, oracle = MIXERS[mixer]
    sequences, rows = make_sequences(step)
    inputs = make_inputs(sequences, rows, heads, torch.float32, torch.float32)
    compare_mixers(getattr(triton_ops, mixer), oracle, inputs, **CLOSE)


def test_half_precision_and_open_limits() -> None:
    sequences, rows = make_sequences("decodes beside prompts")
    inputs = delta_inputs(sequences, rows, Heads(1, 2, 16, 16), torch.float16, torch.float32)
    compare(triton_ops.gated_delta, reference.gated_delta, inputs, "states_RHNV", **HALF)
    inputs = mamba_inputs(sequences, rows, Heads(1, 2, 16, 16), torch.float16, torch.float32)
    inputs["limits"] = (0.0, float("inf"))
    compare(triton_ops.mamba2, reference.mamba2, inputs, "states_RHVN", **HALF)


@pytest.mark.parametrize(("gate_first", "activation"), [(False, "silu"), (True, "silu"), (False, "sigmoid")])
@pytest.mark.parametrize(("size", "weights"), [(12, 12), (12, 36), (36, 36)])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16], ids=str)
def test_gated_norms_equal_the_reference(
    size: int, weights: int, gate_first: bool, activation: str, weight_dtype: torch.dtype
) -> None:
    for dtype in (torch.float32, torch.float16):
        if weight_dtype not in (dtype, torch.float32):
            continue
        x, gate = torch.randn(97, 36).to(dtype), torch.randn(97, 40).to(dtype)[:, 3:39]
        weight = torch.randn(weights).to(weight_dtype)
        torch.testing.assert_close(
            triton_ops.gated_norm(x, gate, weight, 1e-6, size, gate_first, activation),
            reference.gated_norm(x, gate, weight, 1e-6, size, gate_first, activation),
            **(CLOSE if dtype == torch.float32 else dict(rtol=2e-3, atol=2e-3)),
        )


@pytest.mark.parametrize("op", ["causal_conv", "gated_delta", "mamba2"])
@CHUNKS
def test_rejected_drafts_leave_no_trace(op: str, in_chunks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (delta, mamba):
        monkeypatch.setattr(module, "takes_chunks", lambda dtype: in_chunks)
    state, make = draft_cases(torch.float32, torch.float32, SMALL)[op]
    follow_drafts(getattr(triton_ops, op), getattr(reference, op), make, state, 1, 6, **CLOSE)


def test_rejected_drafts_leave_no_trace_in_states_with_channel_gates() -> None:
    state, make = draft_cases(torch.float32, torch.float32, CHANNELS)["gated_delta"]
    follow_drafts(triton_ops.gated_delta, reference.gated_delta, make, state, 1, 6, **CLOSE)


def test_states_in_bfloat16_are_rounded_as_without_drafts() -> None:
    for op in ("gated_delta", "mamba2"):
        state, make = draft_cases(torch.float32, torch.bfloat16, SMALL)[op]
        function = getattr(triton_ops, op)
        follow_drafts(function, function, make, state, 5, 6, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("heads", [Heads(1, 2, 16, 8), Heads(2, 2, 12, 20)], ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
def test_rejected_drafts_leave_no_trace_in_mixers(mixer: str, heads: Heads) -> None:
    """Steps of decodes alone, which one kernel computes, and others."""
    with_rows, make = mixer_case(mixer, torch.float32, torch.float32, heads)
    ours, oracle = with_rows(getattr(triton_ops, mixer)), with_rows(MIXERS[mixer][1])
    follow_drafts(ours, oracle, make, "rows_RX", 3, 6, prompts=0.3, **CLOSE)
