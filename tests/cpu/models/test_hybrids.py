"""Models with recurrent layers: what their configs may say, dtypes of states, and matrices in fewer bits."""

import json

import pytest
import torch
import transformers

from shoal.errors import CheckpointError, ConfigError
from shoal.kinds.recurrent import DeltaKind, Mamba2Kind, ShortConvKind
from shoal.models.config_json import config_from_json
from shoal.models.parallel import check_parallel
from tests import tiny
from tests.cpu.models.test_families import greedy, prompts_of, run
from tests.tiny_families import write_family


def config_of(root, name, **changes):
    given = json.loads((write_family(root, name) / "config.json").read_text())
    return config_from_json({**given, **changes}, "config.json")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3.5", dict(attn_output_gate=False), "attn_output_gate must be true"),
        (
            "qwen3.5",
            dict(linear_num_value_heads=5),
            "linear_num_value_heads must be a multiple of .* 2, got 5",
        ),
        (
            "qwen3.5",
            dict(mamba_ssm_dtype="float8"),
            "mamba_ssm_dtype must be float32 or bfloat16, got 'float8'",
        ),
        ("qwen3.5", dict(layer_types=["linear_attention"] * 4), "must have a layer with attention"),
        ("granite4-mamba", dict(mamba_n_groups=3), "mamba_n_groups must divide the 8 heads"),
        ("granite4-mamba", dict(time_step_limit=[0.0]), "time_step_limit must be two numbers"),
        ("lfm2", dict(layer_types=None, full_attn_idxs=[9]), "full_attn_idxs must be layers from 0 to 3"),
        ("nemotron-h", dict(hybrid_override_pattern="MX"), "hybrid_override_pattern must be letters"),
        ("nemotron-h", dict(mlp_hidden_act="silu"), "mlp_hidden_act must be relu2, got 'silu'"),
        ("nemotron-h", dict(residual_in_fp32=True), "residual_in_fp32 must be false"),
        # Regression: the size of a head was rounded down.
        ("granite4-mamba", dict(mamba_d_head="auto", mamba_n_heads=10), "which is 96, got 10 times 9"),
        ("bamba", dict(mamba_d_head=16), "mamba_n_heads times mamba_d_head must be .* 96, got 8 times 16"),
        # Regression: these were ignored, so the model was another one.
        ("kimi-linear", dict(mla_use_nope=False), "mla_use_nope must be True, got False"),
        ("kimi-linear", dict(moe_router_activation_func="softmax"), "must be 'sigmoid', got 'softmax'"),
        ("kimi-linear", dict(moe_layer_freq=2), "moe_layer_freq must be 1, got 2"),
        # Regression: MLPs alone followed it, where transformers' convolutions and gates do, too.
        ("bamba", dict(hidden_act="gelu_pytorch_tanh"), "hidden_act must be silu .* recurrent layers"),
        ("qwen3.5", dict(hidden_act="gelu_pytorch_tanh"), "hidden_act must be silu .* recurrent layers"),
    ],
    ids=str,
)
def test_configs_that_cannot_run_are_refused_by_name(name, changes, message, root):
    with pytest.raises(CheckpointError, match=message):
        config_of(root, name, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        dict(partial_rotary_factor=0.25, rope_parameters=None),
        dict(rope_parameters=dict(rope_theta=1e4, rope_type="default", partial_rotary_factor=0.25)),
    ],
    ids=["beside", "within"],
)
def test_the_share_of_rotated_dimensions_of_bamba_equals_transformers(changes, root):
    """Regression: the field beside rope_parameters counted, and transformers overwrites it."""
    expected = transformers.BambaConfig(**changes).rope_parameters["partial_rotary_factor"]
    assert config_of(root, "bamba", **changes).attention.rope.partial == expected


def test_both_forms_of_a_list_of_layers_are_one_model(root):
    """Nemotron's letters and words."""
    letters = config_of(root, "nemotron-h")
    words = ["mamba", "mlp", "attention", "moe", "linear_attention"]
    assert config_of(root, "nemotron-h", hybrid_override_pattern=None, layers_block_type=words) == letters
    assert [kind.has_mlp for kind in letters.layers] == [False, True, False, True, False]


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3-next", DeltaKind), ("granite4-experts", Mamba2Kind), ("lfm2", ShortConvKind)]
)
def test_ranks_that_cannot_share_a_recurrent_layer_are_refused(name, kind, root):
    config = config_of(root, name)
    assert any(isinstance(layer.mixer, kind) for layer in config.layers)
    check_parallel(config, 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size 5 does not divide"):
        check_parallel(config, 5)


@pytest.mark.parametrize("name", ["granite4-mamba", "qwen3.5"])
def test_states_in_bfloat16_change_log_probabilities_a_little(name, root):
    folder = write_family(root, name)
    with run(folder, mamba_ssm_cache_dtype="bfloat16") as llm:
        (output,) = llm.generate(prompts_of(name, (90,)), greedy(logprobs=1))
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    expected = tiny.logprobs(folder, ids)[len(output.prompt_token_ids) - 1 :]
    found = [
        step[token].logprob for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)
    ]
    chosen = expected[torch.arange(len(found)), output.outputs[0].token_ids]
    difference = (torch.tensor(found) - chosen).abs()
    assert 0.0 < difference.max() < 0.3, difference


@pytest.mark.parametrize("option", [dict(quantization="fp8"), dict(load_format="dummy")], ids=str)
@pytest.mark.parametrize("name", ["qwen3-next", "granite4-experts", "lfm2", "nemotron-latent"])
def test_weights_that_are_rounded_or_made_up_run(name, option, root):
    with run(write_family(root, name), **option) as llm:
        assert all(len(o.outputs[0].token_ids) == 12 for o in llm.generate(prompts_of(name), greedy()))
