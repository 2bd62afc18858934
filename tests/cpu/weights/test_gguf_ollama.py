"""GGUF files of Ollama's own converters, with images' and sounds' tensors in the text model's file: log-probabilities are
transformers' for the checkpoint that the file was written from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import gguf
import numpy as np
import pytest
import torch

from shoal.errors import CheckpointError
from shoal.weights.gguf.header import read_header
from shoal.weights.gguf.ollama import as_llama_cpp
from shoal.weights.loader import check_shapes
from shoal.weights.source import resolve
from tests import gguf_files, tiny, tiny_families
from tests.cpu.models.test_gguf_families import add_gemma4, convert_gemma4
from tests.cpu.models.test_gguf_hybrids import (
    add_delta,
    add_nemotron,
    convert_delta,
    convert_nemotron,
    permuted,
)
from tests.cpu.models.test_gguf_mixtures import assert_equal_to
from tests.tiny_families import FULL, QWEN_VISION, SHARED, SLIDING, write_family

# The names and dimensions are Ollama's, the sizes are not.
OTHER_TENSORS = {
    "v.patch_embd.weight": (8, 3, 4, 4),
    "v.blk.0.attn_k.weight": (8, 8),
    "v.blk.0.attn_output.weight": (8, 8),
    "v.blk.0.attn_qkv.weight": (24, 8),
    "v.clamp_data": (32,),
    "a.blk.0.conv_dw.weight": (8, 5),
    "mm.input_projection.weight": (48, 8),
    "mtp.fc.weight": (48, 96),
}


def add_gemma3(writer: gguf.GGUFWriter, config: dict) -> None:
    add_heads(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(config["rope_parameters"][FULL]["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"][SLIDING]["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config["rope_parameters"][FULL]["factor"])


def convert_gemma3(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    return {name: tensor + 1 if "norm" in name else tensor}


def add_heads(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])


def add_mistral3(writer: gguf.GGUFWriter, config: dict) -> None:
    add_heads(writer, config)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def convert_mistral3(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    return {name: permuted(name, tensor, config)}


def add_qwen_vl(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    if "moe_intermediate_size" in config:
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def convert_qwen_vl(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    if "visual" in name:
        return {}
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith(".experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
    if name.endswith(".experts.down_proj"):
        return {f"blk.{layer}.ffn_down_exps.weight": tensor}
    return {name: tensor}


@dataclass(frozen=True)
class Case:
    """Ollama's file of a family and its differences from llama.cpp's. Keys are without the architecture's
    prefix."""

    family: str
    architecture: str
    metadata: Callable
    convert: Callable
    ollamas: str = ""  # Ollama's name of the architecture; empty: llama.cpp's
    changes: dict = field(default_factory=dict)  # to the text config
    lacks: tuple[str, ...] = ()
    keys: dict = field(default_factory=dict)  # llama.cpp's -> Ollama's
    tensors: dict = field(default_factory=dict)  # the end of a name -> Ollama's


BETAS = {
    "rope.scaling.yarn_beta_fast": "rope.scaling.beta_fast",
    "rope.scaling.yarn_beta_slow": "rope.scaling.beta_slow",
    "rope.scaling.yarn_log_multiplier": "rope.scaling.mscale_all_dim",
    "attention.temperature_scale": "rope.scaling_beta",
}
DT = {".ssm_dt.bias": ".ssm_dt"}
ROPES = {
    SLIDING: dict(rope_type="default", rope_theta=10000.0),
    FULL: dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
}
ROPE_KEYS = ("rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor")
EPS = "attention.layer_norm_rms_epsilon"
CASES = {
    "gemma3": Case("gemma3-long", "gemma3", add_gemma3, convert_gemma3, lacks=(*ROPE_KEYS, EPS)),
    "gemma3-nested-ropes": Case(
        "gemma3-long",
        "gemma3",
        add_gemma3,
        convert_gemma3,
        lacks=(*ROPE_KEYS[2:], EPS),
        keys={"rope.freq_base": "rope.global.freq_base", "rope.freq_base_swa": "rope.local.freq_base"},
    ),
    "gemma4": Case("gemma4-shared", "gemma4", add_gemma4, convert_gemma4),
    "gemma4-experts": Case(
        "gemma4-experts",
        "gemma4",
        add_gemma4,
        convert_gemma4,
        tensors={".ffn_down_exps.scale": ".ffn_gate_inp.per_expert_scale"},
    ),
    "ministral3": Case("ministral3-vision", "mistral3", add_mistral3, convert_mistral3, keys=BETAS),
    "mistral-small3": Case("mistral-vision", "mistral3", add_mistral3, convert_mistral3),
    "qwen3.5": Case("qwen3.5-vision", "qwen35", add_delta, convert_delta, tensors=DT),
    "qwen3.5-experts": Case("qwen3.5-moe", "qwen35moe", add_delta, convert_delta, tensors=DT),
    "qwen2.5vl": Case("qwen2.5-vl", "qwen2vl", add_qwen_vl, convert_qwen_vl, ollamas="qwen25vl"),
    "qwen3vl": Case("qwen3-vl", "qwen3vl", add_qwen_vl, convert_qwen_vl),
    "qwen3vl-experts": Case("qwen3-vl-moe", "qwen3vlmoe", add_qwen_vl, convert_qwen_vl),
    "nemotron-omni": Case(
        "nemotron-h",
        "nemotron_h_moe",
        add_nemotron,
        convert_nemotron,
        ollamas="nemotron_h_omni",
        changes=dict(hybrid_override_pattern="ME*ME"),
    ),
}
MROPE = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1])
FAMILIES = {
    "gemma3-long": (
        "Gemma3Config",
        dict(
            text_config=dict(
                head_dim=16,
                num_hidden_layers=6,
                sliding_window=tiny_families.WINDOW,
                query_pre_attn_scalar=16,
                max_position_embeddings=131072,
                rms_norm_eps=1e-6,
                rope_parameters=ROPES,
            ),
            vision_config=dict(tiny_families.VISION, model_type="siglip_vision_model", image_size=28),
            mm_tokens_per_image=1,
        ),
        None,
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        dict(
            text_config=dict(rope_parameters=dict(MROPE, mrope_section=[2, 1, 1])),
            vision_config=dict(
                depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=48
            ),
        ),
        None,
    ),
    "qwen3-vl": (
        "Qwen3VLConfig",
        dict(
            text_config=dict(head_dim=16, rope_parameters=dict(MROPE, mrope_section=[4, 2, 2])),
            vision_config=dict(QWEN_VISION, deepstack_visual_indexes=[0]),
        ),
        None,
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoeConfig",
        dict(
            text_config=dict(
                {key: value for key, value in SHARED.items() if not key.startswith("shared")},
                head_dim=16,
                rope_parameters=dict(MROPE, mrope_section=[4, 2, 2]),
            ),
            vision_config=dict(QWEN_VISION, deepstack_visual_indexes=[0]),
        ),
        None,
    ),
}


class OllamasWriter(gguf.GGUFWriter):
    """Writes names and tensors as Ollama's converter does."""

    case: Case

    def write_header_to_file(self, path=None) -> None:
        case, own = self.case, self.case.ollamas or self.case.architecture
        prefix, metadata = f"{case.architecture}.", self.kv_data[0]
        for key in case.lacks:
            metadata.pop(prefix + key, None)
        for key, other in case.keys.items():
            if prefix + key in metadata:
                metadata[prefix + other] = metadata.pop(prefix + key)
        for key in [key for key in metadata if key.startswith(prefix)]:
            metadata[f"{own}.{key.removeprefix(prefix)}"] = metadata.pop(key)
        metadata["general.architecture"].value = own
        # as those files have them: more tokens than rows of the embedding
        metadata["tokenizer.ggml.tokens"].value.append("<image>")
        self.add_uint32("tokenizer.ggml.padding_token_id", 0)
        self.add_uint32(f"{own}.vision.block_count", 1)
        tensors = self.tensors[0]
        for end, other in case.tensors.items():
            for name in [name for name in tensors if name.endswith(end)]:
                tensors[name.removesuffix(end) + other] = tensors.pop(name)
        for name, shape in OTHER_TENSORS.items():
            self.add_tensor(name, np.ones(shape, np.float16))
        super().write_header_to_file(path)


@pytest.fixture
def write(root, tmp_path, monkeypatch):
    for name, family in FAMILIES.items():
        monkeypatch.setitem(tiny_families.FAMILIES, name, family)

    def write(name: str):
        case = CASES[name]
        monkeypatch.setattr(OllamasWriter, "case", case, raising=False)
        monkeypatch.setattr(gguf, "GGUFWriter", OllamasWriter)
        folder = write_family(root, case.family, **case.changes)
        gguf_files.write(tmp_path / "m.gguf", folder, case.architecture, case.metadata, case.convert)
        return folder, tmp_path / "m.gguf"

    return write


@pytest.mark.parametrize("name", CASES)
def test_the_text_model_of_ollamas_file_is_its_checkpoint(name, write):
    assert_equal_to(*write(name))


def test_a_line_at_the_start_counts_the_tensors_that_are_left_out(write, caplog):
    _, path = write("gemma3")
    files = resolve(str(path))
    with caplog.at_level(logging.INFO):
        check_shapes(files)
    assert f"{len(OTHER_TENSORS)} tensors of images, sounds or draft heads are left out" in caplog.text
    whole = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    assert files.quantized_bytes == whole - sum(2 * int(np.prod(shape)) for shape in OTHER_TENSORS.values())
    assert len(files.metadata["tokenizer.ggml.tokens"]) == files.config.vocab_size == tiny.VOCAB


def test_a_file_of_llama_cpp_is_not_changed(root, tmp_path):
    path = tmp_path / "m.gguf"
    gguf_files.write(path, write_family(root, "gemma4"), "gemma4", add_gemma4, convert_gemma4)
    header = read_header(path)
    assert as_llama_cpp(header) == header


def test_ollamas_gemma_4_has_the_tokenizer_of_gemma_4(write):
    _, path = write("gemma4")
    header = read_header(path)
    stored = {**header.metadata, "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "gemma4"}
    usual = as_llama_cpp(header.__class__(path, stored, header.tensors))
    assert usual.metadata["tokenizer.ggml.model"] == "gemma4"


def test_a_file_without_an_architecture_keeps_its_tokenizer(write):
    """Regression: with tensors of images it ended in a KeyError, and not in the error of its config."""
    _, path = write("gemma3")
    header = read_header(path)
    stored = {key: value for key, value in header.metadata.items() if key != "general.architecture"}
    stored["tokenizer.ggml.model"] = "gpt2"
    usual = as_llama_cpp(header.__class__(path, stored, header.tensors))
    assert usual.left_out and usual.metadata["tokenizer.ggml.model"] == "gpt2"


def test_another_tensor_without_a_place_is_still_refused(root, tmp_path):
    path = tmp_path / "m.gguf"
    gguf_files.write(
        path,
        write_family(root, "gemma4"),
        "gemma4",
        lambda writer, config: (
            add_gemma4(writer, config),
            writer.add_tensor("blk.0.extra.weight", np.ones((4, 4), np.float32)),
        ),
        convert_gemma4,
    )
    with pytest.raises(CheckpointError, match=r"holds the tensor blk\.0\.extra\.weight"):
        check_shapes(resolve(str(path)))
