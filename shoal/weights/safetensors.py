"""The tensors of a Hugging Face folder's safetensors files, one by one, as views of the memory-mapped files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors
import torch

from shoal.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def safetensors_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Raises CheckpointError naming the file, and the tensor where there is one."""
    for path, names in shards(folder).items():
        with _reading(path), safetensors.safe_open(path, framework="pt", device="cpu") as file:
            held = set(file.keys())
            for name in names or sorted(held):
                if name not in held:
                    raise CheckpointError(f"{path} does not hold the tensor {name}, which {INDEX} says it does; fetch both again")
                yield name, file.get_tensor(name)


def safetensors_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor, from the files' headers alone. Raises CheckpointError as safetensors_tensors does."""
    shapes = {}
    for path, names in shards(folder).items():
        with _reading(path), safetensors.safe_open(path, framework="pt", device="cpu") as file:
            held = set(file.keys())
            for name in names or held:
                if name not in held:
                    raise CheckpointError(f"{path} does not hold the tensor {name}, which {INDEX} says it does; fetch both again")
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def shards(folder: Path) -> dict[Path, list[str]]:
    """Each file with the tensors to take from it; an empty list: all. The index decides if there is one."""
    index = folder / INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} holds no *.safetensors file" + _other_formats(folder))
        return {path: [] for path in files}
    try:
        file_of = json.loads(index.read_bytes())["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a readable index of tensors ({type(error).__name__}: {error}); fetch it again") from None
    result: dict[Path, list[str]] = {}
    for name, file in file_of:
        result.setdefault(folder / str(file), []).append(name)
    for path, names in result.items():
        if not path.exists():
            raise CheckpointError(f"the shard {path} is missing ({len(names)} tensors, the first is {names[0]}); fetch it again")
    return result


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {_what_is_cut_off(path) or error}; fetch it again") from None


def _what_is_cut_off(path: Path) -> str:
    """The first tensor that a truncated file no longer holds whole; "" if it is damaged otherwise."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            size = path.stat().st_size
            if length > size:
                return ""
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error):
        return ""
    ends = sorted((8 + length + info["data_offsets"][1], name) for name, info in header.items() if name != "__metadata__")
    cut = [(end, name) for end, name in ends if end > size]
    return f"it is truncated: the tensor {cut[0][1]} ends at byte {cut[0][0]}, the file at {size}" if cut else ""


def _other_formats(folder: Path) -> str:
    other = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
    return f" but {other[0]}: convert to safetensors, or name a .gguf file itself" if other else "; is the download complete?"
