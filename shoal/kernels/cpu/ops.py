"""The ops of kernels/ops.py for the CPU. The C kernels compute float32. Other dtypes, and everything on a
machine without a compiler, are computed by the reference.py of each room."""

from __future__ import annotations

import ctypes

import torch

from shoal.kernels import reference
from shoal.kernels.cpu import build as cpu_build
from shoal.kernels.cpu.recurrent import causal_conv, delta_mixer, gated_delta, gated_norm, mamba2, mamba_mixer
from shoal.kernels.latent.reference import norm_rope_store as latent_norm_rope_store
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.matmul.reference import float_linear, linear, linear_add, linear_gated
from shoal.kernels.moe.reference import moe
from shoal.kernels.reference import apply_updates, copy_ints, copy_rows, embed, fork_norms, join_norms
from shoal.kernels.sampling import reference as sampling_reference
from shoal.kernels.sampling.allowed_tokens import keep_allowed
from shoal.kernels.sampling.bad_words import ban_words
from shoal.kernels.sampling.logit_bias import add_bias
from shoal.kernels.sampling.min_tokens import ban_stops
from shoal.kernels.sampling.penalties import penalize
from shoal.kernels.sampling.split_sample import join_parts, sample_parts
from shoal.kernels.sampling.token_history import locate_rows, put_samples, store_tokens, take_rows
from shoal.kinds.attention import QueryScaling

LIBRARY = cpu_build.load()


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    if LIBRARY is None or x_TD.dtype != torch.float32:
        return reference.rms_norm(x_TD, weight_D, eps)
    assert x_TD.is_contiguous() and weight_D.dtype == torch.float32
    out_TD = torch.empty_like(x_TD)
    size = x_TD.shape[-1]
    LIBRARY.shoal_rms_norm(
        None, x_TD.data_ptr(), weight_D.data_ptr(), eps, x_TD.numel() // size, size, out_TD.data_ptr()
    )
    return out_TD


def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    if LIBRARY is None or x_TD.dtype != torch.float32:
        return reference.add_rms_norm(x_TD, residual_TD, weight_D, eps)
    assert (
        x_TD.is_contiguous()
        and residual_TD.is_contiguous()
        and residual_TD.dtype == weight_D.dtype == torch.float32
    )
    out_TD = torch.empty_like(x_TD)
    rows, size = x_TD.shape
    LIBRARY.shoal_rms_norm(
        x_TD.data_ptr(), residual_TD.data_ptr(), weight_D.data_ptr(), eps, rows, size, out_TD.data_ptr()
    )
    return out_TD


def norm_linear(
    x_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed_TD = rms_norm(x_TD, norm_weight_D, eps)
    return normed_TD, linear(normed_TD, weight, bias)


def norm_float_linear(
    x_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed_TD = rms_norm(x_TD, norm_weight_D, eps)
    return normed_TD, float_linear(normed_TD, weight, bias)


def add_norm_linear(
    x_TD: torch.Tensor | None,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed_TD = (
        rms_norm(residual_TD, norm_weight_D, eps)
        if x_TD is None
        else add_rms_norm(x_TD, residual_TD, norm_weight_D, eps)
    )
    if activation is None:
        return linear(normed_TD, weight, bias), residual_TD
    return linear_gated(normed_TD, weight, bias, activation), residual_TD


def add_normed(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    residual_TD: torch.Tensor,
    next_weight_D: torch.Tensor | None = None,
    next_eps: float = 0.0,
) -> torch.Tensor | None:
    if LIBRARY is None or x_TD.dtype != torch.float32:
        return reference.add_normed(x_TD, weight_D, eps, residual_TD, next_weight_D, next_eps)
    assert x_TD.is_contiguous() and residual_TD.is_contiguous()
    assert residual_TD.dtype == weight_D.dtype == torch.float32
    out_TD = None if next_weight_D is None else torch.empty_like(x_TD)
    rows, size = x_TD.shape
    LIBRARY.shoal_add_normed(
        x_TD.data_ptr(),
        weight_D.data_ptr(),
        eps,
        residual_TD.data_ptr(),
        None if next_weight_D is None else next_weight_D.data_ptr(),
        next_eps,
        rows,
        size,
        None if out_TD is None else out_TD.data_ptr(),
    )
    return out_TD


def gate_mul(gate_up_T2F: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    if LIBRARY is None or gate_up_T2F.dtype != torch.float32:
        return reference.gate_mul(gate_up_T2F, activation)
    assert gate_up_T2F.is_contiguous()
    rows, width = gate_up_T2F.shape
    out_TF = torch.empty((rows, width // 2), dtype=torch.float32)
    LIBRARY.shoal_gate_mul(
        gate_up_T2F.data_ptr(), rows, width // 2, cpu_build.ACTIVATIONS[activation], out_TF.data_ptr()
    )
    return out_TF


def soft_cap(logits_SV: torch.Tensor, cap: float) -> None:
    if LIBRARY is None or logits_SV.dtype != torch.float32 or not logits_SV.is_contiguous():
        reference.soft_cap(logits_SV, cap)
        return
    rows, size = logits_SV.shape
    LIBRARY.shoal_soft_cap(logits_SV.data_ptr(), rows, size, cap)


def attend_new_tokens(*inputs: object) -> None:
    """Returns None: on a CPU one call would save no launch."""


def qk_norm_rope_store(
    qkv_TX: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor | None,
    positions_T: torch.Tensor,
    rows_T: torch.Tensor,
    block_tables_RM: torch.Tensor,
    cache: LayerCache,
    keep_k: bool = True,
    *,
    stores: bool = True,
    v_norm: bool = False,
    query_scaling: QueryScaling | None = None,
) -> None:
    if LIBRARY is None or qkv_TX.dtype != torch.float32:
        reference.qk_norm_rope_store(
            qkv_TX,
            q_weight,
            k_weight,
            eps,
            cos_sin,
            positions_T,
            rows_T,
            block_tables_RM,
            cache,
            keep_k,
            stores=stores,
            v_norm=v_norm,
            query_scaling=query_scaling,
        )
        return
    rotary_dim = 0
    if cos_sin is not None:
        assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
        rotary_dim = cos_sin.shape[1]
    num_kv_heads, _, head_dim = cache.blocks.shape[2:]
    assert qkv_TX.is_contiguous() and positions_T.is_contiguous() and rows_T.is_contiguous()
    assert positions_T.dtype == rows_T.dtype == torch.int32 and rotary_dim <= head_dim
    num_heads = qkv_TX.shape[1] // head_dim - (2 * num_kv_heads if stores else 0)
    described = cpu_build.describe_cache(cache, block_tables_RM, num_heads)
    rope = cpu_build.describe_rope(rotary_dim, query_scaling, v_norm, not stores)
    LIBRARY.shoal_qk_norm_rope_store(
        ctypes.addressof(described),
        qkv_TX.data_ptr(),
        qkv_TX.shape[0],
        positions_T.data_ptr(),
        rows_T.data_ptr(),
        None if cos_sin is None else cos_sin.data_ptr(),
        None if q_weight is None else q_weight.data_ptr(),
        None if k_weight is None else k_weight.data_ptr(),
        eps,
        ctypes.addressof(rope),
    )


def gate_output(out_TX: torch.Tensor, gate_TY: torch.Tensor, activation: str) -> torch.Tensor:
    if LIBRARY is None or out_TX.dtype != torch.float32:
        return reference.gate_output(out_TX, gate_TY, activation)
    assert out_TX.is_contiguous() and gate_TY.is_contiguous() and gate_TY.dtype == torch.float32
    (rows, width), gates = out_TX.shape, gate_TY.shape[1]
    assert width % gates == 0 and activation in ("sigmoid", "softplus")
    gated_TX = torch.empty_like(out_TX)
    LIBRARY.shoal_gate_output(
        out_TX.data_ptr(),
        gate_TY.data_ptr(),
        rows,
        width,
        gates,
        activation == "sigmoid",
        gated_TX.data_ptr(),
    )
    return gated_TX


def begin_decode(
    rows_B: torch.Tensor,
    table: torch.Tensor,
    tokens_B: torch.Tensor,
    positions_B: torch.Tensor,
    kv_lens_B: torch.Tensor,
) -> None:
    if LIBRARY is None:
        reference.begin_decode(rows_B, table, tokens_B, positions_B, kv_lens_B)
        return
    _check_ints(rows_B, tokens_B, positions_B, kv_lens_B, table)
    LIBRARY.shoal_begin_decode(
        rows_B.data_ptr(),
        rows_B.shape[0],
        table.data_ptr(),
        table.stride(0),
        tokens_B.data_ptr(),
        positions_B.data_ptr(),
        kv_lens_B.data_ptr(),
    )


def keep_bits(logits_SV: torch.Tensor, rows_G: torch.Tensor, masks_GW: torch.Tensor) -> None:
    if LIBRARY is None or logits_SV.dtype != torch.float32:
        sampling_reference.keep_bits(logits_SV, rows_G, masks_GW)
        return
    vocab_size, words = logits_SV.shape[1], masks_GW.shape[1]
    assert rows_G.dtype == torch.int64 and rows_G.is_contiguous() and logits_SV.stride(1) == 1
    assert len(masks_GW) == len(rows_G) and 32 * words >= vocab_size
    _check_ints(masks_GW)
    LIBRARY.shoal_keep_bits(
        logits_SV.data_ptr(),
        logits_SV.stride(0),
        vocab_size,
        rows_G.data_ptr(),
        len(rows_G),
        masks_GW.data_ptr(),
        masks_GW.stride(0),
    )


def sample(
    logits_BV: torch.Tensor,
    rows_S: torch.Tensor,
    positions_S: torch.Tensor,
    table: torch.Tensor,
    out_tokens_S: torch.Tensor,
) -> None:
    if LIBRARY is None:
        sampling_reference.sample(logits_BV, rows_S, positions_S, table, out_tokens_S)
        return
    logits = (
        logits_BV
        if logits_BV.dtype == torch.float32 and logits_BV.stride(1) == 1
        else logits_BV.float().contiguous()
    )
    _check_ints(rows_S, positions_S, out_tokens_S, table)
    count, vocab_size = rows_S.shape[0], logits.shape[1]
    if LIBRARY.shoal_sample(
        logits.data_ptr(),
        logits.stride(0),
        vocab_size,
        rows_S.data_ptr(),
        positions_S.data_ptr(),
        count,
        table.data_ptr(),
        table.stride(0),
        out_tokens_S.data_ptr(),
    ):
        raise MemoryError(f"no memory to sample {count} tokens")


def _check_ints(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32 and tensor.stride(-1) == 1
