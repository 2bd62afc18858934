"""Ropes over a part of a head or none, scaled queries, norms of v, heads of q alone, and gates of attention's
output: Triton's kernels in the interpreter and the CPU's ops, against the reference.

Ops differ by the order of sums and by exp and log: 1e-5 for float32. bfloat16 rounds to 8 bits
before the rotation too, which is one place of numbers up to 16.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from shoal.kernels import reference, triton_ops
from shoal.kernels.cpu import ops as cpu_ops
from shoal.kernels.layer_cache import LayerCache
from shoal.kinds.attention import QueryScaling

# where e^-|x| is nothing, the softplus divides 0 by 0 and does not use the result
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")

TOLERANCES = {torch.float32: dict(rtol=1e-5, atol=1e-5), torch.bfloat16: dict(rtol=2e-2, atol=2**-4)}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
OPS = pytest.mark.parametrize("ops", [triton_ops, cpu_ops], ids=["Triton", "CPU"])
HEADS, KV_HEADS, BLOCK_SIZE = 5, 2, 4
POSITIONS = torch.tensor([0, 2, 15, -1, 4, 9], dtype=torch.int32)
ROWS = torch.tensor([0, -1, 1, 2, 0, 1], dtype=torch.int32)
VARIANTS: dict[str, dict] = {
    "no rope": dict(rotary_dim=None),
    "no rope, no norm": dict(rotary_dim=None, norm=None),
    "a quarter": dict(rotary_dim=8),
    "three quarters, no norm": dict(rotary_dim=24, norm=None),
    "v_norm": dict(v_norm=True),
    "v_norm, no other norm": dict(v_norm=True, norm=None),
    "a norm in float32": dict(norm=torch.float32, v_norm=True),
    "scaled queries": dict(query_scaling=QueryScaling(0.3, 4)),
    "scaled queries, no rope": dict(query_scaling=QueryScaling(0.1, 5, 1), rotary_dim=None, norm=None),
    "q alone": dict(stores=False),
    "q alone, a part": dict(stores=False, rotary_dim=16, query_scaling=QueryScaling(0.3, 4)),
    "a small head": dict(head_dim=12, rotary_dim=6),
    "a large head": dict(head_dim=512, v_norm=True),
}


@DTYPES
@OPS
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_a_variant_of_rope_equals_the_reference(
    name: str, ops: ModuleType, dtype: torch.dtype, fp8: bool
) -> None:
    variant = dict(head_dim=32, rotary_dim=-1, norm=dtype) | VARIANTS[name]
    head_dim, rotary_dim, norm = (variant.pop(key) for key in ("head_dim", "rotary_dim", "norm"))
    torch.manual_seed(len(name))
    all_heads = HEADS + 2 * KV_HEADS * variant.get("stores", True)
    qkv = torch.randn(6, all_heads * head_dim).to(dtype)
    weights = [None if norm is None else torch.randn(head_dim).to(norm) for _ in "qk"]
    if not variant.get("stores", True):
        weights[1] = None
    cos_sin = None if rotary_dim is None else torch.randn(16, head_dim if rotary_dim < 0 else rotary_dim)
    tables = torch.randperm(12, dtype=torch.int32).view(3, 4)
    cache = torch.randn(12, 2, 2, KV_HEADS, BLOCK_SIZE, head_dim).to(dtype)
    if fp8:
        cache = cache.to(torch.float8_e4m3fn)
    results = []
    for each in (reference, ops):
        x, kv = qkv.clone(), cache.clone()
        layer = LayerCache(kv[:, 1], scales_2G=torch.ones(2, KV_HEADS) if fp8 else None)
        each.qk_norm_rope_store(x, *weights, 1e-6, cos_sin, POSITIONS, ROWS, tables, layer, **variant)
        results.append((x[(ROWS >= 0) & (POSITIONS >= 0)], kv.float()))
    (expected, expected_kv), (x, kv) = results
    torch.testing.assert_close(x, expected, **TOLERANCES[dtype])
    # a number between two of fp8 may become either one
    in_fp8 = dict(rtol=0.13, atol=2**-9 + TOLERANCES[dtype]["atol"])
    torch.testing.assert_close(kv, expected_kv, **(in_fp8 if fp8 else TOLERANCES[dtype]))
    assert torch.equal(kv[:, 0], cache[:, 0].float()), "another layer's cache was touched"


@DTYPES
@OPS
@pytest.mark.parametrize("activation", ["sigmoid", "softplus"])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (5, 24), (20, 128)])
@pytest.mark.parametrize("per_head", [False, True], ids=["an element", "a head"])
def test_a_gate_equals_the_reference(
    ops: ModuleType, dtype: torch.dtype, activation: str, heads: int, head_dim: int, per_head: bool
) -> None:
    out = torch.randn(7, heads * head_dim).to(dtype)
    gate = (20 * torch.randn(7, heads if per_head else heads * head_dim)).to(dtype)
    result = ops.gate_output(out, gate, activation)
    torch.testing.assert_close(result, reference.gate_output(out, gate, activation), **TOLERANCES[dtype])
