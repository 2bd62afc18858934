"""Experts whose weights stay in fewer bits, in Triton's interpreter, against the loop over unpacked experts in
float32, at odd shapes; what real models bring compiles without spills.

Tolerance: float16 has 11 bits. Scales, weights, gate, up, their product and results are each rounded to them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from triton_compile import check_kernels

from shoal.kernels import triton_ops
from shoal.kernels.matmul import gpu_fp8, gpu_weight
from shoal.kernels.matmul.gpu_fp8 import Fp8Weight
from shoal.kernels.matmul.loaders import Fp8Matrix, TiledWeight
from shoal.kernels.moe import reference
from shoal.kernels.moe.mixture import ExpertWeights
from shoal.kernels.moe.packed_experts import PackedExperts
from shoal.kernels.quant.fp8_tensor import Fp8Tensor
from shoal.kernels.quant.quantized_tensor import QuantizedTensor
from shoal.kinds.experts import Activation, Router
from tests.cpu.kernels.test_fp8 import tensor_of
from tests.cpu.kernels.test_packed import _gguf, _int4, _mxfp4, _nvfp4

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CAPABILITIES = (80, 89, 90)
LAUNCHES: dict[str, Callable[[], object]] = {}
Make = Callable[[int, int], QuantizedTensor]
FP8: dict[str, Make] = {
    "fp8 by output": lambda outs, inputs: tensor_of(outs, inputs, 0),
    "fp8 by 32": lambda outs, inputs: tensor_of(outs, inputs, 32),
    "fp8 by 128": lambda outs, inputs: tensor_of(outs, inputs, 128),
}
TILED: dict[str, Make] = {
    "int4": lambda outs, inputs: _int4(outs, inputs, inputs),
    "int4 by 16, zeros": lambda outs, inputs: _int4(outs, inputs, 16, zeros=True),
    "int4 by 32, zeros": lambda outs, inputs: _int4(outs, inputs, 32, zeros=True),
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "Q4_0": lambda outs, inputs: _gguf("Q4_0", outs, inputs),
    "Q8_0": lambda outs, inputs: _gguf("Q8_0", outs, inputs),
}


def stacked(tensors: list[QuantizedTensor], dtype: torch.dtype) -> PackedExperts:
    pack = gpu_fp8.pack if isinstance(tensors[0], Fp8Tensor) else gpu_weight.pack
    weight = pack(tensors, None, torch.device("cpu"), dtype)
    assert isinstance(weight, PackedExperts)
    return weight


class Case:
    """A layer of experts, packed, and what it makes of some tokens in float32."""

    def __init__(
        self,
        make: Make,
        tokens: int,
        experts: int,
        top_k: int,
        hidden: int,
        size: int,
        dtype: torch.dtype = FP16,
    ) -> None:
        print("seed", torch.manual_seed(51).initial_seed())
        gate_up = [make(size, hidden) for _ in range(2 * experts)]
        down = [make(hidden, size) for _ in range(experts)]
        self.w13 = torch.stack([part.dequantize() for part in gate_up]).view(experts, 2 * size, hidden)
        self.w2 = torch.stack([part.dequantize() for part in down])
        self.x, self.router = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, experts).to(dtype)
        self.router[:, 0] += 2  # one busy expert: several tiles
        self.router += torch.rand(experts) * 1e-2  # no ties, whose choice is free
        self.packed = stacked(gate_up, dtype), stacked(down, dtype)
        self.want = reference.moe(
            self.x.float(), self.router, Router(top_k, True), ExpertWeights(self.w13, self.w2), Activation()
        )
        self.rule, self.dtype = Router(top_k, True), dtype

    def moe(
        self, *weights: torch.Tensor | PackedExperts, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return triton_ops.moe(
            self.x, self.router, self.rule, ExpertWeights(*(weights or self.packed)), Activation(), residual
        )

    def check(self, *weights: torch.Tensor | PackedExperts) -> torch.Tensor:
        result = self.moe(*weights)
        share = 2e-3 if self.dtype == FP16 else 1e-5
        assert result.dtype == self.dtype
        assert (result.float() - self.want).norm() <= share * self.want.norm()
        return result


@pytest.mark.parametrize("kind", FP8)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "size"),
    [(1, 3, 2, 37, 19), (0, 3, 2, 64, 32), (7, 4, 2, 128, 256), (60, 3, 2, 256, 128), (5, 3, 3, 384, 48)],
)
def test_experts_in_fp8_equal_the_unpacked_ones(
    kind: str, tokens: int, experts: int, top_k: int, hidden: int, size: int
) -> None:
    Case(FP8[kind], tokens, experts, top_k, hidden, size).check()


@pytest.mark.parametrize("kind", FP8)
def test_float32_rows_are_multiplied_as_exactly_as_float32_does(kind: str) -> None:
    Case(FP8[kind], 9, 3, 2, 70, 20, FP32).check()


@pytest.mark.parametrize("kind", TILED)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "size"),
    [(1, 3, 2, 64, 96), (0, 3, 2, 64, 32), (7, 4, 2, 160, 32), (60, 3, 2, 96, 160), (5, 3, 3, 288, 64)],
)
def test_packed_experts_equal_the_unpacked_ones(
    kind: str, tokens: int, experts: int, top_k: int, hidden: int, size: int
) -> None:
    Case(TILED[kind], tokens, experts, top_k, hidden, size).check()


@pytest.mark.parametrize("kind", FP8 | TILED)
def test_the_residual_is_added_to_the_experts_sum(kind: str) -> None:
    case = Case((FP8 | TILED)[kind], 7, 4, 2, 160, 32)
    residual = torch.randn_like(case.x)
    ours = residual.clone()
    assert case.moe(residual=ours) is ours
    assert torch.equal(ours, residual + case.check())


@pytest.mark.parametrize("kind", FP8 | TILED)
def test_one_of_the_two_weights_may_be_plain(kind: str) -> None:
    case = Case((FP8 | TILED)[kind], 7, 4, 2, 160, 32)
    case.check(case.w13.to(case.dtype), case.packed[1])
    case.check(case.packed[0], case.w2.to(case.dtype))


def test_inputs_that_end_within_a_step_are_multiplied_once() -> None:
    Case(TILED["int4 by 16, zeros"], 7, 3, 2, 80, 48).check()
    Case(TILED["int4"], 7, 3, 2, 48, 16).check()


def _tiled(rows: int, inputs: int, bits: int, e2m1: bool, minima: bool) -> TiledWeight:
    group = 32 if e2m1 or bits == 8 else 128
    words = torch.empty(rows // 16, inputs * bits // 256, 32, 4, dtype=torch.int32)
    scales = torch.empty(rows // 16, inputs // group, 8, dtype=torch.int32)
    return TiledWeight((rows, inputs), BF16, bits, e2m1, group, words, scales, scales if minima else None)


def _fp8(rows: int, inputs: int, group: int) -> Fp8Weight:
    scales = torch.empty(inputs // group if group else 1, rows)
    return Fp8Weight(Fp8Matrix(torch.empty(rows, inputs, dtype=torch.float8_e4m3fn), scales, group), BF16)


def _launch(tokens: int, make: Callable[[int, int], PackedExperts]) -> None:
    """qwen3-30b-a3b's layer, of fewer experts."""
    with torch.device("meta"):  # only compiled
        x, router = torch.empty(tokens, 2048, dtype=BF16), torch.empty(tokens, 16, dtype=BF16)
        weights = ExpertWeights(make(16 * 2 * 768, 2048), make(16 * 2048, 768))
        triton_ops.moe(x, router, Router(8, True), weights, Activation())


for tokens in (1, 100, 4000):
    for form in ((4, False, False), (4, False, True), (4, True, False), (8, False, False), (8, False, True)):
        LAUNCHES[f"{tokens}, {form}"] = lambda tokens=tokens, form=form: _launch(
            tokens, lambda rows, inputs: _tiled(rows, inputs, *form)
        )
    for group in (0, 32, 128):
        LAUNCHES[f"{tokens}, fp8 by {group}"] = lambda tokens=tokens, group=group: _launch(
            tokens, lambda rows, inputs: _fp8(rows, inputs, group)
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", LAUNCHES)
def test_compiles_without_spills(compiled, case: str) -> None:
    """Returns the number of stages for Ada's shared memory, as an Ada would be asked. fp8 needs Ada or Hopper."""
    least = 89 if "fp8" in case else 80
    kernels = [kernel for kernel in compiled[case] if kernel.capability >= least]
    assert not any(kernel.error for kernel in kernels)
    check_kernels([kernel for kernel in kernels if kernel.capability != 89])
    assert not any(kernel.overwritten for kernel in kernels)
