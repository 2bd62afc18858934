"""Compiles Triton kernels side by side before any of them is launched.

A kernel takes up to two seconds, and a first start meets dozens of them one after the other. Threads help,
because Triton holds Python's lock for only a small part of that time: the rest are passes of LLVM, and ptxas,
which is a process. engine/runner/runner.py compiles so before the first step of an engine.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from shoal.kernels.launching import launches_replaced

MAX_THREADS = 8  # More would wait for Python's lock.


@contextmanager
def compiling_ahead() -> Iterator[list[str]]:
    """While this context lasts, Triton launches of this thread run nothing and only get their kernels ready,
    so the results of kernels mean nothing.

    The list names the kernels that were not on disk. The first of them is compiled at its launch, the others
    in threads, which are done when the context ends. A kernel that fails to compile there is compiled again,
    and raises its error, when it is really launched.
    """
    import triton  # It is imported only now, because a CPU run must not pay for it.

    compiled: list[str] = []
    mode = getattr(triton, "AsyncCompileMode", None)
    # Triton before 3.6 has no such mode: launches run, and compile, as usual.
    if mode is None or "ignore_errors" not in inspect.signature(mode).parameters:
        yield compiled
        return
    with ExitStack() as patched, ExitStack() as threads:
        in_threads, met = False, set()

        def compiling(run: Callable[..., Any]) -> Callable[..., Any]:
            def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
                nonlocal in_threads
                if compiled and not in_threads:
                    in_threads = True
                    pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
                    threads.enter_context(mode(pool, ignore_errors=True))
                    # The pool is left first: an interrupt while it waits must not keep the mode from ending.
                    threads.enter_context(pool)
                met.add(self)
                return run(self, *args, grid=grid, warmup=True, **options)

            return launch

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

        patched.enter_context(launches_replaced(compiling))
        patched.callback(forget_failed)
        listener = triton.knobs.compilation.listener
        patched.callback(setattr, triton.knobs.compilation, "listener", listener)
        triton.knobs.compilation.listener = listen
        yield compiled
