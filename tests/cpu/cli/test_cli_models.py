"""`shoal models` and `shoal pull` on caches of a test's own."""

import json

import pytest

from shoal.cli.main import main
from shoal.weights.packaged_models import SMOLLM2


def words(capsys, *arguments):
    """(exit code, standard output, standard error)"""
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """An empty cache of Shoal, and one of the hub library with a model of three bytes."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "shoal"))
    repo = tmp_path / "hub" / "models--org--little"
    for folder in ("blobs", "refs", "snapshots/abc123"):
        (repo / folder).mkdir(parents=True)
    (repo / "blobs" / "f00").write_text("{ }")
    (repo / "refs" / "main").write_text("abc123")
    (repo / "snapshots" / "abc123" / "config.json").symlink_to("../../blobs/f00")
    (tmp_path / "hub" / "datasets--org--words" / "snapshots").mkdir(parents=True)
    return tmp_path


def listed(capsys, caches, *more):
    code, out, _ = words(capsys, "models", "--json", "--download-dir", str(caches / "hub"), *more)
    assert code == 0
    return {model["name"]: model for model in json.loads(out)}


def test_models_lists_both_caches_and_the_default_before_it_is_there(caches, capsys):
    models = listed(capsys, caches)
    assert list(models) == ["smollm2", "gemma3-270m", "org/little"]
    assert not models["smollm2"]["is_downloaded"]
    assert models["org/little"]["size_bytes"] == 3 and models["org/little"]["last_used"] > 0
    code, out, _ = words(capsys, "models", "--download-dir", str(caches / "hub"))
    assert code == 0 and "not downloaded" in out and "org/little" in out and "3 B" in out


def test_models_without_any_cache_lists_the_default(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "none"))
    code, out, _ = words(capsys, "models", "--download-dir", str(tmp_path / "nothing"))
    assert code == 0 and "smollm2" in out and "gemma3-270m" in out and len(out.splitlines()) == 3


def test_a_folder_of_models_that_is_none_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "none"))
    (tmp_path / "file").touch()
    code, _, err = words(capsys, "models", "--download-dir", str(tmp_path / "file"))
    assert code == 1 and str(tmp_path / "file") in err and len(err.splitlines()) == 1


def test_rm_asks_first_and_removes_wholly(caches, capsys, monkeypatch):
    (caches / "shoal").mkdir()
    (caches / "shoal" / SMOLLM2.file).write_text("12345")
    hub = ("--download-dir", str(caches / "hub"))
    code, _, err = words(capsys, "models", "rm", "smollm2", *hub)  # there is nobody to be asked
    assert code == 1 and "--yes" in err and listed(capsys, caches)["smollm2"]["size_bytes"] == 5
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n" if "smollm2" in question else "y")
    assert words(capsys, "models", "rm", "smollm2", *hub)[0] == 1
    assert listed(capsys, caches)["smollm2"]["is_downloaded"]
    code, out, _ = words(capsys, "models", "rm", "org/little", *hub)
    assert code == 0 and "3 B" in out and not (caches / "hub" / "models--org--little").exists()
    assert words(capsys, "models", "rm", "--yes", "smollm2", *hub)[0] == 0
    assert not listed(capsys, caches)["smollm2"]["is_downloaded"]


def test_rm_of_a_name_that_is_not_there_removes_nothing(caches, capsys):
    code, _, err = words(
        capsys, "models", "rm", "--yes", "org/little", "org/litle", "--download-dir", str(caches / "hub")
    )
    assert code == 1 and "did you mean org/little?" in err and "org/little" in listed(capsys, caches)


@pytest.mark.parametrize(
    "name", ["hf.co/org/little", "https://huggingface.co/org/little", "org/little:latest"]
)
def test_rm_takes_the_names_that_pull_takes(name, caches, capsys):
    folder = ["--download-dir", str(caches / "hub")]
    assert words(capsys, "models", "rm", name, "--yes", *folder)[:2] == (0, "removed org/little, 3 B\n")
    assert "org/little" not in listed(capsys, caches)


def test_rm_of_one_file_of_a_repository_says_that_all_of_them_go(caches, capsys):
    code, _, err = words(capsys, "models", "rm", "org/little:Q4_K_M", "--download-dir", str(caches / "hub"))
    assert (
        code == 1
        and "name org/little to remove all its files" in err
        and "org/little" in listed(capsys, caches)
    )


def test_pull_says_where_the_model_lies_and_without_a_network_what_to_do(caches, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub = ("--download-dir", str(caches / "hub"))
    code, out, _ = words(capsys, "pull", "org/little", *hub)
    assert code == 0 and "abc123" in out
    code, _, err = words(capsys, "pull", "org/other", *hub)
    assert code == 1 and "network" in err and len(err.splitlines()) == 1
