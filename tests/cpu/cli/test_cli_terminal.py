"""Output at a terminal: text wrapped at words, and Markdown drawn as it arrives."""

import io
import random
import re

import pytest

from shoal.cli.markdown import Markdown
from shoal.cli.terminal import Raw, Wrapped, note

PROSE = "Programmers who are hardworking and patient toiled for years, with x[::-1] and naïve 日本語 text.\n\n  two"


@pytest.fixture(autouse=True)
def size(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "8")
    monkeypatch.setenv("TERM", "xterm-256color")


def pieces(text, seed):
    rng = random.Random(seed)
    while text:
        length = rng.randint(1, 7)
        yield text[:length]
        text = text[length:]


# Words


@pytest.mark.parametrize("seed", range(5))
def test_no_word_is_broken_at_the_right_edge(seed):
    """Regression: `hardworking\\n and` and `toiled f\\nor`, at any width."""
    stream = io.StringIO()
    wrapped = Wrapped(stream)
    for piece in pieces(PROSE, seed):
        wrapped.add(piece)
    wrapped.end()
    lines = stream.getvalue().split("\n")
    assert all(len(line) <= 30 for line in lines) and not any(line.endswith(" ") for line in lines)
    assert stream.getvalue().split() == PROSE.split() and lines[-3:] == ["", "  two", ""]


def test_a_word_that_no_line_can_hold_is_left_to_the_terminal():
    stream = io.StringIO()
    wrapped = Wrapped(stream)
    wrapped.add("see " + "x" * 50 + " and so on and on")
    wrapped.end()
    assert stream.getvalue() == "see " + "x" * 50 + " and\nso on and on\n"


def test_what_could_command_a_terminal_is_left_out():
    stream = io.StringIO()
    for writer in (Wrapped(stream), Markdown(stream)):
        writer.add("a\x1b[2Jb\x07c")
        writer.end()
    assert stream.getvalue() == "a[2Jbc\na[2Jbc\n"


def test_remarks_continue_below_the_last_column_of_their_table(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("NO_COLOR", "1")
    note("/save     write the conversation\nand a longer line without a table")
    assert stream.getvalue().split("\n") == [
        "/save     write the",
        "          conversation",
        "and a longer line without a",
        "table",
        "",
    ]


def test_a_pipe_gets_the_text_as_it_is():
    stream = io.StringIO()
    writer = Raw(stream)
    writer.add("# **a** " + "b" * 40 + "\x1b[2J")
    writer.end()
    assert stream.getvalue() == "# **a** " + "b" * 40 + "\x1b[2J\n"


# Markdown


class Screen(io.StringIO):
    """A terminal of 30 columns and 8 rows, and what has left it at the top. Colours are dropped."""

    WIDTH, HEIGHT = 30, 8

    def __init__(self):
        super().__init__()
        self.rows, self.row, self.column = [""], 0, 0

    def write(self, text):
        for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[^\x1b]", text):
            if part == "\n":
                self._down()
            elif part == "\r":
                self.column = 0
            elif part == "\x1b[J":
                self.rows[self.row :] = [self.rows[self.row][: self.column]]
            elif part.startswith("\x1b") and part.endswith("A"):
                self.row -= int(part[2:-1])
                assert self.row >= max(0, len(self.rows) - self.HEIGHT), "above the top of the screen"
            elif not part.startswith("\x1b"):
                if self.column == self.WIDTH:
                    self._down()
                before = self.rows[self.row]
                self.rows[self.row] = (
                    before[: self.column].ljust(self.column) + part + before[self.column + 1 :]
                )
                self.column += 1
        return len(text)

    def _down(self):
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.rows):
            self.rows.append("")

    @property
    def text(self):
        return "\n".join(row.rstrip() for row in self.rows)


def drawn(source, seed=None):
    """The screen after this Markdown came in pieces, or whole. Each piece is drawn."""
    screen = Screen()
    writer = Markdown(screen)
    for piece in [source] if seed is None else pieces(source, seed):
        writer._draws_again_at = 0.0
        writer.add(piece)
    writer.end()
    return screen.text


ALL = """# Title *of* it

A haiku:
old pond,
frogs **jump** in `x = 1` <div> and [a link](http://x.org/y) that goes on.
Title
===
1. a
2. b with a text that is long enough to wrap

- c
- d
  - nested

```python
def f(x):  # a comment that is longer than this screen is wide
\treturn x[::-1]

print(f(2))
```
And after. ***both***

| a | b |
|---|---|
| 1 | two |

[1]: http://foo
> quoted

10. ten
"""


def test_markdown_is_drawn():
    assert drawn(ALL).split("\n") == [
        "Title of it",
        "",
        "A haiku:",
        "old pond,",
        "frogs jump in x = 1 <div> and",
        "a link (http://x.org/y) that",
        "goes on.",
        "Title",
        " 1. a",
        " 2. b with a text that is long",
        "    enough to wrap",
        "",
        " • c",
        " • d",
        "    • nested",
        "",
        "```python",
        "def f(x):  # a comment that is",
        " longer than this screen is wi",
        "de",
        "    return x[::-1]",
        "",
        "print(f(2))",
        "```",
        "And after. both",
        "",
        " a  b",
        " ──────",
        " 1  two",
        "",
        "[1]: http://foo",
        "▌ quoted",
        "",
        " 10. ten",
        "",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_leave_the_same_screen_as_the_whole(seed):
    assert drawn(ALL, seed) == drawn(ALL)


@pytest.mark.parametrize("source", ["", "\n\n", "`", "```", "**a", "- ", "| a |\n|--", "a  ", "1.", "  x\n"])
def test_an_end_in_the_middle_is_drawn(source):
    assert all(drawn(source, seed) == drawn(source) for seed in range(3))
    assert drawn(source).endswith("\n")
