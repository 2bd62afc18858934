"""Markdown at a terminal, drawn by Rich while it arrives. The format is light, so that copied text is useful:
code has no frame and no margin, and a link shows its address."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from typing import TextIO

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import markdown
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from shoal.cli.terminal import CONTROL, terminal_width, write

CODE_THEME = "ansi_dark"  # the terminal's own colours
THEME = Theme(
    {
        "markdown.code": "cyan",
        "markdown.h1": "bold underline",
        "markdown.h2": "bold",
        "markdown.h3": "bold",
        "markdown.link": "none",
        "markdown.link_url": "underline",
    }
)
SHARE = 0.1  # the largest share of the time that drawing may take
CODES = re.compile(r"\x1b\[[0-9;]*m")
MARGIN = re.compile(r" +((?:\x1b\[0m)?)$")
UNDECIDED = re.compile(r"[-=+*_#`~|>.\d\s]*")  # characters of a line that may still become any kind of block


class Markdown:
    """Writes blocks: paragraphs, lists, code. Complete blocks stay; the last one is drawn again as it grows,
    from its first changed line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(
            file=stream, force_terminal=True, theme=THEME, highlight=False, markup=False, emoji=False
        )
        self._parser = MarkdownIt().enable("strikethrough").enable("table")
        # These would not be shown.
        self._parser.disable(["html_block", "html_inline", "reference", "image"])
        self._source = ""  # the source of the last block
        self._lines: list[str] = []  # the lines of the last block on the screen
        self._draws_again_at = 0.0

    def add(self, text: str) -> None:
        self._source += CONTROL.sub("", text)
        is_decided = not UNDECIDED.fullmatch(self._source.rpartition("\n")[2])
        if is_decided and time.perf_counter() >= self._draws_again_at:
            self._draw()

    def end(self) -> None:
        self._draw()
        write(self._stream, "\n")
        self._source, self._lines = "", []

    def _draw(self) -> None:
        started = time.perf_counter()
        source = self._source.split("\n")
        lines: list[str] = []
        begin = first = 0  # where the last block begins in `source` and in `lines`
        for block in _blocks(self._parser.parse(self._source)):
            assert block[0].map is not None
            begin, end = block[0].map
            if lines and not source[begin - 1].strip():
                lines.append("")
            first = len(lines)
            lines += self._drawn(block, source[begin:end])
        self._show(lines)
        self._source, self._lines = "\n".join(source[begin:]), lines[first:]
        finished = time.perf_counter()
        self._draws_again_at = finished + (finished - started) / SHARE

    def _drawn(self, block: list[Token], source: list[str]) -> list[str]:
        """Returns the block as lines for the screen."""
        with self._console.capture() as capture:
            if block[0].type == "fence":
                self._print_code(block[0], source)
            else:
                self._console.print(_Block(block), width=terminal_width())
        lines = [MARGIN.sub(r"\1", line) for line in capture.get().split("\n")]
        full = [i for i, line in enumerate(lines) if CODES.sub("", line).strip()]
        return lines[full[0] : full[-1] + 1] if full else []  # Rich puts empty lines around a list or table

    def _print_code(self, fence: Token, source: list[str]) -> None:
        """Code without padding or wrapping: the terminal breaks long lines, and copied lines are complete."""
        is_closed = len(source) > 1 and source[-1].strip().startswith(fence.markup)
        self._console.print(Text(source[0].strip(), "dim"), soft_wrap=True)
        if fence.content:
            self._console.print(_highlighted(fence.content, fence.info), soft_wrap=True)
        if is_closed:
            self._console.print(Text(fence.markup, "dim"), soft_wrap=True)

    def _show(self, lines: list[str]) -> None:
        """Replaces the last block's lines on the screen by these. The cursor stays after the last one."""
        shown = self._lines
        same = next(
            (i for i, pair in enumerate(zip(shown, lines)) if pair[0] != pair[1]), min(len(shown), len(lines))
        )
        if same == len(shown):
            write(self._stream, "\n".join(["", *lines[same:]] if same and lines[same:] else lines[same:]))
        elif same == len(shown) - 1 and same < len(lines) and lines[same].startswith(shown[same]):
            write(self._stream, "\n".join([lines[same].removeprefix(shown[same]), *lines[same + 1 :]]))
        else:
            same, num_rows = self._reachable(same)
            up = f"\x1b[{num_rows - 1}A" if num_rows > 1 else ""
            write(self._stream, f"\r{up}\x1b[J" + "\n".join(lines[same:]))

    def _reachable(self, index: int) -> tuple[int, int]:
        """Returns the first line from `first` that is still on the screen, and the number of rows from
        there."""
        width, height = terminal_width(), shutil.get_terminal_size().lines
        num_rows, first = 0, len(self._lines)
        while first > index:
            rows = max(1, -(-cell_len(CODES.sub("", self._lines[first - 1])) // width))
            if num_rows + rows > height:
                break
            num_rows += rows
            first -= 1
        return first, num_rows


def _blocks(tokens: list[Token]) -> Iterator[list[Token]]:
    """Yields the tokens of each top-level block."""
    block = []
    for token in tokens:
        block.append(token)
        if token.level == 0 and token.nesting <= 0:
            yield block
            block = []


def _highlighted(code: str, info: str) -> Text:
    lexer = info.split()[0] if info.split() else "text"
    syntax = Syntax(code, lexer, theme=CODE_THEME, background_color="default")
    text = syntax.highlight(code)
    text.rstrip()
    return text


class _Block(markdown.Markdown):
    """A parsed block. Line ends of its source stay, as in a poem."""

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__("", code_theme=CODE_THEME, hyperlinks=False)
        for token in tokens:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"
        self.parsed = tokens

    class Heading(markdown.Heading):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            yield self.text

    class Item(markdown.ListItem):
        def render_number(
            self, console: Console, options: ConsoleOptions, number: int, last_number: int
        ) -> RenderResult:
            width = len(f" {last_number}. ")
            lines = console.render_lines(self.elements, options.update(width=options.max_width - width))
            for i, line in enumerate(lines):
                yield Segment(" " * width if i else f"{number}. ".rjust(width))
                yield from line
                yield Segment.line()

    class Code(markdown.CodeBlock):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            yield _highlighted(str(self.text), self.lexer_name)

    elements = {
        **markdown.Markdown.elements,
        "heading_open": Heading,
        "list_item_open": Item,
        "fence": Code,
        "code_block": Code,
    }
