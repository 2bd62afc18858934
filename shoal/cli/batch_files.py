"""The two files of `shoal run-batch`, in OpenAI's batch format: a line is a request, or its answer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from shoal.errors import ConfigError

BOM = b"\xef\xbb\xbf"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")

Key = str | int  # the custom_id of a line, or the number of a line without a usable one


class BatchRequest(msgspec.Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streamed(msgspec.Struct):
    stream: Any = None


class _Named(msgspec.Struct):
    custom_id: Any = None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input: a request, or the reason why it is invalid."""

    number: int  # from 1
    custom_id: str | None
    request: BatchRequest | None = None
    problem: str = ""

    @property
    def key(self) -> Key:
        return self.number if self.request is None or self.custom_id is None else self.custom_id


class BatchError(msgspec.Struct, frozen=True, omit_defaults=True):
    """`line` is the number of an input line that is not a valid request."""

    code: str | None
    message: str
    line: int | None = None


class BatchResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the output. A refusal is in it twice: in `error`, and as the body of the response."""

    id: str = msgspec.field(default_factory=lambda: f"batch_req_{secrets.token_hex(16)}")
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None = None

    @property
    def key(self) -> Key:
        has_line = self.error is not None and self.error.line is not None
        return self.error.line if has_line else self.custom_id  # type: ignore[return-value,union-attr]


def refusal_of(line: Line) -> BatchAnswer:
    """Returns the answer to an invalid line, in the form in which an endpoint refuses a request."""
    body = {"message": line.problem, "type": "invalid_request_error", "param": None, "code": None}
    return BatchAnswer(
        custom_id=line.custom_id,
        response=BatchResponse(400, secrets.token_hex(16), msgspec.Raw(msgspec.json.encode({"error": body}))),
        error=BatchError("invalid_request_error", line.problem, line.number),
    )


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the lines of the input that are not empty. Raises ConfigError if it cannot be read."""
    seen: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if number == 1:
                    text = text.removeprefix(BOM)
                if text := text.strip():
                    yield _line_of(number, text, seen)
    except OSError as error:
        raise ConfigError(
            f"input_file must be a file that can be read, got {str(path)!r}: {(error.strerror or '').lower()}"
        ) from None


def _line_of(number: int, text: bytes, seen: dict[str, int]) -> Line:
    """seen: the numbers of the lines of each custom_id before this one."""
    try:
        request = msgspec.json.decode(text, type=BatchRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        custom_id = None
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            custom_id = msgspec.json.decode(text, type=_Named).custom_id
        name = custom_id if isinstance(custom_id, str) else None
        return Line(
            number,
            name,
            problem=f"line {number} must be an object with custom_id, method, url and body: {error}",
        )
    custom_id, problem = request.custom_id, ""
    if custom_id in seen:
        problem = f"custom_id must be unique, got {custom_id!r:.80} in lines {seen[custom_id]} and {number}"
    elif request.method != "POST":
        problem = f"method must be POST, got {request.method!r:.20}"
    elif request.url not in ENDPOINTS:
        problem = f"url must be one of {', '.join(ENDPOINTS)}, got {request.url!r:.100}"
    elif _is_streamed(request.body):
        problem = "body.stream must be false or absent, as a batch has whole answers; leave it out"
    seen.setdefault(custom_id, number)
    return Line(number, custom_id, None if problem else request, problem)


def _is_streamed(body: msgspec.Raw) -> bool:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # The endpoint reports the error.
        return msgspec.json.decode(body, type=_Streamed).stream not in (None, False)
    return False


class AnswerFile:
    """The output file, to which answers are appended as they arrive. One process has it open at a time."""

    def __init__(self, path: Path) -> None:
        """Reads the existing answers, without a truncated last line. Raises ConfigError."""
        self._path = path
        self.places: dict[Key, tuple[int, int]] = {}  # where each answer begins, and its length
        try:
            self._file: BinaryIO = path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(
                f"output_file {str(path)!r} is being written by another run; wait for its end"
            ) from None
        except OSError as error:
            raise ConfigError(
                "output_file must be a file that can be written, got "
                f"{str(path)!r}: {(error.strerror or '').lower()}"
            ) from None
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        self._file.seek(0)
        place = 0
        for number, text in enumerate(self._file, 1):
            if not text.endswith(b"\n"):
                break
            if text.strip():
                try:
                    answer = msgspec.json.decode(text, type=BatchAnswer)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    raise ConfigError(
                        f"output_file must have only answers of a batch, got {str(self._path)!r} with "
                        f"another line {number}; name a new file"
                    ) from None
                self.places[answer.key] = (place, len(text))
            place += len(text)
        self._file.truncate(place)

    def add(self, answer: BatchAnswer) -> None:
        text = msgspec.json.encode(answer) + b"\n"
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(text)
        self._file.flush()
        self.places[answer.key] = (place, len(text))

    def put_in_order(self, keys: list[Key]) -> None:
        """Keeps only these answers, in this order. The file is replaced atomically."""
        if list(self.places) == keys and sorted(self.places.values()) == list(self.places.values()):
            return
        new = self._path.with_name(self._path.name + ".new")
        with new.open("wb") as ordered:
            for key in keys:
                place, length = self.places[key]
                self._file.seek(place)
                ordered.write(self._file.read(length))
        new.replace(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
