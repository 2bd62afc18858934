"""check_weights: files that differ from the hub's, and weights that are not finite, are refused before
anything is loaded."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal import LLM, SamplingParams
from shoal.errors import CheckpointError
from shoal.weights.check import verify_weights
from shoal.weights.gguf.header import read_header
from shoal.weights.source import resolve
from tests import tiny
from tests.cpu.weights.test_weights_gguf import write_gguf


@pytest.fixture
def engine_options():
    return {"dtype": "float32", "max_model_len": 64, "device": "cpu", "check_weights": True}


def with_weight(
    folder: Path, into: Path, name: str, value: float, dtype: torch.dtype = torch.float32
) -> Path:
    """A copy whose tensor `name` has this value in its middle."""
    shutil.copytree(folder, into)
    weights = {key: tensor.to(dtype) for key, tensor in load_file(folder / "model.safetensors").items()}
    flat = weights[name].view(-1)
    flat[flat.numel() // 2] = value
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    return into


def hub_cache(folder: Path, root: Path) -> Path:
    """The snapshot of a made cache, as huggingface_hub lays it out: blobs named by sha256 (weights) or by
    git, and links to them."""
    snapshot, blobs = root / "models--org--name/snapshots/1234abcd", root / "models--org--name/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        content = path.read_bytes()
        name = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if path.suffix in (".safetensors", ".gguf"):
            name = hashlib.sha256(content).hexdigest()
        (blobs / name).write_bytes(content)
        (snapshot / path.name).symlink_to(Path("../../blobs") / name)
    return snapshot


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_whole_weights_of_any_dtype_are_taken(folder, tmp_path, dtype):
    verify_weights(resolve(str(with_weight(folder, tmp_path / "m", "model.norm.weight", 300.0, dtype))))


@pytest.mark.parametrize(
    "value, dtype",
    [
        (float("nan"), torch.float32),
        (float("inf"), torch.float16),
        (-1e30, torch.bfloat16),
        (70000.0, torch.float32),
    ],
)
def test_a_weight_that_is_no_number_or_absurd_is_refused_with_tensor_and_file(folder, tmp_path, value, dtype):
    bad = with_weight(folder, tmp_path / "bad", "model.layers.1.mlp.up_proj.weight", value, dtype)
    with pytest.raises(
        CheckpointError,
        match=r"bad: the tensor model\.layers\.1\.mlp\.up_proj\.weight of "
        r"shape .*1 of 4608",
    ):
        verify_weights(resolve(str(bad)))


def test_a_packed_weight_that_is_no_number_is_refused_with_tensor_and_file(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", "Q8_0")
    verify_weights(resolve(str(path)))
    info = read_header(path).tensors["blk.1.ffn_down.weight"]
    content = bytearray(path.read_bytes())
    content[info.offset + 34 : info.offset + 36] = np.float16("nan").tobytes()  # the second group's scale
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=r"m\.gguf: the tensor model\.layers\.1\.mlp\.down_proj\.weight "
        r".*nan among.*32 of",
    ):
        verify_weights(resolve(str(path)))


def test_an_engine_refuses_at_start_and_lives_on_unchanged_after_an_update(folder, build, tmp_path):
    bad = with_weight(folder, tmp_path / "bad", "model.norm.weight", float("nan"))
    with pytest.raises(CheckpointError, match=r"bad: the tensor model\.norm\.weight"):
        LLM(str(bad), device="cpu", check_weights=True)
    llm = build()
    sums, params = llm.check_weights(), SamplingParams(max_tokens=4, temperature=0)
    before = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
    with pytest.raises(CheckpointError, match=r"bad: the tensor model\.norm\.weight"):
        llm.update_weights(bad)
    assert llm.weights_version == 0 and llm.check_weights() == sums
    assert llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids == before


@pytest.mark.parametrize("name, kind", [("model.safetensors", "sha256"), ("config.json", "sha1")])
def test_a_file_of_the_hubs_cache_that_has_changed_is_refused_by_its_checksum(root, tmp_path, name, kind):
    snapshot = hub_cache(tiny.write_model(root, "llama"), tmp_path)
    files = resolve(str(snapshot))
    verify_weights(files)
    target = (snapshot / name).resolve()
    content = bytearray(target.read_bytes())
    if name.endswith("json"):
        content = json.dumps(json.loads(content) | {"rms_norm_eps": 1e-4}).encode()
    else:
        content[-1] ^= 1  # the last bit of a weight: a number as good as the one before
    target.write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=rf"{name} has the {kind} [0-9a-f]+ instead of "
        rf"{target.name}.*remove {target}",
    ):
        verify_weights(resolve(str(snapshot)))
