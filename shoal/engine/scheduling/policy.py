"""Scheduling policy: the order of sequences, the preemption victim, and the prompt tokens of one step. Pure
functions; scheduler.py calls them and holds the queues, step_costs.py learns what steps cost.

No clock, and no state that outlives a step (a PromptBudget is spent within one). How to change the policy or
add one: docs/howto/scheduling-policy.md.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

from shoal.api import Request
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.scheduling.step_costs import StepCosts, pairs

Turn = tuple[float, ...]

# The least time of prompts in a step, whatever the target: that many tokens' for each sequence that decodes.
TOKENS_A_DECODE = 2
# A chunk is shortened to the size of a captured step if at least this share of it is left.
NEAR = 0.75


# Order


def first_come_first_served(request: Request, order: int) -> Turn:
    return (order,)


def by_priority(request: Request, order: int) -> Turn:
    """The lowest number first, equal ones in the order of `Request.arrival`."""
    return (request.priority, request.arrival, order)


# Each function gives a request its turn; `order` counts the requests. The smaller turn runs first. Turns are
# unique, so each ends with `order`.
POLICIES: dict[str, Callable[[Request, int], Turn]] = {
    "fcfs": first_come_first_served,
    "priority": by_priority,
}


# Preemption


def victim(candidates: abc.Sequence[Sequence]) -> int:
    """Returns the index of the running sequence that gives its KV blocks back when a decode needs one.

    `candidates` are in turn, and each would free a block. The first is the sequence that needs the block,
    unless it would free none itself; none of them is part of the step yet. The last is a good choice: it
    waited least, and what runs longer is nearer to its end. The first must never be chosen while there are
    others, or no sequence would make progress.
    """
    return len(candidates) - 1


# How much of the prompts a step takes


def prompt_cap(max_tokens: int, threshold: int, num_prompts: int) -> int:
    """The most tokens one prompt may take from a step of `max_tokens`: others are to have a share while they
    wait. `threshold` 0 means no cap."""
    return threshold if threshold and num_prompts > 1 else max_tokens


def tokens_within(seconds: float, start: int, costs: StepCosts) -> int:
    """Returns how many tokens of a prompt, from token `start` on, can be computed in `seconds`."""
    if seconds <= 0:
        return 0
    # token_s * n + pair_s * n * (start + n / 2) = seconds, solved for n
    token_s = costs.token_s + costs.pair_s * start
    return int(2 * seconds / (token_s + math.sqrt(token_s * token_s + 2 * costs.pair_s * seconds)))


def near_size(num_tokens: int, before: int, sizes: abc.Sequence[int]) -> int:
    """A chunk of at most `num_tokens` for a step that holds `before` others: shortened so that the step has
    one of `sizes` (ascending), if one is near. A step between two captured sizes computes the larger."""
    i = bisect_right(sizes, before + num_tokens)
    shortened = sizes[i - 1] - before if i else 0
    return shortened if shortened >= NEAR * num_tokens else num_tokens


@dataclass(slots=True)
class PromptBudget:
    """The prompt tokens that a step may still take. The scheduler calls `fit`, then `spend`.

    tokens: what is left of the step's token budget.
    cap: the most tokens of one prompt.
    num_decode_tokens: the tokens of the step's decodes.
    seconds: what is left of the time that prompts may take.
    costs: what they take of it; None where no target holds.
    """

    tokens: int
    cap: int
    num_decode_tokens: int = 0
    seconds: float = math.inf
    costs: StepCosts | None = None
    block_size: int = 1
    step_sizes: abc.Sequence[int] = ()
    num_taken: int = 0

    @property
    def is_spent(self) -> bool:
        """True if the step has room for no further prompt token."""
        return not self.tokens or (self.seconds <= 0 and self.num_taken > 0)

    def fit(self, start: int, num_left: int) -> int:
        """Returns how many of a prompt's `num_left` tokens, from token `start` on, the step takes. The first
        prompt always gets a block, so that prompts make progress."""
        most = min(self.tokens, self.cap, num_left)
        if self.costs is None:
            return most
        within = tokens_within(self.seconds - self.costs.seq_s, start, self.costs)
        if within >= most:
            return most
        num_tokens = near_size(within, self.num_decode_tokens + self.num_taken, self.step_sizes)
        num_tokens -= min(num_tokens, (start + num_tokens) % self.block_size)
        return num_tokens if self.num_taken else max(num_tokens, min(self.block_size, most))

    def spend(self, start: int, num_tokens: int) -> None:
        self.tokens -= num_tokens
        self.num_taken += num_tokens
        if self.costs is not None:
            costs = self.costs
            self.seconds -= costs.seq_s + num_tokens * costs.token_s + pairs(start, num_tokens) * costs.pair_s


def prompt_budget(
    tokens: int,
    cap: int,
    num_decodes: int,
    num_decode_tokens: int,
    target_s: float,
    costs: StepCosts,
    block_size: int,
    step_sizes: abc.Sequence[int],
) -> PromptBudget:
    """Returns the budget of prompt tokens with which a step of `num_decodes` decodes, of
    `num_decode_tokens` tokens together, should end within `target_s`.

    Prompts get the time of one block of tokens at least, and of TOKENS_A_DECODE for each decode, even if the
    step then takes longer. So where decodes alone take the target, prompts get about as much time as they do.
    """
    decode_s = costs.step_s + num_decodes * costs.seq_s
    least_s = costs.token_s * max(block_size, TOKENS_A_DECODE * num_decodes)
    return PromptBudget(
        tokens,
        cap,
        num_decode_tokens,
        seconds=max(target_s - decode_s, least_s),
        costs=costs,
        block_size=block_size,
        step_sizes=step_sizes,
    )
