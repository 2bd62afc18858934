"""Beam search over one prompt. It decides which beams continue, which are finished, and when no better one
can come.

The rules are the same as in `transformers` (`num_beams`, early_stopping=False), and so are the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.api import TokenLogprobs
from shoal.outputs import BeamSearchSequence
from shoal.sampling_params import BeamSearchParams


class BeamSearch:
    """A search begins with the prompt as its only beam. `advance` is called with what the model says about
    the next token of each running beam, until none runs any more."""

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: BeamSearchParams,
        eos_token_ids: Sequence[int],
        max_tokens: int,
    ) -> None:
        self.params = params
        self.max_tokens = max_tokens  # params.max_tokens, or less if the model has less room
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.running = [BeamSearchSequence(prompt_token_ids, [])]
        # The beam_width best finished beams, with their scores.
        self.finished: list[tuple[float, BeamSearchSequence]] = []

    @property
    def num_candidates(self) -> int:
        """Number of a beam's likeliest tokens that can matter: beam_width of them continue even if every
        end-of-text id is among the best."""
        return self.params.beam_width + len(self.eos_token_ids)

    def advance(self, likeliest: Sequence[TokenLogprobs]) -> None:
        """Makes a step of the search. `likeliest` holds at least `num_candidates` tokens with their
        log-probabilities for each running beam."""
        width = self.params.beam_width
        candidates = [
            (beam.cum_logprob + found.logprob, beam, token_id, tokens)
            for beam, tokens in zip(self.running, likeliest)
            for token_id, found in tokens.items()
        ]
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        length = len(self.running[0].logprobs) + 1
        self.running = []
        for place, (cum_logprob, beam, token_id, tokens) in enumerate(candidates):
            grown = replace(
                beam,
                tokens=[*beam.tokens, token_id],
                logprobs=[*beam.logprobs, tokens],
                cum_logprob=cum_logprob,
            )
            if token_id in self.eos_token_ids:
                grown.finish_reason, grown.stop_reason = "stop", token_id
            elif length == self.max_tokens:
                grown.finish_reason = "length"
            if grown.finish_reason is None:
                self.running.append(grown)
                if len(self.running) == width:
                    break
            elif place < width:  # An end that is less likely than beam_width continuations is not a result.
                self.finished.append((self._score(cum_logprob, length), grown))
            elif length == self.max_tokens:
                break
        self.finished.sort(key=lambda entry: entry[0], reverse=True)
        del self.finished[width:]
        if self.running and len(self.finished) == width:
            best = self._score(self.running[0].cum_logprob, length)
            if best <= self.finished[-1][0]:  # A running beam only becomes less likely.
                self.running = []

    def results(self) -> list[BeamSearchSequence]:
        """Returns the finished beams, the best first."""
        return [beam for _, beam in self.finished]

    def _score(self, cum_logprob: float, length: int) -> float:
        return cum_logprob / length**self.params.length_penalty
