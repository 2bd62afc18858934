"""The C ops against the PyTorch reference."""

import pytest
import torch

from shoal.kernels import cpu_build, cpu_ops, reference

pytestmark = pytest.mark.skipif(cpu_build.load() is None, reason="needs a C compiler")
CLOSE = dict(rtol=2e-6, atol=2e-6)    # float32 sums in another order


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def unaligned(*shape: int) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.randn(size + 1)[1:].view(shape)


@pytest.mark.parametrize("shape", [(1, 576), (3, 5), (17, 123), (600, 576)])
def test_norms_and_gates_are_the_references(shape):
    x, residual, weight = unaligned(*shape), torch.randn(shape), torch.randn(shape[1])
    torch.testing.assert_close(cpu_ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **CLOSE)
    want_residual = residual.clone()
    want = reference.add_rms_norm(x, want_residual, weight, 1e-5)
    torch.testing.assert_close(cpu_ops.add_rms_norm(x, residual, weight, 1e-5), want, **CLOSE)
    assert torch.equal(residual, want_residual)
    gate_up = unaligned(shape[0], 2 * shape[1])
    torch.testing.assert_close(cpu_ops.silu_mul(gate_up), reference.silu_mul(gate_up), **CLOSE)


def test_gates_saturate_and_keep_nan():
    gate_up = torch.tensor([[-200.0, -100.0, -88.0, 0.0, 88.0, 100.0, 1e30, float("nan")] + [1.0] * 8])
    torch.testing.assert_close(cpu_ops.silu_mul(gate_up), reference.silu_mul(gate_up), rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (4, 4, 6, 1), (5, 1, 128, 256)])
def test_rope_rotates_in_place_and_stores_keys_and_values(norm, heads, kv_heads, head_dim, block_size):
    tokens, rows, blocks = 40, 5, 60
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim)
    tables = torch.zeros(rows, 16 + 12, dtype=torch.int32)[:, 16:]
    tables.copy_(torch.randperm(blocks)[:rows * 12].view(rows, 12))
    slots = torch.randperm(rows * min(12 * block_size, 100))[:tokens]    # no two tokens in one slot
    rows_T, positions_T = (slots % rows).int(), (slots // rows).int() % (12 * block_size)
    rows_T[3] = -1
    rows_T[7] = positions_T[7] = -1
    weights = [torch.randn(head_dim) for _ in range(2)] if norm else [None, None]
    cos_sin = torch.randn(100, head_dim)
    cache = torch.randn(blocks, 2, 2, kv_heads, block_size, head_dim)
    want_qkv, want_cache = qkv.clone(), cache.clone()
    for ops, q, kv in ((cpu_ops, qkv, cache), (reference, want_qkv, want_cache)):
        ops.qk_norm_rope_store(q, *weights, 1e-6, cos_sin, positions_T, rows_T, tables, kv[:, 1], heads, kv_heads)
    real = positions_T >= 0
    torch.testing.assert_close(qkv[real], want_qkv[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, want_cache, rtol=1e-5, atol=1e-5)


def test_other_dtypes_go_to_the_reference():
    x, weight = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    assert torch.equal(cpu_ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(cpu_ops.silu_mul(x), reference.silu_mul(x))
