"""`Eagle3Head`: EAGLE-3 (Li et al. 2025). It reads hidden states of three of the target's layers, and drafts
tokens of a smaller vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from shoal.attention.backend import Backends
from shoal.attention.step_input import StepInput
from shoal.errors import CheckpointError
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.ops import Ops
from shoal.kernels.quant.quantized_tensor import QuantizedTensor
from shoal.layers.attention import Attention
from shoal.layers.embedding import Vocabulary
from shoal.layers.layer_step import CacheStep, LayerStep, Stream
from shoal.layers.linear import Linear
from shoal.layers.loading import CheckpointTensor, Loaded, LoadingLayer, check_shape
from shoal.layers.mlp import MLP
from shoal.layers.norm_kinds import build_norm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import AttentionKind, LayerKind, ModelConfig
from shoal.models.decoder_layers.decoder_layer import DecoderLayer
from shoal.models.heads.eagle3_config import NUM_STATES, Eagle3Config
from shoal.models.heads.head import DraftHead


class FirstLayer(nn.Module):
    """A layer whose attention reads embedding and hidden state side by side."""

    def __init__(
        self, head: Eagle3Config, kind: LayerKind, tp: TensorParallel, ops: Ops, backends: Backends
    ) -> None:
        super().__init__()
        config, size, mixer = head.decoder, head.decoder.hidden_size, kind.mixer
        assert isinstance(mixer, AttentionKind)
        self.norm_before_residual = head.norm_before_residual
        self.self_attn = Attention(config, mixer, tp, ops, backends, in_features=2 * size)
        self.mlp = MLP(config, tp, ops)
        self.input_layernorm = build_norm(config, size, ops)
        self.hidden_norm = build_norm(config, size, ops)
        self.post_attention_layernorm = build_norm(config, size, ops, tp)

    def forward(self, embedded_TD: torch.Tensor, hidden_TD: torch.Tensor, step: CacheStep) -> Stream:
        """Returns what a DecoderLayer does."""
        normed_TD = self.hidden_norm(hidden_TD)
        pair = torch.cat((self.input_layernorm(embedded_TD), normed_TD), dim=1)
        residual = normed_TD if self.norm_before_residual else hidden_TD
        attention = self.self_attn
        whole, select_S = step._replace(select_S=None), step.select_S
        out, residual = attention.attend(attention.qkv_proj(pair), residual, whole)
        assert out is not None
        if select_S is not None:
            out, residual = out[select_S], residual[select_S]
        if len(residual) == 0:  # a chunk that ends no prompt
            return None, residual
        x = attention.o_proj.add_to(out, residual)
        return self.mlp(x, residual, self.post_attention_layernorm)


class DraftIds(LoadingLayer):
    """The tokens of the draft vocabulary, as ids of the target's. Checkpoints have them as differences from
    the tokens' own numbers."""

    def __init__(self, size: int, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.weight = nn.Parameter(torch.arange(size), requires_grad=False)

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(path, tuple(self.weight.shape), self._load)

    def _load(self, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), tuple(self.weight.shape))
        if isinstance(tensor, QuantizedTensor) or tensor.is_floating_point():
            raise CheckpointError(f"{name} holds floating-point numbers, but should hold differences of ids")
        ids = tensor.long().cpu() + torch.arange(len(tensor), device="cpu")
        if ids.min() < 0 or ids.max() >= self.vocab_size or len(ids.unique()) < len(ids):
            raise CheckpointError(
                f"{name} must map each draft token to a token of its own below {self.vocab_size}; is it "
                "another model's file?"
            )
        self.weight.data.copy_(ids)


class Eagle3Head(DraftHead):
    """A head in plain numbers."""

    def __init__(
        self,
        config: Eagle3Config,
        target: ModelConfig,
        tp: TensorParallel,
        ops: Ops,
        backends: Backends,
        embed_tokens: Vocabulary | None,
        has_ids: bool,
    ) -> None:
        """`embed_tokens`: the target's, if the head has none of its own. `has_ids`: its files say which
        tokens it drafts; otherwise they are the first ones of the vocabulary."""
        decoder = config.decoder
        super().__init__(decoder.layers, config.layers_read(target.num_layers))
        self.config = config
        size, num_drafted = decoder.hidden_size, config.draft_vocab_size
        first, *others = decoder.layers
        self.layers = nn.ModuleList(
            [
                FirstLayer(config, first, tp, ops, backends),
                *(DecoderLayer(decoder, kind, tp, ops, backends) for kind in others),
            ]
        )
        num_read = NUM_STATES * config.target_size
        self.input_norm = build_norm(decoder, num_read, ops) if config.norm_before_fc else None
        self.fc = Linear(num_read, {"fc": size}, tp, ops, split=None)
        self.norm = build_norm(decoder, size, ops, tp)
        self.lm_head = Vocabulary(num_drafted, size, tp, ops)
        self.d2t = DraftIds(num_drafted, decoder.vocab_size) if has_ids else None
        self.embed_tokens = Vocabulary(decoder.vocab_size, size, tp, ops) if embed_tokens is None else None
        self._embeds = [
            self.embed_tokens or embed_tokens
        ]  # in a list, so that it counts as no module of its own

    def fuse(self, states_TX: torch.Tensor) -> torch.Tensor:
        return self.fc(states_TX if self.input_norm is None else self.input_norm(states_TX))

    def forward(
        self,
        token_ids_T: torch.Tensor,
        hidden_TD: torch.Tensor,
        step: StepInput,
        caches: Sequence[LayerCache],
        select_S: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        [embeds] = self._embeds
        assert embeds is not None
        first, *others = self.layers
        selects_first = None if others else select_S
        layer_step = LayerStep(step, caches[0], self.ropes[0], selects_first)
        x, residual = first(embeds.embed(token_ids_T), hidden_TD, layer_step)
        for i, layer in enumerate(others, 1):
            x, residual = layer(x, residual, LayerStep(step, caches[i], self.ropes[i]))
        if others and select_S is not None:
            x, residual = None if x is None else x[select_S], residual[select_S]
        normed = self.norm.add(x, residual)
        return normed, normed if self.config.norm_output else residual

    def logits(self, normed_SD: torch.Tensor) -> torch.Tensor:
        drafted = self.lm_head.whole(self.lm_head.logits(normed_SD))
        vocab_size = self.config.decoder.vocab_size
        if self.d2t is None and drafted.shape[1] == vocab_size:
            return drafted
        logits_SV = drafted.new_full((len(drafted), vocab_size), float("-inf"))
        if self.d2t is None:
            logits_SV[:, : drafted.shape[1]] = drafted
        else:
            logits_SV.index_copy_(1, self.d2t.weight, drafted)
        return logits_SV
