"""Matmuls with a weight in float32, in Triton's interpreter, equal exact ones, and compile."""

from __future__ import annotations

import pytest
import torch
from triton_compile import check_kernels

from shoal.kernels.matmul import float_linear as kernels
from shoal.kernels.matmul.float_linear import float_linear, norm_float_linear
from shoal.kernels.norm import rms_norm

# Routers of GLM-4.7-Flash, DeepSeek V3 and DeepSeek V2 Lite.
LAUNCHES = {
    f"{rows} rows, {outs} of {inputs}": lambda rows=rows, outs=outs, inputs=inputs: float_linear(
        torch.zeros(rows, inputs, dtype=torch.bfloat16), torch.zeros(outs, inputs), None
    )
    for outs, inputs in ((64, 2048), (256, 7168))
    for rows in (1, 4, 256, 2000)
} | {
    f"norm of {rows} rows": lambda rows=rows: norm_float_linear(
        torch.zeros(rows, 2048, dtype=torch.bfloat16),
        torch.zeros(2048, dtype=torch.bfloat16),
        1e-5,
        torch.zeros(64, 2048),
        None,
    )
    for rows in (1, 16)
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows, outs, inputs", [(1, 5, 100), (16, 7, 128), (0, 8, 16)])
def test_a_norm_before_is_rounded_as_a_kernel_of_its_own_rounds_it(rows, outs, inputs, dtype):
    torch.manual_seed(rows)
    x, norm_weight = torch.randn(rows, inputs).to(dtype), torch.randn(inputs).to(dtype)
    weight, bias = torch.randn(outs, inputs), torch.randn(outs)
    normed, found = norm_float_linear(x, norm_weight, 1e-5, weight, bias)
    assert torch.equal(normed, rms_norm(x, norm_weight, 1e-5))
    assert torch.equal(found, float_linear(normed, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "rows, outs, inputs", [(1, 5, 100), (3, 64, 128), (5, 37, 200), (70, 20, 130), (0, 8, 16)]
)
def test_it_is_as_exact_as_float32(rows, outs, inputs, bias, dtype):
    if rows > kernels.FEW_ROWS and dtype == torch.bfloat16:
        pytest.skip("the interpreter does not multiply bf16; tests/gpu/test_kernels_gpu.py does")
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outs, inputs)
    bias_O = torch.randn(outs) if bias else None
    exact = x.double() @ weight.double().T + (bias_O.double() if bias else 0)
    found = float_linear(x, weight, bias_O)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, atol=5e-5, rtol=5e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows, outs, inputs", [(17, 5, 100), (70, 20, 130), (40, 70, 600), (600, 5, 96)])
def test_many_rows_are_as_exact_with_weights_in_three_parts(rows, outs, inputs, bias, monkeypatch):
    """In fp16, whose parts have as many bits if weights are about 1."""
    monkeypatch.setattr(kernels, "SPLIT_TYPES", (torch.float16,))
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs).half(), torch.randn(outs, inputs)
    bias_O = torch.randn(outs) if bias else None
    exact = x.double() @ weight.double().T + (bias_O.double() if bias else 0)
    for _ in range(2):  # The counters are zeros again.
        found = float_linear(x, weight, bias_O)
        torch.testing.assert_close(found.double(), exact, atol=5e-5, rtol=5e-6)


@pytest.mark.parametrize("case", LAUNCHES)
def test_compiles(compiled, case):
    check_kernels(compiled[case])
