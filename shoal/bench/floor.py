"""What physics allows: the least time in which a device of given bandwidth and arithmetic could serve a set
of requests.

A decode step takes the time of reading every weight once, or of its products where that is more, and then
that of reading the cached keys and values once; a prefill that of its products. Nothing else costs anything.
Pure arithmetic, no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of a device: bytes a second (read and written by a plain copy) and floating-point operations a second
    (of a large product)."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What has to be done, and how long that takes at least."""

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
    """Of one model on one device. `weight_bytes`: of all weights that a token passes, the head's included,
    the embedding's not, unless they are the same; by default two bytes a weight. `kv_bytes`: of a number in
    the cache."""

    def __init__(
        self, model: ModelConfig, ceilings: Ceilings, weight_bytes: int | None = None, kv_bytes: int = 2
    ) -> None:
        self.ceilings = ceilings
        dense, expert = 0, 0
        for layer in range(model.num_layers):
            dense += model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
            if model.is_moe_layer(layer):
                expert += 3 * model.hidden_size * model.moe_intermediate_size
                dense += model.hidden_size * model.num_experts
            else:
                dense += 3 * model.hidden_size * model.intermediate_size
        self._head = model.hidden_size * model.vocab_size
        self._num_experts, self._chosen = model.num_experts, model.num_experts_per_tok
        self._per_token = 2 * (dense + self._chosen * expert)  # floating-point operations, without the head
        all_weights = dense + self._num_experts * expert + self._head
        each = 2.0 if weight_bytes is None else weight_bytes / all_weights
        self._dense_bytes, self._expert_bytes = (dense + self._head) * each, self._num_experts * expert * each
        self._kv_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * kv_bytes  # a token
        self._per_pair = 4 * model.num_layers * model.num_heads * model.head_dim  # query and key it sees

    def prefill(self, num_tokens: int, cached: int = 0) -> Cost:
        """Of `num_tokens` after `cached` ones, and the logits of the last."""
        pairs = num_tokens * cached + num_tokens * (num_tokens + 1) // 2
        operations = num_tokens * self._per_token + pairs * self._per_pair + 2 * self._head
        return Cost(
            operations / self.ceilings.flops_per_s, (2 * num_tokens + cached) * self._kv_bytes, operations
        )

    def decode(self, num_seqs: int, num_cached: int, num_read: int | None = None) -> Cost:
        """Of one step of `num_seqs` whose contexts are `num_cached` tokens together, `num_read` of them to be
        read: a prefix that several share counts once."""
        share = min(1.0, num_seqs * self._chosen / self._num_experts) if self._num_experts else 0.0
        weights, keys = (
            self._dense_bytes + share * self._expert_bytes,
            (num_cached if num_read is None else num_read) * self._kv_bytes,
        )
        products, attention = num_seqs * (self._per_token + 2 * self._head), num_cached * self._per_pair
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
        """Of requests of so many prompt and output tokens that come at once, the first `shared_prefix` of
        each prompt common."""
        waiting = deque(zip(inputs, outputs))
        active: list[list[int]] = []  # context, tokens left
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
