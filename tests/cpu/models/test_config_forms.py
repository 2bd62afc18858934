"""Configs of 2025 and 2026: ropes by layer type in old and new forms, the kinds of ropes, and text models
within multimodal ones."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shoal.errors import CheckpointError
from shoal.kinds.rope import RopeConfig
from shoal.layers.loading import CheckpointTensor
from shoal.models.architecture import Architecture
from shoal.models.config_json import config_from_json, overridden, text_config
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, SLIDING, full_every, given_layer_types
from shoal.models.configs.rope import read_ropes
from shoal.models.loading import by_halves
from shoal.models.rope import rope_frequencies
from shoal.weights.loader import is_draft
from shoal.weights.safetensors import full_name, safetensors_headers
from shoal.weights.source import resolve
from tests import tiny
from tests.tiny_families import write_family

YARN = dict(rope_type="yarn", beta_fast=32.0, beta_slow=1.0)
# inverse frequencies at 8, 12, 16 and the last one, and the factor on cosines and sines, of published models
PUBLISHED = {
    "gpt-oss": (
        64,
        dict(YARN, rope_theta=150000.0, factor=32.0, original_max_position_embeddings=4096, truncate=False),
        (5.08133e-2, 6.79496e-3, 4.56484e-4, 3.02351e-7),
        1.3465736,
    ),
    "OLMo 3, full layers": (
        128,
        dict(YARN, rope_theta=5e5, factor=8.0, original_max_position_embeddings=8192),
        (1.93923e-1, 8.53971e-2, 3.76060e-2, 3.06893e-7),
        1.2079442,
    ),
    "Laguna XS, full layers": (
        128,
        dict(
            YARN,
            rope_theta=5e5,
            factor=32.0,
            original_max_position_embeddings=4096,
            beta_fast=64.0,
            attention_factor=1.0,
            partial_rotary_factor=0.5,
        ),
        (2.76704e-2, 2.79690e-3, 4.41942e-5, 9.41831e-8),
        1.0,
    ),
    "DeepSeek V3": (
        64,
        dict(
            YARN,
            rope_theta=1e4,
            factor=40.0,
            original_max_position_embeddings=4096,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
        (1e-1, 2.68794e-2, 5.5e-3, 3.33380e-6),
        1.0,
    ),
}


def ropes_of(
    values: dict, head_dim: int = 64, kinds: tuple[str, ...] = (FULL,), **options
) -> dict[str, RopeConfig]:
    fields = ConfigFields({"max_position_embeddings": 131072, **values}, "config.json")
    return read_ropes(fields, kinds, head_dim, **{"keyed": True, "partial": True, "sliding": None} | options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_of_published_models_are_the_known_ones(name):
    head_dim, parameters, expected, factor = PUBLISHED[name]
    rope = ropes_of(dict(rope_parameters=parameters), head_dim)[FULL]
    found, found_factor = rope_frequencies(rope, rope.rotary_dim(head_dim), 131072)
    np.testing.assert_allclose(found[[8, 12, 16, -1]], expected, rtol=1e-5)
    assert found_factor == pytest.approx(factor, abs=1e-7)


def test_longrope_of_phi_has_its_known_factor_and_one_table_for_an_engine():
    short, long = [1.0 + i / 8 for i in range(24)], [1.0 + i for i in range(24)]
    values = dict(
        rope_theta=1e4,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=4096,
        rope_scaling=dict(type="su", short_factor=short, long_factor=long),
    )
    rope = ropes_of(values)[FULL]
    plain = 1e4 ** -(np.arange(0, 48, 2) / 48)
    for length, factors in ((4096, short), (4097, long)):
        found, factor = rope_frequencies(rope, rope.rotary_dim(64), length)
        np.testing.assert_allclose(found, plain / factors, rtol=1e-6)
        assert factor == pytest.approx(1.1902381, abs=1e-7)


@pytest.mark.parametrize("length", [4096, 4097, 16384])
def test_a_dynamic_rope_has_the_frequencies_of_the_engines_length(length):
    parameters = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
    config = transformers.LlamaConfig(head_dim=64, max_position_embeddings=4096, rope_parameters=parameters)
    expected, factor = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    rope = ropes_of(dict(rope_parameters=parameters, max_position_embeddings=4096))[FULL]
    found, found_factor = rope_frequencies(rope, rope.rotary_dim(64), length)
    np.testing.assert_allclose(found, expected.numpy(), rtol=4e-7)
    assert found_factor == factor == 1.0


@pytest.mark.parametrize("partial", [0.25, 0.5, 1.0])
@pytest.mark.parametrize(
    "own",
    [
        dict(rope_type="proportional"),
        dict(rope_type="proportional", factor=8.0),
        dict(YARN, factor=8.0, original_max_position_embeddings=256),
        dict(YARN, factor=8.0, original_max_position_embeddings=256, truncate=False, mscale=0.7),
        dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=256,
        ),
        # Llama 4 Scout's, which has no range between. Regression: it was refused.
        dict(
            rope_type="llama3",
            factor=16.0,
            low_freq_factor=1.0,
            high_freq_factor=1.0,
            original_max_position_embeddings=256,
        ),
        dict(rope_type="linear", factor=4.0),
    ],
    ids=str,
)
def test_kinds_of_ropes_are_those_of_transformers_for_whole_heads_and_parts(own, partial):
    parameters = dict(own, rope_theta=1e6, partial_rotary_factor=partial)
    config = transformers.Phi3Config(hidden_size=512, num_attention_heads=8, max_position_embeddings=131072)
    config.rope_parameters = parameters | {}
    config.head_dim, config.original_max_position_embeddings = (
        64,
        own.get("original_max_position_embeddings", 256),
    )
    expected, factor = ROPE_INIT_FUNCTIONS[own["rope_type"]](config)
    rope = ropes_of(dict(rope_parameters=parameters))[FULL]
    found, found_factor = rope_frequencies(rope, rope.rotary_dim(64), 131072)
    np.testing.assert_allclose(found, expected.numpy(), rtol=4e-7)
    assert found_factor == pytest.approx(factor, rel=1e-12)


def test_ropes_by_layer_type_are_read_in_the_new_form_and_in_the_old_ones():
    kinds, local = (
        (FULL, SLIDING),
        dict(sliding=lambda fields: {"rope_theta": fields.get("rope_local_base_freq")}),
    )
    expected = {FULL: RopeConfig(1e6, "linear", factor=8.0), SLIDING: RopeConfig(1e4)}
    new = {
        SLIDING: dict(rope_type="default", rope_theta=1e4),
        FULL: dict(rope_type="linear", factor=8.0, rope_theta=1e6),
    }
    old = dict(rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=dict(rope_type="linear", factor=8.0))
    assert ropes_of(dict(rope_parameters=new), kinds=kinds) == expected
    assert ropes_of(dict(rope_parameters=new), kinds=kinds, **local) == expected
    assert ropes_of(old, kinds=kinds, **local) == expected
    one = ropes_of(dict(rope_parameters=new[FULL]), kinds=kinds)  # layers of both types share it
    assert one == {FULL: expected[FULL], SLIDING: expected[FULL]}


def test_a_partial_rope_is_read_from_either_place():
    for values in (
        dict(rope_theta=1e4, partial_rotary_factor=0.5),
        dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5)),
        dict(rope_parameters={FULL: dict(rope_theta=1e4, partial_rotary_factor=0.5)}),
        dict(partial_rotary_factor=0.5, rope_parameters={FULL: dict(rope_theta=1e4)}),
    ):
        assert ropes_of(values) == {FULL: RopeConfig(1e4, partial=0.5)}, values
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        ropes_of(dict(partial_rotary_factor=1.5))
    with pytest.raises(CheckpointError, match=r"long_factor must be a list of 32 values"):
        ropes_of(dict(rope_scaling=dict(type="longrope", short_factor=[1.0] * 32, long_factor=[1.0] * 3)))


@pytest.mark.parametrize("own", [dict(alpha=1000.0), dict(factor=4.0)], ids=str)
def test_dynamic_ropes_of_heads_with_one_pair_are_refused_by_name(own):
    """Regression: the exponent that stretches theta divided by zero."""
    with pytest.raises(
        CheckpointError, match=r"config\.json: head_dim must leave at least 4 numbers .*, got 2"
    ):
        ropes_of(dict(rope_parameters=dict(own, rope_type="dynamic", rope_theta=1e4)), head_dim=2)


def test_layer_types_that_are_not_known_are_refused_by_name():
    fields = ConfigFields({"layer_types": ["full_attention", "chunked_attention"]}, "config.json")
    with pytest.raises(CheckpointError, match=r"config.json: layer_types .*chunked_attention"):
        given_layer_types(fields, (FULL, SLIDING))
    old = ConfigFields({"layer_types": ["attention", "mamba"]}, "config.json")
    assert given_layer_types(old, (FULL, "linear_attention")) == (FULL, "linear_attention")
    assert full_every(3, 4) == (SLIDING, SLIDING, FULL, SLIDING)


def test_a_nested_config_has_the_values_of_either_level():
    """The text model's own values count, but for nulls."""
    text = dict(model_type="mistral", hidden_size=64, eos_token_id=None, tie_word_embeddings=True)
    whole = dict(
        model_type="mistral3",
        text_config=text,
        vision_config=dict(hidden_size=9),
        hidden_size=9,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    found = text_config(whole, "config.json")
    assert [found[key] for key in ("hidden_size", "eos_token_id", "tie_word_embeddings")] == [64, 2, True]
    assert text_config(text, "config.json") == text
    with pytest.raises(CheckpointError, match="text_config"):
        text_config(dict(text_config=[1]), "config.json")


def test_overrides_count_for_the_text_model_of_a_nested_config():
    whole = dict(model_type="mistral3", eos_token_id=2, text_config=dict(hidden_size=64, rope_theta=1e4))
    for overrides in (dict(hidden_size=32), dict(text_config=dict(hidden_size=32))):
        found = text_config(overridden(whole, overrides), "config.json")
        assert (found["hidden_size"], found["rope_theta"], found["eos_token_id"]) == (32, 1e4, 2)
    assert overridden(dict(hidden_size=64), dict(hidden_size=32, extra=1)) == dict(hidden_size=32, extra=1)


def test_an_unknown_text_model_is_refused_by_name(tmp_path):
    for model_type in ("llama", "t5"):
        config = dict(
            architectures=["LlavaForConditionalGeneration"],
            model_type="llava",
            text_config=dict(tiny.COMMON, model_type=model_type),
        )
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=f"LlavaForConditionalGeneration.*{model_type}"):
            resolve(str(tmp_path)).check()


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("language_model.layers.1.input_layernorm.weight", "model.layers.1.input_layernorm.weight"),
        # Regression: transformers renames the layers of Kimi K2.5's text model when it writes them
        ("language_model.model.blocks.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("layers.1.input_layernorm.weight", "model.layers.1.input_layernorm.weight"),
    ],
)
def test_names_of_a_text_model_lose_the_prefixes_of_the_whole_one(stored, name):
    assert full_name(stored) == name and full_name(name) == name


def test_other_parts_are_left_out_whatever_their_tensors_are(tmp_path):
    save_file(
        {
            "model.language_model.norm.weight": torch.ones(4),
            "model.vision_tower.patch.weight": torch.ones(1, 1, 1, 1, 1, 2),
            "model.embed_vision.scale": torch.tensor(1.0),
            "vision_tower.positions": torch.ones(3, dtype=torch.int64),
            "model.multi_modal_projector.bias": torch.ones(2),
            "mtp.layers.0.norm.weight": torch.ones(3),
        },
        tmp_path / "model.safetensors",
    )
    (_, headers), *others = safetensors_headers(tmp_path)
    assert not others and list(headers) == ["model.norm.weight"]


def test_layers_that_draft_are_left_out_and_further_ones_are_not(root):
    config = dataclasses.replace(resolve(str(tiny.write_model(root, "llama"))).config, num_draft_layers=1)
    last = config.num_layers
    found = [is_draft(f"model.layers.{i}.mlp.up_proj.weight", config) for i in range(last + 3)]
    assert found == [False] * last + [True, False, False]


def test_a_text_model_within_a_multimodal_one_is_that_model(root, tmp_path, monkeypatch):
    """Named as nested checkpoints name it, it has the tensors and the config of the model alone."""
    from shoal.models import config_json
    from shoal.models.families import llama

    nested = dataclasses.replace(llama.ARCHITECTURE, nested_in=("LlavaForConditionalGeneration",))
    monkeypatch.setattr(config_json, "ARCHITECTURES", (nested,))
    folder = tiny.write_model(root, "llama")
    config = json.loads((folder / "config.json").read_text())
    top = {key: config.pop(key) for key in ("architectures", "eos_token_id", "tie_word_embeddings")}
    whole = top | dict(architectures=["LlavaForConditionalGeneration"], text_config=config)
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    named = {
        "lm_head.weight"
        if key == "lm_head.weight"
        else key.replace("model.", "model.language_model.", 1): weight
        for key, weight in tensors.items()
    }
    save_file(named | {"model.visual.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    assert isinstance(nested, Architecture)
    assert resolve(str(tmp_path)).config == resolve(str(folder)).config
    (_, headers), *_ = safetensors_headers(tmp_path)
    assert set(headers) == set(tensors)


@pytest.mark.parametrize(
    "fields",
    [
        dict(rope_parameters=dict(rope_type="default", rope_theta=12345.0)),
        dict(rope_parameters=dict(YARN, rope_theta=12345.0, factor=8.0, original_max_position_embeddings=64)),
        dict(rope_theta=12345.0, rope_scaling=dict(YARN, factor=8.0, original_max_position_embeddings=64)),
    ],
    ids=["new form", "new form, scaled", "old form"],
)
def test_windows_of_olmo3_have_the_base_of_the_whole_model(fields):
    """Regression: with one rope in the new form they had the default base."""
    sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, architectures=["Olmo3ForCausalLM"])
    config = config_from_json(sizes | heads | fields, "tiny")
    ropes = [kind.attention.rope for kind in config.layers]
    assert [rope.theta for rope in ropes] == [12345.0] * 4
    assert {rope.kind for rope in ropes[:3]} == {"default"}


SMALL = dict(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


@pytest.mark.parametrize(
    "given",
    [
        dict(rope_parameters={SLIDING: {}, FULL: dict(rope_type="default", rope_theta=5000.0)}),
        dict(rope_parameters={FULL: dict(rope_type="default", rope_theta=5000.0)}),
        dict(rope_parameters={SLIDING: dict(rope_type="default"), FULL: {}}, rope_local_base_freq=123.0),
    ],
    ids=["empty", "missing", "local base next to it"],
)
def test_windows_of_gemma3_have_their_own_base_where_their_rope_lacks_one(given):
    """Regression: in the new form without rope_theta for layers with a window, they had the base of the other
    layers."""
    expected = transformers.Gemma3TextConfig(**SMALL, **json.loads(json.dumps(given))).rope_parameters
    config = config_from_json(SMALL | given | dict(architectures=["Gemma3ForCausalLM"]), "tiny")
    assert [kind.attention.rope.theta for kind in config.layers] == (
        [expected[SLIDING]["rope_theta"]] * 5 + [expected[FULL]["rope_theta"]]
    )


def test_a_base_next_to_nested_ropes_counts_where_one_of_them_lacks_it():
    ropes = {SLIDING: dict(rope_type="default"), FULL: dict(rope_type="default", rope_theta=5000.0)}
    given = dict(SMALL, rope_parameters=ropes, rope_theta=123.0, layer_types=[FULL, SLIDING] * 3)
    oracle = transformers.LagunaConfig(**json.loads(json.dumps(given)))
    oracle.standardize_rope_params()  # as its model does
    expected = oracle.rope_parameters
    config = config_from_json(given | dict(architectures=["LagunaForCausalLM"]), "tiny")
    found = [kind.attention.rope.theta for kind in config.layers[:2]]
    assert found == [expected[kind]["rope_theta"] for kind in (FULL, SLIDING)]


def test_only_gemma_reads_hidden_activation():
    """Regression: other classes took it before hidden_act, which transformers alone reads there."""
    both = dict(SMALL, hidden_act="silu", hidden_activation="gelu_pytorch_tanh", rope_theta=1e4)
    found = {
        name: config_from_json(both | dict(architectures=[name]), "tiny").activation
        for name in ("Olmo3ForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM")
    }
    assert found == dict(Olmo3ForCausalLM="silu", LlamaForCausalLM="silu", Gemma3ForCausalLM="gelu_tanh")


def test_queries_that_grow_take_their_length_from_the_yarn_rope():
    """Regression: a yarn rope without original_max_position_embeddings was refused."""
    rope = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, llama_4_scaling_beta=0.5)
    given = dict(SMALL, max_position_embeddings=2048, rope_parameters=rope)
    expected = transformers.Ministral3Config(**json.loads(json.dumps(given))).rope_parameters
    config = config_from_json(given | dict(architectures=["Ministral3ForCausalLM"]), "tiny")
    scaling = config.attention.query_scaling
    assert (scaling.beta, scaling.length) == (0.5, expected["original_max_position_embeddings"])


@pytest.mark.parametrize("name", ["Ministral3ForCausalLM", "Mistral4ForCausalLM"])
def test_queries_that_grow_need_a_length(name):
    """Regression: Mistral Small 4's queries grew by logarithms of infinity where its rope is not scaled."""
    rope = dict(rope_type="linear", rope_theta=1e6, factor=4.0, llama_4_scaling_beta=0.5)
    given = dict(SMALL, num_key_value_heads=4, max_position_embeddings=2048, architectures=[name])
    with pytest.raises(CheckpointError, match="original_max_position_embeddings is missing"):
        config_from_json(given | dict(rope_parameters=rope), "tiny")
    rope["original_max_position_embeddings"] = 512
    config = config_from_json(given | dict(rope_parameters=rope), "tiny")
    assert config.layers[0].mixer.query_scaling.length == 512


def test_pairs_of_each_layer_are_moved_as_that_layer_rotates_them(root):
    """Regression: the first layer's rope decided for all layers."""
    config = resolve(str(tiny.write_model(root, "llama"))).config
    first = config.layers[0].with_attention(rope=None)
    config = dataclasses.replace(config, layers=(first, *config.layers[1:]))
    head_dim, moved = config.attention.head_dim, {}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        tensor = CheckpointTensor(name, (head_dim, 1), lambda loaded, name: moved.update({name: loaded}))
        by_halves(tensor, config).load(torch.arange(head_dim)[:, None], name)
    unmoved, halves = ([*loaded.flatten()] for loaded in moved.values())
    assert unmoved == [*range(head_dim)]
    assert halves == [*range(0, head_dim, 2), *range(1, head_dim, 2)]


def test_the_first_class_of_ernie_is_read(root):
    """Regression: baidu's first files name their own class, which llama.cpp's converter knows too."""
    config = json.loads((write_family(root, "ernie") / "config.json").read_text())
    expected = config_from_json(config, "tiny")
    assert config_from_json(config | dict(architectures=["Ernie4_5_ForCausalLM"]), "tiny") == expected
