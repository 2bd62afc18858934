"""Programmatic dependent launch (PDL): on Hopper a kernel may start while the one before it still runs, and
wait for it by itself.

A decode step is a chain of small kernels, each of which waits for the last; so the launch of a kernel, and
whatever it can do without its inputs (a product loads weights), hide behind its predecessor. The rules:
before `wait_for_inputs` a kernel reads constants only (weights) and writes nothing; one program of the grid
at least comes there before it leaves. Then "the kernel before is done" says so of all kernels before it, and
a kernel that knows nothing of this (cuBLAS, NCCL, a copy) may stand anywhere in the chain.

Such an ordinary kernel starts when all before it are done, and none after it starts earlier. The embedding is
one, so to a step's layers and to its sampler what earlier steps wrote, and what was prepared for this one
(lengths, block tables, of a state row all but TOKEN and POSITION), are constants too. They are read past the
L1 cache.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

FIRST_CAPABILITY = 90


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Lets the next kernel start; returns when all earlier ones are done and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_then_start_next(PDL: tl.constexpr):
    """For a kernel whose successor works beside it: that one starts when all before this one are done, and
    reads what they wrote."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def start_next(PDL: tl.constexpr):
    """The first half of `wait_for_inputs`, for a kernel that has much to do before the second,
    `wait_for_previous`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(ptr, num_bytes, PDL: tl.constexpr):
    """Asks memory for `num_bytes` (multiples of 16) from each address on, which then come from the L2 cache:
    reading goes on while a kernel waits, and takes no registers."""
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
    """Arguments of a launch on the current device; the kernel passes its PDL on to `wait_for_inputs`."""
    enabled = not triton.knobs.runtime.interpret and _has_pdl(
        triton.runtime.driver.active.get_current_device()
    )
    return {"PDL": enabled, "launch_pdl": enabled}


@functools.cache
def _has_pdl(device: int) -> bool:
    return triton.runtime.driver.active.get_current_target().arch >= FIRST_CAPABILITY
