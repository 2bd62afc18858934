"""min_tokens.py in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.sampling.row_options import Option, RowOptions
from shoal.kernels.sampling.row_options_triton import ban_ids, record_at

MIN_END = tl.constexpr(Option.MIN_END.value)
STOPS_START, STOPS_COUNT = tl.constexpr(Option.STOPS_START.value), tl.constexpr(Option.STOPS_COUNT.value)
CHUNK = tl.constexpr(128)


@triton.jit
def _ban_stops_kernel(logits_ptr, rows_ptr, positions_ptr, addresses_ptr, logits_stride, V: tl.constexpr):
    k = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + k)
    if row < 0:
        return
    record_ptr = record_at(addresses_ptr, row)
    if tl.load(positions_ptr + k) + 1 >= tl.load(record_ptr + MIN_END):
        return
    count, ids_ptr = tl.load(record_ptr + STOPS_COUNT), record_ptr + tl.load(record_ptr + STOPS_START)
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
        logits_KV, rows_K, positions_K, options.addresses_R, logits_KV.stride(0), V=vocab_size, num_warps=1
    )
