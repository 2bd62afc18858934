"""Computes log-probabilities of sampled tokens and of prompt tokens, and hidden states, for the requests that
ask for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.engine.runner.small_ops import few_threads, start_copy, upload
from shoal.kernels.sampling import logprobs as rows_of_logits
from shoal.layers.embedding import Vocabulary

# Elements of one [rows, V] float32 slice of log-probabilities: 64 MiB.
MAX_SLICE_ELEMENTS = 1 << 24


@dataclass(slots=True)
class LogprobLists:
    """LogprobTensors as Python's own numbers."""

    chosen: list[float]
    ranks: list[int]
    top_ids: list[list[int]]
    top: list[list[float]]


@dataclass(slots=True)
class LogprobTensors:
    """Log-probability and rank of each chosen token, then the k best ids and their log-probabilities."""

    chosen: torch.Tensor  # [S] float32
    ranks: torch.Tensor  # [S] int64
    top_ids: torch.Tensor  # [S, k] int64
    top: torch.Tensor  # [S, k] float32

    def to_lists(self) -> LogprobLists:
        return LogprobLists(
            self.chosen.tolist(), self.ranks.tolist(), self.top_ids.tolist(), self.top.tolist()
        )

    def to_host(self) -> LogprobTensors:
        """Starts the copies. They are complete when an event recorded after this call has passed."""
        return LogprobTensors(*(start_copy(x) for x in (self.chosen, self.ranks, self.top_ids, self.top)))


def logprobs(logits_SV: torch.Tensor, tokens_S: torch.Tensor, num: int, head: Vocabulary) -> LogprobTensors:
    """Log-probabilities of the raw logits, as vLLM's default `raw_logprobs`: of `tokens_S`, and of the `num`
    best (-1: of the whole vocabulary). Each rank has the logits of its own tokens, and all make this call."""
    k = head.vocab_size if num < 0 else min(num, head.vocab_size)
    with few_threads(logits_SV.device, logits_SV.numel()):
        return LogprobTensors(*rows_of_logits.logprobs(logits_SV, tokens_S, k, head.columns()))


def unit_rows(hidden_SD: torch.Tensor, samples: list[int]) -> torch.Tensor:
    """Embeddings: these rows as float32, of unit length."""
    return torch.nn.functional.normalize(
        hidden_SD[upload(torch.tensor(samples), hidden_SD.device)].float(), dim=-1
    )


def row_slices(num_rows: int, vocab_size: int) -> list[slice]:
    """Slices of rows whose float32 logits fit a bounded amount of memory."""
    rows = max(1, MAX_SLICE_ELEMENTS // vocab_size)
    return [slice(i, min(i + rows, num_rows)) for i in range(0, num_rows, rows)]


def concatenate(parts: list[LogprobTensors]) -> LogprobTensors:
    return LogprobTensors(
        *(torch.cat([getattr(p, name) for p in parts]) for name in ("chosen", "ranks", "top_ids", "top"))
    )
