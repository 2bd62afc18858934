"""Attention on the CPU.

In float32, one call of the C kernel answers all sequences of the step, decodes and prefills alike, also over
a cache of fp8 numbers. Other dtypes, and machines without a compiler, get PyTorch: one padded call for all
decodes, and one call for each prefill.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from shoal.attention.step_input import StepInput
from shoal.kernels.cpu import build as cpu_build


class CpuBackend:
    """AttentionBackend for the CPU."""

    captures_mixed = False
    share_from: int | None = None

    def __init__(self, head_dim: int, scale: float | None = None) -> None:
        """`scale`: what q k^T is multiplied by; None: 1 / sqrt(head_dim)."""
        self.scale = head_dim**-0.5 if scale is None else scale
        self._library = cpu_build.load()
        self._step: StepInput | None = None
        self._sequences = cpu_build.Sequences()

    def begin(self, step: StepInput) -> None:
        """Fills in the struct that all layers of the step share. The step is held because the struct points
        into its tensors."""
        self._step = step
        self._sequences = cpu_build.describe_sequences(
            step.rows_S, step.query_starts_S, step.kv_lens_S, step.max_kv_len
        )
        if self._library is not None:
            self._library.shoal_set_threads(torch.get_num_threads())

    def reads_k(self, window: int | None) -> bool:
        return True

    def attend(
        self,
        q_THN: torch.Tensor,
        k_TGN: torch.Tensor,
        v_TGN: torch.Tensor,
        kv_layer: torch.Tensor,
        step: StepInput,
        window: int | None,
        selected: bool = False,
        scales_2G: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._library is None or q_THN.dtype != torch.float32:
            return attend_torch(q_THN, k_TGN, v_TGN, kv_layer, step, window, self.scale, scales_2G)
        if step is not self._step:
            self.begin(step)
        token_stride, *head_strides = q_THN.stride()
        assert head_strides == [q_THN.shape[2], 1]
        out_THN = torch.empty(q_THN.shape, dtype=torch.float32)
        cache = cpu_build.describe_cache(kv_layer, step.block_tables_RM, q_THN.shape[1], scales_2G)
        if self._library.shoal_attention(
            ctypes.addressof(cache),
            ctypes.addressof(self._sequences),
            q_THN.data_ptr(),
            token_stride,
            window or 0,
            self.scale,
            out_THN.data_ptr(),
        ):
            raise MemoryError(f"no memory for the attention of {step.num_tokens} tokens")
        return out_THN


def attend_torch(
    q_THN: torch.Tensor,
    k_TGN: torch.Tensor,
    v_TGN: torch.Tensor,
    kv_layer: torch.Tensor,
    step: StepInput,
    window: int | None,
    scale: float,
    scales_2G: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, H, N]: as CpuBackend.attend, in PyTorch, for any dtype."""
    out_THN = torch.empty(q_THN.shape, dtype=q_THN.dtype)
    decodes = step.num_decodes
    if decodes:
        # a padded row looks at one key, and becomes zero below
        lens_B = step.kv_lens_S[:decodes].clamp(min=1)
        k_BGLN, v_BGLN = gather(
            kv_layer, step.block_tables_RM, step.rows_S[:decodes].clamp(min=0), int(lens_B.max()), scales_2G
        )
        k_BGLN, v_BGLN = k_BGLN.to(q_THN.dtype), v_BGLN.to(q_THN.dtype)
        seen_BL = visible(lens_B - 1, k_BGLN.shape[2], window)
        out_BHN = F.scaled_dot_product_attention(
            q_THN[:decodes].unsqueeze(2), k_BGLN, v_BGLN, seen_BL[:, None, None], scale=scale, enable_gqa=True
        )
        out_THN[:decodes] = out_BHN.squeeze(2).masked_fill_((step.rows_S[:decodes] < 0)[:, None, None], 0)
    if step.host is None:
        assert decodes == step.num_seqs  # no graph captures a mixed step on a CPU
        return out_THN
    for s in range(decodes, step.num_seqs):
        start, end = step.host.query_starts[s : s + 2]
        kv_len = step.host.kv_lens[s]
        mask = None
        is_fresh = scales_2G is None and kv_len == end - start
        if is_fresh and (window is None or kv_len <= window):
            k_1GLN = k_TGN[None, start:end].transpose(1, 2)
            v_1GLN = v_TGN[None, start:end].transpose(1, 2)
        else:
            k_1GLN, v_1GLN = gather(kv_layer, step.block_tables_RM, step.rows_S[s : s + 1], kv_len, scales_2G)
            k_1GLN, v_1GLN = k_1GLN.to(q_THN.dtype), v_1GLN.to(q_THN.dtype)
            mask = visible(torch.arange(kv_len - (end - start), kv_len), k_1GLN.shape[2], window)
        out_1HTN = F.scaled_dot_product_attention(
            q_THN[None, start:end].transpose(1, 2),
            k_1GLN,
            v_1GLN,
            mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
        out_THN[start:end] = out_1HTN[0].transpose(0, 1)
    return out_THN


def gather(
    kv_layer: torch.Tensor,
    block_tables_RM: torch.Tensor,
    rows_B: torch.Tensor,
    max_len: int,
    scales_2G: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, G, L, N] of whole blocks that hold the first max_len positions of each row. Those
    of an fp8 cache come as float32."""
    num_blocks = -(-max_len // kv_layer.shape[3])
    # A table may hold anything beyond the sequence's end.
    blocks_BM = block_tables_RM[rows_B.long(), :num_blocks].long().clamp(0, len(kv_layer) - 1)
    if scales_2G is None:
        kv = kv_layer[blocks_BM]
    else:
        fp8 = kv_layer.view(torch.uint8)[blocks_BM].view(kv_layer.dtype)
        kv = fp8.float() * scales_2G[:, :, None, None]
    kv = kv.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    return kv[0], kv[1]


def visible(positions_Q: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """bool [Q, L]: the keys that a query at each position sees."""
    keys_L = torch.arange(num_keys)
    seen_QL = keys_L <= positions_Q[:, None]
    return seen_QL if window is None else seen_QL & (keys_L > positions_Q[:, None] - window)
