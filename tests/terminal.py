"""The `shoal` command at a terminal, as a person has it: keys to press and a screen to read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

SPAWN = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
DEADLINE_S = 30


class Terminal:
    """Ends the command when the block does."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-c", SPAWN, sys.executable, "-m", "shoal", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TERM": "dumb", "NO_PROXY": "*"} | environment,
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

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
