"""Attention on the CPU. float32: one call of our C kernel for all sequences of the step, decodes and prefill chunks alike.

Other dtypes, and machines without a compiler: PyTorch, one padded call for all decodes and one call a prefill chunk.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
import torch.nn.functional as F

from shoal.attention.step import StepInput
from shoal.kernels import cpu_build


class AttentionCall(ctypes.Structure):
    """`Attention` of cpu_attention.c."""

    _fields_ = (*((name, c_void_p) for name in ("q", "cache", "out", "tables", "rows", "query_starts", "kv_lens")),
                *((name, c_int64) for name in ("q_stride", "table_stride", "block_stride", "kv_stride", "head_stride")),
                *((name, c_int32) for name in ("block_size", "num_heads", "num_kv_heads", "head_dim", "num_seqs", "max_kv_len", "window")),
                ("scale", c_float))


class CpuBackend:
    """AttentionBackend for the CPU."""

    def __init__(self, head_dim: int) -> None:
        self.scale = head_dim ** -0.5
        self._library = cpu_build.load()
        self._step: StepInput | None = None
        self._call = AttentionCall()

    def begin(self, step: StepInput) -> None:
        """Fills in what all layers of the step share. Holding the step keeps alive what the call points to."""
        tables = step.block_tables_RM
        for tensor in (tables, step.rows_S, step.query_starts_S, step.kv_lens_S):
            assert tensor.dtype == torch.int32 and tensor.stride(-1) == 1
        self._step = step
        self._call = AttentionCall(tables=tables.data_ptr(), rows=step.rows_S.data_ptr(), query_starts=step.query_starts_S.data_ptr(),
                                   kv_lens=step.kv_lens_S.data_ptr(), table_stride=tables.stride(0), num_seqs=step.num_seqs,
                                   max_kv_len=step.max_kv_len, scale=self.scale)

    def attend(self, q_THN: torch.Tensor, k_TGN: torch.Tensor, v_TGN: torch.Tensor, kv_layer: torch.Tensor, step: StepInput,
               window: int | None) -> torch.Tensor:
        if self._library is None or q_THN.dtype != torch.float32 or kv_layer.dtype != torch.float32:
            return attend_torch(q_THN, k_TGN, v_TGN, kv_layer, step, window, self.scale)
        if step is not self._step:
            self.begin(step)
        call, (tokens, heads, head_dim) = self._call, q_THN.shape
        q_strides, strides = q_THN.stride(), kv_layer.stride()
        assert q_strides[1:] == (head_dim, 1) and strides[3:] == (head_dim, 1)
        out_THN = torch.empty((tokens, heads, head_dim), dtype=torch.float32)
        call.q, call.out, call.cache, call.q_stride = q_THN.data_ptr(), out_THN.data_ptr(), kv_layer.data_ptr(), q_strides[0]
        call.block_stride, call.kv_stride, call.head_stride = strides[:3]
        call.block_size, call.num_kv_heads, call.num_heads, call.head_dim = kv_layer.shape[3], kv_layer.shape[2], heads, head_dim
        call.window = window or 0
        if self._library.shoal_attention(ctypes.addressof(call)):
            raise MemoryError(f"no memory for the attention of {tokens} tokens")
        return out_THN


def attend_torch(q_THN: torch.Tensor, k_TGN: torch.Tensor, v_TGN: torch.Tensor, kv_layer: torch.Tensor, step: StepInput, window: int | None,
                 scale: float) -> torch.Tensor:
    """The same in PyTorch, for any dtype."""
    out_THN = torch.empty(q_THN.shape, dtype=q_THN.dtype)
    decodes = step.num_decodes
    if decodes:
        lens_B = step.kv_lens_S[:decodes].clamp(min=1)    # a padded row looks at one key, and is zeroed after
        k_BGLN, v_BGLN = gather(kv_layer, step.block_tables_RM, step.rows_S[:decodes].clamp(min=0), int(lens_B.max()))
        seen_BL = visible(lens_B - 1, k_BGLN.shape[2], window)
        out_BHN = F.scaled_dot_product_attention(q_THN[:decodes].unsqueeze(2), k_BGLN, v_BGLN, seen_BL[:, None, None], scale=scale,
                                                 enable_gqa=True)
        out_THN[:decodes] = out_BHN.squeeze(2).masked_fill_((step.rows_S[:decodes] < 0)[:, None, None], 0)
    for s in range(decodes, step.num_seqs):
        start, end, kv_len = step.host_query_starts[s], step.host_query_starts[s + 1], step.host_kv_lens[s]
        if kv_len == end - start and (window is None or kv_len <= window):
            k_1GLN, v_1GLN, mask = k_TGN[None, start:end].transpose(1, 2), v_TGN[None, start:end].transpose(1, 2), None
        else:
            k_1GLN, v_1GLN = gather(kv_layer, step.block_tables_RM, step.rows_S[s:s + 1], kv_len)
            mask = visible(torch.arange(kv_len - (end - start), kv_len), k_1GLN.shape[2], window)
        out_1HTN = F.scaled_dot_product_attention(q_THN[None, start:end].transpose(1, 2), k_1GLN, v_1GLN, mask, is_causal=mask is None,
                                                  scale=scale, enable_gqa=True)
        out_THN[start:end] = out_1HTN[0].transpose(0, 1)
    return out_THN


def gather(kv_layer: torch.Tensor, block_tables_RM: torch.Tensor, rows_B: torch.Tensor, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, G, L, N] of whole blocks that hold the first max_len positions of each row."""
    num_blocks = -(-max_len // kv_layer.shape[3])
    blocks_BM = block_tables_RM[rows_B.long(), :num_blocks].long().clamp(0, len(kv_layer) - 1)    # past a row's end there may be anything
    kv = kv_layer[blocks_BM].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    return kv[0], kv[1]


def visible(positions_Q: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """bool [Q, L]: the keys that a query at each position sees."""
    keys_L = torch.arange(num_keys)
    seen_QL = keys_L <= positions_Q[:, None]
    return seen_QL if window is None else seen_QL & (keys_L > positions_Q[:, None] - window)
