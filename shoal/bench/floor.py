"""Roofline estimates: the least time in which a device of given bandwidth and arithmetic could serve a set of
requests.

A decode step takes the time of reading every weight once, or the time of its GEMMs if that is longer, and
then the same for attention: the time of reading the cached keys and values once, or of its arithmetic. A
prefill takes the time of its arithmetic. Other work counts as zero. The module has no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Limits of a device: bytes per second that a plain copy reads and writes, and floating-point operations
    per second of a large GEMM."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """An amount of work, and the least time for it."""

    seconds: float = 0.0
    bytes_moved: float = 0.0
    operations: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds,
            self.bytes_moved + other.bytes_moved,
            self.operations + other.operations,
        )


class Floor:
    """The least times of one model on one device.

    `weight_bytes` is the size of all weights that a token uses. The head's are included, and the
    embedding's are not, unless both are the same matrix. By default each weight has two bytes. `kv_bytes` is
    the size of a number in the cache.
    """

    def __init__(
        self, model: ModelConfig, ceilings: Ceilings, weight_bytes: int | None = None, kv_bytes: int = 2
    ) -> None:
        self.ceilings = ceilings
        dense = expert = kv_numbers = 0
        self._per_pair = 0  # floating-point operations for a query and one key that it sees
        for kind in model.layers:
            attention, experts = kind.mixer, kind.experts
            heads, head_dim, kv_heads = attention.num_heads, attention.head_dim, attention.num_kv_heads
            dense += model.hidden_size * head_dim * 2 * (heads + kv_heads)
            kv_numbers += 2 * kv_heads * head_dim
            self._per_pair += 4 * heads * head_dim
            if experts is None:
                dense += 3 * model.hidden_size * model.intermediate_size
            else:
                expert += 3 * model.hidden_size * experts.intermediate_size
                dense += model.hidden_size * experts.num_experts
                if experts.shared is not None:
                    dense += 3 * model.hidden_size * experts.shared.intermediate_size
        self._head = model.hidden_size * model.vocab_size
        self._num_experts = self._chosen = 0
        if model.experts is not None:
            self._num_experts, self._chosen = model.experts.num_experts, model.experts.router.top_k
        # Floating-point operations for a token, without the head.
        self._per_token = 2 * (dense + self._chosen * expert)
        all_weights = dense + self._num_experts * expert + self._head
        each = 2.0 if weight_bytes is None else weight_bytes / all_weights
        self._dense_bytes, self._expert_bytes = (dense + self._head) * each, self._num_experts * expert * each
        self._kv_bytes = kv_numbers * kv_bytes  # for each token in the cache

    def prefill(self, num_tokens: int, cached: int = 0) -> Cost:
        """Returns the cost of `num_tokens` tokens of a prompt that follow `cached` others, and of the logits
        of the last one."""
        pairs = num_tokens * cached + num_tokens * (num_tokens + 1) // 2
        operations = num_tokens * self._per_token + pairs * self._per_pair + 2 * self._head
        return Cost(
            operations / self.ceilings.flops_per_s, (2 * num_tokens + cached) * self._kv_bytes, operations
        )

    def decode(self, num_seqs: int, num_cached: int, num_read: int | None = None) -> Cost:
        """Returns the cost of one step of `num_seqs` sequences, whose contexts have `num_cached` tokens
        together. `num_read` of these are read, as a shared prefix is read once. None: all are read."""
        if num_read is None:
            num_read = num_cached
        share = min(1.0, num_seqs * self._chosen / self._num_experts) if self._num_experts else 0.0
        weights = self._dense_bytes + share * self._expert_bytes
        keys = num_read * self._kv_bytes
        products = num_seqs * (self._per_token + 2 * self._head)
        attention = num_cached * self._per_pair
        return self._phase(weights, products) + self._phase(keys, attention)

    def _phase(self, bytes_moved: float, operations: float) -> Cost:
        return Cost(
            max(bytes_moved / self.ceilings.bytes_per_s, operations / self.ceilings.flops_per_s),
            bytes_moved,
            operations,
        )

    def run(
        self, inputs: Sequence[int], outputs: Sequence[int], max_num_seqs: int, shared_prefix: int = 0
    ) -> Cost:
        """Returns the cost of requests that all arrive at once. `inputs` and `outputs` are the numbers of
        their prompt and output tokens. The first `shared_prefix` tokens of all prompts are the same."""
        waiting = deque(zip(inputs, outputs))
        active: list[list[int]] = []  # for each running request: tokens of its context, and remaining tokens
        cost, cached = Cost(), 0
        while active or waiting:
            while waiting and len(active) < max_num_seqs:
                length, wanted = waiting.popleft()
                cost += self.prefill(length - cached, cached)
                cached = shared_prefix
                if wanted > 1:
                    active.append([length + 1, wanted - 1])
            if not active:
                continue
            context = sum(length for length, _ in active)
            cost += self.decode(len(active), context, context - (len(active) - 1) * shared_prefix)
            active = [[length + 1, left - 1] for length, left in active if left > 1]
        return cost
