"""The batch state's small kernels: they write a step's differences into it, read a decode step's inputs from
it, and copy int32s. Its layout is in state.py.

Their launches are ordinary (pdl.py), as they write what the kernels of the step before may still read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.rounding import cdiv
from shoal.kernels.state import Field

TOKEN, POSITION = tl.constexpr(Field.TOKEN.value), tl.constexpr(Field.POSITION.value)


@triton.jit(do_not_specialize=["num_updates"])
def _apply_updates_kernel(state_ptr, addresses_ptr, values_ptr, num_updates, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_updates
    tl.store(
        state_ptr + tl.load(addresses_ptr + i, mask=mask, other=0),
        tl.load(values_ptr + i, mask=mask),
        mask=mask,
    )


def apply_updates(state: torch.Tensor, addresses: torch.Tensor, values: torch.Tensor) -> None:
    """state[addresses] = values. No address may come twice, because the order of writes is not fixed."""
    num_updates = addresses.shape[0]
    _apply_updates_kernel[(cdiv(num_updates, 256),)](
        state, addresses, values, num_updates, BLOCK=256, num_warps=2
    )


@triton.jit(do_not_specialize=["size"])
def _copy_ints_kernel(dst_ptr, src_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst_ptr + i, tl.load(src_ptr + i, mask=i < size), mask=i < size)


def copy_ints(dst: torch.Tensor, src: torch.Tensor) -> None:
    """dst = src, both int32. Either may be pinned host memory. It does not use the copy engines, because they
    may be busy with KV blocks for as long as many steps."""
    size = src.shape[0]
    assert (
        dst.shape == src.shape
        and dst.dtype == src.dtype == torch.int32
        and dst.is_contiguous()
        and src.is_contiguous()
    )
    if size:
        _copy_ints_kernel[(cdiv(size, 1024),)](dst, src, size, BLOCK=1024, num_warps=4)


@triton.jit
def _copy_rows_kernel(
    dst_ptr, dst_rows_ptr, src_ptr, src_rows_ptr, dst_stride, src_stride, size, BLOCK: tl.constexpr
):
    """Sizes are in int64s. A row may be many megabytes, so offsets have 64 bits."""
    dst_row = tl.load(dst_rows_ptr + tl.program_id(0)).to(tl.int64)
    if dst_row < 0:
        return
    src_row = tl.load(src_rows_ptr + tl.program_id(0)).to(tl.int64)
    i = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(src_ptr + src_row * src_stride + i, mask=i < size)
    tl.store(dst_ptr + dst_row * dst_stride + i, words, mask=i < size)


def copy_rows(
    dst: torch.Tensor, dst_rows_K: torch.Tensor, src: torch.Tensor, src_rows_K: torch.Tensor
) -> None:
    """As reference.copy_rows."""
    assert dst.dtype == src.dtype == torch.uint8 and dst.shape[1] == src.shape[1] and dst.shape[1] % 16 == 0
    assert dst.stride(1) == src.stride(1) == 1 and len(dst_rows_K) == len(src_rows_K)
    dst, src = dst.view(torch.int64), src.view(torch.int64)
    size = dst.shape[1]
    if size and len(dst_rows_K):
        _copy_rows_kernel[(len(dst_rows_K), cdiv(size, 4096))](
            dst, dst_rows_K, src, src_rows_K, dst.stride(0), src.stride(0), size, BLOCK=4096, num_warps=8
        )


@triton.jit
def _begin_decode_kernel(
    rows_ptr, table_ptr, tokens_ptr, positions_ptr, kv_lens_ptr, table_stride, B, BLOCK: tl.constexpr
):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_batch = b < B
    row = tl.load(rows_ptr + b, mask=in_batch, other=-1)
    fields_ptr = table_ptr + row * table_stride
    position = tl.load(fields_ptr + POSITION, mask=row >= 0, other=-1)
    tl.store(tokens_ptr + b, tl.load(fields_ptr + TOKEN, mask=row >= 0, other=0), mask=in_batch)
    tl.store(positions_ptr + b, position, mask=in_batch)
    tl.store(kv_lens_ptr + b, position + 1, mask=in_batch)


def begin_decode(
    rows_B: torch.Tensor,
    table: torch.Tensor,
    tokens_B: torch.Tensor,
    positions_B: torch.Tensor,
    kv_lens_B: torch.Tensor,
) -> None:
    """Fills in the inputs of a decode step from the state rows. Padding (row -1) gets token 0, position -1
    and length 0."""
    size = tokens_B.shape[0]
    _begin_decode_kernel[(cdiv(size, 64),)](
        rows_B, table, tokens_B, positions_B, kv_lens_B, table.stride(0), size, BLOCK=64, num_warps=2
    )
