"""Kernels over an fp8 cache, Triton's in the interpreter and the CPU's own: what they write and what they make
of it, against torch's conversions and attention over the same numbers as plain ones.

Attention's tolerances are those over a plain cache (test_attention_kernels.py), as an fp8 number is exact in
float16. What is written is equal to the bit.
"""

from __future__ import annotations

import pytest
import torch

from shoal.attention import hopper_prefill as hopper_module
from shoal.attention.cpu import CpuBackend, TorchBackend
from shoal.attention.triton import TritonBackend
from shoal.kernels import reference, triton_ops
from shoal.kernels.attention.fp8_cache import unpack_blocks
from shoal.kernels.attention.paged_attention import PrefillWorkspace
from shoal.kernels.attention.reference import paged_attention
from shoal.kernels.cpu import build as cpu_build
from shoal.kernels.cpu import ops as cpu_ops
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.reference import to_fp8
from shoal.kernels.state import FIELDS
from shoal.layers.cpu_layers import CpuLayers
from tests.cpu.attention.test_attention_kernels import Case
from tests.cpu.attention.test_prefix_attention import MIXED, cascade
from tests.cpu.kernels.test_cpu_attention import STEPS, expected, make_step
from tests.cpu.layers.test_cpu_layers import (
    EPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    layer_caches,
    layer_weights,
    op_by_op,
)
from tests.head_shape import head_shape

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
# Every number of e4m3 and what lies between two of them: all roundings, ties, subnormals, and beyond.
EVERY = torch.arange(127, dtype=torch.uint8).view(FP8).float()
MIDDLES = (EVERY[1:] + EVERY[:-1]) / 2
EDGES = torch.cat((EVERY, MIDDLES, MIDDLES.nextafter(torch.tensor(0.0)), MIDDLES.nextafter(EVERY[1:])))
BEYOND = torch.tensor([448.5, 464.0, 479.9, 480.0, 1e30, 2.0**-10, 2.0**-11, 1e-30])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def written_by(ops, qkv, tables, kv_heads: int, head_dim: int, block_size: int, scales, blocks: int):
    """The whole cache, of bytes, after a step of a token a slot."""
    tokens = len(qkv)
    cos_sin = torch.cat((torch.ones(tokens, head_dim // 2), torch.zeros(tokens, head_dim // 2)), dim=1)
    positions, rows = torch.arange(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    positions[-1] = -1  # padding
    kv = torch.full((blocks, 2, 2, kv_heads, block_size, head_dim), 0x55, dtype=torch.uint8).view(FP8)
    ops.qk_norm_rope_store(
        qkv.clone(), None, None, EPS, cos_sin, positions, rows, tables, LayerCache(kv[:, 1], scales_2G=scales)
    )
    return kv.view(torch.uint8)


@pytest.mark.parametrize("ops", [triton_ops, cpu_ops, reference], ids=lambda ops: ops.__name__)
@pytest.mark.parametrize(("scale", "block_size"), [(1.0, 16), (0.37, 1)])
def test_numbers_are_rounded_to_nearest_even_and_do_not_overflow(ops, scale: float, block_size: int) -> None:
    numbers = torch.cat((EDGES, BEYOND, torch.randn(500) * 30))
    numbers = torch.cat((numbers, -numbers)) * scale
    heads, kv_heads, head_dim = 2, 3, 16
    tokens = -(-len(numbers) // (kv_heads * head_dim))
    keys = torch.zeros(tokens * kv_heads * head_dim)
    keys[: len(numbers)] = numbers
    keys = keys.view(tokens, -1)
    qkv = torch.cat((torch.randn(tokens, heads * head_dim), keys, keys.flip(1)), dim=1)
    blocks = -(-tokens // block_size)
    tables = torch.zeros(1, FIELDS + blocks, dtype=torch.int32)[:, FIELDS:]
    tables[0] = torch.randperm(blocks)
    scales = torch.tensor([[scale, scale * 2, scale], [1.0, scale, 0.5]])
    got = written_by(ops, qkv, tables, kv_heads, head_dim, block_size, scales, blocks)
    assert (got[:, 0] == 0x55).all(), "another layer's cache was touched"
    shape = (tokens, kv_heads, head_dim)
    for kind, x in enumerate((keys.view(shape), keys.flip(1).view(shape))):
        want = (x / scales[kind, :, None]).clamp(-448, 448).to(FP8).float()
        for token in range(tokens - 1):
            slot = got[tables[0, token // block_size], 1, kind, :, token % block_size]
            assert torch.equal(slot.view(FP8).float(), want[token]), token
    padded = got[tables[0, (tokens - 1) // block_size], 1, :, :, (tokens - 1) % block_size]
    assert (padded == 0x55).all(), "padding was written"


@pytest.mark.parametrize("ops", [triton_ops, cpu_ops, reference], ids=lambda ops: ops.__name__)
def test_what_is_no_number_stays_none(ops) -> None:
    qkv = torch.full((2, 3 * 16), float("nan"))
    tables = torch.zeros(1, FIELDS + 1, dtype=torch.int32)[:, FIELDS:]
    got = written_by(ops, qkv, tables, 1, 16, 16, torch.ones(2, 1), 1)
    assert got.view(FP8)[0, 1, :, 0, 0].float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rope_in_any_dtype_writes_what_the_reference_writes(dtype: torch.dtype) -> None:
    tokens, kv_heads, head_dim = 70, 2, 80
    qkv, weight = torch.randn(tokens, 10 * head_dim).to(dtype), torch.randn(head_dim).to(dtype)
    positions, rows = torch.arange(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    tables, scales = torch.randperm(5, dtype=torch.int32).view(1, 5), torch.rand(2, kv_heads) + 0.1
    cos_sin = torch.randn(tokens, head_dim)
    results = []
    for ops in (reference, triton_ops):
        x, kv = qkv.clone(), torch.zeros(5, 2, kv_heads, 16, head_dim, dtype=torch.uint8).view(FP8)
        cache = LayerCache(kv, scales_2G=scales)
        ops.qk_norm_rope_store(x, weight, weight, EPS, cos_sin, positions, rows, tables, cache)
        results.append((x, kv.float()))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(results[1][0], results[0][0], atol=tolerance, rtol=tolerance)
    # A sum in another order may be rounded to the neighbour, which is 2**-3 of the number or 2**-9 away.
    torch.testing.assert_close(results[1][1], results[0][1], atol=2**-9, rtol=2**-3)
    assert (results[1][1] == results[0][1]).float().mean() > 0.99


# Triton's attention


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (9, 3), (20, 1)])
def test_decode(splits: int, heads: tuple[int, int]) -> None:
    Case([(1, n) for n in (0, 1, 7, 8, 9, 17, 64, 100)], *heads).in_fp8().decode(splits)


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(16, 1), (64, 16), (80, 16), (96, 256), (128, 16), (256, 4)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_head_size_block_size_and_dtype(head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    Case([(1, 37), (1, 18)], 4, 2, head_dim, block_size, dtype).in_fp8().decode(splits=2)
    Case([(21, 21), (3, 40)], 4, 2, head_dim, block_size, dtype).in_fp8().prefill()


@pytest.mark.parametrize("window", [1, 16, 33])
def test_windows(window: int) -> None:
    Case([(1, 70), (1, 33), (1, 4), (1, 0)]).in_fp8().decode(splits=3, window=window)
    Case([(20, 70), (2, 50), (40, 40)]).in_fp8().prefill(window)


def test_a_large_batch_of_which_the_longest_are_cut() -> None:
    Case([(1, 200), (1, 70), (1, 9), (1, 0)]).in_fp8().decode(3, num_cut=2)


def test_prefill_of_whole_sequences_and_of_chunks() -> None:
    Case([(1, 30), (5, 37), (16, 32), (20, 20), (33, 70)], 9, 3).in_fp8().prefill()


def test_the_keys_of_short_chunks_are_split() -> None:
    workspace = PrefillWorkspace.allocate(2000, 2, 16, torch.float32, CPU)
    Case([(1, 100), (5, 80), (16, 32), (20, 20)]).in_fp8().prefill(splits=3, workspace=workspace)
    assert not workspace.arrived.any()


@pytest.mark.parametrize("splits", [1, 3])
def test_shared_prefixes(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.kernels.attention.prefix_attention.MIN_PART", 16)
    cascade(Case(MIXED).in_fp8(), [([0, 3, 5], 7), ([8, 1, 4, 7], 8)], splits)
    cascade(Case(MIXED, 9, 3, 80, 8, torch.float16).in_fp8(), [([0, 3, 5], 7)], splits, block_m=32)


@pytest.mark.parametrize("prefills", [[], [(9, 9), (30, 30)], [(9, 30), (12, 12)]])
def test_the_backend_answers_mixed_steps(prefills: list[tuple[int, int]]) -> None:
    decodes = [(1, 1), (1, 130), (1, 0), (1, 17)]
    case = Case(decodes + prefills, num_decodes=len(decodes)).in_fp8()
    backend = TritonBackend(head_shape(4, 2, 16), 8, 8, 256, CPU, torch.float32, fp8_cache=True)
    backend.begin(case.step)
    for window in (None, 10):
        out = backend.attend(case.q, case.k, case.v, case.cache(window), case.step)
        case.check(out, window)
        assert not backend.reads_k(case.cache(window))


def test_the_backend_answers_padded_mixed_steps() -> None:
    case = Case([(1, 40), (1, 9), (9, 30), (1, 12), (16, 16)], 6, 2, num_decodes=2).in_fp8()
    backend = TritonBackend(head_shape(6, 2, 16), 8, 8, 256, CPU, torch.float32, fp8_cache=True)
    case.check_padded(backend, (64, 3, 9))


# Hopper's prefills


@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (1, 16), (8, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_become_plain_numbers(block_size: int, head_dim: int, dtype: torch.dtype) -> None:
    packed = torch.randint(0, 256, (9, 3, 2, 3, block_size, head_dim), dtype=torch.uint8)
    packed[packed & 0x7F == 0x7F] = 0  # The interpreter takes the bits of NaN for a number.
    kv_layer = packed.view(FP8)[:, 1]
    scales, blocks = torch.rand(2, 3) + 0.1, torch.tensor([7, 0, 7, 8], dtype=torch.int32)
    got = unpack_blocks(LayerCache(kv_layer, scales_2G=scales), blocks, dtype)
    want = (kv_layer.float() * scales[:, :, None, None])[blocks.long()].to(dtype)
    assert torch.equal(got, want)


def test_large_prefills_go_to_hoppers_kernel_as_plain_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_plain_torch(
        q_THN, kv_layer, out_THN, work, taken, rows_S, tables_RM, scale, num_sms, sinks_H, window
    ) -> None:
        launched.append(len(kv_layer))
        assert kv_layer.dtype == q_THN.dtype
        for token, count, position, seq in work.tolist():
            blocks = -(-(position + count) // kv_layer.shape[3])
            # as the kernel reads a table: from its row on, whatever the row's length
            table = tables_RM.as_strided((1, blocks), (1, 1), int(rows_S[seq]) * tables_RM.stride(0))
            tile = slice(token, token + count)
            out_THN[tile] = paged_attention(
                q_THN[tile],
                kv_layer,
                torch.tensor([0, count]),
                torch.tensor([position + count]),
                torch.zeros(1, dtype=torch.int32),
                table,
                scale,
            )

    launched: list[int] = []
    monkeypatch.setattr(hopper_module.hopper, "is_supported", lambda *_: True)
    monkeypatch.setattr(hopper_module.hopper, "hopper_prefill_attention", in_plain_torch)
    monkeypatch.setattr(hopper_module, "HOPPER_FROM", 100)
    for prefills, blocks in (
        ([(99, 120)], 0),  # too small
        ([(100, 100)], 13),
        ([(3, 3), (97, 200), (1, 9)], 1 + 25 + 2),
        ([(100, 200), (1, 57)], 0),  # more keys than the longest sequence may have
    ):
        case = Case([(1, 30), (1, 0), *prefills], num_decodes=2).in_fp8()
        backend = TritonBackend(head_shape(4, 2, 16), 8, 8, 256, CPU, torch.float32, fp8_cache=True)
        backend.begin(case.step)
        launched.clear()
        for window in (None, 10):
            out = backend.attend(case.q, case.k, case.v, case.cache(window), case.step)
            case.check(out, window)
        assert launched == ([blocks] if blocks else [])


# The CPU's attention


def fp8_of(kv_layer: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The cache in fp8, a strided view as a layer sees it."""
    fp8 = to_fp8(kv_layer, scales[:, :, None, None])
    whole = torch.zeros(len(fp8), 2, *fp8.shape[1:], dtype=torch.uint8)
    whole[:, 1] = fp8.view(torch.uint8)
    return whole.view(FP8)[:, 1]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (2, 2, 6, 1), (70, 1, 24, 256)]
)
def test_the_cpu_attends_to_the_numbers_that_the_cache_means(
    window, name, heads, kv_heads, head_dim, block_size
) -> None:
    torch.manual_seed(0)
    qkv, kv_layer, step = make_step(STEPS[name], heads, kv_heads, head_dim, block_size)
    scales = torch.rand(2, kv_heads) + 0.1
    cache = fp8_of(kv_layer, scales)
    meant = cache.float() * scales[:, :, None, None]
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    want = expected(q, meant, step, window)
    k, v = torch.full_like(k, float("nan")), torch.full_like(v, float("nan"))
    shape = head_shape(heads, kv_heads, head_dim)
    if cpu_build.load() is not None:
        backend = CpuBackend(shape)
        backend.begin(step)
        got = backend.attend(q, k, v, LayerCache(cache, window=window, scales_2G=scales), step)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    # a masked key's weight is zero in PyTorch, and zero times nan is nan
    clean = LayerCache(fp8_of(kv_layer.nan_to_num(), scales), window=window, scales_2G=scales)
    plain = TorchBackend(shape)
    got = plain.attend(q, k, v, clean, step)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    half = plain.attend(q.bfloat16(), k, v, clean, step)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), want, rtol=3e-2, atol=3e-2)  # bf16: 8 bits


@pytest.mark.skipif(cpu_build.load() is None, reason="needs a C compiler")
def test_the_cpu_reads_every_number_as_torch_does() -> None:
    """A query of zeros weighs all keys alike, so one key's value is the result."""
    bytes_ = torch.arange(256, dtype=torch.uint8).view(4, 1, 1, 1, 64)
    kv_layer = torch.zeros(4, 2, 1, 1, 64, dtype=torch.uint8)
    kv_layer[:, 1] = bytes_[:, 0]
    _, _, step = make_step([(1, 1)] * 4, 1, 1, 64, 1)
    step.block_tables[0][step.rows_S.long(), 0] = torch.arange(4, dtype=torch.int32)
    cache = LayerCache(kv_layer.view(FP8), scales_2G=torch.ones(2, 1))
    got = CpuBackend(head_shape(1, 1, 64)).attend(*[torch.zeros(4, 1, 64)] * 3, cache, step)
    want = bytes_.view(FP8).float().view(4, 1, 64)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(cpu_build.load() is None, reason="needs a C compiler")
@pytest.mark.parametrize("sequences", [[(1, 20)], [(1, 9), (1, 0), (7, 30), (40, 40)]])
def test_all_layers_in_one_call_do_what_the_ops_do(sequences) -> None:
    torch.manual_seed(0)
    all_scales = torch.rand(3, 2, KV_HEADS) + 0.1
    weights = [layer_weights(seed, True, True) for seed in range(3)]
    _, _, step = make_step(sequences, HEADS, KV_HEADS, HEAD_DIM, 16)
    rows = torch.cat([step.rows_S[i : i + 1].repeat(q) for i, (q, _) in enumerate(sequences)])
    positions = torch.cat([torch.arange(kv - q, kv, dtype=torch.int32) for q, kv in sequences])
    step = type(step)(
        **{name: getattr(step, name) for name in step.__slots__} | {"rows_T": rows, "positions_T": positions}
    )
    blocks = int(step.block_tables[0].max()) + 1
    kv = to_fp8(torch.randn(blocks, 3, 2, KV_HEADS, 16, HEAD_DIM), torch.ones(()))
    residual, ropes = torch.randn(len(rows), HIDDEN), [torch.randn(64, HEAD_DIM)] * 3
    want_residual, want_kv = residual.clone(), kv.clone()
    want = op_by_op(weights, want_residual, step, layer_caches(want_kv, None, all_scales), ropes)
    layers = CpuLayers(weights, HEADS, EPS, HEAD_DIM**-0.5)
    got = layers(residual, step, layer_caches(kv, None, all_scales), ropes)
    real = positions >= 0
    assert torch.equal(got[real], want[real]) and torch.equal(residual[real], want_residual[real])
    assert torch.equal(kv.view(torch.uint8), want_kv.view(torch.uint8))
