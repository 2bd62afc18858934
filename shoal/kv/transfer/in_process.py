"""KV blocks between two engines in one process: the reader copies out of the owner's cache itself."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Sequence

import msgspec

from shoal.kv.transfer.mapped import MappedPeer, check_fit, decode
from shoal.kv.transfer.ticket import Failure, TransferError, WindowAddress
from shoal.kv.transfer.transport import Reach
from shoal.kv.view import BlockView


class _Address(msgspec.Struct, frozen=True, array_like=True):
    pid: int
    key: bytes


class InProcessWindow:
    def __init__(self, view: BlockView) -> None:
        self.view = view
        key = secrets.token_bytes(16)
        memory = msgspec.msgpack.encode(_Address(os.getpid(), key))
        self.address = WindowAddress(InProcess.name, view.spec, memory)
        _windows[key] = self

    def close(self) -> None:
        key = msgspec.msgpack.decode(self.address.memory, type=_Address).key
        _windows.pop(key, None)


# The windows of this process by key. Two engines in one process know nothing of each other, so this is where
# they meet.
_windows: weakref.WeakValueDictionary[bytes, InProcessWindow] = weakref.WeakValueDictionary()


class InProcess:
    name = "in_process"
    reach = Reach.PROCESS

    def open_window(self, view: BlockView) -> InProcessWindow:
        return InProcessWindow(view)

    def connect(self, windows: Sequence[WindowAddress], into: BlockView) -> MappedPeer:
        check_fit([window.spec for window in windows], into.spec)
        views = []
        for window in windows:
            address = decode(window, _Address)
            opened = _windows.get(address.key)
            if address.pid != os.getpid() or opened is None or opened.view.spec != window.spec:
                raise TransferError(Failure.UNREACHABLE, "the blocks are not in a window of this process")
            views.append(opened.view)
        return MappedPeer(views, into, lambda: None)
