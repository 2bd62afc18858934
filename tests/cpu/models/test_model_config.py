"""ModelConfig and rope frequencies against transformers' config classes and rotary embedding, from dicts as
published models have them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shoal.errors import CheckpointError
from shoal.kinds.experts import ExpertsKind, Router
from shoal.kinds.rope import RopeConfig
from shoal.model_config import ModelConfig
from shoal.models.config_gguf import config_from_gguf
from shoal.models.config_json import config_from_json
from shoal.models.registry import ARCHITECTURES
from shoal.models.rope import rope_frequencies
from tests import tiny

SIZES = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    bos_token_id=256,
    eos_token_id=[257, 258],
)
NEW_FORMS = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama-head-dim": ("Llama", dict(head_dim=24)),
    "llama-one-kv-head": ("Llama", dict(num_key_value_heads=1)),
    "llama3-rope": (
        "Llama",
        dict(
            rope_parameters=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                rope_theta=500000.0,
                original_max_position_embeddings=64,
            )
        ),
    ),
    "linear-rope": ("Llama", dict(rope_parameters=dict(rope_type="linear", factor=2.5, rope_theta=10000.0))),
    "qwen2": ("Qwen2", {}),
    "qwen2-yarn": (
        "Qwen2",
        dict(
            rope_parameters=dict(
                rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=1e4
            )
        ),
    ),
    "qwen2-windows": ("Qwen2", dict(use_sliding_window=True, sliding_window=100, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=32)),
    "qwen3-layer-types": (
        "Qwen3",
        dict(
            use_sliding_window=True,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "mistral-window": ("Mistral", dict(sliding_window=24)),
    "qwen3-moe": (
        "Qwen3Moe",
        dict(
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True, head_dim=16
        ),
    ),
    "qwen3-moe-sparse": (
        "Qwen3Moe",
        dict(
            num_experts=8,
            decoder_sparse_step=2,
            mlp_only_layers=[1],
            use_sliding_window=True,
            sliding_window=7,
        ),
    ),
}
# config.json of published models, in the form of transformers 4.
PUBLISHED = {
    "Llama-3.2-1B": dict(
        architectures=["LlamaForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        head_dim=64,
        hidden_act="silu",
        hidden_size=2048,
        initializer_range=0.02,
        intermediate_size=8192,
        max_position_embeddings=131072,
        mlp_bias=False,
        model_type="llama",
        num_attention_heads=32,
        num_hidden_layers=16,
        num_key_value_heads=8,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        use_cache=True,
        vocab_size=128256,
        rope_scaling=dict(
            factor=32.0,
            high_freq_factor=4.0,
            low_freq_factor=1.0,
            original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
    ),
    "Llama-2-7b": dict(
        architectures=["LlamaForCausalLM"],
        bos_token_id=1,
        eos_token_id=2,
        hidden_act="silu",
        hidden_size=4096,
        intermediate_size=11008,
        max_position_embeddings=4096,
        model_type="llama",
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=32,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        tie_word_embeddings=False,
        torch_dtype="float16",
        vocab_size=32000,
    ),
    "SmolLM2-135M": dict(
        architectures=["LlamaForCausalLM"],
        attention_bias=False,
        bos_token_id=1,
        eos_token_id=2,
        hidden_act="silu",
        hidden_size=576,
        intermediate_size=1536,
        max_position_embeddings=8192,
        mlp_bias=False,
        model_type="llama",
        num_attention_heads=9,
        num_hidden_layers=30,
        num_key_value_heads=3,
        rms_norm_eps=1e-05,
        rope_interleaved=False,
        rope_scaling=None,
        rope_theta=100000,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        vocab_size=49152,
    ),
    "linear, type spelled the old way": dict(
        architectures=["LlamaForCausalLM"],
        hidden_size=512,
        intermediate_size=1024,
        model_type="llama",
        num_attention_heads=8,
        num_hidden_layers=2,
        vocab_size=1000,
        rope_scaling=dict(type="linear", factor=8.0),
    ),
    "Qwen2.5-7B-Instruct": dict(
        architectures=["Qwen2ForCausalLM"],
        attention_dropout=0.0,
        bos_token_id=151643,
        eos_token_id=151645,
        hidden_act="silu",
        hidden_size=3584,
        intermediate_size=18944,
        max_position_embeddings=32768,
        max_window_layers=28,
        model_type="qwen2",
        num_attention_heads=28,
        num_hidden_layers=28,
        num_key_value_heads=4,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        sliding_window=131072,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        use_sliding_window=False,
        vocab_size=152064,
    ),
    "Qwen2.5 with the yarn of its model card": dict(
        architectures=["Qwen2ForCausalLM"],
        hidden_act="silu",
        hidden_size=3584,
        intermediate_size=18944,
        max_position_embeddings=32768,
        model_type="qwen2",
        num_attention_heads=28,
        num_hidden_layers=28,
        num_key_value_heads=4,
        rope_theta=1000000.0,
        vocab_size=152064,
        rope_scaling=dict(factor=4.0, original_max_position_embeddings=32768, type="yarn"),
    ),
    "Qwen3-0.6B": dict(
        architectures=["Qwen3ForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=151643,
        eos_token_id=151645,
        head_dim=128,
        hidden_act="silu",
        hidden_size=1024,
        intermediate_size=3072,
        max_position_embeddings=40960,
        max_window_layers=28,
        model_type="qwen3",
        num_attention_heads=16,
        num_hidden_layers=28,
        num_key_value_heads=8,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "Mistral-7B-v0.1": dict(
        architectures=["MistralForCausalLM"],
        bos_token_id=1,
        eos_token_id=2,
        hidden_act="silu",
        hidden_size=4096,
        intermediate_size=14336,
        max_position_embeddings=32768,
        model_type="mistral",
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-05,
        rope_theta=10000.0,
        sliding_window=4096,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        vocab_size=32000,
    ),
    "Mistral-7B-v0.3": dict(
        architectures=["MistralForCausalLM"],
        bos_token_id=1,
        eos_token_id=2,
        hidden_act="silu",
        hidden_size=4096,
        intermediate_size=14336,
        max_position_embeddings=32768,
        model_type="mistral",
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        sliding_window=None,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        vocab_size=32768,
    ),
    "Qwen3-30B-A3B": dict(
        architectures=["Qwen3MoeForCausalLM"],
        attention_bias=False,
        bos_token_id=151643,
        decoder_sparse_step=1,
        eos_token_id=151645,
        head_dim=128,
        hidden_act="silu",
        hidden_size=2048,
        intermediate_size=6144,
        max_position_embeddings=40960,
        max_window_layers=48,
        mlp_only_layers=[],
        model_type="qwen3_moe",
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_key_value_heads=4,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=1000000.0,
        sliding_window=None,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "OLMo-2-1124-7B": dict(
        architectures=["Olmo2ForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        eos_token_id=100257,
        hidden_act="silu",
        hidden_size=4096,
        intermediate_size=11008,
        max_position_embeddings=4096,
        model_type="olmo2",
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=32,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=500000,
        tie_word_embeddings=False,
        torch_dtype="float32",
        vocab_size=100352,
    ),
    "granite-3.1-8b-instruct": dict(
        architectures=["GraniteForCausalLM"],
        attention_bias=False,
        attention_dropout=0.1,
        attention_multiplier=0.0078125,
        bos_token_id=0,
        embedding_multiplier=12.0,
        eos_token_id=0,
        hidden_act="silu",
        hidden_size=4096,
        intermediate_size=12800,
        logits_scaling=16.0,
        max_position_embeddings=131072,
        mlp_bias=False,
        model_type="granite",
        num_attention_heads=32,
        num_hidden_layers=40,
        num_key_value_heads=8,
        residual_multiplier=0.22,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=10000000.0,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        vocab_size=49155,
    ),
}
# Other architectures' configs are tried by test_families.py.
CLASSES = {
    a.name: a.hf_class.removesuffix("ForCausalLM")
    for a in ARCHITECTURES
    if a.hf_class.removesuffix("ForCausalLM")
    in {kind.removesuffix("Config") for kind, _ in tiny.MODELS.values()}
}


def assert_equal(config: ModelConfig, oracle: transformers.PreTrainedConfig) -> None:
    head_dim = getattr(oracle, "head_dim", None) or oracle.hidden_size // oracle.num_attention_heads
    attention_bias = getattr(oracle, "attention_bias", False)
    window = getattr(oracle, "sliding_window", None)
    kinds = getattr(oracle, "layer_types", None) or ["sliding_attention"] * oracle.num_hidden_layers
    eos = oracle.eos_token_id
    assert config.architecture == oracle.model_type
    for ours, theirs in (
        ("vocab_size",) * 2,
        ("hidden_size",) * 2,
        ("intermediate_size",) * 2,
        ("num_layers", "num_hidden_layers"),
        ("max_position_embeddings",) * 2,
        ("rms_norm_eps",) * 2,
        ("tie_word_embeddings",) * 2,
    ):
        assert getattr(config, ours) == getattr(oracle, theirs), ours
    attention, *others = {kind.with_attention(window=None).mixer for kind in config.layers}
    assert not others and attention.head_dim == head_dim
    assert attention.num_heads == oracle.num_attention_heads
    assert attention.num_kv_heads == oracle.num_key_value_heads
    windows = [kind.mixer.window for kind in config.layers]
    assert windows == [window if kind == "sliding_attention" else None for kind in kinds]
    assert config.qkv_bias == (attention_bias or oracle.model_type == "qwen2")
    assert config.o_bias == attention_bias and config.mlp_bias == getattr(oracle, "mlp_bias", False)
    assert config.qk_norm == (oracle.model_type in ("qwen3", "qwen3_moe"))
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        assert getattr(config, name) == getattr(oracle, name, 1.0), name
    assert attention.scale == getattr(oracle, "attention_multiplier", head_dim**-0.5)
    assert config.eos_token_ids == (tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,))
    assert config.dtype == (str(oracle.dtype).removeprefix("torch.") if oracle.dtype is not None else None)
    if oracle.model_type == "qwen3_moe":
        experts = ExpertsKind(
            oracle.num_experts,
            oracle.moe_intermediate_size,
            Router(oracle.num_experts_per_tok, oracle.norm_topk_prob),
        )
        sparse = [
            i not in oracle.mlp_only_layers and (i + 1) % oracle.decoder_sparse_step == 0
            for i in range(oracle.num_hidden_layers)
        ]
        assert [kind.experts for kind in config.layers] == [experts if has else None for has in sparse]
    else:
        assert config.experts is None
    assert_same_rope(config, oracle)


def assert_same_rope(config: ModelConfig, oracle: transformers.PreTrainedConfig) -> None:
    rotary = LlamaRotaryEmbedding(oracle)
    inverse, factor = rope_frequencies(
        config.attention.rope, config.attention.rotary_dim, config.max_position_embeddings
    )
    assert inverse.dtype == np.float32
    # a few roundings: numpy's power is not torch's
    np.testing.assert_allclose(inverse, rotary.inv_freq.numpy(), rtol=4e-7)
    assert factor == pytest.approx(rotary.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", NEW_FORMS)
def test_a_config_saved_by_transformers_reads_as_its_class_has_it(name, tmp_path):
    kind, changes = NEW_FORMS[name]
    oracle = getattr(transformers, f"{kind}Config")(
        **SIZES | changes, architectures=[f"{kind}ForCausalLM"], dtype="bfloat16"
    )
    oracle.save_pretrained(tmp_path)
    assert_equal(config_from_json(json.loads((tmp_path / "config.json").read_text()), name), oracle)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_a_tiny_models_config_reads_as_its_class_has_it(name, root):
    folder = tiny.write_model(root, name)
    config = json.loads((folder / "config.json").read_text())
    assert_equal(config_from_json(config, name), transformers.AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_reads_as_transformers_reads_it(name):
    config = PUBLISHED[name]
    oracle = getattr(transformers, f"{CLASSES[config['model_type']]}Config").from_dict(
        json.loads(json.dumps(config))
    )
    assert_equal(config_from_json(config, name), oracle)


@pytest.mark.parametrize("architecture", CLASSES)
def test_missing_fields_get_the_defaults_of_transformers(architecture):
    oracle_class = getattr(transformers, f"{CLASSES[architecture]}Config")
    config = dict(
        architectures=[f"{CLASSES[architecture]}ForCausalLM"],
        vocab_size=100,
        hidden_size=2048,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=32,
    )
    assert_equal(config_from_json(config, "config.json"), oracle_class(**config))


ROPES = {
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=256, rope_theta=1e6),
    "yarn, attention factor given": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=256, attention_factor=0.7
    ),
    "yarn, mscale": dict(
        rope_type="yarn", factor=40.0, original_max_position_embeddings=256, mscale=1.0, mscale_all_dim=0.8
    ),
    "yarn, betas": dict(
        rope_type="yarn",
        factor=8.0,
        original_max_position_embeddings=128,
        beta_fast=16,
        beta_slow=2,
        truncate=False,
    ),
    "llama3": dict(
        rope_type="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=512,
        rope_theta=500000.0,
    ),
    "linear": dict(rope_type="linear", factor=3.0, rope_theta=150000.0),
    "dynamic": dict(rope_type="dynamic", factor=3.0, rope_theta=150000.0),
}


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies_equal_those_of_transformers(name, head_dim):
    sizes = SIZES | dict(head_dim=head_dim, max_position_embeddings=8192, rope_parameters=ROPES[name])
    oracle = transformers.LlamaConfig(**json.loads(json.dumps(sizes)))
    assert_same_rope(config_from_json(sizes | dict(architectures=["LlamaForCausalLM"]), name), oracle)


def test_rope_factors_divide_the_frequencies():
    plain, _ = rope_frequencies(RopeConfig(500000.0), 8, 512)
    scaled, factor = rope_frequencies(RopeConfig(500000.0, "factors", factors=(1.0, 2.0, 4.0, 8.0)), 8, 512)
    assert np.array_equal(scaled, plain / np.array([1, 2, 4, 8], dtype=np.float32)) and factor == 1.0


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(architectures=["Nope"]), ("Nope", "LlamaForCausalLM")),
        (dict(architectures=None, model_type="gpt2"), ("gpt2", "Qwen3ForCausalLM")),
        (dict(hidden_act="gelu"), ("gelu", "silu")),
        (dict(rope_scaling=dict(rope_type="ntk", factor=2.0)), ("ntk", "yarn")),
        (dict(rope_scaling=dict(rope_type="dynamic")), ("dynamic", "factor")),
        (dict(rope_scaling=dict(rope_type="longrope", factor=2.0)), ("longrope", "short_factor")),
        (dict(rope_scaling=dict(type="llama3", factor=2.0)), ("low_freq_factor is missing; add it",)),
        (
            dict(rope_scaling=dict(type="yarn")),
            ("yarn must have a factor, or an original_max_position_embeddings", "add one of them"),
        ),
        (
            dict(
                architectures=["Ministral3ForCausalLM"],
                rope_parameters=dict(rope_type="default", rope_theta=1e6, llama_4_scaling_beta=0.1),
            ),
            ("original_max_position_embeddings is missing; add it",),
        ),
        (dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), ("per layer type",)),
        (dict(partial_rotary_factor=0.5), ("partial_rotary_factor",)),
        (dict(quantization_config=dict(quant_method="bitnet")), ("bitnet", "gptq")),
        (dict(hidden_size=None), ("hidden_size", "missing")),
        (dict(num_attention_heads=0), ("num_attention_heads", "0")),
        (dict(num_hidden_layers=-3), ("num_hidden_layers", "-3")),
        (dict(vocab_size="many"), ("vocab_size", "many")),
        (dict(num_key_value_heads=3), ("num_key_value_heads 3",)),
        (dict(hidden_size=66), ("66", "num_attention_heads 4")),
        (dict(head_dim=7), ("head_dim 7",)),
        (dict(rms_norm_eps=-1.0), ("rms_norm_eps",)),
        (dict(tie_word_embeddings="yes"), ("tie_word_embeddings",)),
    ],
)
def test_an_impossible_config_is_refused_with_the_place_and_the_value(changes, words):
    config = {**SIZES, "architectures": ["LlamaForCausalLM"], **changes}
    with pytest.raises(CheckpointError) as error:
        config_from_json(config, "folder/config.json")
    assert all(word in str(error.value) for word in (*words, "folder/config.json")), error.value


def test_layer_types_must_fit_the_layers():
    config = {
        **SIZES,
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "other", "x"],
    }
    with pytest.raises(CheckpointError, match="other"):
        config_from_json(config, "config.json")


LLAMA_METADATA = {
    "general.architecture": "llama",
    "llama.context_length": 8192,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 128,
    "llama.rope.dimension_count": 16,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 7,
}
SHAPES = {"token_embd.weight": (320, 64), "output.weight": (320, 64)}


def test_gguf_metadata_reads_like_the_config_it_was_made_from():
    config = config_from_gguf(LLAMA_METADATA, SHAPES, "m.gguf")
    same = dict(
        architectures=["LlamaForCausalLM"],
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        bos_token_id=1,
        eos_token_id=[2, 7],
    )
    assert config == config_from_json(same, "config.json")


def test_gguf_tensors_tell_tied_embeddings_and_biases():
    config = config_from_gguf(
        LLAMA_METADATA, {"token_embd.weight": (320, 64), "blk.0.attn_q.bias": (64,)}, "m.gguf"
    )
    assert config.tie_word_embeddings and config.qkv_bias and not config.o_bias


def test_gguf_rope_factors_are_llama3_scaling():
    """llama.cpp's converter stores 1 / (scaled frequency / plain frequency); the result must be what
    transformers computes."""
    rope = ROPES["llama3"]
    oracle = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            **SIZES | dict(head_dim=16, max_position_embeddings=8192, rope_parameters=rope)
        )
    )
    plain = 500000.0 ** (-np.arange(0, 16, 2) / 16)
    factors = tuple((plain / oracle.inv_freq.numpy().astype(np.float64)).tolist())
    config = config_from_gguf(LLAMA_METADATA, SHAPES, "m.gguf", factors)
    np.testing.assert_allclose(
        rope_frequencies(config.attention.rope, 16, 512)[0], oracle.inv_freq.numpy(), rtol=4e-7
    )


def test_gguf_yarn_and_linear_scaling_equal_those_of_transformers():
    for rope in (
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048, rope_theta=500000.0),
        dict(rope_type="linear", factor=4.0, rope_theta=500000.0),
    ):
        scaling = {
            "llama.rope.scaling.type": rope["rope_type"],
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 2048,
        }
        config = config_from_gguf(LLAMA_METADATA | scaling, SHAPES, "m.gguf")
        assert_same_rope(
            config,
            transformers.LlamaConfig(
                **SIZES | dict(head_dim=16, max_position_embeddings=8192, rope_parameters=rope)
            ),
        )


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_gguf_rope_with_a_factor_alone_is_linear(key):
    """Regression: without rope.scaling.type the factor was left out. llama.cpp takes it for a linear one, and
    reads the older key."""
    config = config_from_gguf(LLAMA_METADATA | {f"llama.{key}": 4.0}, SHAPES, "m.gguf")
    rope = dict(rope_type="linear", factor=4.0, rope_theta=500000.0)
    same = dict(SIZES | dict(head_dim=16, max_position_embeddings=8192, rope_parameters=rope))
    assert_same_rope(config, transformers.LlamaConfig(**same))
    # llama.cpp takes a factor of 0 for none.
    plain = config_from_gguf(LLAMA_METADATA, SHAPES, "m.gguf")
    assert config_from_gguf(LLAMA_METADATA | {f"llama.{key}": 0.0}, SHAPES, "m.gguf") == plain


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"general.architecture": "mamba"}, ("mamba", "qwen3moe")),
        ({"llama.expert_count": 8}, ("expert_count 8", "Mixtral")),
        ({"llama.attention.head_count_kv": [2, 4]}, ("num_key_value_heads", "per layer")),
        ({"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}, ("8 of 16",)),
        # Regression: the flag switches ropes off in hybrids alone, and the whole head was rotated.
        (
            {
                "llama.rope.dimension_count": 8,
                "llama.attention.key_length": 16,
                "llama.rope.scaling.finetuned": False,
            },
            ("8 of 16",),
        ),
        ({"llama.rope.scaling.type": "longrope"}, ("longrope",)),
        ({"llama.block_count": 0}, ("num_hidden_layers",)),
    ],
)
def test_a_gguf_that_is_not_supported_is_refused_with_the_file(changes, words):
    with pytest.raises(CheckpointError) as error:
        config_from_gguf(LLAMA_METADATA | changes, SHAPES, "dir/m.gguf")
    assert all(word in str(error.value) for word in (*words, "dir/m.gguf")), error.value
