"""The flash-attn and FlashInfer backends against stand-ins with those libraries' signatures: what we hand
over must mean what they read."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from shoal.attention.flash import FlashAttentionBackend, FlashInferBackend
from shoal.errors import ConfigError
from shoal.kernels.attention.reference import paged_attention
from tests.cpu.attention.test_attention_kernels import Case
from tests.head_shape import head_shape

FP16 = torch.float16
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")  # see test_attention_kernels
CPU = torch.device("cpu")
DECODES = [(1, 30), (1, 300)]
FRESH, CHUNKS = [(9, 9), (40, 40)], [(9, 300), (40, 41)]


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    block_table=None,
):
    """k, v: [tokens, G, N], or with a block table [blocks, block_size, G, N]."""
    assert causal and k.shape == v.shape
    kv_lens = cu_seqlens_k.diff()
    if block_table is None:  # one block a sequence
        lens = kv_lens.tolist()
        kv = torch.zeros(
            len(lens), 2, k.shape[1], 1 << (max(lens) - 1).bit_length(), k.shape[2], dtype=k.dtype
        )
        for s, (x, y) in enumerate(zip(k.split(lens), v.split(lens), strict=True)):
            kv[s, 0, :, : lens[s]], kv[s, 1, :, : lens[s]] = x.transpose(0, 1), y.transpose(0, 1)
        block_table = torch.arange(len(lens), dtype=torch.int32)[:, None]
    else:
        kv = torch.stack([k, v], 1).transpose(2, 3)
    assert (
        max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= kv_lens.max() and window_size[1] == -1
    )
    return paged_attention(
        q,
        kv,
        cu_seqlens_q,
        kv_lens,
        torch.arange(len(kv_lens)),
        block_table,
        softmax_scale,
        None if window_size[0] < 0 else window_size[0] + 1,
        softcap or None,
    )


class PagedPrefillWrapper:
    def __init__(self, scratch, kv_layout):
        assert kv_layout == "HND"

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        causal,
        sm_scale,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
    ):
        counts = kv_indptr.diff()
        self.kv_lens = (counts - 1) * page_size + kv_last_page_len
        self.tables = torch.nn.utils.rnn.pad_sequence(kv_indices.split(counts.tolist()), batch_first=True)
        self.starts, self.scale, self.window = (
            qo_indptr,
            sm_scale,
            None if window_left < 0 else window_left + 1,
        )
        self.softcap = logits_soft_cap
        assert causal and q_data_type == kv_data_type == FP16

    def run(self, q, paged_kv_cache):
        return paged_attention(
            q,
            paged_kv_cache,
            self.starts,
            self.kv_lens,
            torch.arange(len(self.kv_lens)),
            self.tables,
            self.scale,
            self.window,
            self.softcap,
        )


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    )
    monkeypatch.setitem(
        sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PagedPrefillWrapper)
    )


@pytest.mark.parametrize("build", [FlashAttentionBackend, FlashInferBackend])
@pytest.mark.parametrize("prefills", [FRESH, CHUNKS])
@pytest.mark.parametrize("window", [None, 7])
def test_mixed_steps_equal_the_reference(
    build: type, prefills: list[tuple[int, int]], window: int | None
) -> None:
    case = Case(DECODES + prefills, 4, 2, block_size=256, dtype=FP16, num_decodes=2)
    backend = build(head_shape(4, 2, 16), 256, 8, 512, CPU, FP16)
    backend.begin(case.step)
    for _ in range(2):  # layers
        case.check(backend.attend(case.q, case.k, case.v, case.cache(window), case.step), window)


@pytest.mark.parametrize("build", [FlashAttentionBackend, FlashInferBackend])
def test_scores_are_capped_and_sinks_refused_by_name(build: type) -> None:
    case = Case(DECODES + CHUNKS, 4, 2, block_size=256, dtype=FP16, num_decodes=2)
    case.softcap = 0.7
    shape = replace(head_shape(4, 2, 16), softcap=case.softcap)
    backend = build(shape, 256, 8, 512, CPU, FP16)
    backend.begin(case.step)
    case.check(backend.attend(case.q, case.k, case.v, case.cache(), case.step))
    with pytest.raises(ConfigError, match="sinks"):
        backend.attend(case.q, case.k, case.v, case.cache(), case.step, sinks_H=torch.zeros(4))


@pytest.mark.parametrize(
    ("build", "package"), [(FlashAttentionBackend, "flash-attn"), (FlashInferBackend, "flashinfer-python")]
)
def test_a_missing_package_is_named_when_the_engine_is_built(
    build: type, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("flash_attn", "flashinfer"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        build(head_shape(4, 2, 16), 256, 8, 512, CPU, FP16)


@pytest.mark.parametrize("build", [FlashAttentionBackend, FlashInferBackend])
def test_float32_is_refused(build: type) -> None:
    with pytest.raises(ConfigError, match="float32"):
        build(head_shape(4, 2, 16), 256, 8, 512, CPU, torch.float32)


def test_flash_attn_refuses_small_blocks() -> None:
    with pytest.raises(ConfigError, match="block_size 16"):
        FlashAttentionBackend(head_shape(4, 2, 16), 16, 8, 512, CPU, FP16)
