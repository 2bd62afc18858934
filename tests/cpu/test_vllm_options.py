"""vLLM's command lines: each option has the same effect, or has none with a line that says why, or is refused
with the way to get it. No model is loaded: a folder that is not there ends the start."""

import argparse
import dataclasses
import functools
import json
import logging
from pathlib import Path

import pytest

from shoal import LLM, EngineArgs
from shoal.cli import option_tables
from shoal.cli.main import build_parser, main
from shoal.config import EngineConfig, KVTransferConfig, ServerConfig, StructuredOutputsConfig
from shoal.errors import ConfigError
from shoal.options.parser import flag_of, take_vllm_options
from shoal.options.vllm import ALL_OPTIONS, EARLIER_OPTIONS, ENGINE_OPTIONS, SERVER_OPTIONS
from shoal.utils.argparse_utils import FlexibleArgumentParser

LISTED = [
    line.split(" | ")
    for line in (Path(__file__).parent / "data" / "vllm-serve-options.txt").read_text().splitlines()
    if not line.startswith("#")
]


parser = functools.cache(build_parser)


def parsed(*words):
    """(arguments of `shoal serve`, lines about options without effect)"""
    arguments = parser().parse_args(["serve", *words])
    return arguments, take_vllm_options(arguments)


def refusal(capsys, *words):
    """Returns the message of `shoal serve`, and its exit code."""
    try:
        code = main(["serve", "/nonexistent", *words])
    except SystemExit as error:
        code = error.code
    return code, capsys.readouterr().err


# The table


def test_the_table_has_exactly_the_options_of_vllm():
    assert len(LISTED) == 266
    table = {flag_of(option.name): option for option in (*SERVER_OPTIONS, *ENGINE_OPTIONS)}
    assert sorted(table) == sorted(names.split()[0] for names, _ in LISTED)
    for names, kind in LISTED:
        flag, *others = names.split()
        assert (table[flag].takes == "flag") == (kind == "flag"), flag
        assert {f"-{table[flag].short}"} >= {name for name in others if not name.startswith("--")}, flag
    assert len({option.name for option in ALL_OPTIONS}) == len(ALL_OPTIONS)


def test_an_option_with_the_same_effect_names_an_option_of_the_command():
    serve = parser()._subparsers._group_actions[0].choices["serve"]
    for option in ALL_OPTIONS:
        if option.own:
            assert flag_of(option.own) in serve._option_string_actions, option.name


def test_an_option_of_shoals_own_is_never_refused():
    own = {field.name for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)}
    assert not [option.name for option in ALL_OPTIONS if option.name in own and option.own != option.name]


def test_an_option_without_effect_says_why_and_a_refused_one_the_way_out():
    for option in ALL_OPTIONS:
        assert bool(option.own) or bool(option.why if option.accepted is None else option.instead), (
            option.name
        )


def test_the_page_of_the_documentation_is_the_table():
    assert option_tables.VLLM_PAGE.read_text("utf-8") == option_tables.vllm_page(), (
        "run `python -m shoal.cli.option_tables`"
    )


# Every option on the command line


def words_of(option, value):
    flag = flag_of(option.name)
    if option.takes == "flag":
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, *([] if value is True else [json.dumps(value) if isinstance(value, dict) else str(value)])]


@pytest.mark.parametrize("option", ALL_OPTIONS, ids=lambda o: o.name)
def test_every_option_is_understood_by_the_command(option, capsys):
    """With any value, every option of vLLM is known, and a refusal names the option."""
    if option.name == "config":
        return
    if option.own:
        assert option.name not in vars(parser().parse_args(["serve"]))
        return
    values = (True, False) if option.takes == "flag" else ("some-value",)
    for value in (*values, *(v for v in option.accepted or () if v != "")):
        words = words_of(option, value)
        if option.asks_for_nothing(value):
            _, lines = parsed(*words)
            assert len(lines) == 1 and lines[0].startswith(f"{flag_of(option.name)} has no effect: ")
        else:
            with pytest.raises(ConfigError, match=f"^{flag_of(option.name)} must "):
                parsed(*words)


@pytest.mark.parametrize(
    ("line", "way"),
    [
        ("--data-parallel-size 2", "shoal fleet up"),
        ("-dp 4", "count = 4"),
        ("--pipeline-parallel-size 2", "--tensor-parallel-size 2"),
        ("-pp=2", "--tensor-parallel-size 2"),
        ("--nnodes 2", "shoal serve --plane"),
        ("--enable-lora", "merge the adapter"),
        ("--device-ids 0 1", "CUDA_VISIBLE_DEVICES"),
        ("--task classify", "do not classify"),
        ("--enable-ssl-refresh", "restart the server"),
        ("--hf-token secret", "HF_TOKEN"),
        ("--kv-transfer-config.kv_connector OffloadingConnector", "--kv-host-bytes"),
        ("--structured-outputs-config.backend unheard-of", "xgrammar"),
    ],
)
def test_what_is_refused_names_the_way_out_in_one_line(line, way, capsys):
    code, said = refusal(capsys, *line.split())
    assert "secret" not in said
    assert code == 1 and way in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    [
        "--enable-auto-tool-choice --tool-call-parser hermes",
        "--trust-remote-code",
        "--no-enable-chunked-prefill",
        "--pipeline-parallel-size 1",
        "-dp 1",
        "--task generate",
        "--swap-space 4",
        "--disable-log-requests --disable-frontend-multiprocessing",
        "--uvicorn-log-level warning",
        "--compilation-config.mode 3 -cc.cudagraph_mode FULL",
        "-O3",
        "-O 2",
        "--hf-token",
        "--limit_mm_per_prompt.image 0",
        "--enable-log-requests --no-enable-log-requests",
    ],
)
def test_what_asks_for_nothing_is_accepted_before_the_model_is_looked_for(line, capsys):
    code, said = refusal(capsys, *line.split())
    assert code == 1 and "/nonexistent does not exist" in said


# Forms of names and values


def test_short_forms_underscores_and_human_numbers_are_read():
    given, _ = parsed("-tp", "2", "-q", "awq", "--max_model_len", "4k", "--kv-cache-memory-bytes=2G")
    assert (given.tensor_parallel_size, given.quantization) == (2, "awq")
    assert (given.max_model_len, given.kv_cache_memory_bytes) == (4000, 2 << 30)
    assert parsed("--max-model-len", "25.6k")[0].max_model_len == 25600
    for auto in ("auto", "-1"):
        assert getattr(parsed("--max-model-len", auto)[0], "max_model_len", None) is None


def test_dotted_forms_are_joined_with_json():
    given, _ = parsed(
        "--kv-transfer-config.kv_role", "kv_both", "--kv_transfer_config.kv_port=5", "m", "--port", "1"
    )
    assert json.loads(given.kv_transfer_config) == {"kv_role": "kv_both", "kv_port": 5}
    assert (given.model_path, given.port) == ("m", 1)
    given, _ = parsed("--kv-events-config", '{"topic": "t", "hwm": 1}', "--kv-events-config.hwm", "1k")
    assert json.loads(given.kv_events_config) == {"topic": "t", "hwm": 1000}
    parser = FlexibleArgumentParser()
    parser.add_argument("--x", type=json.loads)
    given = parser.parse_args(["--x.a.b", "text", "--x.a.c+", "1,2", "--x.a.c+=3"])
    assert given.x == {"a": {"b": "text", "c": ["1", "2", "3"]}}


def test_vllms_words_for_values_are_shoals():
    given, _ = parsed("--attention-backend", "FLASH_ATTN", "--load-format", "gguf", "--reasoning-parser", "")
    assert (given.attention_backend, given.load_format) == ("flash_attn", "auto")
    assert not hasattr(given, "reasoning_parser")
    given, _ = parsed("--disable-uvicorn-access-log", "--kv-offloading-size", "1.5")
    assert (given.log_requests, given.kv_host_bytes) == ("off", 3 << 29)
    given, _ = parsed(
        "--disable-custom-all-reduce", "--log-requests", "errors", "--disable-uvicorn-access-log"
    )
    assert (given.peer_all_reduce, given.log_requests) == (False, "errors")


# A file of options


def config_file(tmp_path, text):
    path = tmp_path / "options.yaml"
    path.write_text(text)
    return str(path)


CONFIG = """
model: of-the-file
port: 12
tensor_parallel_size: 2
served-model-name: [a, b]
enable-prefix-caching: false
trust-remote-code: true
kv-transfer-config:
  kv_role: kv_consumer
api-key: null
"""


def test_a_file_of_options_counts_where_the_command_line_says_nothing(tmp_path):
    path = config_file(tmp_path, CONFIG)
    given, lines = parsed("--config", path)
    assert (given.models, given.port, given.tensor_parallel_size) == (["of-the-file"], 12, 2)
    assert given.served_model_name == ["a", "b"] and given.enable_prefix_caching is False
    assert json.loads(given.kv_transfer_config) == {"kv_role": "kv_consumer"}
    assert not hasattr(given, "api_key") and len(lines) == 1
    given, _ = parsed("mine", "--config", path, "--port", "13", "--enable-prefix-caching")
    assert (given.model_path, given.models, given.port) == ("mine", [], 13)
    assert given.enable_prefix_caching is True
    assert parsed("--model", "mine", "--config", path)[0].models == ["mine"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 1", "unknown option --prot; did you mean --port?"),
        ("- port", "YAML file of options"),
        ("port: [", "cannot be read"),
        ("port: many", "must be an integer, got 'many'"),
        ("data-parallel-size: 2", "shoal fleet up"),
    ],
)
def test_a_wrong_file_of_options_is_refused(text, said, tmp_path, capsys):
    code, err = refusal(capsys, "--config", config_file(tmp_path, text))
    assert code in (1, 2) and said in err


def test_a_script_reads_a_file_of_options_and_the_command_line_goes_before_it(tmp_path):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    path = config_file(tmp_path, "max_model_len: 64\nblock-size: 32\n")
    found = parser.parse_args(["--config", path, "--block-size", "8"])
    assert (found.max_model_len, found.block_size) == (64, 8)


# Python


def test_a_scripts_engine_options_are_vllms(caplog):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    found = parser.parse_args(["--trust-remote-code", "-tp", "2", "--mm-processor-cache-gb", "0"])
    with caplog.at_level(logging.WARNING):
        assert EngineArgs.from_cli_args(found).tensor_parallel_size == 2
    assert "trust_remote_code has no effect" in caplog.text and "mm_processor_cache_gb" in caplog.text
    assert isinstance(EngineArgs.add_cli_args(argparse.ArgumentParser()), argparse.ArgumentParser)


def test_llm_takes_vllms_words_and_refuses_with_the_way_out():
    found = EngineConfig.from_options(
        block_size=None, attention_backend="TRITON_ATTN", kv_offloading_size=1, served_model_name="x"
    )
    assert (found.block_size, found.attention_backend, found.kv_host_bytes) == (16, "triton", 1 << 30)
    with pytest.raises(ConfigError, match=r"data_parallel_size must be 1.*shoal fleet up"):
        LLM(data_parallel_size=2)
    with pytest.raises(ConfigError, match="unknown option 'port'"):
        LLM(port=8000)
    with pytest.raises(ConfigError, match="kv_offloading_size"):
        LLM(kv_offloading_size="much")


@pytest.mark.parametrize(
    "given",
    [
        {"backend": "xgrammar"},
        {"backend": "guidance", "disable_any_whitespace": True},
        {"backend": "auto", "enable_in_reasoning": False, "reasoning_parser": ""},
    ],
)
def test_fields_of_structured_outputs_that_ask_for_nothing_are_accepted(given):
    found = StructuredOutputsConfig.of(given)
    assert found.disable_any_whitespace == given.get("disable_any_whitespace", False)


@pytest.mark.parametrize(
    "given", [{"backend": "unheard-of"}, {"enable_in_reasoning": True}, {"reasoning_parser": "qwen3"}]
)
def test_fields_of_structured_outputs_that_ask_for_more_are_refused(given):
    with pytest.raises(ConfigError, match=rf"structured_outputs_config\.{next(iter(given))} must"):
        StructuredOutputsConfig.of(given)


def test_a_transfer_config_of_vllms_is_read():
    given = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cuda"}'
    assert KVTransferConfig.of(given) == KVTransferConfig(kv_role="kv_both")


def test_earlier_options_are_not_todays():
    assert not {option.name for option in EARLIER_OPTIONS} & {names.split()[0] for names, _ in LISTED}
