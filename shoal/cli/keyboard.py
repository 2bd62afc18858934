"""Input of a chat: typed or pasted at a terminal, with editing and a history; or the lines of a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from shoal.cli.terminal import is_dumb, note
from shoal.errors import ConfigError
from shoal.files.user_dirs import state_folder

HISTORY_LINES = 1000
FENCE = '"""'
PASTE_BEGINS, PASTE_ON, PASTE_OFF = "\x1b[200~", "\x1b[?2004h", "\x1b[?2004l"
LINE_END = "\u2028"  # Unicode's line separator replaces line ends in the file of the history
PASTED = "\u2060"  # without width; Readline puts it before a paste


class Keyboard:
    """Reads messages and commands."""

    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self.complete: Callable[[str], Sequence[str]] = lambda line: ()  # completes a line
        self._can_paste = False  # marks that distinguish a paste from typing
        self._readline: Any = None
        self._history: Path | None = None
        self._num_kept = 0
        if is_terminal:
            with contextlib.suppress(ImportError):  # some builds of Python lack it: then there is no history
                import readline

                self._readline = readline
                self._bind_keys()
                self._open_history()

    def _bind_keys(self) -> None:
        # Portable builds of Python, such as uv's, have libedit in place of Readline, which cannot detect
        # pastes.
        is_libedit = "libedit" in (self._readline.__doc__ or "")
        self._readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        self._readline.set_completer(self._complete)
        self._readline.set_completer_delims(" ")
        self._can_paste = not is_libedit and not is_dumb()
        if self._can_paste:
            # CPython switches it off. With it, a paste of several lines is one message.
            self._readline.parse_and_bind("set enable-bracketed-paste on")
            if sys.stdin.encoding.lower() == "utf-8":
                self._readline.parse_and_bind(r'"\C-x\C-v": bracketed-paste-begin')
                self._readline.parse_and_bind(f'"{PASTE_BEGINS}": "{PASTED}\\C-x\\C-v"')

    def _open_history(self) -> None:
        try:
            path = state_folder() / "chat_history"
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
            path.chmod(0o600)
            lines = path.read_text("utf-8", "surrogateescape").split("\n")[:-1]
            if len(lines) > HISTORY_LINES:
                lines = lines[-HISTORY_LINES:]
                path.write_text("".join(f"{line}\n" for line in lines), "utf-8", "surrogateescape")
            for line in lines:
                self._readline.add_history(line.replace(LINE_END, "\n"))
            self._history = path
        except (OSError, ConfigError) as error:
            note(f"the history of what you type is not kept: {error}")
        self._num_kept = self._readline.get_current_history_length()

    def _complete(self, text: str, state: int) -> str | None:
        """Returns the n-th possible completion that begins with `text`."""
        words = self.complete(self._readline.get_line_buffer())
        found = [word for word in words if word.startswith(text)]
        return found[state] + " " if state < len(found) else None

    def read(self) -> str | None:
        """Returns a command, which begins with /, or a message of one or several lines, which does not: a
        pasted or fenced / gets a space before it. Returns None at the end. KeyboardInterrupt drops the typed
        text."""
        line = self._line(">>> ")
        if line is None:
            return None
        is_text = line.startswith((PASTED, FENCE))
        if line.startswith(FENCE):
            text = line.removeprefix(FENCE)
            while not text.rstrip().endswith(FENCE):
                if (line := self._line("... ")) is None:
                    return self._unfinished(text)
                text += "\n" + line
            message = text.rstrip().removesuffix(FENCE)
        else:
            message = line
            while message.endswith("\\"):
                message = message[:-1] + "\n"
                if (line := self._line("... ")) is None:
                    return self._unfinished(message)
                message += line
        self._keep_history()
        message = message.replace(PASTED, "")
        return " " + message if is_text and message.startswith("/") else message

    def edit(self, text: str) -> str | None:
        """Returns `text` as edited by the user; None if editing was interrupted. Needs `can_edit`."""
        self._readline.set_startup_hook(lambda: self._readline.insert_text(text))
        try:
            line = self._line(">>> ")
        except KeyboardInterrupt:
            print()
            return None
        finally:
            self._readline.set_startup_hook(None)
        return None if line is None else line.replace(PASTED, "")

    @property
    def can_edit(self) -> bool:
        return self._readline is not None

    @contextlib.contextmanager
    def put_aside(self) -> Generator[None]:
        """Hides typing inside the block, as it would appear in the middle of an answer. The next `read`
        returns it."""
        if not self.is_terminal:
            yield
            return
        import termios

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        silent = [*before]
        silent[3] &= ~termios.ECHO
        try:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
            self._write_paste_mode(PASTE_ON)
            yield
        finally:
            self._write_paste_mode(PASTE_OFF)
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def _write_paste_mode(self, mode: str) -> None:
        if self._can_paste:
            sys.stdout.write(mode)
            sys.stdout.flush()

    def _unfinished(self, text: str) -> str:
        """Returns the text of several lines at the end of the input. Ctrl-D drops it, as Ctrl-C does; the end
        of a pipe ends the text, too."""
        if not self.is_terminal:
            return text
        note("[the unfinished text is dropped]")
        return ""

    def _line(self, prompt: str) -> str | None:
        if not self.is_terminal:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            print()
            return None

    def _keep_history(self) -> None:
        """Appends the new lines, so that two conversations at once both stay in the history."""
        if self._readline is None or self._history is None:
            return
        length = self._readline.get_current_history_length()
        new = [self._readline.get_history_item(i + 1) for i in range(self._num_kept, length)]
        with (
            contextlib.suppress(OSError),  # a full disk must not end a conversation
            self._history.open("a", encoding="utf-8", errors="surrogateescape") as file,
        ):
            file.write("".join(text.replace("\n", LINE_END) + "\n" for text in new))
        self._num_kept = length
