"""Step times and KV cache size of a simulated worker, computed from published figures (`Timing`) or from a
measured profile (`ProfileTiming`).

A step takes the longer of reading the weights and computing its tokens' matmuls. In addition it reads the
keys and values of the decoding sequences, computes the attention of the prompts' chunks, launches the kernels
of every layer, and does the host's work for every sequence. The constants of a GPU are fitted to measured
runs of Shoal; docs/simulator.md compares measured and simulated times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shoal.errors import ConfigError
from shoal.fleet.planner.engine_profile import (
    PROFILE_LENGTHS,
    PROFILE_USAGES,
    DecodePoint,
    EngineProfile,
    PrefillPoint,
    ProfileData,
)

DTYPE_BYTES = 2  # bf16, for weights and for the KV cache
# Number of decodes from which a shared prefix is read once per step (attention/triton.py).
SHARE_FROM = 9


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a dense model with gated feed-forward layers."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False

    @property
    def layer_weights(self) -> int:
        """Weights of all layers for a token, without embedding and head."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """GPU memory of the weights."""
        tables = 1 if self.tie_word_embeddings else 2
        return DTYPE_BYTES * (self.layer_weights + tables * self.head_weights)

    @property
    def kv_bytes(self) -> int:
        """The keys and values of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES

    @property
    def pair_operations(self) -> int:
        """Floating-point operations for each pair of a query and a key that it sees."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's memory in bytes, its achieved bytes and floating-point operations per second, and the overheads
    of a step in seconds."""

    memory_bytes: float
    reserved_bytes: float  # part of the usable memory for graphs, activations and workspaces
    weight_bytes_per_s: float
    kv_bytes_per_s: float
    product_flops: float  # for the large matmuls of a prefill
    attention_flops: float  # for a prefill's attention
    layer_s: float  # per layer of a step: launches, norms, writes into the cache
    decode_s: float  # per decoding sequence of a step: sampling, and the host's work
    chunk_s: float  # per chunk of a prompt in a step
    host_bytes_per_s: float  # from and to host memory


SHAPES = {
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, 128, 151936, tie_word_embeddings=True),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, 128, 151936),
    "qwen3-32b": Shape(64, 5120, 25600, 64, 8, 128, 151936),
}
GPUS = {
    "h200": Gpu(
        memory_bytes=150.1e9,
        reserved_bytes=2e9,
        weight_bytes_per_s=4.2e12,
        kv_bytes_per_s=4.33e12,
        product_flops=620e12,
        attention_flops=535e12,
        layer_s=14.3e-6,
        decode_s=4.6e-6,
        chunk_s=34e-6,
        host_bytes_per_s=54e9,
    )
}


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, and the growth of each following step that only decodes."""

    first_s: float
    growth_s: float

    def of_steps(self, num_steps: int) -> float:
        """Returns the seconds of `num_steps` consecutive steps."""
        return num_steps * self.first_s + self.growth_s * (num_steps * (num_steps - 1) // 2)


class StepWork(NamedTuple):
    """The work of a step: `num_decodes` decoding sequences with `context_tokens` context tokens in total,
    `distinct_tokens` without repeated prefixes; and `num_chunks` chunks of prompts with `chunk_tokens` tokens
    and `chunk_pairs` query-key pairs in total, `num_first` of them the last chunks of their prompts."""

    num_decodes: int = 0
    context_tokens: int = 0
    distinct_tokens: int = 0
    num_chunks: int = 0
    chunk_tokens: int = 0
    chunk_pairs: int = 0
    num_first: int = 0


class StepTiming(Protocol):
    """Step times of a worker."""

    def step(self, work: StepWork) -> StepTime: ...


class Timing:
    """A StepTiming of one model on one GPU."""

    def __init__(self, gpu: Gpu, shape: Shape) -> None:
        self._gpu, self._shape = gpu, shape
        self._layer_bytes_s = DTYPE_BYTES * shape.layer_weights / gpu.weight_bytes_per_s
        self._layer_token_s = 2 * shape.layer_weights / gpu.product_flops
        self._head_bytes_s = DTYPE_BYTES * shape.head_weights / gpu.weight_bytes_per_s
        self._head_token_s = 2 * shape.head_weights / gpu.product_flops
        self._kv_token_s = shape.kv_bytes / gpu.kv_bytes_per_s
        self._pair_s = shape.pair_operations / gpu.attention_flops
        self._fixed_s = shape.num_layers * gpu.layer_s

    @property
    def kv_bytes(self) -> int:
        """The keys and values of one token."""
        return self._shape.kv_bytes

    @property
    def host_token_s(self) -> float:
        """Seconds for a token's keys and values from host memory."""
        return self._shape.kv_bytes / self._gpu.host_bytes_per_s

    def cache_tokens(self, gpu_memory_utilization: float) -> int:
        """Returns the size of the KV cache in tokens. Raises ConfigError without room for a cache."""
        gpu, shape = self._gpu, self._shape
        free = gpu.memory_bytes * gpu_memory_utilization - gpu.reserved_bytes - shape.weight_bytes
        if free < shape.kv_bytes:
            raise ConfigError(
                f"gpu_memory_utilization must leave room for a KV cache in addition to "
                f"{shape.weight_bytes / 1e9:.1f} GB of weights in {gpu.memory_bytes / 1e9:.1f} GB, got "
                f"{gpu_memory_utilization}; give more"
            )
        return int(free // shape.kv_bytes)

    def step(self, work: StepWork) -> StepTime:
        num_decodes = work.num_decodes
        num_rows = num_decodes + work.num_first
        num_tokens = num_decodes + work.chunk_tokens
        num_read = work.distinct_tokens if num_decodes >= SHARE_FROM else work.context_tokens
        seconds = (
            self._fixed_s
            + max(self._layer_bytes_s, num_tokens * self._layer_token_s)
            + max(self._head_bytes_s, num_rows * self._head_token_s)
            + num_read * self._kv_token_s
            + work.chunk_pairs * self._pair_s
            + num_decodes * self._gpu.decode_s
            + work.num_chunks * self._gpu.chunk_s
        )
        return StepTime(seconds, num_decodes * self._kv_token_s)

    def prompt_s(self, num_tokens: int, max_num_batched_tokens: int) -> float:
        """Returns the time of a prompt on an idle worker, in steps of at most `max_num_batched_tokens`
        tokens."""
        seconds, done = 0.0, 0
        while done < num_tokens:
            count = min(max_num_batched_tokens, num_tokens - done)
            pairs = count * done + count * (count + 1) // 2
            done += count
            work = StepWork(
                num_chunks=1, chunk_tokens=count, chunk_pairs=pairs, num_first=int(done == num_tokens)
            )
            seconds += self.step(work).first_s
        return seconds


class ProfileTiming:
    """A StepTiming from a measured profile (`shoal plan --profile`), for any model and machine, so that a
    simulation can be compared with the real fleet. A step takes the profile's time of its decodes, and for
    each prompt in it the time to its first token beyond an idle worker's step. `data.max_kv_tokens` is the
    size of the cache."""

    def __init__(self, profile: EngineProfile) -> None:
        self.data = profile.data
        self._profile = profile
        self._shortest = min(point.input_length for point in self.data.prefill)

    def step(self, work: StepWork) -> StepTime:
        """Returns the time of a step. All chunks count with their mean size and position in their prompts."""
        num_decodes, context = work.num_decodes, work.context_tokens
        decode_s = self._decode_s(num_decodes, context)
        if not work.num_chunks:
            return StepTime(decode_s, self._decode_s(num_decodes, context + num_decodes) - decode_s)
        size = work.chunk_tokens / work.num_chunks
        before = max(
            0.0, work.chunk_pairs / work.chunk_tokens - (size + 1) / 2
        )  # mean number of earlier prompt tokens
        idle_s = self._decode_s(1, size)
        chunk_s = max(0.0, self._begun_s(before + size, idle_s) - self._begun_s(before, idle_s))
        return StepTime((decode_s if num_decodes else idle_s) + work.num_chunks * chunk_s, 0.0)

    def _begun_s(self, num_tokens: float, idle_s: float) -> float:
        """Returns the time of the first `num_tokens` tokens of a prompt on an idle worker, whose step takes
        `idle_s`. Below the shortest measured prompt it interpolates to a step without prompt tokens."""
        found = self._profile.ttft_s(num_tokens)
        share = min(1.0, num_tokens / self._shortest)
        return idle_s + share * (found - idle_s)

    def _decode_s(self, num_decodes: int, context_tokens: float) -> float:
        if not num_decodes:
            return 0.0
        return self._profile.itl_s(context_tokens / self.data.max_kv_tokens, context_tokens / num_decodes)


def profile_of(
    gpu: str,
    model: str,
    max_num_seqs: int,
    cache_tokens: int,
    max_num_batched_tokens: int = 16384,
    *,
    input_lengths: Sequence[int] = PROFILE_LENGTHS,
    context_lengths: Sequence[int] = PROFILE_LENGTHS,
    kv_usages: Sequence[float] = PROFILE_USAGES,
) -> ProfileData:
    """Returns the profile that `shoal plan --profile` would measure for such a worker. Raises ConfigError for
    a GPU or a model without figures."""
    timing = find_timing(gpu, model)
    prefill = [
        PrefillPoint(length, timing.prompt_s(length, max_num_batched_tokens)) for length in input_lengths
    ]
    decode = []
    for context in context_lengths:
        for count in sorted({round(usage * cache_tokens / context) for usage in kv_usages}):
            if 1 <= count <= max_num_seqs and count * context <= cache_tokens:
                itl_s = timing.step(StepWork(count, count * context, count * context)).first_s
                decode.append(DecodePoint(context, count * context / cache_tokens, itl_s, count / itl_s))
    return ProfileData(model, f"simulated {gpu}", 1, cache_tokens, max_num_seqs, prefill, decode)


def find_timing(gpu: str, model: str) -> Timing:
    """Raises ConfigError for a GPU or a model without figures."""
    if gpu not in GPUS:
        raise ConfigError(f"cannot simulate gpu {gpu!r}; supported: {', '.join(GPUS)}")
    if model not in SHAPES:
        raise ConfigError(f"cannot simulate model {model!r}; supported: {', '.join(SHAPES)}")
    return Timing(GPUS[gpu], SHAPES[model])
