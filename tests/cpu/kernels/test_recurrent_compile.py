"""The kernels of recurrent layers compile for sm_80 and sm_90 in the sizes that published models bring, fit in
shared memory and keep to their registers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_compile import check_kernels

from shoal.kernels import triton_ops
from shoal.kernels.draft_spans import DraftSpans
from shoal.kernels.recurrent.sequences import Sequences
from tests.recurrent_drafts import KEPT, input_size, mixer_case
from tests.recurrent_steps import (
    MIXERS,
    Heads,
    conv_inputs,
    delta_inputs,
    make_sequences,
    mamba_inputs,
    rows_of_states,
)

LAUNCHES: dict[str, Callable[[], object]] = {}
BF16 = torch.bfloat16
DELTA = {"qwen3.5-9b": Heads(16, 32, 128, 128), "qwen3.5-0.8b on two ranks": Heads(8, 8, 128, 128)}
KIMI = {"kimi-linear-48b": Heads(32, 32, 128, 128, has_channel_gates=True)}
MAMBA = {"granite-4-h-small": Heads(1, 128, 128, 64), "nemotron-3-nano": Heads(8, 64, 128, 64)}


def launch(op: str, heads: Heads, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    sequences, rows = make_sequences("decodes beside prompts")
    if op == "gated_delta":
        triton_ops.gated_delta(**delta_inputs(sequences, rows, heads, dtype, state_dtype))
    else:
        triton_ops.mamba2(**mamba_inputs(sequences, rows, heads, dtype, state_dtype))


for op, models in (("gated_delta", DELTA | KIMI), ("mamba2", MAMBA)):
    for name, heads in models.items():
        for dtype, state_dtype in ((BF16, torch.float32), (BF16, BF16), (torch.float32, torch.float32)):
            LAUNCHES[f"{op} {name} {dtype} {state_dtype}"] = lambda case=(op, heads, dtype, state_dtype): (
                launch(*case)
            )


def mix(mixer: str, heads: Heads, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    sequences, rows = make_sequences("decodes with padding and beginnings")
    getattr(triton_ops, mixer)(**MIXERS[mixer][0](sequences, rows, heads, dtype, state_dtype))


for mixer, models in (("delta_mixer", DELTA), ("mamba_mixer", MAMBA)):
    for name, heads in models.items():
        for dtype, state_dtype in ((BF16, torch.float32), (BF16, BF16), (torch.float32, torch.float32)):
            LAUNCHES[f"{mixer} {name} {dtype} {state_dtype}"] = (
                lambda case=(mixer, heads, dtype, state_dtype): mix(*case)
            )


def conv(channels: int, width: int, bias: bool) -> None:
    sequences, rows = make_sequences("decodes beside prompts")
    triton_ops.causal_conv(**conv_inputs(sequences, rows, channels, width, bias, BF16))


for case in ((8192, 4, False), (6144, 4, True), (2048, 3, False)):
    LAUNCHES[f"causal_conv {case}"] = lambda case=case: conv(*case)
for size, width in ((128, 4096), (512, 4096), (8192, 8192)):
    x = torch.zeros(3, width, dtype=BF16)
    for gate_first in (False, True):
        LAUNCHES[f"gated_norm {size} {gate_first}"] = lambda x=x, size=size, first=gate_first: (
            triton_ops.gated_norm(x, x, torch.ones(x.shape[1] if first else size), 1e-6, size, first)
        )


def draft(
    op: Callable[..., torch.Tensor], make: Callable[[Sequences, int], dict[str, Any]], queries: int
) -> None:
    """The decodes of a captured step with drafts; with 0 queries, only the drafts that were accepted before."""
    ints = [torch.zeros(2, dtype=torch.int32) for _ in range(4)]
    starts, positions = torch.zeros(3, dtype=torch.int32), torch.zeros(2 * queries, dtype=torch.int32)
    inputs = make(Sequences(ints[0], starts, positions, 2, DraftSpans(*ints[1:], queries)), 3)
    state = next(name for name in KEPT if name in inputs)
    kept = rows_of_states(3, max(queries - 1, 1), input_size(inputs), dtype=BF16)
    op(**inputs | {KEPT[state]: kept})


for queries in (0, 2, 9):
    for name, heads in (DELTA | KIMI).items():
        LAUNCHES[f"gated_delta {name}, {queries} queries"] = lambda heads=heads, n=queries: draft(
            triton_ops.gated_delta, lambda own, rows: delta_inputs(own, rows, heads, BF16, torch.float32), n
        )
    for name, heads in MAMBA.items():
        LAUNCHES[f"mamba2 {name}, {queries} queries"] = lambda heads=heads, n=queries: draft(
            triton_ops.mamba2, lambda own, rows: mamba_inputs(own, rows, heads, BF16, torch.float32), n
        )
    for case in ((8192, 4, False), (2048, 3, False)):
        LAUNCHES[f"causal_conv {case}, {queries} queries"] = lambda case=case, n=queries: draft(
            triton_ops.causal_conv, lambda own, rows: conv_inputs(own, rows, *case, BF16), n
        )

for mixer, models in (("delta_mixer", DELTA), ("mamba_mixer", MAMBA)):
    for name, heads in models.items():
        for state_dtype in (torch.float32, BF16):
            with_rows, make = mixer_case(mixer, BF16, state_dtype, heads)
            op = with_rows(getattr(triton_ops, mixer))
            LAUNCHES[f"{mixer} {name} {state_dtype}, 9 queries"] = lambda op=op, make=make: draft(op, make, 9)


@pytest.mark.slow
@pytest.mark.parametrize("case", LAUNCHES)
def test_compiles(compiled, case: str) -> None:
    # Four warps of Mamba-2's scan spill on Hopper, where they are quicker than eight that do not.
    scans = [k for k in compiled[case] if k.name == "_mamba_scan_kernel" and k.capability >= 90]
    if scans:
        check_kernels(scans, max_spilled=160)
    # Two registers of the kernel that inverts chunks may be spilled on an A100, once, outside of loops.
    others = [kernel for kernel in compiled[case] if kernel not in scans]
    check_kernels(others, max_spilled=8)
    assert not any(kernel.spills_in_loops for kernel in others)
