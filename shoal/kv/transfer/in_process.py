"""KV transfer between two engines in one process: the reader copies out of the owner's cache directly."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Sequence

import msgspec

from shoal.kv.transfer.mapped import MappedPeer, check_fit, decode
from shoal.kv.transfer.ticket import ExportAddress, Failure, TransferError
from shoal.kv.transfer.transport import Reach
from shoal.kv.view import BlockView


class _InProcessAddress(msgspec.Struct, frozen=True, array_like=True):
    pid: int
    key: bytes


class InProcessExport:
    def __init__(self, view: BlockView) -> None:
        self.view = view
        key = secrets.token_bytes(16)
        memory = msgspec.msgpack.encode(_InProcessAddress(os.getpid(), key))
        self.address = ExportAddress(InProcess.name, view.spec, memory)
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

    def export(self, view: BlockView) -> InProcessExport:
        return InProcessExport(view)

    def connect(self, exports: Sequence[ExportAddress], into: BlockView) -> MappedPeer:
        check_fit([export.spec for export in exports], into.spec)
        views = []
        for export in exports:
            address = decode(export, _InProcessAddress)
            opened = _exports.get(address.key)
            if address.pid != os.getpid() or opened is None or opened.view.spec != export.spec:
                raise TransferError(Failure.UNREACHABLE, "the blocks are not in an export of this process")
            views.append(opened.view)
        return MappedPeer(views, into, lambda: None)
