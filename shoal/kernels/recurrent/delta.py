"""The gated delta rule in Triton. Decodes are one kernel, in which a program has some columns of one head's
state, and takes tokens one by one. Prompts are computed in chunks (Yang 2024): a first kernel, for all chunks
at once, solves how the tokens of a chunk change what later ones see; a second one walks through each sequence
with its state in registers.

Within a chunk, G is the running sum of the decays' logarithms, and D_ij = exp(G_i - G_j) for j <= i. With
M = tril(beta k k^T D, -1), the changes that a chunk makes to a state S are U - Y S, where
U = (I + M)^-1 beta v and Y = (I + M)^-1 beta exp(G) k. Where channels of keys have gates of their own, G and
D belong to each channel, and D is within the products of k, and of q and k.

T tokens · S sequences · K key heads · H value heads · N numbers of a key · V numbers of a value · R state
rows · L tokens of a chunk. The oracle is reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import has_large_shared_memory
from shoal.kernels.matmul.dispatch import gpu_of
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.recurrent.chunks import (
    CHUNK,
    RuleTiles,
    find_chunk,
    max_chunks,
    sigmoid,
    softplus,
    state_row,
    takes_chunks,
)
from shoal.kernels.recurrent.drafts import draft_arguments, keep_drafts, kept_slot, token_span
from shoal.kernels.recurrent.sequences import Sequences
from shoal.kernels.rounding import cdiv, next_power_of_2

TOKEN_TILES = RuleTiles(32, 4, 1)  # a head of 128 x 128 keeps four processors busy
CHUNK_TILES = RuleTiles(64, 4, 3)
# On GPUs before Hopper, which have less shared memory and where wider tiles spill:
NARROW_CHUNK_TILES, NARROW_SCAN_TILES = RuleTiles(32, 8, 3), RuleTiles(32, 4, 2)


@triton.jit
def normed(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=len(x.shape) - 1, keep_dims=True) + 1e-6)


@triton.jit
def _next_state(state, k, v, a, b, rate, dt_bias, GATES: tl.constexpr):
    """Returns the state [N, V] after a token. k is not normed yet. GATES: of a head."""
    k = normed(k.to(tl.float32))
    decay = tl.exp(rate * softplus(a.to(tl.float32) + dt_bias))
    if GATES > 1:
        state *= decay[:, None]
    else:
        state *= decay
    change = (v.to(tl.float32) - tl.sum(state * k[:, None], axis=0)) * sigmoid(b.to(tl.float32))
    return state + k[:, None] * change[None, :]


@triton.jit(do_not_specialize=["spare_row", "num_drafting"])
def _delta_token_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    states_ptr,
    rows_ptr,
    starts_ptr,
    positions_ptr,
    out_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_a,
    stride_b,
    stride_row,
    spare_row,
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
    GATES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DRAFTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    seq, head = tl.program_id(0), tl.program_id(1)
    n, c = tl.arange(0, BLOCK_N), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    first, last, pending, position, stored = token_span(
        seq, starts_ptr, draft_starts_ptr, verified_ptr, pending_ptr, num_drafting, DRAFTS
    )
    in_use = last > first
    goes_on = (tl.load(positions_ptr + first, mask=in_use, other=-1) > 0) | (pending > 0)
    row = state_row(rows_ptr, seq, spare_row)
    state_ptr = states_ptr + row * stride_row + head * N * V
    at, mask = n[:, None] * V + c[None, :], (n < N)[:, None] & (c < V)[None, :]
    # Earlier kernels of this step write other layers' states, so this one may be read before they are done.
    state = tl.load(state_ptr + at, mask=mask & goes_on, other=0.0, cache_modifier=".cg").to(tl.float32)
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    if GATES > 1:  # each number of a key has one
        gates, gate_mask = head * N + n, n < N
    else:
        gates, gate_mask = head, True
    dt_bias = tl.load(dt_bias_ptr + gates, mask=gate_mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    keys = head // SHARED * N + n
    if DRAFTS:
        all_keys: tl.constexpr = H // SHARED * N
        for i in range(pending):
            slot_ptr = kept_slot(
                kept_ptr, row, stride_kept, position - pending + i, SLOTS, all_keys + H * V + (GATES + 1) * H
            )
            k = tl.load(slot_ptr + keys, mask=n < N, other=0.0)
            v = tl.load(slot_ptr + all_keys + head * V + c, mask=c < V, other=0.0)
            gates_ptr = slot_ptr + all_keys + H * V
            a, b = tl.load(gates_ptr + gates, mask=gate_mask), tl.load(gates_ptr + GATES * H + head)
            state = _next_state(state, k, v, a, b, rate, dt_bias, GATES)
            state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
        if (last == first) & (pending > 0):
            tl.store(state_ptr + at, state.to(states_ptr.dtype.element_ty), mask=mask)
    for i in range(last - first):
        token = first.to(tl.int64) + i
        q = normed(tl.load(q_ptr + token * stride_q + keys, mask=n < N, other=0.0).to(tl.float32))
        k = tl.load(k_ptr + token * stride_k + keys, mask=n < N, other=0.0)
        v = tl.load(v_ptr + token * stride_v + head * V + c, mask=c < V, other=0.0)
        a = tl.load(a_ptr + token * stride_a + gates, mask=gate_mask, other=0.0)
        b = tl.load(b_ptr + token * stride_b + head)
        state = _next_state(state, k, v, a, b, rate, dt_bias, GATES)
        out = tl.sum(state * q[:, None], axis=0) * (N**-0.5)
        tl.store(out_ptr + (token * H + head) * V + c, out.to(out_ptr.dtype.element_ty), mask=c < V)
        if DRAFTS:
            if i == stored:
                tl.store(state_ptr + at, state.to(states_ptr.dtype.element_ty), mask=mask)
            if seq < num_drafting:  # as if it was stored, so that drafts change nothing
                state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
    if not DRAFTS:
        tl.store(state_ptr + at, state.to(states_ptr.dtype.element_ty), mask=mask & in_use)


@triton.jit
def _inverse(m, SIZE: tl.constexpr, PART: tl.constexpr):
    """Returns (I + m)^-1 of a matrix [SIZE, SIZE] whose numbers on and above the diagonal are 0. Parts of
    PART rows on the diagonal are inverted row by row. Powers of the whole would not do: where tokens repeat,
    they grow beyond what float32 sums can cancel."""
    PARTS: tl.constexpr = SIZE // PART
    part, other = tl.arange(0, PARTS)[:, None, None, None], tl.arange(0, PARTS)[None, None, :, None]
    row, column = tl.arange(0, PART)[None, :, None], tl.arange(0, PART)[None, None, :]
    whole_row, whole_column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    apart = tl.reshape(m, (PARTS, PART, PARTS, PART))
    inverse = -tl.sum(tl.where(part == other, apart, 0.0), axis=2)
    for i in range(2, PART):
        own = tl.sum(tl.where(row == i, inverse, 0.0), axis=1)
        own += tl.sum(own[:, :, None] * inverse, axis=1)
        inverse = tl.where(row == i, own[:, None, :], inverse)
    inverse = tl.where(row == column, 1.0, inverse)
    joined = tl.where(part == other, inverse[:, :, None, :], tl.zeros_like(apart))
    diagonal = tl.reshape(joined, (SIZE, SIZE))
    # Now m = diagonal^-1 (I + e), where e has parts below the diagonal alone, so its power PARTS is zero.
    below = tl.where(whole_row // PART > whole_column // PART, m, 0.0)
    e = tl.dot(diagonal, below)
    tl.static_assert(PARTS == 4)
    square = tl.dot(e, e)
    rest = square - e - tl.dot(e, square)
    return diagonal + tl.dot(rest, diagonal)


@triton.jit
def _decayed_products(
    q,
    k,
    logs,
    k_ptr,
    logs_ptr,
    at,
    mask,
    STRIDE: tl.constexpr,
    L: tl.constexpr,
    PART: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Returns q_i and k_i times k_j, [L, L], for j <= i, whose numbers are decayed by exp(G_i - G_j) each.
    Between parts of PART tokens these are matmuls, as both factors of exp(G_i - R) exp(R - G_j) are at most 1
    with the G of the last token before i's part for R. Within a part, tokens of each distance are multiplied
    in turn. `at`: where the numbers of a token lie, STRIDE from the next token's."""
    i = tl.arange(0, L)
    scores, m = tl.zeros((L, L), tl.float32), tl.zeros((L, L), tl.float32)
    for part in tl.static_range(1, L // PART):
        last = tl.sum(tl.where(i[:, None] == part * PART - 1, logs, 0.0), axis=0)[None, :]
        own, earlier = (i // PART == part)[:, None], (i < part * PART)[:, None]
        rows = tl.where(own, tl.exp(tl.minimum(logs - last, 0.0)), 0.0)
        columns = tl.trans(tl.where(earlier, k * tl.exp(tl.minimum(last - logs, 0.0)), 0.0).to(DTYPE))
        scores += tl.dot((q * rows).to(DTYPE), columns)
        m += tl.dot((k * rows).to(DTYPE), columns)
    for distance in range(PART):
        near = i % PART >= distance
        there = mask & near[:, None]
        other = tl.load(k_ptr + at - distance * STRIDE, mask=there, other=0.0).to(tl.float32)
        decay = tl.exp(
            tl.minimum(logs - tl.load(logs_ptr + at - distance * STRIDE, mask=there, other=0.0), 0.0)
        )
        pairs = near[:, None] & (i[None, :] == i[:, None] - distance)
        scores += tl.where(pairs, tl.sum(q * other * decay, axis=1)[:, None], 0.0)
        m += tl.where(pairs, tl.sum(k * other * decay, axis=1)[:, None], 0.0)
    return scores, m


@triton.jit(do_not_specialize=["first_seq", "num_seqs"])
def _delta_chunk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    starts_ptr,
    normed_q_ptr,
    normed_k_ptr,
    logs_ptr,
    scores_ptr,
    u_ptr,
    y_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_a,
    stride_b,
    first_seq,
    num_seqs,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    GATES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    L: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(1)
    seq, chunk = find_chunk(tl.program_id(0), starts_ptr + first_seq, num_seqs, L, BLOCK_S)
    wait_for_inputs(PDL)
    if seq < num_seqs:
        i = tl.arange(0, L)
        t = tl.load(starts_ptr + first_seq + seq) + chunk * L + i
        real = t < tl.load(starts_ptr + first_seq + seq + 1)
        token, n = t.to(tl.int64), tl.arange(0, BLOCK_N)
        keys, key_mask = head // SHARED * N + n[None, :], real[:, None] & (n < N)[None, :]
        dtype = v_ptr.dtype.element_ty
        normed_at = token[:, None] * (H // SHARED * N) + keys
        k = tl.load(k_ptr + token[:, None] * stride_k + keys, mask=key_mask, other=0.0).to(tl.float32)
        k = normed(k)
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        if GATES > 1:
            q = tl.load(q_ptr + token[:, None] * stride_q + keys, mask=key_mask, other=0.0).to(tl.float32)
            q = normed(q) * (N**-0.5)
            gates = head * N + n[None, :]
            gate = tl.load(a_ptr + token[:, None] * stride_a + gates, mask=key_mask, other=0.0).to(tl.float32)
            gate = softplus(gate + tl.load(dt_bias_ptr + gates, mask=n[None, :] < N, other=0.0))
            logs = tl.cumsum(tl.where(key_mask, rate * gate, 0.0), 0)
            tl.store(logs_ptr + normed_at, logs, mask=key_mask)  # a key head has one value head
            # The scan multiplies queries by states before the chunk.
            tl.store(normed_q_ptr + normed_at, (q * tl.exp(logs)).to(dtype), mask=key_mask)
            tl.store(normed_k_ptr + normed_at, k.to(dtype), mask=key_mask)
            tl.debug_barrier()
            scores, m = _decayed_products(
                q, k, logs, normed_k_ptr, logs_ptr, normed_at, key_mask, H * N, L, 16, dtype
            )
            scores = scores.to(dtype)
        else:
            k = k.to(dtype)
            gate = tl.load(a_ptr + token * stride_a + head, mask=real, other=0.0).to(tl.float32)
            gate = softplus(gate + tl.load(dt_bias_ptr + head).to(tl.float32))
            logs = tl.cumsum(tl.where(real, rate * gate, 0.0), 0)
            tl.store(logs_ptr + token * H + head, logs, mask=real)
            decay = tl.exp(tl.minimum(logs[:, None] - logs[None, :], 0.0))
            q = tl.load(q_ptr + token[:, None] * stride_q + keys, mask=key_mask, other=0.0).to(tl.float32)
            q = (normed(q) * (N**-0.5)).to(dtype)
            if head % SHARED == 0:
                tl.store(normed_q_ptr + normed_at, q, mask=key_mask)
                tl.store(normed_k_ptr + normed_at, k, mask=key_mask)
            scores = tl.dot(q, tl.trans(k))
            scores = tl.where(i[:, None] >= i[None, :], scores * decay, 0.0).to(dtype)
        tl.store(
            scores_ptr + (token[:, None] * H + head) * L + i[None, :],
            scores,
            mask=tl.broadcast_to(real[:, None], (L, L)),
        )
        beta = sigmoid(tl.load(b_ptr + token * stride_b + head, mask=real, other=0.0).to(tl.float32))
        if GATES > 1:
            m *= beta[:, None]
        else:
            m = tl.dot(k, tl.trans(k)) * decay * beta[:, None]
        inverse = _inverse(tl.where(i[:, None] > i[None, :], m, 0.0), L, L // 4).to(dtype)
        # Keys and beta are read again, as the inverse needs the registers.
        beta = sigmoid(tl.load(b_ptr + token * stride_b + head, mask=real, other=0.0).to(tl.float32))
        k = tl.load(k_ptr + token[:, None] * stride_k + keys, mask=key_mask, other=0.0).to(tl.float32)
        k = normed(k)
        if GATES > 1:
            weighted = (k * beta[:, None] * tl.exp(logs)).to(dtype)
        else:
            weighted = (k * (beta * tl.exp(logs))[:, None]).to(dtype)
        y = tl.dot(inverse, weighted).to(dtype)
        tl.store(y_ptr + (token[:, None] * H + head) * N + n[None, :], y, mask=key_mask)
        for column in tl.static_range(0, V, BLOCK_V):
            c = column + tl.arange(0, BLOCK_V)[None, :]
            mask = real[:, None] & (c < V)
            v = tl.load(v_ptr + token[:, None] * stride_v + head * V + c, mask=mask, other=0.0)
            u = tl.dot(inverse, (v.to(tl.float32) * beta[:, None]).to(dtype)).to(dtype)
            tl.store(u_ptr + (token[:, None] * H + head) * V + c, u, mask=mask)


@triton.jit(do_not_specialize=["spare_row", "first_seq"])
def _delta_scan_kernel(
    q_ptr,
    k_ptr,
    logs_ptr,
    scores_ptr,
    u_ptr,
    y_ptr,
    states_ptr,
    rows_ptr,
    starts_ptr,
    positions_ptr,
    out_ptr,
    stride_row,
    spare_row,
    first_seq,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    GATES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    L: tl.constexpr,
    PDL: tl.constexpr,
):
    """All arguments before the states are what _delta_chunk_kernel wrote; q and k are normed."""
    seq, head = first_seq + tl.program_id(0), tl.program_id(1)
    n, c = tl.arange(0, BLOCK_N), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    wait_for_inputs(PDL)
    first, last = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    if last > first:
        goes_on = tl.load(positions_ptr + first) > 0
        dtype = u_ptr.dtype.element_ty
        state_ptr = states_ptr + state_row(rows_ptr, seq, spare_row) * stride_row + head * N * V
        at, state_mask = n[:, None] * V + c[None, :], (n < N)[:, None] & (c < V)[None, :]
        state = tl.load(state_ptr + at, mask=state_mask & goes_on, other=0.0).to(tl.float32)
        i = tl.arange(0, L)
        for start in range(first, last, L):
            t = start + i
            real = t < last
            token = t.to(tl.int64)[:, None]
            key_mask, mask = real[:, None] & (n < N)[None, :], real[:, None] & (c < V)[None, :]
            keys = token * (H // SHARED * N) + head // SHARED * N + n[None, :]
            values = (token * H + head) * V + c[None, :]
            y = tl.load(y_ptr + (token * H + head) * N + n[None, :], mask=key_mask, other=0.0)
            u = tl.load(u_ptr + values, mask=mask, other=0.0).to(tl.float32)
            q = tl.load(q_ptr + keys, mask=key_mask, other=0.0)
            k = tl.load(k_ptr + keys, mask=key_mask, other=0.0)
            scores = tl.load(
                scores_ptr + (token * H + head) * L + i[None, :],
                mask=tl.broadcast_to(real[:, None], (L, L)),
                other=0.0,
            )
            end = (tl.minimum(start + L, last) - 1).to(tl.int64) * H + head
            if GATES > 1:
                logs = tl.load(logs_ptr + (token * H + head) * N + n[None, :], mask=key_mask, other=0.0)
                total = tl.load(logs_ptr + end * N + n, mask=n < N, other=0.0)
            else:
                logs = tl.load(logs_ptr + t.to(tl.int64) * H + head, mask=real, other=0.0)
                total = tl.load(logs_ptr + end)
            rounded = state.to(dtype)
            change = u - tl.dot(y, rounded)
            out = tl.dot(q, rounded)
            if GATES == 1:
                out *= tl.exp(logs)[:, None]
            out += tl.dot(scores, change.to(dtype))
            tl.store(out_ptr + values, out.to(dtype), mask=mask)
            if GATES > 1:
                left = (k.to(tl.float32) * tl.exp(tl.minimum(total[None, :] - logs, 0.0))).to(dtype)
                state = state * tl.exp(total)[:, None] + tl.dot(tl.trans(left), change.to(dtype))
            else:
                left = (change * tl.exp(tl.minimum(total - logs, 0.0))[:, None]).to(dtype)
                state = state * tl.exp(total) + tl.dot(tl.trans(k), left)
        tl.store(state_ptr + at, state.to(states_ptr.dtype.element_ty), mask=state_mask)


def scan_tiles(num_heads: int, columns: int, device: torch.device) -> RuleTiles:
    """Returns the tiles of `num_heads` heads over all prompts: wider ones once they fill the GPU, as programs
    of one head read the same keys."""
    if not has_large_shared_memory():
        return NARROW_SCAN_TILES
    wide = num_heads * cdiv(columns, 64) > gpu_of(device).sms
    return RuleTiles(64 if wide else 32, 4, 3)


def gated_delta(
    q_TKN: torch.Tensor,
    k_TKN: torch.Tensor,
    v_THV: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    states_RHNV: torch.Tensor,
    sequences: Sequences,
    kept_RKX: torch.Tensor | None = None,
) -> torch.Tensor:
    """As reference.gated_delta."""
    (num_tokens, num_keys, size), (_, heads, columns) = q_TKN.shape, v_THV.shape
    for x in (q_TKN, k_TKN, v_THV):
        assert x.dtype == v_THV.dtype and (x.stride()[1:] == (x.shape[2], 1) or not num_tokens)
    assert a_TH.stride(-1) == b_TH.stride(1) == 1 and heads % num_keys == 0 and states_RHNV[0].is_contiguous()
    new = v_THV.new_empty
    out_THV = new(num_tokens, heads, columns)
    strides = [x.stride(0) for x in (q_TKN, k_TKN, v_THV, a_TH, b_TH)]
    inputs = (q_TKN, k_TKN, v_THV, a_TH, b_TH, a_log_H, dt_bias_H)
    memory = (states_RHNV, sequences.rows_S, sequences.starts_S, sequences.positions_T, out_THV)
    row_stride, spare_row = states_RHNV.stride(0), len(states_RHNV) - 1
    gates = dt_bias_H.numel() // heads
    assert gates == 1 or (gates == size and a_TH.stride(1) == size and heads == num_keys)
    sizes = dict(H=heads, SHARED=heads // num_keys, N=size, V=columns, GATES=gates)
    num_seqs = len(sequences.rows_S)
    by_token = sequences.num_decodes if takes_chunks(v_THV.dtype) else num_seqs
    prompts = num_seqs - by_token
    whole = next_power_of_2(columns)
    drafts, draft_sizes = draft_arguments(sequences, kept_RKX)
    if by_token:
        block = min(whole, TOKEN_TILES.values)
        _delta_token_kernel[(by_token, heads, cdiv(columns, block))](
            *inputs,
            *memory,
            *strides,
            row_stride,
            spare_row,
            *drafts,
            **sizes,
            **draft_sizes,
            BLOCK_N=next_power_of_2(size),
            BLOCK_V=block,
            num_warps=TOKEN_TILES.warps,
            **pdl_options(),
        )
        keep_drafts(sequences, kept_RKX, k_TKN, v_THV, a_TH, b_TH)
    if not prompts or not num_tokens:
        return out_THV
    block_n, whole = max(next_power_of_2(size), 16), max(whole, 16)
    normed_q, normed_k = new(num_tokens, num_keys, size), new(num_tokens, num_keys, size)
    length = CHUNK if gates == 1 else CHUNK // 2  # tokens of a chunk; tiles of decays need registers
    logs_THX = new((num_tokens, heads, gates), dtype=torch.float32)
    scores_THL, u_THV, y_THN = (new(num_tokens, heads, last) for last in (length, columns, size))
    tiles = CHUNK_TILES if has_large_shared_memory() and gates == 1 else NARROW_CHUNK_TILES
    _delta_chunk_kernel[(max_chunks(num_tokens, prompts, length), heads)](
        *inputs,
        sequences.starts_S,
        normed_q,
        normed_k,
        logs_THX,
        scores_THL,
        u_THV,
        y_THN,
        *strides,
        by_token,
        prompts,
        **sizes,
        BLOCK_N=block_n,
        BLOCK_V=min(whole, tiles.values),
        BLOCK_S=next_power_of_2(prompts),
        L=length,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_options(),
    )
    tiles = NARROW_SCAN_TILES if gates > 1 else scan_tiles(prompts * heads, columns, v_THV.device)
    block = min(whole, tiles.values)
    _delta_scan_kernel[(prompts, heads, cdiv(columns, block))](
        normed_q,
        normed_k,
        logs_THX,
        scores_THL,
        u_THV,
        y_THN,
        *memory,
        row_stride,
        spare_row,
        by_token,
        **sizes,
        BLOCK_N=block_n,
        BLOCK_V=block,
        L=length,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_options(),
    )
    return out_THV
