"""Compiles Triton kernels side by side before any of them is launched.

A kernel takes up to two seconds, and a first start meets dozens of them one after the other. They are
compiled in processes that are forked for them: a quarter of the time is Python's, which threads would spend
one after the other.
engine/runner/start_up.py compiles so before the first step of an engine.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import inspect
import os
import signal
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, NoReturn

from shoal.kernels.launching import launches_replaced, only_prepared

MAX_PROCESSES = 32  # each takes some 100 MB
COMPILE_S = 300.0  # A process that takes longer hangs, and its kernel is compiled again when it is launched.
POLL_S = 0.002
PR_SET_PDEATHSIG = 1


@contextmanager
def compiling_ahead() -> Iterator[list[str]]:
    """While this context lasts, Triton launches of this thread run nothing and only get their kernels ready,
    so the results of kernels mean nothing.

    The list names the kernels that were not on disk. The first of them is compiled at its launch, the others
    in processes, which have ended when the context ends. A kernel that fails to compile there is compiled
    again, and raises its error, when it is really launched.
    """
    import triton  # It is imported only now, because a CPU run must not pay for it.

    compiled: list[str] = []
    mode = getattr(triton, "AsyncCompileMode", None)
    # Triton before 3.6 has no such mode: launches run, and compile, as usual.
    if mode is None or "ignore_errors" not in inspect.signature(mode).parameters:
        yield compiled
        return
    with ExitStack() as patched, ExitStack() as ahead:
        processes = Compilers(min(MAX_PROCESSES, len(os.sched_getaffinity(0))))
        is_ahead, met = False, set()

        def compiling(run: Callable[..., Any]) -> Callable[..., Any]:
            def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
                nonlocal is_ahead
                if compiled and not is_ahead:
                    is_ahead = True
                    ahead.enter_context(mode(processes, ignore_errors=True))
                    # They end first: an interrupt while they work must not keep the mode from ending.
                    ahead.enter_context(processes)
                met.add(self)
                before = processes.num_kernels
                kernel = run(self, *args, grid=grid, warmup=True, **options)
                if processes.num_kernels > before:
                    compiled.append(self.__name__)
                return kernel

            return launch

        def listen(*, src: Any, cache_hit: bool, **rest: Any) -> None:
            if not cache_hit:
                compiled.append(src.name)
            if listener is not None:
                listener(src=src, cache_hit=cache_hit, **rest)

        def forget_compiled() -> None:
            """Later launches find on disk what other processes have compiled."""
            for kernels, *_ in [cache for function in met for cache in [*function.device_caches.values()]]:
                # Another thread may launch, and so add to the cache.
                for key, kernel in [*kernels.items()]:
                    if isinstance(kernel, triton.FutureKernel):
                        del kernels[key]

        patched.enter_context(launches_replaced(compiling))
        patched.enter_context(only_prepared())
        patched.callback(forget_compiled)
        listener = triton.knobs.compilation.listener
        patched.callback(setattr, triton.knobs.compilation, "listener", listener)
        triton.knobs.compilation.listener = listen
        yield compiled


class _Compiled(Future[Any]):
    """A kernel that a process compiles. To another thread, which launches it meanwhile, the result is the
    kernel itself: another engine may run while this thread starts one."""

    def __init__(self, compile_kernel: Callable[[], Any]) -> None:
        super().__init__()
        self._compile_kernel, self._thread = compile_kernel, threading.get_ident()

    def result(self, timeout: float | None = None) -> Any:
        if threading.get_ident() == self._thread:
            return super().result(timeout)
        return self._compile_kernel()  # from disk, if the process has ended


class Compilers:
    """An executor that compiles each kernel and its launcher in a forked process, `most` at once, and gives
    this thread a ChildProcessError for each, since the result is on disk. Its context ends when the processes
    have.

    A fork has all imported modules at once, for which a new interpreter needs seconds. It has this thread
    alone, so a compiler in it must take no lock that another thread may hold. It must never touch the GPU:
    it collects no garbage, which may be a tensor, and exits without cleaning up. It is killed if this thread
    ends first."""

    def __init__(self, most: int) -> None:
        self.num_kernels = 0
        self._most = most
        self._running: dict[int, tuple[float, Future[Any]]] = {}  # by process: when it began

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        while len(self._running) >= self._most:
            self._reap()
        self.num_kernels += 1
        future = _Compiled(compile_kernel)
        try:
            process = _fork()
        except OSError as error:  # No process or memory is left; the kernel is compiled when it is launched.
            future.set_exception(error)
            return future
        if not process:
            _compile_and_end(compile_kernel, self._locks)
        self._running[process] = time.monotonic(), future
        return future

    def __enter__(self) -> Compilers:
        self._locks = tempfile.TemporaryFile()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._running and kind is None:
                self._reap()
        finally:
            for process in self._running:
                _kill(process)
            while self._running:
                self._reap()
            self._locks.close()

    def _reap(self) -> None:
        """Takes note of the processes that have ended. Waits a little if none has."""
        ended = [process for process in self._running if _has_ended(process)]
        for process in ended:
            self._running.pop(process)[1].set_exception(ChildProcessError("compiled in another process"))
        if not ended:
            time.sleep(POLL_S)
        for process, (begun, _) in self._running.items():
            if time.monotonic() - begun > COMPILE_S:
                _kill(process)


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):  # It has ended, and the program ignores SIGCHLD.
        os.kill(process, signal.SIGKILL)


def _fork() -> int:
    """Returns what os.fork does. An interrupt waits meanwhile; in the fork it waits for good, since it would
    unwind the parent's stack there."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process = -1
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks in processes with threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
    finally:
        if process:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
    return process


def _has_ended(process: int) -> bool:
    try:
        return os.waitpid(process, os.WNOHANG)[0] == process
    except ChildProcessError:  # The program ignores SIGCHLD, or waits for all children.
        return True


def _compile_and_end(compile_kernel: Callable[[], Any], locks: IO[bytes]) -> NoReturn:
    """Runs in a forked process. `locks`: a file with a byte to be locked for each kernel's name."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        gc.disable()
        with suppress(Exception):
            import triton

            triton.knobs.compilation.store_binary_only = True  # Starts would read the other stages, too.
            kernel = compile_kernel()
            # Otherwise a C compiler would run for the launcher at the first launch. Most variants of a kernel
            # have the same one, and the first of them makes it.
            fcntl.lockf(locks, fcntl.LOCK_EX, 1, zlib.crc32(kernel.src.name.encode()))
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    finally:
        os._exit(0)
