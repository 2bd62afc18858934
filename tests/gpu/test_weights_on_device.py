"""Packed weights unpacked on the GPU are those unpacked on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.weights.test_weights_quantized import KINDS, random_mxfp4, random_tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kind", [*KINDS, "MXFP4"])
def test_dequantizing_on_the_gpu_gives_the_same_bits(kind):
    tensor, expected = random_mxfp4(530, 1024) if kind == "MXFP4" else random_tensor(kind, 530, 1024)
    assert torch.equal(tensor.dequantize(device="cuda").cpu(), expected)
    assert torch.equal(tensor.dequantize(torch.bfloat16, "cuda").cpu(), expected.bfloat16())
