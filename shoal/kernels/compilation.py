"""Kernels compiled side by side before any is launched: one takes Triton half a second to two, and a
rehearsal meets some 50 in turn.

Triton holds Python's lock for a tenth of that; the rest are passes of LLVM, and ptxas, which is a process.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

MAX_THREADS = 8  # what holds the lock leaves little to more
_patching = threading.Lock()  # of Triton's launch, which all engines of a process share


@contextmanager
def compiling_ahead() -> Iterator[list[str]]:
    """Meanwhile this thread's Triton launches run nothing, so that results mean nothing: each only gets its
    kernel ready. The list names those that were not on disk. The first of them is compiled there and then,
    later ones in threads until the end; what fails there is tried again, and says so, when it is truly
    launched."""
    import triton  # only now: a CPU run must not pay for it

    compiled: list[str] = []
    mode = getattr(triton, "AsyncCompileMode", None)
    # before 3.6: launches run, and compile, as ever
    if mode is None or "ignore_errors" not in inspect.signature(mode).parameters:
        yield compiled
        return
    with _patching, ExitStack() as patched, ExitStack() as threads:
        run, listener, here = triton.JITFunction.run, triton.knobs.compilation.listener, threading.get_ident()
        in_threads, met = False, set()

        def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            nonlocal in_threads
            if threading.get_ident() != here:
                return run(self, *args, grid=grid, warmup=warmup, **options)
            if compiled and not in_threads:
                in_threads = True
                pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
                threads.enter_context(mode(pool, ignore_errors=True))
                # left first: an interrupt while it waits must not keep the mode from its end
                threads.enter_context(pool)
            met.add(self)
            return run(self, *args, grid=grid, warmup=True, **options)

        def listen(*, src: Any, cache_hit: bool, **rest: Any) -> None:
            if not cache_hit:
                compiled.append(src.name)
            if listener is not None:
                listener(src=src, cache_hit=cache_hit, **rest)

        def forget_failed() -> None:
            for kernels, *_ in (cache for function in met for cache in function.device_caches.values()):
                for key in [
                    key for key, kernel in kernels.items() if isinstance(kernel, triton.FutureKernel)
                ]:
                    del kernels[key]

        patched.callback(forget_failed)
        patched.callback(setattr, triton.JITFunction, "run", run)
        patched.callback(setattr, triton.knobs.compilation, "listener", listener)
        triton.JITFunction.run, triton.knobs.compilation.listener = launch, listen
        yield compiled
