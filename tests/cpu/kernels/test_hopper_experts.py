"""Hopper's matmuls of experts in Gluon: run as numbers (gluon_numbers.py) against the loop over experts, with
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
from shoal.kernels.matmul.dispatch import GPU, ExpertFormat, ExpertKernel, choose_expert_tiles, derived_limits
from shoal.kernels.matmul.hopper_experts import hopper_experts_matmul
from shoal.kernels.matmul.tile_matmul import LISTED, RowMap, weight_shape
from shoal.kernels.moe import moe, reference
from shoal.kinds.experts import Activation

BF16, FP16 = torch.bfloat16, torch.float16
HOPPER = GPU(hopper=True)
CAPABILITIES = (90,)
CLAMPED = Activation("clamped_swiglu", 1.702, 1.5)


def gate_mul(
    gate: Value, up: Value, activation: str, dtype: torch.dtype, alpha: float, limit: float
) -> Value:
    both = torch.cat((gate.data, up.data), -1).to(dtype).float()
    return Value(reference.activate(both, Activation(activation, alpha, limit)).to(dtype))


def squared_relu(x: Value) -> Value:
    return Value((x.data.float().relu() ** 2).to(x.data.dtype))


def matmul_as_numbers(sms: int, turns: tuple[int, ...]):
    """Returns hopper_experts.py's matmul."""
    names = dict(
        dispatch=types.SimpleNamespace(gpu_of=lambda _: GPU(sms), SHARED_BYTES=dispatch.SHARED_BYTES),
        descriptor=lambda matrix, rows, columns: Descriptor(
            matrix, [*matrix.shape], [*matrix.stride()], [rows, columns], None
        ),
        gate_mul=gate_mul,
        squared_relu=squared_relu,
        weight_shape=weight_shape,
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


COUNTS = [0, 70, 300, 128, 1, 0, 64, 193]


def test_the_last_expert_has_the_first_tiles() -> None:
    """The shared expert is the last one: its tiles run beside others' (docs/decisions/matmul.md)."""
    rows, experts = listed(COUNTS, 2)
    num = int(rows.map[-1])
    tiles = rows.map[:-1].view(-1, 3)
    assert tiles[:num, 0].tolist() == [7, 7, 6, 4, 3, 2, 2, 2, 1] and bool((tiles[num:, 0] == -1).all())
    for expert, first, end in tiles[:num].tolist():
        assert (experts[rows.slots[first : min(end, first + 128)].long()] == expert).all()
    assert [first for expert, first, _ in tiles[:num].tolist() if expert == 2] == [70, 198, 326]


@pytest.mark.parametrize("turns", [*itertools.permutations(range(3))])
@pytest.mark.parametrize(
    ("kind", "biased", "top_k", "hidden", "size", "sms"),
    [
        (Activation("silu"), False, 2, 128, 136, 3),
        (Activation("gelu_tanh"), True, 3, 320, 72, 2),
        (Activation("relu2"), False, 2, 64, 264, 132),
        (CLAMPED, True, 2, 64, 136, 3),
        (CLAMPED, True, 2, 320, 288, 3),  # Tiles of 320 weight rows need fewer.
    ],
    ids=str,
)
def test_experts_as_numbers(
    kind: Activation, biased: bool, top_k: int, hidden: int, size: int, sms: int, turns: tuple[int, ...]
) -> None:
    print("seed", torch.manual_seed(33).initial_seed())
    rows, experts = listed(COUNTS, top_k)
    assert int(rows.map[-1]) == sum(-(-count // 128) for count in COUNTS)
    x = torch.randn(len(experts) // top_k, hidden).to(BF16)
    w13 = (torch.randn(len(COUNTS), size * (1 + kind.has_gate), hidden) / hidden**0.5).to(BF16)
    w2 = (torch.randn(len(COUNTS), hidden, size) / size**0.5).to(BF16)
    biases = (
        (torch.randn(w13.shape[:2]).to(BF16), torch.randn(w2.shape[:2]).to(BF16)) if biased else (None, None)
    )
    matmul, (b13, b2) = matmul_as_numbers(sms, turns), biases
    hidden_states = torch.full((len(experts), size), float("nan"), dtype=x.dtype)
    matmul(x, w13, b13, hidden_states, rows, kind)
    slots_out = torch.full((len(experts), hidden), float("nan"), dtype=x.dtype)
    matmul(hidden_states, w2, b2, slots_out, rows)
    for slot, expert in enumerate(experts.tolist()):
        at = int((rows.slots == slot).nonzero())
        gate_up = w13[expert].float() @ x[slot // rows.top_k].float()
        gate_up = (gate_up if b13 is None else gate_up + b13[expert].float()).to(x.dtype).float()
        want = reference.activate(gate_up, kind)
        torch.testing.assert_close(hidden_states[at].float(), want, atol=4e-2, rtol=2e-2)
        want = w2[expert].float() @ hidden_states[at].float()
        want = want if b2 is None else want + b2[expert].float()
        torch.testing.assert_close(slots_out[slot].float(), want, atol=2e-2, rtol=1e-2)


PLAIN = (ExpertFormat(), ExpertFormat())


def _chosen(rows=512, sizes=(2048, 768), formats=PLAIN, dtype=BF16, gpu=HOPPER, **options):
    return choose_expert_tiles(rows * 128, 128, sizes, formats, dtype, gpu, **options)


RUNS = ExpertFormat(4, 32, is_e2m1=True, in_runs=True)


def test_many_rows_of_plain_experts_go_to_hopper() -> None:
    assert _chosen().kernel is ExpertKernel.HOPPER and _chosen().gate_up.rows == 128
    for options in (dict(dtype=FP16), dict(sizes=(2816, 704))):
        assert _chosen(**options).kernel is ExpertKernel.HOPPER, options


def test_mxfp4_in_runs_of_very_many_rows_is_widened_on_a_measured_gpu() -> None:
    least = dispatch.Limits().widened_expert_rows
    tiles = _chosen(rows=least, formats=(RUNS, RUNS))
    assert tiles.widened and tiles.kernel is ExpertKernel.HOPPER and tiles.gate_up.rows == 128
    other = GPU(132, True, derived_limits(132))
    for options in (
        dict(rows=least - 1),
        dict(rows=1),
        dict(rows=least, gpu=other),
        dict(rows=least, sizes=(2080, 768)),
    ):
        tiles = _chosen(formats=(RUNS, RUNS), **options)
        assert not tiles.widened and not tiles.slots, options


def test_few_slots_in_runs_are_not_sorted() -> None:
    assert choose_expert_tiles(8, 32, (2880, 2880), (RUNS, RUNS), BF16, HOPPER).slots
    assert not choose_expert_tiles(9, 32, (2880, 2880), (RUNS, RUNS), BF16, HOPPER).slots


@pytest.mark.parametrize(
    "options",
    [
        dict(rows=dispatch.Limits().expert_rows - 1),
        dict(sizes=(2000, 768)),
        dict(sizes=(2048, 100)),
        dict(formats=(ExpertFormat(4, 128), ExpertFormat())),
        dict(formats=(ExpertFormat(), ExpertFormat(8, 128, True))),
        dict(dtype=torch.float32),
        dict(formats=(ExpertFormat(4, 32, is_e2m1=True), ExpertFormat(4, 32, is_e2m1=True))),
        dict(gpu=GPU()),
    ],
    ids=str,
)
def test_other_experts_stay_with_triton(options: dict) -> None:
    assert _chosen(**options).kernel is ExpertKernel.TILES


def _launch(first: bool, kind: Activation, hidden: int, size: int, dtype: torch.dtype, biased: bool) -> None:
    num, top_k = 4, 2
    outs, inputs = (size * (1 + kind.has_gate), hidden) if first else (hidden, size)
    with torch.device("meta"):
        numbers = torch.empty(1, dtype=torch.int32)
        rows = RowMap(LISTED, numbers, 8, top_k, num, numbers)
        x, states = torch.empty(64, hidden, dtype=dtype), torch.empty(64 * top_k, size, dtype=dtype)
        weight = torch.empty(num, outs, inputs, dtype=dtype)
        bias = torch.empty(num, outs, dtype=dtype) if biased else None
        if first:
            hopper_experts_matmul(x, weight, bias, states, rows, activation=kind)
        else:
            hopper_experts_matmul(states, weight, bias, torch.empty(64 * top_k, hidden, dtype=dtype), rows)


LAUNCHES = {
    f"{'first' if first else 'second'}, {kind.kind}, {hidden} x {size} {dtype}{' biased' * biased}": partial(
        _launch, first, kind, hidden, size, dtype, biased
    )
    for first, kind, hidden, size, dtype, biased in (
        (True, Activation("silu"), 2048, 768, BF16, False),
        (True, Activation("gelu_tanh"), 2816, 704, BF16, False),
        (True, Activation("relu2"), 1024, 776, FP16, False),
        (True, CLAMPED, 2880, 2880, BF16, True),
        (False, Activation("silu"), 2048, 768, BF16, False),
        (False, Activation("silu"), 1032, 776, FP16, True),
        (False, CLAMPED, 2880, 2880, BF16, True),
    )
}


@pytest.mark.parametrize("case", LAUNCHES)
@pytest.mark.slow
def test_compiles_for_hopper_without_spills(compiled, case: str) -> None:
    check_kernels(compiled[case])
