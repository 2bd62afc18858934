"""Compiling ahead: a launch meanwhile only asks for its kernel. In a process of its own, in which Triton does
not interpret."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

LAUNCH_REFUSED = "nothing can be launched here"


@triton.jit
def double(x_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at))


@triton.jit
def wrong(x_ptr, SIZE: tl.constexpr):
    tl.static_assert(SIZE == 3, "SIZE is not 3")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "PYTHONPATH": os.pathsep.join((str(root), str(Path(__file__).parents[1]))),
    }
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_launches_compile_each_variant_once_and_run_nothing(seen):
    assert seen["first"] == ["double", "double"]


def test_what_is_in_memory_or_on_disk_is_not_compiled(seen):
    assert seen["in memory"] == seen["on disk"] == []


def test_a_kernel_is_compiled_in_another_process_with_its_launcher(seen):
    assert len(seen["launchers"]) == 1 and seen["launchers"] != [f"launcher-of-{seen['process']}"]


def test_another_threads_launches_run(seen):
    assert LAUNCH_REFUSED in seen["another thread"]


def test_another_thread_launches_a_kernel_that_a_process_compiles(seen):
    """Regression: an engine that ran beside a start got the ChildProcessError of the start's compiler."""
    assert LAUNCH_REFUSED in seen["another thread, in a process"]


def test_launches_run_again_afterwards(seen):
    assert LAUNCH_REFUSED in seen["afterwards"]


def test_what_does_not_compile_says_so_at_once_or_at_its_true_launch(seen):
    assert "SIZE is not 3" in seen["wrong, first"]  # compiled there and then
    assert seen["wrong, in a process"] == "" and all("SIZE is not 3" in error for error in seen["wrong"])


def test_an_error_meanwhile_leaves_triton_as_it_was(seen):
    assert seen["restored"] == [True] * 3


def test_an_interrupt_while_processes_compile_leaves_triton_usable(seen):
    assert seen["interrupted"]


def test_a_kernel_is_compiled_at_its_launch_if_no_process_is_left(seen):
    """Regression: the error of the fork ended the start."""
    assert seen["no process"] == ["double"] * 2 and LAUNCH_REFUSED in seen["no process, launched"]


def test_an_interrupt_ends_the_compilers_if_the_system_reaps_children(seen):
    """Regression: a process that had ended could not be killed, and those after it went on."""
    assert seen["reaped"] == ""


def test_launches_in_cuda_are_only_prepared_by_this_thread(seen):
    assert seen["only prepared"] == [True, False]


def test_with_a_triton_that_can_do_less_launches_run(seen):
    assert LAUNCH_REFUSED in seen["Triton 3.5"]


def _observe() -> dict[str, object]:
    from concurrent.futures import ThreadPoolExecutor, wait

    from triton.runtime._async_compile import active_mode
    from triton_compile import _NoDriver

    from shoal.kernels.compilation import Compilers, compiling_ahead
    from shoal.kernels.launching import is_only_prepared

    class NoLaunch(_NoDriver):
        """A true launch first asks it for a launcher. Notes which process does."""

        @property
        def launcher_cls(self):
            Path(os.environ["TRITON_CACHE_DIR"], f"launcher-of-{os.getpid()}").touch()
            raise RuntimeError(LAUNCH_REFUSED)

    triton.runtime.driver.set_active(NoLaunch())
    x = torch.zeros(32)

    def launch(size: int = 16) -> None:
        double[(1,)](x, SIZE=size)

    def error_of(function, *arguments) -> str:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 -- whatever is raised is the finding
            return str(error)
        return ""

    def ahead(*functions) -> list[str]:
        with compiling_ahead() as compiled:
            for function in functions:
                function()
        return compiled

    before = triton.JITFunction.run, triton.knobs.compilation.listener
    seen: dict[str, object] = {"first": ahead(launch, lambda: launch(32), launch), "in memory": ahead(launch)}
    seen["launchers"] = [path.name for path in Path(os.environ["TRITON_CACHE_DIR"]).glob("launcher-of-*")]
    seen["process"] = os.getpid()
    double.device_caches.clear()
    seen["on disk"] = ahead(launch, lambda: launch(32))
    with ThreadPoolExecutor(1) as pool, compiling_ahead():
        seen["only prepared"] = is_only_prepared(), pool.submit(is_only_prepared).result()
        seen["another thread"] = pool.submit(error_of, launch).result()
    double.device_caches.clear()
    with ThreadPoolExecutor(1) as pool:
        with compiling_ahead() as compiled:
            launch(2048)
            launch(32768)
            assert compiled == ["double"] * 2
            launched = pool.submit(error_of, launch, 32768)
            wait([launched], timeout=10)
        seen["another thread, in a process"] = launched.result()
    seen["afterwards"] = error_of(launch)
    seen["wrong, first"] = error_of(ahead, lambda: wrong[(1,)](x, SIZE=5))
    seen["wrong, in a process"] = error_of(ahead, lambda: launch(64), lambda: wrong[(1,)](x, SIZE=4))
    seen["wrong"] = [error_of(lambda: wrong[(1,)](x, SIZE=4)) for _ in range(2)]

    def compile_some_and_fail(sizes: list[int], error: type[BaseException]) -> bool:
        with pytest.raises(error, match="a mistake"), compiling_ahead():
            for size in sizes:
                launch(size)
            raise error("a mistake")
        return (
            before == (triton.JITFunction.run, triton.knobs.compilation.listener)
            and active_mode.get() is None
        )

    seen["restored"] = [
        compile_some_and_fail(sizes, error)
        for sizes, error in (
            ([], ValueError),
            ([128, 256, 512], ValueError),
            ([1024, 2048, 4096], KeyboardInterrupt),
        )
    ]
    waiting = Compilers.__exit__

    def interrupted(self, *error) -> None:
        waiting(self, None, None, None)
        raise KeyboardInterrupt

    Compilers.__exit__ = interrupted
    with pytest.raises(KeyboardInterrupt):
        ahead(lambda: launch(8), lambda: launch(4))
    Compilers.__exit__ = waiting
    seen["interrupted"] = active_mode.get() is None and ahead(lambda: launch(2)) == ["double"]

    def interrupted_after_children_ended() -> None:
        with suppress(KeyboardInterrupt), Compilers(2) as compilers:
            compilers.submit(lambda: None)
            [process] = compilers._running
            while Path(f"/proc/{process}").exists():
                time.sleep(0.01)
            raise KeyboardInterrupt

    usual = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    seen["reaped"] = error_of(interrupted_after_children_ended)
    signal.signal(signal.SIGCHLD, usual)

    def no_process() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    double.device_caches.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fork", no_process)
        seen["no process"] = ahead(lambda: launch(8192), lambda: launch(16384))
    seen["no process, launched"] = error_of(launch, 16384)

    class OneArgument:  # as in Triton 3.5
        def __init__(self, executor) -> None:
            raise AssertionError("it knows no ignore_errors")

    triton.AsyncCompileMode = OneArgument
    seen["Triton 3.5"] = error_of(ahead, launch)
    return seen


if __name__ == "__main__":
    print(json.dumps(_observe()))
