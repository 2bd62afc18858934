"""Random tensors in fewer bits, for tests of kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import gguf
import pytest
import torch

from shoal.kernels.quant.fp8_tensor import Fp8Tensor
from shoal.kernels.quant.gguf_tensor import GGUFTensor
from shoal.kernels.quant.int4_tensor import Int4Tensor
from shoal.kernels.quant.mxfp4_tensor import Mxfp4Tensor
from shoal.kernels.quant.nvfp4_tensor import Nvfp4Tensor
from shoal.kernels.quant.quantized_tensor import QuantizedTensor

FP8_CAPABILITY = (8, 9)
Make = Callable[[int, int], QuantizedTensor]


def int4(outs: int, inputs: int, group: int = 32, zeros: bool = True, shuffled: bool = False) -> Int4Tensor:
    count = inputs // group
    return Int4Tensor.of(
        torch.randint(0, 16, (outs, inputs), dtype=torch.uint8),
        (torch.rand(outs, count) + 0.5) / 8 / inputs**0.5,
        torch.randint(0, 17, (outs, count), dtype=torch.uint8) if zeros else None,
        (torch.arange(inputs) // group)[torch.randperm(inputs)] if shuffled else None,
    )


def mxfp4(outs: int, inputs: int) -> Mxfp4Tensor:
    quants = torch.randint(0, 256, (outs, inputs // 2), dtype=torch.uint8)
    return Mxfp4Tensor.of(quants, torch.randint(117, 122, (outs, inputs // 32), dtype=torch.uint8))


def nvfp4(outs: int, inputs: int) -> Nvfp4Tensor:
    quants = torch.randint(0, 256, (outs, inputs // 2), dtype=torch.uint8)
    groups = (torch.rand(outs, inputs // 16) * 400).to(torch.float8_e4m3fn).float()
    return Nvfp4Tensor.of(quants, groups / 800 / inputs**0.5)


def fp8(outs: int, inputs: int, group: int) -> Fp8Tensor:
    size = group or inputs
    data = (torch.randn(outs, inputs) * 60).to(torch.float8_e4m3fn)
    scales = (torch.rand(outs, -(-inputs // size)) + 0.5) / 60 / inputs**0.5
    return Fp8Tensor((outs, inputs), data, scales, size)


def q8_0(outs: int, inputs: int) -> GGUFTensor:
    weight = (torch.randn(outs, inputs) / inputs**0.5).numpy()
    data = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    return GGUFTensor("Q8_0", (outs, inputs), data)


KINDS: dict[str, Make] = {
    "fp8 by output": partial(fp8, group=0),
    "fp8 by 128": partial(fp8, group=128),
    "fp8 by 32": partial(fp8, group=32),
    "int4 by 128": partial(int4, group=128, zeros=False),
    "int4 by 32, zeros": partial(int4, group=32),
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "Q8_0": q8_0,
}


def skip_without_fp8(kind: str) -> None:
    if "fp8" in kind and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("needs a GPU with fp8")


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.float() - exact).norm() / exact.norm())
