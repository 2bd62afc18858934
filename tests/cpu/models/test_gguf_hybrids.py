"""Models with recurrent layers in GGUF files, as llama.cpp's converter writes them: log-probabilities are
transformers' for the checkpoint that the file was written from."""

from __future__ import annotations

import json
import shutil

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.errors import CheckpointError
from shoal.kernels.quant.gguf_tensor import GGUFTensor
from shoal.models.config_gguf import config_from_gguf
from shoal.weights.gguf.header import read_header
from shoal.weights.gguf.tensors import gguf_tensors
from tests import gguf_files
from tests.cpu.models.test_gguf_mixtures import assert_equal_files, assert_equal_to, by_head
from tests.tiny_families import write_family

RECURRENT = ("linear_attention", "mamba", "conv")


def is_recurrent(config: dict, layer: int) -> bool:
    return config["layer_types"][layer] in RECURRENT


def add_shared(writer, config) -> None:
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 1e4))


def add_experts(writer, config, num_experts: int) -> None:
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_delta(writer, config) -> None:
    """Qwen3-Next and Qwen3.5."""
    add_shared(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)
    share = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config["head_dim"] * share))
    if "num_experts" in config:
        add_experts(writer, config, config["num_experts"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def convert_delta(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    """llama.cpp's `modify_tensors`. Qwen3.5's value heads go from all of a key head together to one of each key
    head after another; Qwen3-Next's stay, and its q, k, v and z come apart."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim, moves = config["linear_key_head_dim"], config["linear_value_head_dim"], True
    if config["model_type"] == "qwen3_next":
        moves = False

    def moved(own: torch.Tensor, size: int, dim: int = 0) -> torch.Tensor:
        heads = own.unflatten(dim, (keys, values // keys, size))
        return heads.transpose(dim, dim + 1).flatten(dim, dim + 2) if moves else own

    if name.startswith("mtp."):
        return {}
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return {name: tensor + 1}
    if name.endswith(".shared_expert_gate.weight"):
        return {name: tensor.flatten()}
    part = name.partition(".linear_attn.")[2]
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith(".experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
    if name.endswith(".experts.down_proj"):
        return {f"blk.{layer}.ffn_down_exps.weight": tensor}
    if part == "A_log":
        return {f"blk.{layer}.ssm_a": moved(-tensor.exp(), 1)}
    if part == "dt_bias":
        return {f"blk.{layer}.ssm_dt.bias": moved(tensor, 1)}
    if part in ("conv1d.weight", "in_proj_qkv.weight"):
        first, last = tensor.squeeze().split([2 * keys * key_dim, values * value_dim])
        return {name: torch.cat((first, moved(last, value_dim)))}
    if part == "in_proj_z.weight":
        return {f"blk.{layer}.attn_gate.weight": moved(tensor, value_dim)}
    if part in ("in_proj_a.weight", "in_proj_b.weight"):
        return {name: moved(tensor, 1)}
    if part == "out_proj.weight":
        return {name: moved(tensor, value_dim, 1)}
    if part == "in_proj_qkvz.weight":
        own = values // keys * value_dim
        q, k, v, z = (
            part.flatten(0, 1)
            for part in tensor.unflatten(0, (keys, -1)).split([key_dim, key_dim, own, own], dim=1)
        )
        return {f"blk.{layer}.attn_qkv.weight": torch.cat((q, k, v)), f"blk.{layer}.attn_gate.weight": z}
    return {name: tensor}


def permuted(name: str, tensor: torch.Tensor, config: dict) -> torch.Tensor:
    """Rows of q and k as llama.cpp's converter of Llama puts them."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in heads.items():
        if name.endswith(f".{part}.weight"):
            return tensor.unflatten(0, (config[key], 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor


def convert_mamba(name: str, tensor: torch.Tensor, config: dict, groups: str) -> dict[str, torch.Tensor]:
    if name.endswith(".A_log"):
        return {name: -tensor.exp()[:, None]}
    if name.endswith(".D"):
        return {name: tensor[:, None]}
    if name.endswith(".conv1d.weight"):
        return {name: tensor.squeeze()}
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return {name: tensor.view(config[groups], -1)}
    if name.endswith(".dt_bias"):
        return {name.removesuffix("_bias") + "_proj.bias": tensor}
    return {name: permuted(name, tensor, config)}


def add_mamba(writer, config) -> None:
    """By Granite's names."""
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])


def add_granite(writer, config) -> None:
    add_shared(writer, config)
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([0 if is_recurrent(config, i) else heads for i in range(4)])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_scaling_finetuned(False)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    add_mamba(writer, config)
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if config["num_local_experts"]:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])


def convert_granite(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    layer, own = name.split(".")[2:3], "shexp" if config["num_local_experts"] else ""
    if ".shared_mlp.input_linear." in name or ".block_sparse_moe.input_linear." in name:
        ending = "_exps" if "block_sparse_moe" in name else own and f"_{own}"
        gate, up = tensor.chunk(2, dim=-2)
        return {f"blk.{layer[0]}.ffn_gate{ending}.weight": gate, f"blk.{layer[0]}.ffn_up{ending}.weight": up}
    if ".shared_mlp.output_linear." in name:
        return {f"blk.{layer[0]}.ffn_down{own and '_' + own}.weight": tensor}
    return convert_mamba(name, tensor, config, "mamba_n_groups")


def add_bamba(writer, config) -> None:
    """`attn_rotary_emb` of the published config becomes the number of rotated dimensions."""
    add_shared(writer, config)
    heads, attention = config["num_key_value_heads"], config["attn_layer_indices"]
    writer.add_head_count_kv([heads if i in attention else 0 for i in range(config["num_hidden_layers"])])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"] // 2)
    writer.add_rope_scaling_finetuned(True)
    add_mamba(writer, config)


def convert_bamba(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    return convert_mamba(name, tensor, config, "mamba_n_groups")


def add_nemotron(writer, config) -> None:
    add_shared(writer, config)
    letters = config["hybrid_override_pattern"]
    mlp, size = (
        ("E", config["moe_intermediate_size"]) if "E" in letters else ("-", config["intermediate_size"])
    )
    writer.add_head_count_kv([config["num_key_value_heads"] if letter == "*" else 0 for letter in letters])
    writer.add_feed_forward_length([size if letter == mlp else 0 for letter in letters])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    if mlp == "E":
        add_experts(writer, config, config["n_routed_experts"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])


def convert_nemotron(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    name = name.replace("model.", "backbone.", 1)
    if ".mixer.experts." in name:
        name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
    return convert_mamba(name, tensor, config, "n_groups")


def add_lfm2(writer, config) -> None:
    add_shared(writer, config)
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([0 if is_recurrent(config, i) else heads for i in range(4)])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "num_experts" in config:
        add_experts(writer, config, config["num_experts"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    else:
        size = int(2 * config["intermediate_size"] / 3)
        multiple = config["block_multiple_of"]
        writer.add_feed_forward_length(-(-size // multiple) * multiple)


def convert_lfm2(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    if name.endswith(".expert_bias"):
        return {f"blk.{name.split('.')[2]}.exp_probs_b.bias": tensor}
    if ".experts." in name:
        name = name.removeprefix("model.")
    return {name: tensor.squeeze(1) if ".conv.conv." in name else tensor}


def add_kimi(writer, config) -> None:
    is_full = [not is_recurrent(config, i) for i in range(config["num_hidden_layers"])]
    experts = dict(config, num_experts_per_tok=config["num_experts_per_token"])
    rotary, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    writer.add_head_count_kv([int(full) for full in is_full])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotary)
    writer.add_key_length(rank + rotary)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(config["v_head_dim"])
    add_experts(writer, experts, config["num_experts"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(1)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def convert_kimi_whole(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    """With keys' and values' matrices in one, as the first files have them."""
    return {name: tensor} if name.endswith("kv_b_proj.weight") else convert_kimi(name, tensor, config)


def convert_kimi(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    if name.endswith("_conv1d.weight"):
        return {name: tensor.reshape(1, len(tensor), 1, -1)}
    if name.endswith(".A_log"):
        return {name: -tensor.exp()}
    if name.endswith(".dt_bias"):
        return {name.removesuffix("_bias") + "_proj.bias": tensor}
    dense = ".block_sparse_moe." in name and name.split(".")[-2] in ("gate_proj", "up_proj", "down_proj")
    if dense and "shared_experts" not in name:
        return {name.replace("block_sparse_moe", "mlp"): tensor}
    return by_head(name, tensor, config)


def tied(root, name, **changes):
    return write_family(root, name, tie_word_embeddings=True, **changes)


# name -> the architecture in the file, the checkpoint, its keys and its tensors
FILES = {
    "qwen3.5": ("qwen35", lambda root: write_family(root, "qwen3.5"), add_delta, convert_delta),
    "qwen3-next": (
        "qwen3next",
        lambda root: write_family(root, "qwen3-next", decoder_sparse_step=1),
        add_delta,
        convert_delta,
    ),
    "qwen3.5-moe": (
        "qwen35moe",
        lambda root: text_alone(write_family(root, "qwen3.5-moe")),
        add_delta,
        convert_delta,
    ),
    "granite4-mamba": (
        "granitehybrid",
        lambda root: write_family(root, "granite4-mamba", position_embedding_type="nope"),
        add_granite,
        convert_granite,
    ),
    "granite4-experts": (
        "granitehybrid",
        lambda root: write_family(root, "granite4-experts"),
        add_granite,
        convert_granite,
    ),
    "bamba": ("granitehybrid", lambda root: write_family(root, "bamba"), add_bamba, convert_bamba),
    "nemotron-dense": (
        "nemotron_h",
        lambda root: write_family(root, "nemotron-h", hybrid_override_pattern="M-*M"),
        add_nemotron,
        convert_nemotron,
    ),
    "nemotron-experts": (
        "nemotron_h_moe",
        lambda root: write_family(root, "nemotron-h", hybrid_override_pattern="ME*ME"),
        add_nemotron,
        convert_nemotron,
    ),
    "nemotron-latent": (
        "nemotron_h_moe",
        lambda root: with_letters(
            write_family(root, "nemotron-latent", hybrid_override_pattern="ME*M"), "ME*M"
        ),
        add_nemotron,
        convert_nemotron,
    ),
    "kimi-linear": (
        "kimi-linear",
        lambda root: write_family(root, "kimi-linear", linear_num_heads=6),
        add_kimi,
        convert_kimi,
    ),
    "kimi-linear-whole": (
        "kimi-linear",
        lambda root: write_family(root, "kimi-linear", linear_num_heads=6),
        add_kimi,
        convert_kimi_whole,
    ),
    "lfm2": ("lfm2", lambda root: write_family(root, "lfm2"), add_lfm2, convert_lfm2),
    "lfm2-moe": ("lfm2moe", lambda root: tied(root, "lfm2-moe"), add_lfm2, convert_lfm2),
}


def text_alone(folder):
    """The text model of a multimodal checkpoint as a checkpoint of its own."""
    own = folder.with_name(f"{folder.name}-text")
    if not own.exists():
        shutil.copytree(folder, own)
        text = json.loads((folder / "config.json").read_text())["text_config"]
        text |= {"architectures": ["Qwen3_5MoeForCausalLM"]}
        (own / "config.json").write_text(json.dumps(text))
        tensors = load_file(folder / "model.safetensors")
        tensors = {
            name.replace("language_model.", ""): tensor
            for name, tensor in tensors.items()
            if "visual" not in name
        }
        save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
    return own


def with_letters(folder, letters: str):
    """Nemotron's config with its layers as letters, as it was published first."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "hybrid_override_pattern": letters, "num_hidden_layers": len(letters)})
    )
    return folder


def write(root, tmp_path, name: str, kind: str = "F32"):
    """Returns the checkpoint and the file that was written from it."""
    architecture, checkpoint, metadata, convert = FILES[name]
    folder, path = checkpoint(root), tmp_path / "m.gguf"
    gguf_files.write(path, folder, architecture, metadata, convert, kind)
    return folder, path


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_its_checkpoint(name, root, tmp_path):
    assert_equal_to(*write(root, tmp_path, name))


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("kimi-linear")])
def test_a_file_with_fused_q_k_v_is_its_checkpoint(name, root, tmp_path, monkeypatch):
    """Layers with attention have a tensor of the name that a delta net has for its own."""
    monkeypatch.setattr(gguf, "GGUFWriter", gguf_files.FusingWriter)
    folder, path = write(root, tmp_path, name)
    assert not any(".attn_q." in own for own in read_header(path).tensors)
    assert_equal_to(folder, path)


# sizes that groups of 256 weights divide, and experts that all are chosen
WIDE = {
    "kimi-linear": dict(
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_local_experts=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        linear_num_heads=8,
        linear_head_dim=32,
        kv_lora_rank=32,
        v_head_dim=32,
    ),
    "bamba": dict(hidden_size=256, intermediate_size=256, mamba_d_head=64, num_attention_heads=4),
}


@pytest.mark.parametrize(
    "kind, most",
    # Q6_K becomes 8 bits, and that these models enlarge
    [("Q8_0", 0.01), (gguf_files.like_q4_k_m, 1.0)],
    ids=["Q8_0", "Q4_K_M"],
)
@pytest.mark.parametrize("name", WIDE)
def test_a_file_in_fewer_bits_says_what_its_unpacked_weights_say(name, kind, most, root, tmp_path):
    folder, paths = (
        write_family(root, name, **WIDE[name]),
        (tmp_path / "packed.gguf", tmp_path / "plain.gguf"),
    )
    for path, unpacked in zip(paths, (False, True)):
        gguf_files.write(path, folder, FILES[name][0], *FILES[name][2:], kind, unpacked)
    assert_equal_files(*paths, most)


Q8 = dict(
    hidden_size=64, linear_key_head_dim=32, linear_value_head_dim=32, num_attention_heads=4, head_dim=32
)


def test_moved_value_heads_stay_packed(root, tmp_path):
    """Each matrix of the file is the checkpoint's, row by row and column by column, in as many bits."""
    folder, path = write_family(root, "qwen3.5", **Q8), tmp_path / "m.gguf"
    gguf_files.write(path, folder, "qwen35", add_delta, convert_delta, "Q8_0")
    header = read_header(path)
    config = config_from_gguf(header.metadata, header.shapes, str(path))
    stored = load_file(folder / "model.safetensors")
    own = "model.layers.0.linear_attn"
    queries, keys, values = stored[f"{own}.in_proj_qkv.weight"].split([64, 64, 192])
    expected = {f"{own}.in_proj_{part}.weight": rows for part, rows in zip("qkv", (queries, keys, values))}
    expected |= {name: stored[name] for name in stored if name.startswith(f"{own}.")}
    del expected[f"{own}.in_proj_qkv.weight"]
    found = {name: tensor for name, tensor in gguf_tensors(header, config) if name.startswith(f"{own}.")}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        packed = isinstance(tensor, GGUFTensor)
        assert packed == ("_proj" in name)
        want = expected[name]
        if packed:
            kind = gguf.GGMLQuantizationType.Q8_0
            want = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(want.numpy(), kind), kind))
        torch.testing.assert_close(tensor.dequantize() if packed else tensor, want, rtol=1e-6, atol=1e-6)


def test_experts_may_hold_gate_and_up_in_one_tensor(root, tmp_path):
    def convert(name, tensor, config):
        parts = convert_delta(name, tensor, config)
        stems = [own.removesuffix("ffn_gate_exps.weight") for own in parts if "ffn_gate_exps" in own]
        for stem in stems:
            gate, up = (parts.pop(f"{stem}ffn_{part}_exps.weight") for part in ("gate", "up"))
            parts[f"{stem}ffn_gate_up_exps.weight"] = torch.cat((gate, up), dim=1)
        return parts

    folder = text_alone(write_family(root, "qwen3.5-moe"))
    gguf_files.write(tmp_path / "m.gguf", folder, "qwen35moe", add_delta, convert)
    assert "blk.0.ffn_gate_up_exps.weight" in read_header(tmp_path / "m.gguf").tensors
    assert_equal_to(folder, tmp_path / "m.gguf")


def test_a_layer_without_a_mixer_is_refused_by_its_number(root, tmp_path):
    _, path = write(root, tmp_path, "lfm2")
    header = read_header(path)
    shapes = {name: shape for name, shape in header.shapes.items() if not name.startswith("blk.1.attn")}
    with pytest.raises(
        CheckpointError, match=r"blk\.1 must have one of shortconv\.conv\.weight, attn_q\.weight"
    ):
        config_from_gguf(header.metadata, shapes, str(path))


def test_kimi_linear_with_another_router_is_refused(root, tmp_path):
    _, path = write(root, tmp_path, "kimi-linear")
    header = read_header(path)
    softmax = {**header.metadata, "kimi-linear.expert_gating_func": 1}
    with pytest.raises(CheckpointError, match="expert_gating_func must be 2, got 1"):
        config_from_gguf(softmax, header.shapes, str(path))


def test_value_heads_that_do_not_fill_the_inner_size_are_refused(root, tmp_path):
    _, path = write(root, tmp_path, "qwen3.5")
    header = read_header(path)
    with pytest.raises(
        CheckpointError, match="linear_inner_size must be a multiple of linear_num_value_heads"
    ):
        config_from_gguf({**header.metadata, "qwen35.ssm.inner_size": 71}, header.shapes, str(path))
