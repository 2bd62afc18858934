"""KV transfer between processes of one host with caches on GPUs, by CUDA IPC: the reader maps the owner's
device memory, and its own GPU copies out of it, over NVLink or PCIe.

The owner gives out the IPC handle of the allocation. The memory must come from cudaMalloc, which is the
default of torch's allocator.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec
import torch

from shoal.kv.cuda_driver import (
    HANDLE_BYTES,
    DriverError,
    allocation_of,
    close_memory,
    export_memory,
    open_memory,
)
from shoal.kv.storage import Kind
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


class _CudaIpcAddress(msgspec.Struct, frozen=True, array_like=True):
    host: str
    gpu: str  # its UUID
    handle: bytes  # IPC handle of a whole allocation
    offset: int  # offset of the cache in the allocation, in bytes


class CudaIpcExport:
    def __init__(self, views: CacheViews) -> None:
        storage = views[0].storage
        if storage.kind is not Kind.DEVICE:
            raise TransportError(
                f"the cache must be in device memory for CUDA IPC, got {storage.kind} memory"
            )
        start, _ = one_piece(views)
        device = storage.device.index or 0
        try:
            base, _ = allocation_of(device, start)
            handle = export_memory(device, start)
        except DriverError as error:
            raise TransportError(
                f"the cache's GPU memory must come from cudaMalloc to be shared by CUDA IPC ({error}); leave "
                "out enable_sleep_mode and expandable_segments, or use NIXL"
            ) from None
        address = _CudaIpcAddress(boot_id(), _uuid(device), handle, start - base)
        specs = tuple(view.spec for view in views)
        self.address = ExportAddress(CudaIpc.name, specs, msgspec.msgpack.encode(address))

    def close(self) -> None:
        """Does nothing: the driver can't revoke a handle, so readers may map the memory until it is freed."""


class CudaIpc:
    name = "cuda_ipc"
    reach = Reach.HOST

    def export(self, views: CacheViews) -> CudaIpcExport:
        return CudaIpcExport(views)

    def connect(self, exports: Sequence[ExportAddress], into: CacheViews) -> MappedPeer:
        check_fit(exports, into)
        addresses = [_decode(export) for export in exports]
        if not torch.cuda.is_available():
            raise TransferError(
                Failure.UNREACHABLE, "the blocks are on a GPU, and this worker does not have one"
            )
        on_device = into[0].storage.kind is Kind.DEVICE
        index = torch.cuda.current_device()
        if on_device and into[0].storage.device.index is not None:
            index = into[0].storage.device.index
        device = torch.device("cuda", index)
        opened: list[int] = []
        views = []
        try:
            for export, address in zip(exports, addresses):
                start = open_memory(index, address.handle)
                opened.append(start)
                num_bytes = allocation_of(index, start)[1]
                is_far = address.gpu != _uuid(index)
                storage = RemoteMemory(Kind.DEVICE, num_bytes, device, start, is_far)
                views.append(remote_views(export, storage, address.offset))
        except DriverError as error:
            close_memory(index, opened)
            raise TransferError(
                Failure.UNREACHABLE,
                f"GPU {index} can't map the memory of the blocks' owner ({error}); the owner must be running "
                "on this host, and the two GPUs must reach each other",
            ) from None
        except TransferError:
            close_memory(index, opened)
            raise
        return MappedPeer(views, into, functools.partial(close_memory, index, opened))


def _decode(export: ExportAddress) -> _CudaIpcAddress:
    address = decode(export, _CudaIpcAddress)
    if len(address.handle) != HANDLE_BYTES or not 0 <= address.offset < 1 << 48:
        raise TransferError(
            Failure.DAMAGED, "the address of GPU memory is invalid: a wrong size of its handle, or offset"
        )
    if address.host != boot_id():
        raise TransferError(Failure.UNREACHABLE, "the blocks are on another host's GPU")
    return address


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
