"""Chooses the steps with drafts that a GPU runs: they are few, as each is a CUDA graph. On a CPU a step may
have any size."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.config import ResolvedConfig, SpeculativeConfig
from shoal.kernels.drafting.draft_rows import most_decodes


def draft_sizes(config: ResolvedConfig) -> Mapping[int, int] | None:
    """Returns the sizes of steps with drafts, each with the most decodes of such a step. A size is the tokens
    of a decode: 2, 4, 8 and so on up to half of the largest, and the largest; without adaptive verification
    the largest alone. None: a step may have any size."""
    options = config.speculative
    if options is None or config.device != "cuda":
        return None
    found = {}
    for size in _sizes(options):
        most = min(config.max_num_seqs, most_decodes(size), config.max_num_batched_tokens // size)
        if most:
            found[size] = most
    return found


def _sizes(options: SpeculativeConfig) -> list[int]:
    most, sizes = options.queries, []
    size = 2
    while 2 * size <= most and options.enable_adaptive_verification:
        sizes.append(size)
        size *= 2
    return [*sizes, most]


def draft_rows(config: ResolvedConfig) -> dict[int, list[int]]:
    """Returns the numbers of rows of captured steps with drafts, ascending, by the number of tokens of each:
    powers of two, and the most."""
    found = {}
    for size, most in (draft_sizes(config) or {}).items():
        rows = [1 << i for i in range(most.bit_length()) if 1 << i < most]
        found[size] = [*rows, most]
    return found
