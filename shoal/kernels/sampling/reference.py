"""Sampling in plain PyTorch: the oracle of this room's kernels, and the CPU's where it has nothing faster.

S sampled sequences · B decode batch · V vocabulary · R state rows.
"""

from __future__ import annotations

import math

import torch

from shoal.kernels.state import FIELDS, MIN_TEMPERATURE, Field, signed

# The multipliers of a 32-bit finalizer with very little bias, from Wellons' hash prospector. The salts only
# make the two words of a key different.
MIX_1, MIX_2 = 0x21F0AAAD, 0xD35A2D97
SALT_0, SALT_1 = 0x9E3779B9, 0x3C6EF372
WORD = 0xFFFFFFFF
MAX_UNIFORM = 1.0 - 2.0**-24
TILE = 1024  # A row without filters draws a tile of as many tokens first, then a token of that tile.


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
    row. Writes it into out_tokens_S and into the row, whose position advances by one. positions_S are the
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
