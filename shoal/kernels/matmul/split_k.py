"""Counters of arrived programs. The last program to arrive does what needs the results of all, such as adding
the parts of a split-K matmul."""

from __future__ import annotations

import functools
import threading

import torch
import triton
import triton.language as tl


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.counters: dict[tuple[str, int, torch.device], torch.Tensor] = {}


_of_thread = _OfThread()


def arrival_counters(kernel: str, num_tiles: int, device: torch.device) -> torch.Tensor:
    """Returns the counters of a kernel's finished parts, one per tile. Every launch leaves zeros, which the
    next one counts on. So launches with the same counters must follow each other. All graphs share some, as
    they are replayed on one stream. Other launches have counters of their thread: an engine may start on
    another stream while a second one replays its graphs."""
    key = kernel, num_tiles, device
    captured = _captured(*key)  # made by the rehearsal before the capture, outside of the graph's memory
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return captured
    own = _of_thread.counters
    if key not in own:
        own[key] = torch.zeros_like(captured)
    return own[key]


@functools.cache
def _captured(kernel: str, num_tiles: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_tiles, dtype=torch.int32, device=device)


@triton.jit
def arrives_last(arrived_ptr, COUNT: tl.constexpr):
    """Says if this is the last of COUNT programs to arrive, after which the counter is 0 again. What the
    others wrote before is visible then, and none of them reads what is written from now on."""
    tl.debug_barrier()
    if COUNT == 1:
        is_last = True
    else:
        is_last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == COUNT - 1
        if is_last:
            tl.store(arrived_ptr, 0)
        tl.debug_barrier()
    return is_last
