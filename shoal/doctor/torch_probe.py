"""Facts that torch reports about itself and the GPUs, as JSON lines: run as a process of its own, so that a
torch that crashes, hangs or cannot be imported is a finding.

Each line is printed at once, so that the lines before a crash are reported.
"""

from __future__ import annotations

import ctypes
import json
import warnings
from typing import Any

COPY_BYTES = 256 << 20
LEAST_FREE_BYTES = 1 << 30  # on a GPU whose memory others use, nothing is copied
COPIES = 4


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def driver_version() -> int | None:
    """The CUDA version that the driver can run, as 13000 for 13.0; None: there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
    except (OSError, AttributeError):
        return None


def main() -> None:
    import torch

    say(torch=torch.__version__, cuda=torch.version.cuda, path=torch.__file__, driver=driver_version())
    if torch.version.cuda is None:
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    say(is_available=is_available, warning=str(caught[0].message) if caught else "")
    if not is_available:
        return
    archs = torch.cuda.get_arch_list()
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = [properties.major, properties.minor]
        say(gpu=index, name=properties.name, capability=capability, free=free, total=total, archs=archs)
        with torch.cuda.device(index):
            ones = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
            say(computes=index, is_right=bool((ones @ ones == 64).all().item()))
    for index in range(count):
        if torch.cuda.mem_get_info(index)[0] > LEAST_FREE_BYTES:
            copies_with_host(torch, index)
    for index in range(1, count):
        copies_between(torch, 0, index)
    runs_triton(torch)


def copies_with_host(torch: Any, index: int) -> None:
    with torch.cuda.device(index):
        there = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        here = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        down = seconds(torch, lambda: there.copy_(here, non_blocking=True))
        up = seconds(torch, lambda: here.copy_(there, non_blocking=True))
    say(host=index, to_gpu=COPY_BYTES / down, to_host=COPY_BYTES / up)


def copies_between(torch: Any, one: int, other: int) -> None:
    is_direct = torch.cuda.can_device_access_peer(one, other)
    if min(torch.cuda.mem_get_info(index)[0] for index in (one, other)) <= LEAST_FREE_BYTES:
        say(pair=[one, other], is_direct=is_direct, rate=None)
        return
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{one}")
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{other}")
    with torch.cuda.device(one):
        taken = seconds(torch, lambda: target.copy_(source, non_blocking=True))
    say(pair=[one, other], is_direct=is_direct, rate=COPY_BYTES / taken)


def seconds(torch: Any, copy: Any) -> float:
    """Seconds a copy takes on the current device, after one to warm up."""
    copy()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(COPIES):
        copy()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / COPIES


def runs_triton(torch: Any) -> None:
    """Compiles and runs one of Shoal's kernels."""
    try:
        from triton import __version__ as version

        from shoal.kernels import reference
        from shoal.kernels.activation import gate_mul

        x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
        is_right = torch.allclose(gate_mul(x), reference.gate_mul(x), rtol=2e-2, atol=2e-2)
    except Exception as error:  # noqa: BLE001   compilers raise what they like
        say(triton=None, error=f"{type(error).__name__}: {error}"[-300:])
    else:
        say(triton=version, is_right=bool(is_right))


if __name__ == "__main__":
    main()
