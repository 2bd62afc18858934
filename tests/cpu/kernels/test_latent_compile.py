"""The kernels of latent attention compile for sm_80 and sm_90 in the sizes that published models bring, fit in
shared memory and keep to their registers."""

from collections.abc import Callable

import pytest
import torch
from triton_compile import check_kernels

from shoal.kernels.latent.attention import LatentWorkspace, latent_attention
from shoal.kernels.latent.expanded import expanded_attention
from shoal.kernels.latent.project import FEW_TOKENS, absorb_queries, project_values
from shoal.kernels.latent.store import norm_rope_store
from shoal.kernels.layer_cache import LayerCache
from shoal.kinds.attention import QueryScaling
from shoal.kinds.latent import LatentKind
from shoal.kinds.rope import RopeConfig

LAUNCHES: dict[str, Callable[[], object]] = {}
SCALING = QueryScaling(0.1, 8192)
# heads of one rank, q_lora_rank, kv_lora_rank, nope, rope and value sizes
PUBLISHED = {
    "glm-4.7-flash": LatentKind(20, 768, 512, 192, 64, 256, 0.1, RopeConfig()),
    "deepseek-v2-lite": LatentKind(16, None, 512, 128, 64, 128, 0.1, RopeConfig()),
    "deepseek-v3": LatentKind(128, 1536, 512, 128, 64, 128, 0.1, RopeConfig()),
    "mistral-small-4": LatentKind(32, 1024, 256, 64, 64, 128, 0.1, RopeConfig(), query_scaling=SCALING),
}


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def launch(kind: LatentKind, dtype: torch.dtype, tokens: int, queries: int) -> None:
    heads, rank, size = kind.num_heads, kind.q_lora_rank, kind.kv_lora_rank
    cache = LayerCache(torch.zeros(2, 3, 1, 1, 16, kind.head_dim, dtype=dtype)[:, 1])
    table, tables, positions = torch.zeros(64, kind.rotary_dim), ints(4, 20), ints(tokens)
    before = rank or heads * kind.query_dim
    norm_rope_store(
        torch.zeros(tokens, before + kind.head_dim, dtype=dtype),
        None if rank is None else torch.ones(rank, dtype=dtype),
        torch.ones(size, dtype=dtype),
        1e-6,
        table,
        positions,
        positions,
        tables,
        cache,
        kind.interleaved,
    )
    q_THX = torch.zeros(tokens, heads, kind.query_dim, dtype=dtype)
    kv_b = torch.zeros(heads, kind.qk_nope_head_dim + kind.v_head_dim, size, dtype=dtype)
    out_THV = torch.zeros(tokens, heads, kind.v_head_dim, dtype=dtype)
    few = queries > 0 and tokens <= FEW_TOKENS
    q_THN = absorb_queries(q_THX, kv_b, table, positions, kind.interleaved, kind.query_scaling, few)
    sums_THC = None if few else torch.zeros(tokens, heads, size, dtype=dtype)
    workspace = LatentWorkspace.allocate(1 << 20, 64 * tokens, size, torch.device("meta"))
    parts = latent_attention(
        q_THN,
        cache,
        sums_THC,
        ints(tokens + 1),
        ints(tokens),
        ints(tokens),
        tables,
        workspace,
        kind.scale,
        splits=2,
        min_split=128,
        num_seqs=tokens // max(queries, 1),
        queries=queries,
        num_tokens=tokens,
    )
    project_values(parts if sums_THC is None else sums_THC, kv_b, out_THV)
    if queries:
        return
    expanded_attention(
        q_THX,
        torch.zeros(tokens, heads * kv_b.shape[1], dtype=dtype),
        torch.zeros(tokens, kind.head_dim, dtype=dtype),
        out_THV,
        table,
        ints(tokens + 1),
        ints(tokens),
        ints(tokens),
        kind.scale,
        kind.interleaved,
        kind.query_scaling,
        first_seq=0,
        num_tokens=tokens,
    )


for name, kind in PUBLISHED.items():
    for tokens, queries in ((1, 1), (100, 0), (4, 2), (64, 1), *[(18, 9)] * (name == "deepseek-v3")):
        LAUNCHES[f"{name} {tokens} tokens, {queries} queries"] = (
            lambda kind=kind, tokens=tokens, queries=queries: launch(kind, torch.bfloat16, tokens, queries)
        )
for dtype in (torch.float32, torch.float16):
    LAUNCHES[f"glm-4.7-flash {dtype}"] = lambda dtype=dtype: launch(PUBLISHED["glm-4.7-flash"], dtype, 100, 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", LAUNCHES)
def test_compiles(compiled, case):
    check_kernels(compiled[case], max_spilled=256)
