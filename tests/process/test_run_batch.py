"""`shoal run-batch` with the default model: interrupted, killed, and continued."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.terminal import DEADLINE_S, Terminal


def chat(i, text, **body):
    body = {"model": "smollm2", "messages": [{"role": "user", "content": text}], "max_tokens": 120, **body}
    return {"custom_id": f"request-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}


LINES = [
    chat(0, "What is the capital of France?", temperature=0, max_tokens=20),
    {
        "custom_id": "embedded",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": "smollm2", "input": "a shoal of fish"},
    },
    chat("too-long", "word " * 9000),
    *(chat(i, f"Write a story about {i} fish.", ignore_eos=True) for i in range(1, 7)),
]
OPTIONS = ("--model", "smollm2", "--max-num-seqs", "2", "--max-model-len", "2048")


def answers_in(path):
    try:
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
    except FileNotFoundError:
        return []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_was_broken_off_is_continued_by_the_same_command(how, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    output = tmp_path / "out.jsonl"
    files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(output))
    command = [sys.executable, "-m", "shoal", "run-batch", *files, *OPTIONS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 3 * DEADLINE_S
        while len(answers_in(output)) < 4:
            assert time.monotonic() < deadline and process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(how)
        said = process.communicate(timeout=DEADLINE_S)[1]
    if how == signal.SIGINT:
        assert process.returncode == 130 and "the same command continues" in said and "Traceback" not in said
    before = answers_in(output)
    assert 4 <= len(before) < len(LINES)
    done = subprocess.run(command, capture_output=True, text=True, timeout=6 * DEADLINE_S)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert f"{len(before)} of {len(LINES)} lines are answered" in done.stderr
    after = answers_in(output)
    assert [answer["custom_id"] for answer in after] == [line["custom_id"] for line in LINES]
    assert all(answer in after for answer in before)
    assert "Paris" in after[0]["response"]["body"]["choices"][0]["message"]["content"]
    assert len(after[1]["response"]["body"]["data"][0]["embedding"]) == 576
    assert after[2]["response"]["status_code"] == 400 and "2048" in after[2]["error"]["message"]
    assert all(answer["error"] is None for answer in after if answer is not after[2])


def test_a_terminal_shows_how_far_it_is(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES[:2]))
    files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    with Terminal("run-batch", *files, *OPTIONS, TERM="xterm", COLUMNS="120") as terminal:
        terminal.expect("0/2")
        terminal.expect("2/2")
        terminal.expect("tokens/s out")
        terminal.expect("2 lines, 0 of them with an error")
        assert terminal.end() == 0
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]
