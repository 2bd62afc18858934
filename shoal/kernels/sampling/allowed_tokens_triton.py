"""allowed_tokens.py in Triton. A program looks which allowed tokens lie in its tile of a row's vocabulary, so
that no thread writes what another has to read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.rounding import cdiv
from shoal.kernels.sampling.row_options import Option, RowOptions
from shoal.kernels.sampling.row_options_triton import count_ids, load_list

ALLOWED_START = tl.constexpr(Option.ALLOWED_START.value)
TILE = tl.constexpr(2048)  # tokens of the vocabulary that a program has
CHUNK = tl.constexpr(1024)  # ids of the list that it looks at at once


@triton.jit
def _keep_allowed_kernel(logits_ptr, rows_ptr, fields_ptr, addresses_ptr, logits_stride, V: tl.constexpr):
    k = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + k)
    if row < 0:
        return
    ids_ptr, count = load_list(fields_ptr, addresses_ptr, row, ALLOWED_START)
    if count == 0:
        return
    first = tl.program_id(0) * TILE
    counts = tl.zeros((TILE,), tl.int32)
    for start in range(0, count, CHUNK):
        i = start + tl.arange(0, CHUNK)
        counts = count_ids(counts, tl.load(ids_ptr + i, mask=i < count, other=-1), i < count, first, TILE)
    token = first + tl.arange(0, TILE)
    tl.store(logits_ptr + k * logits_stride + token, float("-inf"), mask=(counts == 0) & (token < V))


def keep_allowed(logits_KV: torch.Tensor, rows_K: torch.Tensor, options: RowOptions) -> None:
    assert logits_KV.dtype == torch.float32 and logits_KV.stride(1) == 1
    num_rows, vocab_size = logits_KV.shape
    _keep_allowed_kernel[(cdiv(vocab_size, TILE.value), num_rows)](
        logits_KV,
        rows_K,
        options.fields_RO,
        options.addresses_R,
        logits_KV.stride(0),
        V=vocab_size,
        num_warps=4,
    )
