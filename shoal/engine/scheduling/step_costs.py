"""`StepCosts`: seconds per step, sequence, prompt token and attention pair, learned from completed steps.
policy.py computes the budget of prompt tokens from them; engine/step_loop.py reports each step's content and
duration.

This class reads no clock. The figures have an effect only with a target for the time between tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# The first guess, which the first step corrects. It is slower than any GPU with a model that fits on it.
FIRST_TOKEN_S = 200e-6
STEP_TOKENS = 32  # cost of a step in prompt tokens,
SEQ_TOKENS = 2  # and of each of its sequences
PAIRS_A_TOKEN = 16384  # pairs of attention that cost as much as a prompt token
# How much of the ratio of measurement to estimate one step corrects, as an exponent.
CORRECTION = 0.3
# A step that took this many times the estimate, or more, may have been disturbed. One that took as much less
# may have run while the host was held up, so that the host saw its end right after the end of the step before
# it. Either is believed in full only if the step before it was as slow, or as quick.
DISTURBED = 1.25


@dataclass(slots=True)
class StepCosts:
    """Seconds a step of the model takes: `step_s` for the step itself, `seq_s` for each of its sequences,
    `token_s` for each prompt token, and `pair_s` for each pair of a prompt token and a token that it attends
    to."""

    step_s: float = STEP_TOKENS * FIRST_TOKEN_S
    seq_s: float = SEQ_TOKENS * FIRST_TOKEN_S
    token_s: float = FIRST_TOKEN_S
    pair_s: float = FIRST_TOKEN_S / PAIRS_A_TOKEN
    num_learned: int = 0  # steps
    last_ratio: float = 1.0  # seconds of the last step, divided by their estimate

    def learn(self, num_seqs: int, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """Corrects the figures by a step that took `seconds` for `num_seqs` sequences, prompt chunks
        included. Each chunk is (tokens of its prompt before it, its own tokens).

        Each part of the estimate is corrected in proportion to its share of the step. A step of decodes
        therefore corrects the cost of decodes, and a step of a long prompt the cost of prompt tokens.
        """
        if seconds <= 0:
            return
        num_tokens, num_pairs = 0, 0.0
        for start, count in chunks:
            num_tokens += count
            num_pairs += pairs(start, count)
        of_step, of_seqs = self.step_s, num_seqs * self.seq_s
        of_tokens, of_pairs = num_tokens * self.token_s, num_pairs * self.pair_s
        expected = of_step + of_seqs + of_tokens + of_pairs
        ratio = seconds / expected
        self.num_learned += 1
        if self.num_learned == 1:  # it says how fast this machine is, and nothing about the parts
            self.step_s *= ratio
            self.seq_s *= ratio
            self.token_s *= ratio
            self.pair_s *= ratio
            return
        believed = min(ratio, max(self.last_ratio, DISTURBED))
        believed = max(believed, min(self.last_ratio, 1 / DISTURBED))
        self.last_ratio = ratio
        squares = of_step**2 + of_seqs**2 + of_tokens**2 + of_pairs**2
        # With this scale the sum of the corrected parts approaches the measurement by CORRECTION.
        exponent = CORRECTION * expected / squares
        self.step_s *= believed ** (exponent * of_step)
        self.seq_s *= believed ** (exponent * of_seqs)
        if num_tokens:
            self.token_s *= believed ** (exponent * of_tokens)
            self.pair_s *= believed ** (exponent * of_pairs)


def pairs(start: int, num_tokens: int) -> float:
    """Returns the number of (query, key) pairs of a chunk that begins at token `start` of its prompt."""
    return num_tokens * (start + num_tokens / 2)
