"""Drafts in the Triton kernels of recurrent layers (DraftSpans): where the tokens of a sequence lie, and a
kernel that keeps inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.recurrent.sequences import Sequences
from shoal.kernels.rounding import cdiv

ELEMENTS = 1024  # the numbers of one program
MOST_PIECES = 4


@triton.jit
def token_span(
    seq, starts_ptr, draft_starts_ptr, verified_ptr, pending_ptr, num_drafting, DRAFTS: tl.constexpr
):
    """Returns for a sequence: its first token, the one after its last, the number of pending tokens before
    the first, the position of the first in a decode, and the token, counted from the first, after which the
    state is stored."""
    first, last = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    pending, position, stored = 0, 0, last - first - 1
    if DRAFTS:
        drafts = seq < num_drafting
        verified = tl.load(verified_ptr + seq, mask=drafts, other=0)
        first = tl.where(drafts, tl.maximum(last - 1 - verified, first), first)
        pending = tl.load(pending_ptr + seq, mask=drafts, other=0)
        position = tl.load(draft_starts_ptr + seq, mask=drafts, other=0)
        stored = tl.where(drafts, 0, stored)
    return first, last, pending, position, stored


@triton.jit
def kept_slot(kept_ptr, row, stride_row, position, SLOTS: tl.constexpr, SIZE: tl.constexpr):
    """Returns where the input of the token at a position is kept. `row`: in 64 bits."""
    return kept_ptr + row * stride_row + position % SLOTS * SIZE


@triton.jit(do_not_specialize=["spare_row"])
def _keep_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    stride_a,
    stride_b,
    stride_c,
    stride_d,
    kept_ptr,
    stride_row,
    rows_ptr,
    starts_ptr,
    draft_starts_ptr,
    verified_ptr,
    spare_row,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    seq, draft = tl.program_id(0), tl.program_id(1) + 1
    wait_for_inputs(PDL)
    verified = tl.load(verified_ptr + seq)
    if draft <= verified:
        token = (tl.load(starts_ptr + seq + 1) - 1 - verified + draft).to(tl.int64)
        row = tl.load(rows_ptr + seq)
        row = tl.where(row < 0, spare_row, row).to(tl.int64)
        position = tl.load(draft_starts_ptr + seq) + draft
        to_ptr = kept_slot(kept_ptr, row, stride_row, position, SLOTS, A + B + C + D)
        i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(a_ptr + token * stride_a + i, mask=i < A, other=0.0)
        if B:
            x += tl.load(b_ptr + token * stride_b + i - A, mask=(i >= A) & (i < A + B), other=0.0)
        if C:
            own = i - (A + B)
            x += tl.load(c_ptr + token * stride_c + own, mask=(own >= 0) & (own < C), other=0.0)
        if D:
            own = i - (A + B + C)
            x += tl.load(d_ptr + token * stride_d + own, mask=(own >= 0) & (own < D), other=0.0)
        tl.store(to_ptr + i, x.to(kept_ptr.dtype.element_ty), mask=i < A + B + C + D)


def keep_drafts(sequences: Sequences, kept_RKX: torch.Tensor | None, *pieces: torch.Tensor) -> None:
    """Keeps these inputs of the step's drafts, one after the other. Each piece is [T, ...]."""
    drafts = sequences.drafts
    if drafts is None or drafts.queries < 2 or not len(drafts.verified_B):
        return
    assert kept_RKX is not None and kept_RKX[0].is_contiguous() and len(pieces) <= MOST_PIECES
    sizes = [piece[0].numel() for piece in pieces]
    assert sum(sizes) == kept_RKX.shape[2] and drafts.queries - 1 <= kept_RKX.shape[1]
    missing = MOST_PIECES - len(pieces)
    _keep_kernel[(len(drafts.verified_B), drafts.queries - 1, cdiv(sum(sizes), ELEMENTS))](
        *pieces,
        *[None] * missing,
        *(piece.stride(0) for piece in pieces),
        *[0] * missing,
        kept_RKX,
        kept_RKX.stride(0),
        sequences.rows_S,
        sequences.starts_S,
        drafts.starts_B,
        drafts.verified_B,
        len(kept_RKX) - 1,
        *sizes,
        *[0] * missing,
        SLOTS=kept_RKX.shape[1],
        BLOCK=ELEMENTS,
        num_warps=4,
        **pdl_options(),
    )


def draft_arguments(
    sequences: Sequences, kept_RKX: torch.Tensor | None
) -> tuple[tuple[torch.Tensor | int | None, ...], dict[str, bool | int]]:
    """Returns the arguments about drafts of the kernels that compute tokens."""
    drafts = sequences.drafts
    if drafts is None:
        return (None, None, None, 0, None, 0), {"DRAFTS": False, "SLOTS": 1}
    assert kept_RKX is not None and kept_RKX[0].is_contiguous()
    own = drafts.starts_B, drafts.verified_B, drafts.pending_B, len(drafts.verified_B)
    return (*own, kept_RKX, kept_RKX.stride(0)), {"DRAFTS": True, "SLOTS": kept_RKX.shape[1]}
