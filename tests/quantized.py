"""Tiny checkpoints whose matrices are quantized, written by compressed-tensors' own code or after a layout as
it is published, and what each matrix is when it is unpacked."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

from tests import tiny

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]
GROUP = 128
SIZES = dict(
    vocab_size=tiny.VOCAB,
    hidden_size=256,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=256,
    bos_token_id=256,
    eos_token_id=257,
)
INT4 = dict(num_bits=4, type="int", strategy="group", group_size=GROUP)
FP8 = dict(num_bits=8, type="float", symmetric=True)
BY_INPUTS = ("awq", "gptq", "gptq-act-order", "auto-round", "auto-round-mixed", "gptq-mixed")
INT8 = dict(num_bits=8, type="int", strategy="channel", symmetric=True)
INT8_TOKEN = dict(num_bits=8, type="int", strategy="token", symmetric=True, dynamic=True)
STATIC = dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)
TOKEN = dict(num_bits=8, type="float", strategy="token", symmetric=True, dynamic=True)
# compressed-tensors' name of a format, how weights are quantized, and how activations are
SCHEMES: dict[str, tuple[str, dict, dict | None]] = {
    "int4": ("pack-quantized", INT4 | dict(symmetric=True), None),
    "int4-zero-points": ("pack-quantized", INT4 | dict(symmetric=False), None),
    "int4-channel": (
        "pack-quantized",
        dict(num_bits=4, type="int", strategy="channel", symmetric=True),
        None,
    ),
    "int8": ("pack-quantized", INT4 | dict(num_bits=8, symmetric=True), None),
    "int8-channel": ("int-quantized", INT8, INT8_TOKEN),
    "int8-tensor": (
        "int-quantized",
        INT8 | dict(strategy="tensor"),
        INT8 | dict(strategy="tensor", dynamic=False),
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        dict(
            num_bits=4,
            type="float",
            strategy="group",
            group_size=32,
            symmetric=True,
            scale_dtype="torch.uint8",
            zp_dtype="torch.uint8",
        ),
        None,
    ),
    "mxfp8": (
        "mxfp8-quantized",
        FP8 | dict(strategy="group", group_size=32, scale_dtype="torch.uint8", zp_dtype="torch.uint8"),
        None,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True),
        None,
    ),
    "fp8-channel": ("float-quantized", FP8 | dict(strategy="channel"), TOKEN),
    "fp8-tensor": ("float-quantized", FP8 | dict(strategy="tensor"), TOKEN),
    "fp8-static": ("float-quantized", FP8 | dict(strategy="tensor"), STATIC),
}


def compress(weight: torch.Tensor, kind: str) -> tuple[Tensors, torch.Tensor]:
    """The tensors of one matrix, by suffix, and what compressed-tensors unpacks from them."""
    format, weights, inputs = SCHEMES[kind]
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    args = scheme.weights
    size = args.group_size if "group" in args.strategy else weight.shape[1]
    groups = weight.unflatten(1, (-1, size))
    if args.strategy == "tensor":
        groups = weight.view(1, 1, -1)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    if args.strategy == "tensor":
        scale, zero = scale.view(1), zero.view(1)
    if (args.num_bits, args.type) == (8, "int"):
        scale = scale.half().float()  # as scales are here in memory
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    if kind == "nvfp4":
        # a power of two, so that one over it is exact
        most = generate_gparam(weight.amin(), weight.amax()).log2().floor().exp2()
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=most)
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": most.view(1)}
    compressor = BaseCompressor.load_from_registry(format)
    stored = compressor.compress(state, scheme)
    stored = {name: tensor.contiguous() for name, tensor in stored.items() if tensor is not None}
    if inputs is not None and inputs.get("dynamic") is False:
        stored["input_scale"] = torch.tensor([0.01])
    if kind == "nvfp4":  # it unpacks to bfloat16 by default
        quants = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, dtype=torch.float32)
        most = stored["weight_global_scale"]
        return stored, dequantize(quants, stored["weight_scale"].float(), args=args, global_scale=most)
    return stored, compressor.decompress(stored, scheme)["weight"]


def blocks_of_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As Qwen and DeepSeek store a matrix: 128 x 128 weights share a scale, blocks at the edges are smaller."""
    outs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % 128, 0, -outs % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scales = blocks.abs().amax((1, 3)) / 448
    of_each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:outs, :inputs]
    data = (weight / of_each).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale_inv": scales}, data.float() * of_each


def nvfp4_of_modelopt(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As NVIDIA's ModelOpt stores a matrix: the factor of all scales itself, where compressed-tensors has one over
    it."""
    stored, unpacked = compress(weight, "nvfp4")
    tensors = {
        "weight": stored["weight_packed"],
        "weight_scale": stored["weight_scale"],
        "weight_scale_2": 1 / stored["weight_global_scale"].view(()),
        "input_scale": torch.tensor(0.01),
    }
    return tensors, unpacked


def whole_of_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As Mistral stores a matrix: with a scale for all of it, and one for its input."""
    scale = weight.abs().amax() / 448
    data = (weight / scale).to(torch.float8_e4m3fn)
    stored = {"weight": data, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.01)}
    return stored, data.float() * scale


def fp8_of_modelopt(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As NVIDIA's ModelOpt and AutoFP8 store a matrix in fp8."""
    stored, unpacked = whole_of_fp8(weight)
    names = {"weight": "weight", "weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    return {name: stored[own] for name, own in names.items()}, unpacked


def gptq_in_8_bits(weight: torch.Tensor, group: int = GROUP) -> tuple[Tensors, torch.Tensor]:
    """As GPTQModel stores a matrix in 8 bits: four inputs in an int32, zero points of 128 less one."""
    groups = torch.arange(weight.shape[1]) // group
    scales = torch.stack([part.abs().amax(1) for part in weight.split(group, dim=1)], 1).div(127).half()
    of_each = scales.float()[:, groups]
    quants = (weight / of_each).round().clamp(-127, 127)
    four = (quants.T.to(torch.int64) + 128).unflatten(0, (-1, 4))
    words = (four << torch.tensor([0, 8, 16, 24]).view(1, 4, 1)).sum(1).to(torch.uint32).view(torch.int32)
    zeros = torch.full((scales.shape[1], len(weight) // 4), 0x7F7F7F7F, dtype=torch.int32)
    stored = {"qweight": words.contiguous(), "qzeros": zeros, "scales": scales.T.contiguous()}
    stored["g_idx"] = groups.int()
    return stored, quants * of_each


def rows_of_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As FBGEMM stores a matrix: with a scale for each output."""
    scales = weight.abs().amax(1, keepdim=True) / 448
    data = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale": scales}, data.float() * scales


def nvfp4_of_weights(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As ModelOpt stores a matrix in NVFP4 whose input stays as it is."""
    stored, unpacked = nvfp4_of_modelopt(weight)
    del stored["input_scale"]
    return stored, unpacked


def int32s(quants: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight numbers of 4 bits side by side along `dim` in an int32, number order[i] at bits 4 i and up."""
    eight = quants.to(torch.int32).unflatten(dim, (-1, 8))
    words = torch.zeros_like(eight.select(dim + 1, 0))
    for i, place in enumerate(order):
        words |= eight.select(dim + 1, place) << (4 * i)
    return words


def by_inputs(weight: torch.Tensor, kind: str, group: int = GROUP) -> tuple[Tensors, torch.Tensor]:
    """As AutoAWQ and GPTQModel store a matrix, inputs first. With act-order, inputs are in random groups."""
    inputs = weight.shape[1]
    groups = torch.arange(inputs) // group
    if kind == "gptq-act-order":
        # Matrices that are multiplied with the same activations have the same order.
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    in_order = weight[:, groups.argsort(stable=True)].split(group, dim=1)
    low, high = (torch.stack([edge(part, 1) for part in in_order], 1) for edge in (torch.amin, torch.amax))
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    quants = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, 15)
    unpacked = (quants - zeros[:, groups]) * scales.float()[:, groups]
    stored = {"scales": scales.T}
    if kind == "awq":
        stored |= {"qweight": int32s(quants.T, 1, AWQ_ORDER), "qzeros": int32s(zeros.T, 1, AWQ_ORDER)}
    else:
        stored |= {"qweight": int32s(quants.T, 0), "qzeros": int32s(zeros.T - 1, 1)}
        stored |= {} if kind.startswith("auto-round") else {"g_idx": groups.int()}
    return {name: tensor.contiguous() for name, tensor in stored.items()}, unpacked


BY_BLOCKS = {"fp8-blocks": blocks_of_fp8, "fp8-whole": whole_of_fp8, "nvfp4-modelopt": nvfp4_of_modelopt}
BY_BLOCKS |= {"fp8-modelopt": fp8_of_modelopt, "fp8-auto": fp8_of_modelopt, "fp8-fbgemm": rows_of_fp8}
BY_BLOCKS |= {"nvfp4-weights": nvfp4_of_weights, "int8-gptq": gptq_in_8_bits}
BY_BLOCKS["mxfp8-modelopt"] = partial(compress, kind="mxfp8")
IN_4_AND_8_BITS = ("auto-round-mixed", "gptq-mixed")  # down in 8 bits, other matrices in 4
# as compressed-tensors mixes formats: up and down in the second one, other matrices in the first one
MIXED_PRECISION = {"mixed-nvfp4": ("fp8-channel", "nvfp4"), "mixed-mxfp8": ("fp8-channel", "mxfp8")}
PACKED_MIXED = "mixed-packed"  # down in 8 bits, other matrices in 4, both in pack-quantized
MIXED = "modelopt-mixed"  # up and down in NVFP4, other matrices in fp8


def config_of(kind: str) -> dict:
    """The quantization_config of a checkpoint."""
    if kind == "awq":
        return dict(quant_method="awq", bits=4, group_size=GROUP, version="gemm", zero_point=True)
    if kind.startswith("auto-round"):
        packing = "auto_round:auto_gptq"
        own = {"lm_head": dict(bits=16, data_type="float"), "model.layers.0.mlp.up_proj": dict(sym=False)}
        own |= {} if kind == "auto-round" else {".*down_proj.*": dict(bits=8)}
        return dict(
            quant_method="auto-round",
            bits=4,
            group_size=GROUP,
            sym=True,
            data_type="int",
            packing_format=packing,
            autoround_version="0.14.2",
            extra_config=own,
        )
    if kind == "gptq-mixed":
        dynamic = {"-:lm_head": {}, r"+:.*down_proj": dict(bits=8)}
        own = dict(bits=4, group_size=GROUP, desc_act=False, sym=True, dynamic=dynamic)
        return dict(quant_method="gptq", **own)
    if kind in BY_INPUTS:
        return dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=kind != "gptq", sym=False)
    if kind == "nvfp4-modelopt":
        return dict(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"])
    if kind == "fp8-modelopt":
        return dict(quant_method="modelopt", quant_algo="FP8", ignore=["lm_head"])
    if kind == "int8-gptq":
        return dict(quant_method="gptq", bits=8, group_size=GROUP, desc_act=False, sym=True)
    if kind == "mxfp8-modelopt":
        return dict(quant_method="modelopt", quant_algo="MXFP8", ignore=["lm_head"])
    if kind == "nvfp4-weights":
        return dict(quant_method="modelopt", quant_algo="W4A16_NVFP4", ignore=["lm_head"])
    if kind == "fp8-auto":  # whether the files have scales of inputs or not
        return dict(quant_method="fp8", activation_scheme="dynamic", ignored_layers=["lm_head"])
    if kind == "fp8-fbgemm":
        return dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0, modules_to_not_convert=["lm_head"])
    if kind == "fp8-whole":
        return dict(quant_method="fp8", activation_scheme="static", weight_block_size=None)
    if kind == "fp8-blocks":
        return dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
    if kind == PACKED_MIXED:
        groups = {
            name: dict(targets=[f"re:.*{name}"], weights=SCHEMES[own][1])
            for name, own in (("(q|k|v|o|gate|up)_proj", "int4"), ("down_proj", "int8"))
        }
        return dict(quant_method="compressed-tensors", format="pack-quantized", config_groups=groups)
    if kind in MIXED_PRECISION:
        groups = {}
        for own in MIXED_PRECISION[kind]:
            format, weights, activations = SCHEMES[own]
            targets = [r"re:.*(up|down)_proj" if groups else r"re:.*(q|k|v|o|gate)_proj"]
            groups[own] = dict(format=format, targets=targets, weights=weights, input_activations=activations)
        return dict(
            quant_method="compressed-tensors",
            format="mixed-precision",
            quantization_status="compressed",
            ignore=["re:.*norm"],
            config_groups=groups,
        )
    format, weights, activations = SCHEMES[kind]
    return dict(
        quant_method="compressed-tensors",
        format=format,
        quantization_status="compressed",
        ignore=["lm_head"],
        config_groups=dict(group_0=dict(targets=["Linear"], weights=weights, input_activations=activations)),
    )


def write(
    folder: Path, kind: str, config: transformers.PretrainedConfig | None = None
) -> dict[str, torch.Tensor]:
    """Writes a tiny qwen3, or a model of `config`, whose layers' matrices are quantized. Returns the whole
    state dict, unpacked."""
    torch.manual_seed(3)
    config = config or transformers.Qwen3Config(**SIZES, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(
                    0, 0.6 if "embed" in name or "lm_head" in name else 2.2 / weight.shape[-1] ** 0.5
                )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)
    return repack(folder, kind)


def repack(folder: Path, kind: str, left: str = "lm_head") -> dict[str, torch.Tensor]:
    """Quantizes the layers' matrices of a checkpoint in plain numbers, but for names that begin with `left`. Returns
    the whole state dict, unpacked."""
    quantize = BY_BLOCKS.get(kind) or partial(by_inputs if kind in BY_INPUTS else compress, kind=kind)
    stored, unpacked, layers = {}, {}, {}
    matrices = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.startswith(left) or not name.endswith(matrices):
            stored[name] = unpacked[name] = weight
            continue
        module = name.removesuffix(".weight")
        if kind == MIXED:
            is_nvfp4 = "up_proj" in name or "down_proj" in name
            quantize = nvfp4_of_modelopt if is_nvfp4 else fp8_of_modelopt
            layers[module] = dict(quant_algo="NVFP4", group_size=16) if is_nvfp4 else dict(quant_algo="FP8")
        if kind in MIXED_PRECISION:
            quantize = partial(compress, kind=MIXED_PRECISION[kind]["up_proj" in name or "down_proj" in name])
        if kind == PACKED_MIXED:
            quantize = partial(compress, kind="int8" if "down_proj" in name else "int4")
        in_8_bits = kind in IN_4_AND_8_BITS and "down_proj" in name
        parts, unpacked[name] = (gptq_in_8_bits if in_8_bits else quantize)(weight)
        stored |= {f"{module}.{suffix}": tensor for suffix, tensor in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = (
        dict(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)
        if kind == MIXED
        else config_of(kind)
    )
    (folder / "config.json").write_text(json.dumps(written))
    return unpacked
