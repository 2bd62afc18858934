"""`shoal chat`: a conversation at the terminal, or read from a pipe. speakers.py has who answers."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.api import SamplingParams
from shoal.cli.speakers import MAX_TOKENS, ContextFullError, Message, Piece, Settings, Speaker
from shoal.errors import ConfigError, RequestError, ShoalError
from shoal.options import SAMPLING
from shoal.user_folders import state_folder
from shoal.version import __version__

HISTORY_LINES = 1000
LEAVE = ("bye", "exit", "quit")
FENCE = '"""'
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")  # characters that could command a terminal

HELP = f"""/help                  this list
/clear                 forget the conversation; the system message stays
/system [TEXT]         show or set the system message; "" is none
/set [NAME [VALUE]]    show or set how tokens are drawn, such as /set temperature 0.2 (or: default)
/show                  the model, the settings, and how full the context is
/save FILE             write the conversation, as a body for /v1/chat/completions
/load FILE             go on with such a conversation
/bye                   leave, as Ctrl-D does

A line that ends with \\ goes on in the next one; {FENCE} begins and ends a text of several lines.
A message that is to begin with / needs a space before it.
Ctrl-C stops an answer and keeps what was said; arrow up brings back what you typed."""


class Keyboard:
    """Lines that a person types, with editing and a history that lasts; or plain lines out of a pipe."""

    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self._readline: Any = None
        self._history: Path | None = None
        self._num_kept = 0
        if is_terminal:
            with contextlib.suppress(ImportError):  # some builds of Python lack it: then nothing is kept
                import readline

                self._readline = readline
                self._open_history()

    def _open_history(self) -> None:
        self._readline.set_history_length(HISTORY_LINES)
        self._readline.parse_and_bind("tab: complete")
        self._readline.set_completer(self._complete)
        self._readline.set_completer_delims(" ")
        try:
            path = state_folder() / "chat_history"
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
            path.chmod(0o600)
            self._readline.read_history_file(path)
            self._history = path
        except (OSError, ConfigError) as error:
            note(f"the history of what you type is not kept: {error}")
        self._num_kept = self._readline.get_current_history_length()

    def _complete(self, text: str, state: int) -> str | None:
        """The n-th of the commands, or of the settings after /set, that begin with `text`."""
        line = self._readline.get_line_buffer()
        known = [f"/{name}" for name in (*COMMANDS, "bye")] if line == text else []
        if line.startswith("/set ") and line.count(" ") == 1:
            known = list(SAMPLING)
        found = [name for name in known if name.startswith(text)]
        return found[state] + " " if state < len(found) else None

    def read(self) -> str | None:
        """One message of one or several lines; None at the end. KeyboardInterrupt drops what was typed."""
        line = self._line(">>> ")
        if line is None:
            return None
        if line.startswith(FENCE):
            text = line.removeprefix(FENCE)
            while not text.rstrip().endswith(FENCE) and (line := self._line("... ")) is not None:
                text += "\n" + line
            message = text.rstrip().removesuffix(FENCE)
        else:
            message = line
            while message.endswith("\\"):
                message = message[:-1] + "\n" + (self._line("... ") or "")
        self._keep_history()
        return message

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
        """Appends what is new, so that two conversations at once keep both."""
        if self._readline is None or self._history is None:
            return
        length = self._readline.get_current_history_length()
        with contextlib.suppress(OSError):  # a full disk is no reason to end a conversation
            if hasattr(self._readline, "append_history_file"):
                self._readline.append_history_file(length - self._num_kept, self._history)
            else:
                self._readline.write_history_file(self._history)
        self._num_kept = length


class Chat:
    """A conversation: its turns, its settings, and what is said about it."""

    def __init__(self, speaker: Speaker, keyboard: Keyboard, system: str | None, settings: Settings) -> None:
        self.speaker, self.keyboard, self.settings = speaker, keyboard, dict(settings)
        self.system = system
        self.turns: list[Message] = []
        self.saved: Path | None = None  # may be written again
        self.num_failures = 0

    @property
    def messages(self) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def run(self) -> int:
        """Until /bye or the end of the input. 1 if a message from a pipe could not be answered, else 0."""
        if self.keyboard.is_terminal:
            context = f" · context {self.speaker.context_len} tokens" if self.speaker.context_len else ""
            note(
                f"shoal {__version__} · {self.speaker.name} {self.speaker.place}{context}\n"
                "/help lists the commands · Ctrl-C stops an answer · Ctrl-D or /bye leaves"
            )
        while True:
            try:
                text = self.keyboard.read()
            except KeyboardInterrupt:
                if not self.keyboard.is_terminal:
                    raise
                note("\nCtrl-D or /bye leaves")
                continue
            if text is None or (text.startswith("/") and not self.command(text)):
                return 1 if self.num_failures and not self.keyboard.is_terminal else 0
            if text.strip() and not text.startswith("/"):
                self.say(text.strip())

    # Turns

    def say(self, text: str) -> None:
        """Asks and shows the answer. A turn of which nothing came is taken back."""
        self.turns.append({"role": "user", "content": text})
        answer = _Shown()
        try:
            self._ask(answer)
        except KeyboardInterrupt:
            answer.end()
            note("[stopped; what was said stays]" if answer.text else "[stopped; your message is taken back]")
        except ShoalError as error:
            answer.end()
            self.num_failures += 1
            note(f"shoal: {error}")
        if answer.text:
            self.turns.append({"role": "assistant", "content": answer.text})
        else:
            self.turns.pop()

    def _ask(self, answer: _Shown) -> None:
        self._make_room()
        while True:
            try:
                with contextlib.closing(self.speaker.answer(self.messages, self.settings)) as pieces:
                    for piece in pieces:
                        answer.add(piece)
                break
            except ContextFullError:
                if not self._drop_turn():
                    raise
                self._tell_dropped(1)
        answer.end()
        note(answer.speed())
        if answer.finish_reason == "length":
            limit = self.speaker.context_len
            used = self.speaker.count([*self.messages, {"role": "assistant", "content": answer.text}])
            is_full = limit is not None and used is not None and used >= limit
            note(
                "[cut off: the context is full]"
                if is_full
                else "[cut off at max_tokens; /set max_tokens N allows longer answers]"
            )

    def _make_room(self) -> None:
        """Drops the oldest turns until max_tokens or a quarter of the context is left, whichever is less."""
        limit = self.speaker.context_len
        if limit is None:
            return
        room = min(self.settings.get("max_tokens", MAX_TOKENS), limit // 4)
        num_dropped = 0
        count = self.speaker.count(self.messages)
        while count is not None and count + room > limit and self._drop_turn():
            num_dropped += 1
            count = self.speaker.count(self.messages)
        if num_dropped:
            self._tell_dropped(num_dropped)
        if count is not None and count >= limit:
            raise ContextFullError(
                f"this message takes about {count} tokens, and the context has {limit}; shorten it"
            )

    def _drop_turn(self) -> bool:
        """Drops the oldest question with its answer. False if there is only the newest question."""
        if len(self.turns) < 2:
            return False
        del self.turns[0]
        while self.turns[0]["role"] != "user":
            del self.turns[0]
        return True

    def _tell_dropped(self, count: int) -> None:
        limit = self.speaker.context_len
        what = "the oldest turn was dropped" if count == 1 else f"the {count} oldest turns were dropped"
        note(f"[the context{f' of {limit} tokens' if limit else ''} is full: {what}]")

    # Commands

    def command(self, line: str) -> bool:
        """Obeys a line that begins with /. False if it was the last one."""
        name, _, rest = line[1:].strip().partition(" ")
        if name in LEAVE:
            return False
        if name not in COMMANDS:
            nearest = difflib.get_close_matches(name, [*COMMANDS, *LEAVE], n=1)
            hint = f"did you mean /{nearest[0]}?" if nearest else "/help lists them"
            note(
                f"there is no command /{name}; {hint} "
                "(a message that is to begin with / needs a space before it)"
            )
            return True
        try:
            COMMANDS[name](self, rest.strip())
        except (RequestError, OSError) as error:
            note(str(error))
        return True

    def help(self, _: str) -> None:
        note(HELP)

    def clear(self, _: str) -> None:
        self.turns.clear()
        note("the conversation is forgotten")

    def set_system(self, text: str) -> None:
        if text:
            self.system = None if text == '""' else text
        note(f"system message: {self.system}" if self.system else "there is no system message")

    def set_parameter(self, text: str) -> None:
        """Raises RequestError for an unknown name or an impossible value; then nothing has changed."""
        name, _, value = text.partition(" ")
        if not name:
            self._show_settings()
            return
        if name not in SAMPLING:
            nearest = difflib.get_close_matches(name, SAMPLING, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(SAMPLING)}"
            raise RequestError(f"there is no setting {name!r}; {hint}")
        kind, field = SAMPLING[name]
        meaning = field.metadata["help"]
        value = value.strip()
        if value == "default":
            self.settings.pop(name, None)
        elif value:
            try:
                number = kind(value)
            except ValueError:
                raise RequestError(
                    f"{name} {value!r} is not {'an integer' if kind is int else 'a number'} ({meaning})"
                ) from None
            SamplingParams(**{name: number})  # raises for a value out of range
            self.settings[name] = number
        note(f"{name}: {self.settings.get(name, 'default')} ({meaning})")

    def _show_settings(self) -> None:
        note(
            "\n".join(
                f"{name:20} {self.settings.get(name, 'default')!s:10} {field.metadata['help']}"
                for name, (_, field) in SAMPLING.items()
            )
        )

    def show(self, _: str) -> None:
        limit = self.speaker.context_len
        used = self.speaker.count(self.messages) if self.messages else 0
        fullness = f"{'?' if used is None else used} of {limit or '?'} tokens"
        note(
            f"model      {self.speaker.name} {self.speaker.place}\n"
            f"context    {fullness}, {len(self.turns)} messages\n"
            f"system     {self.system or 'none'}"
        )
        self._show_settings()

    def save(self, name: str) -> None:
        path = _path_of(name, "/save")
        if path.exists() and path != self.saved:
            raise RequestError(f"{path} exists; choose another name")
        body: dict[str, Any] = {"model": self.speaker.name, "messages": self.messages, **self.settings}
        path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", "utf-8")
        self.saved = path
        note(f"{len(self.messages)} messages written to {path}")

    def load(self, name: str) -> None:
        path = _path_of(name, "/load")
        try:
            body = json.loads(path.read_text("utf-8"))
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in body["messages"]]
            settings = {key: body[key] for key in SAMPLING if key in body}
            SamplingParams(**settings)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise RequestError(f"{path} is no conversation that /save wrote: {why}") from None
        self.system = next((m["content"] for m in messages if m["role"] == "system"), None)
        self.turns = [m for m in messages if m["role"] in ("user", "assistant")]
        self.settings, self.saved = settings, path
        note(f"{len(messages)} messages read from {path}")


COMMANDS: dict[str, Callable[[Chat, str], None]] = {
    "help": Chat.help,
    "clear": Chat.clear,
    "system": Chat.set_system,
    "set": Chat.set_parameter,
    "show": Chat.show,
    "save": Chat.save,
    "load": Chat.load,
    "?": Chat.help,
}


class _Shown:
    """An answer on the screen, as it grows."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self._num_tokens: int | None = None
        self._asked, self._first, self._last = time.perf_counter(), 0.0, 0.0
        self._thinks = False

    def add(self, piece: Piece) -> None:
        now = time.perf_counter()
        if piece.text or piece.thought:
            self._first, self._last = self._first or now, now
        self.finish_reason = piece.finish_reason or self.finish_reason
        self._num_tokens = self._num_tokens if piece.num_tokens is None else piece.num_tokens
        if piece.thought:
            _write(sys.stderr, _dim(piece.thought))
            self._thinks = True
        if piece.text:
            if self._thinks:
                _write(sys.stderr, "\n")
                self._thinks = False
            _write(sys.stdout, CONTROL.sub("", piece.text) if sys.stdout.isatty() else piece.text)
            self.text += piece.text

    def end(self) -> None:
        """Ends the line."""
        if self.text:
            _write(sys.stdout, "\n")
        elif self._thinks:
            _write(sys.stderr, "\n")

    def speed(self) -> str:
        count, seconds = self._num_tokens, self._last - self._first
        if not self.text:
            return "[no text came; your message is taken back]"
        if count is None:
            return f"[first text after {self._first - self._asked:.2f} s]"
        rate = f"{(count - 1) / seconds:.1f} tokens/s, " if count > 1 and seconds > 0 else ""
        return f"[{count} tokens, {rate}first after {self._first - self._asked:.2f} s]"


def note(text: str) -> None:
    """Prints a remark of ours to standard error, dimmed at a terminal."""
    _write(sys.stderr, _dim(text) + "\n")


def _dim(text: str) -> str:
    text = CONTROL.sub("", text)
    is_plain = not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain else f"\x1b[2m{text}\x1b[0m"


def _write(stream: Any, text: str) -> None:
    stream.write(text)
    stream.flush()


def _path_of(name: str, command: str) -> Path:
    if not name:
        raise RequestError(f"{command} needs the name of a file")
    return Path(name).expanduser()
