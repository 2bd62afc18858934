"""Triton kernels against the reference, in the interpreter: odd shapes, float32 and float16 (bfloat16 is
silently wrong there).

Tolerances: float32 sums are only reordered (1e-5 of values near 1); a float16 result may round the other way
(2**-10 relative).
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from shoal.kernels import reference, rope, triton_ops
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.matmul.dispatch import ExpertTiles, RowTiles
from shoal.kernels.moe import reference as moe_reference
from shoal.kernels.moe.mixture import ExpertWeights
from shoal.kernels.moe.moe import moe_with
from shoal.kernels.state import FIELDS, StateLayout
from shoal.kinds.experts import Activation, Router

TOLERANCES = {torch.float32: dict(rtol=1e-5, atol=1e-5), torch.float16: dict(rtol=2e-3, atol=2e-3)}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture(autouse=True)
def seed() -> None:
    print("seed", torch.manual_seed(1234).initial_seed())


@DTYPES
@pytest.mark.parametrize(
    "shape",
    [
        (5, 123),
        (1, 1),
        (3, 64),
        (2, 576),
        (0, 64),
        (1, 2049),
        pytest.param((2049, 24), marks=pytest.mark.slow),
    ],
)
def test_norms_equal_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight = (
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn(shape[1]).to(dtype),
    )
    torch.testing.assert_close(
        triton_ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), **TOLERANCES[dtype]
    )
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-6)
    torch.testing.assert_close(
        triton_ops.add_rms_norm(x, residual, weight, 1e-6), expected, **TOLERANCES[dtype]
    )
    torch.testing.assert_close(residual, expected_residual, rtol=0, atol=0)


@DTYPES
@pytest.mark.parametrize("weights", [None, torch.float32], ids=["plain", "float32"])
@pytest.mark.parametrize("shape", [(5, 123), (1, 1), (2, 576), (0, 64)])
def test_norms_before_a_sum_equal_the_reference(
    shape: tuple[int, int], weights: torch.dtype | None, dtype: torch.dtype
) -> None:
    x, residual, first, second = (
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn(shape[1]).to(weights or dtype),
        torch.randn(shape[1]).to(weights or dtype),
    )
    torch.testing.assert_close(
        triton_ops.rms_norm(x, first, 1e-6), reference.rms_norm(x, first, 1e-6), **TOLERANCES[dtype]
    )
    ours, want = residual.clone(), residual.clone()
    assert triton_ops.add_normed(x, first, 1e-6, ours) is None
    reference.add_normed(x, first, 1e-6, want)
    torch.testing.assert_close(ours, want, **TOLERANCES[dtype])
    again = residual.clone()
    normed = triton_ops.add_normed(x, first, 1e-6, again, second, 1e-3)
    assert torch.equal(again, ours)
    torch.testing.assert_close(normed, reference.rms_norm(ours, second, 1e-3), **TOLERANCES[dtype])


@DTYPES
@pytest.mark.parametrize("weights", [None, torch.float32], ids=["rounded weights", "float32 weights"])
@pytest.mark.parametrize("shape", [(5, 123), (1, 2816), (3, 16), (0, 8)])
def test_norms_around_branches_equal_the_reference(shape, weights, dtype):
    x, beside, residual = (torch.randn(shape).to(dtype) for _ in range(3))
    first, *following = (torch.randn(shape[1]).to(weights or dtype) for _ in range(4))
    ours, want = residual.clone(), residual.clone()
    found = triton_ops.fork_norms(x, first, ours, following, 1e-6)
    expected = reference.fork_norms(x, first, want, following, 1e-6)
    torch.testing.assert_close(ours, want, **TOLERANCES[dtype])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCES[dtype])
    factor = torch.tensor([0.7]).to(dtype)
    for branch, branch_weights in ((None, ()), (beside, following[:2])):
        for times in (None, factor):
            ours, want = residual.clone(), residual.clone()
            rest = branch_weights, first
            triton_ops.join_norms(x, branch, *rest, ours, 1e-6, times)
            reference.join_norms(x, branch, *rest, want, 1e-6, times)
            torch.testing.assert_close(ours, want, **TOLERANCES[dtype])


@DTYPES
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("shape", [(5, 2 * 123), (1, 2), (3, 2 * 48), (2, 2 * 1536), (0, 8)])
def test_gate_mul_equals_the_reference(shape: tuple[int, int], activation: str, dtype: torch.dtype) -> None:
    x = torch.randn(shape).mul(3).to(dtype)
    ours, expected = triton_ops.gate_mul(x, activation), reference.gate_mul(x, activation)
    torch.testing.assert_close(ours, expected, **TOLERANCES[dtype])


@DTYPES
@pytest.mark.parametrize("size", [1, 123, 2100])
def test_soft_cap_equals_the_reference(size: int, dtype: torch.dtype) -> None:
    padded = torch.randn(3, size + 5).mul(50).to(dtype)
    ours, expected = padded.clone(), padded.clone()
    triton_ops.soft_cap(ours[:, :size], 30.0)
    reference.soft_cap(expected[:, :size], 30.0)
    torch.testing.assert_close(ours, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("size", [1, 123, 1100])
def test_embed_copies_rows(size: int) -> None:
    ids, weight = torch.tensor([3, 0, 3, 6], dtype=torch.int32), torch.randn(7, size)
    assert torch.equal(triton_ops.embed(ids, weight), weight[ids.long()])


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "norm", "block_size"),
    [
        (4, 2, 64, True, 16),
        (3, 1, 80, True, 1),
        (9, 3, 96, False, 4),
        (2, 2, 2, True, 256),
        (16, 8, 128, True, 16),
    ],
)
def test_rope_normalises_rotates_and_stores(
    heads: int, kv_heads: int, head_dim: int, norm: bool, block_size: int, dtype: torch.dtype
) -> None:
    tokens, num_blocks, rows = 6, 9, 3
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    weights = [torch.randn(head_dim).to(dtype) if norm else None for _ in "qk"]
    cos_sin = torch.randn(4 * block_size, head_dim)
    tables = torch.zeros(rows, FIELDS + 4, dtype=torch.int32)[:, FIELDS:]
    tables.copy_(torch.randperm(num_blocks)[:8].repeat(2)[:12].view(rows, 4))
    row_of = torch.tensor([0, -1, 1, 2, 0, 1], dtype=torch.int32)
    positions = torch.tensor([0, 2, 4 * block_size - 1, -1, block_size, 1], dtype=torch.int32)
    cache = torch.randn(num_blocks, 2, 2, kv_heads, block_size, head_dim).to(dtype)
    results = []
    for ops in (reference, triton_ops):
        x, kv = qkv.clone(), cache.clone()
        layer = LayerCache(kv[:, 1])
        ops.qk_norm_rope_store(x, *weights, 1e-6, cos_sin, positions, row_of, tables, layer)
        results.append((x[(row_of >= 0) & (positions >= 0)], kv))
    torch.testing.assert_close(results[1], results[0], **TOLERANCES[dtype])
    assert torch.equal(results[1][1][:, 0], cache[:, 0]), "another layer's cache was touched"


@pytest.mark.parametrize("one_wave", [1024, 2], ids=["one wave", "more than run at once"])
def test_many_tokens_take_more_heads_a_program(one_wave: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "ONE_WAVE", one_wave)
    tokens, kv_heads, head_dim = 65, 2, 16
    qkv, weight = torch.randn(tokens, 18 * head_dim), torch.randn(head_dim)
    positions, rows = torch.arange(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    tables = torch.randperm(5, dtype=torch.int32).view(1, 5)
    results = []
    for ops in (reference, triton_ops):
        x, kv = qkv.clone(), torch.zeros(5, 2, kv_heads, 16, head_dim)
        ops.qk_norm_rope_store(
            x, weight, weight, 1e-6, torch.ones(tokens, head_dim), positions, rows, tables, LayerCache(kv)
        )
        results.append((x, kv))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_k_that_nobody_reads_in_qkv_is_stored_in_the_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "ONE_WAVE", 2)
    tokens, heads, kv_heads, head_dim = 65, 5, 3, 16
    qkv, weight, cos_sin = (
        torch.randn(tokens, 11 * head_dim),
        torch.randn(head_dim),
        torch.randn(tokens, head_dim),
    )
    positions, rows = torch.arange(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    tables = torch.randperm(5, dtype=torch.int32).view(1, 5)
    results = []
    for keep_k in (True, False):
        x, kv = qkv.clone(), torch.zeros(5, 2, kv_heads, 16, head_dim)
        triton_ops.qk_norm_rope_store(
            x, weight, weight, 1e-6, cos_sin, positions, rows, tables, LayerCache(kv), keep_k
        )
        results.append((x.view(tokens, -1, head_dim), kv))
    (kept, kept_kv), (x, kv) = results
    assert (
        torch.equal(kv, kept_kv)
        and torch.equal(x[:, :heads], kept[:, :heads])
        and torch.equal(x[:, -kv_heads:], kept[:, -kv_heads:])
    )
    assert torch.equal(x[:, heads:-kv_heads], qkv.view(tokens, -1, head_dim)[:, heads:-kv_heads]), (
        "written for nobody"
    )


@DTYPES
@pytest.mark.parametrize(
    ("renormalise", "activation"), [(True, "silu"), (False, "silu"), (True, "relu2")], ids=str
)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "size"),
    [(1, 8, 2, 64, 48), (5, 5, 5, 33, 17), (40, 6, 3, 64, 48), (3, 200, 1, 16, 16), (0, 4, 2, 16, 16)],
)
@pytest.mark.parametrize(
    ("by_slot", "splits"), [(False, 1), (True, 1), (True, 2)], ids=["listed", "by slot", "split"]
)
def test_moe_equals_the_loop_over_experts(
    by_slot: bool,
    splits: int,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    size: int,
    renormalise: bool,
    activation: Literal["silu", "relu2"],
    dtype: torch.dtype,
) -> None:
    if by_slot:  # each slot has a program, of which the interpreter needs a tenth of a second
        tokens = min(tokens, 12)
    x, router = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, experts).to(dtype)
    router[:, 0] += 2  # one busy expert: several tiles
    router += torch.rand(experts) * 1e-2  # no ties, whose choice is free
    rows = 2 * size if activation == "silu" else size
    w13 = (torch.randn(experts, rows, hidden) / hidden**0.5).to(dtype)
    w2 = (torch.randn(experts, hidden, size) / size**0.5).to(dtype)
    tiles = ExpertTiles(*[RowTiles(16, 32, 16, 4, 2, splits)] * 2, by_slot)
    arguments = x, router, Router(top_k, renormalise), ExpertWeights(w13, w2), Activation(activation)
    result, expected = moe_with(tiles, *arguments), moe_reference.moe(*arguments)
    torch.testing.assert_close(result, expected, **TOLERANCES[dtype])
    residual = torch.randn(tokens, hidden).to(dtype)
    for combine, output, alone in ((moe_with, (tiles,), result), (moe_reference.moe, (), expected)):
        ours = residual.clone()
        assert combine(*output, *arguments, ours) is ours and torch.equal(ours, residual + alone)


def test_begin_decode_reads_the_active_rows() -> None:
    layout = StateLayout(num_rows=70, max_blocks=3)
    state = torch.randint(0, 1000, (layout.size,), dtype=torch.int32)
    rows = layout.active(state)
    rows.copy_(torch.randperm(70))
    rows[5] = rows[66:] = -1
    results = []
    for ops in (reference, triton_ops):
        out = [torch.full((68,), -9, dtype=torch.int32) for _ in range(3)]
        ops.begin_decode(rows[:68], layout.table(state), *out)
        results.append(out)
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert [int(out[66]) for out in results[1]] == [0, -1, 0]


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 5000])
def test_copied_ints_are_equal_and_nothing_behind_them_is_touched(size: int) -> None:
    src, dst = torch.arange(size, dtype=torch.int32) - 7, torch.full((size + 3,), 9, dtype=torch.int32)
    triton_ops.copy_ints(dst[:size], src)
    assert torch.equal(dst[:size], src) and (dst[size:] == 9).all()


@pytest.mark.parametrize("row_bytes", [256, 512 * 129])
def test_copied_rows_are_equal_and_other_rows_stay(row_bytes: int) -> None:
    src = torch.randint(0, 256, (5, row_bytes), dtype=torch.uint8)
    dst = torch.full((4, 2 * row_bytes), 9, dtype=torch.uint8)[:, :row_bytes]
    dst_rows, src_rows = (
        torch.tensor([3, -1, 0], dtype=torch.int32),
        torch.tensor([1, 4, 2], dtype=torch.int32),
    )
    expected = dst.clone()
    reference.copy_rows(expected, dst_rows, src, src_rows)
    triton_ops.copy_rows(dst, dst_rows, src, src_rows)
    assert torch.equal(dst, expected) and torch.equal(dst[3], src[1]) and torch.equal(dst[0], src[2])
    assert (dst[1:3] == 9).all()


@pytest.mark.parametrize("count", [1, 300])
def test_apply_updates_writes_each_address(count: int) -> None:
    state = torch.zeros(1000, dtype=torch.int32)
    addresses, values = (
        torch.randperm(1000, dtype=torch.int32)[:count],
        torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32),
    )
    triton_ops.apply_updates(state, addresses, values)
    expected = torch.zeros_like(state)
    reference.apply_updates(expected, addresses, values)
    assert torch.equal(state, expected) and int((state != 0).sum()) <= count
