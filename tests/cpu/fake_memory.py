"""Regions over a fake driver, and a stand-in for PyTorch's pools that asks for segments as PyTorch does."""

import contextlib
import ctypes
import shutil
from ctypes import c_char_p, c_int64, c_void_p
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.kernels import c_library
from shoal.memory import library
from shoal.memory.regions import Regions

FOLDER = Path(__file__).parent
GRAIN = 65536  # the fake's granularity


def build_fake():
    return str(c_library.build(FOLDER, ["fake_driver.c"], [], ("-O1", "-std=gnu11", "-fPIC", "-pthread")))


class Fake:
    """The fake library's counts of resources, and switches."""

    def __init__(self, path):
        self.path = path
        self.library = ctypes.CDLL(path)
        self.library.fake_violation.restype = c_char_p
        self.library.fake_reset()

    def counts(self):
        found = (c_int64 * 7)()
        self.library.fake_counts(found)
        return dict(zip(("reserved", "physical", "mapped", "streams", "events", "pinned", "bytes"), found))

    def get(self, name):
        return c_int64.in_dll(self.library, f"fake_{name}").value

    def set(self, name, value):
        c_int64.in_dll(self.library, f"fake_{name}").value = value

    def fail_at(self, k, code=999):
        self.set("fail_code", code)
        self.set("fail_at", self.get("calls") + k)

    def failed(self):
        return (ctypes.c_char * 64).in_dll(self.library, "fake_failed").value.decode()

    def check(self):
        assert self.library.fake_violation() == b""


@contextlib.contextmanager
def checked_fake():
    """A Fake. At the end its counts must be as at the start."""
    found = Fake(build_fake())
    before = found.counts()
    yield found
    found.check()
    assert found.counts() == before, "something was left behind"


class Pools:
    """Stands in for pools.TorchPools. A pool's "live" says what tensors hold: address -> size."""

    def __init__(self, driver_path):
        self.driver_path = driver_path
        self.stack, self.device = [], 0
        self.others = self.elsewhere = 0  # bytes that others hold, and PyTorch outside of regions
        self.opened = []

    def current_device(self):
        return self.device

    def open(self, path, slot):
        function = getattr(ctypes.CDLL(path), f"shoal_malloc_{slot:02o}")
        function.restype, function.argtypes = c_void_p, (c_int64, ctypes.c_int, c_void_p)
        self.opened.append({"malloc": function, "live": {}, "slot": slot})
        return self.opened[-1]

    @contextlib.contextmanager
    def use(self, pool, device):
        self.stack.append((pool, device))
        try:
            yield
        finally:
            assert self.stack.pop() == (pool, device)

    def pool_id(self, pool):
        return (0, pool["slot"])

    def live_ranges(self, pool):
        return sorted(pool["live"].items())

    def device_usage(self, device):
        counts = (c_int64 * 7)()
        ctypes.CDLL(self.driver_path).fake_counts(counts)
        in_regions = sum(sum(pool["live"].values()) for pool in self.opened)
        return counts[6] + self.others + self.elsewhere, in_regions + self.elsewhere

    def release_cache(self):
        pass

    def empty(self, size):
        """A segment in the region that is entered."""
        ((pool, device),) = self.stack  # PyTorch would take the outermost: never two
        address = pool["malloc"](size, device, None)
        if not address:
            raise torch.OutOfMemoryError("out of memory")
        pool["live"][address] = size
        return Tensor(pool, address, size)


class Tensor:
    def __init__(self, pool, address, size):
        self.pool, self.address, self.size = pool, address, size

    @property
    def bytes(self):
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(self.address))

    def fill(self, seed):
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.size, dtype=np.uint8)
        return self

    def holds(self, seed):
        return np.array_equal(
            self.bytes, np.random.default_rng(seed).integers(0, 256, self.size, dtype=np.uint8)
        )

    def free(self):
        self.pool["live"].pop(self.address, None)
        library.load().shoal_free(self.address, self.size, 0, None)


def make_regions(path, kind="cuda", **options):
    defaults = {"piece_bytes": (2 * GRAIN, 8 * GRAIN), "chunk_bytes": 3 * GRAIN}
    return Regions(kind, torch_pools=Pools(path), driver_path=path, **defaults | options)


needs_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None and shutil.which("cc") is None, reason="needs a C compiler"
)
