"""The map is kept: docs/architecture.md introduces every room, its figures are what their script draws, and
each file says in its first line what it owns."""

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shoal"
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]
PAGE = (ROOT / "docs/architecture.md").read_text()
IMAGES = ROOT / "docs/images"
FIGURES = runpy.run_path(str(IMAGES / "draw.py"))["FIGURES"]


def rooms() -> dict[str, str]:
    """Returns the page's text about each room; "" is the vocabulary at the top of the package."""
    rows = re.findall(r"^\| `([\w/.*]+)` \| (.+) \|$", PAGE, re.MULTILINE)
    return {room.replace("shoal/*.py", ""): words for room, words in rows}


def test_the_page_introduces_every_room_and_no_other():
    folders = {path.parent.relative_to(PACKAGE).as_posix() + "/" for path in MODULES} - {"./"}
    assert set(rooms()) == folders - {"utils/"} | {""}  # utils: names that vLLM's scripts import


def test_the_page_can_be_read_in_one_sitting():
    glossary = PAGE[PAGE.index("## Glossary") :]
    assert len(PAGE.split()) <= 3500
    assert len(re.findall(r"^\| (?!---|term)", glossary, re.MULTILINE)) <= 30


def test_a_class_name_stands_for_one_thing_in_its_room():
    files: dict[tuple[str, str], list[str]] = {}
    for path in MODULES:
        room = path.relative_to(PACKAGE).parts[0]
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                files.setdefault((room, node.name), []).append(str(path.relative_to(PACKAGE)))
    assert not {key: names for key, names in files.items() if len(names) > 1}


def test_a_file_says_first_what_it_owns():
    words = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in MODULES}
    assert not [str(path.relative_to(PACKAGE)) for path, text in words.items() if len(text.split()) < 3]


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_what_their_script_draws(name):
    assert (IMAGES / name).read_text() == FIGURES[name](), "run: python docs/images/draw.py"


def test_the_figure_of_the_rooms_is_the_order_that_imports_follow():
    rules = runpy.run_path(str(ROOT / "tests/cpu/test_import_rules.py"))
    names = re.findall(r'class="name"[^>]*>(\w+)<', FIGURES["rooms.svg"]())
    assert [name for name in names if name in rules["TOWER"]] == rules["TOWER"][::-1]


@pytest.mark.parametrize("folder", ["shoal", "tests", "benchmarks", "deploy"])
def test_words_about_a_thing_begin_with_the_thing(folder):
    """A docstring or a comment that begins with "Of" leaves its subject to the name above it."""
    begins = re.compile(r'^\s*("""|# )Of\b|  [#] Of\b')
    wrong = [
        f"{path.relative_to(ROOT)}:{i}: {line.strip()}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for i, line in enumerate(path.read_text().splitlines(), start=1)
        if begins.search(line)
    ]
    assert not wrong
