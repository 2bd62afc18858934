"""`shoal chat`: a conversation at the terminal, or read from a pipe. speakers.py has the models that
answer."""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.cli.keyboard import FENCE, Keyboard
from shoal.cli.sampling_flags import SAMPLING
from shoal.cli.speakers import ContextFullError, Message, Piece, Settings, Speaker
from shoal.cli.terminal import Raw, Wrapped, Writer, is_dumb, note
from shoal.config import DEFAULT_MODEL
from shoal.errors import RequestError, ShoalError
from shoal.options.parser import CLOSE
from shoal.sampling_params import SamplingParams

LEAVE = ("bye", "quit", "exit")
BROKEN_OFF = ("abort", "error", "content_filter")  # finish reasons that neither the model nor the user caused
OWN_FIELDS = ("model", "stream", "stream_options")  # fields of a request's body that a chat sets itself

SMALL = f"""
{DEFAULT_MODEL} is small, to try things out; `shoal chat Qwen/Qwen3-0.6B` talks with a larger model"""

HELP = f"""/help, /?              this list
/regenerate, /regen    answer the last message again
/edit [TEXT]           change the last message, and answer that
/undo                  remove the last message and its answer
/clear                 forget the conversation; the system message stays
/model [NAME]          list the models, or continue with another one
/system [TEXT]         show or set the system message; "" removes it
/set [NAME [VALUE]]    show or change a setting, such as /set temperature 0.2 (or: default)
/show                  the model, the settings, and how full the context is
/save FILE             write the conversation, as a body for /v1/chat/completions
/load FILE             continue a conversation from such a file
/bye, /quit, /exit     leave, as Ctrl-D does

A line that ends with \\ continues in the next one; {FENCE} begins and ends a text of several lines.
A paste is one message, whatever it begins with. Put a space before a message that starts with /.
Ctrl-C stops an answer and keeps what was said; arrow up brings back what you typed."""


class Chat:
    """A conversation: its turns, its settings, and its commands."""

    def __init__(self, speaker: Speaker, keyboard: Keyboard, system: str | None, settings: Settings) -> None:
        self.speaker, self.keyboard, self.settings = speaker, keyboard, dict(settings)
        self.system = system
        self.turns: list[Message] = []
        self.saved: Path | None = None  # may be written again
        self.num_failures = 0
        keyboard.complete = self.completions

    @property
    def messages(self) -> list[Message]:
        return self._with_system(self.turns)

    def _with_system(self, turns: list[Message]) -> list[Message]:
        return [{"role": "system", "content": self.system}, *turns] if self.system else turns

    def run(self) -> int:
        """Runs until /bye or the end of the input. Returns 1 if a message from a pipe got no answer, else
        0."""
        if self.keyboard.is_terminal:
            note(
                f"shoal {__version__} · {self._described()}\n"
                "/help lists the commands · Ctrl-C stops an answer · Ctrl-D or /bye leaves"
                + (SMALL if self.speaker.name == DEFAULT_MODEL else "")
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
        """Sends a message and shows the answer. A message without an answer is removed again, and the turns
        that were dropped for it are restored."""
        self._continue(self.turns, text, "your message is taken back")

    def _continue(self, earlier: list[Message], text: str, without_answer: str) -> None:
        """Continues `earlier` turns with a message. If no text arrives, the conversation stays as it was and
        `without_answer` is shown."""
        before = self.turns
        self.turns = [*earlier, {"role": "user", "content": text}]
        answer = _Shown(without_answer)
        try:
            with self.keyboard.put_aside():
                self._ask(answer)
        except KeyboardInterrupt:
            answer.end()
            note("[stopped; the text so far stays]" if answer.text else f"[stopped; {without_answer}]")
        except ShoalError as error:
            answer.end()
            self.num_failures += 1
            note(f"shoal: {error}")
        if answer.text:
            self.turns.append({"role": "assistant", "content": answer.text})
        else:
            self.turns = before

    def _ask(self, answer: _Shown) -> None:
        """Drops the oldest turns, one by one, while the speaker reports a full context."""
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
                            self._note_dropped(num_dropped)
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

    def _note_dropped(self, count: int) -> None:
        limit = self.speaker.context_len
        what = "the oldest turn was dropped" if count == 1 else f"the {count} oldest turns were dropped"
        note(f"[the context{f' of {limit} tokens' if limit else ''} is full: {what}]")

    # Commands

    def command(self, line: str) -> bool:
        """Runs a line that begins with /. Returns False if it ends the chat."""
        name, _, rest = line[1:].strip().partition(" ")
        if name in LEAVE:
            return False
        if name not in COMMANDS:
            nearest = difflib.get_close_matches(name, [*COMMANDS, *LEAVE], n=1)
            hint = f"did you mean /{nearest[0]}?" if nearest else "/help lists the commands."
            note(f"unknown command /{name}; {hint} To send a message that starts with /, put a space first.")
            return True
        try:
            COMMANDS[name](self, rest.strip())
        except ShoalError as error:
            note(str(error))
        return True

    def completions(self, line: str) -> list[str]:
        """Returns the possible completions of this line's last word."""
        if " " not in line:
            return [f"/{name}" for name in (*COMMANDS, *LEAVE)]
        command, _, rest = line.partition(" ")
        if " " in rest:
            return []
        if command == "/set":
            return list(SAMPLING)
        with contextlib.suppress(ShoalError):
            return self.speaker.models() if command == "/model" else []
        return []

    def help(self, _: str) -> None:
        note(HELP)

    def clear(self, _: str) -> None:
        self.turns = []
        note("the conversation is forgotten")

    def undo(self, _: str) -> None:
        earlier, last = self._last_message("undo")
        self.turns = earlier
        note(f"removed, with its answer: {_quoted(last)}")

    def regenerate(self, _: str) -> None:
        earlier, last = self._last_message("answer again")
        self._continue(earlier, last, "the earlier answer stays")

    def edit(self, text: str) -> None:
        earlier, last = self._last_message("edit")
        if not text:
            if not self.keyboard.can_edit:
                raise RequestError(
                    "/edit needs the new text of the message where there is no terminal to edit it at"
                )
            text = (self.keyboard.edit(last) or "").strip()
        if text:
            self._continue(earlier, text, "the earlier message and answer stay")
        else:
            note("[nothing is changed]")

    def _last_message(self, purpose: str) -> tuple[list[Message], str]:
        """Returns the turns before the user's last message, and that. Raises RequestError."""
        for i in range(len(self.turns) - 1, -1, -1):
            if self.turns[i]["role"] == "user":
                return self.turns[:i], self.turns[i]["content"]
        raise RequestError(f"there is no message to {purpose} yet")

    def change_model(self, name: str) -> None:
        if not name:
            names = self.speaker.models()
            note("\n".join(f"{'*' if one == self.speaker.name else ' '} {one}" for one in names))
            note("/model NAME continues this conversation with another model")
            return
        if name == self.speaker.name:
            note(f"{name} answers already")
            return
        note(f"changing to {name} ...")
        try:
            self.speaker.use(name)
        except KeyboardInterrupt:
            note(f"[stopped; {self.speaker.name} stays]")
            return
        note(self._described())

    def _described(self) -> str:
        speaker = self.speaker
        context = f" · context {speaker.context_len} tokens" if speaker.context_len else ""
        return f"{speaker.name} {speaker.place}{context}"

    def set_system(self, text: str) -> None:
        _check_text(text)
        if text:
            self.system = None if text == '""' else text
        note(f"system message: {self.system}" if self.system else "there is no system message")

    def set_parameter(self, text: str) -> None:
        """Raises RequestError for an unknown name or an impossible value; then nothing has changed."""
        name, _, value = text.removeprefix("parameter ").partition(" ")  # Ollama's word
        value = value.strip()
        if not name:
            self._show_settings()
            return
        if name == "system":
            self.set_system(value)
            return
        if name not in SAMPLING:
            nearest = difflib.get_close_matches(name, SAMPLING, n=1, cutoff=CLOSE)
            hint = f"did you mean {nearest[0]}?" if nearest else f"available: {', '.join(SAMPLING)}"
            raise RequestError(f"unknown setting {name!r}; {hint}")
        kind, field = SAMPLING[name]
        meaning = field.metadata["help"]
        if value == "default":
            self.settings = self._checked({key: self.settings[key] for key in self.settings if key != name})
        elif value:
            try:
                number = kind(value)
            except ValueError:
                what = "an integer" if kind is int else "a number"
                raise RequestError(f"{name} must be {what}, got {value!r:.80} ({meaning})") from None
            self.settings = self._checked({**self.settings, name: number})
        note(f"{name}: {self._value(name, self.speaker.defaults())} ({meaning})")

    def _checked(self, settings: Settings) -> Settings:
        """Returns the settings as parameters. Raises RequestError for a value out of range, or in conflict
        with another."""
        SamplingParams(**{"max_tokens": self.speaker.max_tokens, **settings})
        return settings

    def _show_settings(self) -> None:
        defaults = self.speaker.defaults()
        note(
            "\n".join(
                f"{name:20} {self._value(name, defaults):16} {field.metadata['help']}"
                for name, (_, field) in SAMPLING.items()
            )
        )

    def _value(self, name: str, defaults: Settings) -> str:
        if name in self.settings:
            return str(self.settings[name])
        if name not in defaults:
            return "default"
        return f"{defaults[name] if defaults[name] is not None else 'none'} (default)"

    def show(self, _: str) -> None:
        limit = self.speaker.context_len
        used = self.speaker.count(self.messages) if self.messages else 0
        if used is not None and limit is not None:
            used = min(used, limit)  # The template may end an answer that filled the context.
        fullness = f"{used if used is not None else '?'} of {limit or '?'} tokens"
        note(
            f"model      {self.speaker.name} {self.speaker.place}\n"
            f"context    {fullness}, {len(self.turns)} messages\n"
            f"system     {self.system or 'none'}"
        )
        self._show_settings()

    def save(self, name: str) -> None:
        path = _path_of(name, "/save")
        body: dict[str, Any] = {"model": self.speaker.name, "messages": self.messages, **self.settings}
        try:
            if path.exists() and not path.is_dir() and path != self.saved:
                raise RequestError(f"{path} exists; choose another name")
            path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            raise RequestError(f"cannot write {path}: {_reason(error, path)}") from None
        self.saved = path
        note(f"{len(self.messages)} messages written to {path}")

    def load(self, name: str) -> None:
        path = _path_of(name, "/load")
        try:
            given = _body_of(path)
            messages = [_message_of(i, message) for i, message in enumerate(given.pop("messages"))]
            settings = self._checked({key: given.pop(key) for key in SAMPLING if key in given})
        except OSError as error:
            hint = f"; /model {name} changes the model" if isinstance(error, FileNotFoundError) else ""
            raise RequestError(f"cannot read {path}: {_reason(error, path)}{hint}") from None
        except RequestError as error:
            raise RequestError(f"cannot load {path}: {error}") from None
        left_out = ", ".join(key for key in given if key not in OWN_FIELDS)
        note(f"{len(messages)} messages read from {path}" + (f"; left out: {left_out}" if left_out else ""))
        has_system = bool(messages) and messages[0]["role"] == "system"
        self.system = messages.pop(0)["content"] if has_system else None
        self.turns, self.settings = messages, settings
        self.saved = None if left_out else path  # a /save must not lose fields that were left out


COMMANDS: dict[str, Callable[[Chat, str], None]] = {
    "help": Chat.help,
    "regenerate": Chat.regenerate,
    "edit": Chat.edit,
    "undo": Chat.undo,
    "clear": Chat.clear,
    "model": Chat.change_model,
    "system": Chat.set_system,
    "set": Chat.set_parameter,
    "show": Chat.show,
    "save": Chat.save,
    "load": Chat.load,
    "?": Chat.help,
    "regen": Chat.regenerate,  # llama.cpp's word
}


class _Shown:
    """An answer on the screen, as it grows. `without_answer`: shown if there is no text."""

    def __init__(self, without_answer: str) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self._without_answer = without_answer
        self._num_tokens: int | None = None
        self._asked, self._first, self._last = time.perf_counter(), 0.0, 0.0
        self._answer, self._thought = _writer_of_answers(), Wrapped(sys.stderr, is_dim=True)
        self._thinks = False

    def add(self, piece: Piece) -> None:
        now = time.perf_counter()
        if piece.text or piece.thought:
            self._first, self._last = self._first or now, now
        self.finish_reason = piece.finish_reason or self.finish_reason
        self._num_tokens = self._num_tokens if piece.num_tokens is None else piece.num_tokens
        if piece.thought:
            self._thinks = True
            self._thought.add(piece.thought)
        if piece.text:
            self._end_thought()
            self.text += piece.text
            self._answer.add(piece.text)

    def end(self) -> None:
        """Ends the line."""
        self._end_thought()
        if self.text:
            self._answer.end()

    def _end_thought(self) -> None:
        if self._thinks:
            self._thought.end()
            self._thinks = False

    def speed(self) -> str:
        count, seconds = self._num_tokens, self._last - self._first
        if not self.text:
            return f"[no text came; {self._without_answer}]"
        if count is None:
            return f"[first text after {self._first - self._asked:.2f} s]"
        rate = f"{(count - 1) / seconds:.1f} tokens/s, " if count > 1 and seconds > 0 else ""
        return f"[{count} tokens, {rate}first after {self._first - self._asked:.2f} s]"


def _writer_of_answers() -> Writer:
    """Returns a Markdown writer if standard output is a terminal that can show it."""
    if not sys.stdout.isatty():
        return Raw(sys.stdout)
    if is_dumb() or not sys.stdout.encoding.lower().startswith("utf"):
        return Wrapped(sys.stdout)
    from shoal.cli.markdown import Markdown  # takes 0.1 s, which a pipe does not need

    return Markdown(sys.stdout)


def _without_oldest(turns: list[Message]) -> list[Message]:
    """Returns the turns without the oldest question and its answer; empty if only the newest question is
    left."""
    return next((turns[i:] for i in range(1, len(turns)) if turns[i]["role"] == "user"), [])


def _body_of(path: Path) -> dict[str, Any]:
    """Returns a request's body without its nulls; "messages" is a list. Raises OSError, and RequestError."""
    try:
        body = json.loads(path.read_text("utf-8-sig"))
        why = "not an object with a list `messages`"
    except UnicodeDecodeError:
        body, why = None, "not text in UTF-8"
    except json.JSONDecodeError as error:
        body, why = None, f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}"
    except RecursionError:
        body, why = None, "JSON that is nested too deeply"
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise RequestError(
            f"it must be a body for /v1/chat/completions ({why}); give a file that /save wrote"
        )
    return {key: value for key, value in body.items() if value is not None}


def _message_of(index: int, message: Any) -> Message:
    """Returns a message of a request's body as a chat keeps it: only its text. Raises RequestError for a
    message with more fields."""
    if not isinstance(message, dict):
        raise RequestError(f"messages[{index}] must be an object with role and content, got {message!r:.40}")
    role, content = message.get("role"), message.get("content")
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
        raise RequestError(
            f"messages[{index}].content must be text, got {content!r:.80}; take the message out"
        )
    if others := [key for key in message if key not in ("role", "content") and message[key]]:
        raise RequestError(
            f"messages[{index}] has {others[0]!r:.40}, which a chat does not keep; take it out"
        )
    return {"role": str(role), "content": content}


def _is_text(text: str) -> bool:
    """True if the text can be sent. A lone UTF-16 surrogate cannot; it also stands for an invalid UTF-8
    byte."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _check_text(typed: str) -> None:
    if not _is_text(typed):
        raise RequestError(f"{typed!r:.80} has bytes that are not UTF-8; give text in UTF-8")


def _path_of(name: str, command: str) -> Path:
    if not name:
        raise RequestError(f"{command} needs the name of a file")
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise RequestError(f"{command} {name}: there is no such home folder; write the whole path") from None


def _reason(error: OSError, path: Path) -> str:
    if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
        return f"the folder {path.parent} does not exist"
    if isinstance(error, IsADirectoryError):
        return "it is a folder; name a file"
    return (error.strerror or str(error)).lower()


def _quoted(text: str) -> str:
    first, *others = text.split("\n")
    return first[:60] + (" ..." if others or len(first) > 60 else "")
