"""Who may import whom: imports point down, the hardest logic needs no torch, sub-package __init__ files are
empty."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "shoal"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Each room of the torch tower may import itself, those before it, and the vocabulary at the root.
TOWER = ["kernels", "attention", "layers", "models", "weights", "memory", "kv", "engine"]
# These see both towers, and nothing below imports them.
ABOVE = {"bench", "cli", "doctor"}
TORCH_FREE = [
    "api",
    "config",
    "model_config",
    "errors",
    "hashing",
    "tokenizer",
    "detokenizer",
    "request_builder",
    "answer",
    "kv.blocks",
    "kv.host",
    "kv.disk",
    "kv.store",
    "kv_event_format",
    "kv.event_publisher",
    "kv.advance",
    "kv.lease",
    "kv.offer_server",
    "engine_args",
    "inputs",
    "outputs",
    "sampling_params",
    "utils.argparse_utils",
    "engine.beam_search",
    "engine.scheduling.sequence",
    "engine.scheduling.scheduler",
    "engine.process.async_llm",
    "engine.process.swap",
    "cli.serve",
    "cli.chat",
    "cli.markdown",
    "cli.models",
    "cli.doctor",
    "bench.floor",
    "bench.serving",
    "fields",
    "options",
    "fleet.event_feed",
    "fleet.foreign_forwarder",
    "fleet.kv_router",
    "fleet.recorder",
    "fleet.simulator",
    "wire",
    "control",
    "weights.summary",
    "metrics",
    "fake",
    "fleet.planes",
    "fleet.plane_nats",
    "server.routes",
    "server.foreign_routes",
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


def may_import(own: str, package: str) -> bool:
    """Whether a file of the room `own` ("": the root) may import one of `package`."""
    if package in ("", own):
        return True
    if own in TOWER:
        return package in TOWER and TOWER.index(package) < TOWER.index(own)
    return own in ABOVE  # server, fleet and the vocabulary import no other room


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    relative = path.relative_to(PACKAGE)
    own = relative.parts[0] if len(relative.parts) > 1 else ""
    if relative.name in ("__init__.py", "__main__.py") and not own:
        return  # the doors: they open every room, when they are used
    for module in imports_of(path):
        package = package_of(module) if (PACKAGE / package_of(module)).is_dir() else ""
        assert may_import(own, package), f"{relative} imports {module}"


def edges_of(path: Path) -> set[Path]:
    """The modules of the package that a file imports anywhere: late, or for types alone, too. A package's
    __init__ is no module here, as the doors of shoal and shoal.memory open what lies behind them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            file = PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
            if file != path and file.is_file() and PACKAGE in file.parents:
                found.add(file)
    return found


def test_no_two_modules_import_each_other_in_a_circle():
    """TopologicalSorter raises CycleError, which names the modules of a circle."""
    TopologicalSorter({path: edges_of(path) for path in MODULES}).prepare()


def test_no_two_folders_of_the_engine_import_each_other_in_a_circle():
    """A file that lies in engine/ itself counts by itself: core.py builds what lies in the folders, and they
    share what lies beside it."""
    engine = PACKAGE / "engine"

    def node_of(path: Path) -> Path:
        return path if path.parent == engine else path.parent

    graph: dict[Path, set[Path]] = {}
    for path in MODULES:
        if engine in path.parents:
            below = {node_of(found) for found in edges_of(path) if engine in found.parents}
            graph.setdefault(node_of(path), set()).update(below - {node_of(path)})
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_free_modules_do_not_import_torch(module):
    code = f"import sys, shoal.{module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_importing_the_package_or_the_command_is_cheap():
    code = (
        "import sys, shoal, shoal.cli.main; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', "
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
