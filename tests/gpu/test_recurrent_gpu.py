"""The kernels of recurrent layers on a GPU, at published sizes, against the reference, and in a graph.

bf16: keys, scores and states are rounded to 8 bits before matmuls, relative to results near 1: 4e-2. float32:
sums are reordered over thousands of tokens: 1e-3."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.kernels import triton_ops
from shoal.kernels.recurrent import reference
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

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS["long prompts"] = ([(0, 0, 1500), (1, 640, 700)], 0)
STEPS["many decodes"] = ([(200 - i, i, 1) for i in range(200)], 200)
TOLERANCES = {torch.bfloat16: 4e-2, torch.float32: 1e-3}
STEP = pytest.mark.parametrize("step", STEPS)
DTYPE = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
DELTA = Heads(16, 32, 128, 128)  # Qwen3.5-9B
KIMI = Heads(32, 32, 128, 128, has_channel_gates=True)  # Kimi-Linear-48B-A3B
MAMBA = {"granite": Heads(1, 48, 128, 64), "nemotron": Heads(8, 64, 128, 64)}


@pytest.fixture(autouse=True)
def seed() -> None:
    print("seed", torch.manual_seed(1234).initial_seed())


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return dict(rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@STEP
@DTYPE
@pytest.mark.parametrize("heads", [DELTA, KIMI], ids=str)
def test_delta_rules_equal_the_reference(step: str, dtype: torch.dtype, heads: Heads) -> None:
    sequences, rows = make_sequences(step, spare_tokens=3, device="cuda")
    for state_dtype in (torch.float32, torch.bfloat16):
        inputs = delta_inputs(sequences, rows, heads, dtype, state_dtype)
        allowed = tolerance(dtype if state_dtype == torch.float32 else state_dtype)
        compare(triton_ops.gated_delta, reference.gated_delta, inputs, "states_RHNV", **allowed)


@STEP
@DTYPE
@pytest.mark.parametrize("model", MAMBA)
def test_state_spaces_equal_the_reference(step: str, model: str, dtype: torch.dtype) -> None:
    sequences, rows = make_sequences(step, spare_tokens=3, device="cuda")
    inputs = mamba_inputs(sequences, rows, MAMBA[model], dtype, torch.float32)
    compare(triton_ops.mamba2, reference.mamba2, inputs, "states_RHVN", **tolerance(dtype))


@pytest.mark.parametrize(
    "step", ["decodes with padding and beginnings", "decodes in some places", "many decodes"]
)
@DTYPE
@pytest.mark.parametrize(
    ("mixer", "heads"),
    [
        ("delta_mixer", DELTA),
        ("delta_mixer", Heads(16, 48, 128, 128)),
        *(("mamba_mixer", x) for x in MAMBA.values()),
    ],
    ids=str,
)
def test_mixers_equal_their_parts(step: str, mixer: str, heads: Heads, dtype: torch.dtype) -> None:
    make_inputs, oracle = MIXERS[mixer]
    sequences, rows = make_sequences(step, device="cuda")
    for state_dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(sequences, rows, heads, dtype, state_dtype)
        allowed = tolerance(dtype if state_dtype == torch.float32 else state_dtype)
        compare_mixers(getattr(triton_ops, mixer), oracle, inputs, **allowed)


@STEP
@DTYPE
@pytest.mark.parametrize(("width", "bias"), [(4, True), (3, False)])
def test_convolutions_equal_the_reference(step: str, width: int, bias: bool, dtype: torch.dtype) -> None:
    sequences, rows = make_sequences(step, spare_tokens=3, device="cuda")
    inputs = conv_inputs(sequences, rows, 8192, width, bias, dtype)
    compare(triton_ops.causal_conv, reference.causal_conv, inputs, "inputs_RCW", **tolerance(dtype))


@DTYPE
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("size", "width"), [(128, 4096), (512, 4096), (8192, 8192)])
def test_gated_norms_equal_the_reference(size: int, width: int, gate_first: bool, dtype: torch.dtype) -> None:
    x, gate = (torch.randn(97, width, device="cuda").to(dtype) for _ in range(2))
    weight = torch.randn(size, device="cuda")
    torch.testing.assert_close(
        triton_ops.gated_norm(x, gate, weight, 1e-6, size, gate_first),
        reference.gated_norm(x, gate, weight, 1e-6, size, gate_first),
        **tolerance(dtype),
    )


@pytest.mark.parametrize("op", ["gated_delta", "mamba2", "causal_conv"])
def test_a_captured_step_follows_its_lengths(op: str) -> None:
    """A graph of one step serves another with other lengths, rows and positions, as all sizes are bounds."""
    sequences, _ = make_sequences("decodes beside prompts", spare_tokens=4, device="cuda")
    other, _ = make_sequences("places without sequences", spare_tokens=0, device="cuda")
    inputs: dict[str, Any] = (
        delta_inputs(sequences, 7, DELTA, torch.bfloat16, torch.float32)
        if op == "gated_delta"
        else mamba_inputs(sequences, 7, MAMBA["nemotron"], torch.bfloat16, torch.float32)
        if op == "mamba2"
        else conv_inputs(sequences, 7, 8192, 4, True, torch.bfloat16)
    )
    [state] = [name for name in inputs if name.startswith(("states", "inputs"))]
    function = getattr(triton_ops, op)
    function(**{**inputs, state: inputs[state].clone()})
    torch.cuda.synchronize()
    captured = {**inputs, state: torch.stack([inputs[state]] * 3, dim=1)[:, 1]}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(**captured)
    captured[state].copy_(inputs[state])
    places = len(sequences.rows_S)
    sequences.rows_S.copy_(other.rows_S[:places])
    sequences.starts_S.copy_(other.starts_S[: places + 1])
    sequences.positions_T.fill_(-1)
    sequences.positions_T[: len(other.positions_T)] = other.positions_T
    want_state = inputs[state].clone()
    want = getattr(reference, op)(**{**inputs, state: want_state})
    graph.replay()
    used = int(other.starts_S[-1])
    torch.testing.assert_close(out[:used], want[:used], **tolerance(torch.bfloat16))
    torch.testing.assert_close(captured[state][:-1], want_state[:-1], **tolerance(torch.bfloat16))
