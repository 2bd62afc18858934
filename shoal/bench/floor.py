"""Roofline estimates: the least time in which a device of given bandwidth and arithmetic could serve a set of
requests.

A decode step takes the time of reading every weight once, or the time of its GEMMs if that is longer, and
then the same for attention and recurrent layers: the time of reading the cached keys and values once, and
of reading and writing the states, or of their arithmetic. A prefill takes the time of its arithmetic. Other
work counts as zero. The module has no torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.kinds.latent import LatentKind
from shoal.kinds.recurrent import ChannelDeltaKind, DeltaKind, Mamba2Kind, RecurrentKind, ShortConvKind
from shoal.model_config import AttentionKind, LayerKind, ModelConfig


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


@dataclass(frozen=True, slots=True)
class LayerWork:
    """A layer in numbers."""

    dense: int  # weights that each token uses
    expert: int  # weights of one expert
    num_experts: int
    num_experts_per_tok: int
    kv_numbers: int  # that the cache has of a token
    per_pair: int  # floating-point operations for a query and one key that it sees
    window: int | None  # how many positions a token sees, with its own; None: all before it
    state_bytes: int = 0  # a sequence's, in a recurrent layer
    per_state: int = 0  # floating-point operations that advance the state by a token
    in_chunks: bool = False  # windows begin at multiples of their size, as Llama 4's do

    @classmethod
    def of(cls, model: ModelConfig, kind: LayerKind) -> LayerWork:
        experts, hidden = kind.experts, model.hidden_size
        dense = kv_numbers = per_pair = state_bytes = per_state = 0
        if kind.attention is not None:
            dense, kv_numbers, per_pair = _attention(kind.attention, hidden)
        elif isinstance(kind.mixer, RecurrentKind):
            dense, state_bytes, per_state = _recurrence(kind.mixer, hidden)
        expert = num_experts = chosen = 0
        matrices = 2 if model.activation == "relu2" else 3  # an MLP without a gate has up and down
        if experts is None:
            size = kind.intermediate_size or model.intermediate_size
            dense += matrices * hidden * size if kind.has_mlp else 0
        else:
            num_experts, chosen, latent = experts.num_experts, experts.router.top_k, experts.latent_size
            expert = (
                (3 if experts.activation.has_gate else 2) * (latent or hidden) * experts.intermediate_size
            )
            dense += hidden * num_experts + 2 * hidden * (latent or 0)
            if experts.shared is not None:
                dense += matrices * hidden * experts.shared.intermediate_size
        dense += 3 * hidden * model.per_layer_size
        window, in_chunks = None, False
        if kind.attention is not None:
            window, in_chunks = kind.attention.window, kind.attention.in_chunks
        shape = dense, expert, num_experts, chosen, kv_numbers, per_pair
        return cls(*shape, window, state_bytes, per_state, in_chunks)

    def seen(self, num_keys: int) -> int:
        """Returns how many of the keys up to its own a token sees."""
        if self.window is None:
            return num_keys
        if not self.in_chunks:
            return min(num_keys, self.window)
        return num_keys - max(0, num_keys - 1) // self.window * self.window

    def pairs(self, num_keys: int) -> int:
        """Returns how many pairs the tokens of a prompt of this length make with the keys that they see."""
        if self.window is None or num_keys <= self.window:
            return num_keys * (num_keys + 1) // 2
        if not self.in_chunks:
            return self.pairs(self.window) + (num_keys - self.window) * self.window
        chunks, rest = divmod(num_keys, self.window)
        return chunks * self.pairs(self.window) + self.pairs(rest)


def _attention(kind: AttentionKind | LatentKind, hidden: int) -> tuple[int, int, int]:
    """Returns a layer's weights of attention, the cache's numbers of a token, and the operations for a pair
    of query and key."""
    heads = kind.num_heads
    if isinstance(kind, AttentionKind):
        head_dim = kind.head_dim
        # A layer that reads another layer's keys and values counts as one that finds them read.
        kv_heads = kind.num_kv_heads if kind.kv_layer is None else 0
        outputs = (2 * heads + (1 if kind.v_is_k else 2) * kv_heads) * head_dim
        if kind.gate is not None:
            outputs += heads * (1 if kind.gate.per_head else head_dim)
        return hidden * outputs, 2 * kv_heads * head_dim, 4 * heads * head_dim
    queries, rank = heads * kind.query_dim, kind.q_lora_rank
    weights = hidden * queries if rank is None else rank * (hidden + queries)
    weights += hidden * (kind.head_dim + heads * kind.v_head_dim)
    weights += kind.kv_lora_rank * heads * (kind.qk_nope_head_dim + kind.v_head_dim)
    # The expanded form takes the fewest operations. Decodes are absorbed, and wait for memory.
    return weights, kind.head_dim, 2 * heads * (kind.query_dim + kind.v_head_dim)


def _recurrence(kind: RecurrentKind, hidden: int) -> tuple[int, int, int]:
    """Returns a recurrent layer's weights, the bytes of its state, and the operations of a token on it.
    States have four bytes a number, and inputs of convolutions two."""
    channels, taps = kind.conv_shape(1)
    state = 0 if isinstance(kind, ShortConvKind) else math.prod(kind.state_shape(1))
    if isinstance(kind, DeltaKind):
        values = kind.num_value_heads * kind.value_dim
        weights = hidden * (channels + 2 * values + 2 * kind.num_value_heads)
        if isinstance(kind, ChannelDeltaKind):
            keys, rank = kind.num_key_heads * kind.key_dim, kind.gate_rank
            weights = hidden * (channels + values + kind.num_value_heads) + rank * (
                2 * hidden + keys + values
            )
    elif isinstance(kind, Mamba2Kind):
        weights = hidden * (channels + 2 * kind.inner_size + kind.num_heads)
    else:
        weights = hidden * 4 * channels
    # The decay of the state, the sum with an outer product, and the matmuls with one vector or two.
    return weights, 2 * channels * taps + 4 * state, 7 * state


class Floor:
    """The least times of one model on one device.

    `dense_bytes` and `expert_bytes` are the sizes of the weights that every token uses and of all experts.
    The head's are included, and the embedding's are not, unless both are the same matrix. By default each
    weight has two bytes. `kv_bytes` is the size of a number in the cache. Matmuls with weights run at
    `matmul_rate` times the ceiling: twice where they multiply in fp8.

    A step reads as many experts as random routing touches.
    """

    def __init__(
        self,
        model: ModelConfig,
        ceilings: Ceilings,
        dense_bytes: int | None = None,
        expert_bytes: int | None = None,
        kv_bytes: int = 2,
        matmul_rate: float = 1.0,
    ) -> None:
        self.ceilings, self._kv_bytes, self._matmul_rate = ceilings, kv_bytes, matmul_rate
        self._layers = [LayerWork.of(model, kind) for kind in model.layers]
        self._head = model.hidden_size * model.vocab_size
        dense = sum(layer.dense for layer in self._layers)
        self._dense_bytes = 2 * (dense + self._head) if dense_bytes is None else dense_bytes
        self._all_experts = sum(layer.expert * layer.num_experts for layer in self._layers)
        self._expert_bytes = 2 * self._all_experts if expert_bytes is None else expert_bytes
        # Floating-point operations for a token, without the head.
        self._per_token = 2 * (
            dense + sum(layer.expert * layer.num_experts_per_tok for layer in self._layers)
        )

    def prefill(self, num_tokens: int, cached: int = 0) -> Cost:
        """Returns the cost of `num_tokens` tokens of a prompt that follow `cached` others, and of the logits
        of the last one."""
        products, numbers = num_tokens * self._per_token + 2 * self._head, 0
        mixing = num_tokens * sum(layer.per_state for layer in self._layers)
        for layer in self._layers:
            mixing += (layer.pairs(cached + num_tokens) - layer.pairs(cached)) * layer.per_pair
            numbers += (2 * num_tokens + layer.seen(cached + 1) - 1) * layer.kv_numbers
        seconds = (products / self._matmul_rate + mixing) / self.ceilings.flops_per_s
        return Cost(seconds, numbers * self._kv_bytes, products + mixing)

    def decode(self, contexts: Sequence[int], shared: int = 0) -> Cost:
        """Returns the cost of one step of sequences that have these numbers of tokens in the cache, of which
        they share the first `shared`. Shared ones are read once."""
        num_seqs = len(contexts)
        numbers = attention = experts = states = 0.0
        for layer in self._layers:
            states += 2 * layer.state_bytes * num_seqs
            seen = sum(map(layer.seen, contexts))
            seen_shared = [max(0, shared - (context - layer.seen(context))) for context in contexts]
            attention += seen * layer.per_pair + num_seqs * layer.per_state
            numbers += (seen - sum(seen_shared) + max(seen_shared, default=0)) * layer.kv_numbers
            if layer.num_experts:
                untouched = (1 - layer.num_experts_per_tok / layer.num_experts) ** num_seqs
                experts += (1 - untouched) * layer.num_experts * layer.expert
        weights = float(self._dense_bytes)
        if experts:
            weights += experts / self._all_experts * self._expert_bytes
        products = num_seqs * (self._per_token + 2 * self._head)
        matmuls = self._phase(weights, products, self._matmul_rate)
        return matmuls + self._phase(numbers * self._kv_bytes + states, attention)

    def _phase(self, bytes_moved: float, operations: float, rate: float = 1.0) -> Cost:
        seconds = bytes_moved / self.ceilings.bytes_per_s
        return Cost(max(seconds, operations / rate / self.ceilings.flops_per_s), bytes_moved, operations)

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
            cost += self.decode([length for length, _ in active], shared_prefix if len(active) > 1 else 0)
            active = [[length + 1, left - 1] for length, left in active if left > 1]
        return cost
