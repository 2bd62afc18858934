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

from shoal.kernels.matmul import dispatch, mxfp4_experts
from shoal.kernels.matmul.dispatch import GPU, ExpertFormat, ExpertKernel, choose_expert_tiles, derived_limits
from shoal.kernels.matmul.hopper_experts import hopper_experts_matmul
from shoal.kernels.matmul.hopper_mxfp4_slots import mxfp4_slots_matmul
from shoal.kernels.matmul.loaders import SMALLER
from shoal.kernels.matmul.mxfp4_experts import ExpertRuns
from shoal.kernels.matmul.tile_matmul import LISTED, SLOTS, RowMap, weight_shape
from shoal.kernels.moe import moe, reference
from shoal.kinds.experts import Activation
from tests.cpu.kernels.test_packed import _mxfp4

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


@pytest.mark.parametrize(
    ("kind", "tokens", "top_k", "hidden", "size"),
    [
        (CLAMPED, 1, 4, 320, 192),
        (Activation("silu"), 2, 3, 64, 1216),
        (Activation("gelu_tanh"), 1, 1, 192, 96),
        (Activation("relu2"), 2, 2, 128, 128),
    ],
    ids=str,
)
def test_slots_in_mxfp4_as_numbers(kind: Activation, tokens: int, top_k: int, hidden: int, size: int) -> None:
    print("seed", torch.manual_seed(37).initial_seed())
    num, dtype = 6, BF16
    packed, plain = [], []
    for outs, inputs, each in ((size, hidden, 1 + kind.has_gate), (hidden, size, 1)):
        parts = [_mxfp4(outs, inputs) for _ in range(num * each)]
        packed.append(mxfp4_experts.pack(parts, None, each, torch.device("cpu")))
        weights = torch.stack([part.dequantize() for part in parts])
        plain.append(weights.view(num, each * outs, inputs))
    b13, b2 = (torch.randn(weight.shape[:2]).to(dtype) for weight in plain)
    x, residual = torch.randn(tokens, hidden).to(dtype) / 8, torch.randn(tokens, hidden).to(dtype)
    experts = torch.cat([torch.randperm(num)[:top_k] for _ in range(tokens)]).int()
    shares = torch.rand(tokens * top_k)
    names = dict(gate_mul=gate_mul, squared_relu=squared_relu, SMALLER=SMALLER, ExpertRuns=ExpertRuns)
    matmul = load(Machine(), "hopper_mxfp4_slots", names).mxfp4_slots_matmul
    states, out = torch.full((tokens * top_k, size), float("nan"), dtype=dtype), residual.clone()
    matmul(x, packed[0], b13, states, RowMap(SLOTS, experts, tokens * top_k, top_k, num), kind)
    by_token = RowMap(SLOTS, experts, tokens, top_k, num, shares=shares)
    matmul(states, packed[1], b2, out, by_token, add=True)
    total = residual.float()
    for slot, expert in enumerate(experts.tolist()):
        gate_up = plain[0][expert] @ x[slot // top_k].float() + b13[expert].float()
        want = reference.activate(gate_up.to(dtype).float(), kind)
        torch.testing.assert_close(states[slot].float(), want, atol=4e-2, rtol=2e-2)
        result = plain[1][expert] @ states[slot].float() + b2[expert].float()
        total[slot // top_k] += shares[slot] * result
    torch.testing.assert_close(out.float(), total, atol=4e-2, rtol=2e-2)


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


def _launch_slots(first: bool, kind: Activation, hidden: int, size: int) -> None:
    num, top_k = 4, 4
    outs, inputs = (size * (1 + kind.has_gate), hidden) if first else (hidden, size)
    with torch.device("meta"):
        runs = torch.empty(num, outs // 64, -(-inputs // 192) * 3, 2176, dtype=torch.uint8)
        weight = ExpertRuns((num * outs, inputs), num, runs)
        bias, experts = torch.empty(num, outs, dtype=BF16), torch.empty(top_k, dtype=torch.int32)
        x, states = torch.empty(1, hidden, dtype=BF16), torch.empty(top_k, size, dtype=BF16)
        if first:
            rows = RowMap(SLOTS, experts, top_k, top_k, num)
            mxfp4_slots_matmul(x, weight, bias, states, rows, kind)
        else:
            rows = RowMap(SLOTS, experts, 1, top_k, num, shares=torch.empty(top_k))
            mxfp4_slots_matmul(states, weight, bias, torch.empty_like(x), rows, add=True)


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
} | {
    f"slots, {'first' if first else 'second'}, {kind.kind} {size}": partial(
        _launch_slots, first, kind, 2880, size
    )
    for first, kind, size in (
        (True, CLAMPED, 2880),
        (True, Activation("relu2"), 2880),
        (False, CLAMPED, 2880),
        (False, CLAMPED, 1440),
    )
}


@pytest.mark.parametrize("case", LAUNCHES)
@pytest.mark.slow
def test_compiles_for_hopper_without_spills(compiled, case: str) -> None:
    check_kernels(compiled[case])
