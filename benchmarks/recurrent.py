"""The kernels of recurrent layers of known models: microseconds of a layer, the share of a copy's bandwidth
with which decodes read and write states, and microseconds a token of prompts.

    python benchmarks/recurrent.py [--models qwen3.5-9b] [--decodes 1,64] [--prompts 4096] [--states bfloat16]

On a GPU, in CUDA graphs, over as many layers as keep the L2 cache cold; without one on the CPU, in float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from kernels import BF16, COLD_BYTES, microseconds_of
from matmul import copy_bandwidth

from shoal.kernels.layer_cache import LayerState
from shoal.kernels.ops import select_ops
from shoal.kernels.recurrent.mixers import DeltaWeights, MambaWeights
from shoal.kernels.recurrent.sequences import Sequences

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = BF16 if ON_GPU else torch.float32


class Model(NamedTuple):
    """Key heads (or groups), heads, and numbers of a key (or of a state) and of a value."""

    op: str
    keys: int
    heads: int
    key_dim: int = 128
    value_dim: int = 128

    @property
    def inner(self) -> int:
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys * self.key_dim + self.inner


MODELS = {
    "qwen3.5-0.8b": Model("gated_delta", 16, 16),
    "qwen3.5-9b": Model("gated_delta", 16, 32),
    "qwen3.8-27b": Model("gated_delta", 16, 48),
    "nemotron": Model("mamba2", 8, 64, 128, 64),  # Nemotron-3-Nano-30B-A3B
    "granite": Model("mamba2", 1, 128, 128, 64),  # Granite-4.0-H-Small
}


def best_of(run: Callable[[int], object], copies: int) -> float:
    if ON_GPU:
        return microseconds_of(run, copies)
    best = float("inf")
    for i in range(6):
        start = time.perf_counter()
        run(i % copies)
        best = min(best, (time.perf_counter() - start) * 1e6)
    return best


def sequences_of(count: int, tokens: int) -> Sequences:
    """Each continues at position 100."""
    starts = torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * tokens
    positions = torch.arange(100, 100 + tokens, dtype=torch.int32, device=DEVICE).repeat(count)
    return Sequences(starts[:-1] // tokens, starts, positions, count if tokens == 1 else 0)


def layer_of(model: Model, rows: int, tokens: int, state_dtype: torch.dtype) -> dict[str, Any]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(DTYPE)

    shape = (
        (model.key_dim, model.value_dim) if model.op == "gated_delta" else (model.value_dim, model.key_dim)
    )
    return dict(
        x=randn(tokens, model.channels + model.inner),
        gates=randn(tokens, 2 * model.heads),
        numbers=torch.rand(3, model.heads, device=DEVICE),
        weight=randn(model.channels, 4),
        inputs=randn(rows + 1, model.channels, 3),
        states=torch.zeros(rows + 1, model.heads, *shape, device=DEVICE, dtype=state_dtype),
        norm=torch.ones(model.value_dim, device=DEVICE),
        norms=torch.ones(model.inner, device=DEVICE),
    )


def run_layer(
    ops: Any, model: Model, layers: list[dict[str, Any]], sequences: Sequences, part: str, i: int
) -> None:
    """`part`: what runs of a layer, conv, scan or norm; "all": the mixer, which decodes fuse."""
    layer = layers[i]
    mixed, z = layer["x"].split((model.channels, model.inner), dim=1)
    a, b = layer["gates"].chunk(2, dim=1)
    a_log, dt_bias, d = layer["numbers"]
    memory, weight = LayerState(layer["inputs"], layer["states"]), layer["weight"]
    if part == "all" and model.op == "gated_delta":
        delta = DeltaWeights(weight, a_log, dt_bias, layer["norm"], 1e-6)
        ops.delta_mixer(mixed, z, a, b, delta, memory, sequences)
        return
    limits = (0.0, float("inf"))
    if part == "all":
        mamba = MambaWeights(weight, None, a_log, d, dt_bias, limits, layer["norms"], 1e-6)
        ops.mamba_mixer(mixed, z, a, mamba, memory, sequences)
        return
    if part == "conv":
        ops.causal_conv(mixed, weight, None, True, layer["inputs"], sequences)
    keys = model.keys * model.key_dim
    if part == "scan" and model.op == "gated_delta":
        q, k, v = (x.unflatten(1, (-1, model.key_dim)) for x in mixed.split((keys, keys, model.inner), dim=1))
        ops.gated_delta(q, k, v, a, b, a_log, dt_bias, layer["states"], sequences)
    elif part == "scan":
        x, b, c = mixed.split((model.inner, keys, keys), dim=1)
        b, c = (y.unflatten(1, (model.keys, -1)) for y in (b, c))
        x = x.unflatten(1, (model.heads, -1))
        ops.mamba2(x, a, b, c, a_log, d, dt_bias, limits, layer["states"], sequences)
    if part == "norm":
        size, gate_first = model.value_dim, model.op == "mamba2"
        ops.gated_norm(z, z, layer["norm"], 1e-6, size, gate_first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--decodes", default="1,8,64,256" if ON_GPU else "1,8")
    parser.add_argument("--prompts", default="32,256,4096,8192" if ON_GPU else "32,256,4096")
    parser.add_argument("--states", default="float32", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    ops, state_dtype = select_ops(DEVICE), getattr(torch, arguments.states)
    bandwidth = copy_bandwidth() if ON_GPU else 0.0
    cases = [(int(count), 1) for count in arguments.decodes.split(",")]
    cases += [(1, int(tokens)) for tokens in arguments.prompts.split(",")]
    print(torch.cuda.get_device_name() if ON_GPU else f"CPU, {torch.get_num_threads()} threads")
    for name in arguments.models.split(","):
        model = MODELS[name]
        for count, tokens in cases:
            sequences = sequences_of(count, tokens)
            moved = 2 * count * model.inner * model.key_dim * state_dtype.itemsize
            copies = min(8, max(1, COLD_BYTES // moved)) if ON_GPU and tokens == 1 else 1
            layers = [layer_of(model, count, count * tokens, state_dtype) for _ in range(copies)]
            parts = {
                part: best_of(partial(run_layer, ops, model, layers, sequences, part), copies)
                for part in ("all", "conv", "scan", "norm")
            }
            each = ", ".join(f"{part} {us:.1f}" for part, us in parts.items() if part != "all")
            rate = f"{parts['all'] / tokens:8.2f} us a token"
            if tokens == 1 and ON_GPU:
                rate = f"{moved / parts['all'] / bandwidth:4.0%} of a copy"
            print(f"{name:13} {count:4} x {tokens:5} {parts['all']:10.1f} us ({each})  {rate}", flush=True)


if __name__ == "__main__":
    main()
