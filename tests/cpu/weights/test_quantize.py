"""`shoal quantize`: what it writes is what compressed-tensors unpacks in transformers, and close to what it
was."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from shoal.cli.main import main
from shoal.errors import CheckpointError, ConfigError
from shoal.kernels.quant.quantized_tensor import QuantizedTensor
from shoal.weights.loader import check_shapes, checkpoint_tensors
from shoal.weights.quantize import quantize
from shoal.weights.safetensors import INDEX
from shoal.weights.source import CheckpointFiles
from tests import quantized, tiny
from tests.tiny_families import write_family


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tiny model of plain numbers, in two files."""
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(9)
    config = transformers.Qwen3Config(**quantized.SIZES, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(folder, max_shard_size="1MB")
    assert (folder / INDEX).exists()
    tiny.write_tokenizer(folder)
    return folder


# The largest error of a weight, relative to the largest of its output or group.
# In int4 half a step, and as much where the zero point is rounded; scales are rounded to bfloat16.
STEPS = {"fp8": 1 / 16, "int4": 2 / 15 * 1.01}


@pytest.mark.parametrize("to", STEPS)
def test_transformers_reads_what_is_written_as_the_engine_does(to, plain, tmp_path, capsys):
    assert main(["quantize", str(plain), "--to", to, "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    files = CheckpointFiles(tmp_path / "out")
    check_shapes(files)
    ours = dict(checkpoint_tensors(files))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=transformers.CompressedTensorsConfig(dequantize=True)
    )
    before = dict(checkpoint_tensors(CheckpointFiles(plain)))
    assert ours.keys() == before.keys()
    for name, theirs in oracle.state_dict().items():
        if name not in ours:
            assert "scale" in name or "zero_point" in name, name
            continue
        assert isinstance(ours[name], QuantizedTensor) == ("_proj." in name)
        if not isinstance(ours[name], QuantizedTensor):
            assert torch.equal(ours[name], before[name])
            continue
        unpacked = ours[name].dequantize()
        assert torch.equal(unpacked.bfloat16(), theirs.bfloat16()), name
        most = before[name].float().abs().amax(1, keepdim=True)
        assert ((unpacked - before[name].float()).abs() <= STEPS[to] * most + 1e-6).all()


def test_empty_tensors_are_left_out(tmp_path):
    """Regression: the shared experts of a mixture without any, of shape [0, D], ended in torch's RuntimeError."""
    folder = write_family(tmp_path, "glm4-moe", n_shared_experts=0)
    files = CheckpointFiles(quantize(CheckpointFiles(folder), "fp8", tmp_path / "out"))
    check_shapes(files)
    found = load_file(files.folder / "model.safetensors")
    assert found and all(tensor.numel() for tensor in found.values())


@pytest.mark.parametrize("name", ["gemma3-vision", "qwen3.5-vision", "ministral3-vision"])
def test_a_multimodal_checkpoint_keeps_its_encoders_and_names(name, tmp_path):
    """Regression: its tensors were looked for under the names of a causal model, and encoders were left out."""
    folder = write_family(tmp_path, name)
    quantize(CheckpointFiles(folder), "fp8", tmp_path / "out")
    check_shapes(CheckpointFiles(tmp_path / "out"))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    before = {key: tensor for key, tensor in before.items() if not key.startswith("mtp.")}
    assert before.keys() == {key for key in after if not key.endswith("_scale")}
    rounded = {key for key in before if after[key].dtype == torch.float8_e4m3fn}
    assert len(rounded) == sum(key.endswith("_scale") for key in after) > 10
    assert all("language_model." in key for key in rounded)
    assert ("model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in rounded) == ("qwen" in name)
    assert all(torch.equal(before[key], after[key]) for key in before.keys() - rounded)
    assert any("vision" in key or "visual" in key for key in after)
    config = json.loads((tmp_path / "out/config.json").read_text())
    ignored = [rule.removeprefix("re:") for rule in config["quantization_config"]["ignore"][2:]]
    assert ignored and all(
        any(re.match(rule, key) for rule in ignored)
        for key in after
        if "language_model." not in key and "lm_head" not in key
    )


def test_the_tokenizer_and_an_index_of_the_new_tensors_come_along(plain, tmp_path):
    folder = quantize(CheckpointFiles(plain), "int4", tmp_path / "out", 64)
    assert (folder / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()
    index = json.loads((folder / INDEX).read_text())
    written = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"] == written
    size = sum(t.numel() * t.itemsize for p in folder.glob("*.safetensors") for t in load_file(p).values())
    assert index["metadata"]["total_size"] == size


def test_zeros_stay_zeros(plain, tmp_path):
    folder = tmp_path / "zeros"
    folder.mkdir()
    for path in plain.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for path in folder.glob("*.safetensors"):
        save_file({k: torch.zeros_like(v) for k, v in load_file(path).items()}, path, {"format": "pt"})
    for to in STEPS:
        files = CheckpointFiles(quantize(CheckpointFiles(folder), to, tmp_path / to))
        for _, tensor in checkpoint_tensors(files):
            assert not (tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("to", STEPS)
def test_weights_that_are_no_numbers_are_refused_by_name_and_leave_nothing(to, bad, plain, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(plain, folder)
    name, path = "model.layers.1.mlp.down_proj.weight", max(folder.glob("*.safetensors"))
    tensors = load_file(path)
    tensors[name][3, 5] = bad
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} holds weights that are not finite"):
        quantize(CheckpointFiles(folder), to, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_a_folder_that_cannot_be_written_is_named(plain, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["quantize", str(plain), "--to", "fp8", "--output", str(tmp_path / "file/out")]) == 1
    assert f"cannot write {tmp_path / 'file/out'}" in capsys.readouterr().err


def test_the_folder_of_here_is_named_by_its_own_name(plain, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "mine"
    shutil.copytree(plain, folder)
    monkeypatch.chdir(folder)
    assert main(["quantize", ".", "--to", "fp8"]) == 0
    assert capsys.readouterr().out.strip() == "mine-fp8"


def test_bad_requests_are_refused_before_anything_is_written(plain, tmp_path):
    with pytest.raises(ConfigError, match="exists"):
        quantize(CheckpointFiles(plain), "fp8", tmp_path)
    with pytest.raises(ConfigError, match="--group-size"):
        quantize(CheckpointFiles(plain), "int4", tmp_path / "a", 100)
    done = quantize(CheckpointFiles(plain), "fp8", tmp_path / "b")
    with pytest.raises(CheckpointError, match="fewer bits already"):
        quantize(CheckpointFiles(done), "int4", tmp_path / "c")
    assert not (tmp_path / "a").exists() and not (tmp_path / "c").exists()
