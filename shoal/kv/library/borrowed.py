"""Memory of another owner as a storage."""

from __future__ import annotations

import ctypes

import torch

from shoal.kv.storage import Kind, Memory, StorageError, check_size, tensor_over


def borrowed_memory(address: int, num_bytes: int, kind: Kind, owner: object) -> Memory:
    """Memory of another owner, at an address that is valid for this kind. `owner` is kept alive as long as
    anything uses the memory. Raises StorageError."""
    check_size(num_bytes)
    if kind is Kind.DIRECT or not address:
        raise StorageError(
            f"{kind} storage at address {address} cannot be borrowed: it takes memory with an address"
        )
    if kind is Kind.DEVICE:
        return Memory(kind, torch.as_tensor(_DeviceBytes(address, num_bytes, owner)))
    pages = (ctypes.c_uint8 * num_bytes).from_address(address)
    pages.owner = owner  # type: ignore[attr-defined]
    return Memory(kind, tensor_over(pages))


class _DeviceBytes:
    """Device memory in a form that torch can take over. The tensor keeps this object, which keeps the
    owner."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
