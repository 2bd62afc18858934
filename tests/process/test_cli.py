"""The `shoal` command as a user meets it."""

import gzip
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.terminal import CTRL_C, Terminal

DECISION = {"at": 1.0, "changes": [], "reason": "", "desired": {}}
SHOAL = [sys.executable, "-m", "shoal"]


def run(*arguments, stdin=None):
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    return subprocess.run(
        [*SHOAL, *arguments], capture_output=True, text=True, timeout=120, input=stdin, env=environment
    )


def test_generate_continues_the_text():
    done = run(
        "generate",
        "The capital of France is",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
        "--max-model-len",
        "256",
    )
    assert done.returncode == 0 and done.stdout.startswith("The capital of France is Paris"), done


@pytest.mark.slow
def test_generate_reads_standard_input():
    done = run(
        "generate",
        "-",
        "--max-tokens",
        "4",
        "--temperature",
        "0",
        "--max-model-len",
        "256",
        stdin="One two three",
    )
    assert done.returncode == 0 and done.stdout.startswith("One two three"), done


def test_chat_keeps_the_conversation_and_shows_the_speed():
    done = run(
        "chat",
        "--temperature",
        "0",
        "--max-tokens",
        "24",
        "--max-model-len",
        "512",
        stdin="My name is Ada.\nWhat is my name?\n",
    )
    assert done.returncode == 0 and "Ada" in done.stdout and done.stderr.count("tokens/s") == 2, done


@pytest.mark.parametrize(
    "kind",
    [
        ("throughput", "--num-prompts", "3"),
        pytest.param(("latency", "--batch-size", "2"), marks=pytest.mark.slow),
    ],
    ids=lambda k: k[0],
)
def test_bench_prints_and_writes_its_figures(kind, tmp_path):
    path = tmp_path / "figures.json"
    lengths = ("--input-len", "16", "--output-len", "4", "--num-iters", "1", "--max-model-len", "64")
    done = run("bench", *kind, *lengths, "--output-json", str(path))
    assert done.returncode == 0 and "output tokens/s" in done.stdout, done
    figures = json.loads(path.read_text())
    assert (
        figures["output_tokens_per_s"] > 0
        and figures["fraction_of_floor"] > 0
        and figures["gpu_idle_share"] is None
    )
    assert "of the estimate" in done.stdout


@pytest.mark.slow
def test_profile_writes_a_trace(tmp_path):
    sizes = ("--batch-size", "2", "--input-len", "8", "--output-len", "3", "--max-model-len", "64")
    done = run("profile", *sizes, "--output-dir", str(tmp_path))
    [path] = tmp_path.glob("*.trace.json.gz")
    assert done.returncode == 0 and str(path) in done.stdout, done
    with gzip.open(path) as file:
        assert "decode step" in {event.get("name") for event in json.load(file)["traceEvents"]}


@pytest.mark.parametrize(
    "arguments, hint",
    [
        (("--model", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--max-model-len", "0"), "max_model_len"),
        (("--top-p", "7"), "top_p"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(arguments, hint):
    done = run("generate", "x", *arguments)
    assert done.returncode == 1 and hint in done.stderr and "Traceback" not in done.stderr, done


def started(*arguments):
    return subprocess.Popen(
        [*SHOAL, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_reader_that_has_enough_ends_the_command_in_silence():
    with started("generate", "Once upon a time", "--max-tokens", "200", "--max-model-len", "256") as command:
        assert command.stdout.read(1) == "O"
        command.stdout.close()
        assert command.stderr.read() == "" and command.wait(60) == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    "arguments",
    [("models",), ("generate", "hello", "--max-tokens", "4", "--max-model-len", "64")],
    ids=lambda arguments: arguments[0],
)
def test_an_output_without_room_is_one_line_and_an_exit_code(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*SHOAL, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 1, done
    assert done.stderr == "shoal: the output cannot be written: No space left on device; make room there\n"


def test_a_prompt_that_is_refused_is_not_printed():
    done = run("generate", "one two three", "--max-model-len", "2")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.startswith("shoal: "), done


def test_a_reader_of_decisions_that_has_enough_is_no_mistake_in_the_record(tmp_path):
    """Regression: it was reported as a file that cannot be read."""
    seen = {"at": 1.0, "decode": [{"kv_usage": 0.5}]}
    lines = [
        {"config": {}},
        *({"model": "m", "observation": seen}, {"model": "m", "decision": DECISION}) * 5000,
    ]
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with started("plan", "--replay", str(tmp_path / "record.jsonl")) as command:
        assert json.loads(command.stdout.readline())["model"] == "m"
        command.stdout.close()
        assert command.stderr.read() == "" and command.wait(60) == 128 + signal.SIGPIPE


def test_ctrl_c_while_a_model_is_loaded_ends_the_command_in_silence():
    with started(
        "generate", "Once upon a time", "--verbose", "--max-tokens", "200", "--max-model-len", "256"
    ) as command:
        assert "INFO" in command.stderr.readline()
        command.send_signal(signal.SIGINT)
        assert "Traceback" not in command.stderr.read() and command.wait(60) == 130


def test_ctrl_c_in_a_chat_stops_the_answer_and_the_model_goes_on(tmp_path):
    with Terminal(
        *("chat", "--max-model-len", "512", "--temperature", "0", "--repetition-penalty", "1"),
        XDG_STATE_HOME=str(tmp_path),
    ) as terminal:
        terminal.expect("smollm2 on this machine (cpu) · context 512 tokens")
        terminal.expect(">>> ")
        terminal.enter("Tell me a very long story.")
        terminal.expect("story.")
        terminal.expect(" the ")
        terminal.press(CTRL_C)
        terminal.expect("the text so far stays")
        terminal.enter("What is the capital of France? One word.")
        terminal.expect("Paris")
        terminal.expect("tokens/s")
        terminal.enter("/show")
        terminal.expect("of 512 tokens, 4 messages")
        terminal.enter("/bye")
        assert terminal.end() == 0
