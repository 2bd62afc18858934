"""`SharedMemory`: memory of each GPU of a group that all ranks map, by CUDA IPC. Each rank allocates its own
with cudaMalloc, as torch's allocator may use memory that can't be shared, and maps the others'."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from shoal.kv.cuda_driver import DriverError, call, close_memory, context, export_memory, open_memory
from shoal.layers.parallel import TensorParallel


class SharedMemory:
    """Use `share_memory`."""

    def __init__(self, device: int, addresses: Sequence[int], own: int, num_bytes: int) -> None:
        """addresses: the ranks' memory as this rank sees it; of which `own` is this rank's."""
        self.addresses = list(addresses)
        self.own = torch.as_tensor(_Bytes(own, num_bytes), device=torch.device("cuda", device))
        self._device, self._address = device, own

    def close(self) -> None:
        """Gives the memory back. No kernel and no copy may use it any more, on any rank."""
        _free(self._device, [at for at in self.addresses if at != self._address], self._address)


def share_memory(tp: TensorParallel, num_bytes: int) -> tuple[SharedMemory | None, str | None]:
    """Returns zeros on each GPU, mapped by all ranks, which call this together; or None, and why it can't be
    had, if that is known here."""
    device, address, handle = tp.device.index, 0, bytes(64)
    peer_memory: list[int] = []
    why = _hindrance(tp)
    if all_agree(tp, why is None):
        try:
            address = _allocate(device, num_bytes)
            handle = export_memory(device, address)
        except DriverError as error:
            why = str(error)
        # The others' zeros are written when their handles are here.
        handles = tp.all_gather(torch.tensor([list(handle)], dtype=torch.uint8, device=tp.device), dim=0)
        if all_agree(tp, why is None):
            try:
                for rank, theirs in enumerate(handles.tolist()):
                    peer_memory.append(0 if rank == tp.rank else open_memory(device, bytes(theirs)))
            except DriverError as error:
                why = str(error)
            if all_agree(tp, why is None):
                addresses = [at or address for at in peer_memory]
                return SharedMemory(device, addresses, address, num_bytes), None
    tp.barrier()  # until here others may have mapped this rank's memory
    _free(device, peer_memory, address)
    return None, why or "another rank has no way to its peers"


def _hindrance(tp: TensorParallel) -> str | None:
    others = [rank for rank in range(tp.size) if rank != tp.rank]
    far = [rank for rank in others if not torch.cuda.can_device_access_peer(tp.rank, rank)]
    return f"GPU {tp.rank} has no access to the memory of GPU {far[0]}" if far else None


def all_agree(tp: TensorParallel, is_well: bool) -> bool:
    """Returns True if all ranks, which call this together, say that it is well."""
    return int(tp.all_reduce(torch.tensor([int(is_well)], device=tp.device)).item()) == tp.size


class _Bytes:
    """Memory that torch does not own, in the words that it takes from others."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": "|u1",
            "shape": (num_bytes,),
        }


def _allocate(device: int, num_bytes: int) -> int:
    """The address of new memory that is all zeros."""
    address = ctypes.c_uint64()
    with context(device):
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        call("cuCtxSynchronize")
    return address.value


def _free(device: int, peer_memory: Sequence[int], address: int) -> None:
    if peer_memory:
        close_memory(device, [at for at in peer_memory if at])
    if address:
        with context(device):
            call("cuMemFree_v2", ctypes.c_uint64(address))
