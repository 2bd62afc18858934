"""logit_bias.py in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.sampling.row_options import Option, RowOptions
from shoal.kernels.sampling.row_options_triton import load_list

BIAS_START = tl.constexpr(Option.BIAS_START.value)
CHUNK = tl.constexpr(1024)


@triton.jit
def _add_bias_kernel(logits_ptr, rows_ptr, fields_ptr, addresses_ptr, logits_stride, V: tl.constexpr):
    k = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + k)
    if row < 0:
        return
    ids_ptr, count = load_list(fields_ptr, addresses_ptr, row, BIAS_START)
    row_ptr = logits_ptr + k * logits_stride
    for start in range(0, count, CHUNK):  # No id comes twice.
        i = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + i, mask=i < count, other=-1)
        inside = (ids >= 0) & (ids < V)
        bias = tl.load(ids_ptr + count + i, mask=inside, other=0).to(tl.float32, bitcast=True)
        tl.store(row_ptr + ids, tl.load(row_ptr + ids, mask=inside, other=0.0) + bias, mask=inside)


def add_bias(logits_KV: torch.Tensor, rows_K: torch.Tensor, options: RowOptions) -> None:
    assert logits_KV.dtype == torch.float32 and logits_KV.stride(1) == 1
    num_rows, vocab_size = logits_KV.shape
    _add_bias_kernel[(num_rows,)](
        logits_KV,
        rows_K,
        options.fields_RO,
        options.addresses_R,
        logits_KV.stride(0),
        V=vocab_size,
        num_warps=4,
    )
