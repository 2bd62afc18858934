"""Programmatic dependent launch (PDL): on Hopper a kernel may start while the one before it still runs, and
wait for it by itself.

A decode step is a chain of small kernels; each needs what the one before it wrote. With PDL the
launch of a kernel, and whatever it can do without its inputs (a matmul loads weights), overlap with its
predecessor. A kernel that takes part (`pdl_options`) keeps three rules:

1. Before it waits it writes nothing, as kernels before it may still read or write that memory. The allocator
   counts on this too: it gives the memory of a dropped tensor to the next one while kernels that use it run.
2. At least one program of its grid waits before it leaves. Then "the kernel before is done" is said only when
   all kernels before that one are done.
3. Before it waits it reads only constants: weights, and the constants of the step, which are everything that
   was prepared before the step's embedding (rows, positions, lengths, block tables, and of a state row all
   but TOKEN and POSITION). The constants of the step are read past the L1 cache.

A kernel that takes no part is ordinary: it starts when all kernels before it are done, and none after it
starts before it is done. So it may stand anywhere in the chain (cuBLAS, NCCL, a copy). Rule 3 rests on one of
them: the embedding, the first kernel of a step's layers, must stay ordinary (`ORDINARY`).
tests/cpu/engine/test_graphs.py holds that, tests/cpu/kernels/test_pdl.py the first two rules.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

FIRST_CAPABILITY = 90
# An option of a launch that must stay ordinary. It is what Triton does anyway, written down where others rely
# on it.
ORDINARY = {"launch_pdl": False}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Lets the next kernel start, and returns when all earlier ones are done and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_then_start_next(PDL: tl.constexpr):
    """For a kernel whose successor works beside it. The successor starts when all before this one are done,
    so it may read what they wrote before it waits."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def start_next(PDL: tl.constexpr):
    """The first half of `wait_for_inputs`, for a kernel that has much to do before the second half,
    `wait_for_previous`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(ptr, num_bytes, PDL: tl.constexpr):
    """Asks memory for `num_bytes` (multiples of 16) from each address on, which then come from the L2 cache.
    So reading goes on while a kernel waits, and takes no registers."""
    if PDL:
        tl.inline_asm_elementwise(
            """{
            .reg .pred some;
            setp.ne.u32 some, $2, 0;
            @some cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [ptr.to(tl.int64), num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def pdl_options() -> dict[str, bool]:
    """Arguments of a launch that takes part, if the current device can. The kernel passes its PDL on to the
    functions above."""
    return _OFF if _INTERPRETED else _options(triton.runtime.driver.active.get_current_device())


# The value that `triton.jit` has seen, as it decides when this file is imported. To look again takes longer
# than the rest of `pdl_options`.
_INTERPRETED = triton.knobs.runtime.interpret
_OFF = {"PDL": False, "launch_pdl": False}


@functools.cache
def _options(device: int) -> dict[str, bool]:
    enabled = triton.runtime.driver.active.get_current_target().arch >= FIRST_CAPABILITY
    return {"PDL": enabled, "launch_pdl": enabled}
