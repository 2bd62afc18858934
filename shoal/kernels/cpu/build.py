"""The C library of the CPU's kernels (cpu_*.c): how it is built and loaded, and its structs.

It is compiled for this very processor on first use, which takes a few seconds. A prebuilt library would have
to choose among instruction sets at run time. Without a compiler `load` warns and returns None, and its
callers take their PyTorch paths.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from ctypes import c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from shoal.kernels import c_library
from shoal.kernels.layer_cache import LayerCache
from shoal.kinds.attention import QueryScaling

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = tuple(
    f"{name}.c"
    for name in ("linear", "fp8", "ops", "attention", "layers", "sample", "recurrent", "drafting", "threads")
)
HEADERS = ("cpu.h",)
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-pthread", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math")
NATIVE = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}  # the enum of cpu.h
SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "shoal_packed_bytes": (c_int64, (c_int, c_int, c_int)),
    "shoal_pack": (None, (c_void_p, c_void_p, c_int64, c_int, c_int, c_int)),
    "shoal_linear": (c_int, (c_void_p, c_void_p, c_int, c_void_p, c_void_p)),
    "shoal_fp8_linear": (None, (c_void_p, c_void_p, c_int, c_int, c_int, c_void_p, c_int, c_void_p)),
    "shoal_embed": (None, (c_void_p, c_void_p, c_int, c_void_p)),
    "shoal_rms_norm": (None, (c_void_p, c_void_p, c_void_p, c_float, c_int, c_int, c_void_p)),
    "shoal_add_normed": (
        None,
        (c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_float, c_int, c_int, c_void_p),
    ),
    "shoal_gate_mul": (None, (c_void_p, c_int, c_int, c_int, c_void_p)),
    "shoal_soft_cap": (None, (c_void_p, c_int, c_int, c_float)),
    "shoal_qk_norm_rope_store": (
        None,
        (c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_void_p),
    ),
    "shoal_gate_output": (None, (c_void_p, c_void_p, c_int, c_int, c_int, c_int, c_void_p)),
    "shoal_attention": (
        c_int,
        (c_void_p, c_void_p, c_void_p, c_int64, c_int, c_float, c_float, c_void_p, c_void_p),
    ),
    "shoal_sample": (
        c_int,
        (c_void_p, c_int64, c_int, c_void_p, c_void_p, c_int, c_void_p, c_int64, c_void_p),
    ),
    "shoal_keep_bits": (None, (c_void_p, c_int64, c_int, c_void_p, c_int, c_void_p, c_int64)),
    "shoal_begin_decode": (None, (c_void_p, c_int, c_void_p, c_int64, c_void_p, c_void_p, c_void_p)),
    "shoal_gated_delta": (None, (c_void_p, c_void_p)),
    "shoal_mamba2": (None, (c_void_p, c_void_p)),
    "shoal_causal_conv": (
        None,
        (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int, c_int, c_int, c_void_p),
    ),
    "shoal_gated_norm": (
        None,
        (
            *(c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int, c_float),
            *(c_int, c_int, c_int, c_int, c_int, c_void_p),
        ),
    ),
    "shoal_begin_verification": (None, (c_void_p, c_void_p, c_int, c_int, *(c_void_p,) * 8)),
    "shoal_accept": (None, (*(c_void_p,) * 7, c_int, c_int, c_int, c_void_p, c_int64)),
    "shoal_look_up": (None, (c_void_p, c_void_p, c_int, c_int, c_int, c_int, c_void_p, c_int64)),
    "shoal_look_up_suffix": (
        c_int,
        (c_void_p, c_void_p, c_int, c_int, c_int, c_double, c_double, c_void_p, c_int64),
    ),
    "shoal_set_threads": (None, (c_int,)),
    "shoal_layers": (c_int, (c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
}


def _fields(kinds: dict[type, str]) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for kind, names in kinds.items() for name in names.split())


class Packed(ctypes.Structure):
    """The struct of this name in cpu.h, as are the next three."""

    _fields_ = _fields({c_void_p: "data", c_int32: "outs cols bits"})


class Cache(ctypes.Structure):
    _fields_ = _fields(
        {
            c_void_p: "data scales tables",
            c_int64: "table_stride block_stride kv_stride head_stride",
            c_int32: "block_size num_heads num_kv_heads head_dim",
        }
    )


class KvSequences(ctypes.Structure):
    _fields_ = _fields({c_void_p: "rows query_starts kv_lens", c_int32: "num_seqs max_kv_len"})


class Rope(ctypes.Structure):
    _fields_ = _fields({c_float: "beta", c_int32: "rotary length offset v_norm q_alone"})


class DraftRowsStruct(ctypes.Structure):
    """The struct DraftRows in drafting.c."""

    _fields_ = _fields(
        {c_void_p: "table drafts history earlier", c_int64: "table_stride", c_int32: "num_drafts length"}
    )


class Layer(ctypes.Structure):
    """The struct of this name in layers.c, as is the next one."""

    _fields_ = _fields(
        {
            c_void_p: (
                "qkv o gate_up down qkv_bias o_bias gate_up_bias down_bias input_norm mlp_norm q_norm "
                "k_norm after_attention after_mlp cos_sin cache scales tables"
            ),
            c_int64: "window",
        }
    )


class Tokens(ctypes.Structure):
    _fields_ = _fields({c_void_p: "positions rows", c_int32: "tokens activation", c_float: "eps scale"})


class States(ctypes.Structure):
    """The struct of this name in recurrent.c, as is the next one."""

    _fields_ = _fields(
        {
            c_void_p: "rows starts positions draft_starts verified pending states kept",
            c_int64: "row_stride kept_stride",
            c_int32: "num_seqs spare_row is_bf16 num_drafting slots kept_size",
        }
    )


class Heads(ctypes.Structure):
    _fields_ = _fields(
        {
            c_void_p: "q k v a b a_log dt_bias d out",
            c_int64: "q_stride k_stride v_stride a_stride b_stride",
            c_int32: "keys heads key_dim value_dim gates",
            c_float: "least_dt most_dt",
        }
    )


@functools.lru_cache(maxsize=4096)
def cache_struct(
    data: int,
    scales: int | None,
    strides: tuple[int, ...],
    block_size: int,
    tables: int,
    table_stride: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> Cache:
    """Makes the struct. It is cached because filling it costs as much as a call does, and a layer has the
    same struct in every step."""
    return Cache(
        data, scales, tables, table_stride, *strides[:3], block_size, num_heads, num_kv_heads, head_dim
    )


@functools.cache
def describe_rope(
    rotary_dim: int, query_scaling: QueryScaling | None = None, v_norm: bool = False, q_alone: bool = False
) -> Rope:
    """Makes the struct. It is cached for the same reason."""
    scaling = QueryScaling(0.0, 1) if query_scaling is None else query_scaling
    return Rope(scaling.beta, rotary_dim, scaling.length, scaling.offset, v_norm, q_alone)


def describe_cache(cache: LayerCache, block_tables_RM: torch.Tensor, num_heads: int) -> Cache:
    """Makes the struct that describes a layer's cache and its block tables."""
    blocks, scales_2G = cache.blocks, cache.scales_2G
    strides, (_, _, num_kv_heads, block_size, head_dim) = blocks.stride(), blocks.shape
    assert strides[3:] == (head_dim, 1)
    if scales_2G is None:
        assert blocks.dtype == torch.float32
    else:
        assert blocks.dtype == torch.float8_e4m3fn and scales_2G.dtype == torch.float32
        assert scales_2G.shape == (2, num_kv_heads) and scales_2G.is_contiguous()
    assert block_tables_RM.dtype == torch.int32 and block_tables_RM.stride(1) == 1
    return cache_struct(
        blocks.data_ptr(),
        None if scales_2G is None else scales_2G.data_ptr(),
        strides,
        block_size,
        block_tables_RM.data_ptr(),
        block_tables_RM.stride(0),
        num_heads,
        num_kv_heads,
        head_dim,
    )


def describe_sequences(
    rows_S: torch.Tensor, query_starts_S: torch.Tensor, kv_lens_S: torch.Tensor, max_kv_len: int
) -> KvSequences:
    """Makes the struct that describes a step's sequences. It holds addresses only, so the tensors must
    outlive it."""
    for tensor in (rows_S, query_starts_S, kv_lens_S):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    return KvSequences(
        rows_S.data_ptr(), query_starts_S.data_ptr(), kv_lens_S.data_ptr(), rows_S.shape[0], max_kv_len
    )


@functools.cache
def load() -> ctypes.CDLL | None:
    """Returns the library for this processor, and builds it if need be. Where that fails it returns None,
    after one warning that says what mends that."""
    try:
        return open_library(build((*FLAGS, NATIVE)))
    except (c_library.BuildError, OSError) as error:
        logger.warning("no C kernels for the CPU, so slower PyTorch paths are used: %s", error)
        return None


def open_library(path: Path) -> ctypes.CDLL:
    """Loads the library, and gives it as many threads as PyTorch has."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.shoal_set_threads(torch.get_num_threads())
    return library


def build(flags: tuple[str, ...]) -> Path:
    """Compiles the library, if need be, and returns its path. Raises c_library.BuildError."""
    return c_library.build(FOLDER, SOURCES, HEADERS, flags, ("-lm",))
