"""A command at a terminal, as a person has it: keys to press and a screen to read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

SPAWN = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
DEADLINE_S = 30


class Screen:
    """A terminal with a command, which ends when the block does."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SPAWN, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TERM": "dumb", "NO_PROXY": "*"} | environment,
            cwd=cwd,
        )
        self.screen = ""
        self._seen = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while data := os.read(self.process.stdout.fileno(), 1 << 16):
            self.screen += data.decode(errors="replace").replace("\r\n", "\n")

    def press(self, keys: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(keys.encode())
        self.process.stdin.flush()

    def enter(self, line: str) -> None:
        self.press(line + "\r")

    def expect(self, text: str) -> str:
        """Waits until `text` is on the screen, after what was expected before; returns what came between."""
        deadline = time.monotonic() + DEADLINE_S
        while (at := self.screen.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"{text!r} does not come: {self.screen[self._seen :]!r}"
            time.sleep(0.01)
        before, self._seen = self.screen[self._seen : at], at + len(text)
        return before

    def end(self) -> int:
        """Waits for the command's exit code."""
        code = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            # What a shell has started would outlive it, and keep its ports.
            for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Terminal(Screen):
    """A terminal with `shoal`."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        super().__init__([sys.executable, "-m", "shoal", *arguments], environment)


class Shell(Screen):
    """A terminal with a shell. Commands must end with status 0, or by Ctrl-C."""

    PROMPT = re.compile(r"\[(\d+)\]\$ \Z")  # with the status of the command before
    CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")  # colours, and where the cursor goes

    def __init__(self, environment: Mapping[str, str], cwd: Path, deadline_s: float) -> None:
        shell = {"PS1": "[$?]$ ", "PS2": "> ", "BASH_SILENCE_DEPRECATION_WARNING": "1"}
        super().__init__(["bash", "--norc", "--noprofile", "--noediting"], {**environment, **shell}, cwd)
        self._deadline_s = deadline_s
        self._pressed_at = 0  # where the screen ended then
        self._is_interrupted = False
        self.mark = 0  # where `await_line` begins to read

    def command(self, text: str) -> None:
        """Types a command of one line, or of several that end with a backslash, once the one before has
        ended."""
        self.await_prompt()
        self._is_interrupted = False
        self.keys(text.replace("\n", "\r") + "\r")

    def keys(self, keys: str) -> None:
        self._pressed_at = len(self.screen)
        self.press(keys)

    def interrupt(self) -> None:
        self._is_interrupted = True
        self.keys(CTRL_C)

    def await_prompt(self) -> None:
        self._await(self._status, "the shell's prompt")
        assert not self._has_failed(), self.screen

    def await_line(self, pattern: str) -> None:
        """Waits for what matches this regular expression, after `mark`."""
        self._await(lambda: re.search(pattern, self.CODES.sub("", self.screen[self.mark :])), pattern)

    def _status(self) -> str | None:
        """The status of the last command; None while it runs."""
        found = self.PROMPT.search(self.screen, self._pressed_at)
        return found and found[1]

    def _has_failed(self) -> bool:
        return self._status() not in (None, "0") and not self._is_interrupted

    def _await(self, condition: Callable[[], object], what: str) -> None:
        seconds_left, now = self._deadline_s, time.monotonic()
        while True:
            has_ended = self._status() is not None  # read first: its last lines are on the screen then
            if condition():
                return
            assert not (seconds_left < 0 or has_ended or self.process.poll() is not None), (
                f"{what!r} does not come: {self.screen}"
            )
            time.sleep(0.05)
            before, now = now, time.monotonic()
            seconds_left -= (now - before) / _crowding()


def _crowding() -> float:
    """Returns how many threads want each core now, from 1 to 8: a command gets that much less done in a second."""
    return min(max(os.getloadavg()[0] / len(os.sched_getaffinity(0)), 1), 8)
