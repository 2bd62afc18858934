"""Kernels compiled side by side before any is launched: one takes Triton half a second to two, and a rehearsal meets some 50 in turn.

Triton holds Python's lock for a tenth of that; the rest are passes of LLVM, and ptxas, which is a process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

MAX_THREADS = 8                 # what holds the lock leaves little to more
_patching = threading.Lock()    # of Triton's launch, which all engines of a process share


@contextmanager
def compiling_ahead() -> Iterator[list[str]]:
    """Meanwhile this thread's Triton launches run nothing, so that results mean nothing: each only gets its kernel ready. The list names
    those that were not on disk. The first of them is compiled there and then, later ones in threads until the end; if one of these fails,
    its first true launch says so."""
    import triton  # only now: a CPU run must not pay for it

    compiled: list[str] = []
    if not hasattr(triton, "AsyncCompileMode"):    # launches then run, and compile, as ever
        yield compiled
        return
    with _patching, ExitStack() as patched, ExitStack() as threads:
        run, listener, here = triton.JITFunction.run, triton.knobs.compilation.listener, threading.get_ident()
        in_threads = False

        def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            nonlocal in_threads
            if threading.get_ident() != here:
                return run(self, *args, grid=grid, warmup=warmup, **options)
            if compiled and not in_threads:
                in_threads = True
                pool = threads.enter_context(ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)))
                threads.enter_context(triton.AsyncCompileMode(pool, ignore_errors=True))
            return run(self, *args, grid=grid, warmup=True, **options)

        def listen(*, src: Any, cache_hit: bool, **rest: Any) -> None:
            if not cache_hit:
                compiled.append(src.name)
            if listener is not None:
                listener(src=src, cache_hit=cache_hit, **rest)

        patched.callback(setattr, triton.JITFunction, "run", run)
        patched.callback(setattr, triton.knobs.compilation, "listener", listener)
        triton.JITFunction.run, triton.knobs.compilation.listener = launch, listen
        yield compiled
