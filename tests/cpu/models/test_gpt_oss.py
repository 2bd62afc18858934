"""gpt-oss as it is published: experts of a layer in one tensor, in MXFP4, which stay packed while they load."""

from __future__ import annotations

import json
import random
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal import LLM, SamplingParams
from shoal.errors import CheckpointError
from shoal.layers.experts import ExpertMatrix
from shoal.layers.packed_weight import PackedWeight
from shoal.models.checkpoint_names import Stack, split
from shoal.models.config_json import config_from_json
from shoal.models.mixtures.gpt_oss import ARCHITECTURE
from shoal.weights.loader import check_shapes
from shoal.weights.quantize import quantize
from shoal.weights.source import CheckpointFiles
from tests import tiny
from tests.tiny_families import write_family

# of a gpt-oss, whose stacks do not ask for it
CONFIG = config_from_json(
    dict(architectures=["GptOssForCausalLM"], vocab_size=9, hidden_size=64, intermediate_size=64)
    | dict(num_hidden_layers=2, num_attention_heads=8),
    "config.json",
)
PROMPT = random.Random(3).choices(range(256), k=40)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("gpt-oss"), "gpt-oss")


def answer(model: Path, **options: object) -> tuple[list[int], torch.Tensor]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    with LLM(str(model), device="cpu", max_model_len=64, **options) as llm:
        (output,) = llm.generate([PROMPT], params)
    positions = zip(PROMPT[1:], output.prompt_logprobs[1:])
    return output.outputs[0].token_ids, torch.tensor(
        [position[token].logprob for token, position in positions]
    )


def experts_of(llm: LLM) -> list[ExpertMatrix]:
    return [m for m in llm.core.ranks.runner.model.modules() if isinstance(m, ExpertMatrix)]


def test_experts_stay_packed(published: Path) -> None:
    with LLM(str(published), device="cpu", max_model_len=64) as llm:
        assert all(isinstance(matrix.format, PackedWeight) for matrix in experts_of(llm))
        assert not llm.core.ranks.runner.model.layers[0].mlp.gate.weight.is_meta
    _, packed = answer(published)
    _, unpacked = answer(published, dtype="float32")
    torch.testing.assert_close(packed, unpacked, rtol=5e-3, atol=2e-2)


def test_made_up_experts_are_packed_and_the_rest_is_plain(published: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((published / name).read_bytes())
    with LLM(str(tmp_path), device="cpu", max_model_len=64, load_format="dummy") as llm:
        assert all(isinstance(matrix.format, PackedWeight) for matrix in experts_of(llm))
        assert not isinstance(llm.core.ranks.runner.model.layers[0].self_attn.o_proj.format, PackedWeight)
        assert llm.generate([PROMPT], SamplingParams(max_tokens=2, ignore_eos=True))


def test_a_stack_with_missing_scales_is_refused_by_name(published: Path, tmp_path: Path) -> None:
    tensors = load_file(published / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((published / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.experts\.0\.down_proj\.scales"):
        check_shapes(CheckpointFiles(tmp_path))


def test_parts_of_a_stack_are_each_experts_matrices() -> None:
    name, tensor = "model.layers.7.mlp.experts.gate_up_proj", torch.arange(2 * 3 * 8).view(2, 3, 8)
    parts = {part.name: part for part in split(name, (2, 3, 8), ARCHITECTURE.tensors, CONFIG)}
    assert list(parts) == [
        f"model.layers.7.mlp.experts.{e}.{matrix}.weight"
        for e in (0, 1)
        for matrix in ("gate_proj", "up_proj")
    ]
    up = parts["model.layers.7.mlp.experts.1.up_proj.weight"]
    assert up.shape == (4, 3) and torch.equal(up.take(tensor), tensor[1, :, 1::2].T)
    (bias, _, _, _) = split(f"{name}_bias", (2, 8), ARCHITECTURE.tensors, CONFIG)
    assert bias.name.endswith("experts.0.gate_proj.bias")
    assert torch.equal(bias.take(tensor[:, 0]), tensor[0, 0, 0::2])


def test_names_beside_a_stack_are_kept_or_renamed() -> None:
    def names(name: str) -> list[str]:
        return [
            part.name
            for part in split(name, (6,), {"mlp.router": "mlp.gate", "mlp.experts.{}.w1": "mlp.{}"}, CONFIG)
        ]

    assert names("model.layers.0.mlp.router.bias") == ["model.layers.0.mlp.gate.bias"]
    assert names("model.layers.0.mlp.experts.12.w1.weight") == ["model.layers.0.mlp.12.weight"]
    for kept in ("model.norm.weight", "model.layers.0.mlp.router_norm.weight", "lm_head.weight"):
        assert names(kept) == [kept]


def test_a_stack_of_odd_rows_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"gate_up_proj has shape \[2, 5, 3\].*2 equal parts"):
        list(
            split(
                "model.layers.0.gate_up_proj",
                (2, 5, 3),
                {"gate_up_proj": Stack(("{}.gate", "{}.up"))},
                CONFIG,
            )
        )


def test_new_weights_come_stacked_as_well(tmp_path: Path) -> None:
    """A trainer of transformers has the experts of a layer in one tensor."""
    folder = write_family(tmp_path, "gpt-oss-plain")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=64, load_format="dummy") as llm:
        made_up = llm.generate([PROMPT], params)[0].outputs[0].token_ids
        llm.update_weights_from_tensors(load_file(folder / "model.safetensors"))
        loaded = llm.generate([PROMPT], params)[0].outputs[0].token_ids
    assert loaded == tiny.greedy(folder, PROMPT, 12) != made_up


def test_stacked_experts_are_not_rounded_by_shoal_quantize(tmp_path: Path) -> None:
    files = CheckpointFiles(write_family(tmp_path, "gpt-oss-plain"))
    with pytest.raises(CheckpointError, match=r"down_proj holds 6 matrices.*quantization 'fp8'"):
        quantize(files, "fp8", tmp_path / "fp8")


def test_experts_become_fp8_while_they_load(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "gpt-oss-plain")
    with LLM(str(folder), device="cpu", max_model_len=64, quantization="fp8") as llm:
        assert all(isinstance(matrix.format, PackedWeight) for matrix in experts_of(llm))
        assert llm.generate([PROMPT], SamplingParams(max_tokens=2, ignore_eos=True))


def write_gguf(folder: Path, path: Path) -> Path:
    """Writes the checkpoint as llama.cpp's converter does: gate and up apart, and MXFP4 in ggml's blocks."""
    config, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_token_list([f"token {i}" for i in range(config["vocab_size"])])
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.sinks": "attn_sinks.weight",
        "mlp.router": "ffn_gate_inp",
        "mlp.experts.down_proj": "ffn_down_exps",
        **{f"self_attn.{of}_proj": f"attn_{'output' if of == 'o' else of}" for of in "qkvo"},
    }
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

    def add(name: str, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        if scales is None:
            writer.add_tensor(name, values.float().contiguous().numpy())
            return
        codes = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)  # [E, O, I / 32, 32]
        halves = codes[..., :16] | (codes[..., 16:] << 4)
        blocks = torch.cat((scales.unsqueeze(-1), halves), dim=-1).flatten(-2).contiguous()
        writer.add_tensor(name, blocks.numpy(), raw_dtype=gguf.GGMLQuantizationType.MXFP4)

    for key, tensor in tensors.items():
        if key.endswith("_scales"):
            continue
        scales = tensors[key.replace("_blocks", "_scales")] if key.endswith("_blocks") else None
        layer, _, own = key.removeprefix("model.layers.").partition(".")
        if key.removesuffix(".weight") in whole:
            add(f"{whole[key.removesuffix('.weight')]}.weight", tensor, None)
        elif own.startswith("mlp.experts.gate_up_proj"):
            parameter = "bias" if own.endswith("_bias") else "weight"
            for i, part in enumerate(("gate", "up")):
                rows = None if scales is None else scales[:, i::2]
                add(f"blk.{layer}.ffn_{part}_exps.{parameter}", tensor[:, i::2], rows)
        elif own in names:
            add(f"blk.{layer}.{names[own]}", tensor, None)
        else:
            stem = (
                own.removesuffix("_blocks")
                .removesuffix("_bias")
                .removesuffix(".weight")
                .removesuffix(".bias")
            )
            parameter = "bias" if own.endswith("bias") else "weight"
            add(f"blk.{layer}.{names[stem]}.{parameter}", tensor, scales)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("options", [dict(dtype="float32"), {}], ids=str)
def test_a_gguf_file_computes_what_the_folder_does(tmp_path: Path, options: dict) -> None:
    """A file does not say the activation's limit, which is 7 in all published models."""
    published = write_family(tmp_path, "gpt-oss", swiglu_limit=7.0)
    path = write_gguf(published, tmp_path / "m.gguf")
    tokens, logprobs = answer(path, skip_tokenizer_init=True, **options)
    want_tokens, want = answer(published, **options)
    assert tokens == want_tokens or not options
    torch.testing.assert_close(logprobs, want, rtol=1e-3 if options else 5e-3, atol=1e-3 if options else 2e-2)
    with LLM(str(path), device="cpu", max_model_len=64, skip_tokenizer_init=True) as llm:
        assert all(isinstance(matrix.format, PackedWeight) for matrix in experts_of(llm))
