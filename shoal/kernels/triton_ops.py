"""The ops on a GPU: see ops.py for the list, reference.py for what each means."""

from shoal.kernels.activation import embed, silu_mul
from shoal.kernels.batch import apply_updates, begin_decode, copy_ints
from shoal.kernels.matmul.linear import add_norm_linear, linear, linear_add, linear_silu_mul
from shoal.kernels.moe.moe import moe
from shoal.kernels.norm import add_rms_norm, rms_norm
from shoal.kernels.reference import keep_bits
from shoal.kernels.rope import qk_norm_rope_store
from shoal.kernels.sampling.sample import sample
from shoal.kernels.sampling.split_sample_triton import join_parts, sample_parts

__all__ = [
    "add_norm_linear",
    "add_rms_norm",
    "apply_updates",
    "begin_decode",
    "copy_ints",
    "embed",
    "join_parts",
    "keep_bits",
    "linear",
    "linear_add",
    "linear_silu_mul",
    "moe",
    "qk_norm_rope_store",
    "rms_norm",
    "sample",
    "sample_parts",
    "silu_mul",
]
