"""Computes log-probabilities of sampled tokens and of prompt tokens, and hidden states, for the requests that
ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.engine.runner.sampler_options import SamplerOptions
from shoal.engine.runner.small_ops import few_threads, start_copy, upload
from shoal.engine.runner.whole_rows import StepWholeRows
from shoal.kernels.sampling import logprobs as rows_of_logits
from shoal.kernels.sampling.row_options import SamplePlaces
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


def in_slices(
    logits: Callable[[torch.Tensor], torch.Tensor],
    hidden_PD: torch.Tensor,
    targets_P: torch.Tensor,
    count: int,
    head: Vocabulary,
) -> LogprobTensors:
    """Returns log-probabilities of the tokens that follow these hidden states. They are computed in slices of
    rows, so that no [P, V] tensor of a long prompt is made."""
    slices = row_slices(hidden_PD.shape[0], head.vocab_size)
    return concatenate([logprobs(logits(hidden_PD[rows]), targets_P[rows], count, head) for rows in slices])


@dataclass(slots=True)
class Outcome:
    """A step's results on the device in addition to its tokens, for requests that need more."""

    logits_SV: torch.Tensor
    places: SamplePlaces
    hidden_SD: torch.Tensor | None = None  # hidden states of a mixed step's samples
    prompt_logprobs: LogprobTensors | None = None
    whole_rows: StepWholeRows | None = None  # the tokens that were sampled from whole rows
    ended: bool = False  # the step's graph has accepted drafts, and made the next ones


def more_results(
    compute: Callable[..., LogprobTensors | None],
    num_samples: int,
    num_logprobs: int | None,
    outcome: Outcome,
    options: SamplerOptions | None,
) -> tuple[LogprobTensors | None, LogprobTensors | None, torch.Tensor | None]:
    """Starts the copies to the host of log-probabilities of samples and of prompts, and of embeddings.
    `compute`: Sampler.logprobs; `num_logprobs`: how many it is asked for, or None."""
    chosen = prompt = embeddings = None
    if options is not None and options.embeds and outcome.hidden_SD is not None:
        embeddings = unit_rows(outcome.hidden_SD, options.embeds)
    if num_logprobs is not None:
        logits_SV, rows_S = outcome.logits_SV[:num_samples], outcome.places.rows_S[:num_samples]
        filtered = options.filtered if options is not None else []
        found = compute(logits_SV, rows_S, num_logprobs, outcome.whole_rows, filtered)
        if found is not None:
            chosen = found.to_host()
    if outcome.prompt_logprobs is not None:
        prompt = outcome.prompt_logprobs.to_host()
    if embeddings is not None:
        embeddings = start_copy(embeddings)
    return chosen, prompt, embeddings
