"""Penalties of repetition, presence and frequency, as vLLM has them. penalties_triton.py has the kernel."""

from __future__ import annotations

import torch

from shoal.kernels.sampling.row_options import Option, RowOptions


def penalize(
    logits_KV: torch.Tensor, rows_K: torch.Tensor, positions_K: torch.Tensor, options: RowOptions
) -> None:
    """Changes the logits of tokens that a row has at positions up to positions[k].

    For tokens of the prompt or the output, positive logits are divided by the repetition penalty, and others
    multiplied by it. For tokens of the output alone, presence is subtracted once, and frequency once for each
    time that the token occurs.
    """
    positions = positions_K.tolist()
    for k, row, one in options.rows(rows_K):
        repetition, presence, frequency = one.penalties
        if (repetition, presence, frequency) == (1.0, 0.0, 0.0):
            continue
        logits_V, tokens = logits_KV[k], options.tokens(row, positions[k] + 1)
        if repetition != 1.0:
            seen = tokens.unique().long()
            x = logits_V[seen]
            logits_V[seen] = torch.where(x > 0, x / repetition, x * repetition)
        ids, counts = tokens[one.fields[Option.NUM_PROMPT] :].unique(return_counts=True)
        logits_V[ids.long()] -= frequency * counts
        logits_V[ids.long()] -= presence
