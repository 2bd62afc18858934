"""Every op in plain PyTorch. The other modules must compute the same, and the CPU uses it where it has
nothing faster.

Norms accumulate in float32 and round as transformers does: they normalise, cast, then multiply by the weight.
T tokens · S sampled sequences · B decode batch · H query heads · G kv heads · N head size · D hidden · F
intermediate · V vocabulary · I inputs · O outputs · E experts · R state rows · M blocks of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.state import FIELDS, MIN_TEMPERATURE, Field, signed

# The multipliers of a 32-bit finalizer with very little bias, from Wellons' hash prospector. The salts only
# make the two words of a key different.
MIX_1, MIX_2 = 0x21F0AAAD, 0xD35A2D97
SALT_0, SALT_1 = 0x9E3779B9, 0x3C6EF372
WORD = 0xFFFFFFFF
MAX_UNIFORM = 1.0 - 2.0**-24
FP8_MAX = 448.0  # the largest number in e4m3
TILE = 1024  # A row without filters draws a tile of as many tokens first, then a token of that tile.


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    x32 = x_TD.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x_TD.dtype) * weight_D


def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += x in place; returns the norm of the sum."""
    residual_TD += x_TD
    return rms_norm(residual_TD, weight_D, eps)


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return (F.silu(gate_TF.float()) * up_TF.float()).to(gate_up_T2F.dtype)


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x_TI, weight_OI, bias_O)


def linear_add(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, residual_TO: torch.Tensor
) -> torch.Tensor | None:
    """Adds the matmul to the residual in place and returns None. Other modules may leave the residual alone
    instead and return the matmul, for the next norm to add."""
    residual_TO += F.linear(x_TI, weight_OI, bias_O)
    return None


def linear_silu_mul(
    x_TI: torch.Tensor, weight_2FI: torch.Tensor, bias_2F: torch.Tensor | None
) -> torch.Tensor:
    """Returns silu(gate) * up, [T, F]. Gate is the first half of the matmul's outputs, up the second."""
    return silu_mul(F.linear(x_TI, weight_2FI, bias_2F))


def add_norm_linear(
    x_TD: torch.Tensor | None,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors. The first is `linear`, or `linear_silu_mul` if gated, of the norm of residual + x.
    The second is that sum, which takes the residual's place, and may or may not be the same tensor. x None:
    there is nothing to add."""
    normed_TD = (
        rms_norm(residual_TD, norm_weight_D, eps)
        if x_TD is None
        else add_rms_norm(x_TD, residual_TD, norm_weight_D, eps)
    )
    return (linear_silu_mul if gated else linear)(normed_TD, weight, bias), residual_TD


def qk_norm_rope_store(
    qkv_TX: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    rows_T: torch.Tensor,
    block_tables_RM: torch.Tensor,
    cache: LayerCache,
    keep_k: bool = True,
) -> None:
    """Normalises the q and k heads of qkv, [T, (H + 2G) * N], in place if there are weights, rotates them in
    place, and stores k and v in the layer's cache.

    cos_sin is [max_position, N]: cosines, then sines. block_tables_RM is the step's table of number
    `cache.table`. Nothing is stored for padding (row or position -1), and its qkv is undefined afterwards.
    Without `keep_k` k is not read from qkv afterwards, and may be undefined there, too.
    """
    blocks, scales_2G = cache.blocks, cache.scales_2G
    num_kv_heads, block_size, head_dim = blocks.shape[2:]
    heads = qkv_TX.view(qkv_TX.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q_THN, k_TGN, v_TGN = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    positions = positions_T.long()
    cos, sin = cos_sin[positions.clamp(min=0)].unsqueeze(1).chunk(2, dim=-1)
    for x, weight in ((q_THN, q_weight), (k_TGN, k_weight)):
        first, second = (x if weight is None else rms_norm(x, weight, eps)).float().chunk(2, dim=-1)
        x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    stored = ((rows_T >= 0) & (positions_T >= 0)).nonzero().squeeze(1)
    positions = positions[stored]
    ids = block_tables_RM[rows_T[stored].long(), positions // block_size].long()
    for kind, x_TGN in enumerate((k_TGN, v_TGN)):
        if scales_2G is None:
            blocks[ids, kind, :, positions % block_size] = x_TGN[stored]
        else:
            fp8 = to_fp8(x_TGN[stored], scales_2G[kind, :, None])
            blocks.view(torch.uint8)[ids, kind, :, positions % block_size] = fp8.view(torch.uint8)


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


def keep_bits(logits_SV: torch.Tensor, rows_G: torch.Tensor, masks_GW: torch.Tensor) -> None:
    """In row rows_G[g] only those tokens stay possible whose bits in masks_GW[g] are set.

    G counts the rows under grammars; each comes once. W counts the int32 words of a mask, which hold
    at least V bits, the lowest bit of a word first.
    """
    bit = 1 << torch.arange(8, dtype=torch.uint8, device=logits_SV.device)
    masks = masks_GW.contiguous().view(torch.uint8)  # Bytes take a quarter of the memory that words do.
    forbidden_GV = ((masks.unsqueeze(-1) & bit) == 0).flatten(1)[:, : logits_SV.shape[1]]
    logits_SV[rows_G] = logits_SV[rows_G].masked_fill_(forbidden_GV, -math.inf)


def sample(
    logits_BV: torch.Tensor,
    rows_S: torch.Tensor,
    positions_S: torch.Tensor,
    table: torch.Tensor,
    out_tokens_S: torch.Tensor,
) -> None:
    """Draws a token for each s with rows_S[s] >= 0 from logits_BV[s], by the sampling fields of its state
    row. Writes it into out_tokens_S and into the row, whose position goes on by one. positions_S are the
    positions of the tokens that these logits follow.

    A draw depends on logits, fields and position alone, and not on the batch. It is the argmax of logits /
    temperature + Gumbel noise, over the tokens that min_p, top_k and top_p leave, which is a draw from the
    softmax (Maddison et al. 2014). The noise is a hash of the seed, the position of the sampled token, and
    the token. Without these filters a TILE of the vocabulary is sampled first, by the log of its mass and
    noise of its own, then a token of it in the same way. This has the same distribution and needs the noise
    of few tokens. A greedy row takes the first of the largest logits.
    """
    active = [s for s, row in enumerate(rows_S.tolist()) if row >= 0]
    if len(active) < len(rows_S):
        logits_BV, rows_S, positions_S = logits_BV[active], rows_S[active], positions_S[active]
    rows, sampled_positions, logits_SV = rows_S.long(), positions_S + 1, logits_BV.float()
    tokens = logits_SV.argmax(dim=-1)
    fields = table[rows, :FIELDS]
    words, floats = fields.tolist(), fields.view(torch.float32).tolist()
    for s, position in enumerate(sampled_positions.tolist()):
        temperature = floats[s][Field.TEMPERATURE]
        if temperature >= MIN_TEMPERATURE:
            keys = noise_keys(words[s][Field.SEED_LOW], words[s][Field.SEED_HIGH], position)
            filters = words[s][Field.TOP_K], floats[s][Field.TOP_P], floats[s][Field.MIN_P]
            tokens[s] = _sample(logits_SV[s], temperature, filters, keys)
    out_tokens_S[active] = tokens = tokens.to(torch.int32)
    table[rows, Field.TOKEN] = tokens
    table[rows, Field.POSITION] = sampled_positions


def _sample(
    logits_V: torch.Tensor, temperature: float, filters: tuple[int, float, float], keys: tuple[int, int]
) -> torch.Tensor:
    """Draws a token of one row."""
    if filters == (0, 1.0, 0.0):
        tiles = logits_V.split(TILE)
        masses = torch.stack([(tile / temperature).logsumexp(0) for tile in tiles])
        tile = int(gumbel(*keys, -1 - torch.arange(len(tiles), dtype=torch.int32)).add_(masses).argmax())
        ids = torch.arange(tile * TILE, tile * TILE + len(tiles[tile]))
    else:
        ids = survivors(logits_V, temperature, *filters)
    scores = gumbel(*keys, ids.to(torch.int32)).add_(logits_V.index_select(0, ids), alpha=1.0 / temperature)
    return ids[scores.argmax()]


def survivors(
    logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Returns the ids that min_p, then top_k, then top_p keep. A token that ties with the last one kept is
    kept too.

    min_p keeps tokens at least min_p times as probable as the best. top_k keeps those at least as probable as
    the k-th. top_p keeps a token if the tokens that the first two filters left and that are strictly more
    probable have less mass than top_p.
    """
    largest = logits_V.max()
    floor = largest + temperature * math.log(min_p) if min_p > 0.0 else torch.full_like(largest, -math.inf)
    if 0 < top_k < len(logits_V):
        floor = torch.maximum(floor, logits_V.topk(top_k).values[-1])
    ids = (logits_V >= floor).nonzero().squeeze(1)
    if top_p >= 1.0:
        return ids
    kept = logits_V.index_select(0, ids)
    target = ((kept - largest) / temperature).exp_().sum(dtype=torch.float64) * top_p
    # Few tokens hold most of the mass, and a sort of all tokens is slow.
    for size in (64, 1024, 8192, len(kept)):
        best = kept.topk(min(size, len(kept))).values
        mass = ((best - largest) / temperature).exp_().double().cumsum(0)
        if mass[-1] >= target:
            break
    return ids[kept >= best[(mass[:-1] < target).sum()]]


def noise_keys(seed_low: int, seed_high: int, position: int) -> tuple[int, int]:
    """Returns two int32 words that name a draw. They mix the same three words in two orders, so that together
    they keep 64 bits."""
    key_0 = _mix(position ^ _mix(seed_high ^ _mix(seed_low ^ SALT_0)))
    key_1 = _mix(seed_low + _mix(seed_high + _mix(position + SALT_1)))
    return signed(key_0), signed(key_1)


def _mix(x: int) -> int:
    x &= WORD
    x = (x ^ x >> 16) * MIX_1 & WORD
    x = (x ^ x >> 15) * MIX_2 & WORD
    return x ^ x >> 15


def gumbel(key_0: int | torch.Tensor, key_1: int | torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the Gumbel noise of int32 tokens: -log(E), where E = -log(1 - u) is exponential. u in (0, 1)
    has 31 random bits, and is finest near 0, where noise is large."""
    # This is `_mix`, but tokens have no high bits to mix down first, and key_1 comes in halfway.
    h = (tokens ^ key_0).mul_(signed(MIX_1))
    h = _xor_shift(h, 15).bitwise_xor_(key_1).mul_(signed(MIX_2))
    h = _shift(_xor_shift(h, 15), 1)
    minus_u = h.float().mul_(-(2.0**-31)).sub_(2.0**-32).clamp_(min=-MAX_UNIFORM)
    return minus_u.log1p_().neg_().log_().neg_()


def _xor_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return _shift(x, bits).bitwise_xor_(x)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts an unsigned word to the right. The `>>` of int32 would repeat the sign."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def route(
    router_logits_TE: torch.Tensor, top_k: int, norm_topk_prob: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights (float32) and ids of each token's best experts, [T, top_k]."""
    weights_Tk, experts_Tk = router_logits_TE.float().softmax(dim=-1).topk(top_k, dim=-1)
    if norm_topk_prob:
        weights_Tk = weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)
    return weights_Tk, experts_Tk


def moe(
    x_TD: torch.Tensor,
    router_logits_TE: torch.Tensor,
    w13_E2FD: torch.Tensor,
    w2_EDF: torch.Tensor,
    top_k: int,
    norm_topk_prob: bool,
    residual_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums the results of the `top_k` best SwiGLU experts of each token, by router weight, in float32: [T,
    D]. w13 is gate over up. With a residual, the sum is added to it in place, and it is returned."""

    def run_expert(expert: int, x: torch.Tensor) -> torch.Tensor:
        return F.linear(silu_mul(F.linear(x, w13_E2FD[expert])), w2_EDF[expert])

    return mix_experts(x_TD, router_logits_TE, run_expert, top_k, norm_topk_prob, residual_TD)


def mix_experts(
    x_TD: torch.Tensor,
    router_logits_TE: torch.Tensor,
    run_expert: Callable[[int, torch.Tensor], torch.Tensor],
    top_k: int,
    norm_topk_prob: bool,
    residual_TD: torch.Tensor | None,
) -> torch.Tensor:
    """Computes what `moe` does, with experts of any kind: `run_expert(e, x)` is expert e's result for the
    tokens x."""
    weights_Tk, experts_Tk = route(router_logits_TE, top_k, norm_topk_prob)
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for expert in experts_Tk.unique().tolist():
        tokens, choice = (experts_Tk == expert).nonzero(as_tuple=True)
        result = run_expert(expert, x_TD[tokens])
        out_TD.index_add_(0, tokens, result.float() * weights_Tk[tokens, choice].unsqueeze(1))
    out_TD = out_TD.to(x_TD.dtype)
    return out_TD if residual_TD is None else residual_TD.add_(out_TD)
