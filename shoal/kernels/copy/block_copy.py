"""Copies of KV blocks between two caches, whatever their layouts.

`Pieces` says as addresses what lies where. There are three ways to copy. `copy_on_host` is plain PyTorch and
the oracle. `copy_by_dma` hands contiguous runs to the copy engines, which take nothing from kernels that run
meanwhile. The third way is a kernel in block_copy_triton.py, so that this file does not need Triton, which
a machine without a GPU may lack.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

Dim = tuple[int, int, int]  # size, stride in the source and stride in the destination, both in bytes


@dataclass(frozen=True, slots=True)
class Pieces:
    """Strides and sizes with which block s of the source is copied to block d of the destination.

    For each piece p and each index (i, j, k) below `sizes`, `run` bytes go from src[p] + s * src_block + (i,
    j, k) . src_strides to dst[p] + d * dst_block + (i, j, k) . dst_strides. All numbers are bytes.
    """

    src: np.ndarray  # int64 [pieces]: addresses in block 0
    dst: np.ndarray
    src_block: int
    dst_block: int
    sizes: tuple[int, ...]
    src_strides: tuple[int, ...]
    dst_strides: tuple[int, ...]
    run: int

    @property
    def word(self) -> int:
        """The largest power of two, at most 16 bytes, that divides every address."""
        bits = int(np.bitwise_or.reduce(self.src) | np.bitwise_or.reduce(self.dst))
        return math.gcd(
            16, bits, self.run, self.src_block, self.dst_block, *self.src_strides, *self.dst_strides
        )


def join(
    src: np.ndarray, dst: np.ndarray, src_block: int, dst_block: int, dims: Sequence[Dim], item_bytes: int
) -> Pieces:
    """Makes `Pieces` with the longest runs. Dimensions that follow each other without a gap on both sides
    become one, and so do pieces. At most three dimensions may remain."""
    run = item_bytes
    # The destination's innermost dimension comes first, because writes should be near each other.
    rest: list[Dim] = []
    for size, from_stride, to_stride in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[2]):
        if not rest and from_stride == to_stride == run:
            run *= size
        elif rest and (from_stride, to_stride) == (rest[-1][0] * rest[-1][1], rest[-1][0] * rest[-1][2]):
            rest[-1] = (size * rest[-1][0], *rest[-1][1:])
        else:
            rest.append((size, from_stride, to_stride))
    if not rest and (np.diff(src) == run).all() and (np.diff(dst) == run).all():
        run *= len(src)
        src, dst = src[:1], dst[:1]
    assert len(rest) <= 3
    rest += [(1, 0, 0)] * (3 - len(rest))
    sizes, src_strides, dst_strides = zip(*reversed(rest))
    return Pieces(src, dst, src_block, dst_block, sizes, src_strides, dst_strides, run)


def copy_on_host(pieces: Pieces, src_ids: np.ndarray, dst_ids: np.ndarray) -> None:
    """Copies between addresses of host memory. The ids of blocks are int64."""
    # memmove has a tenth of a tensor's overhead, and starts no threads for work that memory bounds.
    if math.prod(pieces.sizes) == 1:
        for src, dst in zip(*(addresses.tolist() for addresses in runs(pieces, src_ids, dst_ids))):
            ctypes.memmove(dst, src, pieces.run)
        return
    shape = (*pieces.sizes, pieces.run)
    for src, dst in zip(pieces.src.tolist(), pieces.dst.tolist()):
        source = bytes_at(
            src,
            int(src_ids.max(initial=0)) * pieces.src_block
            + _span(pieces.sizes, pieces.src_strides, pieces.run),
        )
        target = bytes_at(
            dst,
            int(dst_ids.max(initial=0)) * pieces.dst_block
            + _span(pieces.sizes, pieces.dst_strides, pieces.run),
        )
        for s, d in zip(src_ids.tolist(), dst_ids.tolist()):
            target.as_strided(shape, (*pieces.dst_strides, 1), d * pieces.dst_block).copy_(
                source.as_strided(shape, (*pieces.src_strides, 1), s * pieces.src_block)
            )


def _span(sizes: Sequence[int], strides: Sequence[int], run: int) -> int:
    return sum((size - 1) * stride for size, stride in zip(sizes, strides)) + run


def bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    """Returns host memory as a uint8 tensor, which is valid as long as the memory's owner keeps it."""
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def runs(pieces: Pieces, src_ids: np.ndarray, dst_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the addresses of every run, in the source and in the destination: int64 [ids * pieces *
    sizes]."""
    return (
        _run_addresses(pieces.src, pieces.src_block, src_ids, pieces.sizes, pieces.src_strides),
        _run_addresses(pieces.dst, pieces.dst_block, dst_ids, pieces.sizes, pieces.dst_strides),
    )


def _run_addresses(
    first: np.ndarray, block: int, ids: np.ndarray, sizes: Sequence[int], strides: Sequence[int]
) -> np.ndarray:
    addresses = (ids * block)[:, None] + first
    for size, stride in zip(sizes, strides):
        addresses = addresses[..., None] + np.arange(size, dtype=np.int64) * stride
    return addresses.reshape(-1)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint32), ("id", ctypes.c_int32))


class _Attributes(ctypes.Structure):
    """The struct CUmemcpyAttributes of the CUDA driver."""

    _fields_ = (
        ("source_order", ctypes.c_uint32),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint32),
    )


IN_STREAM_ORDER, OVERLAP_WITH_COMPUTE = 1, 1


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    driver.cuMemcpyAsync.argtypes = (pointer, pointer, size, pointer)
    driver.cuStreamGetCtx.argtypes = (pointer, ctypes.POINTER(pointer))
    driver.cuCtxPushCurrent_v2.argtypes = (pointer,)
    driver.cuCtxPopCurrent_v2.argtypes = (ctypes.POINTER(pointer),)
    if hasattr(driver, "cuMemcpyBatchAsync"):  # Drivers have it from 570 (CUDA 12.8) on.
        driver.cuMemcpyBatchAsync.argtypes = (
            pointer,
            pointer,
            pointer,
            size,
            pointer,
            pointer,
            size,
            pointer,
            pointer,
        )
    return driver


def copy_by_dma(src: np.ndarray, dst: np.ndarray, run: int, stream: torch.cuda.Stream) -> None:
    """Queues copies of `run` bytes from each address in `src` to its counterpart in `dst`. Addresses are
    int64, of device memory or pinned memory. `stream` must not be the default stream, because the driver's
    batches do not accept it. Raises RuntimeError with the driver's code."""
    assert stream.cuda_stream
    driver = _driver()
    handle = ctypes.c_void_p(stream.cuda_stream)
    context = ctypes.c_void_p()  # A thread that never called the CUDA runtime has no context of its own.
    _check(driver.cuStreamGetCtx(handle, context), "cuStreamGetCtx")
    _check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    try:
        if hasattr(driver, "cuMemcpyBatchAsync"):
            sizes = np.full(len(src), run, np.uint64)
            attributes = _Attributes(source_order=IN_STREAM_ORDER, flags=OVERLAP_WITH_COMPUTE)
            first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
            _check(
                driver.cuMemcpyBatchAsync(
                    dst.ctypes.data,
                    src.ctypes.data,
                    sizes.ctypes.data,
                    len(src),
                    ctypes.byref(attributes),
                    ctypes.byref(first),
                    1,
                    ctypes.byref(failed),
                    handle,
                ),
                "cuMemcpyBatchAsync",
            )
        else:
            for source, target in zip(src.tolist(), dst.tolist()):
                _check(driver.cuMemcpyAsync(target, source, run, handle), "cuMemcpyAsync")
    finally:
        driver.cuCtxPopCurrent_v2(context)


def _check(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} failed: the CUDA driver's error {code}")
