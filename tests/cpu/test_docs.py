"""The pages hold together: every relative link leads to a file and to a heading that exist, every command and
option is one of Shoal's, and every path of this repository that a page or a source names is there."""

import argparse
import functools
import itertools
import re
import shlex
from pathlib import Path
from urllib.parse import unquote

import pytest

from shoal.cli.main import build_parser
from shoal.kernels.quant.ggml_types import TYPES
from shoal.models.configs.rope import ROPE_KINDS
from shoal.models.layouts.registry import LAYOUTS
from shoal.models.registry import ARCHITECTURES, BY_GGUF, BY_HF_CLASS
from shoal.weights.hub_names import LIBRARY

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
)
SOURCES = sorted(p for p in (ROOT / "shoal").rglob("*") if p.suffix in (".py", ".c", ".h"))
FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# `server/app.py`, `docs/kv.md`, `benchmarks/gpu.py`: a path with a folder, in backticks or alone.
PATH = re.compile(r"(?<![\w/.~:<-])((?:[\w.-]+/)+[\w.-]+\.(?:py|c|h|md|json|html))(?![\w/])")
COMMAND = re.compile(r"^ *(?:[A-Z_]+=\S+ )*shoal ([a-z](?:'\{[^']*'|.)*)", re.MULTILINE)
ENDS = ("|", "&", ";", ">", "2>", "<")
FOLDERS = {p.name for p in [*ROOT.iterdir(), *(ROOT / "shoal").iterdir()] if p.is_dir() and p.name[0] != "."}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub and the site make them from its headings."""
    lines = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.strip().lower()).replace(" ", "-") for line in lines}


def leads_nowhere(page: Path, link: str) -> bool:
    if re.match(r"[a-z]+:", link):
        return False  # another site
    target, _, anchor = unquote(link).partition("#")
    path = (page.parent / target).resolve() if target else page
    return not path.exists() or bool(anchor and anchor not in headings(path))


def test_every_link_of_a_page_leads_to_a_file_and_a_heading():
    links = {(page, link) for page in PAGES for link in LINK.findall(FENCED.sub("", page.read_text()))}
    assert not sorted(f"{name(page)}: {link}" for page, link in links if leads_nowhere(page, link))


def test_every_command_line_of_a_page_can_be_read(capsys):
    parser, wrong = build_parser(), []
    for page in PAGES:
        if page.parent.name in ("decisions", "results", "howto"):  # records, and options still to be written
            continue
        for line in COMMAND.findall(page.read_text().replace("\\\n", " ")):
            words = list(itertools.takewhile(lambda word: word not in ENDS, shlex.split(line, comments=True)))
            if any("[" in word or "..." in word for word in words):
                continue  # a form, not a command line
            try:
                parser.parse_args(words)
            except SystemExit as end:
                wrong += [f"{name(page)}: shoal {line}: {capsys.readouterr().err}"] if end.code else []
    assert not wrong


def flags(parser: argparse.ArgumentParser) -> set[str]:
    """Returns the options of a command and of the commands below it."""
    found = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found |= flags(command)
    return found


# options of llama.cpp's programs and of benchmarks/gpu.py, and forms of options
OTHERS = {"--fuse-gate-up-exps", "--fuse-qkv", "--interrupt_requests", "--mtp", "--no-mtp"}
OTHERS |= {"--options", "--no-", "--option"}


def test_every_option_that_a_page_names_exists():
    known = flags(build_parser()) | OTHERS
    known |= set(re.findall(r"--[\w-]+", (ROOT / "docs/vllm-options.md").read_text()))
    wrong = []
    for page in PAGES:
        if page.parent.name in ("decisions", "results", "howto"):  # records, and options still to be written
            continue
        named = re.findall(r"`(--[a-z][\w-]*)", FENCED.sub("", page.read_text()))
        wrong += [f"{name(page)}: {option}" for option in named if option not in known]
    assert not wrong


def test_every_path_that_a_page_or_a_source_names_is_there():
    named = {(file, path) for file in [*PAGES, *SOURCES] for path in PATH.findall(file.read_text())}
    gone = [
        f"{name(file)}: {path}"
        for file, path in named
        if path.split("/")[0] in FOLDERS
        and not any((base / path).exists() for base in (ROOT, ROOT / "shoal", file.parent))
    ]
    assert not sorted(gone)


def test_every_page_is_in_the_sites_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    pages |= {str(p.relative_to(ROOT)) for p in (ROOT / "benchmarks/results").glob("*.md")}
    assert not {page for page in pages if f" {page}\n" not in nav}


def test_the_sites_navigation_is_in_groups_that_can_be_seen_at_once():
    """Regression: 21 pages stood in one list."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    groups = re.split(r"^  - (.+):$", nav, flags=re.MULTILINE)[1:]
    used = {
        title: re.findall(r"^      - (.+): \S+$", body, re.MULTILINE)
        for title, body in zip(groups[::2], groups[1::2])
    }
    assert all(len(pages) <= 9 for pages in used.values()) and len(used) >= 4


def test_what_appears_looks_different_from_what_is_typed():
    """Regression: both were the same grey box. GitHub shows a quotation with a bar, and so does the site."""
    guide = (ROOT / "docs/laptop-to-fleet.md").read_text()
    assert not re.findall(r"^```text$", guide, re.MULTILINE) and guide.count("\n> ```text\n") > 20
    assert not re.findall(r"^> ```(?:bash|input)$", guide, re.MULTILINE)


def test_every_workload_of_the_performance_page_is_explained_there():
    page = (ROOT / "docs/performance.md").read_text()
    explained, figures = page.split("## Offline")
    names = set(re.findall(r"^\| (\w+) \| [\d.]+ \|", figures.partition("## A served load")[0], re.MULTILINE))
    assert len(names) == 10 and names == set(re.findall(r"^\| (\w+) \| [\d,]+ \|", explained, re.MULTILINE))


def test_the_page_of_models_names_every_architecture_and_every_name_of_ollamas_library():
    page = (ROOT / "docs/models.md").read_text()
    assert not [cls for cls in BY_HF_CLASS if f"`{cls}`" not in page]
    rows = [f"| `{name}` | {', '.join(f'`{size}`' for size in sizes)}" for name, sizes in LIBRARY.items()]
    assert not [row for row in rows if row not in page]


@pytest.fixture(scope="module")
def models():
    """Returns the section of what models work, and its rows of architectures."""
    page = (ROOT / "docs/compatibility.md").read_text()
    section = page.partition("## Models\n")[2].partition("\n## ")[0]
    tables = section.partition("\n### ")[0]
    rows = [line.strip("| ").split(" | ") for line in tables.splitlines() if re.match(r"\| `\w+For", line)]
    assert len(rows) > 60
    return section, rows


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_page_of_compatibility_has_the_classes_of_the_registry_and_no_others(models):
    known = BY_HF_CLASS.keys() | {name for each in ARCHITECTURES for name in each.nested_in}
    assert {name for row in models[1] for cell in row[:2] for name in quoted(cell)} == known


def test_the_page_of_compatibility_has_the_names_of_gguf_files(models):
    column = [quoted(row[-1]) for row in models[1]]
    named = {name for names in column for name in names}
    assert not BY_GGUF.keys() - named
    assert not [names[0] for names in column if names and names[0] not in BY_GGUF]


def test_the_page_of_compatibility_has_the_ropes_tensor_types_and_methods_that_are_read(models):
    [ropes] = re.findall(r"^Ropes may be (.*?),? in the old form", models[0], re.MULTILINE)
    assert set(quoted(ropes)) == set(ROPE_KINDS)
    [types] = re.findall(r"Its tensors may be (.*?);", models[0], re.DOTALL)
    assert set(quoted(types)) == {kind.name for kind in TYPES.values()}
    table = models[0].partition("| `quant_method` |")[2].partition("\n\n")[0]
    methods = {name for line in table.splitlines() for name in quoted(line.split(" | ")[0])}
    assert {layout.quant_method for layout in LAYOUTS} <= methods


HOW_TOS = [p for p in sorted((ROOT / "docs/howto").glob("*.md")) if p.name != "README.md"]
TEST = re.compile(r"(?<![\w/])((?:tests/)?(?:[\w/]+/)?test_\w+\.py)(?:::(test_\w+))?")


@pytest.mark.parametrize("page", HOW_TOS, ids=name)
def test_a_how_to_has_the_form_that_all_have_and_touches_five_files_at_most(page):
    sections = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    titles = [section.partition("\n")[0].strip() for section in sections[1:]]
    expected = ["Files to touch", "Steps", "What fails if you forget a step", "Check it"]
    assert [title for title in titles if title in expected] == expected
    files = sections[1 + titles.index("Files to touch")]
    assert 1 <= len(re.findall(r"^\| `", files, re.MULTILINE)) <= 5


@pytest.fixture(scope="module")
def tests():
    """Returns the source of each file of tests by the file's name."""
    return {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("page", HOW_TOS, ids=name)
def test_every_test_that_a_how_to_names_is_there(page, tests):
    named = TEST.findall(page.read_text())
    assert named, "the page names no test that notices a forgotten step"
    for file, test in named:
        source = tests.get(file.rpartition("/")[2])
        assert source is not None and (not test or f"def {test}(" in source), f"{file}::{test}"


def test_every_how_to_is_in_the_index():
    index = (ROOT / "docs/howto/README.md").read_text()
    assert not [page.name for page in HOW_TOS if f"]({page.name})" not in index]


DECISIONS = [p for p in sorted((ROOT / "docs/decisions").glob("*.md")) if p.name != "README.md"]


@pytest.mark.parametrize("page", DECISIONS, ids=name)
def test_a_page_of_decisions_opens_with_how_it_is_now_and_its_entries_have_date_and_status(page):
    text = page.read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE)[0] == "How it is now"
    entries = re.findall(r"^### (.+)\n(.*)$", text, re.MULTILINE)
    assert not [title for title, below in entries if not re.match(r"\*\d{4}-\d\d-\d\d · \w", below)]
