"""KV blocks between processes of one host, by shared memory: the reader maps the owner's cache and copies.

The cache is in anonymous memory (`shared_memory` in kv/storage.py) that has no name in any folder, so
nothing is left behind however its owner ends. A reader opens it through /proc/<pid>/fd, which the kernel
allows to processes of the same user, and maps it read-only. A random key after the blocks proves that it
is the right export, and not another process's memory under the same number."""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import secrets
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from shoal.kv.storage import KEY_BYTES, Kind
from shoal.kv.transfer.mapped import (
    MappedPeer,
    RemoteMemory,
    boot_id,
    check_fit,
    decode,
    one_piece,
    remote_views,
)
from shoal.kv.transfer.ticket import ExportAddress, Failure, TransferError
from shoal.kv.transfer.transport import CacheViews, Reach, TransportError


class _SharedMemoryAddress(msgspec.Struct, frozen=True, array_like=True):
    host: str
    pid: int
    fd: int
    offset: int  # the cache's, in bytes
    key_offset: int
    key: bytes


class SharedMemoryExport:
    def __init__(self, views: CacheViews) -> None:
        start, _ = one_piece(views)
        storage = views[0].storage
        shared = storage.shared
        if shared is None:
            raise TransportError(
                f"a cache in {storage.kind} memory can't be mapped by other processes; on a CPU "
                "allocate it with shared_memory()"
            )
        self._shared = shared
        self._key = key = secrets.token_bytes(KEY_BYTES)
        shared.write_key(key)
        offset = start - storage.address
        memory = _SharedMemoryAddress(boot_id(), os.getpid(), shared.fd, offset, shared.key_offset, key)
        specs = tuple(view.spec for view in views)
        self.address = ExportAddress(SharedMemory.name, specs, msgspec.msgpack.encode(memory))

    def close(self) -> None:
        if self._shared.read_key() == self._key:  # and no later export's
            self._shared.write_key(bytes(KEY_BYTES))


class SharedMemory:
    name = "shared_memory"
    reach = Reach.HOST

    def export(self, views: CacheViews) -> SharedMemoryExport:
        return SharedMemoryExport(views)

    def connect(self, exports: Sequence[ExportAddress], into: CacheViews) -> MappedPeer:
        check_fit(exports, into)
        maps: list[mmap.mmap] = []
        views = []
        for export in exports:
            memory, address = _map(export)
            maps.append(memory)
            start = np.frombuffer(memory, np.uint8).ctypes.data
            storage = RemoteMemory(Kind.HOST, address.key_offset, torch.device("cpu"), start)
            views.append(remote_views(export, storage, address.offset))
        return MappedPeer(views, into, maps.clear)  # a map without users unmaps itself


def _map(export: ExportAddress) -> tuple[mmap.mmap, _SharedMemoryAddress]:
    """Maps the owner's memory, and checks the key in it."""
    address = decode(export, _SharedMemoryAddress)
    if address.host != boot_id():
        raise TransferError(Failure.UNREACHABLE, "the blocks are in another host's memory")
    try:
        # The flags keep the opening without side effects, whatever the file is.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", flags)
        try:
            # It must be memory that its owner cannot shrink: a read of missing pages would end this process.
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError("it is not sealed against shrinking")
            memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
    except (OSError, ValueError, OverflowError) as error:
        raise TransferError(
            Failure.UNREACHABLE,
            f"process {address.pid} has no such shared memory that this one may map ({error}); it must live, "
            "on this host and under this user",
        ) from None
    key = memory[address.key_offset : address.key_offset + KEY_BYTES] if address.key_offset >= 0 else b""
    if not any(key) or not hmac.compare_digest(key, address.key):
        raise TransferError(Failure.UNREACHABLE, "the export of the blocks was closed or replaced")
    return memory, address
