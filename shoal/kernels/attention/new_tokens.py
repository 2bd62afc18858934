"""One launch between the matmul for q, k and v and the output matmul, for one new token of each of a few
sequences: the norms of q and k, their rotation, the cache write and attention, in CUDA C++ for Hopper
(new_tokens.cu).

A rope kernel and decode attention wait for memory in turn: for q, for keys and values, for partial results
and their counter. Here keys and values are in shared memory before q is there, as all but the newest token's
are known beforehand, and partial results meet in the shared memory of a cluster of programs (DSMEM). Figures
are in benchmarks/results/kernels.md.

T tokens, one of each sequence · H query heads · G kv heads · N head size · R state rows · M blocks of a
sequence. The oracle is qk_norm_rope_store in kernels/reference.py, then kernels/attention/reference.py.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch

from shoal.kernels.c_library import BuildError
from shoal.kernels.cuda_library import CudaFunction, compiling
from shoal.kernels.hopper import empty_matmul_input, is_hopper
from shoal.kernels.layer_cache import LayerCache

logger = logging.getLogger(__name__)

MOST_TOKENS = 4
LARGEST_CLUSTER, SMALLEST_CLUSTER = 16, 6  # programs that share the keys of a kv head
LARGE_GROUP = 4  # query heads of a kv head
FEWEST_PROGRAMS = 32  # Fewer read long contexts slowly.
HEAD_SIZES = (64, 128)
MOST_HEADS = 8  # query heads of a kv head: rows of a tensor core's tile
WARPS, KEYS = 8, 16  # constants of new_tokens.cu
POINTERS = "qkv q_norm k_norm cos_sin sinks positions rows lens tables cache out"
STRIDES = "table_stride block_stride kv_stride head_stride"


class Arguments(ctypes.Structure):
    """The struct of this name in new_tokens.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS.split()),
        *((name, ctypes.c_int64) for name in STRIDES.split()),
        ("eps", ctypes.c_float),
        ("scale_log2", ctypes.c_float),
        ("window", ctypes.c_int),
    )


class ClusterKernel(NamedTuple):
    """A compiled variant: heads, and blocks of keys that each warp has on their way."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    slots: int

    def constants(self) -> dict[str, int]:
        return dict(zip(("NEW_H", "NEW_G", "NEW_N", "NEW_SLOTS"), self))

    def shared_bytes(self) -> int:
        """Returns the size of the struct Shared in new_tokens.cu, or a little more."""
        group, n = self.num_heads // self.num_kv_heads, self.head_dim
        blocks = 2 * WARPS * self.slots * KEYS * n * 2
        rows = (MOST_HEADS + 2) * n * 2  # queries, the newest key and value
        of_warps, of_programs = WARPS * group * 2 * 4, (group * n + LARGEST_CLUSTER) * 16 + 8
        return blocks + rows + of_warps + of_programs + 64


def kernel_of(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> ClusterKernel:
    """Returns the variant for so few tokens. Its blocks on their way take 128 KB of each SM. For one token of
    large groups of wide heads they take 64, so that the SM has room for the rings of the matmuls before and
    after it, too (hopper_row.py)."""
    beside = num_tokens == 1 and num_heads >= LARGE_GROUP * num_kv_heads and head_dim == 128
    return ClusterKernel(num_heads, num_kv_heads, head_dim, (128 if beside else 256) // head_dim)


def attend_new_tokens(
    qkv_TX: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor | None,
    positions_T: torch.Tensor,
    rows_T: torch.Tensor,
    block_tables_RM: torch.Tensor,
    cache: LayerCache,
    kv_lens_T: torch.Tensor,
    scale: float,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Writes k and v into the cache and returns what attention gives, [T, H * N]; q, k and v are left as they
    are. Padding tokens get zeros. Returns None and does nothing where this kernel is not for such tokens."""
    _, _, num_kv_heads, _, head_dim = cache.blocks.shape
    num_tokens, num_heads = qkv_TX.shape[0], qkv_TX.shape[1] // head_dim - 2 * num_kv_heads
    if not takes(qkv_TX, q_weight, cos_sin, cache, num_heads):
        return None
    found = _function(qkv_TX.device, num_tokens, num_heads, num_kv_heads, head_dim)
    if found is None:
        return None
    cluster, function = found
    assert qkv_TX.is_contiguous() and (q_weight is None) == (k_weight is None)
    assert sinks_H is None or (sinks_H.dtype == torch.float32 and sinks_H.is_contiguous())
    out_TX = empty_matmul_input(qkv_TX, num_tokens, num_heads * head_dim)
    tokens = positions_T, rows_T, kv_lens_T, block_tables_RM
    tensors = qkv_TX, q_weight, k_weight, cos_sin, sinks_H, *tokens, cache.blocks, out_TX
    arguments = arguments_of(tensors, eps, scale, cache.window)
    function.launch((cluster, num_kv_heads, num_tokens), 32 * WARPS, arguments)
    return out_TX


def takes(
    qkv_TX: torch.Tensor,
    q_weight: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    cache: LayerCache,
    num_heads: int,
) -> bool:
    """Says if the kernel is for these tokens, on Hopper and in bf16: a few, with a plain cache, whole blocks
    of KEYS tokens and heads that are rotated as a whole."""
    _, _, num_kv_heads, block_size, head_dim = cache.blocks.shape
    return (
        0 < qkv_TX.shape[0] <= MOST_TOKENS
        and qkv_TX.dtype == cache.blocks.dtype == torch.bfloat16
        and (q_weight is None or q_weight.dtype == torch.bfloat16)
        and (cos_sin is None or cos_sin.shape[1] == head_dim)
        and block_size == KEYS
        and _has_kernel(qkv_TX.device, num_heads, num_kv_heads, head_dim)
    )


def _has_kernel(device: torch.device, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    return is_hopper(device) and head_dim in HEAD_SIZES and num_heads <= MOST_HEADS * num_kv_heads


def arguments_of(
    tensors: tuple[torch.Tensor | None, ...], eps: float, scale: float, window: int | None
) -> Arguments:
    """Returns the kernel's parameter. `tensors`: in the order of POINTERS. `window`: as in LayerCache."""
    tables, cache = tensors[8], tensors[9]
    assert tables is not None and cache is not None and cache.stride()[3:] == (cache.shape[4], 1)
    return Arguments(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(tables.stride(0), *cache.stride()[:3]),
        *(eps, scale * math.log2(math.e), window or 0),
    )


def prepare(device: torch.device, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Begins to compile the kernels that a step may launch, in threads."""
    if _has_kernel(device, num_heads, num_kv_heads, head_dim):
        for num_tokens in range(1, MOST_TOKENS + 1):
            _binary(device, kernel_of(num_tokens, num_heads, num_kv_heads, head_dim))


@functools.cache
def _function(
    device: torch.device, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[int, CudaFunction] | None:
    """The largest clusters that all run at once, and their kernel. None: Triton's kernels do the work, as the
    GPU, or the part of it that this process has (MIG), has too little room, as the heads are too few, or,
    with a warning, as the kernel could not be compiled."""
    kernel = kernel_of(num_tokens, num_heads, num_kv_heads, head_dim)
    try:
        binary = _binary(device, kernel).result()
    except BuildError as error:
        logger.warning("decodes of few rows are slower than they could be: %s", error)
        return None
    function = CudaFunction(binary, "attend_new_tokens", kernel.shared_bytes())
    for cluster in range(LARGEST_CLUSTER, SMALLEST_CLUSTER - 1, -1):
        at_once = function.clusters_at_once((cluster, num_kv_heads, num_tokens), 32 * WARPS)
        if at_once >= num_kv_heads * num_tokens:
            return (cluster, function) if cluster * num_kv_heads * num_tokens >= FEWEST_PROGRAMS else None
    return None


def _binary(device: torch.device, kernel: ClusterKernel) -> Future[bytes]:
    """The machine code, which a thread reads or compiles."""
    source = Path(__file__).with_name("new_tokens.cu")
    return compiling(source, kernel.constants(), torch.cuda.get_device_capability(device))
