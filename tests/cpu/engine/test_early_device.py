"""The GPU is opened and Triton's key computed while torch is imported, if there may be a GPU."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

from shoal.engine import early_device, open_gpu
from shoal.engine.early_device import open_device_early

has_returned = threading.Event()


def open_early(device: str) -> None:
    open_device_early(device)
    has_returned.set()


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """Notes calls of a driver that is not there."""
    has_returned.clear()
    open_gpu.open_gpu.cache_clear()
    early_device._compute_key_early.cache_clear()
    calls: list[str] = []

    def init(flags: int) -> int:
        assert has_returned.wait(10), "the importing thread waits for the GPU"
        calls.append("init")
        return 0

    def device(gpu, number: int) -> int:
        calls.append(f"device {number}")
        return 0

    def retain(context, gpu) -> int:
        calls.append("context")
        return 0

    driver = SimpleNamespace(cuInit=init, cuDeviceGet=device, cuDevicePrimaryCtxRetain=retain)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(open_gpu, "DEV", tmp_path)
    (tmp_path / "nvidia0").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")  # and so restored afterwards
    monkeypatch.setattr(open_gpu, "_cuda_library", lambda torch: Path(torch))
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: calls.append("key") or "k")
    yield calls
    open_gpu.open_gpu.cache_clear()
    early_device._compute_key_early.cache_clear()


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_context_and_a_key_are_made_beside_imports(seen, device):
    open_early(device)
    for thread in threading.enumerate():
        if thread.name == "shoal-open-gpu":
            thread.join()
    assert triton.runtime.cache.triton_key() == "k"
    assert sorted(seen) == ["context", "device 0", "init", "key"]


def test_a_look_for_a_kernel_waits_for_the_thread_that_computes_the_key(seen, monkeypatch):
    """Regression: a look before the thread was ready computed the key a second time, 0.4 s of a start."""
    may_go = threading.Event()
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: may_go.wait(10) and seen.append("key"))
    open_early("cuda")
    looks = [threading.Thread(target=triton.runtime.cache.triton_key) for _ in range(2)]
    for look in looks:
        look.start()
    may_go.set()
    for look in looks:
        look.join()
    assert seen.count("key") == 1


def test_the_second_engine_of_a_process_opens_nothing(seen):
    open_early("cuda")
    open_early("cuda")
    for thread in threading.enumerate():
        if thread.name == "shoal-open-gpu":
            thread.join()
    triton.runtime.cache.triton_key()
    assert sorted(seen) == ["context", "device 0", "init", "key"]


def test_nothing_is_opened_for_a_cpu(seen, monkeypatch):
    open_early("cpu")
    open_gpu.open_gpu.cache_clear()
    monkeypatch.setattr(open_gpu, "_cuda_library", lambda torch: Path(torch, "missing"))
    open_early("auto")
    assert seen == []


def test_without_a_driver_nothing_is_imported(seen, monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    open_early("auto")
    assert seen == []


@pytest.mark.parametrize("visible", ["", "-1", None])
def test_a_driver_without_a_gpu_imports_no_triton(seen, monkeypatch, tmp_path, visible):
    """Regression: a driver's library alone had a CPU run import Triton and the GPU's kernels."""
    if visible is None:
        (tmp_path / "nvidia0").unlink()
        (tmp_path / "nvidiactl").touch()
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    open_early("auto")
    assert seen == []


def test_a_triton_that_cannot_be_imported_is_reported_by_the_kernels(seen, monkeypatch):
    """Regression: a server's engine ended with a traceback before it could tell the server why."""
    monkeypatch.setitem(sys.modules, "triton", None)
    open_early("cuda")
    for thread in threading.enumerate():
        if thread.name == "shoal-open-gpu":
            thread.join()
    assert seen == ["init", "device 0", "context"]
