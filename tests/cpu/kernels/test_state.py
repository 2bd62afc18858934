"""The batch state's layout, and which module of ops a device gets."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from shoal.errors import ConfigError
from shoal.kernels.ops import MODULES, Ops, select_ops
from shoal.kernels.state import FIELDS, Field, StateLayout, seed_words


def test_addresses_lead_to_the_views() -> None:
    layout = StateLayout(num_rows=5, max_blocks=7)
    state = torch.zeros(layout.size, dtype=torch.int32)
    state[layout.active_address + 4] = 1
    state[layout.row_address(3) + Field.POSITION] = 2
    state[layout.row_address(4) + FIELDS + 6] = 3
    assert layout.active(state)[4] == 1
    assert layout.table(state)[3, Field.POSITION] == 2
    assert layout.block_tables(state)[0][4, 6] == 3
    assert int(state.sum()) == 6


def test_writes_through_row_minus_one_reach_no_sequence() -> None:
    layout = StateLayout(num_rows=2, max_blocks=1)
    state = torch.zeros(layout.size, dtype=torch.int32)
    layout.table(state)[-1].fill_(9)
    assert not layout.table(state)[:2].any() and not layout.active(state).any()


def test_rows_and_block_tables_are_aligned() -> None:
    layout = StateLayout(num_rows=3, max_blocks=21)
    assert layout.row_address(0) % 16 == layout.row_stride % 16 == FIELDS % 16 == 0


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (0, (0, 0)),
        (5, (5, 0)),
        (-1, (-1, -1)),
        (1 << 31, (-(2**31), 0)),
        ((3 << 32) + 7, (7, 3)),
        (1 << 64, (0, 0)),
        (-(1 << 63), (0, -(2**31))),
    ],
)
def test_seed_words_are_the_two_halves(seed: int, words: tuple[int, int]) -> None:
    assert seed_words(seed) == words


@pytest.mark.parametrize("device", MODULES)
def test_every_module_has_every_op_and_no_other_function(device: str) -> None:
    """`Ops` is the only list of them: the modules import what they do not define."""
    values = vars(select_ops(device)).items()
    functions = {name for name, value in values if callable(value) and not inspect.isclass(value)}
    assert {n for n in functions if not n.startswith("_")} == {n for n in vars(Ops) if not n.startswith("_")}


def test_unknown_devices_are_named() -> None:
    with pytest.raises(ConfigError, match="no kernels for device 'tpu'"):
        select_ops("tpu")


def test_the_cpu_path_imports_no_triton() -> None:
    code = (
        "import sys; from shoal.kernels.ops import select_ops; select_ops('cpu'); sys.exit('triton' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
