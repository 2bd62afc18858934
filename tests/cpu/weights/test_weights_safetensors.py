"""Hugging Face folders: tensors from one file or many, and every way a folder can be damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shoal.errors import CheckpointError
from shoal.weights.safetensors import safetensors_tensors

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b.bias": torch.ones(4, dtype=torch.bfloat16),
    "c.weight": torch.zeros(2, 2).half(),
}


def write(folder: Path, sharded: bool) -> Path:
    if not sharded:
        save_file(TENSORS, folder / "model.safetensors")
        return folder
    file_of = {name: f"model-{i}.safetensors" for i, name in enumerate(TENSORS)}
    for name, file in file_of.items():
        save_file({name: TENSORS[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return folder


@pytest.mark.parametrize("sharded", [False, True])
def test_every_tensor_comes_once_as_it_is_stored(sharded, tmp_path):
    tensors = list(safetensors_tensors(write(tmp_path, sharded)))
    assert sorted(name for name, _ in tensors) == sorted(TENSORS)
    for name, tensor in tensors:
        assert tensor.dtype == TENSORS[name].dtype and torch.equal(tensor, TENSORS[name])


@pytest.mark.parametrize("sharded", [False, True])
def test_a_second_copy_of_the_weights_is_left_alone(sharded, tmp_path):
    """Regression: without an index, as Ministral 3 3B is published, both files were read, and refused."""
    save_file({"other": torch.ones(1)}, write(tmp_path, sharded) / "consolidated.safetensors")
    assert {name for name, _ in safetensors_tensors(tmp_path)} == set(TENSORS)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_truncated_file_is_refused_with_the_tensor_that_is_cut(sharded, tmp_path):
    path = write(tmp_path, sharded) / ("model-0.safetensors" if sharded else "model.safetensors")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=rf"{path.name}.*truncated: the tensor \w+\.\w+ ends at byte"):
        list(safetensors_tensors(tmp_path))


@pytest.mark.parametrize(
    "content", [b"", b"short", bytes(64), b"\xff" * 64, b"\x08" + bytes(7) + b"not json"]
)
def test_a_file_that_is_no_safetensors_file_is_refused_by_name(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        list(safetensors_tensors(tmp_path))


def test_a_missing_shard_is_refused_by_name(tmp_path):
    (write(tmp_path, sharded=True) / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors.*missing.*b\.bias"):
        list(safetensors_tensors(tmp_path))


def test_a_tensor_that_only_the_index_knows_is_refused_by_name(tmp_path):
    save_file({"x": torch.ones(1)}, write(tmp_path, sharded=True) / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors.*c\.weight"):
        list(safetensors_tensors(tmp_path))


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_refused_by_name(index, tmp_path):
    (write(tmp_path, sharded=True) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        list(safetensors_tensors(tmp_path))


@pytest.mark.parametrize(
    "other, hint", [(None, "complete"), ("pytorch_model.bin", "convert"), ("model.gguf", r"\.gguf")]
)
def test_a_folder_without_weights_says_what_it_holds_instead(other, hint, tmp_path):
    if other:
        (tmp_path / other).touch()
    with pytest.raises(CheckpointError, match=hint):
        list(safetensors_tensors(tmp_path))
