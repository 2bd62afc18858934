"""The GPU is opened and Triton's key computed while kernels are imported, if there may be a GPU."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

from shoal.engine import early_device, open_gpu
from shoal.engine.early_device import open_device_early


@pytest.fixture
def seen(monkeypatch):
    """Notes calls of a driver that is not there, and the import of kernels."""
    calls: list[str] = []
    imported = threading.Event()

    def init(flags: int) -> int:
        assert imported.wait(10), "kernels are not imported meanwhile"
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
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")  # and so restored afterwards
    monkeypatch.setattr(open_gpu, "_cuda_library", lambda torch: Path(torch))
    monkeypatch.setattr(early_device, "select_ops", lambda kind: calls.append(kind) or imported.set())
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: calls.append("key"))
    return calls


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_context_and_a_key_are_made_beside_the_import_of_kernels(seen, device):
    open_device_early(device)
    for thread in threading.enumerate():
        if thread.name in ("shoal-open-gpu", "shoal-triton-key"):
            thread.join()
    assert sorted(seen) == ["context", "cuda", "device 0", "init", "key"]


def test_nothing_is_opened_for_a_cpu(seen, monkeypatch):
    open_device_early("cpu")
    monkeypatch.setattr(open_gpu, "_cuda_library", lambda torch: Path(torch, "missing"))
    open_device_early("auto")
    assert seen == []


def test_without_a_driver_nothing_is_imported(seen, monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    open_device_early("auto")
    assert seen == []
