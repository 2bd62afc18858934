"""allowed_tokens.py in Triton. The first kernel marks the allowed tokens. The second looks at the marks of
all tokens, and takes them away again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.rounding import cdiv
from shoal.kernels.sampling.row_options import Option, RowOptions
from shoal.kernels.sampling.row_options_triton import load_list

ALLOWED_START = tl.constexpr(Option.ALLOWED_START.value)
CHUNK = tl.constexpr(1024)  # ids at once
TILE = tl.constexpr(4096)  # tokens of the vocabulary that a program has


@triton.jit
def _mark_allowed_kernel(rows_ptr, fields_ptr, addresses_ptr, counts_ptr, V: tl.constexpr):
    k = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + k)
    if row < 0:
        return
    ids_ptr, count = load_list(fields_ptr, addresses_ptr, row, ALLOWED_START)
    for start in range(0, count, CHUNK):
        i = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + i, mask=i < count, other=-1)
        tl.store(counts_ptr + k * V + ids, 1, mask=(ids >= 0) & (ids < V))


@triton.jit
def _keep_allowed_kernel(
    logits_ptr, rows_ptr, fields_ptr, addresses_ptr, counts_ptr, logits_stride, V: tl.constexpr
):
    k = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + k)
    if row < 0:
        return
    _, count = load_list(fields_ptr, addresses_ptr, row, ALLOWED_START)
    if count == 0:
        return
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    marks_ptr = counts_ptr + k * V + token
    is_allowed = tl.load(marks_ptr, mask=token < V, other=1) != 0
    tl.store(marks_ptr, 0, mask=is_allowed & (token < V))
    tl.store(logits_ptr + k * logits_stride + token, float("-inf"), mask=(is_allowed == 0) & (token < V))


def keep_allowed(logits_KV: torch.Tensor, rows_K: torch.Tensor, options: RowOptions) -> None:
    assert logits_KV.dtype == torch.float32 and logits_KV.stride(1) == 1
    num_rows, vocab_size = logits_KV.shape
    fields_RO, addresses_R, counts_KV = options.fields_RO, options.addresses_R, options.counts_KV
    _mark_allowed_kernel[(num_rows,)](rows_K, fields_RO, addresses_R, counts_KV, V=vocab_size, num_warps=4)
    _keep_allowed_kernel[(cdiv(vocab_size, TILE.value), num_rows)](
        logits_KV, rows_K, fields_RO, addresses_R, counts_KV, logits_KV.stride(0), V=vocab_size, num_warps=8
    )
