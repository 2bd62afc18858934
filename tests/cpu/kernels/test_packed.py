"""Matmuls with packed weights in Triton's interpreter, against the unpacked matrix in float32, at odd shapes;
what real models bring compiles for sm_80 and sm_90 without spills.

Tolerances: float16 has 11 bits. Scales, weights and results are each rounded to them. bfloat16, which the
interpreter does not know, is tried bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton_compile import check_kernels

from shoal.errors import CheckpointError
from shoal.kernels.matmul import gpu_weight, loaders, packed_linear
from shoal.kernels.matmul.dispatch import GPU, MAX_SPLIT_TILES, Kernel, RowTiles, Shape, choose
from shoal.kernels.matmul.gpu_weight import GpuWeight, GpuWeights
from shoal.kernels.matmul.tile_matmul import tile_linear
from shoal.kernels.quant.ggml_types import GROUPS
from shoal.kernels.quant.gguf_tensor import UNPACK
from shoal.kernels.quant.int4_tensor import Int4Tensor
from shoal.kernels.quant.mxfp4_tensor import VALUES, Mxfp4Tensor
from shoal.kernels.quant.nvfp4_tensor import Nvfp4Tensor
from shoal.kernels.quant.quantized_tensor import QuantizedTensor
from tests.cpu.weights.test_weights_quantized import SCALES, random_tensor

BF16, FP16 = torch.bfloat16, torch.float16
CPU = torch.device("cpu")
LAUNCHES: dict[str, Callable[[], object]] = {}


def _int4(outs: int, inputs: int, group: int, zeros: bool = False, shuffled: bool = False) -> Int4Tensor:
    count = inputs // group
    return Int4Tensor.of(
        torch.randint(0, 16, (outs, inputs), dtype=torch.uint8),
        (torch.rand(outs, count) + 0.1) / inputs**0.5 / 4,
        torch.randint(0, 17, (outs, count), dtype=torch.uint8) if zeros else None,
        (torch.arange(inputs) // group)[torch.randperm(inputs)] if shuffled else None,
    )


def _mxfp4(outs: int, inputs: int) -> Mxfp4Tensor:
    quants = torch.randint(0, 256, (outs, inputs // 2), dtype=torch.uint8)
    return Mxfp4Tensor.of(quants, torch.randint(120, 124, (outs, inputs // 32), dtype=torch.uint8))


def _gguf(kind: str, outs: int, inputs: int) -> QuantizedTensor:
    """Random quants with scales of the size of real ones, which float16 has room for."""
    tensor = random_tensor(kind, outs, inputs)[0]
    groups = tensor.data.reshape(-1, GROUPS[kind][1])
    for start in SCALES[kind]:
        scales = groups[:, start : start + 2].copy().view(np.float16) / (4096 if "K" in kind else 64)
        groups[:, start : start + 2] = scales.view(np.uint8)
    return replace(tensor, data=groups.reshape(outs, -1))


def _nvfp4(outs: int, inputs: int) -> Nvfp4Tensor:
    """As a scale of the matrix and fp8 scales of groups make them."""
    quants = torch.randint(0, 256, (outs, inputs // 2), dtype=torch.uint8)
    groups = torch.rand(outs, inputs // 16).mul(400).to(torch.float8_e4m3fn).float()
    return Nvfp4Tensor.of(quants, groups * 3.7e-4)


def _pack(*tensors: QuantizedTensor, dtype: torch.dtype = FP16) -> GpuWeight | GpuWeights:
    return gpu_weight.pack(tensors, None, CPU, dtype)


def _close(got: torch.Tensor, want: torch.Tensor, share: float = 1e-3) -> None:
    assert got.shape == want.shape and (got.float() - want).norm() <= share * want.norm()


MATRICES: dict[str, Callable[[], list[QuantizedTensor]]] = {
    "128": lambda: [_int4(37, 256, 128)],
    "128, zeros": lambda: [_int4(37, 384, 128, zeros=True)],
    "64": lambda: [_int4(130, 192, 64)],
    "32, zeros": lambda: [_int4(21, 96, 32, zeros=True)],
    "16": lambda: [_int4(21, 80, 16)],
    "a row": lambda: [_int4(21, 300, 300)],
    "one input": lambda: [_int4(1, 2, 2)],
    "merged": lambda: [_int4(37, 256, 128, zeros=True), _int4(20, 256, 64), _int4(9, 256, 128)],
    "act-order": lambda: [_int4(37, 256, 64, zeros=True, shuffled=True)],
    "two orders": lambda: [_int4(37, 256, 64, shuffled=True), _int4(5, 256, 64, shuffled=True)],
    "mxfp4": lambda: [_mxfp4(37, 224)],
    "nvfp4": lambda: [_nvfp4(37, 208)],
    "two nvfp4": lambda: [_nvfp4(37, 64), _nvfp4(11, 64)],
    "two mxfp4": lambda: [_mxfp4(37, 160), _mxfp4(11, 160)],
    "Q4_K and Q6_K": lambda: [_gguf("Q4_K", 16, 512), _gguf("Q6_K", 21, 512)],
    "Q4_0 and Q8_0": lambda: [_gguf("Q4_0", 16, 96), _gguf("Q8_0", 21, 96)],
} | {kind: (lambda kind=kind: [_gguf(kind, 21, 512)]) for kind in UNPACK}


@pytest.fixture(params=MATRICES)
def matrix(request) -> tuple[GpuWeight | GpuWeights, torch.Tensor]:
    """A packed weight, and what its tensors are when they are unpacked."""
    print("seed", torch.manual_seed(3).initial_seed())
    tensors = MATRICES[request.param]()
    return _pack(*tensors), torch.cat([tensor.dequantize() for tensor in tensors])


def test_matmuls_equal_those_of_the_unpacked_matrix(matrix) -> None:
    weight, oracle = matrix
    x, bias = torch.randn(5, oracle.shape[1]).div(64).to(FP16), torch.randn(len(oracle)).to(FP16)
    y, residual = F.linear(x.float(), oracle), torch.randn(5, len(oracle)).to(FP16)
    _close(weight.linear(x, None), y)
    expected = residual.float() + y + bias.float()
    left = weight.add(x, bias, residual)
    _close(residual if left is None else residual + left, expected)


def test_weights_are_unpacked_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = _int4(150, 80, 16)
    x, bias = torch.randn(300, 80).to(FP16), torch.randn(150).to(FP16)
    residual = torch.randn(300, 150).to(FP16)
    weight, y = _pack(tensor), F.linear(x.float(), tensor.dequantize())
    _close(weight.linear(x, bias), y + bias)
    total = residual.clone()
    assert weight.add(x, None, total) is None
    _close(total, residual + y)
    left = weight.add(x, bias, total)  # as a weight in 16 bits leaves it to the next norm
    assert left is not None
    _close(left, y + bias)
    gate, up = y.chunk(2, dim=1)
    _close(weight.gated(x, None), F.silu(gate) * up)
    _close(weight.gated(x, None, activation="gelu_tanh"), F.gelu(gate, approximate="tanh") * up)
    monkeypatch.setattr(packed_linear, "UNPACKED", 128 * 80)  # 128 outputs at a time
    _close(weight.linear(x, bias), y + bias)


def test_no_rows_and_few_of_part_tiles_leave_a_matrix_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: no rows unpacked the whole matrix, and so did each step of gate and up of 75 outputs."""
    weight, x, residual = (
        _pack(_int4(150, 80, 16)),
        torch.randn(20, 80).to(FP16),
        torch.zeros(0, 150).to(FP16),
    )
    monkeypatch.setattr(packed_linear, "unpack_rows", None)
    assert weight.linear(x[:0], None).shape == (0, 150) and weight.gated(x[:0], None).shape == (0, 75)
    assert weight.add(x[:0], None, residual) is None
    assert weight.gated(x, None).shape == (20, 75)


def test_rows_are_unpacked_for_an_embedding(matrix) -> None:
    weight, oracle = matrix
    if isinstance(weight, GpuWeight):
        ids = torch.tensor([len(oracle) - 1, 0, len(oracle) // 2], dtype=torch.int32)
        _close(weight.embed(ids), oracle[ids.long()])
        whole = packed_linear.unpack_rows(weight, 0, len(oracle))
        assert torch.equal(whole[ids.long()], packed_linear.unpack_ids(weight, ids))


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("size", [48, 37])
@pytest.mark.parametrize("kind", ["int4", "mxfp4", "nvfp4", "Q8_0"])
def test_gate_and_up_end_with_silu_mul(kind: str, size: int, rows: int) -> None:
    """37 outputs are not whole tiles, so SiLU * up is a kernel of its own."""
    print("seed", torch.manual_seed(4).initial_seed())
    make = {"int4": lambda: _int4(size, 256, 32, zeros=True), "mxfp4": lambda: _mxfp4(size, 160)}
    make |= {"nvfp4": lambda: _nvfp4(size, 144)}
    make |= {"Q8_0": lambda: _gguf("Q8_0", size, 96)}
    tensors = [make[kind]() for _ in range(2)]
    oracle, weight = torch.cat([tensor.dequantize() for tensor in tensors]), _pack(*tensors)
    x, bias = torch.randn(rows, oracle.shape[1]).to(FP16), torch.randn(2 * size).to(FP16)
    x /= oracle.norm() / 8 / oracle.shape[0] ** 0.5
    gate, up = F.linear(x.float(), oracle, bias.float()).chunk(2, dim=1)
    _close(weight.gated(x, bias), F.silu(gate) * up)


TILES = [
    RowTiles(16, 64, 128, 4, 2, 3),
    RowTiles(16, 64, 64, 4, 2, 4),
    RowTiles(32, 128, 128, 8, 4, 2),
    RowTiles(128, 64, 256, 4, 4),
]


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_any_tiles_and_splits_give_the_matmul(tiles: RowTiles, gated: bool) -> None:
    if gated and tiles.outs > 64:
        return
    print("seed", torch.manual_seed(5).initial_seed())
    tensor = _int4(160, 448, 64, zeros=True)
    weight, x, bias = _pack(tensor), torch.randn(21, 448).to(FP16), torch.randn(160).to(FP16)
    y = F.linear(x.float(), tensor.dequantize(), bias.float())
    want = F.silu(y[:, :80]) * y[:, 80:] if gated else y
    for _ in range(2):  # The first launch leaves the counters of parts as they were.
        _close(tile_linear(tiles, x, weight, bias, gated), want)


def test_nothing_is_written_beyond_the_output() -> None:
    weight, x = _pack(_int4(37, 64, 32)), torch.randn(3, 64).to(FP16)
    room = torch.full((5, 37), 7.0, dtype=FP16)
    weight.add(x, None, room[1:4])
    assert (room[0] == 7).all() and (room[4] == 7).all() and (room[1:4] != 7).any(dim=1).all()


def test_bits_of_a_quant_are_numbers_in_both_types() -> None:
    """A matmul takes them as they are. 240 is a quant of 4 bits that lies 4 bits higher."""
    for dtype, shift in gpu_weight.QUANT_SHIFT.items():
        numbers = torch.arange(256, dtype=torch.int16).view(dtype).double()
        assert torch.equal(numbers * 2.0**shift, torch.arange(256).double())


@triton.jit
def _e2m1_kernel(bits_ptr, out_ptr, BF16: tl.constexpr):
    at = tl.arange(0, 16)
    DTYPE: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    tl.store(out_ptr + at, loaders.e2m1(tl.load(bits_ptr + at), DTYPE))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_bits_of_e2m1_are_put_where_either_type_has_them(dtype: torch.dtype) -> None:
    low = torch.arange(16, dtype=torch.int32)
    words = (low | low.flip(0) << 16) | -0x000F0010  # The other bits, which are to be ignored, are ones.
    out = torch.empty_like(words)
    _e2m1_kernel[(1,)](words, out, BF16=dtype == BF16)
    expected = torch.tensor(VALUES)[torch.stack((low, low.flip(0)), dim=1).flatten()]
    assert torch.equal(out.view(dtype).float() * 2.0 ** gpu_weight.E2M1_SHIFT[dtype], expected)


def _in_bf16(weight: GpuWeight) -> torch.Tensor:
    """The arithmetic of `_weights` in PyTorch, from the words of 4 bits on, in float64 with the roundings of
    bfloat16; each with 2^16 made good."""
    words = weight.words.view(-1, weight.words.shape[1], 8, 4, 4)
    tiles, steps, *_ = words.shape
    out = torch.zeros(tiles, 2, 8, steps, 4, 2, 4, 2, dtype=torch.float64)
    scales, minima = (
        None if t is None else t.view(BF16).view(tiles, -1, 8, 2).double()
        for t in (weight.scales, weight.minima)
    )
    of_step = torch.arange(steps) * 64 // weight.group
    for u in range(2):
        for h in range(2):
            for e in range(2):
                bits = (words >> (8 * u + 16 * e)) & (15 << 4 * h)
                numbers = bits.to(torch.int16).view(BF16).double()
                scale = scales[:, of_step, :, h, None, None]
                if minima is None:
                    low = (scale * -float(torch.tensor(8 << 4 * h, dtype=torch.int16).view(BF16))).bfloat16()
                else:
                    low = minima[:, of_step, :, h, None, None]
                found = (numbers * scale + low.double()).bfloat16().double()
                out[:, h, :, :, :, u, :, e] = found.permute(0, 2, 1, 4, 3)
    return out.reshape(tiles * 16, steps * 64)[: weight.shape[0], : weight.shape[1]] * 2.0**16


@pytest.mark.parametrize("zeros", [False, True])
def test_weights_in_bfloat16_are_the_unpacked_ones_to_its_precision(zeros: bool) -> None:
    """A scale, a minimum and a weight are rounded to 8 bits each; a minimum is up to 16 scales."""
    print("seed", torch.manual_seed(7).initial_seed())
    tensor = _int4(37, 256, 64, zeros=zeros)
    weight = _pack(tensor, dtype=BF16)
    oracle = tensor.dequantize().double()
    error = (_in_bf16(weight) - oracle).abs()
    scales = tensor.scales.repeat_interleave(64, dim=1)
    assert (error <= 2**-8 * (2.01 * oracle.abs() + (16 if zeros else 0) * scales)).all()
    assert zeros or (_in_bf16(weight)[oracle == 0] == 0).all()


def test_new_weights_lie_where_the_old_ones_lay() -> None:
    print("seed", torch.manual_seed(6).initial_seed())
    zeros, none = _int4(37, 256, 128, zeros=True), _int4(37, 256, 128)
    old = _pack(zeros)
    x, places = torch.randn(3, 256).to(FP16), [t.data_ptr() for t in old.tensors().values()]
    new = gpu_weight.pack([none], old, CPU, FP16)
    assert new is old and [t.data_ptr() for t in new.tensors().values()] == places
    assert torch.equal(new.linear(x, None), _pack(none).linear(x, None))
    for other in ([_int4(37, 256, 64)], [_int4(38, 256, 128)], [_int4(37, 256, 128, shuffled=True)]):
        with pytest.raises(CheckpointError, match="build a new engine"):
            gpu_weight.pack(other, old, CPU, FP16)
    with pytest.raises(CheckpointError, match="minima"):
        gpu_weight.pack([zeros], _pack(none), CPU, FP16)


def test_groups_that_a_shard_cuts_are_refused() -> None:
    with pytest.raises(CheckpointError, match="tensor_parallel_size"):
        _pack(_int4(37, 256, 64, shuffled=True).columns(0, 32))


def test_scales_that_the_dtype_does_not_hold_are_refused() -> None:
    large = Mxfp4Tensor.of(torch.zeros(3, 16, dtype=torch.uint8), torch.full((3, 1), 150, dtype=torch.uint8))
    for dtype in (FP16, BF16):
        with pytest.raises(CheckpointError, match="do not hold"):
            _pack(large, dtype=dtype)


def _launch(rows: int, outs: int, inputs: int, gated: bool, bits: int, e2m1: bool, minima: bool) -> None:
    with torch.device("meta"):
        group = 32 if e2m1 else 128 if bits == 4 else 16 if minima else 32
        tiles, steps = outs * (1 + gated) // 16, inputs * bits // 256
        words = torch.empty(tiles, steps, 32, 4, dtype=torch.int32)
        scales = torch.empty(tiles, inputs // group, 8, dtype=torch.int32)
        weight = GpuWeight(
            (outs * (1 + gated), inputs),
            BF16,
            bits,
            e2m1,
            group,
            words,
            scales,
            scales if minima else None,
            None,
        )
        x = torch.empty(rows, inputs, dtype=BF16)
        if gated:
            weight.gated(x, None)
        else:
            weight.add(x, None, torch.empty(rows, outs, dtype=BF16))
            weight.embed(torch.empty(rows, dtype=torch.int32))


for form in ((4, False, False), (4, False, True), (4, True, False), (8, False, False), (8, False, True)):
    for rows in (1, 64, 200):
        for outs, inputs, gated in ((4096, 4096, False), (12288, 4096, True)):
            case = (rows, outs, inputs, gated, *form)
            LAUNCHES[str(case)] = lambda case=case: _launch(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", LAUNCHES)
def test_compiles_for_both_targets_and_hardly_spills(compiled, case: str) -> None:
    check_kernels(compiled[case], max_spilled=8 if case.startswith("(200,") else 0)


H200 = GPU(hopper=True)


@pytest.mark.parametrize(
    ("outs", "inputs"), [(4096, 4096), (4096, 12288), (6144, 4096), (151936, 1024), (37, 64)]
)
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 256])
@pytest.mark.parametrize("sms", [20, 108, 132, 142])
def test_splits_fill_the_sms_and_leave_each_program_some_rounds(
    outs: int, inputs: int, rows: int, sms: int
) -> None:
    gpu = GPU(sms)
    tiles = choose(Shape(outs, inputs, bits=4), rows, BF16, gpu).tiles
    assert tiles is not None
    programs = triton.cdiv(rows, tiles.rows) * triton.cdiv(outs, tiles.outs)
    at_once = 4.5 if tiles.rows == 32 else gpu.limits.packed_programs  # 4, rounded to whole splits
    assert tiles.splits == 1 or programs * tiles.splits <= at_once * sms
    assert tiles.splits == 1 or (tiles.rounds(inputs) >= 2 and programs <= MAX_SPLIT_TILES)
    assert tiles.rounds(inputs) * tiles.splits * tiles.columns >= inputs


def test_one_row_of_a_large_weight_in_groups_of_128_goes_to_the_ring() -> None:
    def kernel(rows: int = 1, gpu: GPU = H200, dtype: torch.dtype = BF16, **changes: int) -> Kernel:
        return choose(
            Shape(**dict(outs=4096, inputs=4096, bits=4, group=128) | changes), rows, dtype, gpu
        ).kernel

    assert kernel() is kernel(inputs=12288) is kernel(outs=4100) is Kernel.HOPPER_ROW
    others = [kernel(2), kernel(gpu=GPU()), kernel(dtype=torch.float16), kernel(bits=8), kernel(group=32)]
    others += [kernel(outs=1024), kernel(inputs=1024), kernel(inputs=4608), kernel(inputs=20480)]
    assert set(others) == {Kernel.TILES}


def test_packed_weights_have_their_own_matmul_up_to_a_limit_of_rows() -> None:
    limit = H200.limits.packed_rows
    for gpu, kernel in ((GPU(), Kernel.TILES), (H200, Kernel.HOPPER_PACKED)):
        for bits in (4, 8):
            assert choose(Shape(4096, 4096, bits=bits), limit, BF16, gpu).kernel is kernel
            assert choose(Shape(4096, 4096, bits=bits), limit + 1, BF16, gpu).kernel is Kernel.UNPACKED
