"""Verification of drafts in Triton, for a captured graph. reference.py describes what each function does.

`begin_verification` and `write_histories` are launched in the ordinary way (pdl.py), as kernels of the step
before may still read the tensors that they write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.drafting.draft_rows import DRAFTS, EARLIER, REPORT_SIZE, DraftRows, Report
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.rounding import cdiv, next_power_of_2
from shoal.kernels.state import Field

TOKEN, POSITION = tl.constexpr(Field.TOKEN.value), tl.constexpr(Field.POSITION.value)
MAX_TOKENS, NUM_DRAFTS = tl.constexpr(Field.MAX_TOKENS.value), tl.constexpr(Field.NUM_DRAFTS.value)
PENDING = tl.constexpr(Field.PENDING.value)
REPORT_TOKENS, REPORT_VERIFIED = (
    tl.constexpr(Report.NUM_TOKENS.value),
    tl.constexpr(Report.NUM_VERIFIED.value),
)
REPORT_DRAFTS, REPORT_FIRST = tl.constexpr(Report.NUM_DRAFTS.value), tl.constexpr(Report.FIRST.value)
TOKENS = tl.constexpr(REPORT_SIZE)
OF_DRAFTS, OF_EARLIER = tl.constexpr(DRAFTS), tl.constexpr(EARLIER)
ENTRY = tl.constexpr(3)  # the ints before the tokens of an entry: row, first place, number
CHUNK = tl.constexpr(1024)  # ints of entries that a program takes


@triton.jit
def _begin_verification_kernel(
    rows_ptr,
    table_ptr,
    drafts_ptr,
    token_ids_ptr,
    positions_ptr,
    token_rows_ptr,
    kv_lens_ptr,
    starts_ptr,
    verified_ptr,
    unverified_ptr,
    pending_ptr,
    table_stride,
    drafts_stride,
    QUERIES: tl.constexpr,
    LANES: tl.constexpr,
):
    b = tl.program_id(0)
    row = tl.load(rows_ptr + b).to(tl.int64)
    there = row >= 0
    fields_ptr, row_drafts_ptr = table_ptr + row * table_stride, drafts_ptr + row * drafts_stride
    start = tl.load(fields_ptr + POSITION, mask=there, other=-1)
    num_drafts = tl.load(fields_ptr + NUM_DRAFTS, mask=there, other=0)
    most = tl.minimum(tl.load(fields_ptr + MAX_TOKENS, mask=there, other=1), QUERIES) - 1
    verified = tl.maximum(tl.minimum(num_drafts, most), 0)
    has_unverified = there & (num_drafts > 0) & (verified == 0)
    tl.store(kv_lens_ptr + b, start + 1 + verified)
    tl.store(starts_ptr + b, start)
    tl.store(verified_ptr + b, verified)
    tl.store(unverified_ptr + b, tl.load(row_drafts_ptr, mask=has_unverified, other=-1))
    tl.store(pending_ptr + b, tl.load(fields_ptr + PENDING, mask=there, other=0))
    i = tl.arange(0, LANES)
    place = i - (QUERIES - 1 - verified)  # TOKEN has place 0, and its drafts have the next ones
    has_token = there & (place >= 0) & (i < QUERIES)
    token = tl.load(fields_ptr + TOKEN, mask=there, other=0)
    draft = tl.load(row_drafts_ptr + place - 1, mask=has_token & (place > 0), other=0)
    ids = tl.where(has_token, tl.where(place == 0, token, draft), 0)
    t = b * QUERIES + i
    tl.store(token_ids_ptr + t, ids, mask=i < QUERIES)
    tl.store(positions_ptr + t, tl.where(has_token, start + place, -1), mask=i < QUERIES)
    tl.store(token_rows_ptr + t, tl.where(has_token, row, -1).to(tl.int32), mask=i < QUERIES)


def begin_verification(
    rows_B: torch.Tensor,
    table: torch.Tensor,
    drafts: DraftRows,
    token_ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    rows_T: torch.Tensor,
    kv_lens_B: torch.Tensor,
    starts_B: torch.Tensor,
    verified_B: torch.Tensor,
    unverified_B: torch.Tensor,
    pending_B: torch.Tensor,
) -> None:
    size = rows_B.shape[0]
    if not size:
        return
    queries = token_ids_T.shape[0] // size
    _begin_verification_kernel[(size,)](
        rows_B,
        table,
        drafts.drafts_RK,
        token_ids_T,
        positions_T,
        rows_T,
        kv_lens_B,
        starts_B,
        verified_B,
        unverified_B,
        pending_B,
        table.stride(0),
        drafts.drafts_RK.stride(0),
        QUERIES=queries,
        LANES=next_power_of_2(queries),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_decodes"])
def _accept_kernel(
    sampled_ptr,
    token_ids_ptr,
    rows_ptr,
    starts_ptr,
    verified_ptr,
    unverified_ptr,
    table_ptr,
    history_ptr,
    earlier_ptr,
    report_ptr,
    num_decodes,
    table_stride,
    report_stride,
    LENGTH: tl.constexpr,
    QUERIES: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    s = tl.program_id(0)
    row = tl.load(rows_ptr + s).to(tl.int64)
    if row < 0:
        return
    is_decode = s < num_decodes
    verified = tl.load(verified_ptr + s, mask=is_decode, other=0)
    unverified = tl.load(unverified_ptr + s, mask=is_decode, other=-1)
    start = tl.load(starts_ptr + s)
    end = tl.where(is_decode, (s + 1) * QUERIES, num_decodes * QUERIES + s - num_decodes + 1)
    first = end - 1 - verified
    i = tl.arange(0, LANES)
    tokens = tl.load(sampled_ptr + first + i, mask=i <= verified, other=0)
    drafts = tl.load(token_ids_ptr + first + 1 + i, mask=i < verified, other=-1)
    differs = (i >= verified) | (tokens != drafts)
    count = 1 + tl.min(tl.where(differs, i, LANES), 0)
    counts = i < count
    fields_ptr, out_ptr = table_ptr + row * table_stride, report_ptr + s * report_stride
    tl.store(out_ptr + TOKENS + i, tokens, mask=counts)
    at = tl.load(earlier_ptr + row) + start + 1
    tl.store(history_ptr + row * LENGTH + (at + i) % LENGTH, tokens, mask=counts)
    first_token = tl.sum(tl.where(i == 0, tokens, 0), 0)
    tl.store(out_ptr + REPORT_TOKENS, count)
    tl.store(out_ptr + REPORT_VERIFIED, verified)
    tl.store(out_ptr + REPORT_DRAFTS, 0)
    tl.store(out_ptr + REPORT_FIRST, tl.where(unverified >= 0, tl.where(first_token == unverified, 2, 1), 0))
    tl.store(fields_ptr + TOKEN, tl.sum(tl.where(i == count - 1, tokens, 0), 0))
    tl.store(fields_ptr + POSITION, start + count)
    tl.store(fields_ptr + NUM_DRAFTS, 0)
    tl.store(fields_ptr + PENDING, count - 1)


def accept(
    sampled_N: torch.Tensor,
    token_ids_T: torch.Tensor,
    rows_S: torch.Tensor,
    starts_S: torch.Tensor,
    verified_B: torch.Tensor,
    unverified_B: torch.Tensor,
    num_decodes: int,
    queries: int,
    table: torch.Tensor,
    drafts: DraftRows,
    report_SX: torch.Tensor,
) -> None:
    if not rows_S.shape[0]:
        return
    _accept_kernel[(rows_S.shape[0],)](
        sampled_N,
        token_ids_T,
        rows_S,
        starts_S,
        verified_B,
        unverified_B,
        table,
        drafts.history_RL,
        drafts.earlier_R,
        report_SX,
        num_decodes,
        table.stride(0),
        report_SX.stride(0),
        LENGTH=drafts.history_RL.shape[1],
        QUERIES=queries,
        LANES=next_power_of_2(queries),
        num_warps=1,
        **pdl_options(),
    )


@triton.jit(do_not_specialize=["size"])
def _write_histories_kernel(
    entries_ptr, history_ptr, earlier_ptr, drafts_ptr, drafts_stride, size, LENGTH: tl.constexpr
):
    """A program writes the tokens among CHUNK ints, and finds their entries by walking from the first one."""
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    begin = tl.program_id(0) * CHUNK
    end = tl.minimum(begin + CHUNK, size)
    at = 0
    while at < end:
        row = tl.load(entries_ptr + at).to(tl.int64)
        first, num_tokens = tl.load(entries_ptr + at + 1), tl.load(entries_ptr + at + 2)
        own = at + ENTRY
        at = own + num_tokens
        if at > begin:
            mask = (i >= own) & (i < at)
            token = tl.load(entries_ptr + i, mask=mask)
            if first == OF_DRAFTS:
                tl.store(drafts_ptr + row * drafts_stride + i - own, token, mask=mask)
            elif first == OF_EARLIER:
                tl.store(earlier_ptr + row + i - own, token, mask=mask)
            else:
                tl.store(history_ptr + row * LENGTH + (first + i - own) % LENGTH, token, mask=mask)


def write_histories(entries: torch.Tensor, drafts: DraftRows) -> None:
    size = entries.shape[0]
    if size:
        _write_histories_kernel[(cdiv(size, CHUNK.value),)](
            entries,
            drafts.history_RL,
            drafts.earlier_R,
            drafts.drafts_RK,
            drafts.drafts_RK.stride(0),
            size,
            LENGTH=drafts.history_RL.shape[1],
            num_warps=4,
        )
