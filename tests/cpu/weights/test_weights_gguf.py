"""GGUF files: written by the gguf package, read back under Hugging Face names. Damage:
test_checkpoint_fuzz.py."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from shoal.errors import CheckpointError
from shoal.kernels.quant.gguf_tensor import GGUFTensor
from shoal.model_config import ModelConfig
from shoal.models.config_gguf import config_from_gguf
from shoal.models.registry import BY_GGUF
from shoal.weights.gguf.header import read_header, read_longrope, read_rope_factors
from shoal.weights.gguf.tensors import gguf_tensors
from tests import gguf_files
from tests.cpu.weights.test_weights_quantized import random_rows

SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
# every architecture that has a GGUF name, with sizes of its own where it needs some; then variants
CHANGES = {
    "qwen3": dict(head_dim=32),
    "qwen3moe": dict(head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "granite": dict(
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=2.0,
        mlp_bias=True,
    ),
}
GEMMA = dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=9)
CHANGES |= {
    "gemma2": dict(GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": dict(GEMMA, num_hidden_layers=7),
    "gemma": dict(head_dim=16),
}
CHANGES |= {
    "smollm3": dict(num_hidden_layers=5),
    "phi3": dict(num_key_value_heads=2, sliding_window=9),
    "mistral3": dict(
        head_dim=16,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e6,
            factor=8.0,
            beta_fast=32.0,
            beta_slow=1.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.5,
        ),
    ),
    "seed_oss": dict(head_dim=16, attention_out_bias=True),
    "ernie4_5": dict(head_dim=16),
    "hunyuan-dense": dict(head_dim=16),
    "exaone4": dict(num_hidden_layers=5, sliding_window=9),
}
CHANGES = {name: dict(pad_token_id=0) | changes for name, changes in CHANGES.items()}
# an architecture's name in GGUF files -> the config class of its text model, where the class's name says so
CONFIGS = {"gemma3": "Gemma3Text"}
VARIANTS = {
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "olmo2-windows": ("Olmo3", dict(num_hidden_layers=5, sliding_window=9)),
    "phi3-long": (
        "Phi3",
        dict(
            num_attention_heads=2,
            max_position_embeddings=128,
            original_max_position_embeddings=16,
            pad_token_id=0,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=10000.0,
                original_max_position_embeddings=16,
                partial_rotary_factor=0.75,
                short_factor=[1.0 + i / 10 for i in range(12)],
                long_factor=[1.0 + i for i in range(12)],
            ),
        ),
    ),
}
# tests/cpu/models/test_gpt_oss.py and test_gguf_*.py write the files of these
ELSEWHERE = {
    "gpt-oss",
    "glm4moe",
    "deepseek2",
    "gemma4",
    "muse-glimmer",
    "granite_swa",
    "laguna",
    "llama4",
    "ernie4_5-moe",
    "minimax-m2",
    "mistral4",
    "dots1",
    "afmoe",
    "arcee",
    "command-r",
    "hunyuan-moe",
    "exaone-moe",
    "chatglm",
    "glm4",
    "cohere2",
}
MODELS = {
    name: (CONFIGS.get(name, architecture.hf_class.removesuffix("ForCausalLM")), CHANGES.get(name, {}))
    for name, architecture in BY_GGUF.items()
    if name not in ELSEWHERE and not architecture.gguf.layers
} | VARIANTS
NUMBERS = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
# llama.cpp's converters of these are LlamaModel and classes under it, which permute q and k
PERMUTED = ("llama", "granite", "smollm3", "mistral3")
ZERO_CENTRED = ("gemma", "gemma2", "gemma3")  # the converter adds 1 to the weights of norms


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleaves the two halves of each head's rows, as llama.cpp's converter of Llama does with q and k."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, name: str, kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Writes a random model as llama.cpp's converter does; returns what its tensors, dequantized, should be
    by Hugging Face name."""
    config_class, changes = MODELS[name]
    architecture = name if name in BY_GGUF else name.partition("-")[0]
    config = getattr(transformers, f"{config_class}Config")(**SIZES | changes)
    torch.manual_seed(seed)
    state = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, config)
    names = gguf.get_tensor_name_map(NUMBERS[architecture], config.num_hidden_layers)
    expected = {}
    for key, tensor in state.items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = torch.randn_like(tensor).numpy()
        # transformers 5 stacks and merges what checkpoints hold one by one
        if ".experts.gate_up_proj" in key:
            prefix = key.removesuffix("gate_up_proj")
            half = weight.shape[1] // 2
            parts = {
                f"{prefix}gate_proj.weight": weight[:, :half],
                f"{prefix}up_proj.weight": weight[:, half:],
            }
        elif ".experts.down_proj" in key:
            parts = {f"{key}.weight": weight}
        else:
            parts = {key: weight}
        for hf_name, part in parts.items():
            write_tensor(
                writer, names, architecture, config, hf_name, np.ascontiguousarray(part), kind, expected
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def write_metadata(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * ropes.get("partial_rotary_factor", 1.0)))
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"token {i} \u00e9" for i in range(config.vocab_size)])
    writer.add_token_scores([float(i) for i in range(config.vocab_size)])
    writer.add_eos_token_id(5)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if (rope := ropes.get("full_attention", ropes))["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "longrope":
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        factor = math.sqrt(1 + math.log(scale) / math.log(config.original_max_position_embeddings))
        writer.add_rope_scaling_attn_factors(factor)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.float32(rope[f"{kind}_factor"]))
    if config.model_type in ("phi3", "olmo3", "exaone4") and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("olmo3", "exaone4"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if hasattr(config, "query_pre_attn_scalar"):
        writer.add_sliding_window(config.sliding_window)
        if config.final_logit_softcapping is not None:
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if hasattr(config, "logits_scaling"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def write_tensor(writer, names, architecture, config, hf_name, weight, kind, expected) -> None:
    if architecture in ZERO_CENTRED and "norm" in hf_name:
        weight = weight + 1
    stored = weight
    if architecture in PERMUTED and ("q_proj" in hf_name or "k_proj" in hf_name):
        stored = permute(
            weight, config.num_attention_heads if "q_proj" in hf_name else config.num_key_value_heads
        )
    number = gguf.GGMLQuantizationType["F32" if weight.ndim == 1 else kind]
    gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
    assert gguf_name, hf_name
    writer.add_tensor(gguf_name, gguf.quants.quantize(stored, number), raw_dtype=number)
    rounded = gguf.quants.dequantize(gguf.quants.quantize(weight, number), number)
    if ".experts." in hf_name:
        stem, _, projection = hf_name.partition(".experts.")
        expected |= {f"{stem}.experts.{e}.{projection}": rounded[e] for e in range(len(rounded))}
    else:
        expected |= dict(parts_of(hf_name, rounded, config))


def parts_of(hf_name, weight, config):
    """The decoder's tensors that one of a checkpoint holds."""
    name, heads = hf_name, (config.num_attention_heads, *[config.num_key_value_heads] * 2)
    for own, other in (("query_layernorm", "q_norm"), ("key_layernorm", "k_norm")):
        name = name.replace(own, other)
    if "qkv_proj" in name or "gate_up_proj" in name:
        shares = heads if "qkv" in name else (1, 1)
        edges = np.cumsum(shares)[:-1] * len(weight) // sum(shares)
        of_attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        parts = of_attention if "qkv" in name else ("mlp.gate_proj", "mlp.up_proj")
        stem = ".".join(name.split(".")[:3])
        yield from zip([f"{stem}.{part}.weight" for part in parts], np.split(weight, edges))
    else:
        yield name, weight


def read(path: Path) -> tuple[ModelConfig, dict[str, torch.Tensor | GGUFTensor]]:
    header = read_header(path)
    factors = read_rope_factors(header), read_longrope(header)
    config = config_from_gguf(header.metadata, header.shapes, str(path), *factors)
    return config, dict(gguf_tensors(header, config))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("name", MODELS)
def test_tensors_come_under_their_names_with_q_and_k_unpermuted(name, kind, tmp_path):
    expected = write_gguf(tmp_path / "m.gguf", name, kind)
    config, tensors = read(tmp_path / "m.gguf")
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        quantized = kind.startswith("Q") and tensor.shape[-1:] != tensor.shape
        assert isinstance(tensor, GGUFTensor) == quantized, key
        plain = tensor.dequantize() if isinstance(tensor, GGUFTensor) else tensor.float()
        assert tuple(tensor.shape) == expected[key].shape and np.array_equal(plain.numpy(), expected[key]), (
            key
        )
    assert config.tie_word_embeddings == ("lm_head.weight" not in expected) and config.vocab_size == 96


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", MODELS)
def test_fused_q_k_v_come_apart_under_their_names(name, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "GGUFWriter", gguf_files.FusingWriter)
    path = tmp_path / "model.gguf"
    expected = write_gguf(path, name, kind)
    assert any(".attn_qkv." in own for own in read_header(path).tensors)
    config, tensors = read(path)
    assert config.qkv_bias == any(own.endswith("q_proj.bias") for own in expected)
    assert tensors.keys() == expected.keys()
    for own, tensor in tensors.items():
        plain = tensor.dequantize() if isinstance(tensor, GGUFTensor) else tensor
        np.testing.assert_array_equal(plain.float().numpy(), expected[own], err_msg=own)


def test_fused_q_k_v_of_a_wrong_height_are_refused_with_their_shape(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "GGUFWriter", gguf_files.FusingWriter)
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3", "F32")
    header = read_header(path)
    metadata = {**header.metadata, "qwen3.attention.head_count_kv": 1}
    config = config_from_gguf(metadata, header.shapes, str(path))
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.attn_qkv\.weight has shape .* does not hold q, k and v of"
    ):
        dict(gguf_tensors(header, config))


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_small_model_equals_what_transformers_makes_of_the_file(name, tmp_path):
    write_gguf(tmp_path / "m.gguf", name, "Q8_0")
    state = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).state_dict()
    _, tensors = read(tmp_path / "m.gguf")
    assert tensors.keys() == state.keys()
    for key, tensor in tensors.items():
        assert torch.equal(tensor.dequantize() if isinstance(tensor, GGUFTensor) else tensor, state[key]), key


def test_metadata_reads_as_the_gguf_package_reads_it(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_bool("some.bool", True)
    writer.add_int8("some.int8", -3)
    writer.add_uint64("some.uint64", 2**63)
    writer.add_float64("some.float64", 0.1)
    writer.add_float32("some.float32", 0.1)
    writer.add_string("some.string", "naïve 東京")
    writer.add_array("some.strings", ["", "a", "é\n"])
    writer.add_array("some.ints", [1, -2, 3])
    writer.add_array("some.floats", [0.5, 1.25])
    writer.add_array("some.bools", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields = {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
    assert read_header(path).metadata == fields


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_read_as_the_gguf_package_reads_them(kind, tmp_path):
    data = random_rows(kind, 64, 512)
    path = with_tensor(tmp_path / "m.gguf", "blk.0.ffn_down.weight", data, gguf.GGMLQuantizationType[kind])
    tensor = read(path)[1]["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(tensor, GGUFTensor) and tensor.kind == kind and tensor.shape == (64, 512)
    assert np.array_equal(
        tensor.dequantize().numpy(), gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    )


def test_rope_factors_of_a_llama3_file_become_its_config(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    header = with_tensor(tmp_path / "m.gguf", "rope_freqs.weight", factors)
    assert read_rope_factors(read_header(header)) == tuple(factors.tolist())
    config, tensors = read(header)
    rope = config.attention.rope
    assert rope.kind == "factors" and rope.factors == tuple(factors.tolist())
    assert "rope_freqs.weight" not in tensors and not any("rope" in name for name in tensors)


def with_tensor(path: Path, name: str, data: np.ndarray, number: int | None = None) -> Path:
    """A llama file of two tensors: embeddings and this one."""
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer, transformers.LlamaConfig(**SIZES))
    writer.add_tensor("token_embd.weight", np.zeros((96, 64), dtype=np.float32))
    writer.add_tensor(name, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GG",
        b"GGUF",
        b"GGUF" + bytes(50),
        b"GGUF" + bytes([3, 0, 0, 0]) + b"\xff" * 40,
        b"PK\x03\x04" + bytes(99),
    ],
)
def test_a_foreign_file_is_refused_by_name(content, tmp_path):
    path = tmp_path / "foreign.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"foreign\.gguf"):
        read_header(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf"):
        read_header(tmp_path / "nowhere.gguf")


def test_a_truncated_file_is_refused_with_the_first_tensor_that_is_cut(tmp_path):
    path = with_tensor(tmp_path / "m.gguf", "output_norm.weight", np.ones(64, dtype=np.float32))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"m\.gguf is truncated: the tensor output_norm\.weight"):
        read_header(path)


def test_an_unsupported_quantization_is_refused_with_tensor_and_type(tmp_path):
    data = np.zeros((64, 84), dtype=np.uint8)
    path = with_tensor(tmp_path / "m.gguf", "blk.0.ffn_up.weight", data, gguf.GGMLQuantizationType.Q2_K)
    with pytest.raises(CheckpointError, match=r"m\.gguf.*blk\.0\.ffn_up\.weight has type Q2_K.*Q6_K"):
        read_header(path)


def test_a_tensor_without_a_place_is_refused_by_name(tmp_path):
    path = with_tensor(tmp_path / "m.gguf", "blk.0.attn_sinks.weight", np.ones(4, dtype=np.float32))
    with pytest.raises(CheckpointError, match=r"m\.gguf.*attn_sinks"):
        read(path)


def test_q_of_a_wrong_height_is_refused_with_its_shape(tmp_path):
    path = with_tensor(tmp_path / "m.gguf", "blk.0.attn_q.weight", np.ones((48, 64), dtype=np.float32))
    with pytest.raises(CheckpointError, match=r"attn_q\.weight has shape \[48, 64\].*64 rows"):
        read(path)
