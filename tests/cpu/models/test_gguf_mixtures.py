"""Mixtures of experts in GGUF files: log-probabilities are transformers' for the checkpoint that the file was
written from."""

from __future__ import annotations

import random

import gguf
import pytest

from shoal import LLM, SamplingParams
from shoal.models.config_gguf import config_from_gguf
from shoal.weights.gguf.header import read_header
from tests import gguf_files, tiny
from tests.tiny_families import write_family

PROMPT = random.Random(3).choices(range(256), k=40)


def prompt_logprobs(path, dtype="float32") -> list[dict[int, float]]:
    """For each position of the prompt but the first, the log-probability of its token."""
    options = dict(device="cpu", dtype=dtype, max_model_len=64, skip_tokenizer_init=True)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(str(path), **options) as llm:
        output = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
    return [{i: found.logprob for i, found in position.items()} for position in output.prompt_logprobs[1:]]


def assert_equal_to(folder, path) -> None:
    expected = tiny.logprobs(folder, PROMPT)
    for i, position in enumerate(prompt_logprobs(path)):
        for token, found in position.items():
            assert abs(found - expected[i, token].item()) < 1e-3, i


def assert_equal_files(path, other, most: float) -> None:
    """Compares a file of packed weights with one of plain ones. `most`: by how much log-probabilities may differ on
    average."""
    pairs = zip(prompt_logprobs(path, "auto"), prompt_logprobs(other), strict=True)
    differences = [abs(found[token] - expected[token]) for found, expected in pairs for token in expected]
    assert sum(differences) / len(differences) < most


def add_experts(writer, config) -> None:
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_leading_dense_block_count(config.get("first_k_dense_replace", 1))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if config["n_group"] is not None:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def add_glm(writer, config) -> None:
    add_experts(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"] // 2)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])


@pytest.mark.parametrize("use_qk_norm", [True, False])
def test_a_file_of_glm_4_5_is_its_checkpoint(use_qk_norm, root, tmp_path):
    folder = write_family(root, "glm4-moe", use_qk_norm=use_qk_norm)
    gguf_files.write(tmp_path / "m.gguf", folder, "glm4moe", add_glm)
    assert_equal_to(folder, tmp_path / "m.gguf")


@pytest.mark.parametrize("bias", [True, False])
def test_a_file_of_solar_open_is_its_checkpoint(bias, root, tmp_path):
    """llama.cpp's converter writes it as a GLM-4.5 whose heads are rotated whole and whose layers are all sparse."""
    folder = write_family(root, "solar-open", attention_bias=bias)

    def add_solar(writer, config) -> None:
        add_glm(writer, {**config, "first_k_dense_replace": 0})
        writer.add_rope_dimension_count(config["head_dim"])

    gguf_files.write(tmp_path / "m.gguf", folder, "glm4moe", add_solar)
    assert_equal_to(folder, tmp_path / "m.gguf")
    # Regression: a file without this number was read with one dense layer, GLM-4.5's default. The converter
    # leaves out what the config lacks, and llama.cpp takes 0.
    header = read_header(tmp_path / "m.gguf")
    said = config_from_gguf(header.metadata, header.shapes, "m.gguf")
    unsaid = dict(header.metadata)
    assert unsaid.pop("glm4moe.leading_dense_block_count") == 0
    assert config_from_gguf(unsaid, header.shapes, "m.gguf") == said


def test_a_file_of_dots_llm1_is_its_checkpoint(root, tmp_path):
    folder = write_family(root, "dots1", sliding_window=None)

    def add_dots(writer, config) -> None:
        add_experts(writer, config)
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])

    gguf_files.write(tmp_path / "m.gguf", folder, "dots1", add_dots)
    assert_equal_to(folder, tmp_path / "m.gguf")


def test_a_file_of_k_exaone_is_its_checkpoint(root, tmp_path):
    folder = write_family(root, "exaone-moe", num_nextn_predict_layers=0)

    def add_exaone(writer, config) -> None:
        own = dict(n_routed_experts=config["num_experts"], n_shared_experts=config["num_shared_experts"])
        add_experts(writer, config | own)
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])

    gguf_files.write(tmp_path / "m.gguf", folder, "exaone-moe", add_exaone)
    assert_equal_to(folder, tmp_path / "m.gguf")


def test_a_file_of_hunyuan_a13b_is_its_checkpoint(root, tmp_path):
    folder = write_family(root, "hunyuan-moe")

    def add_hunyuan(writer, config) -> None:
        rope, dim = config["rope_parameters"], config["head_dim"]
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(dim)
        writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2)))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["moe_topk"][0])
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])

    gguf_files.write(tmp_path / "m.gguf", folder, "hunyuan-moe", add_hunyuan)
    assert_equal_to(folder, tmp_path / "m.gguf")


def test_a_file_of_trinity_is_its_checkpoint(root, tmp_path):
    folder = write_family(root, "trinity", attention_bias=False)

    def add_trinity(writer, config) -> None:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_weights_scale(config["route_scale"])
        writer.add_expert_weights_norm(True)

    def renamed(name, tensor, config):
        if name.endswith("expert_bias"):
            name = f"blk.{name.split('.')[2]}.exp_probs_b.bias"
        return {name: tensor}

    gguf_files.write(tmp_path / "m.gguf", folder, "afmoe", add_trinity, renamed)
    assert_equal_to(folder, tmp_path / "m.gguf")


def add_deepseek(writer, config) -> None:
    add_experts(writer, config)
    is_v2 = config["model_type"] == "deepseek_v2"
    softmax, sigmoid = gguf.ExpertGatingFuncType.SOFTMAX, gguf.ExpertGatingFuncType.SIGMOID
    writer.add_expert_gating_func(softmax if is_v2 else sigmoid)
    rotary, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(rank + rotary)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotary)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def test_a_file_of_glm_4_7_flash_may_leave_its_router_unsaid(root, tmp_path):
    folder = write_family(root, "glm4-flash-halves", attention_bias=False, rope_interleave=True)
    gguf_files.write(tmp_path / "m.gguf", folder, "deepseek2", add_deepseek)
    header = read_header(tmp_path / "m.gguf")
    said = config_from_gguf(header.metadata, header.shapes, "m.gguf")
    unsaid = {key: value for key, value in header.metadata.items() if not key.endswith("gating_func")}
    assert len(unsaid) == len(header.metadata) - 1
    assert config_from_gguf(unsaid, header.shapes, "m.gguf") == said


def by_head(name, tensor, config):
    """Keys' and values' matrices apart, as llama.cpp's converter writes them."""
    if not name.endswith("kv_b_proj.weight"):
        return {name: tensor}
    heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
    keys, values = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
    stem = name.removesuffix("kv_b_proj.weight")
    return {f"{stem}k_b_proj.weight": keys.transpose(1, 2), f"{stem}v_b_proj.weight": values}


YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=32)


@pytest.mark.parametrize("convert", [by_head, None], ids=["by head", "whole"])
@pytest.mark.parametrize(
    "name, changes",
    [
        ("deepseek-v2", dict(rope_parameters=dict(YARN, mscale=0.7, mscale_all_dim=0.7))),
        ("deepseek-v2", dict(topk_method="greedy", n_group=None, topk_group=None, q_lora_rank=24)),
        ("deepseek-v3", dict(attention_bias=False)),
        # Regression: a file that does not speak of shares had them, as DeepSeek V3 has
        ("deepseek-v3", dict(attention_bias=False, norm_topk_prob=False)),
        ("glm4-flash-halves", dict(attention_bias=False, rope_interleave=True)),
    ],
    ids=["V2", "V2 without groups", "V3", "V3 without shares", "GLM-4.7-Flash"],
)
def test_a_file_of_deepseek_is_its_checkpoint(name, changes, convert, root, tmp_path):
    if name == "deepseek-v2" and "rope_parameters" not in changes:
        changes = changes | dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0))
    folder = write_family(root, name, **changes)
    gguf_files.write(tmp_path / "m.gguf", folder, "deepseek2", add_deepseek, convert)
    assert_equal_to(folder, tmp_path / "m.gguf")


def add_routed(writer, config, count: str, chosen: str) -> None:
    writer.add_expert_count(config[count])
    writer.add_expert_used_count(config[chosen])
    writer.add_head_count_kv(config["num_key_value_heads"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def add_minimax(writer, config) -> None:
    add_routed(writer, config, "num_local_experts", "num_experts_per_tok")
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_rope_dimension_count(config["rotary_dim"])


def add_ernie(writer, config) -> None:
    add_routed(writer, config, "moe_num_experts", "moe_k")
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])


def add_llama4(writer, config) -> None:
    add_routed(writer, config, "num_local_experts", "num_experts_per_tok")
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_rope_dimension_count(config["head_dim"])


def stacked_rows(name, tensor, config):
    """Stacks of experts as llama.cpp's converter writes them: gate apart from up, outputs by inputs."""
    layer, _, part = name.removeprefix("model.layers.").partition(".feed_forward.experts.")
    if part == "gate_up_proj":
        gate, up = tensor.transpose(1, 2).chunk(2, dim=1)
        return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
    if part == "down_proj":
        return {f"blk.{layer}.ffn_down_exps.weight": tensor.transpose(1, 2)}
    return {name: tensor}


def add_laguna(writer, config) -> None:
    """As llama.cpp's converter writes it: neither the layers with a window nor the form of gates have a key."""
    add_routed(writer, config, "num_experts", "num_experts_per_tok")
    ropes, size = config["rope_parameters"], config["head_dim"]
    full, sliding = (ropes[f"{kind}_attention"] for kind in ("full", "sliding"))
    writer.add_head_count(config["num_attention_heads_per_layer"])
    if config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_expert_weights_scale(config["moe_routed_scaling_factor"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_rope_dimension_count(int(size * full["partial_rotary_factor"]))
    writer.add_rope_freq_base_swa(sliding["rope_theta"])
    writer.add_rope_dimension_count_swa(size)
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])


LAGUNA_NAMES = {
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.g_proj.weight": "attn_gate.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.experts.{part}_proj.weight": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")},
    **{
        f"mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")
    },
}


def laguna_names(name, tensor, config):
    """The gguf package has no names of this architecture yet."""
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    own = LAGUNA_NAMES.get(part)
    return {name if own is None else f"blk.{layer}.{own}": tensor}


def add_mistral4(writer, config) -> None:
    add_deepseek(writer, {**config, "model_type": "deepseek_v2"})
    writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])


def two_matrices(name, tensor, config):
    """Experts' gate above up in one stack, and latents by head."""
    layer, _, part = name.removeprefix("model.layers.").partition(".mlp.experts.")
    own = {"gate_up_proj": "ffn_gate_up_exps", "down_proj": "ffn_down_exps"}.get(part)
    return by_head(name, tensor, config) if own is None else {f"blk.{layer}.{own}.weight": tensor}


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    "name, changes, architecture, metadata, convert",
    [
        ("minimax-rotary-dim", {}, "minimax-m2", add_minimax, None),
        ("ernie4.5-moe", {}, "ernie4_5-moe", add_ernie, None),
        (
            "llama4",
            dict(floor_scale=8192, attn_scale=0.1, attention_chunk_size=8192),
            "llama4",
            add_llama4,
            stacked_rows,
        ),
        ("mistral4", {}, "mistral4", add_mistral4, two_matrices),
        (
            "laguna",
            dict(layer_types=[FULL, SLIDING, SLIDING, SLIDING], moe_router_logit_softcapping=0.0),
            "laguna",
            add_laguna,
            laguna_names,
        ),
        (
            "laguna-elements",
            dict(
                mlp_layer_types=["dense", "sparse", "sparse"],
                num_attention_heads_per_layer=[6, 6, 6],
                attention_bias=False,
                sliding_window=0,
            ),
            "laguna",
            add_laguna,
            laguna_names,
        ),
    ],
    ids=["MiniMax M2", "ERNIE 4.5", "Llama 4", "Mistral Small 4", "Laguna XS", "Laguna M"],
)
def test_a_file_of_a_mixture_is_its_checkpoint(
    name, changes, architecture, metadata, convert, root, tmp_path
):
    folder = write_family(root, name, **changes)
    gguf_files.write(tmp_path / "m.gguf", folder, architecture, metadata, convert)
    assert_equal_to(folder, tmp_path / "m.gguf")
