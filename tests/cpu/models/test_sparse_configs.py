"""Configs whose publishers leave out fields, or name values that a family does not have."""

import pytest
import transformers

from shoal.errors import CheckpointError
from shoal.kinds.rope import ROPE_THETA
from shoal.models.config_json import config_from_json
from shoal.models.registry import ARCHITECTURES
from shoal.weights.safetensors import OTHER_PART


def test_the_text_model_of_gemma3_names_only_what_differs_from_its_class():
    """Regression: the text_config of Gemma 3 4B, which lacks heads and vocabulary, was refused."""
    text = dict(
        model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
        sliding_window=1024, rope_scaling=dict(factor=8.0, rope_type="linear"),
    )  # fmt: skip
    config = config_from_json(
        dict(architectures=["Gemma3ForConditionalGeneration"], text_config=text, vision_config={}), "test"
    )
    assert (config.attention.num_heads, config.vocab_size, config.hidden_size) == (8, 262208, 2560)


@pytest.mark.parametrize(
    "name", ["model.mtp_emb_norm.0.weight", "model.mtp_block.0.mlp.up_proj.weight", "mtp.fc.weight"]
)
def test_draft_heads_of_any_name_are_other_parts(name):
    """Regression: tensors of ERNIE 4.5's draft head were refused."""
    assert OTHER_PART.match(name)


@pytest.mark.parametrize(
    "change", [dict(scoring_func="softmax"), dict(topk_method="greedy"), dict(moe_layer_freq=2)], ids=str
)
def test_routers_that_deepseek_v3_does_not_have_are_refused(change):
    """Regression: these fields were ignored, and the router was a sigmoid in every layer."""
    fields = dict(architectures=["DeepseekV3ForCausalLM"], rope_theta=1e4, **change)
    with pytest.raises(CheckpointError, match=next(iter(change))):
        config_from_json(fields, "test")


def test_biases_of_ernie_with_experts_are_refused_by_name():
    """Regression: the bias of the output head was taken for an output head, whose weight was missing."""
    fields = dict(
        architectures=["Ernie4_5_MoeForCausalLM"], use_bias=True, vocab_size=10, hidden_size=32,
        intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="use_bias must be False, got True"):
        config_from_json(fields, "test")
    assert not config_from_json(fields | dict(use_bias=False), "test").o_bias


def test_queries_of_ministral3_that_do_not_grow_are_read():
    """Regression: llama_4_scaling_beta 0 was refused as no positive number."""
    rope = dict(rope_type="yarn", rope_theta=1e6, factor=2.0, original_max_position_embeddings=64)
    fields = dict(
        architectures=["Ministral3ForCausalLM"], vocab_size=10, hidden_size=32, intermediate_size=64,
        num_hidden_layers=1, num_attention_heads=8, rope_parameters=rope | dict(llama_4_scaling_beta=0.0),
    )  # fmt: skip
    assert config_from_json(fields, "test").attention.query_scaling is None


def test_experts_with_an_activation_that_they_do_not_compute_are_refused():
    """Regression: hidden_act of Mixtral was read, and its experts computed SiLU."""
    fields = dict(
        architectures=["MixtralForCausalLM"], hidden_act="gelu_pytorch_tanh", vocab_size=10, hidden_size=32,
        intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="hidden_act"):
        config_from_json(fields, "test")


def test_tokens_of_gemma_4_without_embeddings_of_layers_are_refused():
    """Regression: such a token read beyond the table, which ended the engine."""
    fields = dict(
        architectures=["Gemma4ForCausalLM"], vocab_size=300, hidden_size=32, intermediate_size=64,
        num_hidden_layers=6, num_attention_heads=4, hidden_size_per_layer_input=8, vocab_size_per_layer_input=299,
    )  # fmt: skip
    with pytest.raises(
        CheckpointError, match="vocab_size_per_layer_input must be at least vocab_size 300, got 299"
    ):
        config_from_json(fields, "test")
    assert config_from_json(fields | dict(hidden_size_per_layer_input=0), "test").per_layer_size == 0


@pytest.mark.parametrize("kind", ["Gemma4TextConfig", "Ministral3Config", "MellumConfig"])
def test_rope_parameters_of_null_are_those_of_the_class(kind):
    """Regression: with null the class's own ropes were not taken, as they are where the field is missing."""
    sizes = dict(vocab_size=10, hidden_size=512, num_hidden_layers=6, num_attention_heads=8)
    names = [kind.replace("Text", "").replace("Config", "ForCausalLM")]
    fields = getattr(transformers, kind)(**sizes).to_dict() | dict(architectures=names)
    expected = config_from_json(fields, "test")
    assert config_from_json(fields | dict(rope_parameters=None), "test") == expected


def test_a_rope_interleave_of_null_rotates_halves():
    """Regression: null was taken for the default, which is true."""
    fields = dict(architectures=["DeepseekV3ForCausalLM"], rope_theta=1e4, rope_interleave=None)
    assert not config_from_json(fields, "test").attention.interleaved


@pytest.mark.parametrize("value", [None, False, True])
def test_deepseek_v2_rotates_pairs_of_neighbours_whatever_rope_interleave_says(value):
    """Regression: false rotated halves, while transformers does not read the field for this class."""
    given = dict(num_experts_per_tok=2, rope_theta=1e4, rope_interleave=value)
    fields = given | dict(architectures=["DeepseekV2ForCausalLM"])
    assert config_from_json(fields, "test").attention.interleaved


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda own: own.name)
def test_a_rope_without_a_theta_has_that_of_the_class(architecture):
    """Regression: with rope_scaling and without rope_theta, CWM's was another one."""
    own_class = transformers.CONFIG_MAPPING[architecture.name.removesuffix("_experts")]
    expected = getattr(own_class, "default_theta", None) or ROPE_THETA
    expected = expected["global"] if isinstance(expected, dict) else expected
    assert architecture.defaults.get("rope_theta", ROPE_THETA) == expected


def test_experts_of_qwen3_vl_are_weighted_by_shares_whatever_the_config_says():
    """Regression: norm_topk_prob false was read, which transformers' class does not have."""
    fields = dict(architectures=["Qwen3VLMoeForConditionalGeneration"], vocab_size=10, hidden_size=32)
    fields |= dict(intermediate_size=64, num_hidden_layers=1, num_attention_heads=16, norm_topk_prob=False)
    assert config_from_json(fields, "test").experts.router.renormalize
