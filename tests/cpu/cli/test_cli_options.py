"""The command's words: help, messages for mistakes, completion. No model is loaded."""

import argparse
import dataclasses
import io
import json
import runpy
import subprocess
import sys

import msgspec
import pytest

from shoal.bench.serving import ServeBench
from shoal.cli.main import build_parser, main
from shoal.config import MAX_NUM_SEQS, EngineConfig, ServerConfig
from shoal.doctor.finding import works
from shoal.errors import CheckpointError
from shoal.fleet.planner.observation import Decision, DecodeLoad, Observation
from shoal.fleet.planner.planner import Recorded
from shoal.weights.source import resolve


def words(capsys, *arguments):
    """(exit code, standard output, standard error)"""
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr()
    return code, said.out, said.err


# Help


def commands(parser, words=()):
    """Every command with its parser: ("bench", "latency") and so on."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, (*words, name))


COMMANDS = dict(commands(build_parser()))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c) or "shoal")
def test_every_command_explains_itself_in_lines_that_fit(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = words(capsys, *command, "--help")
    assert code == 0 and out.startswith(f"usage: {' '.join(('shoal', *command))}")
    assert len(out.splitlines()) < 60
    assert max(map(len, out.splitlines())) <= 100
    assert words(capsys, "help", *command) == (0, out, "")


def test_help_shows_what_is_common_and_help_all_every_option(capsys):
    short, whole = (words(capsys, "serve", flag)[1] for flag in ("--help", "--help-all"))
    fields = [*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig)]
    flags = ["--" + f.name.replace("_", "-") for f in fields]
    assert all(flag in whole for flag in flags)
    shown = [flag for flag in flags if f"  {flag} " in short or f"  {flag}," in short]
    assert "--port" in shown and "--max-model-len" in shown and 8 <= len(shown) <= 20
    assert f"{len(flags) - len(shown)} more options" in short.replace("\n", " ")
    assert "\nKV cache:\n" in whole and "\nTLS:\n" in whole
    assert "\nengine:\n" in short and "KV cache:" not in short


def test_the_word_command_is_missing(capsys):
    for arguments in ((), ("bench",)):
        code, out, err = words(capsys, *arguments)
        assert code == 2 and not out and "usage: shoal" in err


def test_the_version_is_told_by_the_module_too(capsys):
    from shoal import __version__

    assert words(capsys, "--version")[:2] == (0, f"shoal {__version__}\n")
    arguments, sys.argv = sys.argv, ["shoal", "--version"]
    try:
        with pytest.raises(SystemExit):
            runpy.run_module("shoal", run_name="__main__")
    finally:
        sys.argv = arguments
    assert capsys.readouterr().out == f"shoal {__version__}\n"


# Mistakes


@pytest.mark.parametrize(
    "line, hint",
    [
        ("serve --prot 8000 --max-num-seqs many", "unknown option --prot; did you mean --port?"),
        ("serve --max-num-seqs many", "--max-num-seqs: must be an integer, got 'many'"),
        ("serve --gpu-memory-utilization most", "must be a number, got 'most'"),
        ("serve --max-num 5", "--max-num"),
        ("serve --max-model 5", "did you mean --max-model-len?"),
        ("serve --port", "--port: expected one argument"),
        ("sevre", "did you mean serve?"),
        ("run llama3", "did you mean chat?"),
        ("list", "did you mean models?"),
        ("collect-env", "did you mean doctor?"),
        ("bench througput", "did you mean throughput?"),
        ("models rmm x", "did you mean rm?"),
        ("generate", "PROMPT"),
        ("serve -m x", "unknown option -m; name the model without an option"),
        ("serve x -c 4096", "unknown option -c; did you mean --max-model-len?"),
        ("serve x -np 4", "unknown option -np; did you mean --max-num-seqs?"),
        ("serve x -ngl 99", "unknown option -ngl; a GPU has all layers"),
        ("generate x --temp 0", "unknown option --temp; did you mean --temperature?"),
        ("generate x --n-predict 5", "unknown option --n-predict; did you mean --max-tokens?"),
        ("pull -m x", "unknown option -m; put `--` before"),
        (
            "chat x why",
            "unrecognized arguments: why; a question comes from a pipe: echo QUESTION | shoal chat",
        ),
        ("generate x y", "unrecognized arguments: y"),
        ("pull foo bar", "shoal pull: unrecognized arguments: bar\nusage: shoal pull [options] NAME"),
        ("models rm x --url", "unknown option --url"),
        (
            "route --no-track-prefill-tokens",
            "--no-track-prefill-tokens was removed: blocks to compute always",
        ),
        ("route --host-cache-hit-weight=1", "--host-cache-hit-weight was removed: a cached block in host"),
        ("generate --hello", "put `--` before a PROMPT"),
        ("completion tcsh", "bash"),
        ("models list", "choose one of rm"),
    ],
)
def test_a_wrong_argument_gives_its_message_and_no_wall(line, hint, capsys):
    code, out, err = words(capsys, *line.split())
    assert code == 2 and not out and hint in err and len(err.splitlines()) <= 4 and "--help`" in err


@pytest.mark.parametrize(
    "line, hint",
    [
        (f"serve --max-num-seqs {MAX_NUM_SEQS + 1}", f"from 1 to {MAX_NUM_SEQS}"),
        ("serve --port 80000", "from 0 to 65535"),
        ("serve /nonexistent", "/nonexistent does not exist"),
        ("chat smolLM2", "did you mean 'smollm2'?"),
        ("serve smolm2", "did you mean 'smollm2'?"),
        ("serve --max_num_seqs 0", "max_num_seqs must be an integer from 1 to 65536, got 0"),
        ("generate x --max-tokens 0", "max_tokens must be an integer from 1 to 2^63 - 1, got 0"),
        ("generate x --min-tokens 129", "min_tokens 129 > max_tokens 128"),
        ("generate x --min-tokens 50 --model /nonexistent", "/nonexistent does not exist"),
        ("generate x --revision main", "leave --revision out"),
        ("chat --min-tokens 1025", "min_tokens 1025 > max_tokens 1024"),
        ("chat --min-tokens 50 /nonexistent", "/nonexistent does not exist"),
        ("chat --url http://127.0.0.1:1 --min-tokens 5000", "no server answers"),
        ("serve --api-key secret / --port 80000", "--api-key has taken a last value"),
        ("serve --served-model-name a org/model --port 80000", "--served-model-name has taken 'org/model'"),
        ("serve --api-key secret model.gguf --port 80000", "--api-key has taken a last value"),
        ("serve --served-model-name a ./nonexistent --port 80000", "has taken './nonexistent'"),
        ("serve --served-model-name a s3://bucket/model --port 80000", "has taken 's3://bucket/model'"),
        (
            "serve --api-key old aGVsbG8/d29ybGQ --port 80000",
            "port must be an integer from 0 to 65535, got 80000",
        ),
        (
            "serve --api-key old /GVsbG8d29ybGQ --port 80000",
            "port must be an integer from 0 to 65535, got 80000",
        ),
        ("serve --api-key a b --allowed-origins https://a https://b/ --port 80000", "from 0 to 65535"),
        ("serve /nonexistent --served-model-name a org/model", "/nonexistent does not exist"),
        ("serve --api-key secret -- /nonexistent", "/nonexistent does not exist"),
        ("serve --fleet-key-file /nonexistent --max-num-seqs 0", "--plane"),
        ("chat --url nowhere", "must be an http or https URL, got 'nowhere'"),
        ("chat --url http://127.0.0.1:1 --dtype float32", "dtype"),
        ("chat --url http://127.0.0.1:1", "no server answers"),
        ("chat --api-key x", "--url"),
        ("models rm nothing", "'nothing'"),
        ("pull /", "already"),
        ("pull smollm2 --revision x", "leave --revision out"),
        ("pull smollm2 --download-dir x", "leave --download-dir out"),
        ("bench latency --output-json /nonexistent/x", "cannot be written"),
        ("bench serve --save-result --result-filename /nonexistent/x", "cannot be written"),
    ],
)
def test_an_impossible_value_is_one_line_with_the_way_out(line, hint, capsys, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    code, out, err = words(capsys, *line.split())
    assert code == 1 and not out and hint in err and len(err.splitlines()) == 1


def test_an_empty_name_is_no_model(capsys):
    code, _, err = words(capsys, "pull", "")
    assert code == 1 and "name is empty" in err
    with pytest.raises(CheckpointError, match="name is empty"):
        resolve("")


@pytest.mark.parametrize("option", ["--temperature", "--max-tokens", "--nonsense"])
def test_an_option_that_is_like_none_has_no_neighbour(option, capsys):
    code, _, err = words(capsys, "serve", option, "1")
    assert code == 2 and f"unknown option {option}\n" in err


def test_a_benchmark_that_cannot_begin_leaves_no_empty_files_and_old_ones_as_they_were(tmp_path, capsys):
    plot, result = tmp_path / "serve.png", tmp_path / "result.json"
    result.write_text("of another day")
    code, _, err = words(
        capsys,
        "bench",
        "serve",
        "--base-url",
        "http://127.0.0.1:1",
        "--plot",
        str(plot),
        "--save-result",
        "--result-filename",
        str(result),
    )
    assert code == 1 and "127.0.0.1:1" in err
    assert not plot.exists() and result.read_text() == "of another day"


def test_a_folder_that_holds_no_model_says_what_to_name(tmp_path, capsys):
    code, _, err = words(capsys, "serve", str(tmp_path))
    assert code == 1 and "no config.json" in err and len(err.splitlines()) == 1
    (tmp_path / "m.gguf").touch()
    assert "m.gguf" in words(capsys, "serve", str(tmp_path))[2]


def test_underscores_and_equals_signs_are_understood_and_texts_are_left_alone():
    given = build_parser().parse_args(
        ["generate", "--max_num_seqs=5", "--top_p", "0.5", "- a list --of things"]
    )
    assert (given.max_num_seqs, given.top_p, given.prompt) == (5, 0.5, "- a list --of things")
    assert build_parser().parse_args(["generate", "--", "--not-an-option"]).prompt == "--not-an-option"
    assert build_parser().parse_args(["generate", "-hello there"]).prompt == "-hello there"
    assert build_parser().parse_args(["serve", "--seed", "-1"]).seed == -1


# Completion


def complete_in_bash(script, line):
    code = f"""{script}
COMP_LINE={line!r}; COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_POINT=${{#COMP_LINE}}
{"COMP_WORDS+=(''); COMP_CWORD=$((COMP_CWORD + 1))" if line.endswith(" ") else ""}
$(complete -p shoal | sed 's/.*-F \\([^ ]*\\) .*/\\1/') shoal; printf '%s\\n' "${{COMPREPLY[@]}}" """
    return subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()


def test_bash_completes_commands_and_options(capsys):
    code, script, _ = words(capsys, "completion", "bash")
    assert code == 0
    assert complete_in_bash(script, "shoal ser") == ["serve"]
    assert complete_in_bash(script, "shoal bench la") == ["latency"]
    assert complete_in_bash(script, "shoal serve --por") == ["--port"]
    assert "--kv-flush-timeout" in complete_in_bash(script, "shoal serve --kv-f")  # the rare ones, too
    assert set(complete_in_bash(script, "shoal completion ")) >= {"bash", "zsh", "fish"}
    assert complete_in_bash(script, "shoal serve --dtype bf") == ["bfloat16"]
    assert "-o default" in script  # file names, where the script has nothing to offer


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_with_every_option(shell, capsys):
    code, script, _ = words(capsys, "completion", shell)
    assert code == 0
    assert all(f.name.replace("_", "-") in script for f in dataclasses.fields(ServeBench))


# Where words go


def old_terminal(monkeypatch):
    """A standard output that has few letters."""
    output = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", output)
    return output


def test_a_letter_that_the_output_does_not_have_is_replaced(monkeypatch):
    """Regression: such a letter ended the command with a traceback."""
    output = old_terminal(monkeypatch)
    monkeypatch.setattr("shoal.cli.doctor.examine", lambda asked: [works("fleet file", asked.path)])
    assert main(["doctor", "fl\u00f6tte.toml"]) == 0
    assert b"fl?tte.toml" in output.buffer.getvalue()


def test_decisions_for_programs_are_whole_on_any_output(monkeypatch, tmp_path):
    output = old_terminal(monkeypatch)
    name = "m\u00fc"
    lines = [
        Recorded(config={}),
        Recorded(model=name, observation=Observation(at=1.0, decode=[DecodeLoad(0.5)])),
        Recorded(model=name, decision=Decision(at=1.0, changes=[], reason="", desired={})),
    ]
    (tmp_path / "record").write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    assert main(["plan", "--replay", str(tmp_path / "record")]) == 0
    assert json.loads(output.buffer.getvalue())["model"] == name


def test_ctrl_c_while_the_command_is_imported_ends_it_in_silence(monkeypatch, capsys):
    class Interrupting:
        def find_spec(self, name, *_):
            if name == "shoal.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "shoal.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("shoal", run_name="__main__")
    assert end.value.code == 130 and capsys.readouterr().err == "\n"
