"""Paged causal attention in plain PyTorch, which kernels/attention/paged_attention.py must equal.

It computes one sequence at a time, in fp32 whatever the dtype. Shapes: T tokens, S sequences, R state rows, M
blocks of a sequence, H query heads, G kv heads, N head size.
"""

from __future__ import annotations

import torch


def gather_kv(kv_layer: torch.Tensor, block_table_M: torch.Tensor, kv_len: int) -> torch.Tensor:
    """Returns the first `kv_len` keys and values of one sequence, [2, G, kv_len, N]. `kv_layer` is [blocks,
    2, G, block_size, N]."""
    block_size = kv_layer.shape[3]
    num_blocks = -(-kv_len // block_size)
    blocks = kv_layer[block_table_M[:num_blocks].long()]
    return blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :kv_len]


def paged_attention(
    q_THN: torch.Tensor,
    kv_layer: torch.Tensor,
    query_starts_S: torch.Tensor,
    kv_lens_S: torch.Tensor,
    rows_S: torch.Tensor,
    block_tables_RM: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    in_chunks: bool = False,
) -> torch.Tensor:
    """Returns [T, H, N]. A sequence's queries are the last of its kv_len positions. A sequence with row -1 or
    kv_len 0 is padding, as is a query before position 0, and their results are zeros. With a window, the
    blocks before the first query's window are not read. `in_chunks`: windows begin at multiples of their
    size."""
    out_THN = torch.zeros_like(q_THN, memory_format=torch.contiguous_format)
    group = q_THN.shape[1] // kv_layer.shape[2]
    starts = query_starts_S.tolist()
    for s, (row, kv_len) in enumerate(zip(rows_S.tolist(), kv_lens_S.tolist())):
        first, last = starts[s], starts[s + 1]
        if row < 0 or kv_len == 0 or first == last:
            continue
        query_pos = torch.arange(kv_len - (last - first), kv_len, device=q_THN.device)[:, None]
        firsts = query_pos * 0
        if window is not None:
            firsts = query_pos // window * window if in_chunks else query_pos - window + 1
        before = max(int(firsts[0]), 0)
        before -= before % kv_layer.shape[3]
        table_M = block_tables_RM[row, before // kv_layer.shape[3] :]
        k_HKN, v_HKN = gather_kv(kv_layer, table_M, kv_len - before).float().repeat_interleave(group, dim=1)
        key_pos = torch.arange(before, kv_len, device=q_THN.device)[None, :]
        visible = (key_pos <= query_pos) & (key_pos >= firsts)
        scores = q_THN[first:last].float().transpose(0, 1) @ k_HKN.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks_H is not None:
            sinks_HT1 = sinks_H.float()[:, None, None].expand(-1, last - first, 1)
            scores = torch.cat((scores, sinks_HT1), dim=-1)
        weights = scores.softmax(dim=-1)[..., : kv_len - before]
        weights = weights.masked_fill(~visible.any(dim=-1, keepdim=True), 0)
        out_THN[first:last] = (weights @ v_HKN).transpose(0, 1).to(q_THN.dtype)
    return out_THN
