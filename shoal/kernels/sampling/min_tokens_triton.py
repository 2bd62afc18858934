"""min_tokens.py in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.sampling.row_options import Option, RowOptions
from shoal.kernels.sampling.row_options_triton import ban_ids, load_list, load_option

MIN_END = tl.constexpr(Option.MIN_END.value)
STOPS_START = tl.constexpr(Option.STOPS_START.value)
CHUNK = tl.constexpr(128)


@triton.jit
def _ban_stops_kernel(
    logits_ptr, rows_ptr, positions_ptr, fields_ptr, addresses_ptr, logits_stride, V: tl.constexpr
):
    k = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + k)
    if row < 0:
        return
    if tl.load(positions_ptr + k) + 1 >= load_option(fields_ptr, row, MIN_END):
        return
    ids_ptr, count = load_list(fields_ptr, addresses_ptr, row, STOPS_START)
    for start in range(0, count, CHUNK):
        i = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + i, mask=i < count, other=-1)
        ban_ids(logits_ptr + k * logits_stride, ids, i < count, V)


def ban_stops(
    logits_KV: torch.Tensor, rows_K: torch.Tensor, positions_K: torch.Tensor, options: RowOptions
) -> None:
    assert logits_KV.dtype == torch.float32 and logits_KV.stride(1) == 1
    num_rows, vocab_size = logits_KV.shape
    _ban_stops_kernel[(num_rows,)](
        logits_KV,
        rows_K,
        positions_K,
        options.fields_RO,
        options.addresses_R,
        logits_KV.stride(0),
        V=vocab_size,
        num_warps=1,
    )
