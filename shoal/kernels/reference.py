"""Norms, activation, rope, embedding and the batch state in plain PyTorch: the oracle of the kernels in
this folder, and the CPU's ops where it has nothing faster. Each room of kernels has its own reference.py.

Norms accumulate in float32 and round as transformers does: they normalise, cast to the weight's dtype, then
multiply by the weight. So the product of a norm whose weight is float32 is rounded once, after it.
T tokens · B decode batch · H query heads · G kv heads · N head size · D hidden · F intermediate · V
vocabulary · R state rows · M blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.state import Field
from shoal.kinds.attention import QueryScaling

FP8_MAX = 448.0  # the largest number in e4m3


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    x32 = x_TD.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normed.to(weight_D.dtype) * weight_D).to(x_TD.dtype)


def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += x in place; returns the norm of the sum."""
    residual_TD += x_TD
    return rms_norm(residual_TD, weight_D, eps)


def add_normed(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    residual_TD: torch.Tensor,
    next_weight_D: torch.Tensor | None = None,
    next_eps: float = 0.0,
) -> torch.Tensor | None:
    """residual += the norm of x, in place. With `next_weight_D`, returns the next norm, of that sum."""
    residual_TD += rms_norm(x_TD, weight_D, eps)
    return None if next_weight_D is None else rms_norm(residual_TD, next_weight_D, next_eps)


def fork_norms(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    residual_TD: torch.Tensor,
    next_weights: Sequence[torch.Tensor],
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """residual += the norm of x, in place. Returns the norms of that sum, one by each of three weights."""
    residual_TD += rms_norm(x_TD, weight_D, eps)
    return tuple(rms_norm(residual_TD, weight, eps) for weight in next_weights)


def join_norms(
    x_TD: torch.Tensor,
    beside_TD: torch.Tensor | None,
    branch_weights: Sequence[torch.Tensor],
    weight_D: torch.Tensor,
    residual_TD: torch.Tensor,
    eps: float,
    factor: torch.Tensor | None,
) -> None:
    """residual = (residual + the norm of y) * factor, in place. y is x, or with `beside_TD` the sum of the
    norms of both, by their weights. factor: one number; None: 1."""
    if beside_TD is not None:
        own, other = branch_weights
        x_TD = rms_norm(x_TD, own, eps) + rms_norm(beside_TD, other, eps)
    residual_TD += rms_norm(x_TD, weight_D, eps)
    if factor is not None:
        residual_TD *= factor


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def gate_mul(gate_up_T2F: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """Returns activation(gate) * up, [T, F]. Gate is the first half of the columns, up the second."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate_TF.float()) * up_TF.float()).to(gate_up_T2F.dtype)


def soft_cap(logits_SV: torch.Tensor, cap: float) -> None:
    """logits = cap * tanh(logits / cap), in place."""
    logits_SV.copy_(cap * torch.tanh(logits_SV.float() / cap))


def qk_norm_rope_store(
    qkv_TX: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor | None,
    positions_T: torch.Tensor,
    rows_T: torch.Tensor,
    block_tables_RM: torch.Tensor,
    cache: LayerCache,
    keep_k: bool = True,
    *,
    stores: bool = True,
    v_norm: bool = False,
    query_scaling: QueryScaling | None = None,
) -> None:
    """Normalises the q and k heads of qkv, [T, (H + 2G) * N], in place if there are weights, rotates them in
    place, and stores k and v in the layer's cache.

    cos_sin is [max_position, D]: cosines, then sines, of the D/2 pairs (i, i + D/2) of each head's first D
    numbers. None: nothing is rotated. block_tables_RM is the step's table of number `cache.table`. Nothing is
    stored for padding (row or position -1), and its qkv is undefined afterwards. Without `keep_k` k is not
    read from qkv afterwards, and may be undefined there, too. Without `stores` qkv is q alone, [T, H * N], as
    the cache has the keys and values of another layer. `v_norm` divides each head of v by its rms, in place.
    """
    blocks, scales_2G = cache.blocks, cache.scales_2G
    num_kv_heads, block_size, head_dim = blocks.shape[2:]
    heads = qkv_TX.view(qkv_TX.shape[0], -1, head_dim)
    kv_heads = num_kv_heads if stores else 0
    q_THN, k_TGN, v_TGN = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    positions = positions_T.long().clamp(min=0)
    for x, weight in ((q_THN, q_weight), (k_TGN, k_weight)):
        rotated = (x if weight is None else rms_norm(x, weight, eps)).float()
        if cos_sin is not None:
            half = cos_sin.shape[1] // 2
            cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
            first, second, rest = rotated.split((half, half, head_dim - 2 * half), dim=-1)
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
        if query_scaling is not None and x is q_THN:
            steps_T = (positions + query_scaling.offset) // query_scaling.length
            rotated = rotated * (1 + query_scaling.beta * torch.log1p(steps_T.float()))[:, None, None]
        x.copy_(rotated)
    if not stores:
        return
    if v_norm:
        v_TGN.copy_(rms_norm(v_TGN, torch.ones(head_dim, dtype=torch.float32, device=v_TGN.device), eps))
    stored = ((rows_T >= 0) & (positions_T >= 0)).nonzero().squeeze(1)
    positions = positions[stored]
    ids = block_tables_RM[rows_T[stored].long(), positions // block_size].long()
    for kind, x_TGN in enumerate((k_TGN, v_TGN)):
        if scales_2G is None:
            blocks[ids, kind, :, positions % block_size] = x_TGN[stored]
        else:
            fp8 = to_fp8(x_TGN[stored], scales_2G[kind, :, None])
            blocks.view(torch.uint8)[ids, kind, :, positions % block_size] = fp8.view(torch.uint8)


def gate_output(out_TX: torch.Tensor, gate_TY: torch.Tensor, activation: str) -> torch.Tensor:
    """out * activation(gate), [T, X]. The gate has a number for each of out's, or one for each head, which
    are X / Y consecutive numbers. `activation` is "sigmoid" or "softplus"."""
    gate32 = gate_TY.float()
    factors_TY = torch.sigmoid(gate32) if activation == "sigmoid" else F.softplus(gate32)
    heads_TYN = out_TX.unflatten(1, (gate_TY.shape[1], -1))
    return (heads_TYN.float() * factors_TY[:, :, None]).to(out_TX.dtype).flatten(1)


def to_fp8(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x / scales in e4m3, rounded to nearest even. What is beyond its range becomes its largest number."""
    return (x.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def embed(ids_T: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids_T, weight_VD)


def apply_updates(state: torch.Tensor, addresses: torch.Tensor, values: torch.Tensor) -> None:
    """state[addresses] = values. No address may come twice."""
    state[addresses.long()] = values


def copy_ints(dst: torch.Tensor, src: torch.Tensor) -> None:
    """dst = src, both int32, on the device or in pinned memory."""
    dst.copy_(src)


def copy_rows(
    dst: torch.Tensor, dst_rows_K: torch.Tensor, src: torch.Tensor, src_rows_K: torch.Tensor
) -> None:
    """dst[dst_rows_K[k]] = src[src_rows_K[k]] for each k whose row in dst is not -1. No row in dst may come
    twice, and the two tensors must not overlap. Both are uint8, with rows of one size, a multiple of 16."""
    kept = dst_rows_K >= 0
    dst[dst_rows_K[kept].long()] = src[src_rows_K[kept].long()]


def begin_decode(
    rows_B: torch.Tensor,
    table: torch.Tensor,
    tokens_B: torch.Tensor,
    positions_B: torch.Tensor,
    kv_lens_B: torch.Tensor,
) -> None:
    """Fills in the inputs of a decode step from the state rows. Padding (row -1) gets token 0, position -1
    and length 0."""
    padding = rows_B < 0
    rows = rows_B.clamp(min=0).long()
    tokens_B.copy_(table[rows, Field.TOKEN].masked_fill(padding, 0))
    positions_B.copy_(table[rows, Field.POSITION].masked_fill(padding, -1))
    torch.add(positions_B, 1, out=kv_lens_B)
