"""A page of docs that a reader follows at terminals, done as it says: its commands are what is run.

What counts on such a page, from top to bottom:

- `**Terminal 1**` says which terminal the blocks below are for.
- A block of `bash` is typed there, command by command, each when the one before has ended.
- A block of `input` is typed to the program that runs there.
- A block of `text`, which stands in a quotation, are lines that come there, in any order, after the lines of the texts before; `...` stands for
  anything, and a space for any number of them.
- `Ctrl-C in terminal 1` presses that. `<http://127.0.0.1:8000/>` is opened.

At the end of a section (`##`) all commands must have ended."""

import contextlib
import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tests.terminal import Shell

DEADLINE_S = 120
STEP = re.compile(
    r"^\*\*Terminal (?P<terminal>\d)\*\*"
    r"|^```(?P<kind>bash|input|text)\n(?P<block>.*?)^```$"
    r"|Ctrl-C in\s+terminal (?P<interrupted>\d)"
    r"|<(?P<url>http://127\.0\.0\.1[^>]*)>",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Step:
    kind: str  # bash, input, text, interrupt or open
    terminal: str
    text: str


def sections(page: Path) -> dict[str, list[Step]]:
    """Returns the sections that have steps, by title."""
    found = {}
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        body = re.sub(r"^> ?", "", body, flags=re.MULTILINE)
        if steps := list(_steps(body)):
            found[title] = steps
    return found


def _steps(body: str):
    terminal = ""
    for match in STEP.finditer(body):
        if match["terminal"]:
            terminal = match["terminal"]
        elif match["interrupted"]:
            yield Step("interrupt", match["interrupted"], "")
        elif match["url"]:
            yield Step("open", "", match["url"])
        else:
            assert terminal, f"no **Terminal** is named above: {match['block']}"
            yield Step(match["kind"], terminal, match["block"])


def walk(steps: list[Step], environment: dict[str, str], cwd: Path) -> None:
    """Does what a section says. Raises AssertionError where something else happens."""
    with contextlib.ExitStack() as stack:
        shells: dict[str, Shell] = {}
        was_read = True  # whether lines were awaited since the last action
        for step in steps:
            if step.terminal and step.terminal not in shells:
                shells[step.terminal] = stack.enter_context(Shell(environment, cwd, DEADLINE_S))
            if step.kind == "open":
                with urllib.request.urlopen(step.text, timeout=DEADLINE_S) as answer:
                    assert answer.status == 200
                continue
            shell = shells[step.terminal]
            if step.kind == "text":
                for line in step.text.splitlines():
                    shell.await_line(_pattern(line))
                was_read = True
                continue
            for words in _commands(step):
                if step.kind == "bash":
                    shell.await_prompt()
                # The first of two fleets that are started one after the other may be up before the second command is typed.
                if was_read:
                    for each in shells.values():
                        each.mark = len(each.screen)
                was_read = False
                if step.kind == "bash":
                    shell.command(words)
                elif step.kind == "input":
                    shell.keys(words + "\r")
                else:
                    shell.interrupt()
        for shell in shells.values():
            shell.await_prompt()


def _pattern(line: str) -> str:
    parts = [" +".join(map(re.escape, part.split())) for part in line.split("...")]
    return ".*".join(parts)


def _commands(step: Step) -> list[str]:
    return re.findall(r"(?:[^\n]*\\\n)*[^\n]+", step.text) if step.text else [""]
