"""Latent attention's kernels, in Triton's interpreter, equal their reference, and the two forms of attention
give the same results."""

import random
from dataclasses import replace

import pytest
import torch

from shoal.attention import latent_prefill
from shoal.attention.latent import is_expanded_cheaper
from shoal.attention.latent_cpu import TorchLatentBackend
from shoal.attention.latent_triton import TritonLatentBackend
from shoal.attention.step_input import HostView, StepInput
from shoal.kernels.latent import reference, store
from shoal.kernels.layer_cache import LayerCache
from shoal.kinds.attention import QueryScaling
from shoal.kinds.latent import LatentKind
from shoal.kinds.rope import RopeConfig

BLOCK_SIZE, NUM_BLOCKS, ROWS, COLUMNS = 16, 60, 6, 20
SMALL = LatentKind(3, 24, 32, 12, 8, 16, scale=0.3, rope=RopeConfig())
KINDS = {
    "small": SMALL,
    "no power of two": replace(
        SMALL, kv_lora_rank=48, qk_nope_head_dim=24, qk_rope_head_dim=20, v_head_dim=20
    ),
    "halves": replace(SMALL, interleaved=False, num_heads=8),
    "scaled queries": replace(SMALL, query_scaling=QueryScaling(0.5, 16), num_heads=20),
    "tall values": replace(SMALL, qk_nope_head_dim=16, v_head_dim=64, num_heads=2),
}


def make_cache(kind: LatentKind, dtype: torch.dtype, layers: int = 2) -> LayerCache:
    """A view of one layer, as the engine has them: its blocks are not contiguous."""
    blocks = torch.randn(NUM_BLOCKS, layers, 1, 1, BLOCK_SIZE, kind.head_dim).to(dtype)
    return LayerCache(blocks[:, 1])


def make_tables(rng: random.Random) -> torch.Tensor:
    ids = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = torch.full((ROWS, COLUMNS), NUM_BLOCKS + 1000, dtype=torch.int32)
    for row in range(ROWS):
        tables[row, :10] = torch.tensor(ids[row * 10 : row * 10 + 10])
    return tables


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cos_sin(kind: LatentKind) -> torch.Tensor:
    angles = torch.outer(torch.arange(256.0), torch.rand(kind.rotary_dim // 2))
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def make_step(
    tables: torch.Tensor,
    decodes: list[tuple[int, int]],
    prefills: list[tuple[int, int, int]],
    queries: int = 1,
    captured: bool = False,
) -> StepInput:
    """decodes: (row, kv_len) of each; row -1 is padding. prefills: (row, kv_len, tokens)."""
    lens = [queries] * len(decodes) + [tokens for _, _, tokens in prefills]
    rows = [row for row, _ in decodes] + [row for row, _, _ in prefills]
    kv_lens = [kv_len for _, kv_len in decodes] + [kv_len for _, kv_len, _ in prefills]
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    positions = [
        position if row >= 0 and position >= 0 else -1
        for row, kv_len, count in zip(rows, kv_lens, lens)
        for position in range(kv_len - count, kv_len)
    ]
    token_rows = [row for row, count in zip(rows, lens) for _ in range(count)]
    return StepInput(
        token_ids_T=ints([0] * len(positions)),
        positions_T=ints(positions),
        rows_T=ints(token_rows),
        rows_S=ints(rows),
        query_starts_S=ints(starts),
        kv_lens_S=ints(kv_lens),
        block_tables=(tables,),
        num_decodes=len(decodes),
        max_kv_len=max(kv_lens),
        queries=queries,
        fresh_prefills=bool(prefills) and all(kv_len == tokens for _, kv_len, tokens in prefills),
        sparse_decodes=captured,
        host=None if captured or not prefills else HostView(tuple(starts), tuple(kv_lens)),
    )


STEPS = {
    "decodes": ([(0, 1), (1, 37), (-1, 0), (2, 160), (3, 16)], []),
    "one decode": ([(4, 150)], []),
    "fresh prefills": ([], [(0, 5, 5), (1, 33, 33), (2, 1, 1)]),
    "chunks after long prefixes": ([], [(0, 150, 2), (1, 40, 7)]),
    "long chunks after prefixes": ([], [(0, 60, 44), (1, 80, 70)]),
    "decodes beside prefills": ([(3, 70), (4, 9)], [(0, 50, 6), (5, 21, 21)]),
    "decodes beside fresh prefills": ([(3, 70)], [(0, 40, 40), (5, 3, 3)]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STEPS)
def test_the_kernels_give_what_the_reference_gives(kind, name):
    kind, rng = KINDS[kind], random.Random(f"{kind} {name}")
    torch.manual_seed(0)
    tables, cache = make_tables(rng), make_cache(kind, torch.float32)
    check(kind, make_step(tables, *STEPS[name]), cache)


def check(kind: LatentKind, step: StepInput, cache: LayerCache, tolerance: float = 2e-5) -> torch.Tensor:
    dtype = cache.blocks.dtype
    heads, width = kind.num_heads, kind.qk_nope_head_dim + kind.v_head_dim
    kv_b = (torch.randn(heads, width, kind.kv_lora_rank) / kind.kv_lora_rank**0.5).to(dtype)
    # Queries may be a part of a wider matmul's output.
    wide = torch.randn(step.num_tokens, heads * kind.query_dim + 5).to(dtype)
    q_THX = wide[:, : heads * kind.query_dim].unflatten(1, (heads, kind.query_dim))
    latent_TN = torch.randn(step.num_tokens, kind.head_dim).to(dtype)
    store_latents(latent_TN, step, cache)
    arguments = q_THX, latent_TN, kv_b, cos_sin(kind), cache, step
    backend = TritonLatentBackend(kind, torch.device("cpu"), dtype)
    plain = TorchLatentBackend(kind)
    for each in (backend, plain):
        each.begin(step)
    expected, found = plain.attend(*arguments), backend.attend(*arguments)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert not backend.workspace.arrived.any()
    return found


def store_latents(latent_TN: torch.Tensor, step: StepInput, cache: LayerCache) -> None:
    for token, (row, position) in enumerate(zip(step.rows_T.tolist(), step.positions_T.tolist())):
        if row >= 0 and position >= 0:
            block = step.block_tables[0][row, position // BLOCK_SIZE]
            cache.blocks[block, 0, 0, position % BLOCK_SIZE] = latent_TN[token]


@pytest.mark.parametrize("queries", [2, 3, 5])
def test_decodes_of_several_tokens_see_the_keys_up_to_themselves(queries):
    """The first one has fewer tokens than queries: it is padded in front."""
    torch.manual_seed(queries)
    step = make_step(make_tables(random.Random(queries)), [(0, 1), (1, 150), (-1, 0), (2, 33)], [], queries)
    out = check(SMALL, step, make_cache(SMALL, torch.float32))
    assert not out[: queries - 1].any()


def test_a_captured_mixed_step_does_not_know_its_lengths_on_the_host():
    torch.manual_seed(5)
    step = make_step(
        make_tables(random.Random(5)), [(3, 70), (4, 9)], [(0, 50, 6), (5, 21, 21)], captured=True
    )
    check(SMALL, step, make_cache(SMALL, torch.float32))


def test_empty_places_for_decodes_leave_the_prefills_tokens_alone():
    """Two of four places for decodes are empty and have no tokens, so the prefill's begin behind the second."""
    torch.manual_seed(6)
    kind, tables, cache = SMALL, make_tables(random.Random(6)), make_cache(SMALL, torch.float32)
    full = make_step(tables, [(3, 70), (4, 9)], [(0, 50, 6), (5, 21, 21)], captured=True)
    padded = replace(
        full,
        rows_S=ints([3, 4, -1, -1, 0, 5]),
        kv_lens_S=ints([70, 9, 0, 0, 50, 21]),
        query_starts_S=ints([0, 1, 2, 2, 2, 8, 29]),
        num_decodes=4,
    )
    heads, width = kind.num_heads, kind.qk_nope_head_dim + kind.v_head_dim
    kv_b, table = torch.randn(heads, width, kind.kv_lora_rank), cos_sin(kind)
    q_THX = torch.randn(full.num_tokens, heads, kind.query_dim)
    results = []
    for step in (full, padded):
        backend = TritonLatentBackend(kind, torch.device("cpu"), torch.float32)
        backend.begin(step)
        results.append(backend.attend(q_THX, q_THX, kv_b, table, cache, step))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("has_q", [True, False])
def test_latents_are_normed_rotated_and_stored(has_q, interleaved):
    torch.manual_seed(7)
    kind, tables = SMALL, make_tables(random.Random(7))
    before, num_tokens = 24, 6
    a_TY = torch.randn(num_tokens, before + kind.head_dim)
    q_weight, kv_weight = torch.rand(before) if has_q else None, torch.rand(kind.kv_lora_rank)
    positions, rows = ints([0, 5, 33, -1, 100, 7]), ints([0, 1, 2, -1, 3, -1])
    cache = make_cache(kind, torch.float32)
    copy = LayerCache(cache.blocks.clone())
    table = cos_sin(kind)
    q, latents = store.norm_rope_store(
        a_TY, q_weight, kv_weight, 1e-6, table, positions, rows, tables, cache, interleaved
    )
    expected_q, expected = reference.norm_rope_store(
        a_TY, q_weight, kv_weight, 1e-6, table, positions, rows, tables, copy, interleaved
    )
    torch.testing.assert_close(latents, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.blocks, copy.blocks, atol=1e-5, rtol=1e-5)
    assert (q is None) == (expected_q is None) == (not has_q)
    if q is not None:
        torch.testing.assert_close(q, expected_q, atol=1e-5, rtol=1e-5)


def test_the_two_forms_are_the_same_function():
    torch.manual_seed(8)
    kind, table = SMALL, cos_sin(SMALL)
    latents, q = torch.randn(40, kind.head_dim), torch.randn(7, kind.num_heads, kind.query_dim)
    kv_b = torch.randn(kind.num_heads, kind.qk_nope_head_dim + kind.v_head_dim, kind.kv_lora_rank) / 6
    rotation = table, torch.arange(33, 40), True, None
    rotated = torch.cat(reference.rotated_queries(q, *rotation), dim=2)
    expanded = reference.attend_expanded(rotated, latents, kv_b, kind.v_head_dim, kind.scale)
    absorbed = reference.absorb_queries(q, kv_b, *rotation)
    sums = reference.attend_to_latents(absorbed, latents, kind.kv_lora_rank, kind.scale)
    torch.testing.assert_close(reference.project_values(sums, kv_b, kind.v_head_dim), expanded)


def test_decodes_are_absorbed_and_long_prompts_expanded():
    published = LatentKind(128, 1536, 512, 128, 64, 128, scale=0.1, rope=RopeConfig())
    assert not is_expanded_cheaper(published, 1, 4000)
    assert is_expanded_cheaper(published, 2000, 2000)
    assert is_expanded_cheaper(published, 1000, 30000)
    assert not is_expanded_cheaper(published, 100, 30000)


@pytest.mark.parametrize("interleaved", [False, True])
def test_large_expanded_prefills_go_to_hoppers_kernel(monkeypatch, interleaved):
    def in_plain_torch(q_THX, kv_layer, out_THV, work, taken, rows_S, tables, scale, num_sms):
        launches.append(len(work))
        memory, box = (
            kv_layer.as_strided((kv_layer.untyped_storage().nbytes() // 4,), (1,)),
            kv_layer.shape[3],
        )
        per_block, per_kv, per_head, width, _ = kv_layer.stride()
        for token, count, position, seq in work.tolist():
            keys = torch.arange(position + count)
            first = tables[rows_S[seq], keys // box] * per_block + keys % box * width
            seen = keys <= torch.arange(position, position + count)[:, None]
            for head in range(q_THX.shape[1]):
                lines = first[:, None] + head * per_head + torch.arange(width)
                scores = q_THX[token : token + count, head] @ memory[lines].T * scale
                weights = scores.masked_fill(~seen, float("-inf")).softmax(1)
                out_THV[token : token + count, head] = weights @ memory[lines + per_kv]

    launches: list[int] = []
    monkeypatch.setattr(latent_prefill.hopper, "is_supported", lambda *_: True)
    monkeypatch.setattr(latent_prefill.hopper, "hopper_prefill_attention", in_plain_torch)
    monkeypatch.setattr(latent_prefill, "HOPPER_FROM", 40)
    kind = replace(SMALL, v_head_dim=SMALL.query_dim, interleaved=interleaved)
    torch.manual_seed(9)
    for name, count in {
        "decodes": 0,
        "fresh prefills": 0,
        "chunks after long prefixes": 0,
        "long chunks after prefixes": 1,
        "decodes beside fresh prefills": 1,
    }.items():
        step = make_step(make_tables(random.Random(name)), *STEPS[name])
        launches.clear()
        check(kind, step, make_cache(kind, torch.float32))
        assert len(launches) == count
    # Values of other sizes than keys, and scaled queries, stay with the kernel of any GPU.
    for other in (SMALL, replace(kind, query_scaling=QueryScaling(0.5, 16))):
        check(other, step, make_cache(other, torch.float32))
    assert len(launches) == 1


@pytest.mark.parametrize(("size", "plain"), [(31, 12), (32, 11)])
def test_sizes_that_are_not_multiples_of_four_stay_with_tritons_kernel(monkeypatch, size, plain):
    """Regression: the copy of keys' rotated parts, four numbers at a time, failed for them."""
    monkeypatch.setattr(latent_prefill.hopper, "is_supported", lambda *_: True)
    monkeypatch.setattr(latent_prefill, "HOPPER_FROM", 40)
    kind = replace(SMALL, kv_lora_rank=size, qk_nope_head_dim=plain, v_head_dim=plain + SMALL.rotary_dim)
    torch.manual_seed(10)
    step = make_step(make_tables(random.Random(10)), *STEPS["long chunks after prefixes"])
    check(kind, step, make_cache(kind, torch.float32))
