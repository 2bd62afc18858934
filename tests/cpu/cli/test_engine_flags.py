"""Options of the engines that commands build."""

import argparse

import pytest

from shoal.cli.commands.engine_flags import build_llm
from shoal.engine import llm
from tests import tiny
from tests.mtp_heads import write_mtp

HEAD = {"method": "eagle3", "model": "a-head", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("given", "expected"),
    [(HEAD, {"method": "auto"}), ({"method": "suffix"}, {"method": "suffix"}), (None, {"method": "auto"})],
    ids=str,
)
def test_another_model_is_built_without_the_head_of_the_first(given, expected, monkeypatch, caplog):
    """Regression: a chat with a head could not change its model."""
    monkeypatch.setattr(llm, "LLM", lambda **options: options)
    arguments = argparse.Namespace(model="first")
    if given is not None:
        arguments.speculative_config = given
    options = build_llm(arguments, "second", speculative_config={"method": "auto"})
    assert options["model"] == "second" and options["speculative_config"] == expected
    assert bool(caplog.records) == (given == HEAD)
    same = build_llm(arguments, "first", speculative_config={"method": "auto"})
    assert same["speculative_config"] == (given or {"method": "auto"})


def test_another_model_drafts_with_its_own_head(monkeypatch, tmp_path):
    monkeypatch.setattr(llm, "LLM", lambda **options: options)
    arguments = argparse.Namespace(model="first", speculative_config={"method": "mtp"})
    folders = write_mtp(tmp_path, "glm4-moe"), tiny.write_model(tmp_path, "qwen3")
    built = [build_llm(arguments, str(folder), speculative_config={"method": "auto"}) for folder in folders]
    assert [options["speculative_config"]["method"] for options in built] == ["mtp", "auto"]
