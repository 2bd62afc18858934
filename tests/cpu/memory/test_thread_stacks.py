"""The stacks of a GPU's threads are given back for sleep by processes that have the GPU to themselves."""

import ctypes
from types import SimpleNamespace

import pytest

from shoal.memory import thread_stacks
from shoal.memory.thread_stacks import ThreadStacks


@pytest.fixture
def driver(monkeypatch):
    """A driver with a limit of 1,024 bytes. `code` is what setting it returns."""
    fake = SimpleNamespace(size=1024, code=0)

    def get(out, which):
        assert which == 0
        out._obj.value = fake.size
        return 0

    def set_size(which, size):
        assert which == 0 and isinstance(size, ctypes.c_size_t)
        if not fake.code:
            fake.size = size.value
        return fake.code

    fake.cuCtxGetLimit, fake.cuCtxSetLimit = get, set_size
    monkeypatch.setattr(thread_stacks, "_driver", lambda: fake)
    return fake


@pytest.fixture
def stacks():
    made = ThreadStacks()
    made.is_own_process = True
    return made


def test_stacks_are_given_back_and_taken_again_with_their_size(driver, stacks):
    driver.size = 2048
    for _ in range(2):
        stacks.release()
        stacks.release()
        assert driver.size == 0
        stacks.take()
        stacks.take()
        assert driver.size == 2048


def test_a_users_process_keeps_its_stacks(driver):
    stacks = ThreadStacks()
    stacks.release()
    assert driver.size == 1024
    stacks.take()
    assert driver.size == 1024


def test_a_lack_of_memory_leaves_the_stacks_given_back(driver, stacks):
    stacks.release()
    driver.code = 2
    with pytest.raises(MemoryError, match="stacks"):
        stacks.take()
    driver.code = 0
    stacks.take()
    assert driver.size == 1024


def test_other_errors_of_the_driver_are_reported_with_their_code(driver, stacks):
    driver.code = 201
    with pytest.raises(RuntimeError, match="201"):
        stacks.release()
