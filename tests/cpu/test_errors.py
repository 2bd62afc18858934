"""Errors have the same text in the library and over HTTP."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "shoal"
MODULES = [
    *sorted(PACKAGE.glob("*.py")),
    *sorted((PACKAGE / "text").rglob("*.py")),
    *sorted((PACKAGE / "engine").glob("*.py")),
    *sorted((PACKAGE / "server").rglob("*.py")),
]
SEEN = {"RequestError", "ConfigError", "UnavailableError", "EngineDeadError", "ApiError"}
PYTHON = re.compile(r"\w\(\)|\bLLM\(|\w=(True|False)\b")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_error_that_clients_see_asks_for_a_call_in_python(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SEEN:
            texts = [
                n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
            assert not (wrong := [text for text in texts if PYTHON.search(text)]), wrong
