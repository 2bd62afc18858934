"""Who may import whom: imports point down, the hardest logic needs no torch, sub-package __init__ files are
empty."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "shoal"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Each layer may import itself, those before it, and the vocabulary at the root.
TOWER = ["kernels", "attention", "layers", "models", "weights", "memory", "kv", "engine"]
# `QuantizedTensor` is a value that layers and kernels pass on: its file imports nothing of ours.
EXCEPTIONS = {
    ("layers", "shoal.weights.quantized"),
    ("kernels", "shoal.weights.quantized"),
    ("kernels", "shoal.attention.step"),
    ("layers", "shoal.models.config"),
}
ABOVE = {
    "engine",
    "server",
    "fleet",
    "cli",
    "cli_chat",
    "cli_models",
    "cli_options",
    "cli_speakers",
    "bench",
    "serve",
}
TORCH_FREE = [
    "api",
    "config",
    "errors",
    "hashing",
    "tokenizer",
    "detokenizer",
    "kv.blocks",
    "kv.host",
    "kv.disk",
    "kv.store",
    "kv_events",
    "kv.events",
    "engine_args",
    "inputs",
    "outputs",
    "sampling_params",
    "utils.argparse_utils",
    "engine.beam_search",
    "engine.sequence",
    "engine.scheduler",
    "engine.async_llm",
    "engine.swap",
    "serve",
    "wire",
    "cli_chat",
    "cli_models",
    "models.config",
    "weights.summary",
    "metrics",
    "fake",
    "server.routes",
    "server.admin",
    "server.run",
]


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return {name for name in found if name.split(".")[0] == "shoal"}


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    relative = path.relative_to(PACKAGE)
    own = relative.parts[0] if len(relative.parts) > 1 else ""
    for module in imports_of(path):
        package = package_of(module)
        if own in TOWER and package in TOWER:
            allowed = TOWER.index(package) <= TOWER.index(own) or (own, module) in EXCEPTIONS
            assert allowed, f"{relative} imports {module}, which lies above it"
        elif own in TOWER:
            assert package not in ABOVE, f"{relative} imports {module}, which lies above it"
        elif own in ("server", "fleet"):
            assert package not in {"engine", "server", "fleet", *TOWER} - {own}, (
                f"{relative} imports {module} across the towers"
            )
        elif not own and relative.stem not in ("cli", "cli_models", "bench", "serve", "__init__", "__main__"):
            assert package not in TOWER, f"the vocabulary ({relative}) imports {module}"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_free_modules_do_not_import_torch(module):
    code = f"import sys, shoal.{module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_importing_the_package_or_the_command_is_cheap():
    code = (
        "import sys, shoal, shoal.cli; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', "
        "'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*/__init__.py")), ids=lambda p: p.parent.name)
def test_sub_package_init_files_are_empty(path):
    """But that of shoal.memory, which other programs use by itself."""
    assert path.read_text() == "" or path.parent.name == "memory"


def test_memory_is_imported_without_torch_until_a_region_is_asked_for():
    code = (
        "import sys, shoal.memory; assert 'torch' not in sys.modules; from shoal.memory import Regions, "
        "pause, region, resume, usage"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_nothing_but_kernels_and_attention_needs_triton(no_triton):
    """A CPU wheel of torch brings no Triton. What CPU kernels and attention need is covered by
    tests/process/test_without_triton.py."""
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in MODULES]
    names = [
        name
        for name in names
        if not name.startswith(("shoal.kernels.", "shoal.attention.")) and not name.endswith("__main__")
    ]
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], env=no_triton, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
