"""`shoal top` at a terminal and in scripts, against the real server over an engine without a model."""

import os
import re
import subprocess
import sys
import threading

import pytest

from shoal.cli.top import _pressed
from tests.fake_server import FakeServer, engine_saying
from tests.serving import free_port
from tests.terminal import Terminal

SIZE = {"COLUMNS": "80", "LINES": "30"}


@pytest.fixture(scope="module")
def server():
    with FakeServer(engine_saying("hello "), api_key=["sesame"]) as server:
        yield server


def once(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "shoal", "top", *arguments, "--once"],
        capture_output=True,
        text=True,
        env=os.environ | SIZE | environment,
        timeout=60,
    )


def test_once_prints_one_picture_for_scripts(server):
    done = once(server.url, "--api-key", "sesame")
    assert done.returncode == 0, done.stderr
    assert "one server" in done.stdout and "tiny" in done.stdout and "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_url_may_end_in_v1_and_the_key_may_come_from_the_environment(server):
    assert once(server.url + "/v1/", SHOAL_API_KEY="sesame,other").returncode == 0


def test_an_old_encoding_is_no_obstacle(server):
    done = once(server.url, SHOAL_API_KEY="sesame", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.isascii(), done.stderr


@pytest.mark.parametrize(
    "says", ["wants a key", "no server answers", "must be an http or https URL", "has no /fleet"]
)
def test_what_cannot_be_watched_is_told_in_a_line(server, says):
    urls = {
        "no server answers": f"http://127.0.0.1:{free_port()}",
        "must be an http or https URL": "localhost",
    }
    urls["has no /fleet"] = server.url + "/nowhere"
    done = once(urls.get(says, server.url))
    assert done.returncode == 1 and says in done.stderr and done.stderr.count("\n") == 1


def test_a_pipe_that_gets_no_first_picture_is_an_error_and_a_later_one_is_waited_for():
    port = free_port()
    words = [sys.executable, "-m", "shoal", "top", f"http://127.0.0.1:{port}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "") and "no server answers" in done.stderr
    with FakeServer(engine_saying("hello "), port=port):
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | SIZE)
        deadline = threading.Timer(60, process.kill)  # which ends its output
        deadline.start()
        try:
            assert any("tiny" in line for line in process.stdout)
        except BaseException:
            process.kill()
            raise
    try:
        assert any("no answer" in line for line in process.stdout)
        assert process.poll() is None
    finally:
        deadline.cancel()
        process.kill()
        process.communicate()


def test_keys_open_a_worker_and_end_it(server):
    with Terminal("top", server.url, TERM="xterm-256color", SHOAL_API_KEY="sesame", **SIZE) as terminal:
        terminal.expect(">tiny")
        terminal.press("\r")
        terminal.expect("KV device")
        terminal.press("\x1b")
        terminal.expect(">tiny")
        assert "\x1b[?1049h" in terminal.screen  # a screen of its own, which is given back
        terminal.press("q")
        assert terminal.end() == 0 and "\x1b[?1049l" in terminal.screen


def test_keys_that_come_at_once_are_told_apart():
    reader, writer = os.pipe()
    assert _pressed(reader, 0.0) == []
    os.write(writer, b"\x1b[A\x1bOBj\r\x1b")
    assert _pressed(reader, 0.0) == ["\x1b[A", "\x1bOB", "j", "\r", "\x1b"]
    os.close(writer)
    assert _pressed(reader, 0.0) == ["q"]
    os.close(reader)


def test_no_color_keeps_colour_out_of_a_terminal(server):
    more = {"TERM": "xterm-256color", "NO_COLOR": "1", "SHOAL_API_KEY": "sesame", **SIZE}
    with Terminal("top", server.url, **more) as terminal:
        terminal.expect("ready")
        terminal.press("\x03")
        assert terminal.end() == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.screen)


def test_a_terminal_without_a_screen_gets_one_picture_after_the_other(server):
    with Terminal("top", server.url, TERM="dumb", SHOAL_API_KEY="sesame", **SIZE) as terminal:
        terminal.expect("tiny")
        terminal.expect("shoal top")
        terminal.expect("tiny")
        assert "\x1b" not in terminal.screen
        terminal.press("\x03")
        assert terminal.end() == 0


def test_a_server_that_is_gone_is_told_and_comes_back_by_itself():
    port = free_port()
    with Terminal("top", f"http://127.0.0.1:{port}", TERM="xterm", **SIZE) as terminal:
        terminal.expect("no answer")
        for _ in range(2):
            with FakeServer(engine_saying("hello "), port=port):
                terminal.expect(">tiny")
            terminal.expect("no answer")
            terminal.expect(">tiny")  # as it was last
        terminal.press("q")
        assert terminal.end() == 0
