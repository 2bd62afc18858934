"""`bad_words`: runs of tokens that never appear in an answer. bad_words_triton.py has the kernel."""

from __future__ import annotations

import math

import torch

from shoal.kernels.sampling.row_options import Option, RowOptions


def ban_words(
    logits_KV: torch.Tensor, rows_K: torch.Tensor, positions_K: torch.Tensor, options: RowOptions
) -> None:
    """The last token of a bad word becomes impossible where the answer's tokens up to positions[k] end with
    the others. The prompt's tokens never count."""
    positions = positions_K.tolist()
    for k, row, one in options.rows(rows_K):
        if not one.fields[Option.WORDS_COUNT]:
            continue
        ends = one.ids(Option.WORDS_START).tolist()
        words_at = one.fields[Option.WORDS_START] + len(ends)
        tokens = one.lists[words_at : words_at + ends[-1]].tolist()
        output: list[int] = []
        if one.reads_history:
            first = max(one.fields[Option.NUM_PROMPT], positions[k] + 1 - len(tokens))
            output = options.tokens(row, positions[k] + 1)[first:].tolist()
        for start, end in zip([0, *ends], ends):
            before = end - start - 1
            if before <= len(output) and output[len(output) - before :] == tokens[start : end - 1]:
                logits_KV[k, tokens[end - 1]] = -math.inf
