"""EngineArgs and FlexibleArgumentParser, as vLLM's scripts use them."""

import argparse
import dataclasses
import logging

import pytest

from shoal import EngineArgs
from shoal.config import EngineConfig
from shoal.errors import ConfigError
from shoal.utils.argparse_utils import FlexibleArgumentParser


def test_a_command_line_of_nothing_has_every_default():
    found = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([])
    assert EngineConfig.from_options(**vars(found)) == EngineConfig()
    assert found.max_logprobs == EngineConfig().max_logprobs


def test_a_command_line_becomes_options():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--mine")
    given = "--max_model_len=64 --kv-host-bytes 5 --no-enable-prefix-caching --kv_host_bytes 0 --mine a_b"
    found = parser.parse_args(given.split())
    arguments = EngineArgs.from_cli_args(found)
    assert (arguments.max_model_len, arguments.kv_host_bytes) == (64, 0)
    assert arguments.enable_prefix_caching is False
    assert found.mine == "a_b"
    assert EngineConfig.from_options(**dataclasses.asdict(arguments)).max_model_len == 64


def test_a_group_takes_the_flags_and_defaults_of_its_script():
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("Engine arguments")
    assert EngineArgs.add_cli_args(group) is group
    group.set_defaults(model="other", enforce_eager=True)
    found = parser.parse_args(["--max-num-seqs", "3"])
    assert (found.model, found.enforce_eager, found.max_num_seqs) == ("other", True, 3)


def test_options_are_checked_as_those_of_llm(caplog):
    with caplog.at_level(logging.WARNING):
        assert EngineArgs(model="m", trust_remote_code=True).model == "m"
    assert "trust_remote_code" in caplog.text
    with pytest.raises(ConfigError, match="max_model_len"):
        EngineArgs(max_model_length=5)
    with pytest.raises(ConfigError, match=r"block_size must be .*, got 3"):
        EngineArgs(block_size=3)
