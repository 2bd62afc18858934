"""`shoal chat` at a terminal and from a pipe, with the real server in front of an engine without a model."""

import json
import os
import stat
import subprocess
import sys

import pytest

from tests.fake_server import NAME, FakeServer
from tests.terminal import CTRL_C, CTRL_D, UP, Terminal
from tests.waiting import eventually


@pytest.fixture(scope="module")
def server():
    with FakeServer() as server:
        yield server


@pytest.fixture
def terminal(server, tmp_path):
    server.engine.ends = True
    server.say("I see.")
    with Terminal("chat", "--url", server.url, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.expect("leaves\n")
        terminal.expect(">>> ")
        yield terminal


def ask(terminal, line):
    terminal.enter(line)
    terminal.expect(line)  # as it is echoed
    answer = terminal.expect("[")
    terminal.expect(">>> ")
    return answer.strip()


def test_the_banner_says_who_answers_and_how_to_leave(terminal, server):
    banner = terminal.screen
    assert NAME in banner and server.url in banner and "256 tokens" in banner and "Ctrl-D" in banner
    terminal.press(CTRL_D)
    assert terminal.end() == 0


def test_a_conversation_is_remembered_until_it_is_cleared(terminal, server):
    assert ask(terminal, "one") == "I see."
    assert ask(terminal, "two") == "I see."
    assert all(text in server.last_prompt() for text in ("one", "I see.", "two"))
    terminal.enter("/clear")
    terminal.expect(">>> ")
    ask(terminal, "three")
    assert "three" in server.last_prompt() and "one" not in server.last_prompt()
    terminal.enter("/bye")
    assert terminal.end() == 0


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(terminal, server):
    server.say("word " * 30, token_seconds=0.05)
    terminal.enter("talk")
    terminal.expect("word word")
    terminal.press(CTRL_C)
    terminal.expect("the text so far stays")
    eventually(lambda: not server.engine._running)
    terminal.expect(">>> ")
    server.say("Go on.")
    ask(terminal, "more")
    assert "word word" in server.last_prompt() and "more" in server.last_prompt()


def test_ctrl_c_before_the_first_word_takes_the_message_back(terminal, server):
    server.engine.prefill_seconds = 30.0
    try:
        terminal.enter("mistake")
        eventually(lambda: server.engine._running)
        terminal.press(CTRL_C)
        terminal.expect("taken back")
        terminal.expect(">>> ")
    finally:
        server.engine.prefill_seconds = 0.0
    ask(terminal, "another")
    assert "mistake" not in server.last_prompt()


def test_ctrl_c_at_the_prompt_drops_the_line_and_says_how_to_leave(terminal, server):
    terminal.press("half a li")
    terminal.expect("half a li")
    terminal.press(CTRL_C)
    terminal.expect("/bye leaves")
    terminal.expect(">>> ")
    ask(terminal, "whole")
    assert "half" not in server.last_prompt()


def test_what_was_typed_comes_back_in_the_next_conversation_and_is_nobody_elses(terminal, server, tmp_path):
    ask(terminal, "remember me")
    terminal.press(CTRL_D)
    assert terminal.end() == 0
    [history] = tmp_path.rglob("chat_history")
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    num_before = len(server.engine.seen)
    with Terminal("chat", "--url", server.url, XDG_STATE_HOME=str(tmp_path)) as again:
        again.expect(">>> ")
        again.press(UP)
        again.expect("remember me")
        again.press("\r")
        again.expect("I see.")
    assert len(server.engine.seen) == num_before + 1 and "remember me" in server.last_prompt()


def test_old_turns_are_dropped_when_the_context_is_full_and_that_is_said(terminal, server):
    for i in range(4):
        terminal.enter(f"{i}-" + "x" * 50)
        terminal.expect(">>> ")
    assert "turn was dropped" in terminal.screen
    prompt = server.last_prompt()
    assert "3-xxx" in prompt and "2-xxx" in prompt and "0-xxx" not in prompt
    terminal.enter("y" * 400)
    terminal.expect("maximum context length")
    terminal.expect(">>> ")
    ask(terminal, "short")
    prompt = server.last_prompt()
    assert all(text in prompt for text in ("2-xxx", "3-xxx", "short")) and "yyy" not in prompt


def test_a_message_may_have_several_lines(terminal, server):
    for lines in (('"""first', "second", 'third"""'), ("first\\", "second\\", "third")):
        for line in lines:
            terminal.enter(line)
        terminal.expect("[")
        assert "first\nsecond\nthird" in server.last_prompt()


def test_an_unknown_command_is_not_sent_and_its_neighbour_is_named(terminal, server):
    num_before = len(server.engine.seen)
    terminal.enter("/hepl")
    terminal.expect("did you mean /help?")
    terminal.expect(">>> ")
    terminal.enter("/help")
    terminal.expect("/save FILE")
    assert len(server.engine.seen) == num_before
    terminal.expect(">>> ")
    terminal.enter(" /etc/passwd is a path")
    terminal.expect("I see.")
    assert "/etc/passwd" in server.last_prompt()


def test_settings_reach_the_server_and_impossible_ones_are_refused(terminal, server):
    for line, hint in (
        ("/set temperature hot", "temperature must be a number, got 'hot'"),
        ("/set top_p 7", "top_p must be a finite number in (0, 1], got 7.0"),
        ("/set temprature 1", "did you mean temperature?"),
        ("/set temperature 0.25", "temperature: 0.25"),
        ("/set max_tokens 2", "max_tokens: 2"),
        ("/system Be brief.", "Be brief."),
    ):
        terminal.enter(line)
        terminal.expect(line)
        terminal.expect(hint)
        terminal.expect(">>> ")
    terminal.enter("hello")
    terminal.expect("cut off at max_tokens")
    params = server.last_request().params
    assert (params.temperature, params.max_tokens) == (0.25, 2) and "Be brief." in server.last_prompt()


def test_a_saved_conversation_is_a_request_body_and_can_be_gone_on_with(terminal, server, tmp_path):
    path = tmp_path / "talk.json"
    ask(terminal, "keep this")
    terminal.enter("/set seed 7")
    terminal.enter(f"/save {path}")
    terminal.expect("2 messages written")
    status, answer = server.json("/v1/chat/completions", json.loads(path.read_text()))
    assert status == 200 and answer["choices"][0]["message"]["content"] == "I see."
    terminal.enter("/clear")
    terminal.enter(f"/load {path}")
    terminal.expect("2 messages read")
    terminal.expect(">>> ")
    ask(terminal, "and now")
    assert "keep this" in server.last_prompt() and server.last_request().params.seed == 7
    other = tmp_path / "other.json"
    other.write_text("precious")
    terminal.enter(f"/save {other}")
    terminal.expect("exists")
    assert other.read_text() == "precious"


def piped(server, text, *arguments):
    command = [sys.executable, "-m", "shoal", "chat", "--url", server.url, *arguments]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=60, env=os.environ | {"NO_PROXY": "*"}
    )


def test_from_a_pipe_only_the_answers_are_on_standard_output(server):
    server.engine.ends = True
    server.say("Yes.")
    done = piped(server, "one\n\ntwo")
    assert done.returncode == 0 and done.stdout == "Yes.\nYes.\n" and ">>>" not in done.stderr, done
    assert "one" in server.last_prompt()
    assert piped(server, "").stdout == ""


def test_from_a_pipe_a_refused_message_is_an_exit_code(server):
    done = piped(server, "z" * 500)
    assert done.returncode == 1, done
    assert "maximum context length" in done.stderr and "Traceback" not in done.stderr


def test_a_standard_input_that_is_closed_is_an_empty_one(server):
    command = f"exec {sys.executable} -m shoal chat --url {server.url} <&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_bytes_that_are_no_text_are_quoted_as_they_were_typed(server):
    server.engine.ends = True
    server.say("Yes.")
    environment = os.environ | {"NO_PROXY": "*", "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "chat", "--url", server.url, "--system", "Be kind."],
        input=b"caf\xe9\nhello\n",
        capture_output=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 1 and done.stdout == b"Yes.\n", done
    assert b"shoal: 'caf\\udce9' has bytes that are not UTF-8" in done.stderr and b"kind" not in done.stderr


def test_a_server_that_wants_a_key_says_so():
    with FakeServer(api_key=["secret"]) as server:
        done = piped(server, "hello")
        assert done.returncode == 1, done
        assert "--api-key" in done.stderr and len(done.stderr.splitlines()) == 1
        server.engine.ends = True
        assert piped(server, "hello", "--api-key", "secret").returncode == 0


@pytest.fixture
def xterm(server, tmp_path):
    """A terminal that is not dumb: it marks pastes, and shows Markdown."""
    server.engine.ends = True
    server.say("I see.")
    environment = {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "LC_ALL": "C.UTF-8", "COLUMNS": "60"}
    with Terminal("chat", "--url", server.url, **environment) as terminal:
        terminal.expect(">>> ")
        yield terminal


def paste(text):
    return f"\x1b[200~{text}\x1b[201~"


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x",
        '"""Returns x.\n\nNever y.',
        '"""Returns x."""',
        "/etc/hosts\n/etc/passwd",
        "/bye",
        "/help is a command",
    ],
)
def test_a_paste_is_one_message_whatever_it_begins_with(xterm, server, text):
    """Regression: each pasted line was sent as a message of its own, and a paste that began with a fence or a
    slash was taken for one."""
    xterm.press(paste(text))
    xterm.expect(text.split("\n")[-1])
    xterm.press("\r")
    xterm.expect("I see.")
    assert f"<user>{text}<assistant>" in server.last_prompt()
    xterm.expect(">>> ")
    xterm.enter("/bye")
    assert xterm.end() == 0


def test_a_message_of_several_lines_comes_back_whole_in_the_next_conversation(xterm, server, tmp_path):
    """Regression: arrow up brought back its last line."""
    xterm.press(paste("/one\ntwo"))
    xterm.expect("two")
    xterm.press("\r")
    xterm.expect("I see.")
    xterm.expect(">>> ")
    xterm.press(CTRL_D)
    assert xterm.end() == 0
    with Terminal("chat", "--url", server.url, XDG_STATE_HOME=str(tmp_path), TERM="xterm") as again:
        again.expect(">>> ")
        again.press(UP)
        again.expect("two")
        again.press("\r")
        again.expect("I see.")
    assert "<user>/one\ntwo<assistant>" in server.last_prompt()


def test_what_is_typed_or_pasted_during_an_answer_waits_for_its_end(xterm, server):
    """Regression: the keys were echoed into the answer."""
    server.say("word " * 20, token_seconds=0.02)
    xterm.enter("talk")
    xterm.expect("word word")
    xterm.press("one " + paste("two\nthree"))
    assert "one" not in xterm.expect("tokens/s")
    server.say("I see.")
    xterm.expect("three")
    xterm.press("\r")
    xterm.expect("I see.")
    assert "<user>one two\nthree<assistant>" in server.last_prompt()


def test_an_answer_is_wrapped_at_words_and_its_markdown_is_drawn(xterm, server, terminal):
    """Regression: words were broken at the right edge, and Markdown was shown raw."""
    text = "Some **hardworking** programmers toil for many years at `x[::-1]` " * 3
    server.say(text)
    xterm.enter("go")
    shown = xterm.expect("tokens/s").partition("\x1b[?2004h")[2]
    assert "\x1b[1mhardworking\x1b[0m" in shown and "**hardworking**" not in xterm.screen
    terminal.enter("go")
    terminal.expect("go\n")
    lines = terminal.expect("\n[").split("\n")
    assert (
        len(lines) == 3 and all(len(line) <= 80 for line in lines) and " ".join(lines).split() == text.split()
    )


def test_the_last_message_is_edited_where_it_was_typed(xterm, server):
    ask(xterm, "What is one")
    xterm.enter("/edit")
    xterm.expect(">>> ")
    xterm.expect("What is one")
    xterm.press(" and two?\r")
    xterm.expect("I see.")
    xterm.expect(">>> ")
    assert "<user>What is one and two?<assistant>" in server.last_prompt()
    assert server.last_prompt().count("<user>") == 1
    xterm.enter("/edit")
    xterm.expect("and two?")
    xterm.press(CTRL_C)
    xterm.expect("nothing is changed")
    xterm.expect(">>> ")
    xterm.enter("/regenerate")
    xterm.expect("I see.")
    assert "<user>What is one and two?<assistant>" in server.last_prompt()


def test_show_says_which_values_the_server_takes_by_default(terminal, server):
    server.model.loaded.default_params["temperature"] = 0.2
    terminal.enter("/set temperature")
    terminal.expect("temperature: 0.2 (default)")
    terminal.enter("/model")
    terminal.expect(f"* {NAME}")
    server.model.loaded.default_params.clear()
