"""The causal convolution of recurrent layers in Triton. One program has some channels of a chunk of tokens.

T tokens · S sequences · C channels · W width · R state rows. The oracle is reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.recurrent.chunks import find_chunk, max_chunks, sigmoid, state_row
from shoal.kernels.recurrent.sequences import Sequences
from shoal.kernels.rounding import cdiv, next_power_of_2

PROMPT_TOKENS = 32  # the tokens of one program
CHANNELS = 128


@triton.jit(do_not_specialize=["spare_row", "first_seq", "num_seqs"])
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
    first_seq,
    num_seqs,
    C: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """TOKENS 1: sequences decode, and a program is for one of them."""
    OLD: tl.constexpr = W - 1
    wait_for_inputs(PDL)
    if TOKENS == 1:
        seq, chunk = tl.program_id(0), 0
    else:
        seq, chunk = find_chunk(tl.program_id(0), starts_ptr + first_seq, num_seqs, TOKENS, BLOCK_S)
    in_use = seq < num_seqs
    seq = tl.minimum(seq, num_seqs - 1) + first_seq
    first = tl.load(starts_ptr + seq)
    length = tl.load(starts_ptr + seq + 1) - first
    if in_use & (length > 0):
        begins = tl.load(positions_ptr + first) <= 0
        state_ptr = states_ptr + state_row(rows_ptr, seq, spare_row) * stride_row
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
            old_ptr = state_ptr + c[None, :] * OLD + OLD + at
            old = tl.load(old_ptr, mask=mask & (at < 0) & (begins == 0), other=0.0)
            weight = tl.load(weight_ptr + c * W + tap, mask=c < C, other=0.0).to(tl.float32)
            sums += weight[None, :] * (new.to(tl.float32) + old.to(tl.float32))
        if SILU:
            sums *= sigmoid(sums)
        out_at = (first + t).to(tl.int64)[:, None] * C + c[None, :]
        tl.store(out_ptr + out_at, sums.to(out_ptr.dtype.element_ty), mask=mask)
        # The program of the first chunk has read the state, so it writes the next one too.
        if chunk == 0:
            place = tl.arange(0, BLOCK_W)[None, :]
            exists = (place < OLD) & (c < C)[:, None]
            source = length - OLD + place
            fresh_ptr = token_ptr + source.to(tl.int64) * stride_x + c[:, None]
            kept_ptr = state_ptr + c[:, None] * OLD + OLD + source
            fresh = tl.load(fresh_ptr, mask=exists & (source >= 0), other=0.0)
            kept = tl.load(kept_ptr, mask=exists & (source < 0) & (begins == 0), other=0.0)
            tl.debug_barrier()  # another thread may read what this one writes
            inputs = tl.where(source >= 0, fresh.to(tl.float32), kept.to(tl.float32))
            tl.store(state_ptr + c[:, None] * OLD + place, inputs.to(kept.dtype), mask=exists)


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    silu: bool,
    inputs_RCW: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """As reference.causal_conv."""
    (num_tokens, channels), width = x_TC.shape, weight_CW.shape[1]
    assert x_TC.stride(1) == 1 and weight_CW.is_contiguous() and inputs_RCW[0].is_contiguous()
    assert inputs_RCW.shape[1:] == (channels, width - 1) and width > 1
    out_TC = torch.empty((num_tokens, channels), dtype=x_TC.dtype, device=x_TC.device)
    decodes, num_seqs = sequences.num_decodes, len(sequences.rows_S)
    for first, count, tokens in ((0, decodes, 1), (decodes, num_seqs - decodes, PROMPT_TOKENS)):
        programs = count if tokens == 1 else max_chunks(num_tokens, count, tokens)
        if not count or not programs:
            continue
        _conv_kernel[(programs, cdiv(channels, CHANNELS))](
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
            first,
            count,
            C=channels,
            W=width,
            SILU=silu,
            TOKENS=tokens,
            CHANNELS=CHANNELS,
            BLOCK_W=next_power_of_2(width - 1),
            BLOCK_S=1 if tokens == 1 else next_power_of_2(count),
            num_warps=1 if tokens == 1 else 4,
            **pdl_options(),
        )
    return out_TC
