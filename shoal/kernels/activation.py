"""Elementwise ops in Triton: activation(gate) * up, the cap of logits, and the embedding's rows.

T tokens · F intermediate · D hidden · V vocabulary. The oracle is reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.pdl import ORDINARY
from shoal.kernels.rounding import cdiv, next_power_of_2

BLOCK = 1024  # With 4 warps each thread has 8 elements, one access of 16 bytes.


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """An activation of float32 numbers, by the names of reference.py."""
    if ACTIVATION == "gelu_tanh":
        z = x * (1.5957691216 + 0.0713548163 * x * x)  # (1 + tanh(u)) / 2 is the sigmoid of 2u.
    else:
        z = x
    return x / (1.0 + tl.exp(-z))


@triton.jit
def _gate_mul_kernel(gate_up_ptr, out_ptr, F, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < F
    gate = tl.load(gate_up_ptr + token * 2 * F + columns, mask=mask).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * F + F + columns, mask=mask).to(tl.float32)
    hidden = (activate(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * F + columns, hidden, mask=mask)


def gate_mul(gate_up_T2F: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """Returns activation(gate) * up, [T, F]. The first half of the columns is gate, the second is up."""
    assert gate_up_T2F.is_contiguous()
    num_tokens, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = empty_matmul_input(gate_up_T2F, num_tokens, size)
    block = min(BLOCK, next_power_of_2(size))
    grid = (num_tokens, cdiv(size, block))
    _gate_mul_kernel[grid](gate_up_T2F, out_TF, size, ACTIVATION=activation, BLOCK=block)
    return out_TF


@triton.jit
def _soft_cap_kernel(logits_ptr, stride, V, cap, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ptrs, mask = logits_ptr + tl.program_id(0).to(tl.int64) * stride + columns, columns < V
    logits = tl.load(ptrs, mask=mask).to(tl.float32)
    # tanh(x) is 2 sigmoid(2x) - 1
    capped = cap * (2.0 / (1.0 + tl.exp(-2.0 * logits / cap)) - 1.0)
    tl.store(ptrs, capped.to(logits_ptr.dtype.element_ty), mask=mask)


def soft_cap(logits_SV: torch.Tensor, cap: float) -> None:
    """logits = cap * tanh(logits / cap), in place."""
    assert logits_SV.stride(1) == 1
    rows, size = logits_SV.shape
    _soft_cap_kernel[(rows, cdiv(size, BLOCK))](logits_SV, logits_SV.stride(0), size, cap, BLOCK=BLOCK)


@triton.jit
def _embed_kernel(ids_ptr, weight_ptr, out_ptr, D, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < D
    row = tl.load(ids_ptr + token).to(tl.int64)
    tl.store(out_ptr + token * D + columns, tl.load(weight_ptr + row * D + columns, mask=mask), mask=mask)


def embed(ids_T: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Returns the rows of `weight_VD` with these ids, [T, D]. The launch stays ordinary: it is the first of a
    step's layers, and the kernels after it rely on what was prepared before it (pdl.py)."""
    assert weight_VD.is_contiguous()
    num_tokens, size = ids_T.shape[0], weight_VD.shape[1]
    # a matmul reads it in models whose norms follow attention
    out_TD = empty_matmul_input(weight_VD, num_tokens, size)
    block = min(BLOCK, next_power_of_2(size))
    grid = (num_tokens, cdiv(size, block))
    _embed_kernel[grid](ids_T, weight_VD, out_TD, size, BLOCK=block, **ORDINARY)
    return out_TD
