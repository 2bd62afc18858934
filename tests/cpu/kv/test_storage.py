"""Each kind of storage: bytes in and out, what can't be had, and lifetimes."""

import ctypes
import gc
import os
import random
import resource
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from shoal.kv import storage
from shoal.kv.library import files
from shoal.kv.library.borrowed import borrowed_memory
from shoal.kv.library.files import DirectFile, mapped_file
from shoal.kv.library.tensor_view import TensorView
from shoal.kv.storage import (
    Kind,
    NotEnoughMemoryError,
    StorageClosedError,
    StorageError,
    StorageInUseError,
    host_memory,
    memory_of,
    pinned_memory,
    shared_memory,
)


def borrowed(path, num_bytes):
    owner = (ctypes.c_uint8 * num_bytes)()
    return borrowed_memory(ctypes.addressof(owner), num_bytes, Kind.HOST, owner)


KINDS = {
    "host": lambda path, n: host_memory(n),
    "mapped": lambda path, n: mapped_file(path, n),
    "shared": lambda path, n: shared_memory(n),
    "direct": DirectFile,
    "borrowed": borrowed,
    "tensor": lambda path, n: memory_of(torch.zeros(n, dtype=torch.uint8)),
}


@pytest.fixture(params=KINDS)
def make(request, tmp_path):
    return lambda num_bytes: KINDS[request.param](tmp_path / "blocks", num_bytes)


def test_bytes_come_back_from_any_offset(make):
    seed = 5
    rng = random.Random(seed)
    with make(20_001) as made:
        model = np.zeros(20_001, np.uint8)
        made.write(0, model)
        for _ in range(200):
            offset = rng.choice((rng.randrange(20_001), 4096 * rng.randrange(4)))
            size = rng.choice((rng.randrange(20_001 - offset + 1), 0, min(4096, 20_001 - offset)))
            if rng.random() < 0.5:
                model[offset : offset + size] = rng.randrange(256)
                made.write(offset, model[offset : offset + size].copy())
            into = np.empty(size, np.uint8)
            made.read(offset, into)
            assert (into == model[offset : offset + size]).all(), f"seed {seed}"


def test_more_than_the_buffer_of_direct_io(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BOUNCE_BYTES", 8192)
    made = DirectFile(tmp_path / "blocks", 50_000)
    data = np.random.default_rng(1).integers(0, 256, 30_000).astype(np.uint8)
    made.write(5000, data)
    into = np.empty(30_000, np.uint8)
    made.read(5000, into)
    assert (into == data).all()


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (100, 1), (0, 101), (99, 2)])
def test_bytes_outside_are_refused(make, offset, size):
    with make(100) as made, pytest.raises(StorageError, match="100 bytes"):
        made.read(offset, np.empty(size, np.uint8))


def test_a_storage_with_views_is_not_closed(make):
    made = make(64)
    view = TensorView(made, (4, 4), torch.float32)
    part = view.slice(0, 1, 2)
    with pytest.raises(StorageInUseError, match="2 views"):
        made.close()
    view[1, 1] = 3
    assert part[0, 1] == 3
    del view, part
    made.close()
    made.close()
    with pytest.raises(StorageClosedError):
        made.write(0, np.zeros(1, np.uint8))
    with pytest.raises(StorageClosedError):
        TensorView(made, (4, 4), torch.float32)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"direct"}))
def test_what_was_taken_out_keeps_the_memory(kind, tmp_path):
    made = KINDS[kind](tmp_path / "blocks", 4 << 20)
    tensor = TensorView(made, (1 << 20,), torch.float32).slice(0, 5, 9).tensor()
    array = TensorView(made, (1 << 20,), torch.float32).array()[7:]
    tensor[3] = 8
    made.close()
    del made
    gc.collect()
    assert array[1] == 8
    array[1] = 9
    assert tensor[3] == 9


def test_an_owner_lives_as_long_as_its_memory_is_used():
    class Owner:
        memory = (ctypes.c_uint8 * 16)()

    owner = Owner()
    gone = weakref.ref(owner)
    made = borrowed_memory(ctypes.addressof(owner.memory), 16, Kind.HOST, owner)
    tensor = made.tensor()[4:]
    del owner
    made.close()
    del made
    gc.collect()
    assert gone() is not None
    del tensor
    gc.collect()
    assert gone() is None


def test_a_mapped_file_holds_what_was_written(tmp_path):
    with mapped_file(tmp_path / "blocks", 100) as made:
        made.write(10, np.full(5, 7, np.uint8))
    assert (tmp_path / "blocks").read_bytes() == bytes(10) + b"\7" * 5 + bytes(85)
    with mapped_file(tmp_path / "blocks", 50) as again:  # a longer file is not cut off
        assert again.tensor()[12] == 7
    assert (tmp_path / "blocks").stat().st_size == 100


def test_more_memory_than_there_is():
    with pytest.raises(NotEnoughMemoryError, match=r"1048576.00 GiB .* only .* GiB are free"):
        host_memory(1 << 50)
    if not torch.cuda.is_available():
        with pytest.raises(StorageError, match="needs a GPU"):
            pinned_memory(100)


@pytest.mark.parametrize(
    "make",
    [
        host_memory,
        lambda n: mapped_file("unused", n),
        lambda n: DirectFile("unused", n),
        lambda n: borrowed_memory(4096, n, Kind.HOST, None),
    ],
)
def test_storages_of_no_bytes(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for num_bytes in (0, -1):
        with pytest.raises(StorageError, match="1 or more"):
            make(num_bytes)
    assert not os.listdir(tmp_path)


def test_a_null_pointer_is_not_borrowed():
    with pytest.raises(StorageError, match="address 0"):
        borrowed_memory(0, 100, Kind.HOST, None)


@pytest.mark.parametrize("make", [mapped_file, DirectFile])
def test_files_that_cannot_be_had(make, tmp_path):
    with pytest.raises(StorageError, match="/proc/nowhere/blocks cannot hold"):
        make("/proc/nowhere/blocks", 100)
    with pytest.raises(StorageError, match="cannot hold"):
        make(tmp_path, 100)
    (tmp_path / "blocks").write_bytes(b"before")
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, most))  # as if the disk were full
    try:
        with pytest.raises(StorageError, match="cannot hold"):
            make(tmp_path / "blocks", 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert (tmp_path / "blocks").read_bytes() == b"before"


def test_a_direct_file_that_was_cut_off(tmp_path):
    made = DirectFile(tmp_path / "blocks", 10_000)
    os.truncate(tmp_path / "blocks", 4096)
    with pytest.raises(StorageError, match="cut off"):
        made.read(5000, np.empty(10, np.uint8))


def test_a_direct_file_has_no_memory(tmp_path):
    with pytest.raises(StorageError, match="no memory to share"):
        DirectFile(tmp_path / "blocks", 100).tensor()


def test_without_direct_io_the_page_cache_is_reported(tmp_path, monkeypatch, caplog):
    def open_without(path, flags, mode, real=os.open):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(files.os, "open", open_without)
    made = DirectFile(tmp_path / "blocks", 100)
    assert not made.direct and "no direct I/O" in caplog.text
    made.write(3, np.full(4, 9, np.uint8))
    into = np.zeros(6, np.uint8)
    made.read(2, into)
    assert into.tolist() == [0, 9, 9, 9, 9, 0]


def test_descriptors_are_returned(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for i in range(20):
        made = [DirectFile(tmp_path / f"a{i}", 100), mapped_file(tmp_path / f"b{i}", 100)]
        made[i % 2].close()
        del made
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_shared_memory_is_seen_and_not_written_by_others():
    """Another process maps it by its number and sees what is written later; nobody can shrink it, or map it
    to write."""
    made = shared_memory(10_000)
    made.write(5, np.full(3, 7, np.uint8))
    path = f"/proc/{os.getpid()}/fd/{made.shared.fd}"
    script = (
        "import mmap, os, sys\n"
        f"seen = mmap.mmap(os.open('{path}', os.O_RDONLY), 0, prot=mmap.PROT_READ)\n"
        "print(seen[4:9].hex(), flush=True); sys.stdin.readline(); print(seen[4:9].hex())\n"
        f"fd = os.open('{path}', os.O_RDWR)\n"
        "for call in (lambda: os.ftruncate(fd, 1), lambda: os.ftruncate(fd, 1 << 20), lambda: mmap.mmap(fd, 0)):\n"
        "    try: call(); print('no error')\n"
        "    except OSError as error: print(type(error).__name__)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True)
    assert child.stdout.readline() == "0007070700\n"
    made.write(4, np.full(1, 9, np.uint8))
    assert child.communicate("\n")[0].split() == ["0907070700", *["PermissionError"] * 3]
    assert made.shared.read_key() == bytes(storage.KEY_BYTES) and made.shared.key_offset >= 10_000


def test_shared_memory_lasts_as_long_as_its_tensors():
    made = shared_memory(5000)
    tensor, fd = made.tensor(), made.shared.fd
    made.close()
    del made
    tensor.fill_(3)
    assert os.fstat(fd).st_size > 5000 and int(tensor.sum()) == 15_000
    del tensor
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_shared_memory_that_the_system_does_not_give(monkeypatch):
    def refuse(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(StorageError, match=r"5000 bytes of shared memory .*Too many open files.*ulimit -n"):
        shared_memory(5000)


def test_layouts_need_no_torch():
    assert (
        subprocess.run(
            [sys.executable, "-c", "import sys, shoal.kv.layout; sys.exit('torch' in sys.modules)"]
        ).returncode
        == 0
    )
