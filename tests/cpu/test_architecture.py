"""The map is kept: docs/architecture.md introduces every module once, in the table of its room, and its figures
are what their script draws."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [p for p in (ROOT / "shoal").rglob("*") if p.suffix in (".py", ".c") and p.name != "__init__.py"]
MODULES = {str(p.relative_to(ROOT / "shoal")) for p in SOURCES}
PAGE = (ROOT / "docs/architecture.md").read_text()
IMAGES = ROOT / "docs/images"
FIGURES = runpy.run_path(str(IMAGES / "draw.py"))["FIGURES"]


def rows(text: str) -> list[str]:
    """The files that tables of this text introduce."""
    return re.findall(r"^\| `([\w/]+\.(?:py|c))` \|", text, re.MULTILINE)


def room_of(module: str) -> str:
    folder = module.rpartition("/")[0]
    return "" if folder in ("", "utils") else folder + "/"  # utils: names that vLLM's scripts import


def rooms() -> dict[str, str]:
    """What the page says under each room's heading; "" is the root."""
    found = {}
    for section in re.split(r"^###? ", PAGE, flags=re.MULTILINE):
        heading, _, text = section.partition("\n")
        for folder in re.findall(r"`([\w/.*]+)`", heading):
            found[folder.replace("shoal/*.py", "")] = text
    return found


def test_every_module_is_introduced_once():
    introduced = rows(PAGE)
    assert not MODULES - set(introduced)
    assert sorted(introduced) == sorted(set(introduced))


def test_every_introduced_module_exists():
    assert not set(rows(PAGE)) - MODULES


def test_every_room_has_its_own_heading_and_words():
    told = rooms()
    for room in {room_of(module) for module in MODULES}:
        assert len(told.get(room, "").partition("<details")[0].split()) >= 8, f"nothing is said of {room}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_is_in_the_table_of_its_room(module):
    assert module in rows(rooms()[room_of(module)])


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
