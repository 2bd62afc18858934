"""Attention on the CPU, both ways, against one softmax a sequence."""

import itertools
from dataclasses import replace

import pytest
import torch

from shoal.attention.cpu import CpuBackend, TorchBackend
from shoal.attention.step_input import HostView, StepInput
from shoal.kernels.cpu import build as cpu_build
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.reference import to_fp8
from tests.head_shape import head_shape


def make_step(
    sequences: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    decode_queries: int = 1,
) -> tuple[torch.Tensor, ...]:
    """qkv heads, cache and step of (query tokens, cached tokens) sequences, decodes first; (1, 0) is
    padding. Decodes have `decode_queries` tokens."""
    lens, queries = [kv for _, kv in sequences], [q for q, _ in sequences]
    width = max(1, *(-(-kv // block_size) for kv in lens)) + 1
    num_blocks, size = len(sequences) * width + 3, len(sequences)
    # what is past a sequence's end must not be read
    state = torch.full((size + 2, 16 + width), -1 << 30, dtype=torch.int32)
    rows = torch.randperm(size + 2)[:size].int()
    free = iter(torch.randperm(num_blocks).tolist())
    cache = torch.full((num_blocks, 2, 2, kv_heads, block_size, head_dim), float("nan"))
    starts = [0, *itertools.accumulate(queries)]
    qkv = torch.randn(starts[-1], heads + 2 * kv_heads, head_dim)
    for i, (query_len, kv_len) in enumerate(sequences):
        for position in range(kv_len):
            if position % block_size == 0:
                state[rows[i], 16 + position // block_size] = next(free)
            kv = torch.randn(2 * kv_heads, head_dim)
            if position >= kv_len - query_len:
                kv = qkv[starts[i] + position - kv_len + query_len, heads:]
            block = int(state[rows[i], 16 + position // block_size])
            cache[block, 1, :, :, position % block_size] = kv.view(2, kv_heads, head_dim)
        if kv_len == 0:
            rows[i] = -1
    num_decodes = next((i for i, (q, _) in enumerate(sequences) if q != decode_queries), size)
    tokens = torch.zeros(starts[-1], dtype=torch.int32)
    step = StepInput(
        token_ids_T=tokens,
        positions_T=tokens,
        rows_T=tokens,
        rows_S=rows,
        query_starts_S=torch.tensor(starts, dtype=torch.int32),
        kv_lens_S=torch.tensor(lens, dtype=torch.int32),
        block_tables=(state[:, 16:],),
        num_decodes=num_decodes,
        max_kv_len=max(lens),
        queries=decode_queries,
        fresh_prefills=False,
        host=HostView(tuple(starts), tuple(lens)),
    )
    return qkv, cache[:, 1], step


def expected(
    q_THN,
    kv_layer,
    step: StepInput,
    window: int | None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    in_chunks: bool = False,
) -> torch.Tensor:
    out = torch.zeros_like(q_THN)
    block_size, repeat = kv_layer.shape[3], q_THN.shape[1] // kv_layer.shape[2]
    for i, (start, end) in enumerate(itertools.pairwise(step.host.query_starts)):
        keys = torch.arange(step.host.kv_lens[i])
        positions = torch.arange(start - end, 0) + len(keys)
        if not len(keys):
            continue
        kv = kv_layer[
            step.block_tables[0][step.rows_S[i], keys // block_size].long(), :, :, keys % block_size
        ]
        k, v = kv.repeat_interleave(repeat, dim=2).double().unbind(1)
        scores = torch.einsum("thn,lhn->htl", q_THN[start:end].double() * q_THN.shape[2] ** -0.5, k)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = (keys <= positions[:, None]) & (keys > positions[:, None] - (window or len(keys)))
        if in_chunks:
            seen = (keys <= positions[:, None]) & (keys // window == positions[:, None] // window)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks_H is not None:
            sinks = sinks_H.double()[:, None, None].expand(-1, end - start, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        weights[:, positions < 0] = 0  # padding
        out[start:end] = torch.einsum("htl,lhn->thn", weights, v).to(out.dtype)
    return out


STEPS = {
    "decodes": [(1, 1), (1, 17), (1, 300)],
    "padded decodes": [(1, 5), (1, 0), (1, 33), (1, 0)],
    "one long decode": [(1, 1500)],
    "fresh prefills": [(7, 7), (130, 130)],
    "chunks": [(3, 40), (100, 260), (2, 3)],
    "mixed": [(1, 70), (1, 2), (9, 9), (50, 90)],
}


@pytest.mark.parametrize(
    ("window", "in_chunks", "threads"),
    [
        (None, False, 1),
        (None, False, 2),
        (1, False, 2),
        (20, False, 1),
        (1, True, 1),
        (20, True, 2),
        (100, True, 1),
    ],
)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (2, 2, 6, 1), (70, 1, 24, 256)]
)
def test_attention_is_softmax_over_the_paged_cache(
    window, in_chunks, threads, name, heads, kv_heads, head_dim, block_size
):
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    qkv, kv_layer, step = make_step(STEPS[name], heads, kv_heads, head_dim, block_size)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    shape = head_shape(heads, kv_heads, head_dim)
    want = expected(q, kv_layer, step, window, in_chunks=in_chunks)
    if cpu_build.load() is not None:
        backend = CpuBackend(shape)
        backend.begin(step)
        got = backend.attend(q, k, v, LayerCache(kv_layer, window=window, in_chunks=in_chunks), step)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    # A masked key's weight is zero in PyTorch, and zero times nan is nan
    clean = LayerCache(kv_layer.nan_to_num(), window=window, in_chunks=in_chunks)
    got = TorchBackend(shape).attend(q, k, v, clean, step)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.set_num_threads(before)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("softcap", "sinks"), [(None, True), (0.5, False), (2.0, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), [(9, 3, 64, 8), (32, 2, 12, 24)])
def test_scores_are_capped_and_sinks_join_the_softmax(
    window, name, softcap, sinks, heads, kv_heads, head_dim, block_size
):
    """Blocks behind windows are other sequences' now. Keys and values are another layer's, in the cache."""
    torch.manual_seed(0)
    qkv, kv_layer, step = make_step(STEPS[name], heads, kv_heads, head_dim, block_size)
    q = qkv[:, :heads]
    sinks_H = 2 * torch.randn(heads) if sinks else None
    want = expected(q, kv_layer, step, window, softcap, sinks_H)
    clean = kv_layer.nan_to_num()
    if window is not None:
        clean = torch.cat((clean, torch.full_like(clean[:1], float("nan"))))  # a block that is not to be read
        for row, query_len, kv_len in zip(step.rows_S, step.query_starts_S.diff(), step.kv_lens_S):
            behind = max(0, int(kv_len - query_len) - window + 1) // block_size
            step.block_tables[0][row, :behind] = len(clean) - 1
    backends = [TorchBackend] if cpu_build.load() is None else [TorchBackend, CpuBackend]
    shape = replace(head_shape(heads, kv_heads, head_dim), softcap=softcap)
    for build in backends:
        backend = build(shape)
        backend.begin(step)
        got = backend.attend(q, None, None, LayerCache(clean, window=window), step, sinks_H=sinks_H)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("queries", [1, 2, 8, 25])
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_decodes_of_several_tokens_are_causal_among_themselves(kv_heads, queries, window, is_fp8):
    """In the decode with 9 tokens in the cache, the first 16 of 25 queries are padding."""
    torch.manual_seed(0)
    sequences = [(queries, 300), (queries, 0), (queries, 40), (queries, 9), (5, 7)]
    qkv, kv_layer, step = make_step(sequences, 8, kv_heads, 24, 16, queries)
    assert step.num_decodes == 4 and step.max_prefill_tokens == 5
    q, k, v = qkv.split((8, kv_heads, kv_heads), dim=1)
    clean, scales = kv_layer.nan_to_num(), None
    want = expected(q, kv_layer, step, window)
    if is_fp8:
        scales = torch.rand(2, kv_heads) + 0.1
        clean = to_fp8(clean, scales[:, :, None, None])
        want = expected(q, clean.float() * scales[:, :, None, None], step, window)
    shape, cache = head_shape(8, kv_heads, 24), LayerCache(clean, window=window, scales_2G=scales)
    for backend in [TorchBackend(shape), *([CpuBackend(shape)] if cpu_build.load() is not None else [])]:
        backend.begin(step)
        got = backend.attend(q, k, v, cache, step)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_other_dtypes_take_the_pytorch_path():
    torch.manual_seed(0)
    qkv, kv_layer, step = make_step(STEPS["mixed"], 4, 2, 32, 16)
    half, cache = qkv.bfloat16(), kv_layer.nan_to_num().bfloat16()
    q, k, v = half.split((4, 2, 2), dim=1)
    got = TorchBackend(head_shape(4, 2, 32)).attend(q, k, v, LayerCache(cache), step)
    assert got.dtype == torch.bfloat16
    # bf16: 8 bits
    torch.testing.assert_close(
        got.float(), expected(q.float(), cache.float(), step, None), rtol=2e-2, atol=2e-2
    )
