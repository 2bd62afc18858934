"""The causal convolution of recurrent layers in Triton. One program has some channels of a chunk of tokens.

T tokens · S sequences · C channels · W width · R state rows. The oracle is reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.recurrent.chunks import find_chunk, max_chunks, sigmoid, state_row
from shoal.kernels.recurrent.drafts import draft_arguments, keep_drafts, kept_slot, token_span
from shoal.kernels.recurrent.sequences import Sequences
from shoal.kernels.rounding import cdiv, next_power_of_2

CHANNELS = 128  # per program for decodes
PROMPT_TILES = (32, 128, 4)  # tokens, channels and warps per program for prompts


@triton.jit
def _input_before(
    state_ptr,
    kept_ptr,
    row,
    stride_kept,
    position,
    pending,
    at,
    c,
    mask,
    W: tl.constexpr,
    C: tl.constexpr,
    DRAFTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Returns inputs at offsets `at`, below 0, from a sequence's first token: pending ones come right before
    it, and before these the row's."""
    before = at + pending
    x = tl.load(state_ptr + c * (W - 1) + W - 1 + before, mask=mask & (before < 0), other=0.0)
    if DRAFTS:
        is_pending = mask & (before >= 0) & (at < 0)
        slot_ptr = kept_slot(kept_ptr, row, stride_kept, position + at, SLOTS, C)
        x = tl.where(is_pending, tl.load(slot_ptr + c, mask=is_pending, other=0.0), x)
    return x


@triton.jit(do_not_specialize=["spare_row", "first_seq", "num_seqs", "num_drafting"])
def _conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    rows_ptr,
    starts_ptr,
    positions_ptr,
    out_ptr,
    stride_x,
    stride_row,
    spare_row,
    draft_starts_ptr,
    verified_ptr,
    pending_ptr,
    num_drafting,
    kept_ptr,
    stride_kept,
    first_seq,
    num_seqs,
    C: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DECODES: tl.constexpr,
    DRAFTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """DECODES: a program is for all tokens of one sequence."""
    OLD: tl.constexpr = W - 1
    wait_for_inputs(PDL)
    if DECODES:
        seq, chunk = tl.program_id(0), 0
    else:
        seq, chunk = find_chunk(tl.program_id(0), starts_ptr + first_seq, num_seqs, TOKENS, BLOCK_S)
    in_use = seq < num_seqs
    seq = tl.minimum(seq, num_seqs - 1) + first_seq
    first, last, pending, position, stored = token_span(
        seq, starts_ptr, draft_starts_ptr, verified_ptr, pending_ptr, num_drafting, DRAFTS
    )
    length = last - first
    if in_use & (length + pending > 0):
        begins = tl.load(positions_ptr + first, mask=length > 0, other=1) <= 0
        row = state_row(rows_ptr, seq, spare_row)
        state_ptr = states_ptr + row * stride_row
        token_ptr = x_ptr + first.to(tl.int64) * stride_x
        c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        t = chunk * TOKENS + tl.arange(0, TOKENS)
        mask = (t < length)[:, None] & (c < C)[None, :]
        sums = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(W):
            at = (t - OLD + tap)[:, None]
            new = tl.load(
                token_ptr + at.to(tl.int64) * stride_x + c[None, :], mask=mask & (at >= 0), other=0.0
            )
            weight = tl.load(weight_ptr + c * W + tap, mask=c < C, other=0.0).to(tl.float32)
            sums += weight[None, :] * new.to(tl.float32)
            if chunk == 0:
                is_old = mask & (at < 0) & (begins == 0)
                old = _input_before(
                    state_ptr,
                    kept_ptr,
                    row,
                    stride_kept,
                    position,
                    pending,
                    at,
                    c[None, :],
                    is_old,
                    W,
                    C,
                    DRAFTS,
                    SLOTS,
                )
                sums += weight[None, :] * old.to(tl.float32)
        if SILU:
            sums *= sigmoid(sums)
        out_at = (first + t).to(tl.int64)[:, None] * C + c[None, :]
        tl.store(out_ptr + out_at, sums.to(out_ptr.dtype.element_ty), mask=mask)
        # The program of the first chunk has read the state, so it writes the next one too.
        if chunk == 0:
            place = tl.arange(0, BLOCK_W)[None, :]
            exists = (place < OLD) & (c < C)[:, None]
            source = tl.minimum(stored + 1, length) - OLD + place
            fresh_ptr = token_ptr + source.to(tl.int64) * stride_x + c[:, None]
            fresh = tl.load(fresh_ptr, mask=exists & (source >= 0), other=0.0)
            is_old = exists & (source < 0) & (begins == 0)
            old = _input_before(
                state_ptr,
                kept_ptr,
                row,
                stride_kept,
                position,
                pending,
                source,
                c[:, None],
                is_old,
                W,
                C,
                DRAFTS,
                SLOTS,
            )
            tl.debug_barrier()  # another thread may read what this one writes
            inputs = tl.where(source >= 0, fresh.to(tl.float32), old.to(tl.float32))
            tl.store(state_ptr + c[:, None] * OLD + place, inputs.to(old.dtype), mask=exists)


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    silu: bool,
    inputs_RCW: torch.Tensor,
    sequences: Sequences,
    kept_RKC: torch.Tensor | None = None,
) -> torch.Tensor:
    """As reference.causal_conv."""
    (num_tokens, channels), width = x_TC.shape, weight_CW.shape[1]
    assert x_TC.stride(1) == 1 and weight_CW.is_contiguous() and inputs_RCW[0].is_contiguous()
    assert inputs_RCW.shape[1:] == (channels, width - 1) and width > 1
    out_TC = torch.empty((num_tokens, channels), dtype=x_TC.dtype, device=x_TC.device)
    decodes, num_seqs = sequences.num_decodes, len(sequences.rows_S)
    drafts, draft_sizes = draft_arguments(sequences, kept_RKC)
    queries = 1 if sequences.drafts is None else next_power_of_2(max(sequences.drafts.queries, 1))
    decode_tiles = (queries, CHANNELS, 1 if queries == 1 else 4)
    for first, count, tiles in ((0, decodes, decode_tiles), (decodes, num_seqs - decodes, PROMPT_TILES)):
        tokens, block, warps = tiles
        are_decodes = first < decodes
        programs = count if are_decodes else max_chunks(num_tokens, count, tokens)
        if not count or not programs:
            continue
        _conv_kernel[(programs, cdiv(channels, block))](
            x_TC,
            weight_CW,
            bias_C,
            inputs_RCW,
            sequences.rows_S,
            sequences.starts_S,
            sequences.positions_T,
            out_TC,
            x_TC.stride(0),
            inputs_RCW.stride(0),
            len(inputs_RCW) - 1,
            *drafts,
            first,
            count,
            C=channels,
            W=width,
            SILU=silu,
            TOKENS=tokens,
            CHANNELS=block,
            BLOCK_W=next_power_of_2(width - 1),
            BLOCK_S=1 if are_decodes else next_power_of_2(count),
            DECODES=are_decodes,
            **draft_sizes,
            num_warps=warps,
            **pdl_options(),
        )
    keep_drafts(sequences, kept_RKC, x_TC)
    return out_TC
