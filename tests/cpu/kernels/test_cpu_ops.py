"""The C ops against the PyTorch reference."""

import pytest
import torch
import torch.nn.functional as F

from shoal.kernels import reference
from shoal.kernels.cpu import build as cpu_build
from shoal.kernels.cpu import ops as cpu_ops
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.matmul import reference as matmul_reference
from shoal.kernels.sampling import reference as sampling_reference
from shoal.kernels.state import Field

pytestmark = pytest.mark.skipif(cpu_build.load() is None, reason="needs a C compiler")
CLOSE = dict(rtol=2e-6, atol=2e-6)  # float32 sums in another order


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def unaligned(*shape: int) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.randn(size + 1)[1:].view(shape)


@pytest.mark.parametrize("shape", [(1, 576), (3, 5), (17, 123), (600, 576)])
def test_norms_and_gates_are_the_references(shape):
    x, residual, weight = unaligned(*shape), torch.randn(shape), torch.randn(shape[1])
    torch.testing.assert_close(
        cpu_ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **CLOSE
    )
    want_residual = residual.clone()
    want = reference.add_rms_norm(x, want_residual, weight, 1e-5)
    torch.testing.assert_close(cpu_ops.add_rms_norm(x, residual, weight, 1e-5), want, **CLOSE)
    assert torch.equal(residual, want_residual)
    gate_up = unaligned(shape[0], 2 * shape[1])
    for activation in reference.ACTIVATIONS:
        expected = reference.gate_mul(gate_up, activation)
        torch.testing.assert_close(cpu_ops.gate_mul(gate_up, activation), expected, **CLOSE)
    next_weight, ours, want = torch.randn(shape[1]), residual.clone(), residual.clone()
    expected = reference.add_normed(x, weight, 1e-5, want, next_weight, 1e-3)
    torch.testing.assert_close(
        cpu_ops.add_normed(x, weight, 1e-5, ours, next_weight, 1e-3), expected, **CLOSE
    )
    torch.testing.assert_close(ours, want, **CLOSE)
    assert cpu_ops.add_normed(x, weight, 1e-5, residual) is None
    assert torch.equal(residual, ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("shape", [(1, 576, 64), (3, 5, 7), (17, 123, 1), (0, 8, 8)])
def test_matmuls_add_themselves_and_norms_do_without_a_sum(shape, bias, dtype):
    rows, columns, outs = shape
    x, weight, residual = (
        torch.randn(size, dtype=dtype) for size in ((rows, columns), (outs, columns), (rows, outs))
    )
    b, norm_weight = torch.randn(outs, dtype=dtype) if bias else None, torch.randn(columns, dtype=dtype)
    for ops in (cpu_ops, matmul_reference):
        ours = residual.clone()
        ops.linear_add(x, weight, b, ours)
        torch.testing.assert_close(ours, residual + F.linear(x, weight, b), rtol=0, atol=0)
        y, same = ops.add_norm_linear(None, x, norm_weight, 1e-5, weight, b, None)
        assert same is x and torch.equal(y, F.linear(ops.rms_norm(x, norm_weight, 1e-5), weight, b))


@pytest.mark.parametrize("shape", [(1, 5), (3, 20000), (0, 8)])
def test_caps_are_the_references(shape):
    logits = torch.randn(shape).mul(60)
    ours, expected = logits.clone(), logits.clone()
    cpu_ops.soft_cap(ours, 30.0)
    reference.soft_cap(expected, 30.0)
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_gates_saturate_and_keep_nan(activation):
    gate_up = torch.tensor([[-200.0, -100.0, -88.0, 0.0, 88.0, 100.0, 1e30, float("nan")] + [1.0] * 8])
    torch.testing.assert_close(
        cpu_ops.gate_mul(gate_up, activation),
        reference.gate_mul(gate_up, activation),
        rtol=1e-6,
        atol=1e-30,
        equal_nan=True,
    )


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (4, 4, 6, 1), (5, 1, 128, 256)]
)
def test_rope_rotates_in_place_and_stores_keys_and_values(norm, heads, kv_heads, head_dim, block_size):
    tokens, rows, blocks = 40, 5, 60
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim)
    tables = torch.zeros(rows, 16 + 12, dtype=torch.int32)[:, 16:]
    tables.copy_(torch.randperm(blocks)[: rows * 12].view(rows, 12))
    slots = torch.randperm(rows * min(12 * block_size, 100))[:tokens]  # no two tokens in one slot
    rows_T, positions_T = (slots % rows).int(), (slots // rows).int() % (12 * block_size)
    rows_T[3] = -1
    rows_T[7] = positions_T[7] = -1
    weights = [torch.randn(head_dim) for _ in range(2)] if norm else [None, None]
    cos_sin = torch.randn(100, head_dim)
    cache = torch.randn(blocks, 2, 2, kv_heads, block_size, head_dim)
    want_qkv, want_cache = qkv.clone(), cache.clone()
    for ops, q, kv in ((cpu_ops, qkv, cache), (reference, want_qkv, want_cache)):
        layer = LayerCache(kv[:, 1])
        ops.qk_norm_rope_store(q, *weights, 1e-6, cos_sin, positions_T, rows_T, tables, layer)
    real = positions_T >= 0
    torch.testing.assert_close(qkv[real], want_qkv[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, want_cache, rtol=1e-5, atol=1e-5)


def test_other_dtypes_go_to_the_reference():
    x, weight = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    assert torch.equal(cpu_ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(cpu_ops.gate_mul(x), reference.gate_mul(x))


SIZE, WIDTH = 1003, 32  # size of the vocabulary, width of a state row
FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (40, 1.0, 0.0),
    (5000, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.05, 0.0),
    (0, 1.0, 0.1),
    (50, 0.8, 0.02),
]


def state_rows(count: int, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    table = torch.zeros(count, WIDTH, dtype=torch.int32)
    table[:, Field.SEED_LOW], table[:, Field.SEED_HIGH] = torch.randint(
        -1 << 31, 1 << 31, (2, count), dtype=torch.int32
    )
    table[:, Field.TOP_K] = top_k
    floats = table.view(torch.float32)
    floats[:, Field.TEMPERATURE], floats[:, Field.TOP_P], floats[:, Field.MIN_P] = temperature, top_p, min_p
    return table


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.1, 0.8, 3.0])
@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0, 40.0])
def test_samples_are_the_references(filters, temperature, spread):
    count = 24
    logits = torch.randn(count, SIZE + 5)[:, :SIZE] * spread  # strided, as after a padded vocabulary
    logits[0, 10:] = -torch.inf
    logits[1, 500] = logits[1, 700] = logits[1].max() + 1  # ties at the top
    rows = torch.randperm(count + 2)[:count].int()
    rows[5] = -1
    positions = torch.randint(0, 5000, (count,), dtype=torch.int32)
    table = state_rows(count + 2, temperature, *filters)
    want_table, tokens, want = (
        table.clone(),
        torch.full((count,), -9, dtype=torch.int32),
        torch.full((count,), -9, dtype=torch.int32),
    )
    cpu_ops.sample(logits, rows, positions, table, tokens)
    sampling_reference.sample(logits, rows, positions, want_table, want)
    assert torch.equal(tokens, want) and torch.equal(table, want_table)


def test_drawn_tokens_have_the_softmax_distribution():
    count = 40_000
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf, 3.0]).expand(count, 5)
    table, tokens = state_rows(count, 0.7, 0, 1.0, 0.0), torch.zeros(count, dtype=torch.int32)
    cpu_ops.sample(
        logits, torch.arange(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32), table, tokens
    )
    shares = torch.bincount(tokens.long(), minlength=5) / count
    want = (logits[0] / 0.7).softmax(0)
    # five standard deviations
    assert ((shares - want).abs() < 5 * (want * (1 - want) / count).sqrt() + 1e-9).all()


def test_a_decode_step_begins_from_the_state_rows():
    table = torch.randint(0, 1000, (9, WIDTH), dtype=torch.int32)
    rows = torch.tensor([4, -1, 0, 8], dtype=torch.int32)
    got, want = ([torch.zeros(4, dtype=torch.int32) for _ in range(3)] for _ in range(2))
    cpu_ops.begin_decode(rows, table, *got)
    reference.begin_decode(rows, table, *want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("vocab_size", [1, 5, 31, 32, 33, 123, 32001, 49152])
def test_masks_are_the_references(vocab_size):
    words = -(-vocab_size // 32)
    for num_rows, masked in ((1, [0]), (4, []), (7, [5, 0, 2]), (6, [3, 5, 1, 0, 4, 2])):
        logits = torch.randn(num_rows, vocab_size + 3)[:, :vocab_size]  # rows of a wider matrix
        logits[0, 0] = torch.nan
        packed = torch.randint(-(2**31), 2**31, (len(masked), 1 + words)).int()
        packed[:1, 1:], packed[1:2, 1:] = 0, -1  # a mask that leaves nothing, and one that leaves all
        ours, wanted, rows = logits.clone(), logits.clone(), torch.tensor(masked, dtype=torch.long)
        cpu_ops.keep_bits(ours, rows, packed[:, 1:])
        sampling_reference.keep_bits(wanted, rows, packed[:, 1:])
        torch.testing.assert_close(ours, wanted, rtol=0, atol=0, equal_nan=True)
        others = [row for row in range(num_rows) if row not in masked]
        torch.testing.assert_close(ours[others], logits[others], rtol=0, atol=0, equal_nan=True)
