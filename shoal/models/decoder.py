"""One decoder for the Llama line: Llama, Mistral, SmolLM2, Qwen2, Qwen3 and Qwen3-MoE, told apart by flags of
ModelConfig.

Weights arrive one tensor at a time under their Hugging Face names; each layer takes its own shard
(layers/linear.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.errors import CheckpointError, ConfigError
from shoal.kernels.ops import Ops
from shoal.kernels.step_input import AttentionBackend, StepInput
from shoal.layers.attention import Attention
from shoal.layers.embedding import Vocabulary
from shoal.layers.linear import Linear, Loaded
from shoal.layers.mlp import MLP, Experts, MoE
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig
from shoal.models.rope import rope_frequencies
from shoal.models.shapes import checkpoint_shapes

# Checkpoint tensors that share one product here: name in the checkpoint -> (layer, part).
MERGED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight$")


def check_parallel(config: ModelConfig, size: int) -> None:
    """Raises ConfigError if the model can't be divided over `size` ranks."""
    widths = {"num_attention_heads": config.num_heads, "intermediate_size": config.intermediate_size}
    if config.num_experts:
        widths["moe_intermediate_size"] = config.moe_intermediate_size
    for name, width in widths.items():
        if width % size:
            raise ConfigError(
                f"tensor_parallel_size {size} does not divide {name} {width}; choose a divisor of it"
            )
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size {size} neither divides nor is a multiple of num_key_value_heads "
            f"{config.num_kv_heads}"
        )


class DecoderLayer(nn.Module):
    """Pre-norm transformer block. Its products add themselves to `residual`; where they can't, what is left
    to add is carried beside it, so that the sum and the norm are one kernel."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: TensorParallel,
        ops: Ops,
        backend: AttentionBackend,
        keep_quantized: bool,
    ) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer, tp, ops, backend, keep_quantized)
        self.mlp = (
            MoE(config, tp, ops) if config.is_moe_layer(layer) else MLP(config, tp, ops, keep_quantized)
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)

    def forward(
        self,
        x_TD: torch.Tensor | None,
        residual_TD: torch.Tensor,
        step: StepInput,
        kv_layer: torch.Tensor,
        cos_sin: torch.Tensor,
        select_S: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """x is what the layer before left to add to the residual (None: nothing); returns the same for the
        next. With `select_S`, for those tokens alone: all of them are in the cache, the rest of the layer
        runs for these."""
        x, residual = self.self_attn(
            x_TD, residual_TD, self.input_layernorm, step, kv_layer, cos_sin, select_S
        )
        return self.mlp(x, residual, self.post_attention_layernorm) if len(residual) else (None, residual)


class Decoder(nn.Module):
    """Token ids of a step in, final hidden states out; `logits` maps those to the vocabulary.

    Built under the device and default dtype of the engine. `max_position` sizes the rope table. With
    `keep_quantized` (CPU) weights that arrive quantized stay packed.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        ops: Ops,
        backend: AttentionBackend,
        max_position: int,
        keep_quantized: bool = False,
    ) -> None:
        super().__init__()
        check_parallel(config, tp.size)
        self.config, self.backend, self.keep_quantized = config, backend, keep_quantized
        # the layers as one call, on a CPU with packed weights
        self.fused: Callable[..., torch.Tensor] | None = None
        self.embed_tokens = Vocabulary(
            config.vocab_size, config.hidden_size, tp, ops, keep_quantized=keep_quantized
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, tp, ops, backend, keep_quantized) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = Vocabulary(
                config.vocab_size, config.hidden_size, tp, ops, keep_quantized=keep_quantized
            )
        self.register_buffer("cos_sin", rope_table(config, max_position), persistent=False)
        self._expected: set[str] = set()  # tensors that a load still waits for

    def forward(
        self, step: StepInput, kv: torch.Tensor, select_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Final hidden states [T, D], or [S, D] of the token indices in `select_S` (int64)."""
        x, residual = None, self.embed_tokens.embed(step.token_ids_T)
        if self.fused is not None:
            x = self.fused(residual, step, kv, self.cos_sin)
            if select_S is not None:
                x, residual = x[select_S], residual[select_S]
        else:
            last = len(self.layers) - 1
            for i, layer in enumerate(self.layers):
                x, residual = layer(
                    x, residual, step, kv[:, i], self.cos_sin, select_S if i == last else None
                )
        return self.norm.add(x, residual)

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Meanwhile a step runs these alone, the first layer, which has no sum before its norm, among them,
        and then the last, which ends with selected tokens: for a rehearsal, all its kernels in a fraction of
        the time, for results that mean nothing."""
        layers = self.layers
        kinds: dict[Any, nn.Module] = {}
        for layer in layers[:-1]:  # type: ignore[union-attr]
            kinds.setdefault((type(layer.mlp), layer.self_attn.window), layer)  # type: ignore[union-attr]
        self.layers = nn.ModuleList([*kinds.values(), layers[-1]])
        try:
            yield
        finally:
            self.layers = layers

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        return self.lm_head.logits(hidden_SD)

    # Loading

    def begin_loading(self, names: Iterable[str] | None = None) -> None:
        """Before tensors come, the second time too. `names`: those that will; None: all of a checkpoint."""
        self._expected = set(self.checkpoint_shapes() if names is None else names)

    def load_weight(self, name: str, tensor: Loaded) -> None:
        """Takes one whole checkpoint tensor. Raises CheckpointError for an unknown name or a wrong shape."""
        if name not in self._expected:
            raise CheckpointError(
                f"the checkpoint holds {name}, which this {self.config.architecture} model does not have"
            )
        self._expected.remove(name)
        path, _, parameter = name.removeprefix("model.").rpartition(".")
        if expert := EXPERT.match(name):
            experts = self.get_submodule(expert[1].removeprefix("model."))
            assert isinstance(experts, Experts)
            experts.load_expert(expert[3], int(expert[2]), tensor, name)
            return
        parent, _, last = path.rpartition(".")
        merged, part = MERGED.get(last, (last, 0))
        module: Any = self.get_submodule(f"{parent}.{merged}" if parent else merged)
        module.load(parameter, tensor, part, name)

    def finish_loading(self) -> None:
        """Packs what stays quantized. Raises CheckpointError if a tensor never came."""
        if self._expected:
            missing = sorted(self._expected)
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} tensors, the first is {missing[0]}; is a shard missing?"
            )
        for module in self.modules():
            if isinstance(module, (Linear, Vocabulary)):
                module.finish()
        if self.keep_quantized:
            from shoal.models.fused import fuse_layers

            self.fused = fuse_layers(self.layers, self.config, self.backend)

    @torch.no_grad()
    def load_dummy_weights(self, seed: int = 0) -> None:
        """Small random weights, for benchmarks: the arithmetic of a real model, made on the device."""
        device = self.norm.weight.device
        generator = torch.Generator(device=device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.uniform_(-0.02, 0.02, generator=generator)

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint of this model holds, whole."""
        return dict(checkpoint_shapes(self.config))


def rope_table(config: ModelConfig, max_position: int) -> torch.Tensor:
    """[max_position, head_dim] float32: cosines, then sines, of each position's angles; yarn's attention
    factor multiplied in."""
    inverse, factor = rope_frequencies(config.rope, config.head_dim)
    angles = torch.outer(
        torch.arange(max_position, dtype=torch.float32), torch.as_tensor(inverse, dtype=torch.float32)
    )
    return torch.cat((angles.cos(), angles.sin()), dim=1) * factor
