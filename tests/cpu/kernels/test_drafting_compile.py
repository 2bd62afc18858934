"""Speculation's Triton kernels compile for sm_80 and sm_90, without spills."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from triton_compile import check_kernels

from shoal.kernels.drafting import triton_ops
from shoal.kernels.drafting.draft_rows import REPORT_SIZE, DraftRows, LookUp, SuffixLookUp
from shoal.kernels.state import StateLayout

ROWS, LENGTH = 4, 40960
LAUNCHES: dict[str, Callable[[], object]] = {}


def _ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _look_up(parameters: LookUp | SuffixLookUp) -> None:
    layout = StateLayout(ROWS, 4)
    drafts = DraftRows(_ints(ROWS + 1, parameters.max_drafts), _ints(ROWS + 1, LENGTH), _ints(ROWS + 1))
    report = _ints(ROWS, REPORT_SIZE + 1 + 2 * parameters.max_drafts)
    triton_ops.look_up(_ints(ROWS), layout.table(_ints(layout.size)), drafts, parameters, report)


def _step(queries: int) -> None:
    layout, most = StateLayout(ROWS, 4), max(1, queries - 1)
    table, drafts = (
        layout.table(_ints(layout.size)),
        DraftRows(_ints(ROWS + 1, most), _ints(ROWS + 1, LENGTH), _ints(ROWS + 1)),
    )
    tokens, begun = _ints(3, ROWS * queries), [_ints(ROWS) for _ in range(5)]
    triton_ops.begin_verification(_ints(ROWS), table, drafts, *tokens, *begun)
    report = _ints(ROWS, REPORT_SIZE + queries + most)
    sizes = ROWS, queries, table, drafts, report
    triton_ops.accept(tokens[0], tokens[0], *begun[:4], *sizes)
    triton_ops.write_histories(_ints(100), drafts)


for name, parameters in (
    ("ngram", LookUp(8, 3, 8)),
    ("ngram of many", LookUp(64, 1, 64)),
    ("suffix", SuffixLookUp(24, 24, 1.0, 0.1)),
    ("suffix of many", SuffixLookUp(64, 64, 2.5, 0.3)),
):
    LAUNCHES[name] = lambda p=parameters: _look_up(p)
for queries in (1, 2, 9, 65):
    LAUNCHES[f"{queries} queries"] = lambda n=queries: _step(n)


@pytest.mark.parametrize("case", LAUNCHES)
def test_compiles(compiled, case):
    check_kernels(compiled[case])
