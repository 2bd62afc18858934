"""Hopper's matmuls of experts with many rows: run as numbers (gluon_numbers.py) against the loop over experts, with
its tiles from Triton's interpreter, and compiled for sm_90 without spills. tests/gpu/test_tile_matmul_gpu.py runs
them on a GPU."""

from __future__ import annotations

import itertools
import types
from functools import partial

import pytest
import torch
from gluon_numbers import Descriptor, Machine, Value, load
from triton_compile import check_kernels

from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.dispatch import GPU, ExpertFormat, choose_expert_tiles
from shoal.kernels.matmul.hopper_experts import hopper_experts_matmul
from shoal.kernels.matmul.tile_matmul import LISTED, RowMap
from shoal.kernels.moe import moe, reference
from shoal.kinds.experts import Activation

BF16, FP16 = torch.bfloat16, torch.float16
HOPPER = GPU(hopper=True)
CAPABILITIES = (90,)
ACTIVATIONS = ("silu", "gelu_tanh", "relu2")


def gate_mul(gate: Value, up: Value, activation: str, dtype: torch.dtype) -> Value:
    both = torch.cat((gate.data, up.data), -1).to(dtype).float()
    return Value(reference.activate(both, Activation(activation)).to(dtype))


def matmul_as_numbers(sms: int, turns: tuple[int, ...]):
    names = dict(
        dispatch=types.SimpleNamespace(gpu_of=lambda _: GPU(sms)),
        descriptor=lambda matrix, rows, columns: Descriptor(
            matrix, [*matrix.shape], [*matrix.stride()], [rows, columns], None
        ),
        gate_mul=gate_mul,
    )
    return load(Machine(turns), "hopper_experts", names).hopper_experts_matmul


def listed(counts: list[int], top_k: int) -> tuple[RowMap, torch.Tensor]:
    """The list of slots of which each expert has as many as `counts` say, and the slots' experts."""
    experts = torch.cat([torch.full((count,), i) for i, count in enumerate(counts)]).int()
    experts = experts[torch.randperm(len(experts))]
    ranks, seen = torch.empty_like(experts), [0] * len(counts)
    for slot, expert in enumerate(experts.tolist()):
        ranks[slot], seen[expert] = seen[expert], seen[expert] + 1
    return moe._arranged(experts, ranks, torch.tensor(counts).int(), 128, top_k), experts


@pytest.mark.parametrize("turns", [*itertools.permutations(range(3))])
@pytest.mark.parametrize(
    ("activation", "top_k", "hidden", "size", "sms"),
    [("silu", 2, 128, 136, 3), ("gelu_tanh", 3, 320, 72, 2), ("relu2", 2, 64, 264, 132)],
)
def test_experts_as_numbers(
    activation: str, top_k: int, hidden: int, size: int, sms: int, turns: tuple[int, ...]
) -> None:
    print("seed", torch.manual_seed(33).initial_seed())
    counts = [0, 70, 300, 128, 1, 0, 64, 193]
    rows, experts = listed(counts, top_k)
    assert int(rows.map[-1]) == sum(-(-count // 128) for count in counts)
    x = torch.randn(len(experts) // top_k, hidden).to(BF16)
    kind = Activation(activation)
    w13 = (torch.randn(len(counts), size * (1 + kind.has_gate), hidden) / hidden**0.5).to(BF16)
    w2 = (torch.randn(len(counts), hidden, size) / size**0.5).to(BF16)
    matmul = matmul_as_numbers(sms, turns)
    hidden_states = torch.full((len(experts), size), float("nan"), dtype=BF16)
    matmul(x, w13, hidden_states, rows, kind)
    slots_out = torch.full((len(experts), hidden), float("nan"), dtype=BF16)
    matmul(hidden_states, w2, slots_out, rows)
    for slot, expert in enumerate(experts.tolist()):
        at = int((rows.slots == slot).nonzero())
        gate_up = (w13[expert].float() @ x[slot // top_k].float()).to(BF16).float()
        want = reference.activate(gate_up, kind)
        torch.testing.assert_close(hidden_states[at].float(), want, atol=4e-2, rtol=2e-2)
        want = w2[expert].float() @ hidden_states[at].float()
        torch.testing.assert_close(slots_out[slot].float(), want, atol=2e-2, rtol=1e-2)


PLAIN = (ExpertFormat(), ExpertFormat())


def _chosen(rows=512, sizes=(2048, 768), formats=PLAIN, dtype=BF16, gpu=HOPPER, **options):
    return choose_expert_tiles(rows * 128, 128, sizes, formats, dtype, gpu, **options)


def test_many_rows_of_plain_experts_go_to_hopper() -> None:
    assert _chosen().hopper and _chosen().gate_up.rows == 128
    for activation in ACTIVATIONS:
        assert _chosen(activation=activation, dtype=FP16).hopper
    assert _chosen(sizes=(2816, 704)).hopper


@pytest.mark.parametrize(
    "options",
    [
        dict(rows=dispatch.Limits().expert_rows - 1),
        dict(sizes=(2000, 768)),
        dict(sizes=(2048, 100)),
        dict(formats=(ExpertFormat(4, 128), ExpertFormat())),
        dict(formats=(ExpertFormat(), ExpertFormat(8, 128, True))),
        dict(dtype=torch.float32),
        dict(gpu=GPU()),
        dict(activation="clamped_swiglu"),
        dict(biases=True),
    ],
    ids=str,
)
def test_other_experts_stay_with_triton(options: dict) -> None:
    assert not _chosen(**options).hopper


def _launch(first: bool, activation: str, hidden: int, size: int, dtype: torch.dtype) -> None:
    kind, num, top_k = Activation(activation), 4, 2
    with torch.device("meta"):
        numbers = torch.empty(1, dtype=torch.int32)
        rows = RowMap(LISTED, numbers, 8, top_k, num, numbers)
        x, states = torch.empty(64, hidden, dtype=dtype), torch.empty(64 * top_k, size, dtype=dtype)
        out = torch.empty(64 * top_k, hidden, dtype=dtype)
        if first:
            weight = torch.empty(num, size * (1 + kind.has_gate), hidden, dtype=dtype)
            hopper_experts_matmul(x, weight, states, rows, kind)
        else:
            hopper_experts_matmul(states, torch.empty(num, hidden, size, dtype=dtype), out, rows)


LAUNCHES = {
    f"{'first' if first else 'second'}, {activation}, {hidden} x {size} {dtype}": partial(
        _launch, first, activation, hidden, size, dtype
    )
    for first, activation, hidden, size, dtype in (
        (True, "silu", 2048, 768, BF16),
        (True, "gelu_tanh", 2816, 704, BF16),
        (True, "relu2", 1024, 776, FP16),
        (False, "silu", 2048, 768, BF16),
        (False, "silu", 1032, 776, FP16),
    )
}


@pytest.mark.parametrize("case", LAUNCHES)
@pytest.mark.slow
def test_compiles_for_hopper_without_spills(compiled, case: str) -> None:
    check_kernels(compiled[case])
