"""`shoal quantize`: a checkpoint with its layers' matrices in fewer bits, in the format of
compressed-tensors, which vLLM and transformers read as well.

Tensors are read, rounded and written one by one, under their own names, into as many files as there were.
Embeddings, norms, the output head, a mixture's router, and encoders of images and sounds stay as they are;
draft heads and empty tensors are left out.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.nn.functional as F

from shoal.errors import CheckpointError, ConfigError
from shoal.files.json_file import read_object
from shoal.kernels.quant.fp8_tensor import Fp8Tensor
from shoal.kernels.quant.quantized_tensor import is_projection
from shoal.models.checkpoint_names import split
from shoal.models.layouts.compressed_tensors import FP8, INT4, METHOD
from shoal.models.registry import BY_NAME
from shoal.weights.hub import HUB_FILES
from shoal.weights.loader import check_shapes
from shoal.weights.safetensors import (
    DRAFT_HEAD,
    DTYPES,
    INDEX,
    OTHER_PART,
    PACKED_DTYPES,
    TensorHeader,
    safetensors_headers,
    text_name,
)
from shoal.weights.source import CheckpointFiles

LARGEST_INT4 = 15
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
}
Tensors = dict[str, torch.Tensor]


def quantize(files: CheckpointFiles, to: str, target: Path, group_size: int = 128) -> Path:
    """Writes the checkpoint to the folder `target`, which is new, and is there only when it is whole. `to`:
    "fp8", with a scale for each output and activations rounded token by token, or "int4", with a scale and a
    zero point for each `group_size` inputs. Raises ConfigError, CheckpointError."""
    if files.file is not None or files.config.quantization is not None:
        raise CheckpointError(
            f"{files.path} holds weights in fewer bits already; name a Hugging Face folder whose weights are "
            "plain numbers"
        )
    if target.exists():
        raise ConfigError(f"the folder {target} exists; remove it, or name another one with --output")
    check_shapes(files)
    shards = [
        (path, {name: header for name, header in headers.items() if 0 not in header.shape})
        for path, headers in safetensors_headers(files.folder, DTYPES | PACKED_DTYPES, _written)
    ]
    matrices: set[str] = set()
    stored = BY_NAME[files.config.architecture].tensors
    for _, headers in shards:
        for name, header in headers.items():
            if (own := text_name(name)) is None:
                continue
            parts = list(split(own, header.shape, stored, files.config))
            if not is_projection(parts[0].name):
                continue
            is_cut = len(parts) > 1 and to == "int4" and any(part.shape[0] % 8 for part in parts)
            if len(header.shape) != 2 or is_cut:  # eight outputs' zero points are one number
                raise CheckpointError(
                    f"{name} holds {len(parts)} matrices in one tensor, which are not rounded one by one; "
                    "load the checkpoint with quantization 'fp8' in place of this"
                )
            if to == "int4" and header.shape[1] % group_size:
                raise ConfigError(
                    f"{name} has {header.shape[1]} inputs, which are not whole groups of {group_size}; "
                    "choose another --group-size, such as 64 or 32"
                )
            matrices.add(name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{target.name}-", dir=target.parent) as temporary:
            whole = Path(temporary) / target.name
            _write_folder(files, shards, matrices, to, group_size, whole)
            whole.rename(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error}; name another folder with --output") from None
    return target


def _written(name: str) -> str | None:
    """The Naming of the tensors to write."""
    return None if DRAFT_HEAD.match(name) else name


def _write_folder(
    files: CheckpointFiles,
    shards: list[tuple[Path, dict[str, TensorHeader]]],
    matrices: set[str],
    to: str,
    group_size: int,
    target: Path,
) -> None:
    rounding = _fp8 if to == "fp8" else lambda weight: _int4(weight, group_size)
    target.mkdir()
    weight_map: dict[str, str] = {}
    total = 0
    for path, headers in shards:
        names, size = _write(path, headers, matrices, rounding, target / path.name)
        weight_map |= dict.fromkeys(names, path.name)
        total += size
    if (files.folder / INDEX).exists():
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2))
    for pattern in HUB_FILES:
        for path in files.folder.glob(pattern):
            if path.suffix != ".safetensors" and path.name not in (INDEX, "config.json"):
                shutil.copyfile(path, target / path.name)
    config = read_object(files.folder / "config.json")
    others = {found[0] for _, headers in shards for name in headers if (found := OTHER_PART.match(name))}
    config["quantization_config"] = quantization_config(to, group_size, sorted(others))
    (target / "config.json").write_text(json.dumps(config, indent=2))


def quantization_config(to: str, group_size: int, others: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the `quantization_config` of config.json for this quantization. `others`: beginnings of the
    names of modules that stay as they are."""
    activations: dict[str, Any] | None = None
    if to == "fp8":
        weights: dict[str, Any] = dict(
            num_bits=8, type="float", strategy="channel", symmetric=True, dynamic=False
        )
        activations = dict(num_bits=8, type="float", strategy="token", symmetric=True, dynamic=True)
    else:
        weights = dict(
            num_bits=4, type="int", strategy="group", group_size=group_size, symmetric=False, dynamic=False
        )
    group = dict(targets=["Linear"], weights=weights, input_activations=activations)
    return dict(
        quant_method=METHOD,
        format=FP8 if to == "fp8" else INT4,
        quantization_status="compressed",
        config_groups=dict(group_0=group),
        ignore=["lm_head", "re:.*mlp.gate$", *(f"re:{re.escape(name)}.*" for name in others)],
    )


def _fp8(weight: torch.Tensor) -> Tensors:
    rounded = Fp8Tensor.rounded(weight, _scale_dtype(weight.dtype))
    return {"weight": rounded.data, "weight_scale": rounded.scales.to(_scale_dtype(weight.dtype))}


def _int4(weight: torch.Tensor, group_size: int) -> Tensors:
    """Quantizes so that a group's smallest and largest weight, and 0, are among the 16 values. Nothing is
    clipped, because the few large weights matter more than the squared error says."""
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    scales = ((high - low) / LARGEST_INT4).clamp(min=1e-12).to(_scale_dtype(weight.dtype))
    zeros = (-low / scales.float()).round_().clamp_(0, LARGEST_INT4)
    quants = (groups / scales.float() + zeros).round_().clamp_(0, LARGEST_INT4)
    return {
        "weight_packed": _words(quants.flatten(1)),
        "weight_scale": scales.squeeze(2),
        "weight_zero_point": _words(zeros.squeeze(2).T).T,
        "weight_shape": torch.tensor(weight.shape),
    }


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Packs eight 4-bit numbers of a row into an int32, the first one in its low bits."""
    eights = F.pad(numbers, (0, -numbers.shape[1] % 8)).to(torch.int32).unflatten(1, (-1, 8))
    words = torch.zeros_like(eights[:, :, 0])
    for i in range(8):
        words |= eights[:, :, i] << (4 * i)
    return words


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of stored scales: bfloat16 for bfloat16 weights, else float32, as float16 can't hold
    small ones."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _write(
    source: Path,
    headers: dict[str, TensorHeader],
    matrices: set[str],
    rounding: Callable[[torch.Tensor], Tensors],
    target: Path,
) -> tuple[list[str], int]:
    """Writes one file. Returns the names of its tensors, and their bytes.

    A matrix's output shapes follow from its own shape, so the header is written first."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    with safetensors.safe_open(source, framework="pt", device="cpu") as file, target.open("wb") as out:
        for name, header in headers.items():
            dtype = next(dtype for dtype, known in NAMES.items() if known == header.dtype)
            shape = torch.empty(file.get_slice(name).get_shape(), dtype=dtype, device="meta")
            for part, tensor in _become(name, shape, matrices, rounding):
                size = tensor.numel() * tensor.itemsize
                described[part] = {
                    "dtype": NAMES[tensor.dtype],
                    "shape": list(tensor.shape),
                    "data_offsets": [end, end + size],
                }
                end += size
        text = json.dumps(described).encode()
        text += b" " * (-len(text) % 8)
        out.write(struct.pack("<Q", len(text)) + text)
        for name in headers:
            for _, tensor in _become(name, file.get_tensor(name), matrices, rounding):
                out.write(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return [name for name in described if name != "__metadata__"], end


def _become(
    name: str, tensor: torch.Tensor, matrices: set[str], rounding: Callable[[torch.Tensor], Tensors]
) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors to write in place of one."""
    if name not in matrices:
        return [(name, tensor)]
    if not tensor.is_meta and not tensor.isfinite().all():
        raise CheckpointError(
            f"{name} holds weights that are not finite; the file is damaged, fetch it again"
        )
    module = name.removesuffix(".weight")
    return [(f"{module}.{suffix}", part) for suffix, part in rounding(tensor).items()]
