"""Multi-head latent attention in plain PyTorch: what the kernels in this folder must equal, and the CPU's
way.

A head's key and value are matrices of its own times the latent of a token: k = [K c, r] and v = V c, with
c and r of the cache. As q (K c) = (K^T q) c, a query may be multiplied by K^T instead of each key by K, and
the weighted sum of latents by V instead of each value. That is the absorbed form. It reads one latent for
all heads, and it takes more arithmetic for each query and key than the expanded form, which makes the keys
and values.

T tokens · S sequences · R state rows · M blocks of a sequence · H query heads of this rank · C numbers of a
latent (kv_lora_rank) · E rotated numbers · N = C + E · P numbers of a head without position · X = P + E ·
V numbers of a value · L keys. kv_b is [H, P + V, C]: K over V of each head.
"""

from __future__ import annotations

import torch

from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.reference import rms_norm
from shoal.kinds.attention import QueryScaling


def norm_rope_store(
    a_TY: torch.Tensor,
    q_weight: torch.Tensor | None,
    kv_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    rows_T: torch.Tensor,
    block_tables_RM: torch.Tensor,
    cache: LayerCache,
    interleaved: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Each row of a_TY ends with the latent of a token, [C + E]. It is normed (its first C numbers), rotated
    (the others), written to the cache, and returned, [T, N]. With `q_weight` the columns before it are
    normed and returned, too. Nothing is stored for padding (row or position -1)."""
    size, rotary = kv_weight.shape[0], cos_sin.shape[1]
    before, c_TC, r_TE = a_TY.split((a_TY.shape[1] - size - rotary, size, rotary), dim=1)
    positions = positions_T.long()
    rotated = rotate(r_TE, cos_sin[positions.clamp(min=0)], interleaved)
    latent_TN = torch.cat((rms_norm(c_TC, kv_weight, eps), rotated), dim=1)
    stored = ((rows_T >= 0) & (positions_T >= 0)).nonzero().squeeze(1)
    positions, block_size = positions[stored], cache.blocks.shape[3]
    ids = block_tables_RM[rows_T[stored].long(), positions // block_size].long()
    cache.blocks[ids, 0, 0, positions % block_size] = latent_TN[stored]
    return None if q_weight is None else rms_norm(before, q_weight, eps), latent_TN


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotates the last dimension of x by a row of cosines and sines each. The results of a pair are i and
    i + half, however the pair lay before. Queries and keys agree in that, and their products are the same."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    first, second = first.float(), second.float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotated_queries(
    q_THX: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    interleaved: bool,
    scaling: QueryScaling | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of each query, [T, H, P] and [T, H, E]. The second one is rotated."""
    rotary, positions = cos_sin.shape[1], positions_T.long().clamp(min=0)
    plain, turned = q_THX.split((q_THX.shape[2] - rotary, rotary), dim=2)
    turned = rotate(turned, cos_sin[positions, None], interleaved)
    if scaling is None:
        return plain, turned
    steps_T = (positions + scaling.offset) // scaling.length
    factor = (1 + scaling.beta * torch.log1p(steps_T.float()))[:, None, None].to(q_THX.dtype)
    return plain * factor, turned * factor


def absorb_queries(
    q_THX: torch.Tensor,
    kv_b_HWC: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    interleaved: bool,
    scaling: QueryScaling | None,
) -> torch.Tensor:
    """[T, H, N]: queries as they meet latents."""
    plain, turned = rotated_queries(q_THX, cos_sin, positions_T, interleaved, scaling)
    absorbed = torch.einsum("thp,hpc->thc", plain, kv_b_HWC[:, : plain.shape[2]])
    return torch.cat((absorbed, turned), dim=2)


def project_values(sums_THC: torch.Tensor, kv_b_HWC: torch.Tensor, v_head_dim: int) -> torch.Tensor:
    """[T, H, V]: sums of latents as sums of values."""
    return torch.einsum("thc,hvc->thv", sums_THC, kv_b_HWC[:, -v_head_dim:])


def gather_latents(cache: LayerCache, block_table_M: torch.Tensor, kv_len: int) -> torch.Tensor:
    """The first `kv_len` latents of a sequence, [L, N]."""
    num_blocks = -(-kv_len // cache.blocks.shape[3])
    return cache.blocks[block_table_M[:num_blocks].long(), 0, 0].flatten(0, 1)[:kv_len]


def attend_to_latents(q_THN: torch.Tensor, latents_LN: torch.Tensor, size: int, scale: float) -> torch.Tensor:
    """[T, H, C]: the weighted sums of the first C = `size` numbers of latents. The queries are the last T of
    L positions; a query before position 0 is padding and gets zeros."""
    scores_HTL = torch.einsum("thn,ln->htl", q_THN.float(), latents_LN.float()) * scale
    weights_HTL = _softmax(scores_HTL)
    return torch.einsum("htl,lc->thc", weights_HTL, latents_LN[:, :size].float()).to(q_THN.dtype)


def attend_expanded(
    q_THX: torch.Tensor, latents_LN: torch.Tensor, kv_b_HWC: torch.Tensor, v_head_dim: int, scale: float
) -> torch.Tensor:
    """[T, H, V]. The queries, rotated already, are the last T of L positions."""
    num_heads, width, size = kv_b_HWC.shape
    kv_LHW = (latents_LN[:, :size] @ kv_b_HWC.flatten(0, 1).T).unflatten(1, (num_heads, width))
    k_LHP, v_LHV = kv_LHW.split((width - v_head_dim, v_head_dim), dim=2)
    r_LHE = latents_LN[:, None, size:].expand(-1, num_heads, -1)
    k_LHX = torch.cat((k_LHP, r_LHE), dim=2)
    scores_HTL = torch.einsum("thx,lhx->htl", q_THX.float(), k_LHX.float()) * scale
    return torch.einsum("htl,lhv->thv", _softmax(scores_HTL), v_LHV.float()).to(q_THX.dtype)


def _softmax(scores_HTL: torch.Tensor) -> torch.Tensor:
    """Weights of keys up to each query's own position; zeros for a query before position 0."""
    num_queries, num_keys = scores_HTL.shape[1:]
    positions = torch.arange(num_keys - num_queries, num_keys, device=scores_HTL.device)[:, None]
    visible_TL = torch.arange(num_keys, device=scores_HTL.device) <= positions
    weights_HTL = scores_HTL.masked_fill(~visible_TL, float("-inf")).softmax(dim=-1)
    return weights_HTL.masked_fill(positions < 0, 0)
