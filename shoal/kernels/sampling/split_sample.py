"""Samples from rows of logits that are split over ranks. Each rank looks at its own columns and finds a few
parts of each row, the ranks exchange these, and each joins them to the token that `sample` draws from the
whole row.

This is exact for three kinds of rows, as the noise of a token, or of a tile, is the same on all ranks:

greedy          The first of the largest logits of each rank.
no filters      Of each tile that is sampled from: its mass, and the token that would be sampled from it. A
                rank sends its first and its last tile, which it may share with its neighbours, and of those
                between them the one that would be sampled.
top_k <= PARTS  The largest values of a rank, as many as hold top_k tokens: of each value how many tokens have
                it, and the one that would be sampled. Tokens that tie count as `sample` counts them. min_p
                and top_p look at such a row's top_k tokens alone, so they change nothing.

Other rows (top_p or min_p over the whole vocabulary, or a large top_k) may need any number of tokens.
`needs_whole_row` finds them by their parameters, so that the host knows before a step which way it goes.

S sampled sequences · V columns of this rank · R ranks · P parts. Plain PyTorch, for any device; the kernels
are in split_sample_triton.py.
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
import torch.nn.functional as F

from shoal.kernels.sampling.reference import TILE, gumbel, noise_keys
from shoal.kernels.state import FIELDS, MIN_TEMPERATURE, Field

PARTS = 64  # A top_k is rarely larger (Gemma's default).
TILE_PARTS = 4  # A row without filters has three parts a rank, rounded up to a power of two.


class Part(IntEnum):
    """The int32s of a part. Floats are stored as their bits."""

    MEASURE = 0  # float32: a value's logit; of a tile, the log of its mass
    NUMBER = 1  # how many tokens have this value; of a tile, which one it is
    SCORE = 2  # float32: the logit by temperature, and noise, of the token that would be sampled
    TOKEN = 3  # its id; -1: there is no such part


Keys = tuple[torch.Tensor, torch.Tensor]
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def needs_whole_row(temperature: float, top_k: int, top_p: float, min_p: float) -> bool:
    """Says if sampling with these parameters needs more than the parts."""
    has_filters = top_k > 0 or top_p < 1.0 or min_p > 0.0
    return temperature >= MIN_TEMPERATURE and has_filters and not 0 < top_k <= PARTS


def sample_parts(
    logits_SV: torch.Tensor, first: int, rows_S: torch.Tensor, positions_S: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """The parts of these columns, whose first token is `first`: int32 [S, P, len(Part)]. Rows and positions
    are the same as `sample`'s; a sample with row -1 has no parts."""
    parts = torch.full((len(rows_S), PARTS, len(Part)), -1, dtype=torch.int32, device=logits_SV.device)
    rows, logits_SV = _Rows(rows_S, positions_S, table), logits_SV.float()
    if rows.greedy:
        best, at = logits_SV[rows.greedy].max(dim=1, keepdim=True)
        _store(parts, rows.greedy, (best, torch.ones_like(at), best, first + at))
    if rows.plain:
        _store(parts, rows.plain, _tiles(logits_SV[rows.plain], first, *rows.of(rows.plain)))
    for s in rows.filtered:
        keys = rows.keys[s][0], rows.keys[s][1]
        found = _best_values(logits_SV[s], first, rows.temperatures[s], rows.filters[s][0], keys)
        _store(parts, [s], tuple(x.unsqueeze(0) for x in found))
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
    rows = _Rows(rows_S, positions_S, table)
    for kind, per_rank in (
        (rows.greedy, 1),
        (rows.plain, TILE_PARTS),
        *(([s], PARTS) for s in rows.filtered),
    ):
        if not kind:
            continue
        parts = parts_RSP[:, kind, :per_rank].transpose(0, 1).flatten(1, 2)  # [S, R * per_rank, len(Part)]
        tokens, numbers, floats = parts[..., Part.TOKEN], parts[..., Part.NUMBER], parts.view(torch.float32)
        measures, scores = floats[..., Part.MEASURE], floats[..., Part.SCORE]
        kept = tokens >= 0
        if kind is rows.plain:
            kept &= _sampled_tile(measures.masked_fill(~kept, -math.inf), numbers, rows.of(kind)[1])
        elif kind is not rows.greedy:
            [s] = kind
            kept[0, kept[0].clone()] = _survivors(
                measures[kept], numbers[kept], rows.temperatures[s], *rows.filters[s]
            )
        sampled = tokens.gather(1, scores.masked_fill(~kept, -math.inf).argmax(1, keepdim=True)).squeeze(1)
        at = rows_S[kind].long()
        out_tokens_S[kind] = sampled
        table[at, Field.TOKEN] = sampled
        table[at, Field.POSITION] = positions_S[kind] + 1


class _Rows:
    """The samples of a step by kind, and what their state rows say."""

    def __init__(self, rows_S: torch.Tensor, positions_S: torch.Tensor, table: torch.Tensor) -> None:
        fields = table[rows_S.clamp(min=0).long(), :FIELDS]
        words, floats = fields.tolist(), fields.view(torch.float32).tolist()
        self.temperatures = [row[Field.TEMPERATURE] for row in floats]
        self.filters = [(w[Field.TOP_K], f[Field.TOP_P], f[Field.MIN_P]) for w, f in zip(words, floats)]
        self.keys = [
            noise_keys(row[Field.SEED_LOW], row[Field.SEED_HIGH], position + 1)
            for row, position in zip(words, positions_S.tolist())
        ]
        there = [s for s, row in enumerate(rows_S.tolist()) if row >= 0]
        self.greedy = [s for s in there if self.temperatures[s] < MIN_TEMPERATURE]
        sampled = [s for s in there if self.temperatures[s] >= MIN_TEMPERATURE]
        self.plain = [s for s in sampled if self.filters[s] == (0, 1.0, 0.0)]
        self.filtered = [s for s in sampled if self.filters[s] != (0, 1.0, 0.0)]

    def of(self, samples: list[int]) -> tuple[torch.Tensor, Keys]:
        """Temperatures and the two keys of the noise of these samples, [n, 1] each."""
        temperatures = torch.tensor([[self.temperatures[s]] for s in samples], dtype=torch.float32)
        keys = torch.tensor([self.keys[s] for s in samples], dtype=torch.int32)
        return temperatures, (keys[:, :1], keys[:, 1:])


def _store(parts: torch.Tensor, samples: list[int], found: tuple[torch.Tensor, ...]) -> None:
    """Writes measures, numbers, scores and tokens, [n, count] each, as the first parts of these samples."""
    measures, numbers, scores, tokens = found
    columns = (
        measures.float().view(torch.int32),
        numbers.int(),
        scores.float().view(torch.int32),
        tokens.int(),
    )
    parts[samples, : measures.shape[1]] = torch.stack(columns, dim=-1)


def _tiles(logits_SV: torch.Tensor, first: int, temperatures_S1: torch.Tensor, keys: Keys) -> Parts:
    """The tiles of a rank that are sampled from: the first one, the last one, and the sampled one between."""
    before, num_seqs = first % TILE, len(logits_SV)
    num_tiles = -(-(before + logits_SV.shape[1]) // TILE)
    behind = num_tiles * TILE - before - logits_SV.shape[1]
    padded = F.pad(logits_SV / temperatures_S1, (before, behind), value=-math.inf)
    tiled = padded.view(num_seqs, num_tiles, TILE)
    masses = tiled.logsumexp(2)
    tiles = first // TILE + torch.arange(num_tiles, dtype=torch.int32)
    chosen = torch.tensor(sorted({0, num_tiles - 1})).expand(num_seqs, -1)
    if num_tiles > 2:
        noisy = (masses + gumbel(*keys, -1 - tiles))[:, 1:-1]
        chosen = torch.cat((chosen, 1 + noisy.argmax(1, keepdim=True)), dim=1)
    tokens = (tiles[chosen] * TILE).unsqueeze(2) + torch.arange(TILE, dtype=torch.int32)
    logits = tiled.gather(1, chosen.unsqueeze(2).expand(-1, -1, TILE))
    noise = gumbel(keys[0].unsqueeze(2), keys[1].unsqueeze(2), tokens)
    scores, at = (noise + logits).max(dim=2)
    return masses.gather(1, chosen), tiles[chosen], scores, tokens.gather(2, at.unsqueeze(2)).squeeze(2)


def _best_values(
    logits_V: torch.Tensor, first: int, temperature: float, top_k: int, keys: tuple[int, int]
) -> Parts:
    """The largest values of a rank that hold `top_k` tokens, and the best token of each."""
    # Any parts do for a row that needs more than parts: it is drawn again, as a whole.
    last = logits_V.topk(min(max(top_k, 1), PARTS, len(logits_V))).values[-1]
    ids = ((logits_V >= last) & (logits_V > -math.inf)).nonzero().squeeze(1)
    kept = logits_V[ids]
    scores = gumbel(*keys, (first + ids).int()) + kept / temperature
    values, place, counts = kept.unique(return_inverse=True, return_counts=True)
    order = scores.argsort(stable=True)
    order = order[place[order].argsort(stable=True)]  # by value, and within a value by score
    best = order[counts.cumsum(0) - 1]
    return values, counts, scores[best], first + ids[best]


def _sampled_tile(masses: torch.Tensor, tiles: torch.Tensor, keys: Keys) -> torch.Tensor:
    """Returns a mask of the parts of the sampled tile. A row has parts along the last dim; mass -inf marks a
    missing part."""
    is_same = tiles.unsqueeze(2) == tiles.unsqueeze(1)
    whole = torch.where(is_same, masses.unsqueeze(1), -math.inf).logsumexp(2)
    noisy = torch.where(masses > -math.inf, gumbel(*keys, -1 - tiles) + whole, -math.inf)
    return tiles == tiles.gather(1, noisy.argmax(1, keepdim=True))


def _survivors(
    values: torch.Tensor, counts: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Returns a mask of the parts that min_p, then top_k, then top_p keep."""
    values, counts = values.double(), counts.double()
    is_larger = values > values.unsqueeze(1)
    kept = torch.where(is_larger, counts, 0.0).sum(1) < top_k
    if min_p > 0.0:
        kept &= values >= (values.max().float() + temperature * math.log(min_p))
    if top_p < 1.0:
        masses = torch.where(kept, counts * ((values - values.max()) / temperature).exp(), 0.0)
        kept &= torch.where(is_larger, masses, 0.0).sum(1) < top_p * masses.sum()
    return kept
