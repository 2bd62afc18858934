"""Gemma 4 and Muse Glimmer in GGUF files, as llama.cpp's converter writes them: log-probabilities are transformers' for the
checkpoint that the file was written from."""

from __future__ import annotations

import json

import gguf
import pytest
import torch

from shoal.errors import CheckpointError
from shoal.models.config_gguf import config_from_gguf
from shoal.weights.gguf.header import read_header, read_rope_factors
from tests import gguf_files
from tests.cpu.models.test_gguf_hybrids import permuted
from tests.cpu.models.test_gguf_mixtures import assert_equal_files, assert_equal_to
from tests.tiny_families import FULL, SLIDING, write_family


def gemma4_heads(config: dict) -> dict[int, dict]:
    """The heads of each layer without a window, in either form of a config."""
    if "per_layer_config" in config:
        return {int(i): own for i, own in config["per_layer_config"].items()}
    heads = config.get("num_global_key_value_heads") or config["num_key_value_heads"]
    own = dict(head_dim=config["global_head_dim"], num_key_value_heads=heads)
    return {i: own for i, kind in enumerate(config["layer_types"]) if kind == FULL}


def add_gemma4(writer: gguf.GGUFWriter, config: dict) -> None:
    ropes, types, heads = config["rope_parameters"], config["layer_types"], gemma4_heads(config)
    writer.add_rope_freq_base(ropes[FULL]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes[SLIDING]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == SLIDING for kind in types])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    full, own = next(iter(heads.values()))["head_dim"], config["num_key_value_heads"]
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    of_layers = [heads.get(i, {}).get("num_key_value_heads", own) for i in range(len(types))]
    writer.add_head_count_kv(of_layers if set(of_layers) != {own} else own)
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("enable_moe_block"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["use_double_wide_mlp"]:
        width, num_own = config["intermediate_size"], len(types) - config["num_kv_shared_layers"]
        writer.add_feed_forward_length([width if i < num_own else 2 * width for i in range(len(types))])
    rotated = int(full * ropes[FULL]["partial_rotary_factor"] / 2)
    factors = torch.tensor([1.0] * rotated + [1e30] * (full // 2 - rotated))
    writer.add_tensor("rope_freqs.weight", factors.numpy())


def convert_gemma4(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith(".layer_scalar"):
        return {f"{name}.weight": tensor}
    if name.endswith(".router.scale"):
        return {f"blk.{layer}.ffn_gate_inp.scale": tensor}
    if name.endswith(".per_expert_scale"):
        return {f"blk.{layer}.ffn_down_exps.scale": tensor}
    return {f"{name}.weight" if ".experts." in name else name: tensor}


@pytest.mark.parametrize("name, architecture", [("glm", "chatglm"), ("glm4", "glm4")])
def test_a_file_of_glm_4_is_its_checkpoint(name, architecture, root, tmp_path):
    """Gate and up are one tensor, and half of a head is rotated in pairs of neighbours."""
    folder = write_family(root, name)

    def add_glm(writer: gguf.GGUFWriter, config: dict) -> None:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"] // 2)
        writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])

    gguf_files.write(tmp_path / "m.gguf", folder, architecture, add_glm)
    assert_equal_to(folder, tmp_path / "m.gguf")


def test_a_file_of_glm_4_with_sections_of_its_rope_is_refused(root, tmp_path):
    """Regression: rows of q and k of such a file are in another order, and it was read as GLM-4."""

    def add_glm(writer: gguf.GGUFWriter, config: dict) -> None:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_rope_dimension_count(config["head_dim"] // 2)
        writer.add_rope_dimension_sections([1, 1, 0, 0])

    gguf_files.write(tmp_path / "m.gguf", write_family(root, "glm4"), "glm4", add_glm)
    header = read_header(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"rope.dimension_sections \[1, 1, 0, 0\] \(GLM-4.1V"):
        config_from_gguf(header.metadata, header.shapes, "m.gguf")


def test_a_file_of_arcee_is_its_checkpoint(root, tmp_path):
    folder = write_family(root, "arcee", attention_bias=False, mlp_bias=False)

    def add_arcee(writer: gguf.GGUFWriter, config: dict) -> None:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])

    def convert(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
        return {name: permuted(name, tensor, config)}

    gguf_files.write(tmp_path / "m.gguf", folder, "arcee", add_arcee, convert)
    assert_equal_to(folder, tmp_path / "m.gguf")


@pytest.mark.parametrize("name, architecture", [("cohere", "command-r"), ("cohere2", "cohere2")])
def test_a_file_of_cohere_is_its_checkpoint(name, architecture, root, tmp_path):
    folder = write_family(root, name, attention_bias=False, tie_word_embeddings=True)

    def add_cohere(writer: gguf.GGUFWriter, config: dict) -> None:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_logit_scale(config["logit_scale"])
        if "sliding_window" in config:
            writer.add_sliding_window(config["sliding_window"])

    gguf_files.write(tmp_path / "m.gguf", folder, architecture, add_cohere)
    assert_equal_to(folder, tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["gemma4", "gemma4-shared", "gemma4-experts", "gemma4-unified"])
def test_a_file_of_gemma_4_is_its_checkpoint(name, root, tmp_path):
    folder = write_family(root, name)
    gguf_files.write(tmp_path / "m.gguf", folder, "gemma4", add_gemma4, convert_gemma4)
    assert_equal_to(folder, tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["gemma4", "gemma4-shared", "gemma4-experts", "gemma4-unified"])
def test_a_file_of_gemma_4_with_fused_q_k_v_is_its_checkpoint(name, root, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "GGUFWriter", gguf_files.FusingWriter)
    folder = write_family(root, name)
    gguf_files.write(tmp_path / "m.gguf", folder, "gemma4", add_gemma4, convert_gemma4)
    assert any(".attn_qkv." in name for name in read_header(tmp_path / "m.gguf").tensors)
    assert_equal_to(folder, tmp_path / "m.gguf")


def test_gemma_4_with_fused_keys_as_values_is_its_checkpoint(root, tmp_path, monkeypatch):
    """A file may hold keys a second time as values where the checkpoint has none."""
    monkeypatch.setattr(gguf, "GGUFWriter", gguf_files.FusingWriter)

    def convert(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
        stored = convert_gemma4(name, tensor, config)
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        if name.endswith(".k_proj.weight") and config["layer_types"][layer] == FULL:
            stored[name.replace("k_proj", "v_proj")] = tensor
        return stored

    folder = write_family(root, "gemma4")
    assert json.loads((folder / "config.json").read_text())["attention_k_eq_v"]
    gguf_files.write(tmp_path / "m.gguf", folder, "gemma4", add_gemma4, convert)
    assert not any(".attn_q." in name for name in read_header(tmp_path / "m.gguf").tensors)
    assert_equal_to(folder, tmp_path / "m.gguf")


def calm_gemma4(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    """With scores so small that roundings of weights stay roundings."""
    factor = 0.1 if name.endswith("q_norm.weight") else 1.0
    return {own: part * factor for own, part in convert_gemma4(name, tensor, config).items()}


# sizes that groups of 256 weights divide, and experts that all are chosen
WIDE = dict(hidden_size=256, intermediate_size=256, head_dim=32, global_head_dim=64)
WIDE_OF = {
    "gemma4": WIDE,
    "gemma4-shared": dict(WIDE, hidden_size_per_layer_input=32),
    "gemma4-experts": dict(WIDE, moe_intermediate_size=256, num_experts=4, top_k_experts=4),
}


@pytest.mark.parametrize(
    "kind, most", [("Q8_0", 1e-3), (gguf_files.like_q4_k_m, 0.15)], ids=["Q8_0", "Q4_K_M"]
)
@pytest.mark.parametrize("name", WIDE_OF)
def test_gemma_4_in_fewer_bits_says_what_its_unpacked_weights_say(name, kind, most, root, tmp_path):
    folder = write_family(root, name, **WIDE_OF[name])
    paths = tmp_path / "packed.gguf", tmp_path / "plain.gguf"
    for path, unpacked in zip(paths, (False, True)):
        gguf_files.write(path, folder, "gemma4", add_gemma4, calm_gemma4, kind, unpacked)
    assert_equal_files(*paths, most)


@pytest.mark.parametrize(
    "key, value, named",
    [
        (
            "feed_forward_length",
            [96] * 5 + [192] * 5,
            "intermediate_size must be one number for the first 6 layers",
        ),
        ("feed_forward_length", [96] * 6 + [288] * 4, "that number or twice as much for the 4 after them"),
        ("rope.scaling.type", "linear", "rope_type must be 'none', got 'linear'"),
        ("attention.sliding_window_pattern", [True] * 9, "layer_types must be a list of 10 values"),
        (
            "attention.head_count_kv",
            [2] * 9 + [0],
            r"num_key_value_heads\[9\].* is not an integer of at least 1",
        ),
    ],
)
def test_impossible_layers_of_gemma_4_are_refused_by_name(key, value, named, root, tmp_path):
    folder, path = write_family(root, "gemma4-shared"), tmp_path / "m.gguf"
    gguf_files.write(path, folder, "gemma4", add_gemma4, convert_gemma4)
    header = read_header(path)
    with pytest.raises(CheckpointError, match=named):
        config_from_gguf(
            {**header.metadata, f"gemma4.{key}": value}, header.shapes, str(path), read_rope_factors(header)
        )


def test_gemma_4_without_rope_factors_is_refused(root, tmp_path):
    """Layers without a window would rotate whole heads."""
    folder, path = write_family(root, "gemma4"), tmp_path / "m.gguf"
    gguf_files.write(path, folder, "gemma4", add_gemma4, convert_gemma4)
    header = read_header(path)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight must have 16 numbers, .* got 0"):
        config_from_gguf(header.metadata, header.shapes, str(path))


def add_olmo3(writer: gguf.GGUFWriter, config: dict) -> None:
    rope = config["rope_parameters"][FULL]
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == SLIDING for kind in config["layer_types"]])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])


def test_a_file_of_olmo_3_has_its_configs_attention_factor(root, tmp_path):
    """Regression: yarn's own factor was multiplied with it. llama.cpp's converter writes it for all ropes of yarn whose
    config has one."""
    folder = write_family(root, "olmo3")
    gguf_files.write(tmp_path / "m.gguf", folder, "olmo2", add_olmo3)
    assert_equal_to(folder, tmp_path / "m.gguf")


def add_muse(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_logit_scale(config["output_multiplier"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == SLIDING for kind in config["layer_types"]])


def convert_muse(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    """Norms of layers get 1 added, and a factor of queries becomes the weights of a norm."""
    layer, size = name.split(".")[2:3], config["head_dim"]
    if name.endswith("layernorm.weight"):
        return {name: tensor + 1}
    if name.endswith(".gate_proj.weight") and "self_attn" in name:
        return {f"blk.{layer[0]}.attn_gate.weight": tensor}
    if name.endswith(".q_proj.weight"):
        norms = dict(q=config["qk_scale_factor"], k=1.0)
        weights = {
            f"blk.{layer[0]}.attn_{part}_norm.weight": torch.full((size,), norms[part]) for part in norms
        }
        return {name: permuted(name, tensor, config), **weights}
    return {name: permuted(name, tensor, config)}


@pytest.mark.parametrize("changes", [{}, dict(num_hidden_layers=5, qk_scale_factor=1.7)])
def test_a_file_of_muse_is_its_checkpoint(changes, root, tmp_path):
    folder = write_family(root, "muse", **changes)
    gguf_files.write(tmp_path / "m.gguf", folder, "muse-glimmer", add_muse, convert_muse)
    assert_equal_to(folder, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "kind, most", [("Q8_0", 1e-3), (gguf_files.like_q4_k_m, 0.15)], ids=["Q8_0", "Q4_K_M"]
)
def test_muse_in_fewer_bits_says_what_its_unpacked_weights_say(kind, most, root, tmp_path):
    folder = write_family(
        root,
        "muse",
        hidden_size=256,
        intermediate_size=256,
        head_dim=64,
        num_attention_heads=4,
        qk_scale_factor=0.3,
    )
    paths = tmp_path / "packed.gguf", tmp_path / "plain.gguf"
    for path, unpacked in zip(paths, (False, True)):
        gguf_files.write(path, folder, "muse-glimmer", add_muse, convert_muse, kind, unpacked)
    assert_equal_files(*paths, most)


def add_granite_swa(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(max(config["layer_rope_theta"]))
    writer.add_array(
        "granite_swa.attention.rope_pattern", [theta > 0 for theta in config["layer_rope_theta"]]
    )
    writer.add_float32("granite_swa.attention.scale", config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == SLIDING for kind in config["layer_types"]])


def convert_granite_swa(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    """Rows of q and k lie in the order of interleaved rotary pairs, and norms and sinks have names that the
    gguf package does not know yet."""
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    own = {"self_attn.sinks": "attn_sinks", "post_attention_layernorm.weight": "ffn_norm"}.get(part)
    tensor = permuted(name, tensor, config)
    return {name if own is None else f"blk.{layer}.{own}.weight": tensor}


def test_a_file_of_granite_swa_is_its_checkpoint(root, tmp_path):
    folder = write_family(root, "granite-swa", layer_rope_theta=[0, 10000.0, 10000.0, 0, 10000.0])
    gguf_files.write(tmp_path / "m.gguf", folder, "granite_swa", add_granite_swa, convert_granite_swa)
    assert_equal_to(folder, tmp_path / "m.gguf")
