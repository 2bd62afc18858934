"""Rules of imports: they point down, the hardest logic needs no torch, sub-package __init__ files are
empty."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "shoal"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Each room may import itself, the rooms before it in its line, and the vocabulary. The vocabulary and the
# rooms in GROUND need no torch and are open to all rooms. `server` and `fleet` import neither each other nor TOWER.
GROUND = ["files", "kinds", "options", "telemetry", "text"]
TOWER = ["kernels", "attention", "layers", "models", "weights", "memory", "kv", "engine"]
# These see everything below, and each other in this order.
ABOVE = ["apps", "bench", "doctor", "cli"]
# Rooms and files that need no torch, with all that they import.
TORCH_FREE = [
    "*.py",
    "text/**/*.py",
    "telemetry/*.py",
    "files/*.py",
    "kinds/*.py",
    "options/*.py",
    "server/**/*.py",
    "fleet/**/*.py",
    "cli/*.py",
    "apps/*.py",
    "bench/floor.py",
    "bench/serving.py",
    "engine/beam_search.py",
    "engine/early_device.py",
    "engine/llm.py",
    "engine/open_gpu.py",
    "engine/scheduling/sequence.py",
    "engine/scheduling/scheduler.py",
    "engine/process/async_llm.py",
    "engine/process/core_entry.py",
    "engine/process/swap.py",
    "kv/blocks.py",
    "kv/tiers/host.py",
    "kv/tiers/disk.py",
    "kv/tiers/store.py",
    "kv/events/*.py",
    "kv/library/handles.py",
    "kv/transfer/advance.py",
    "kv/transfer/lease.py",
    "kv/transfer/offer_server.py",
    "weights/summary.py",
]


@functools.cache
def import_nodes(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Returns the import statements anywhere in a file: late, or for types alone, too."""
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in import_nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return {name for name in found if name.split(".")[0] == "shoal"}


def may_import(own: str, package: str) -> bool:
    """Says if a file of the room `own` ("": the vocabulary) may import one of the room `package`."""
    if package in ("", own) or package in GROUND:
        return True
    if own in TOWER:
        return package in TOWER and TOWER.index(package) < TOWER.index(own)
    if own in ABOVE:
        return package not in ABOVE or ABOVE.index(package) < ABOVE.index(own)
    return False


def room_of(module: str) -> str:
    package = module.split(".")[1] if "." in module else ""
    return package if (PACKAGE / package).is_dir() else ""


def test_imports_point_down():
    """Except in the entrances of the package, which import a room when it is first used."""
    rooms = {path: parts[0] if len(parts := path.relative_to(PACKAGE).parts) > 1 else "" for path in MODULES}
    entrances = [PACKAGE / "__init__.py", PACKAGE / "__main__.py"]
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path, own in rooms.items()
        for module in sorted(imports_of(path))
        if path not in entrances and not may_import(own, room_of(module))
    ]
    assert not wrong


def edges_of(path: Path) -> set[Path]:
    """The modules of the package that a file imports. A package's __init__ does not count, as the ones of shoal
    and shoal.memory import modules of their rooms."""
    found = set()
    for node in import_nodes(path):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{name}" for name in names)]
        for name in names:
            file = PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
            if file != path and file.is_file() and PACKAGE in file.parents:
                found.add(file)
    return found


def test_no_two_modules_import_each_other_in_a_circle():
    """TopologicalSorter raises CycleError, which names the modules of a circle."""
    TopologicalSorter({path: edges_of(path) for path in MODULES}).prepare()


def test_no_two_rooms_import_each_other_in_a_circle():
    """A file at the top of a room that has sub-rooms, or at the top of the package, counts by itself: the
    sub-rooms share some of these files, and others put the sub-rooms together."""

    def node_of(path: Path) -> Path:
        folder = path.parent
        has_rooms = any((below / "__init__.py").exists() for below in folder.iterdir() if below.is_dir())
        return path if has_rooms else folder

    graph: dict[Path, set[Path]] = {}
    for path in MODULES:
        node = node_of(path)
        graph.setdefault(node, set()).update({node_of(found) for found in edges_of(path)} - {node})
    TopologicalSorter(graph).prepare()


def test_only_other_programs_import_the_kv_library():
    library = PACKAGE / "kv" / "library"
    for path in MODULES:
        if path.parent != library:
            found = [module for module in imports_of(path) if module.startswith("shoal.kv.library")]
            assert not found, (
                f"{path.relative_to(PACKAGE)} imports {found}; docs/kv-library.md lists its users"
            )


def test_a_room_has_some_twenty_files_and_lies_at_most_two_levels_deep():
    for folder in {path.parent for path in MODULES}:
        files = [f for f in folder.iterdir() if f.suffix in (".py", ".c") and f.name != "__init__.py"]
        assert len(files) <= 25, f"{folder.relative_to(PACKAGE)} has {len(files)} files; give it sub-rooms"
        assert len(folder.relative_to(PACKAGE).parts) <= 2, f"{folder.relative_to(PACKAGE)} lies too deep"


def test_torch_free_modules_do_not_import_torch():
    found = {pattern: sorted(PACKAGE.glob(pattern)) for pattern in TORCH_FREE}
    assert all(found.values()), found
    paths = [p for paths in found.values() for p in paths if p.name not in ("__main__.py", "__init__.py")]
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths]
    code = (
        f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), name"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


def test_importing_the_package_or_the_command_is_cheap():
    code = (
        "import sys, shoal, shoal.cli.main; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', "
        "'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_sub_package_init_files_are_empty():
    """Except the one of shoal.memory, which other programs use by itself."""
    paths = set(PACKAGE.rglob("*/__init__.py")) - {PACKAGE / "memory" / "__init__.py"}
    assert not sorted(str(path.relative_to(PACKAGE)) for path in paths if path.read_text())


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
