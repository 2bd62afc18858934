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
from shoal.cli.speakers import ContextFullError, Message, Piece, Settings, Speaker
from shoal.errors import ConfigError, RequestError, ShoalError
from shoal.options import CLOSE, SAMPLING
from shoal.user_folders import state_folder
from shoal.version import __version__

HISTORY_LINES = 1000
LEAVE = ("bye", "exit", "quit")
BROKEN_OFF = ("abort", "error", "content_filter")  # reasons of an end that neither the model nor we wanted
OWN_FIELDS = ("model", "stream", "stream_options")  # of a request's body: a chat has its own
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
        # A paste of several lines is then one message. CPython switches it off; a dumb terminal cannot do it.
        if os.environ.get("TERM", "dumb") != "dumb":
            self._readline.parse_and_bind("set enable-bracketed-paste on")
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
        return message

    def _unfinished(self, text: str) -> str:
        """What becomes of a text of several lines when the input ends. Ctrl-D drops it, as Ctrl-C does; in a
        pipe the end is the text's end, too."""
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
        return self._with_system(self.turns)

    def _with_system(self, turns: list[Message]) -> list[Message]:
        return [{"role": "system", "content": self.system}, *turns] if self.system else turns

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
        """Asks and shows the answer. A question that nothing came of is taken back, and what was dropped for
        it comes back."""
        before = self.turns
        self.turns = [*before, {"role": "user", "content": text}]
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
            self.turns = before

    def _ask(self, answer: _Shown) -> None:
        """Drops the oldest turns, one by one, for as long as the speaker says that its context is full."""
        _check_text(self.turns[-1]["content"])
        turns, num_dropped = self.turns, 0
        while True:
            try:
                with contextlib.closing(
                    self.speaker.answer(self._with_system(turns), self.settings)
                ) as pieces:
                    for piece in pieces:
                        if turns is not self.turns and (piece.text or piece.thought):
                            self.turns = turns
                            self._tell_dropped(num_dropped)
                        answer.add(piece)
                break
            except ContextFullError:
                turns = _without_oldest(turns)
                num_dropped += 1
                if not turns:
                    raise
        answer.end()
        note(answer.speed())
        if answer.finish_reason in BROKEN_OFF:
            self.num_failures += 1
            note(f"[the answer was broken off {self.speaker.place}: {answer.finish_reason}]")
        elif answer.finish_reason == "length":
            limit = self.speaker.context_len
            used = self.speaker.count([*self.messages, {"role": "assistant", "content": answer.text}])
            is_full = limit is not None and used is not None and used >= limit
            note(
                "[cut off: the context is full]"
                if is_full
                else "[cut off at max_tokens; /set max_tokens N allows longer answers]"
            )

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
        self.turns = []
        note("the conversation is forgotten")

    def set_system(self, text: str) -> None:
        _check_text(text)
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
            nearest = difflib.get_close_matches(name, SAMPLING, n=1, cutoff=CLOSE)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(SAMPLING)}"
            raise RequestError(f"there is no setting {name!r}; {hint}")
        kind, field = SAMPLING[name]
        meaning = field.metadata["help"]
        value = value.strip()
        if value == "default":
            self.settings = self._checked({key: self.settings[key] for key in self.settings if key != name})
        elif value:
            try:
                number = kind(value)
            except ValueError:
                raise RequestError(
                    f"{name} {value!r} is not {'an integer' if kind is int else 'a number'} ({meaning})"
                ) from None
            self.settings = self._checked({**self.settings, name: number})
        note(f"{name}: {self.settings.get(name, 'default')} ({meaning})")

    def _checked(self, settings: Settings) -> Settings:
        """Returns them. Raises RequestError for a value out of range, or at odds with another."""
        SamplingParams(**{"max_tokens": self.speaker.max_tokens, **settings})
        return settings

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
        if used is not None and limit is not None:
            used = min(used, limit)  # The template may end an answer that filled the context.
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
            given = {key: value for key, value in body.items() if value is not None}
            messages = [_message_of(i, message) for i, message in enumerate(given.pop("messages"))]
            settings = self._checked({key: given.pop(key) for key in SAMPLING if key in given})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            why = str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"
            raise RequestError(
                f"{path} is no body for /v1/chat/completions that a chat can go on with: {why}"
            ) from None
        left_out = ", ".join(key for key in given if key not in OWN_FIELDS)
        note(f"{len(messages)} messages read from {path}" + (f"; left out: {left_out}" if left_out else ""))
        has_system = bool(messages) and messages[0]["role"] == "system"
        self.system = messages.pop(0)["content"] if has_system else None
        self.turns, self.settings = messages, settings
        self.saved = None if left_out else path  # what was left out is not lost by a /save


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


def _without_oldest(turns: list[Message]) -> list[Message]:
    """Without the oldest question and its answer; empty if there is only the newest question."""
    return next((turns[i:] for i in range(1, len(turns)) if turns[i]["role"] == "user"), [])


def _message_of(index: int, message: dict[str, Any]) -> Message:
    """A message of a request's body as a chat keeps it: text alone. Raises RequestError for any other."""
    role, content = message["role"], message.get("content")
    if role not in ("user", "assistant") and (role, index) != ("system", 0):
        raise RequestError(
            f"messages[{index}] has the role {role!r:.40}, and a chat has one system message, the first, and "
            "then users' and assistants'; take it out"
        )
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            content = "\n".join(texts)
    if not isinstance(content, str) or not _is_text(content):
        raise RequestError(f"messages[{index}].content {content!r:.80} is no text; take the message out")
    if others := [key for key in message if key not in ("role", "content") and message[key]]:
        raise RequestError(
            f"messages[{index}] has {others[0]!r:.40}, which a chat does not keep; take it out"
        )
    return {"role": role, "content": content}


def _is_text(text: str) -> bool:
    """Whether it can be sent. Half a pair of UTF-16 cannot; it stands for a byte that is no UTF-8, too."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _check_text(typed: str) -> None:
    if not _is_text(typed):
        raise RequestError(f"{typed!r:.80} holds bytes that are no UTF-8; give text in UTF-8")


def _path_of(name: str, command: str) -> Path:
    if not name:
        raise RequestError(f"{command} needs the name of a file")
    return Path(name).expanduser()
