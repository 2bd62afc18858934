"""Mamba-2's state space in Triton. Decodes are one kernel, in which a program has some rows of one head's
state, and takes tokens one by one. For prompts a program walks through its sequence in chunks (Dao & Gu
2024), with these rows in registers.

Within a chunk, G is the running sum of the decays' logarithms, and D_ij = exp(G_i - G_j) dt_j for j <= i.
From a state S the outputs are exp(G) C S^T + tril(C B^T D) x.

T tokens · S sequences · H heads · V numbers of a head · G groups · N numbers of a state · R state rows · L
tokens of a chunk. The oracle is reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import has_large_shared_memory
from shoal.kernels.matmul.dispatch import gpu_of
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.recurrent.chunks import CHUNK, RuleTiles, softplus, state_row, takes_chunks
from shoal.kernels.recurrent.drafts import draft_arguments, keep_drafts, kept_slot, token_span
from shoal.kernels.recurrent.sequences import Sequences
from shoal.kernels.rounding import cdiv, next_power_of_2

TOKEN_TILES = RuleTiles(32, 4, 1)
NARROW_SCAN_TILES = RuleTiles(32, 8, 2)  # on GPUs before Hopper, where fewer warps spill


@triton.jit
def _next_state(state, x, b, dt, rate, dt_bias, least_dt, most_dt):
    """Returns the state [V, N] after a token. dt lacks its bias and its softplus."""
    dt = softplus(dt.to(tl.float32) + dt_bias)
    dt = tl.minimum(tl.maximum(dt, least_dt), most_dt)
    return state * tl.exp(rate * dt) + (x.to(tl.float32) * dt)[:, None] * b.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["spare_row", "num_drafting"])
def _mamba_token_kernel(
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    a_log_ptr,
    d_ptr,
    dt_bias_ptr,
    states_ptr,
    rows_ptr,
    starts_ptr,
    positions_ptr,
    out_ptr,
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    stride_row,
    spare_row,
    least_dt,
    most_dt,
    draft_starts_ptr,
    verified_ptr,
    pending_ptr,
    num_drafting,
    kept_ptr,
    stride_kept,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DRAFTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    seq, head = tl.program_id(0), tl.program_id(1)
    n, r = tl.arange(0, BLOCK_N), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    first, last, pending, position, stored = token_span(
        seq, starts_ptr, draft_starts_ptr, verified_ptr, pending_ptr, num_drafting, DRAFTS
    )
    in_use = last > first
    goes_on = (tl.load(positions_ptr + first, mask=in_use, other=-1) > 0) | (pending > 0)
    row = state_row(rows_ptr, seq, spare_row)
    state_ptr = states_ptr + row * stride_row + head * V * N
    at, mask = r[:, None] * N + n[None, :], (r < V)[:, None] & (n < N)[None, :]
    # Earlier kernels of this step write other layers' states, so this one may be read before they are done.
    state = tl.load(state_ptr + at, mask=mask & goes_on, other=0.0, cache_modifier=".cg").to(tl.float32)
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias, d = tl.load(dt_bias_ptr + head).to(tl.float32), tl.load(d_ptr + head).to(tl.float32)
    wait_for_inputs(PDL)
    group = head // SHARED * N + n
    if DRAFTS:
        all_keys: tl.constexpr = H // SHARED * N
        for i in range(pending):
            slot_ptr = kept_slot(
                kept_ptr, row, stride_kept, position - pending + i, SLOTS, H * V + all_keys + H
            )
            x = tl.load(slot_ptr + head * V + r, mask=r < V, other=0.0)
            b = tl.load(slot_ptr + H * V + group, mask=n < N, other=0.0)
            dt = tl.load(slot_ptr + H * V + all_keys + head)
            state = _next_state(state, x, b, dt, rate, dt_bias, least_dt, most_dt)
            state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
        if (last == first) & (pending > 0):
            tl.store(state_ptr + at, state.to(states_ptr.dtype.element_ty), mask=mask)
    for i in range(last - first):
        token = first.to(tl.int64) + i
        x = tl.load(x_ptr + token * stride_x + head * V + r, mask=r < V, other=0.0)
        b = tl.load(b_ptr + token * stride_b + group, mask=n < N, other=0.0)
        c = tl.load(c_ptr + token * stride_c + group, mask=n < N, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + token * stride_dt + head)
        state = _next_state(state, x, b, dt, rate, dt_bias, least_dt, most_dt)
        out = tl.sum(state * c[None, :], axis=1) + d * x.to(tl.float32)
        tl.store(out_ptr + (token * H + head) * V + r, out.to(out_ptr.dtype.element_ty), mask=r < V)
        if DRAFTS:
            if i == stored:
                tl.store(state_ptr + at, state.to(states_ptr.dtype.element_ty), mask=mask)
            if seq < num_drafting:  # as if it was stored, so that drafts change nothing
                state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
    if not DRAFTS:
        tl.store(state_ptr + at, state.to(states_ptr.dtype.element_ty), mask=mask & in_use)


@triton.jit(do_not_specialize=["spare_row", "first_seq"])
def _mamba_scan_kernel(
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    a_log_ptr,
    d_ptr,
    dt_bias_ptr,
    states_ptr,
    rows_ptr,
    starts_ptr,
    positions_ptr,
    out_ptr,
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    stride_row,
    spare_row,
    least_dt,
    most_dt,
    first_seq,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    L: tl.constexpr,
    PDL: tl.constexpr,
):
    seq, head = first_seq + tl.program_id(0), tl.program_id(1)
    n, r = tl.arange(0, BLOCK_N), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias, d = tl.load(dt_bias_ptr + head).to(tl.float32), tl.load(d_ptr + head).to(tl.float32)
    wait_for_inputs(PDL)
    first, last = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    if last > first:
        goes_on = tl.load(positions_ptr + first) > 0
        dtype = x_ptr.dtype.element_ty
        state_ptr = states_ptr + state_row(rows_ptr, seq, spare_row) * stride_row + head * V * N
        # The state is transposed, [N, V], as matmuls take it.
        at, state_mask = r[None, :] * N + n[:, None], (r < V)[None, :] & (n < N)[:, None]
        state = tl.load(state_ptr + at, mask=state_mask & goes_on, other=0.0).to(tl.float32)
        i = tl.arange(0, L)
        for start in range(first, last, L):
            t = start + i
            real = t < last
            token = t.to(tl.int64)
            group, key_mask = head // SHARED * N + n[None, :], real[:, None] & (n < N)[None, :]
            b = tl.load(b_ptr + token[:, None] * stride_b + group, mask=key_mask, other=0.0)
            c = tl.load(c_ptr + token[:, None] * stride_c + group, mask=key_mask, other=0.0)
            mask = real[:, None] & (r < V)[None, :]
            x = tl.load(x_ptr + token[:, None] * stride_x + head * V + r[None, :], mask=mask, other=0.0)
            dt = softplus(
                tl.load(dt_ptr + token * stride_dt + head, mask=real, other=0.0).to(tl.float32) + dt_bias
            )
            dt = tl.where(real, tl.minimum(tl.maximum(dt, least_dt), most_dt), 0.0)
            logs, total = tl.cumsum(rate * dt, 0), tl.sum(rate * dt, 0)
            decay = tl.exp(tl.minimum(logs[:, None] - logs[None, :], 0.0)) * dt[None, :]
            scores = tl.dot(c, tl.trans(b)) * decay
            scores = tl.where(i[:, None] >= i[None, :], scores, 0.0).to(dtype)
            out = tl.dot(c, state.to(dtype)) * tl.exp(logs)[:, None]
            out += tl.dot(scores, x)
            x32 = x.to(tl.float32)
            out_at = (token[:, None] * H + head) * V + r[None, :]
            tl.store(out_ptr + out_at, (out + d * x32).to(dtype), mask=mask)
            left = (x32 * (dt * tl.exp(tl.minimum(total - logs, 0.0)))[:, None]).to(dtype)
            state = state * tl.exp(total) + tl.dot(tl.trans(b), left)
        tl.store(state_ptr + at, state.to(states_ptr.dtype.element_ty), mask=state_mask)


def scan_tiles(num_heads: int, rows: int, device: torch.device) -> RuleTiles:
    """Returns the tiles of `num_heads` heads over all prompts. Once heads have more programs than there are
    SMs, two on an SM, with fewer stages, are quicker than one."""
    if not has_large_shared_memory():
        return NARROW_SCAN_TILES
    sms, programs = gpu_of(device).sms, num_heads * cdiv(rows, 64)
    if programs > sms:
        return RuleTiles(64, 4, 2)
    return RuleTiles(64 if 2 * programs > sms else 32, 4, 3)


def mamba2(
    x_THV: torch.Tensor,
    dt_TH: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    a_log_H: torch.Tensor,
    d_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    limits: tuple[float, float],
    states_RHVN: torch.Tensor,
    sequences: Sequences,
    kept_RKX: torch.Tensor | None = None,
) -> torch.Tensor:
    """As reference.mamba2."""
    (num_tokens, heads, rows), (_, groups, size) = x_THV.shape, b_TGN.shape
    for x in (x_THV, b_TGN, c_TGN):
        assert x.dtype == x_THV.dtype and (x.stride()[1:] == (x.shape[2], 1) or not num_tokens)
    assert dt_TH.stride(1) == 1 and heads % groups == 0 and states_RHVN[0].is_contiguous()
    out_THV = x_THV.new_empty(num_tokens, heads, rows)
    arguments = (
        *(x_THV, dt_TH, b_TGN, c_TGN, a_log_H, d_H, dt_bias_H, states_RHVN),
        *(sequences.rows_S, sequences.starts_S, sequences.positions_T, out_THV),
        *(x.stride(0) for x in (x_THV, dt_TH, b_TGN, c_TGN, states_RHVN)),
        len(states_RHVN) - 1,
        *map(float, limits),
    )
    num_seqs = len(sequences.rows_S)
    by_token = sequences.num_decodes if takes_chunks(x_THV.dtype) else num_seqs
    prompts = num_seqs - by_token
    sizes = dict(H=heads, SHARED=heads // groups, N=size, V=rows)
    block_n, whole = next_power_of_2(size), next_power_of_2(rows)
    if by_token:
        block = min(whole, TOKEN_TILES.values)
        drafts, draft_sizes = draft_arguments(sequences, kept_RKX)
        _mamba_token_kernel[(by_token, heads, cdiv(rows, block))](
            *arguments,
            *drafts,
            **sizes,
            **draft_sizes,
            BLOCK_N=block_n,
            BLOCK_V=block,
            num_warps=TOKEN_TILES.warps,
            **pdl_options(),
        )
        keep_drafts(sequences, kept_RKX, x_THV, b_TGN, dt_TH)
    if prompts and num_tokens:
        tiles = scan_tiles(prompts * heads, rows, x_THV.device)
        block_n, block = max(block_n, 16), max(min(whole, tiles.values), 16)
        _mamba_scan_kernel[(prompts, heads, cdiv(rows, block))](
            *arguments,
            by_token,
            **sizes,
            BLOCK_N=block_n,
            BLOCK_V=block,
            L=CHUNK,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **pdl_options(),
        )
    return out_THV
