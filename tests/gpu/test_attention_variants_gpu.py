"""Every head size with sinks, soft caps, windows and none of them, over plain and fp8 caches, in decodes, split
decodes, prefills, chunks and shared prefixes, on a GPU against the reference. Tolerances:
test_attention_gpu.py. Ropes and gates: against the reference at the precision of bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.attention import hopper_prefill as hopper_module
from shoal.attention.triton import TritonBackend
from shoal.kernels import reference, triton_ops
from shoal.kernels.attention.reference import paged_attention
from shoal.kernels.layer_cache import LayerCache
from shoal.kinds.attention import QueryScaling
from tests.gpu.test_attention_gpu import BF16, DEVICE, FP16, FP32, TOLERANCE, Case, decodes, set_groups
from tests.gpu.test_fp8_cache_gpu import Fp8Case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HEADS = [
    (64, 8, 64),
    (32, 8, 96),
    (20, 4, 128),
    (16, 4, 192),
    (16, 8, 256),
    (4, 1, 256),
    (16, 2, 512),
    (8, 1, 512),
    (6, 2, 24),
]
STEPS = {
    "decodes": (decodes([1, 15, 16, 17, 1000, 0, 63, 64, 65] * 8), 72),
    "split decodes": (decodes([20_000, 7, 3000]), 3),
    "prefills": ([(300, 300), (1, 1), (700, 700)], 0),
    "chunks": ([(1, 100), (200, 900), (130, 4000)], 1),
    "chunks whose keys are split": ([(20, 9000)], 0),
}
VARIANTS = {"plain": (None, False), "sinks": (None, True), "softcap": (3.0, False), "both": (3.0, True)}
# Parts of a kernel that a variant adds do not know the cache's type. So fp8 has neither or both of them.
CACHES = pytest.mark.parametrize(
    ("build", "variant"),
    [(Case, variant) for variant in VARIANTS] + [(Fp8Case, "plain"), (Fp8Case, "both")],
    ids=[f"plain cache-{variant}" for variant in VARIANTS] + ["fp8 cache-plain", "fp8 cache-both"],
)


class VariedCase:
    """A step whose layer has a cap and sinks. Blocks behind a window lie far outside of the cache."""

    def __init__(self, case: Case, variant: str, window: int | None) -> None:
        self.case, self.window = case, window
        self.softcap, has_sinks = VARIANTS[variant]
        num_heads = case.q.shape[1]
        self.sinks_H = 2 * torch.randn(num_heads, device=DEVICE) if has_sinks else None
        step = case.step
        case.backend = TritonBackend(
            replace(case.heads, softcap=self.softcap),
            case.block_size,
            len(step.rows_S),
            case.max_kv_len,
            DEVICE,
            case.dtype,
            fp8_cache=case.scales_2G is not None,
            queries=step.queries,
        )
        rows, lens = step.rows_S.tolist(), step.kv_lens_S.tolist()
        for row, query_len, kv_len in zip(rows, step.query_starts_S.diff().tolist(), lens, strict=True):
            if window is not None and row >= 0:
                behind = max(kv_len - query_len - window + 1, 0) // case.block_size
                case.table[row, 16 : 16 + behind] = 2**30

    def check(self) -> None:
        case, step = self.case, self.case.step
        kv_layer = case.kv_layer
        if case.scales_2G is not None:
            kv_layer = kv_layer.float() * case.scales_2G[:, :, None, None]
        expected = paged_attention(
            case.q,
            kv_layer,
            step.query_starts_S,
            step.kv_lens_S,
            step.rows_S,
            step.block_tables[0],
            case.backend.scale,
            self.window,
            self.softcap,
            self.sinks_H,
        )
        case.backend.begin(step)
        cache, tolerance = case.cache(self.window), TOLERANCE[case.dtype]
        for k, v in ((case.k, case.v), (None, None)):  # None: another layer's keys and values
            out = case.backend.attend(case.q, k, v, cache, step, sinks_H=self.sinks_H)
            torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        assert not case.backend.workspace.arrived.any()


@pytest.mark.parametrize("heads", HEADS, ids=str)
@CACHES
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("name", STEPS)
def test_every_head_size_in_every_step(
    name: str, build: type[Case], window: int | None, variant: str, heads: tuple[int, int, int]
) -> None:
    sequences, num_decodes = STEPS[name]
    VariedCase(build(sequences, *heads, num_decodes=num_decodes), variant, window).check()


@pytest.mark.parametrize(
    ("heads", "block_size"),
    [((64, 8, 64), 16), ((20, 4, 128), 32), ((8, 8, 128), 8), ((16, 8, 256), 16), ((16, 2, 512), 48)],
    ids=str,
)
@pytest.mark.parametrize("variant", ["plain", "sinks"])
@pytest.mark.parametrize("window", [1, 100, 128, 1024])
def test_windows_of_large_prefills(
    window: int, variant: str, heads: tuple[int, int, int], block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_module, "WINDOW_TILES", 0)
    sequences = [*decodes([300, 40]), (2100, 2100), (1, 5), (129, 129), (700, 777), (333, 2000), (128, 2177)]
    VariedCase(Case(sequences, *heads, block_size, num_decodes=2), variant, window).check()


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("variant", ["plain", "both"])
@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("name", STEPS)
def test_every_head_size_in_other_dtypes(
    name: str, dtype: torch.dtype, variant: str, heads: tuple[int, int, int]
) -> None:
    sequences, num_decodes = STEPS[name]
    for window in (None, 128):
        VariedCase(Case(sequences, *heads, dtype=dtype, num_decodes=num_decodes), variant, window).check()


@pytest.mark.parametrize("heads", HEADS, ids=str)
@CACHES
@pytest.mark.parametrize("queries", [1, 8])
def test_shared_prefixes(queries: int, build: type[Case], variant: str, heads: tuple[int, int, int]) -> None:
    lengths = [1100 + 13 * i for i in range(20)] + [0, 40]
    case = build(decodes(lengths, queries), *heads, num_decodes=len(lengths), queries=queries)
    set_groups(case, [(list(range(0, 20, 2)), 1024), ([1, 5, 7], 512)])
    VariedCase(case, variant, None).check()


@pytest.mark.parametrize("block_size", [8, 16, 32, 48, 64])
@pytest.mark.parametrize("heads", [(64, 8, 64), (16, 2, 512)], ids=str)
@pytest.mark.parametrize("window", [None, 128])
def test_blocks_of_any_group(block_size: int, heads: tuple[int, int, int], window: int | None) -> None:
    sequences = [*decodes([1, 255, 700]), (600, 1100), (300, 300)]
    VariedCase(Case(sequences, *heads, block_size, num_decodes=3), "sinks", window).check()


@pytest.mark.parametrize("tokens", [1, 70, 3000])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize(
    "variant",
    [
        dict(rotary=0.0),
        dict(rotary=0.5),
        dict(rotary=0.75, query_scaling=QueryScaling(0.1, 64)),
        dict(v_norm=True, norm=FP32),
        dict(stores=False),
    ],
    ids=str,
)
def test_variants_of_rope(variant: dict, head_dim: int, tokens: int) -> None:
    variant = dict(rotary=1.0, norm=BF16) | variant
    rotary, norm = int(head_dim * variant.pop("rotary")), variant.pop("norm")
    torch.manual_seed(0)
    stores, num_blocks = variant.get("stores", True), tokens // 16 + 1
    qkv = torch.randn(tokens, (8 + 4 * stores) * head_dim, device=DEVICE).to(BF16)
    weight = torch.randn(head_dim, device=DEVICE).to(norm)
    cos_sin = torch.randn(tokens, rotary, device=DEVICE) if rotary else None
    tables = torch.randperm(num_blocks, device=DEVICE).int()[None]
    positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    results = []
    for ops in (reference, triton_ops):
        x, kv = qkv.clone(), torch.zeros(num_blocks, 2, 2, 16, head_dim, dtype=BF16, device=DEVICE)
        ops.qk_norm_rope_store(
            x,
            weight,
            weight if stores else None,
            1e-6,
            cos_sin,
            positions,
            torch.zeros_like(positions),
            tables,
            LayerCache(kv),
            **variant,
        )
        results.append((x, kv))
    torch.testing.assert_close(results[1], results[0], atol=2**-3, rtol=2e-2)


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("gates", [48, 48 * 128])
@pytest.mark.parametrize("activation", ["sigmoid", "softplus"])
def test_gates(activation: str, gates: int, tokens: int) -> None:
    out = torch.randn(tokens, 48 * 128, device=DEVICE).to(BF16)
    gate = (10 * torch.randn(tokens, gates, device=DEVICE)).to(BF16)
    result = triton_ops.gate_output(out, gate, activation)
    torch.testing.assert_close(result, reference.gate_output(out, gate, activation), atol=1e-2, rtol=1e-2)
