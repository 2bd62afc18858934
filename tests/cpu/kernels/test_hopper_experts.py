"""Hopper's matmuls of experts with many rows: run as numbers (gluon_numbers.py) against the loop over experts, with
its tiles from Triton's interpreter, and compiled for sm_90 without spills. tests/gpu/test_tile_matmul_gpu.py runs
them on a GPU."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from functools import partial

import pytest
import torch
from gluon_numbers import Descriptor, Machine, Value, load
from triton_compile import check_kernels

from shoal.kernels.matmul import dispatch, gpu_weight
from shoal.kernels.matmul.dispatch import GPU, ExpertFormat, ExpertKernel, choose_expert_tiles, derived_limits
from shoal.kernels.matmul.gpu_weight import GpuWeight
from shoal.kernels.matmul.hopper_experts import hopper_experts_matmul
from shoal.kernels.matmul.hopper_mxfp4_experts import mxfp4_experts_matmul
from shoal.kernels.matmul.hopper_mxfp4_slots import mxfp4_slots_matmul
from shoal.kernels.matmul.loaders import SMALLER, TiledWeight
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


def matmul_as_numbers(sms: int, turns: tuple[int, ...], block_rows: int = 128):
    """Returns hopper_experts.py's matmul, or for fewer than 128 rows a tile hopper_mxfp4_experts.py's."""
    names = dict(
        dispatch=types.SimpleNamespace(gpu_of=lambda _: GPU(sms), SHARED_BYTES=dispatch.SHARED_BYTES),
        descriptor=lambda matrix, rows, columns: Descriptor(
            matrix, [*matrix.shape], [*matrix.stride()], [rows, columns], None
        ),
        gate_mul=gate_mul,
        squared_relu=squared_relu,
        SMALLER=SMALLER,
        TiledWeight=TiledWeight,
        weight_shape=weight_shape,
    )
    machine = Machine(turns)
    names |= pairs_of(machine)
    if block_rows == 128:
        return load(machine, "hopper_experts", names).hopper_experts_matmul
    few = load(machine, "hopper_mxfp4_experts", names).mxfp4_experts_matmul
    return lambda x, weight, bias, out, rows, kind=None: few(x, weight, bias, out, rows, block_rows, kind)


def pairs_of(machine: Machine) -> dict[str, object]:
    pairs = load(machine, "mxfp4_pairs", {})
    return dict(halves=pairs.halves, placed=pairs.placed, scaled=pairs.scaled)


def listed(counts: list[int], top_k: int, block_rows: int = 128) -> tuple[RowMap, torch.Tensor]:
    """The list of slots of which each expert has as many as `counts` say, and the slots' experts."""
    experts = torch.cat([torch.full((count,), i) for i, count in enumerate(counts)]).int()
    experts = experts[torch.randperm(len(experts))]
    ranks, seen = torch.empty_like(experts), [0] * len(counts)
    for slot, expert in enumerate(experts.tolist()):
        ranks[slot], seen[expert] = seen[expert], seen[expert] + 1
    return moe._arranged(experts, ranks, torch.tensor(counts).int(), block_rows, top_k), experts


COUNTS = [0, 70, 300, 128, 1, 0, 64, 193]
FEW_COUNTS = [0, 70, 30, 1, 0, 64, 20, 33]


def check_numbers(
    given: tuple[torch.Tensor, torch.Tensor | GpuWeight, torch.Tensor | GpuWeight],
    plain: tuple[torch.Tensor, torch.Tensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    kind: Activation,
    rows: RowMap,
    experts: torch.Tensor,
    matmul: Callable[..., None],
) -> None:
    """Compares both matmuls with a loop over slots, which multiplies by the plain weights."""
    x, first, second = given
    (w13, w2), (b13, b2) = plain, biases
    size, hidden = w2.shape[2], w2.shape[1]
    hidden_states = torch.full((len(experts), size), float("nan"), dtype=x.dtype)
    matmul(x, first, b13, hidden_states, rows, kind)
    slots_out = torch.full((len(experts), hidden), float("nan"), dtype=x.dtype)
    matmul(hidden_states, second, b2, slots_out, rows)
    for slot, expert in enumerate(experts.tolist()):
        at = int((rows.slots == slot).nonzero())
        gate_up = w13[expert].float() @ x[slot // rows.top_k].float()
        gate_up = (gate_up if b13 is None else gate_up + b13[expert].float()).to(x.dtype).float()
        want = reference.activate(gate_up, kind)
        torch.testing.assert_close(hidden_states[at].float(), want, atol=4e-2, rtol=2e-2)
        want = w2[expert].float() @ hidden_states[at].float()
        want = want if b2 is None else want + b2[expert].float()
        torch.testing.assert_close(slots_out[slot].float(), want, atol=2e-2, rtol=1e-2)


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
    check_numbers((x, w13, w2), (w13, w2), biases, kind, rows, experts, matmul_as_numbers(sms, turns))


@pytest.mark.parametrize("turns", [*itertools.permutations(range(3))])
@pytest.mark.parametrize("block_rows", [32, 64, 128])
@pytest.mark.parametrize(
    ("kind", "dtype", "hidden", "size", "sms"),
    [
        (CLAMPED, BF16, 192, 160, 3),
        (Activation("silu"), FP16, 64, 352, 2),
        (Activation("relu2"), BF16, 128, 288, 132),
    ],
    ids=str,
)
def test_experts_in_mxfp4_as_numbers(
    kind: Activation,
    dtype: torch.dtype,
    hidden: int,
    size: int,
    sms: int,
    block_rows: int,
    turns: tuple[int, ...],
) -> None:
    print("seed", torch.manual_seed(35).initial_seed())
    rows, experts = listed(COUNTS if block_rows == 128 else FEW_COUNTS, 2, block_rows)
    x = torch.randn(len(experts) // 2, hidden).to(dtype) / 8
    packed, plain = [], []
    for outs, inputs in ((size * (1 + kind.has_gate), hidden), (hidden, size)):
        parts = [_mxfp4(outs, inputs) for _ in COUNTS]
        packed.append(gpu_weight.pack(parts, None, torch.device("cpu"), dtype))
        plain.append(torch.stack([part.dequantize() for part in parts]))
    biases = torch.randn(plain[0].shape[:2]).to(dtype), torch.randn(plain[1].shape[:2]).to(dtype)
    matmul = matmul_as_numbers(sms, turns, block_rows)
    check_numbers((x, *packed), (plain[0], plain[1]), biases, kind, rows, experts, matmul)


@pytest.mark.parametrize(
    ("kind", "dtype", "tokens", "top_k", "hidden", "size"),
    [
        (CLAMPED, BF16, 1, 4, 320, 192),
        (Activation("silu"), FP16, 2, 3, 64, 1216),
        (Activation("gelu_tanh"), BF16, 1, 1, 192, 64),
        (Activation("relu2"), BF16, 2, 2, 128, 128),
    ],
    ids=str,
)
def test_slots_in_mxfp4_as_numbers(
    kind: Activation, dtype: torch.dtype, tokens: int, top_k: int, hidden: int, size: int
) -> None:
    print("seed", torch.manual_seed(37).initial_seed())
    num = 6
    packed, plain = [], []
    for outs, inputs in ((size * (1 + kind.has_gate), hidden), (hidden, size)):
        parts = [_mxfp4(outs, inputs) for _ in range(num)]
        packed.append(gpu_weight.pack(parts, None, torch.device("cpu"), dtype))
        plain.append(torch.stack([part.dequantize() for part in parts]))
    b13, b2 = (torch.randn(weight.shape[:2]).to(dtype) for weight in plain)
    x, residual = torch.randn(tokens, hidden).to(dtype) / 8, torch.randn(tokens, hidden).to(dtype)
    experts = torch.cat([torch.randperm(num)[:top_k] for _ in range(tokens)]).int()
    shares = torch.rand(tokens * top_k)
    machine = Machine()
    names = dict(gate_mul=gate_mul, squared_relu=squared_relu, SMALLER=SMALLER, TiledWeight=TiledWeight)
    matmul = load(machine, "hopper_mxfp4_slots", names | pairs_of(machine)).mxfp4_slots_matmul
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


MXFP4 = ExpertFormat(4, 32, is_e2m1=True)


def test_many_rows_of_plain_experts_and_of_mxfp4_go_to_hopper() -> None:
    assert _chosen().kernel is ExpertKernel.HOPPER and _chosen().gate_up.rows == 128
    for options in (
        dict(dtype=FP16),
        dict(sizes=(2816, 704)),
        dict(formats=(MXFP4, MXFP4)),
        dict(formats=(MXFP4, ExpertFormat()), sizes=(2880, 2880)),
    ):
        assert _chosen(**options).kernel is ExpertKernel.HOPPER, options


def test_mxfp4_of_very_many_rows_is_widened_on_a_measured_gpu() -> None:
    least = dispatch.Limits().widened_expert_rows
    assert _chosen(rows=least, formats=(MXFP4, MXFP4)).widened
    assert not _chosen(rows=least - 1, formats=(MXFP4, MXFP4)).widened
    assert not _chosen(rows=least).widened and not _chosen(rows=least, formats=(MXFP4, PLAIN[0])).widened
    other = GPU(132, True, derived_limits(132))
    tiles = _chosen(rows=least, formats=(MXFP4, MXFP4), gpu=other)
    assert tiles.kernel is ExpertKernel.HOPPER and not tiles.widened


@pytest.mark.parametrize(("rows", "block_rows"), [(1, 32), (24, 32), (25, 64), (64, 64)])
def test_some_rows_of_mxfp4_have_tiles_of_few_rows(rows: int, block_rows: int) -> None:
    tiles = _chosen(rows=rows, formats=(MXFP4, MXFP4))
    assert tiles.kernel is ExpertKernel.MXFP4 and tiles.gate_up.rows == tiles.down.rows == block_rows
    for other in (dict(gpu=GPU()), dict(sizes=(2048, 776)), dict(dtype=torch.float32)):
        assert _chosen(rows=rows, **dict(dict(formats=(MXFP4, MXFP4)), **other)).kernel is ExpertKernel.TILES


@pytest.mark.parametrize(
    "options",
    [
        dict(rows=dispatch.Limits().expert_rows - 1),
        dict(sizes=(2000, 768)),
        dict(sizes=(2048, 100)),
        dict(formats=(ExpertFormat(4, 128), ExpertFormat())),
        dict(formats=(ExpertFormat(), ExpertFormat(8, 128, True))),
        dict(dtype=torch.float32),
        dict(formats=(ExpertFormat(4, 16, is_e2m1=True), MXFP4)),
        dict(formats=(MXFP4, MXFP4), sizes=(2048, 776)),
        dict(gpu=GPU()),
    ],
    ids=str,
)
def test_other_experts_stay_with_triton(options: dict) -> None:
    assert _chosen(**options).kernel is ExpertKernel.TILES


def test_few_slots_in_mxfp4_go_to_hopper_too() -> None:
    def chosen(sizes=(2880, 2880), formats=(MXFP4, MXFP4), dtype=BF16, gpu=HOPPER):
        tiles = choose_expert_tiles(8, 32, sizes, formats, dtype, gpu)
        assert tiles.slots
        return tiles.kernel is ExpertKernel.MXFP4_SLOTS

    assert chosen() and chosen(dtype=FP16)
    assert not chosen(sizes=(2880, 1440)) and not chosen(formats=PLAIN) and not chosen(gpu=GPU())


def _launch_slots(first: bool, kind: Activation, hidden: int, size: int, dtype: torch.dtype) -> None:
    num, top_k = 4, 4
    outs, inputs = (size * (1 + kind.has_gate), hidden) if first else (hidden, size)
    with torch.device("meta"):
        tiles, steps = num * outs // 16, inputs // 64
        words = torch.empty(tiles, steps, 32, 4, dtype=torch.int32)
        scales = torch.empty(tiles, 2 * steps, 8, dtype=torch.int32)
        weight = TiledWeight((num * outs, inputs), dtype, 4, True, 32, words, scales, None)
        bias, experts = torch.empty(num, outs, dtype=dtype), torch.empty(top_k, dtype=torch.int32)
        x, states = torch.empty(1, hidden, dtype=dtype), torch.empty(top_k, size, dtype=dtype)
        if first:
            rows = RowMap(SLOTS, experts, top_k, top_k, num)
            mxfp4_slots_matmul(x, weight, bias, states, rows, kind)
        else:
            rows = RowMap(SLOTS, experts, 1, top_k, num, shares=torch.empty(top_k))
            mxfp4_slots_matmul(states, weight, bias, torch.empty_like(x), rows, add=True)


def _launch(
    first: bool,
    kind: Activation,
    hidden: int,
    size: int,
    dtype: torch.dtype,
    packed: bool,
    biased: bool,
    block_rows: int = 128,
) -> None:
    num, top_k = 4, 2
    outs, inputs = (size * (1 + kind.has_gate), hidden) if first else (hidden, size)
    with torch.device("meta"):
        numbers = torch.empty(1, dtype=torch.int32)
        rows = RowMap(LISTED, numbers, 8, top_k, num, numbers)
        x, states = torch.empty(64, hidden, dtype=dtype), torch.empty(64 * top_k, size, dtype=dtype)
        weight = torch.empty(num, outs, inputs, dtype=dtype)
        if packed:
            tiles, steps = -(-num * outs // 128) * 8, -(-inputs // 64)
            words, scales = (
                torch.empty(tiles, steps, 32, 4, dtype=torch.int32),
                torch.empty(tiles, 2 * steps, 8, dtype=torch.int32),
            )
            weight = TiledWeight((num * outs, inputs), dtype, 4, True, 32, words, scales, None)
        bias = torch.empty(num, outs, dtype=dtype) if biased else None
        matmul = hopper_experts_matmul
        if block_rows < 128:
            matmul = partial(mxfp4_experts_matmul, block_rows=block_rows)
        if first:
            matmul(x, weight, bias, states, rows, activation=kind)
        else:
            matmul(states, weight, bias, torch.empty(64 * top_k, hidden, dtype=dtype), rows)


LAUNCHES = (
    {
        f"{'first' if first else 'second'}, {kind.kind}, {hidden} x {size} {dtype}{' packed' * packed}{' biased' * biased}": partial(
            _launch, first, kind, hidden, size, dtype, packed, biased
        )
        for first, kind, hidden, size, dtype, packed, biased in (
            (True, Activation("silu"), 2048, 768, BF16, False, False),
            (True, Activation("gelu_tanh"), 2816, 704, BF16, False, False),
            (True, Activation("relu2"), 1024, 776, FP16, False, False),
            (True, CLAMPED, 2880, 2880, BF16, False, True),
            (True, CLAMPED, 2880, 2880, BF16, True, True),
            (True, Activation("silu"), 2048, 768, FP16, True, False),
            (True, Activation("relu2"), 1024, 784, BF16, True, True),
            (False, Activation("silu"), 2048, 768, BF16, False, False),
            (False, Activation("silu"), 1032, 776, FP16, False, True),
            (False, CLAMPED, 2880, 2880, BF16, False, True),
            (False, CLAMPED, 2880, 2880, BF16, True, True),
            (False, CLAMPED, 2880, 2880, FP16, True, False),
        )
    }
    | {
        f"{rows} rows, {'first' if first else 'second'}, {kind.kind} {dtype}": partial(
            _launch, first, kind, 2880, 2880, dtype, True, True, rows
        )
        for rows in (32, 64)
        for first, kind, dtype in (
            (True, CLAMPED, BF16),
            (True, Activation("relu2"), FP16),
            (False, CLAMPED, BF16),
            (False, CLAMPED, FP16),
        )
    }
    | {
        f"slots, {'first' if first else 'second'}, {kind.kind} {dtype}": partial(
            _launch_slots, first, kind, 2880, 2880, dtype
        )
        for first, kind, dtype in (
            (True, CLAMPED, BF16),
            (True, Activation("relu2"), FP16),
            (False, CLAMPED, BF16),
            (False, CLAMPED, FP16),
        )
    }
)


@pytest.mark.parametrize("case", LAUNCHES)
@pytest.mark.slow
def test_compiles_for_hopper_without_spills(compiled, case: str) -> None:
    check_kernels(compiled[case])
