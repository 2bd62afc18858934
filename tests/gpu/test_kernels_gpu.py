"""The Triton ops on a GPU at real sizes, against the reference.

bf16: a result is rounded to 8 bits (2**-9 relative) and may fall to the other side, twice where an
intermediate is rounded too: 2e-2.
fp32: sums are reordered: 2e-5; products of 2048 terms (ieee): 1e-4. What is copied, counted or drawn must be
equal.
"""

from __future__ import annotations

import math
import struct

import pytest
import torch

from shoal.kernels import reference, triton_ops
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.moe import reference as moe_reference
from shoal.kernels.moe.mixture import ExpertWeights
from shoal.kernels.sampling import reference as sampling_reference
from shoal.kernels.state import FIELDS, Field, StateLayout, seed_words
from shoal.kinds.experts import Activation, Router

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCES = {
    BF16: dict(rtol=2e-2, atol=2e-2),
    FP16: dict(rtol=4e-3, atol=4e-3),
    FP32: dict(rtol=2e-5, atol=2e-5),
}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture(autouse=True)
def seed() -> None:
    print("seed", torch.manual_seed(99).initial_seed())


def randn(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@DTYPES
@pytest.mark.parametrize(
    "shape", [(1, 1024), (257, 1024), (16384, 1024), (3, 16384), (5, 123), (64, 4096), (7, 1), (0, 64)]
)
def test_norms(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    torch.testing.assert_close(
        triton_ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), **TOLERANCES[dtype]
    )
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-6)
    torch.testing.assert_close(
        triton_ops.add_rms_norm(x, residual, weight, 1e-6), expected, **TOLERANCES[dtype]
    )
    assert torch.equal(residual, expected_residual)


@DTYPES
@pytest.mark.parametrize("weights", [None, FP32], ids=["plain", "float32"])
@pytest.mark.parametrize("shape", [(1, 3840), (257, 640), (16384, 5376), (5, 123), (0, 64)])
def test_norms_before_a_sum(shape: tuple[int, int], weights: torch.dtype | None, dtype: torch.dtype) -> None:
    x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    first, second = (randn(shape[1], dtype=weights or dtype) for _ in range(2))
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
@pytest.mark.parametrize("weights", [None, FP32], ids=["plain", "float32"])
@pytest.mark.parametrize("shape", [(1, 2816), (257, 640), (16384, 2816), (5, 123), (0, 64)])
def test_norms_around_branches(
    shape: tuple[int, int], weights: torch.dtype | None, dtype: torch.dtype
) -> None:
    """In bf16 the terms of a sum reach 16, where numbers are 1/8 apart."""
    close = dict(rtol=0.02, atol=0.125) if dtype == BF16 else TOLERANCES[dtype]
    x, beside, residual = (randn(*shape, dtype=dtype) for _ in range(3))
    first, *following = (randn(shape[1], dtype=weights or dtype) for _ in range(4))
    ours, want = residual.clone(), residual.clone()
    found = triton_ops.fork_norms(x, first, ours, following, 1e-6)
    expected = reference.fork_norms(x, first, want, following, 1e-6)
    torch.testing.assert_close((ours, *found), (want, *expected), **close)
    for branch in (None, beside):
        ours, want = residual.clone(), residual.clone()
        rest = branch, following[:2], first
        factor = torch.tensor([0.7], device=DEVICE).to(dtype)
        triton_ops.join_norms(x, *rest, ours, 1e-6, factor)
        reference.join_norms(x, *rest, want, 1e-6, factor)
        torch.testing.assert_close(ours, want, **close)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 256, 8192])
@pytest.mark.parametrize(("outs", "inputs"), [(64, 2048), (256, 7168), (37, 200)])
def test_matmuls_with_a_weight_in_float32(outs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    """Sums of `inputs` terms of about 1, in an order of their own: 1e-6 of their size for each."""
    x, weight, bias = randn(rows, inputs, dtype=dtype), randn(outs, inputs), randn(outs)
    exact = x.double() @ weight.double().T + bias.double()
    found = triton_ops.float_linear(x, weight, bias).double()
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-6 * inputs)
    norm_weight = randn(inputs, dtype=dtype)
    normed, of_norm = triton_ops.norm_float_linear(x, norm_weight, 1e-5, weight, bias)
    torch.testing.assert_close(normed, triton_ops.rms_norm(x, norm_weight, 1e-5), **TOLERANCES[dtype])
    exact = normed.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(of_norm.double(), exact, rtol=0, atol=2e-6 * inputs)


@DTYPES
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "size"), [(1, 3072), (16384, 3072), (3, 12288), (5, 123), (65537, 48)])
def test_gate_mul_and_embed(tokens: int, size: int, activation: str, dtype: torch.dtype) -> None:
    x = randn(tokens, 2 * size, dtype=dtype)
    ours, expected = triton_ops.gate_mul(x, activation), reference.gate_mul(x, activation)
    torch.testing.assert_close(ours, expected, **TOLERANCES[dtype])
    expected = x.clone()
    triton_ops.soft_cap(x, 3.0)
    reference.soft_cap(expected, 3.0)
    torch.testing.assert_close(x, expected, **TOLERANCES[dtype])
    ids = torch.randint(0, tokens, (257,), dtype=torch.int32, device=DEVICE)
    assert torch.equal(triton_ops.embed(ids, x), x[ids.long()])


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "norm"),
    [
        (1, 16, 8, 128, True),
        (256, 16, 8, 128, True),
        (16384, 32, 8, 128, True),
        (777, 9, 3, 64, False),
        (70, 4, 2, 80, True),
        (33, 3, 1, 96, False),
    ],
)
def test_rope_and_cache(
    tokens: int, heads: int, kv_heads: int, head_dim: int, norm: bool, dtype: torch.dtype
) -> None:
    blocks_per_row, block_size, rows = 64, 16, 17
    qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    weights = [randn(head_dim, dtype=dtype) if norm else None for _ in "qk"]
    cos_sin = randn(blocks_per_row * block_size, head_dim)
    tables = torch.randperm(rows * blocks_per_row, dtype=torch.int32, device=DEVICE).view(rows, -1)
    slots = torch.randperm(rows * blocks_per_row * block_size, device=DEVICE)[:tokens].int()
    row_of, positions = slots // (blocks_per_row * block_size), slots % (blocks_per_row * block_size)
    if tokens > 1:
        row_of[0], positions[1] = -1, -1
    results = []
    for ops in (reference, triton_ops):
        x, kv = (
            qkv.clone(),
            torch.zeros(
                rows * blocks_per_row, 2, 2, kv_heads, block_size, head_dim, dtype=dtype, device=DEVICE
            ),
        )
        layer = LayerCache(kv[:, 1])
        ops.qk_norm_rope_store(x, *weights, 1e-6, cos_sin, positions, row_of, tables, layer)
        results.append((x[(row_of >= 0) & (positions >= 0)], kv))
    # products of several normal numbers
    tolerance = {name: 4 * value for name, value in TOLERANCES[dtype].items()}
    torch.testing.assert_close(results[1], results[0], **tolerance)


def test_cache_offsets_beyond_31_bits() -> None:
    head_dim, block_size, num_layers = 128, 16, 64
    num_blocks = (1 << 31) // (num_layers * 2 * block_size * head_dim) + 2
    kv = torch.zeros(num_blocks, num_layers, 2, 1, block_size, head_dim, dtype=BF16, device=DEVICE)
    table = torch.full((1, 1), num_blocks - 1, dtype=torch.int32, device=DEVICE)
    zero, three = (torch.tensor([x], dtype=torch.int32, device=DEVICE) for x in (0, 3))
    qkv = randn(1, 3 * head_dim, dtype=BF16)
    cos_sin = torch.cat((torch.ones(8, head_dim // 2), torch.zeros(8, head_dim // 2)), dim=1).to(DEVICE)
    cache = LayerCache(kv[:, num_layers - 1])
    triton_ops.qk_norm_rope_store(qkv, None, None, 1e-6, cos_sin, three, zero, table, cache)
    assert torch.equal(kv[-1, -1, :, 0, 3], qkv.view(3, head_dim)[1:])


def make_table(params: list[tuple[float, int, float, float]], seeds: list[int]) -> torch.Tensor:
    layout = StateLayout(len(params), 5)
    table = layout.table(torch.zeros(layout.size, dtype=torch.int32))
    for row, ((temperature, top_k, top_p, min_p), request_seed) in enumerate(zip(params, seeds)):
        bits = [struct.unpack("i", struct.pack("f", x))[0] for x in (temperature, top_p, min_p)]
        table[row, Field.SEED_LOW], table[row, Field.SEED_HIGH] = seed_words(request_seed)
        (
            table[row, Field.TEMPERATURE],
            table[row, Field.TOP_K],
            table[row, Field.TOP_P],
            table[row, Field.MIN_P],
        ) = bits[0], top_k, *bits[1:]
    return table.to(DEVICE)


MIXED = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 50, 1.0, 0.0),
    (0.8, 0, 1.0, 0.05),
    (1.2, 0, 0.8, 0.01),
    (1.0, 5000, 0.99, 0.0),
    (3.0, 0, 0.95, 0.0),
    (0.6, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 0.999, 0.0),
]


@DTYPES
@pytest.mark.parametrize("scale", [0.5, 3.0])  # random weights' flat logits; a language model's peaked ones
@pytest.mark.parametrize(
    ("count", "vocab_size"), [(1, 151936), (12, 151936), (48, 151936), (24, 49152), (36, 32003), (24, 100)]
)
def test_sample_draws_the_reference_tokens(
    count: int, vocab_size: int, scale: float, dtype: torch.dtype
) -> None:
    table = make_table(
        [MIXED[i % len(MIXED)] for i in range(count)], [i * 0x1234567890ABCDE for i in range(count)]
    )
    logits = (randn(count, vocab_size) * scale).to(dtype)
    logits[:, 17] = -math.inf
    rows = torch.randperm(count, dtype=torch.int32, device=DEVICE)
    if count > 1:
        rows[3] = -1
    positions = torch.randint(0, 5000, (count,), dtype=torch.int32, device=DEVICE)
    out, state = torch.full((count,), -7, dtype=torch.int32, device=DEVICE), table.clone()
    triton_ops.sample(logits, rows, positions, state, out)
    expected, expected_state = torch.full((count,), -7, dtype=torch.int32), table.cpu()
    sampling_reference.sample(logits.cpu(), rows.cpu(), positions.cpu(), expected_state, expected)
    assert out.tolist() == expected.tolist()
    assert torch.equal(state.cpu(), expected_state)


@pytest.mark.parametrize("params", [(1.0, 0, 1.0, 0.0), (0.7, 20, 0.9, 0.0), (1.0, 0, 0.8, 0.01)])
def test_sample_follows_the_exact_distribution(params: tuple[float, int, float, float]) -> None:
    """60,000 positions of one row; the exact distribution is over what the reference's filters keep, in
    float64."""
    count, (temperature, top_k, top_p, min_p) = 60_000, params
    logits = (torch.randn(1000) * 2).to(BF16)
    out = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    positions = torch.arange(count, dtype=torch.int32, device=DEVICE)
    triton_ops.sample(
        logits.to(DEVICE).expand(count, -1),
        torch.zeros_like(positions),
        positions,
        make_table([params], [11]),
        out,
    )
    kept = sampling_reference.survivors(logits.float(), temperature, top_k, top_p, min_p)
    probs = torch.zeros(1000, dtype=torch.float64)
    probs[kept] = (logits[kept].double() / temperature).softmax(0)
    expected, observed = probs * count, torch.bincount(out.cpu(), minlength=1000)
    assert not observed[probs == 0].any()
    common = expected >= 5
    chi_square = float(((observed - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum())
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom), (chi_square, freedom)


def test_a_captured_decode_samples_like_an_eager_one() -> None:
    count, vocab_size = 12, 151936
    layout = StateLayout(count, 5)
    state = torch.zeros(layout.size, dtype=torch.int32, device=DEVICE)
    table, rows = layout.table(state), layout.active(state)
    table.copy_(make_table(MIXED, list(range(count))))
    start = state.clone()
    tokens, positions, kv_lens, out = (torch.zeros(count, dtype=torch.int32, device=DEVICE) for _ in range(4))
    weight = randn(vocab_size, 64, dtype=BF16)

    def step() -> None:
        triton_ops.begin_decode(rows, table, tokens, positions, kv_lens)
        triton_ops.sample(triton_ops.embed(tokens, weight) @ weight.T, rows, positions, table, out)

    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    runs = []
    for run in (step, graph.replay):
        state.copy_(start)
        addresses = torch.arange(
            layout.active_address, layout.active_address + count, dtype=torch.int32, device=DEVICE
        )
        triton_ops.apply_updates(state, addresses, torch.arange(count, dtype=torch.int32, device=DEVICE))
        drawn = []
        for _ in range(5):
            run()
            drawn.append(out.tolist())
        runs.append(drawn)
        assert table[:count, Field.POSITION].tolist() == [5] * count and kv_lens.tolist() == [5] * count
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "size"),
    [
        (1, 128, 8, 2048, 768),
        (7, 128, 8, 2048, 768),
        (300, 128, 8, 2048, 768),
        (4096, 128, 8, 2048, 768),
        (50, 256, 4, 128, 48),
        (2000, 4, 2, 66, 34),
        (0, 4, 2, 64, 64),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_moe(tokens: int, experts: int, top_k: int, hidden: int, size: int, dtype: torch.dtype) -> None:
    # in float32, so that no two experts tie
    x, router = randn(tokens, hidden, dtype=dtype), randn(tokens, experts, dtype=FP32)
    w13 = randn(experts, 2 * size, hidden, dtype=dtype).mul_(hidden**-0.5)
    w2 = randn(experts, hidden, size, dtype=dtype).mul_(size**-0.5)
    tolerance = TOLERANCES[BF16] if dtype == BF16 else dict(rtol=1e-4, atol=1e-4)
    for renormalise in (True, False):
        arguments = x, router, Router(top_k, renormalise), ExpertWeights(w13, w2), Activation()
        result = triton_ops.moe(*arguments)
        torch.testing.assert_close(result, moe_reference.moe(*arguments), **tolerance)
        residual = randn(tokens, hidden, dtype=dtype)
        expected = residual + result
        assert triton_ops.moe(*arguments, residual) is residual and torch.equal(residual, expected)


def test_a_captured_moe_follows_its_router() -> None:
    x, w13, w2 = (
        randn(16, 256, dtype=BF16),
        randn(32, 192, 256, dtype=BF16) / 16,
        randn(32, 256, 96, dtype=BF16) / 10,
    )
    router = randn(16, 32)
    arguments = Router(4, True), ExpertWeights(w13, w2), Activation()
    triton_ops.moe(x, router, *arguments)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = triton_ops.moe(x, router, *arguments)
    for _ in range(3):
        router.copy_(randn(16, 32))
        graph.replay()
        torch.testing.assert_close(out, moe_reference.moe(x, router, *arguments), **TOLERANCES[BF16])


def test_begin_decode_and_updates() -> None:
    layout = StateLayout(300, 9)
    state = torch.randint(0, 1000, (layout.size,), dtype=torch.int32, device=DEVICE)
    expected_state = state.clone()
    addresses = torch.randperm(layout.size, device=DEVICE)[:5000].int()
    values = torch.randint(0, 100, (5000,), dtype=torch.int32, device=DEVICE)
    triton_ops.apply_updates(state, addresses, values)
    reference.apply_updates(expected_state, addresses, values)
    assert torch.equal(state, expected_state)
    rows = torch.randperm(300, device=DEVICE).int()
    rows[280:] = -1
    results = [[torch.full((290,), -9, dtype=torch.int32, device=DEVICE) for _ in range(3)] for _ in range(2)]
    for ops, out in zip((reference, triton_ops), results):
        ops.begin_decode(rows[:290], layout.table(state), *out)
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert layout.table(state).stride(0) >= FIELDS + 9
