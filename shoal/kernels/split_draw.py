"""Draws from rows of logits that lie split over ranks. Each rank looks at its own columns and finds a few
parts of each row, the ranks exchange these, and each joins them to the token that `sample` draws from the
whole row.

This is exact for three kinds of rows, as the noise of a token, or of a tile, is the same on all ranks:

greedy          The first of the largest logits of each rank.
no filters      Of each tile that is drawn from: its mass, and the token that would be drawn from it. A rank
                sends its first and its last tile, which it may share with its neighbours, and of those
                between them the one that would be drawn.
top_k <= PARTS  The largest values of a rank, as many as hold top_k tokens: of each value how many tokens have
                it, and the one that would be drawn. Tokens that tie count as `sample` counts them. min_p and
                top_p look at such a row's top_k tokens alone, so they change nothing.

Other rows (top_p or min_p over the whole vocabulary, or a large top_k) may need any number of tokens.
`needs_whole_row` tells them by their parameters, so that the host knows before a step which way it goes.

S sampled sequences · V columns of this rank · R ranks · P parts. Plain PyTorch, for any device; the kernels
are in split_draw_triton.py.
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch

from shoal.kernels.reference import TILE, gumbel, noise_keys
from shoal.kernels.state import FIELDS, MIN_TEMPERATURE, Field

PARTS = 64  # A top_k is rarely larger (Gemma's default).


class Part(IntEnum):
    """The int32s of a part. Floats are stored as their bits."""

    MEASURE = 0  # float32: a value's logit; of a tile, the log of its mass
    NUMBER = 1  # how many tokens have this value; of a tile, which one it is
    SCORE = 2  # float32: the logit by temperature, and noise, of the token that would be drawn
    TOKEN = 3  # its id; -1: there is no such part


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def needs_whole_row(temperature: float, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether parts do not suffice for a draw with these parameters."""
    has_filters = top_k > 0 or top_p < 1.0 or min_p > 0.0
    return temperature >= MIN_TEMPERATURE and has_filters and not 0 < top_k <= PARTS


def draw_parts(
    logits_SV: torch.Tensor, first: int, rows_S: torch.Tensor, positions_S: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """The parts of these columns, whose first token is `first`: int32 [S, P, len(Part)]. Rows and positions
    are those of `sample`; a sample with row -1 has no parts."""
    parts = torch.full((len(rows_S), PARTS, len(Part)), -1, dtype=torch.int32, device=logits_SV.device)
    floats, logits_SV = parts.view(torch.float32), logits_SV.float()
    for s, (row, position) in enumerate(zip(rows_S.tolist(), positions_S.tolist())):
        if row < 0:
            continue
        temperature, filters, keys = _fields(table[row, :FIELDS], position + 1)
        logits_V = logits_SV[s]
        if temperature < MIN_TEMPERATURE:
            best, at = logits_V.max(dim=0)
            found = best.view(1), torch.ones(1), best.view(1), first + at.view(1)
        elif filters == (0, 1.0, 0.0):
            found = _tiles(logits_V, first, temperature, keys)
        else:
            found = _best_values(logits_V, first, temperature, filters[0], keys)
        measures, numbers, scores, tokens = found
        count = len(tokens)
        floats[s, :count, Part.MEASURE], floats[s, :count, Part.SCORE] = measures, scores
        parts[s, :count, Part.NUMBER], parts[s, :count, Part.TOKEN] = numbers.int(), tokens.int()
    return parts


def join_parts(
    parts_RSP: torch.Tensor,
    rows_S: torch.Tensor,
    positions_S: torch.Tensor,
    table: torch.Tensor,
    out_tokens_S: torch.Tensor,
) -> None:
    """Draws a token for each s with rows_S[s] >= 0 from the parts of all ranks, int32 [R, S, P, len(Part)],
    and writes it where `sample` writes it."""
    for s, (row, position) in enumerate(zip(rows_S.tolist(), positions_S.tolist())):
        if row < 0:
            continue
        temperature, filters, keys = _fields(table[row, :FIELDS], position + 1)
        parts = parts_RSP[:, s].reshape(-1, len(Part))
        parts = parts[parts[:, Part.TOKEN] >= 0]
        floats = parts.view(torch.float32)
        measures, scores = floats[:, Part.MEASURE], floats[:, Part.SCORE]
        if temperature < MIN_TEMPERATURE:
            kept = torch.ones(len(parts), dtype=torch.bool)
        elif filters == (0, 1.0, 0.0):
            kept = _drawn_tile(measures, parts[:, Part.NUMBER], keys)
        else:
            kept = _survivors(measures, parts[:, Part.NUMBER], temperature, *filters)
        drawn = parts[scores.masked_fill(~kept, -math.inf).argmax(), Part.TOKEN]
        out_tokens_S[s] = table[row, Field.TOKEN] = drawn
        table[row, Field.POSITION] = position + 1


def _fields(fields: torch.Tensor, position: int) -> tuple[float, tuple[int, float, float], tuple[int, int]]:
    """Temperature, filters, and the keys of the noise at this position."""
    words, floats = fields.tolist(), fields.view(torch.float32).tolist()
    keys = noise_keys(words[Field.SEED_LOW], words[Field.SEED_HIGH], position)
    return floats[Field.TEMPERATURE], (words[Field.TOP_K], floats[Field.TOP_P], floats[Field.MIN_P]), keys


def _tiles(logits_V: torch.Tensor, first: int, temperature: float, keys: tuple[int, int]) -> Parts:
    """The tiles of a rank that are drawn from."""
    head = min(TILE - first % TILE, len(logits_V))
    pieces = [logits_V[:head], *logits_V[head:].split(TILE)] if head < len(logits_V) else [logits_V]
    tiles = first // TILE + torch.arange(len(pieces), dtype=torch.int32)
    masses = torch.stack([(piece / temperature).logsumexp(0) for piece in pieces])
    chosen = sorted({0, len(pieces) - 1})
    if len(pieces) > 2:
        chosen.append(1 + int((masses + gumbel(*keys, -1 - tiles))[1:-1].argmax()))
    scores, tokens = [], []
    for tile in chosen:
        start = first if tile == 0 else (first // TILE + tile) * TILE
        ids = torch.arange(start, start + len(pieces[tile]), dtype=torch.int32)
        score, at = (gumbel(*keys, ids) + pieces[tile] / temperature).max(dim=0)
        scores.append(score)
        tokens.append(ids[at])
    return masses[chosen], tiles[chosen], torch.stack(scores), torch.stack(tokens)


def _best_values(
    logits_V: torch.Tensor, first: int, temperature: float, top_k: int, keys: tuple[int, int]
) -> Parts:
    """The largest values of a rank that hold `top_k` tokens, and the best token of each."""
    last = logits_V.topk(min(top_k, len(logits_V))).values[-1]
    ids = ((logits_V >= last) & (logits_V > -math.inf)).nonzero().squeeze(1)
    kept = logits_V[ids]
    scores = gumbel(*keys, (first + ids).int()) + kept / temperature
    values, place, counts = kept.unique(return_inverse=True, return_counts=True)
    order = scores.argsort(stable=True)
    order = order[place[order].argsort(stable=True)]  # by value, and within a value by score
    best = order[counts.cumsum(0) - 1]
    return values, counts, scores[best], first + ids[best]


def _drawn_tile(masses: torch.Tensor, tiles: torch.Tensor, keys: tuple[int, int]) -> torch.Tensor:
    """Which parts are of the tile that is drawn."""
    is_same = tiles.unsqueeze(1) == tiles
    whole = torch.where(is_same, masses, -math.inf).logsumexp(1)
    return tiles == tiles[(gumbel(*keys, -1 - tiles) + whole).argmax()]


def _survivors(
    values: torch.Tensor, counts: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Which parts min_p, then top_k, then top_p keep."""
    values, counts = values.double(), counts.double()
    is_larger = values > values.unsqueeze(1)
    kept = torch.where(is_larger, counts, 0.0).sum(1) < top_k
    if min_p > 0.0:
        kept &= values >= (values.max().float() + temperature * math.log(min_p))
    if top_p < 1.0:
        masses = torch.where(kept, counts * ((values - values.max()) / temperature).exp(), 0.0)
        kept &= torch.where(is_larger, masses, 0.0).sum(1) < top_p * masses.sum()
    return kept
