"""Compiling ahead: a launch meanwhile only asks for its kernel. In a process of its own, in which Triton does not interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
                   "PYTHONPATH": os.pathsep.join((str(root), str(Path(__file__).parent)))}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_launches_compile_each_variant_once_and_run_nothing(seen):
    assert seen["first"] == ["double", "double"]


def test_what_is_in_memory_or_on_disk_is_not_compiled(seen):
    assert seen["in memory"] == seen["on disk"] == []


def test_another_threads_launches_run(seen):
    assert LAUNCH_REFUSED in seen["another thread"]


def test_launches_run_again_afterwards(seen):
    assert LAUNCH_REFUSED in seen["afterwards"]


def test_what_does_not_compile_says_so_at_once_or_at_its_true_launch(seen):
    assert "SIZE is not 3" in seen["wrong, first"]    # compiled there and then
    assert seen["wrong, in a thread"] == "" and "SIZE is not 3" in seen["wrong"]


def test_an_error_meanwhile_leaves_triton_as_it_was(seen):
    assert seen["error"] == "a mistake" and seen["restored"]


def test_without_async_compilation_launches_run(seen):
    assert LAUNCH_REFUSED in seen["older Triton"]


def _observe() -> dict[str, object]:
    from concurrent.futures import ThreadPoolExecutor

    from triton_compile import _NoDriver

    from shoal.kernels.compilation import compiling_ahead

    class NoLaunch(_NoDriver):
        """A true launch first asks it for a launcher."""

        @property
        def launcher_cls(self):
            raise RuntimeError(LAUNCH_REFUSED)

    triton.runtime.driver.set_active(NoLaunch())
    x = torch.zeros(32)

    def launch(size: int = 16) -> None:
        double[(1,)](x, SIZE=size)

    def error_of(function, *arguments) -> str:
        try:
            function(*arguments)
        except Exception as error:    # noqa: BLE001 -- whatever is raised is the finding
            return str(error)
        return ""

    def ahead(*functions) -> list[str]:
        with compiling_ahead() as compiled:
            for function in functions:
                function()
        return compiled

    before = triton.JITFunction.run, triton.knobs.compilation.listener
    seen: dict[str, object] = {"first": ahead(launch, lambda: launch(32), launch), "in memory": ahead(launch)}
    double.device_caches.clear()
    seen["on disk"] = ahead(launch, lambda: launch(32))
    with ThreadPoolExecutor(1) as pool, compiling_ahead():
        seen["another thread"] = pool.submit(error_of, launch).result()
    seen["afterwards"] = error_of(launch)
    seen["wrong, first"] = error_of(ahead, lambda: wrong[(1,)](x, SIZE=5))
    seen["wrong, in a thread"] = error_of(ahead, lambda: launch(64), lambda: wrong[(1,)](x, SIZE=4))
    seen["wrong"] = error_of(lambda: wrong[(1,)](x, SIZE=4))
    with pytest.raises(ValueError) as raised, compiling_ahead():
        raise ValueError("a mistake")
    seen["error"], seen["restored"] = str(raised.value), before == (triton.JITFunction.run, triton.knobs.compilation.listener)
    del triton.AsyncCompileMode
    seen["older Triton"] = error_of(ahead, launch)
    return seen


if __name__ == "__main__":
    print(json.dumps(_observe()))
