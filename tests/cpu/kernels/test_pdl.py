"""Kernels that start while the one before them runs keep the rules of kernels/pdl.py. The third rule, what a
kernel may read before it waits, is held by the order of launches (test_graphs.py)."""

import ast
from pathlib import Path

import pytest

import shoal.kernels

FOLDER = Path(next(iter(shoal.kernels.__path__)))
WAITS = {"wait_for_inputs", "wait_for_previous", "wait_then_start_next"}
WRITES = {"store", "atomic_add", "async_copy_shared_to_global", "_store_fp8", "_store_drafts"}
# Programs of these kernels leave early for splits that a sequence does not need; a first split always
# waits.
LEAVES_EARLY = {"decode_kernel", "latent_kernel"}


def kernels() -> dict[str, ast.FunctionDef]:
    """The kernels that take part: they have a parameter PDL, and ask which program they are."""
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                parameters = {arg.arg for arg in node.args.args}
                if "PDL" in parameters and "program_id" in {name for name, _ in calls(node)}:
                    found[node.name] = node
    return found


def calls(node: ast.AST) -> list[tuple[str, int]]:
    """Names of the functions that are called, and the lines."""
    found = []
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            function = call.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            found.append((name, call.lineno))
    return found


KERNELS = kernels()


def first_wait(kernel: ast.FunctionDef) -> int:
    return min(line for name, line in calls(kernel) if name in WAITS)


def test_the_kernels_that_take_part_are_found():
    expected = {"decode_kernel", "prefix_kernel", "_rms_norm_kernel", "_vector_kernel", "tile_kernel"}
    expected |= {
        "_qk_norm_rope_store_kernel",
        "_measure_tiles",
        "_pick",
        "_parts_kernel",
        "_join_kernel",
        "hopper_kernel",
        "hopper_row_kernel",
    }
    assert expected <= set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_writes_nothing_before_it_waits(name):
    writes = [line for called, line in calls(KERNELS[name]) if called in WRITES]
    assert writes and min(writes) > first_wait(KERNELS[name])


@pytest.mark.parametrize("name", sorted(set(KERNELS) - LEAVES_EARLY))
def test_no_program_leaves_before_it_waits(name):
    returns = [node.lineno for node in ast.walk(KERNELS[name]) if isinstance(node, ast.Return)]
    assert not returns or min(returns) > first_wait(KERNELS[name])
