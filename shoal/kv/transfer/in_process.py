"""KV transfer between two engines in one process: the reader copies out of the owner's cache directly."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Sequence

import msgspec

from shoal.kv.transfer.mapped import MappedPeer, check_fit, decode
from shoal.kv.transfer.ticket import ExportAddress, Failure, TransferError
from shoal.kv.transfer.transport import CacheViews, Reach


class _InProcessAddress(msgspec.Struct, frozen=True, array_like=True):
    pid: int
    key: bytes


class InProcessExport:
    def __init__(self, views: CacheViews) -> None:
        self.views = list(views)
        self.specs = tuple(view.spec for view in views)
        key = secrets.token_bytes(16)
        memory = msgspec.msgpack.encode(_InProcessAddress(os.getpid(), key))
        self.address = ExportAddress(InProcess.name, self.specs, memory)
        _exports[key] = self

    def close(self) -> None:
        key = msgspec.msgpack.decode(self.address.memory, type=_InProcessAddress).key
        _exports.pop(key, None)


# The exports of this process by key. Two engines in one process know nothing of each other, so this is where
# they meet.
_exports: weakref.WeakValueDictionary[bytes, InProcessExport] = weakref.WeakValueDictionary()


class InProcess:
    name = "in_process"
    reach = Reach.PROCESS

    def export(self, views: CacheViews) -> InProcessExport:
        return InProcessExport(views)

    def connect(self, exports: Sequence[ExportAddress], into: CacheViews) -> MappedPeer:
        check_fit(exports, into)
        views = []
        for export in exports:
            address = decode(export, _InProcessAddress)
            opened = _exports.get(address.key)
            if address.pid != os.getpid() or opened is None or opened.specs != export.specs:
                raise TransferError(Failure.UNREACHABLE, "the blocks are not in an export of this process")
            views.append(opened.views)
        return MappedPeer(views, into, lambda: None)
