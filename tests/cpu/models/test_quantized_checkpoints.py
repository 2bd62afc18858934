"""Checkpoints whose matrices are quantized, made by their own tools, against what those tools unpack from
them."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from shoal import LLM, SamplingParams
from shoal.config import QUANTIZATIONS, EngineConfig
from shoal.engine.resolve import resolve_config
from shoal.engine.runner.capture_sizes import most_captured_tokens
from shoal.errors import CheckpointError
from shoal.kernels.cpu import fp8 as cpu_fp8
from shoal.kernels.cpu import int4 as cpu_int4
from shoal.kernels.cpu import linear as cpu_linear
from shoal.kernels.cpu import ops as cpu_ops
from shoal.kernels.moe import reference
from shoal.kernels.moe.mixture import ExpertWeights
from shoal.kernels.quant.fp8_tensor import Fp8Tensor
from shoal.kernels.quant.int4_tensor import Int4Tensor
from shoal.kernels.quant.quantized_tensor import QuantizedTensor
from shoal.kinds.experts import Activation, ExpertsKind, Router
from shoal.kinds.quantization import Quantization
from shoal.layers.attention import attention_shape
from shoal.layers.experts import Experts
from shoal.layers.matrix import MatrixLayer
from shoal.layers.packed_weight import PackedWeight
from shoal.layers.parallel import TensorParallel
from shoal.models import decoder
from shoal.models.config_json import config_from_json
from shoal.models.configs.fields import ConfigFields
from shoal.models.layouts.registry import BY_NAME, LAYOUTS, read_quantization
from shoal.models.loading import layer_tensors
from shoal.weights.loader import check_shapes, checkpoint_tensors, lies_by_shape
from shoal.weights.quantized import _matrices
from shoal.weights.safetensors import TensorHeader
from shoal.weights.source import CheckpointFiles
from shoal.weights.summary import summarize
from shoal.weights.update import packing_difference
from tests import quantized, tiny
from tests.tiny_families import make_config, write_family

KINDS = [*quantized.SCHEMES, *quantized.BY_INPUTS, *quantized.BY_BLOCKS]
PROMPT = list(range(40, 80))
# Matrices packed by GPTQModel 7.7.0's own code, and what it unpacks from them in float16.
GPTQMODEL = load_file(Path(__file__).parents[1] / "data/gptqmodel.safetensors")
MATRICES = {
    "awq": Quantization("awq", 4, (1, 128), zero_points=True),
    "gptq": Quantization("gptq", 4, (1, 128), zero_points=True, zeros_minus_one=True),
    "gptq_act_order": Quantization("gptq", 4, (1, 128), True, act_order=True, zeros_minus_one=True),
}


# Matrices packed by auto-round 0.16.1's own code, and what it unpacks from them in float16.
AUTO_ROUND = load_file(Path(__file__).parents[1] / "data/auto_round.safetensors")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def joined(name: str) -> tuple[QuantizedTensor, torch.Tensor]:
    stored = {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in GPTQMODEL.items()
        if key.startswith(f"{name}.")
    }
    expected = stored.pop("expected")
    return BY_NAME[MATRICES[name].layout].join(stored, MATRICES[name]), expected


@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_of_gptqmodel_is_what_gptqmodel_unpacks(name):
    tensor, expected = joined(name)
    assert torch.equal(tensor.dequantize(torch.float16), expected)
    assert (tensor.groups is not None) == (name == "gptq_act_order")
    assert torch.equal(tensor.rows(3, 10).dequantize(torch.float16), expected[3:10])
    assert torch.equal(tensor.columns(128, 256).dequantize(torch.float16), expected[:, 128:])


@pytest.mark.parametrize("name", sorted({key.rpartition("/")[0] for key in AUTO_ROUND}))
def test_a_matrix_of_auto_round_is_what_auto_round_unpacks(name):
    stored = {
        key.removeprefix(f"{name}/"): own for key, own in AUTO_ROUND.items() if key.startswith(f"{name}/")
    }
    expected = stored.pop("expected")
    given = dict(quant_method="auto-round", bits=4, group_size=64, packing_format=name.partition(".")[0])
    if name == "gptq 8":  # as GPTQModel stores it, which has g_idx, too
        given = dict(quant_method="gptq", bits=8, group_size=64, desc_act=False, sym=True)
        stored["g_idx"] = torch.arange(128, dtype=torch.int32) // 64
    quantization = read_quantization(ConfigFields(dict(quantization_config=given), "config.json"))
    layout = BY_NAME[quantization.layout]
    shapes = {suffix: tuple(tensor.shape) for suffix, tensor in stored.items()}
    assert layout.matrix_shape(shapes) == expected.shape
    assert {s: own.shape for s, own in layout.tensors(*expected.shape, quantization).items()} == shapes
    assert torch.equal(layout.join(stored, quantization).dequantize(torch.float16), expected)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_the_last_group_of_compressed_tensors_4_bits_may_be_cut_short(zeros, order):
    """Regression: 2,880 inputs, as gpt-oss has them, in groups of 128 were refused."""
    print("seed", torch.manual_seed(10).initial_seed())
    quants, scales = torch.randint(0, 16, (16, 192), dtype=torch.uint8), torch.rand(16, 2).half()
    points = torch.randint(0, 16, (16, 2), dtype=torch.uint8) if zeros else torch.full((16, 2), 8)
    groups = torch.arange(192) // 128
    stored = {
        "weight_packed": quantized.int32s(quants, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([16, 192]),
    }
    stored |= {"weight_zero_point": quantized.int32s(points, 0)} if zeros else {}
    if order:
        groups = groups[torch.randperm(192)]
        stored["weight_g_idx"] = groups.int()
    quantization = Quantization("pack-quantized", 4, (1, 128), zero_points=zeros, act_order=order)
    layout = BY_NAME["pack-quantized"]
    assert {suffix: own.shape for suffix, own in layout.tensors(16, 192, quantization).items()} == {
        suffix: tuple(tensor.shape) for suffix, tensor in stored.items()
    }
    tensor = layout.join(stored, quantization)
    expected = (quants.float() - points.float()[:, groups]) * scales.float()[:, groups]
    assert torch.equal(tensor.dequantize(), expected)
    x = torch.randn(3, 192)
    assert error(cpu_int4.pack([tensor]).linear(x, None), x @ expected.T) < 1e-3


@pytest.mark.parametrize("name", ["packed-int8", "int-quantized"])
def test_the_last_group_of_compressed_tensors_8_bits_may_be_cut_short(name):
    """Regression: 192 inputs in groups of 128 were multiplied by the scales of two groups of 96."""
    print("seed", torch.manual_seed(9).initial_seed())
    quants, scales = torch.randint(-128, 128, (16, 192), dtype=torch.int8), torch.rand(16, 2).half()
    stored = {"weight": quants, "weight_scale": scales}
    if name == "packed-int8":
        words = (quants.view(torch.uint8) ^ 128).view(torch.int32)
        stored = {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([16, 192])}
    quantization = Quantization(name, 8, (1, 128))
    expected = BY_NAME[name].tensors(16, 192, quantization)
    assert {suffix: own.shape for suffix, own in expected.items()} == {
        suffix: tuple(tensor.shape) for suffix, tensor in stored.items()
    }
    tensor = BY_NAME[name].join(stored, quantization)
    of_each = scales.float()[:, torch.arange(192) // 128]
    assert torch.equal(tensor.dequantize(), quants.float() * of_each)


@pytest.mark.parametrize("group, inputs", [(128, 704), (64, 96)])
@pytest.mark.parametrize("name", ["gptq", "gptq-int8", "auto-round-gptq", "awq"])
def test_the_last_group_of_gptq_and_awq_may_be_cut_short(name, group, inputs):
    """Experts of Gemma 4 26B have 704 inputs, which AutoRound and GPTQModel divide into 6 groups."""
    print("seed", torch.manual_seed(8).initial_seed())
    weight, bits = torch.randn(16, inputs), 8 if name == "gptq-int8" else 4
    in_bits = (
        quantized.gptq_in_8_bits
        if bits == 8
        else partial(quantized.by_inputs, kind=name.removeprefix("auto-round-"))
    )
    stored, unpacked = in_bits(weight, group=group)
    if name.startswith("auto"):
        del stored["g_idx"]
    quantization = Quantization(name, bits, (1, group), zero_points=bits == 4, zeros_minus_one=name != "awq")
    shapes = {suffix: tuple(tensor.shape) for suffix, tensor in stored.items()}
    found = {suffix: own.shape for suffix, own in BY_NAME[name].tensors(16, inputs, quantization).items()}
    assert found == shapes
    tensor = BY_NAME[name].join(stored, quantization)
    assert torch.equal(tensor.dequantize(), unpacked) and getattr(tensor, "groups", None) is None
    if isinstance(tensor, Int4Tensor):
        x = torch.randn(3, inputs)
        assert error(cpu_int4.pack([tensor]).linear(x, None), x @ unpacked.T) < 1e-3


def words(numbers: torch.Tensor) -> torch.Tensor:
    """Eight 4-bit numbers of a row in an int32, the first one in its low bits."""
    places = 16 ** torch.arange(8)
    return (numbers.long().unflatten(1, (-1, 8)) * places).sum(2).to(torch.uint32).view(torch.int32)


def test_gptq_s_zero_points_of_0_come_back_as_they_were():
    """GPTQModel subtracts one from all zero points of an int32 at once, and adds it so when it reads."""
    zeros = torch.tensor([[0, 3, 15, 0, 0, 8, 0, 1], [0, 0, 0, 0, 0, 0, 0, 0]])
    quants = torch.randint(0, 16, (8, 16), generator=torch.Generator().manual_seed(4))
    expected = (quants - zeros.T.repeat_interleave(8, 1)) * 0.5
    stored = dict(
        qweight=words(quants).T.contiguous(), scales=torch.full((2, 8), 0.5), g_idx=torch.arange(16) // 8
    )
    for minus_one in (False, True):
        quantization = Quantization("gptq", 4, (1, 8), zero_points=True, zeros_minus_one=minus_one)
        qzeros = words(zeros) - (0x11111111 if minus_one else 0)
        found = BY_NAME["gptq"].join(stored | {"qzeros": qzeros}, quantization)
        assert torch.equal(found.dequantize(), expected)


def test_groups_out_of_order_contradict_a_config_without_act_order():
    stored = {key.rpartition(".")[2]: t for key, t in GPTQMODEL.items() if key.startswith("gptq_act_order.")}
    with pytest.raises(CheckpointError, match="desc_act is false"):
        BY_NAME["gptq"].join(stored, MATRICES["gptq"])
    parts, _ = quantized.gptq_in_8_bits(torch.randn(32, 256))
    parts["g_idx"] = parts["g_idx"].flip(0)
    with pytest.raises(CheckpointError, match="desc_act is false"):
        BY_NAME["gptq-int8"].join(parts, Quantization("gptq-int8", 8, (1, 128), zeros_minus_one=True))


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("name", MATRICES)
def test_products_in_4_bits_are_those_of_the_unpacked_matrix(name, tokens):
    """Minima are rounded to 11 bits, activations to 16."""
    print("seed", torch.manual_seed(1).initial_seed())
    tensor, expected = joined(name)
    x, bias = torch.randn(tokens, 256), torch.randn(32 + 7)
    packed = cpu_int4.pack([tensor, tensor.rows(5, 12)])
    want = torch.cat((expected, expected[5:12])).float()
    assert error(packed.linear(x, bias), x @ want.T + bias) < 1e-3
    assert error(cpu_int4.pack([tensor]).embed(torch.tensor([4, 0, 31])), expected[[4, 0, 31]].float()) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_what_its_tool_unpacks(kind, tmp_path):
    unpacked = quantized.write(tmp_path, kind)
    files = CheckpointFiles(tmp_path)
    check_shapes(files)
    found = dict(checkpoint_tensors(files))
    assert found.keys() == unpacked.keys()
    for name, tensor in found.items():
        assert isinstance(tensor, QuantizedTensor) == ("_proj." in name)
        if isinstance(tensor, QuantizedTensor):
            tensor = tensor.dequantize()
        assert torch.equal(tensor.to(unpacked[name].dtype), unpacked[name]), name


CROSSED = dict(hidden_size=160, intermediate_size=224, num_attention_heads=5, num_key_value_heads=1)


@pytest.mark.parametrize(
    ("kind", "own"),
    [*((kind, dict(hidden_size=512)) for kind in KINDS), ("fp8-blocks", CROSSED)],
    ids=[*KINDS, "fp8-blocks across matrices"],
)
def test_a_matrix_that_holds_q_k_and_v_is_split_as_its_tool_unpacks_it(kind, own, tmp_path):
    """Regression: gate and up of 224 rows each had the scales of other rows, and q, k and v whose rows are not
    whole blocks were refused."""
    sizes = {key: size for key, size in quantized.SIZES.items() if key != "head_dim"}
    config = transformers.Phi3Config(**sizes | own, pad_token_id=0)
    unpacked = quantized.write(tmp_path, kind, config)
    files = CheckpointFiles(tmp_path)
    check_shapes(files)
    found = dict(checkpoint_tensors(files))
    merged = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}
    for layer, (name, parts) in itertools.product(range(config.num_hidden_layers), merged.items()):
        room = name.partition(".")[0]
        names = [f"model.layers.{layer}.{room}.{part}_proj.weight" for part in parts]
        assert all(isinstance(found[own], QuantizedTensor) for own in names)
        whole = unpacked[f"model.layers.{layer}.{name}.weight"]
        assert torch.equal(torch.cat([found[own].dequantize() for own in names]).to(whole.dtype), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_an_engine_computes_what_transformers_computes_with_the_unpacked_weights(kind, dtype, tmp_path):
    """`auto` keeps the weights as they are; a dtype unpacks them. In 4 bits, scales in float32 and
    minima are rounded to float16, and activations to 16 bits."""
    unpacked = quantized.write(tmp_path, kind)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    del config.quantization_config
    oracle = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    oracle.load_state_dict(unpacked)
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(str(tmp_path), device="cpu", dtype=dtype, max_model_len=64) as llm:
        assert llm.config.keep_quantized == (dtype == "auto")
        # With act-order the parts of a merge have each their own.
        names = [name for name in llm.check_weights() if name.endswith(".packed")]
        packed = {re.sub(r"\.\d+\.packed", "", name) for name in names}
        output = llm.generate([PROMPT], params, use_tqdm=False)[0]
    assert len(packed) == (8 if dtype == "auto" else 0)  # four a layer
    rounded = dtype == "auto" and kind.startswith(("int4", *quantized.BY_INPUTS))
    close = 3e-2 if rounded else 2e-3
    for i, position in enumerate(output.prompt_logprobs[1:]):
        for token, found in position.items():
            want = expected[i, token].item()
            assert abs(found.logprob - want) < close * (1 - want / 4)


@pytest.mark.parametrize("kind", ["int4", "fp8-blocks"])
def test_experts_stay_packed_and_are_mixed_as_plain_ones(kind, tmp_path):
    config = transformers.Qwen3MoeConfig(
        **quantized.SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        mlp_only_layers=[],
        tie_word_embeddings=False,
    )
    unpacked = quantized.write(tmp_path / "quantized", kind, config)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(unpacked, plain / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((tmp_path / "quantized/config.json").read_text())
    del written["quantization_config"]
    (plain / "config.json").write_text(json.dumps(written))
    params, found = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), {}
    for folder, dtype in ((tmp_path / "quantized", "auto"), (plain, "float32")):
        options = dict(device="cpu", dtype=dtype, max_model_len=64, skip_tokenizer_init=True)
        with LLM(str(folder), **options) as llm:
            packed = [name for name in llm.check_weights() if name.endswith(".packed")]
            output = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
        # Two layers hold each: q, k, v as one and o; gate, up as one and down of four experts.
        assert len(packed) == (2 * (2 + 8) if dtype == "auto" else 0)
        positions = zip(PROMPT[1:], output.prompt_logprobs[1:])
        found[dtype] = torch.tensor([position[token].logprob for token, position in positions])
    torch.testing.assert_close(found["auto"], found["float32"], rtol=5e-3, atol=2e-2)


def test_experts_that_come_plain_stand_beside_packed_ones():
    print("seed", torch.manual_seed(7).initial_seed())
    kind = ExpertsKind(3, 32, Router(2, renormalize=True))
    experts = Experts(64, kind, TensorParallel.single(), cpu_ops)
    experts.divide()
    layers = {path: layer for path, layer in experts.named_modules() if isinstance(layer, MatrixLayer)}
    oracle = {}
    for layer in layers.values():
        layer.keep(torch.device("cpu"))
    for name, shape, load in layer_tensors(experts, "mlp.experts."):
        expert, matrix = name.split(".")[2:4]
        weight = torch.randn(shape) / 8
        # The first is packed, the second plain, and of the third the parts of a merge differ.
        if expert == "0" or (expert, matrix) == ("2", "gate_proj"):
            tensor = Fp8Tensor.of(weight.to(torch.float8_e4m3fn), torch.rand(shape[0], 1), (1, 0))
            load(tensor, name)
            weight = tensor.dequantize()
        else:
            load(weight, name)
        oracle[expert, matrix] = weight
    for layer in layers.values():
        layer.finish()
    packed = {path for path, layer in layers.items() if isinstance(layer.format, PackedWeight)}
    assert packed == {"groups.0.w13", "groups.0.w2"}
    w13 = torch.stack([torch.cat((oracle[e, "gate_proj"], oracle[e, "up_proj"])) for e in "012"])
    w2 = torch.stack([oracle[e, "down_proj"] for e in "012"])
    weights = ExpertWeights(w13, w2)
    x, logits = torch.randn(9, 64), torch.randn(9, 3)
    for residual in (None, torch.randn(9, 64)):
        want = reference.moe(
            x, logits, Router(2, True), weights, Activation(), None if residual is None else residual.clone()
        )
        got = experts.mix(x, logits, residual)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert residual is None or got is residual


@pytest.mark.parametrize("inputs", [8, 128, 300, 512])
@pytest.mark.parametrize("tokens", [0, 1, 4, 7])
@pytest.mark.parametrize("block", [(1, 0), (0, 0), (128, 128)], ids=str)
def test_fp8_products_are_those_of_the_unpacked_matrix(inputs, tokens, block, monkeypatch):
    print("seed", torch.manual_seed(2).initial_seed())
    outs = 37
    data = (torch.randn(outs, inputs) * 60).to(torch.float8_e4m3fn)
    data.view(torch.uint8)[0, :8] = torch.tensor([0, 1, 7, 0x80, 0x87, 0x7E, 0xFE, 8], dtype=torch.uint8)
    tall, wide = block[0] or outs, block[1] or inputs
    tensor = Fp8Tensor.of(data, torch.rand(-(-outs // tall), -(-inputs // wide)) + 0.1, block)
    x, bias = torch.randn(tokens, inputs), torch.randn(2 * outs)
    matrix = torch.cat((tensor.dequantize(), tensor.dequantize()))
    packed = cpu_fp8.pack([tensor, tensor])
    want = x @ matrix.T + bias
    torch.testing.assert_close(packed.linear(x, bias), want, rtol=1e-5, atol=2e-5 * matrix.abs().max().item())
    ids = torch.tensor([36, 0])
    assert torch.equal(packed.embed(ids), matrix[ids])
    monkeypatch.setattr(cpu_fp8, "LIBRARY", None)
    slow = cpu_fp8.pack([tensor, tensor]).linear(x, bias)
    torch.testing.assert_close(slow, want, rtol=1e-5, atol=2e-5 * matrix.abs().max().item())


def test_every_fp8_number_is_multiplied_as_what_it_is():
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    tensor = Fp8Tensor.of(every.view(-1, 1).expand(-1, 16).contiguous(), torch.ones(254, 1), (1, 0))
    x = torch.zeros(1, 16)
    x[0, 5] = 1.0
    assert torch.equal(cpu_fp8.pack([tensor]).linear(x, None)[0], every.float())


def test_new_weights_lie_where_the_old_ones_lay():
    tensor, _ = joined("gptq")
    first = cpu_int4.pack([tensor])
    assert isinstance(first, cpu_linear.CpuWeight | cpu_linear.TorchWeight)
    again = cpu_int4.pack([tensor], first)
    if isinstance(first, cpu_linear.CpuWeight):
        assert again.data.data_ptr() == first.data.data_ptr()
    fp8 = Fp8Tensor.of(torch.ones(4, 8).to(torch.float8_e4m3fn), torch.ones(1), (0, 0))
    before = cpu_fp8.pack([fp8])
    assert cpu_fp8.pack([fp8], before).tensor.data.data_ptr() == before.tensor.data.data_ptr()


# Families of 2025 and 2026

WIDE = dict(hidden_size=256, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
LATENT = dict(
    q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, head_dim=64
)
DELTA = dict(
    head_dim=128,
    linear_key_head_dim=64,
    linear_num_key_heads=2,
    linear_value_head_dim=64,
    linear_num_value_heads=4,
)
EXPERTS = dict(moe_intermediate_size=128, shared_expert_intermediate_size=128)
FAMILIES = {
    "glm4-moe": WIDE | dict(moe_intermediate_size=128),
    "deepseek-v3": WIDE | LATENT | dict(num_key_value_heads=4, moe_intermediate_size=128),
    "gemma3": WIDE | dict(num_hidden_layers=2),
    "gemma4-shared": WIDE | dict(global_head_dim=128, hidden_size_per_layer_input=128),
    "gemma4-experts": WIDE | dict(global_head_dim=128, moe_intermediate_size=128),
    "ministral3": WIDE,
    "qwen3.5": WIDE | DELTA,
    "lfm2": WIDE | dict(block_auto_adjust_ff_dim=False),
    "lfm2-moe": WIDE | dict(moe_intermediate_size=128),
    "qwen3.5-moe-text": WIDE | DELTA | EXPERTS,
    "qwen3-next": WIDE | DELTA | EXPERTS | dict(decoder_sparse_step=1),
    "granite4-experts": WIDE
    | dict(intermediate_size=128, shared_intermediate_size=128, mamba_n_heads=8, mamba_d_head=64),
    "nemotron-h": WIDE
    | dict(
        head_dim=64,
        mamba_num_heads=8,
        mamba_head_dim=32,
        moe_intermediate_size=128,
        moe_shared_expert_intermediate_size=128,
    ),
}


FORMS = ["int4", "gptq", "awq", "fp8-blocks", "fp8-channel", "fp8-whole"]
# Mamba-2's matrix of z, x, B, C and dt cannot be cut in blocks here.
MAMBA = [
    (name, kind)
    for name in ("granite4-experts", "nemotron-h")
    for kind in ("int4", "gptq", "fp8-channel", "nvfp4", "nvfp4-modelopt", "fp8-modelopt", quantized.MIXED)
]
CASES = [(name, kind) for name in FAMILIES if name not in dict(MAMBA) for kind in FORMS] + MAMBA
CASES += [(name, kind) for name in ("qwen3.5", "qwen3.5-moe-text") for kind in ("nvfp4", "nvfp4-modelopt")]
CASES += [("qwen3.5-moe-text", kind) for kind in (quantized.MIXED, *quantized.MIXED_PRECISION)]
CASES += [("gemma3", kind) for kind in (quantized.PACKED_MIXED, *quantized.MIXED_PRECISION)]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_families_in_fewer_bits_are_what_they_are_unpacked(name, kind, tmp_path):
    """4 bits are unpacked here, as their rounded activations may choose other experts."""
    unpacked = quantized.write(tmp_path / "packed", kind, make_config(name, **FAMILIES[name]))
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(unpacked, plain / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((tmp_path / "packed/config.json").read_text())
    del written["quantization_config"]
    (plain / "config.json").write_text(json.dumps(written))
    dtype = (
        "auto"
        if kind.startswith("fp8") or kind in (quantized.MIXED, *quantized.MIXED_PRECISION)
        else "float32"
    )
    options = dict(device="cpu", dtype=dtype, max_model_len=64, skip_tokenizer_init=True)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(str(tmp_path / "packed"), **options) as llm:
        output = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
    expected = tiny.logprobs(plain, PROMPT)
    for i, position in enumerate(output.prompt_logprobs[1:]):
        for token, found in position.items():
            assert abs(found.logprob - expected[i, token].item()) < 1e-3


@pytest.mark.parametrize(
    "kind, words",
    [
        ("fp8-blocks", dict(fmt="float8_e4m3fn")),
        ("fp8-channel", dict(format="naive-quantized", quantization_status="frozen")),
        ("int8-channel", dict(quantization_status="frozen")),
        ("fp8-channel", dict(sparsity_config=dict(format="dense", sparsity_structure="unstructured"))),
    ],
)
def test_other_words_for_fp8_mean_the_same(kind, words, tmp_path):
    """Regression: MiniMax M2's config was refused, and checkpoints for vLLM of 2024."""
    quantized.write(tmp_path, kind)
    expected = CheckpointFiles(tmp_path).config
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= words
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert CheckpointFiles(tmp_path).config == expected


def test_blocks_of_fp8_may_have_rows_of_two_heads(tmp_path):
    """Regression: scales of blocks were split like rows where each part, but not each head's share of it, was whole
    blocks."""
    config = make_config("qwen3-next", **FAMILIES["qwen3-next"] | dict(head_dim=64))
    unpacked = quantized.write(tmp_path, "fp8-blocks", config)
    found = dict(checkpoint_tensors(CheckpointFiles(tmp_path)))
    names = [name for name in unpacked if name.endswith("self_attn.q_proj.weight")]
    assert names
    for name in names:
        queries_and_gates = unpacked[name].unflatten(0, (4, 2, 64))
        for i, part in enumerate(("q_proj", "gate_proj")):
            expected = queries_and_gates[:, i].flatten(0, 1)
            assert torch.equal(found[name.replace("q_proj", part)].dequantize(), expected)


def in_fp8(key: str, weight: torch.Tensor, block: int) -> dict[str, torch.Tensor]:
    """A matrix, or all experts' in one tensor, in fp8 with its scales: one for each, or one for each block."""
    *stack, rows, columns = weight.shape
    tall, wide = (block, block) if block else (rows, columns)
    filled = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % tall))
    blocks = filled.unflatten(-1, (-1, wide)).unflatten(-3, (-1, tall))
    scales = blocks.abs().amax((-3, -1), keepdim=True) / 448
    whole = (blocks / scales).to(torch.float8_e4m3fn).flatten(-2).flatten(-3, -2)
    packed = whole[..., :rows, :columns].contiguous()
    own = scales.squeeze(-1).squeeze(-2) if block or stack else scales.reshape(())
    activations = f"{key}_activation_scale" if stack else f"{key.removesuffix('weight')}activation_scale"
    return {key: packed, f"{key}_scale_inv": own} | ({} if block else {activations: torch.ones_like(own)})


ONE_BLOCK = dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=2, moe_intermediate_size=64)


@pytest.mark.parametrize(
    "name, block, sizes",
    [
        ("mistral4", 0, {}),
        ("qwen3-vl-moe", 128, dict(moe_intermediate_size=128)),
        ("qwen3-vl-moe-saved", 128, dict(moe_intermediate_size=128)),
        ("qwen3-vl-moe", 128, ONE_BLOCK),
        ("qwen3-vl-moe-saved", 128, ONE_BLOCK),
        ("qwen3-vl-moe", 128, dict(moe_intermediate_size=224, hidden_size=512)),
        ("qwen3-vl-moe-saved", 128, dict(moe_intermediate_size=192)),
        ("qwen3-vl-moe-saved", 128, dict(moe_intermediate_size=224, hidden_size=320)),
    ],
    ids=lambda value: str(value),
)
def test_scales_of_stacked_experts_in_fp8_are_split_with_them(name, block, sizes, tmp_path):
    """Regression: Mistral Small 4 as it is published was refused: a scale for each expert of a tensor. Experts of one
    block, and gate and up whose rows are not whole blocks, were refused, too."""
    folder = write_family(tmp_path, name, **(WIDE | sizes if block else {}))
    weights, packed, plain = load_file(folder / "model.safetensors"), {}, {}
    kept = ("embed", "lm_head", "mlp.gate.", "visual", "norm")
    for key, weight in weights.items():
        own = {key: weight} if any(part in key for part in kept) else in_fp8(key, weight, block)
        packed |= own
        plain[key] = weight
        if len(own) > 1:
            scale = own[f"{key}_scale_inv"]
            for dim in (-2, -1) if block else ():
                scale = scale.repeat_interleave(block, dim).narrow(dim, 0, weight.shape[dim])
            plain[key] = own[key].float() * scale
    config = json.loads((folder / "config.json").read_text())
    scheme = dict(
        activation_scheme="dynamic" if block else "static", weight_block_size=[block] * 2 if block else None
    )
    config["quantization_config"] = dict(quant_method="fp8", **scheme)
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    published = tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_text(json.dumps(config))
    save_file(packed, published / "model.safetensors", metadata={"format": "pt"})
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(str(published), device="cpu", max_model_len=64, skip_tokenizer_init=True) as llm:
        output = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
    expected = tiny.logprobs(folder, PROMPT)
    for i, position in enumerate(output.prompt_logprobs[1:]):
        for token, found in position.items():
            assert abs(found.logprob - expected[i, token].item()) < 1e-3


def test_one_scale_may_be_that_of_all_experts(tmp_path):
    """ModelOpt's Llama 4 in fp8: the experts in one tensor, and a scale for all of them."""
    folder = write_family(tmp_path, "llama4", **WIDE, intermediate_size_mlp=384)
    unpacked = quantized.repack(folder, "fp8-modelopt")
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        parts, plain = quantized.fp8_of_modelopt(stored.pop(name))
        stored[name] = parts.pop("weight")
        stored |= {f"{name}_{suffix}": tensor for suffix, tensor in parts.items()}
        for expert, own in enumerate(plain):
            names = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            pieces = zip(names, own.T.chunk(len(names)))
            room = name.replace("feed_forward", "mlp").rpartition(".")[0]
            unpacked |= {f"{room}.{expert}.{part}.weight": piece for part, piece in pieces}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    files = CheckpointFiles(folder)
    check_shapes(files)
    found = dict(checkpoint_tensors(files))
    experts = [
        name for name in unpacked if ".experts." in name and name.startswith("model") and "mlp" in name
    ]
    assert len(experts) == 2 * 4 * 3
    for name in experts:
        assert torch.equal(found[name].dequantize(), unpacked[name])


@pytest.mark.parametrize(
    "name, room",
    [
        ("llama4", "experts"),
        ("gemma4-experts", "experts"),
        ("gemma4-experts", "moe.experts"),
        ("mistral4", "experts"),
        ("qwen3-vl-moe-saved", "experts"),
        ("qwen3.5-moe", "experts"),
    ],
)
def test_experts_that_are_published_in_one_tensor_are_quantized_one_by_one(name, room, tmp_path):
    """Regression: Gemma 4 26B in NVFP4, and Llama 4 Maverick in fp8 and all that llm-compressor makes of Llama 4, were
    refused: experts have tensors of their own there, not one for all."""
    folder = write_family(tmp_path, name)
    weights, plain = load_file(folder / "model.safetensors"), {}
    for key, weight in weights.items():
        before, _, stack = key.partition(".experts.")
        if not stack or weight.dim() < 3:
            is_early = room == "moe.experts"
            plain[key.replace("router.per_expert", "moe.per_expert") if is_early else key] = weight
            continue
        for expert, own in enumerate(weight.transpose(1, 2) if name == "llama4" else weight):
            parts = ("gate_proj", "up_proj") if stack.startswith("gate_up_proj") else ("down_proj",)
            for part, matrix in zip(parts, own.chunk(len(parts))):
                plain[f"{before}.{room}.{expert}.{part}.weight"] = matrix.contiguous()
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    unpacked = quantized.repack(folder, "fp8-channel")
    files = CheckpointFiles(folder)
    check_shapes(files)
    found = {}
    for key, tensor in checkpoint_tensors(files):
        if (
            expert := re.fullmatch(r"model\.layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight", key)
        ) is not None:
            found[expert.groups()] = tensor.dequantize()
    wanted = {}
    for key, tensor in unpacked.items():
        if (expert := re.fullmatch(r".*layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight", key)) is not None:
            wanted[expert.groups()] = tensor
    assert wanted and found.keys() == wanted.keys()
    for expert, tensor in wanted.items():
        assert torch.equal(found[expert], tensor), expert


# Bad input


@pytest.fixture
def a_gpu(monkeypatch):
    """Returns torch's answer on an A100."""
    properties = SimpleNamespace(total_memory=80 << 30)
    for name, value in (
        ("is_available", True),
        ("device_count", 1),
        ("mem_get_info", (70 << 30, 80 << 30)),
        ("get_device_properties", properties),
        ("get_device_capability", (8, 0)),
        ("get_device_name", "A100"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.mark.parametrize("kind", ["int4", "awq", "gptq-act-order", "mxfp4", "nvfp4"])
def test_a_gpu_keeps_weights_of_4_bits_unless_a_dtype_is_named(kind, tmp_path, a_gpu):
    quantized.write(tmp_path, kind)
    model = CheckpointFiles(tmp_path).config
    assert resolve_config(EngineConfig(model="m", device="cuda"), model, 1000).keep_quantized
    named = EngineConfig(model="m", device="cuda", dtype="bfloat16")
    assert not resolve_config(named, model, 1000).keep_quantized


def scheme(**fields: object) -> dict:
    """A change of the only group of a config."""
    weights = quantized.SCHEMES["int4"][1]
    return dict(config_groups=dict(group_0=dict(targets=["Linear"], weights=weights, **fields)))


CHANGES = [
    (dict(quant_method="bitsandbytes"), "bitsandbytes.*awq, gptq, auto-round, compressed-tensors, fp8"),
    (dict(quant_method=None), "None"),
    (dict(format="marlin-24"), "format 'marlin-24'.*pack-quantized"),
    (dict(config_groups={}), "config_groups"),
    (dict(kv_cache_scheme=dict(num_bits=8)), "kv_cache_scheme"),
    (scheme(input_activations="fp8"), "input_activations 'fp8' is not an object"),
    (scheme(input_activations=dict(quantized.TOKEN, num_bits=4)), "input_activations: num_bits 4"),
    (scheme(input_activations=quantized.INT8_TOKEN), "input_activations: type 'int'"),
    (scheme(output_activations=quantized.TOKEN), "output_activations"),
    (scheme(format="nvfp4-pack-quantized"), "group_0: format 'nvfp4-pack-quantized'"),
]


@pytest.mark.parametrize(("change", "says"), CHANGES, ids=lambda value: str(value)[:40])
def test_a_config_that_is_not_supported_is_refused_by_name(change, says, tmp_path):
    quantized.write(tmp_path, "int4")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=says):
        _ = CheckpointFiles(tmp_path).config


METHODS = [
    (dict(quant_method="gptq", bits=3, group_size=128), "bits 3"),
    (dict(quant_method="gptq", bits=8, group_size=128, sym=False), "sym False"),
    (
        dict(quant_method="gptq", bits=4, group_size=128, dynamic={"+:a": {"bits": 3}}),
        r"dynamic: \+:a: bits 3",
    ),
    (dict(quant_method="gptq", bits=4, group_size=128, dynamic={"a": {"group_size": 32}}), "group_size 32"),
    (dict(quant_method="gptq", bits=8, group_size=128, sym=True, desc_act=True), "desc_act True"),
    (dict(quant_method="gptq", bits=4, group_size=0), "group_size 0"),
    (dict(quant_method="gptq", bits=4, group_size=128, checkpoint_format="marlin"), "marlin"),
    (
        dict(quant_method="gptq", bits=4, group_size=128, checkpoint_format="gptq", format="gptq_v2"),
        "contradict",
    ),
    (dict(quant_method="awq", bits=4, group_size=128, version="gemv"), "gemv"),
    (dict(quant_method="awq", bits=4, group_size=128, format="gemv"), "format 'gemv'"),
    (dict(quant_method="fp8", weight_block_size=[128]), r"weight_block_size \[128\]"),
    (dict(quant_method="fp8"), "weight_block_size None"),
    (dict(quant_method="fp8", weight_block_size=[128, 128], activation_scheme="static"), "static"),
    (dict(quant_method="auto-round", bits=2, group_size=128), "bits 2"),
    (
        dict(quant_method="auto-round", bits=4, group_size=128, packing_format="auto_round:fp8"),
        "packing_format",
    ),
    (dict(quant_method="auto-round", bits=4, group_size=128, act_bits=8), "act_bits 8"),
    (dict(quant_method="auto-round", bits=8, group_size=128, sym=False), "sym False"),
    (dict(quant_method="auto-round", bits=8, group_size=128, packing_format="auto_round:auto_awq"), "bits 8"),
    (dict(quant_method="auto-round", bits=4, group_size=128, rotation_config={"a": 1}), "rotation_config"),
    (dict(quant_method="auto-round", bits=4, group_size=128, extra_config=[1]), "extra_config must have"),
    (
        dict(quant_method="auto-round", bits=4, group_size=128, extra_config={"a.b": {"bits": 3}}),
        "extra_config: a.b: bits 3",
    ),
    (
        dict(quant_method="auto-round", bits=4, group_size=128, extra_config={"a.b": {"group_size": 32}}),
        "extra_config: a.b: group_size 32",
    ),
    (dict(quant_method="modelopt", quant_algo="W4A16_AWQ"), "quant_algo 'W4A16_AWQ'"),
]


@pytest.mark.parametrize(("given", "says"), METHODS, ids=lambda value: str(value)[:60])
def test_each_methods_options_are_checked(given, says, tmp_path):
    quantized.write(tmp_path, "int4")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(quantization_config=given)))
    with pytest.raises(CheckpointError, match=says):
        _ = CheckpointFiles(tmp_path).config


def test_a_group_of_attention_alone_says_nothing_of_weights(tmp_path):
    """llm-compressor's, which are quantized with their cache."""
    quantized.write(tmp_path, "fp8-channel")
    expected = CheckpointFiles(tmp_path).config
    config = json.loads((tmp_path / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["attention"] = dict(targets=["Qwen3Attention"], weights=None, input_activations=quantized.STATIC)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert CheckpointFiles(tmp_path).config == expected
    groups.pop("group_0")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="says nothing about weights"):
        _ = CheckpointFiles(tmp_path).config


@pytest.mark.parametrize("name", [None, False, "weight", "static", True, "group", "dynamic"])
def test_act_order_has_many_names(name, tmp_path):
    quantized.write(tmp_path, "int4")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = name
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert CheckpointFiles(tmp_path).config.quantization.act_order == (name in (True, "group", "dynamic"))


def test_a_version_of_gptq_stands_under_either_name(tmp_path):
    quantized.write(tmp_path, "int4")
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("checkpoint_format", "format"):
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, key: "gptq_v2"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert not CheckpointFiles(tmp_path).config.quantization.zeros_minus_one


def test_two_configs_contradict_each_other(tmp_path):
    quantized.write(tmp_path, "int4")
    config = json.loads((tmp_path / "config.json").read_text())
    config["compression_config"] = config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="both given"):
        _ = CheckpointFiles(tmp_path).config


@pytest.mark.parametrize("first", [False, True])
def test_zero_points_say_which_of_two_layouts_a_matrix_is_in(first):
    """Regression: with and without zero points mixed, a matrix was read without its own, which was then refused."""
    symmetric, asymmetric = (
        Quantization("pack-quantized", 4, (1, 128), zero_points=own) for own in (False, True)
    )
    both = (asymmetric, symmetric) if first else (symmetric, asymmetric)
    quantization = replace(both[0], others=both[1:])
    for own in both:
        stored = BY_NAME[own.layout].tensors(16, 256, own)
        headers = {
            f"a.{name}": TensorHeader(tensor.dtypes[0], tensor.shape) for name, tensor in stored.items()
        }
        assert replace(_matrices(headers, quantization)["a"][0], others=()) == own


def test_two_groups_of_one_layout_do_not_lie_by_shape(tmp_path):
    """Regression: a receiver of weights made every matrix as the config's last group has it."""
    quantized.write(tmp_path, "fp8-channel")
    assert lies_by_shape(CheckpointFiles(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    weights = quantized.FP8 | dict(strategy="block", block_structure=[128, 128])
    config["quantization_config"]["config_groups"]["group_1"] = dict(targets=["re:.*o_proj"], weights=weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not lies_by_shape(CheckpointFiles(tmp_path))


NAME = "model.layers.0.mlp.up_proj"
DAMAGES = [
    ("int4", lambda t: t.pop(f"{NAME}.weight_scale"), f"lacks {NAME}.weight_scale"),
    ("int4", lambda t: t.update({f"{NAME}.weight_scale": torch.ones(384, 3)}), r"\[384, 3\].*\[384, 2\]"),
    ("int4-zero-points", lambda t: t.pop(f"{NAME}.weight_zero_point"), "weight_zero_point"),
    ("fp8-channel", lambda t: t.pop(f"{NAME}.weight_scale"), "F8_E4M3.*scales are missing"),
    ("fp8-blocks", lambda t: t.update({f"{NAME}.weight": torch.ones(384, 256)}), "F32.*F8_E4M3"),
    ("fp8-blocks", lambda t: t.update({f"{NAME}.weight_scale_inv": torch.ones(3, 1)}), r"\[3, 1\].*\[3, 2\]"),
]


@pytest.mark.parametrize(("kind", "damage", "says"), DAMAGES, ids=range(len(DAMAGES)))
def test_missing_scales_and_wrong_shapes_are_refused_before_anything_is_loaded(kind, damage, says, tmp_path):
    quantized.write(tmp_path, kind)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=says):
        check_shapes(CheckpointFiles(tmp_path))


def test_a_head_in_fp8_stands_beside_matrices_in_nvfp4(tmp_path):
    """unsloth's NVFP4 checkpoints of Qwen3.6 and 3.8 are so, and were refused as quantized in two ways."""
    plain = transformers.Qwen3Config(**quantized.SIZES, tie_word_embeddings=False)
    unpacked = quantized.write(folder := tmp_path, "mixed-nvfp4", plain)
    stored = load_file(folder / "model.safetensors")
    parts, head = quantized.compress(stored.pop("lm_head.weight"), "fp8-channel")
    unpacked["lm_head.weight"] = head
    save_file(
        stored | {f"lm_head.{suffix}": tensor for suffix, tensor in parts.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    quantization = CheckpointFiles(folder).config.quantization
    assert [own.layout for own in quantization.every] == ["float-quantized", "nvfp4-pack-quantized"]
    oracle = transformers.AutoModelForCausalLM.from_config(plain, attn_implementation="eager").float().eval()
    oracle.load_state_dict(unpacked)
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    for dtype in ("auto", "float32"):
        with LLM(str(folder), device="cpu", dtype=dtype, max_model_len=64) as llm:
            (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        for i, position in enumerate(output.prompt_logprobs[1:]):
            for token, found in position.items():
                want = expected[i, token].item()
                assert abs(found.logprob - want) < 2e-3 * (1 - want / 4)


def test_each_method_may_be_named_on_the_command_line():
    """Regression: --quantization modelopt, auto-round and others of model cards were refused beside their files."""
    assert {layout.quant_method for layout in LAYOUTS} == {*QUANTIZATIONS}


def test_modelopt_s_own_file_stands_for_a_quantization_config(tmp_path):
    """ModelOpt's first versions left config.json as it was, and vLLM reads the file beside it."""
    unpacked = quantized.write(tmp_path, "fp8-modelopt")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = dict(quant_algo="FP8", kv_cache_quant_algo="FP8", exclude_modules=["lm_head"])
    producer = dict(name="modelopt", version="0.15.1")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(dict(producer=producer, quantization=own)))
    files = CheckpointFiles(tmp_path)
    assert files.config.quantization.layout == "modelopt-fp8"
    found = dict(checkpoint_tensors(files))
    assert torch.equal(found[f"{NAME}.weight"].dequantize(), unpacked[f"{NAME}.weight"])


def test_a_matrix_that_is_plain_and_quantized_is_refused(tmp_path):
    unpacked = quantized.write(tmp_path, "int4")
    tensors = load_file(tmp_path / "model.safetensors") | {f"{NAME}.weight": unpacked[f"{NAME}.weight"]}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{NAME}.weight twice"):
        check_shapes(CheckpointFiles(tmp_path))


def test_weights_of_which_others_are_quantized_do_not_fit_into_the_old_ones_memory(tmp_path):
    unpacked = quantized.write(tmp_path / "ours", "int4")
    quantized.write(tmp_path / "theirs", "int4")
    tensors = load_file(tmp_path / "theirs/model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{NAME}.")}
    plain[f"{NAME}.weight"] = unpacked[f"{NAME}.weight"]
    save_file(plain, tmp_path / "theirs/model.safetensors", metadata={"format": "pt"})
    ours, theirs = CheckpointFiles(tmp_path / "ours"), CheckpointFiles(tmp_path / "theirs")
    assert packing_difference(ours, ours) is None
    assert packing_difference(ours, theirs) == (
        f"its tensor {NAME}.weight is F32, and the engine's is packed from pack-quantized"
    )
    with LLM(str(ours.folder), device="cpu", max_model_len=64) as llm:
        before = llm.check_weights()
        with pytest.raises(CheckpointError, match=f"{NAME}.weight is F32"):
            llm.update_weights(str(theirs.folder))
        assert llm.check_weights() == before


@pytest.mark.parametrize("kind", ["int4", "fp8-blocks"])
def test_a_summary_counts_weights_and_not_what_they_are_packed_in(kind, tmp_path):
    unpacked = quantized.write(tmp_path, kind)
    summary = summarize(CheckpointFiles(tmp_path))
    assert summary.num_parameters == sum(tensor.numel() for tensor in unpacked.values())
    assert summary.quantization == {"int4": "pack-quantized", "fp8-blocks": "fp8-blocks"}[kind]


def test_plain_weights_under_a_quantized_config_are_refused(tmp_path):
    unpacked = quantized.write(tmp_path, "int4")
    save_file(unpacked, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no tensor that ends in \.weight_packed"):
        check_shapes(CheckpointFiles(tmp_path))


def test_scales_that_are_not_numbers_are_refused_with_the_matrix_s_name(tmp_path):
    quantized.write(tmp_path, "fp8-channel")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{NAME}.weight_scale"][3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{NAME}.weight: .*NaN"):
        dict(checkpoint_tensors(CheckpointFiles(tmp_path)))


def test_groups_that_a_shard_cuts_and_scales_beyond_float16_have_no_product_on_a_cpu():
    tensor, _ = joined("gptq_act_order")
    with pytest.raises(CheckpointError, match="tensor_parallel_size"):
        cpu_int4.pack([tensor.columns(0, 64)])
    quants = torch.zeros(4, 64, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="a scale of 70000, which float16"):
        cpu_int4.pack([Int4Tensor.of(quants, torch.full((4, 2), 7e4), None)])
    quants = torch.zeros(4, 40, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="multiples of 32"):
        cpu_int4.pack([Int4Tensor.of(quants, torch.ones(4, 1), None)])


@pytest.mark.parametrize("kind", KINDS)
def test_dummy_weights_lie_as_the_config_says_without_a_file(kind, tmp_path):
    """Each layer's matrices are packed and finite, as in such a checkpoint."""
    quantized.write(tmp_path, kind)
    with LLM(str(tmp_path), device="cpu", max_model_len=64, kv_cache_memory_bytes=16 << 20) as llm:
        lies = {name.partition("/")[0] for name in llm.check_weights()}
    (tmp_path / "model.safetensors").unlink()
    with LLM(
        str(tmp_path), load_format="dummy", device="cpu", max_model_len=64, kv_cache_memory_bytes=16 << 20
    ) as llm:
        assert {name.partition("/")[0] for name in llm.check_weights()} == lies
        (output,) = llm.generate(
            [{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=4, logprobs=1, ignore_eos=True)
        )
    found = [one.logprob for place in output.outputs[0].logprobs for one in place.values()]
    assert len(output.outputs[0].token_ids) == 4 and all(math.isfinite(value) for value in found)


@pytest.mark.parametrize("experts", [0, 4])
def test_matrices_of_fewer_bits_count_for_captured_tokens_before_they_have_memory(experts):
    config = config_from_json(
        dict(
            architectures=["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
            vocab_size=96,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rms_norm_eps=1e-6,
            rope_theta=1e4,
            max_position_embeddings=64,
            num_experts=experts,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            tie_word_embeddings=True,
            norm_topk_prob=True,
        ),
        "config.json",
    )
    backends = {attention_shape(config.attention, 1): None}
    built = [
        decoder.Decoder(config, TensorParallel.single(), cpu_ops, backends, keep_quantized=kept)
        for kept in (False, True)
    ]
    plain, packed = (most_captured_tokens(model) for model in built)
    assert plain == packed < 1 << 40
