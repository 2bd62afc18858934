"""The map is kept: every module of the package is introduced in docs/architecture.md, and nothing there is
gone."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {
    str(p.relative_to(ROOT / "shoal"))
    for p in (ROOT / "shoal").rglob("*")
    if p.suffix in (".py", ".c") and p.name != "__init__.py"
}
TABLED = set(
    re.findall(r"^\| `([\w/]+\.(?:py|c))` \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
)


def test_every_module_is_introduced():
    assert not MODULES - TABLED


def test_every_introduced_module_exists():
    assert not TABLED - MODULES
