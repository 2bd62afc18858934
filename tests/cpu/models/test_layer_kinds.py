"""A model whose layers differ in heads, rope, window and experts: what is made once per kind, and what each layer
gets."""

from dataclasses import replace

import pytest
import torch

from shoal.attention.cpu import TorchBackend
from shoal.attention.step_input import StepInput
from shoal.errors import ConfigError
from shoal.kernels.cpu import ops
from shoal.kernels.layer_cache import LayerCache
from shoal.kinds.experts import ExpertsKind, Router
from shoal.kinds.rope import RopeConfig
from shoal.layers.attention import attention_shape
from shoal.layers.layer_step import LayerStep
from shoal.layers.parallel import TensorParallel
from shoal.model_config import AttentionKind, LayerKind, ModelConfig
from shoal.models.decoder import Decoder, rehearsed_layers
from shoal.models.fused import fuse_layers
from shoal.models.loading import checkpoint_tensors, load_dummy_weights
from shoal.models.parallel import check_parallel
from shoal.models.shapes import checkpoint_shapes, num_weights

FULL = AttentionKind(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, rope=RopeConfig())
SLIDING = replace(FULL, num_heads=2, rope=RopeConfig(theta=500.0), window=5)
EXPERTS = ExpertsKind(num_experts=4, intermediate_size=12, router=Router(2, renormalize=True))
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    layers=(LayerKind(FULL), LayerKind(SLIDING, EXPERTS), LayerKind(FULL), LayerKind(FULL)),
)


def build(config: ModelConfig, tp: TensorParallel | None = None) -> Decoder:
    tp = tp or TensorParallel.single()
    shapes = [attention_shape(kind.mixer, tp.size) for kind in config.layers]
    model = Decoder(config, tp, ops, {shape: TorchBackend(shape) for shape in shapes})
    load_dummy_weights(model)
    model.allocate_ropes(64)
    return model


def prompt(num_tokens: int) -> StepInput:
    tables = (torch.arange(8, dtype=torch.int32).view(1, 8),)
    step = StepInput.rehearsal(1, num_tokens, cached_len=0, block_tables=tables)
    tokens = torch.arange(num_tokens, dtype=torch.int32) % 40
    return replace(step, token_ids_T=tokens, rows_T=torch.zeros(num_tokens, dtype=torch.int32))


def caches_of(config: ModelConfig) -> list[LayerCache]:
    kv = torch.zeros(8, len(config.layers), 2, 2, 4, 8)
    return [LayerCache(kv[:, i], window=kind.mixer.window) for i, kind in enumerate(config.layers)]


def test_layers_of_one_head_shape_share_a_backend_and_layers_of_one_rope_a_table():
    model = build(CONFIG)
    first, sliding, *others = (layer.self_attn.backend for layer in model.layers)
    assert len(model.backends) == 2 and all(backend is first for backend in others) and sliding is not first
    assert model.ropes[0] is model.ropes[2] is model.ropes[3]
    assert not torch.equal(model.ropes[0], model.ropes[1])


@torch.inference_mode()
def test_each_layer_computes_with_its_own_heads_rope_and_window():
    """Oracle: one decoder per layer, which has that layer alone."""
    model, step = build(CONFIG), prompt(20)
    found = model(step, caches_of(CONFIG))
    residual = model.embed_tokens.embed(step.token_ids_T)
    for layer, kind in zip(model.layers, CONFIG.layers, strict=True):
        config = replace(CONFIG, layers=(kind,))
        alone = build(config)
        alone.layers[0].load_state_dict(layer.state_dict())
        [backend], [cache] = alone.backends, caches_of(config)
        backend.begin(step)
        x, residual = alone.layers[0](None, residual, LayerStep(step, cache, alone.ropes[0]))
        residual = residual if x is None else residual + x
    torch.testing.assert_close(found, model.norm(residual), rtol=1e-5, atol=1e-5)


def test_shapes_are_those_of_each_layers_kind():
    shapes = dict(checkpoint_shapes(CONFIG))
    assert shapes == {tensor.name: tensor.shape for tensor in checkpoint_tensors(build(CONFIG), CONFIG)}
    assert [shapes[f"model.layers.{i}.self_attn.q_proj.weight"][0] for i in range(4)] == [32, 16, 32, 32]
    assert shapes["model.layers.1.mlp.experts.3.down_proj.weight"] == (16, 12)
    matrices = [rows * columns for rows, *rest in shapes.values() for columns in rest]
    assert num_weights(CONFIG) == sum(matrices)


def test_a_number_of_ranks_has_to_divide_the_heads_of_every_kind():
    check_parallel(CONFIG, 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size 4 does not divide num_attention_heads 2"):
        check_parallel(CONFIG, 4)


def test_a_rehearsal_runs_each_kind_and_the_last_layer():
    assert rehearsed_layers(CONFIG.layers) == [0, 1, 3]


def test_layers_that_differ_in_more_than_windows_are_not_one_c_call():
    assert fuse_layers(build(CONFIG).layers, CONFIG) is None
