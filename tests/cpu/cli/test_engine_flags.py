"""Options of the engines that commands build."""

import argparse

import pytest

from shoal.cli.commands.engine_flags import build_llm
from shoal.engine import llm

HEAD = {"method": "eagle3", "model": "a-head", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("given", "expected"),
    [(HEAD, {"method": "auto"}), ({"method": "suffix"}, {"method": "suffix"}), (None, {"method": "auto"})],
    ids=str,
)
def test_another_model_is_built_without_the_head_of_the_first(given, expected, monkeypatch):
    """Regression: a chat with a head could not change its model."""
    monkeypatch.setattr(llm, "LLM", lambda **options: options)
    arguments = argparse.Namespace(model="first")
    if given is not None:
        arguments.speculative_config = given
    options = build_llm(arguments, "second", speculative_config={"method": "auto"})
    assert options["model"] == "second" and options["speculative_config"] == expected
    same = build_llm(arguments, "first", speculative_config={"method": "auto"})
    assert same["speculative_config"] == (given or {"method": "auto"})
