"""The decoder that all architectures share: embedding, layers, final norm and output head. What differs
between them is in ModelConfig and in the layer class that an architecture's file names. loading.py loads its
weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from shoal.attention.backend import Backends
from shoal.attention.step_input import StepInput
from shoal.kernels.layer_cache import LayerMemory
from shoal.kernels.ops import Ops
from shoal.kinds.latent import LatentKind
from shoal.layers.embedding import Vocabulary
from shoal.layers.keeping import keep_matrices
from shoal.layers.layer_step import LayerStep
from shoal.layers.matrix import Holding
from shoal.layers.norm_kinds import build_norm
from shoal.layers.parallel import TensorParallel
from shoal.layers.per_layer import PerLayerEmbeddings
from shoal.model_config import AttentionKind, LayerKind, ModelConfig
from shoal.models.decoder_layers.decoder_layer import DecoderLayer
from shoal.models.decoder_layers.ranks_layer import RanksLayer
from shoal.models.registry import BY_NAME
from shoal.models.rope import rope_frequencies

AfterLayer = Callable[[int], None]  # takes the index of a layer


def rehearsed_layers(kinds: Sequence[Hashable]) -> list[int]:
    """Returns the first layer of each kind and the last layer. Layer 0 has no sum before its norm, and the
    last one ends with selected tokens, so both launch kernels of their own."""
    first: dict[Hashable, int] = {}
    for i, kind in enumerate(kinds[:-1]):
        first.setdefault(kind, i)
    return [*first.values(), len(kinds) - 1]


class Decoder(nn.Module):
    """Takes the token ids of a step and returns final hidden states; `logits` maps those to the vocabulary.

    It is built under the device and the default dtype of the engine, and runs after `allocate_ropes`. With
    `keep_quantized` weights that arrive quantized stay so, and matrices get memory, inside of `holding`, when
    they arrive. With `quantizes` too, plain ones become fp8. models/parallel.py says if it can be divided
    over the ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        ops: Ops,
        backends: Backends,
        keep_quantized: bool = False,
        quantizes: bool = False,
        holding: Holding = nullcontext,
    ) -> None:
        super().__init__()
        self.config, self.backends, self.keep_quantized = config, tuple(backends.values()), keep_quantized
        self.ops, self.embedding_multiplier = ops, rounded(config.embedding_multiplier)
        # all layers as one call; None where that is not possible
        self.fused: Callable[..., torch.Tensor | None] | None = None
        device = torch.get_default_device()
        with torch.device("meta") if keep_quantized else nullcontext():
            self.embed_tokens = Vocabulary(config.vocab_size, config.hidden_size, tp, ops)
            self.layers = nn.ModuleList(
                build_layer(config, kind, tp, ops, backends) for kind in config.layers
            )
            size = config.per_layer_size
            self.layer_embeddings = PerLayerEmbeddings(config, tp, ops) if size and config.layers else None
            self.running = [*enumerate(self.layers)]  # the layers that a step runs
            self.norm = build_norm(config, config.hidden_size, ops, tp)
            self.lm_head = self.embed_tokens
            if not config.tie_word_embeddings:
                self.lm_head = Vocabulary(config.vocab_size, config.hidden_size, tp, ops)
        if keep_quantized:
            keep_matrices(self, device, quantizes, holding)
        self.ropes: tuple[torch.Tensor | None, ...] = ()

    def allocate_ropes(self, max_position: int) -> None:
        """Makes each layer's table of rotary angles for this many positions. Layers of the same rope share a
        table. No checkpoint brings tables back, so they must not sleep with the weights."""
        attentions = [kind.attention for kind in self.config.layers]
        tables = {
            (a.rope, a.rotary_dim): rope_table(a, max_position)
            for a in dict.fromkeys(attentions)
            if a is not None
        }
        self.ropes = tuple(None if a is None else tables[a.rope, a.rotary_dim] for a in attentions)

    def forward(
        self,
        step: StepInput,
        caches: Sequence[LayerMemory],
        select_S: torch.Tensor | None = None,
        after_layer: AfterLayer | None = None,
    ) -> torch.Tensor:
        """Final hidden states [T, D], or [S, D] of the token indices in `select_S` (int64). Layer i gets
        caches[i]. `after_layer` is called when a layer has been launched, or on the CPU, when it has run."""
        for backend in self.backends:
            backend.begin(step)
        x, residual = None, self.embed_tokens.embed(step.token_ids_T)
        if self.config.embedding_norm:
            residual = F.rms_norm(residual, residual.shape[1:], eps=self.config.rms_norm_eps)
        if self.embedding_multiplier != 1.0:
            residual.mul_(self.embedding_multiplier)
        if self.fused is not None and after_layer is None:
            x = self.fused(residual, step, caches, self.ropes)
            if select_S is not None:
                x, residual = None if x is None else x[select_S], residual[select_S]
        else:
            last, own = len(self.layers) - 1, None
            if self.layer_embeddings is not None:
                own = self.layer_embeddings(step.token_ids_T, residual)
            for i, layer in self.running:
                layer_step = LayerStep(step, caches[i], self.ropes[i], select_S if i == last else None)
                more = () if own is None else (own[i],)
                x, residual = layer(x, residual, layer_step, *more)
                if after_layer is not None:
                    after_layer(i)
        return self.norm.add(x, residual)

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """For a rehearsal: while this is open, a step runs one layer of each kind, which launches all of its
        kernels in a fraction of the time. Its results mean nothing."""
        running = self.running
        self.running = [(i, self.layers[i]) for i in rehearsed_layers(self.config.layers)]
        try:
            yield
        finally:
            self.running = running

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """[S, D] final hidden states to the logits of this rank's tokens (`lm_head.whole` joins them)."""
        if self.config.logits_scaling != 1.0:
            hidden_SD = hidden_SD / self.config.logits_scaling
        logits_SV = self.lm_head.logits(hidden_SD)
        if self.config.logits_softcap is not None:
            self.ops.soft_cap(logits_SV, self.config.logits_softcap)
        return logits_SV


def rounded(value: float) -> float:
    """Returns the value in the default dtype, the engine's."""
    return torch.tensor(value, dtype=torch.get_default_dtype(), device="cpu").item()


def rope_table(attention: AttentionKind | LatentKind, max_position: int) -> torch.Tensor | None:
    """[max_position, rotary_dim] float32: cosines, then sines, of each position's angles, multiplied by
    the rope's attention factor. None: the layer has no rope. Kernels of latents rotate always, by angles of 0
    where there is no rope."""
    if attention.rope is None:
        if isinstance(attention, AttentionKind):
            return None
        return torch.eye(2).repeat_interleave(attention.rotary_dim // 2, 1)[:1].repeat(max_position, 1)
    inverse, factor = rope_frequencies(attention.rope, attention.rotary_dim, max_position)
    angles = torch.outer(
        torch.arange(max_position, dtype=torch.float32), torch.as_tensor(inverse, dtype=torch.float32)
    )
    return torch.cat((angles.cos(), angles.sin()), dim=1) * factor


def build_layer(
    config: ModelConfig, kind: LayerKind, tp: TensorParallel, ops: Ops, backends: Backends
) -> nn.Module:
    """A layer of this kind, of the class that its architecture names. Such a class has the constructor and
    the forward of DecoderLayer, and its Attention and MLP or MoE as `self_attn` and `mlp`."""
    own_class = BY_NAME[config.architecture].layer_class
    plain = DecoderLayer if tp.large_sums is None else RanksLayer
    layer_class = plain if own_class is None else own_class()
    return layer_class(config, kind, tp, ops, backends)
