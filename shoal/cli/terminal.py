"""Output at a terminal: remarks, and an answer's text as it grows, wrapped at words."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from typing import Protocol, TextIO

from rich.cells import cell_len

CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]"
)  # control characters, which could change the terminal
PIECE = re.compile(r"\n|[^\S\n]+|\S+")
COLUMN = re.compile(r".*\S\s{2,}(?=\S)")  # to the last column of a table
NARROW = 20  # columns; narrower text is not wrapped, as it could not be read


class Writer(Protocol):
    """Writes a text that arrives in pieces."""

    def add(self, text: str) -> None: ...

    def end(self) -> None:
        """Writes the rest, and ends the line."""


class Raw:
    """Writes the text unchanged, for a program that reads it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def add(self, text: str) -> None:
        write(self._stream, text)

    def end(self) -> None:
        write(self._stream, "\n")


class Wrapped:
    """Writes text wrapped at words. A word is held back until it is complete."""

    def __init__(self, stream: TextIO, is_dim: bool = False) -> None:
        self._stream, self._is_dim = stream, is_dim
        self._gap = self._word = ""  # the spaces before the word, and the word so far
        self._column = 0

    def add(self, text: str) -> None:
        *pieces, self._word = PIECE.findall(self._word + CONTROL.sub("", text)) or [""]
        if self._word.isspace():
            pieces.append(self._word)
            self._word = ""
        self._write("".join(self._place(piece) for piece in pieces))

    def end(self) -> None:
        self._write(self._place(self._word) + "\n")
        self._gap = self._word = ""
        self._column = 0

    def _place(self, piece: str) -> str:
        """Returns the text to write for a word, a gap or the end of a line."""
        if piece == "\n":
            self._gap, self._column = "", 0
            return "\n"
        if piece.isspace():
            self._gap += piece.expandtabs(4)
            return ""
        if not piece:
            return ""
        width, length = terminal_width(), cell_len(piece)
        before, self._gap = self._gap, ""
        behind = self._column + len(before) + length
        # The terminal breaks a word that is longer than a line, such as a sentence in Chinese.
        if behind > width and self._column and length <= width:
            before, behind = "\n", length
        self._column = behind % width or width
        return before + piece

    def _write(self, text: str) -> None:
        if text:
            write(self._stream, dim(text) if self._is_dim else text)


def note(text: str) -> None:
    """Prints a remark to standard error, at a terminal dimmed and wrapped at words."""
    if sys.stderr.isatty():
        text = "\n".join(_wrapped(line) for line in text.split("\n"))
    write(sys.stderr, dim(text) + "\n")


def dim(text: str) -> str:
    text = CONTROL.sub("", text)
    is_plain = not sys.stderr.isatty() or os.environ.get("NO_COLOR") or is_dumb()
    return text if is_plain else f"\x1b[2m{text}\x1b[0m"


def write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def is_dumb() -> bool:
    return os.environ.get("TERM", "dumb") == "dumb"


def terminal_width() -> int:
    return max(shutil.get_terminal_size().columns, NARROW)


def _wrapped(line: str) -> str:
    """Continues the line of a table below its last column."""
    width = terminal_width()
    if cell_len(line) <= width:
        return line
    found = COLUMN.match(line)
    indent = len(found[0]) if found and len(found[0]) <= width - NARROW else 0
    return textwrap.fill(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
