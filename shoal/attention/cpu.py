"""Attention on the CPU: TorchBackend for any dtype, and CpuBackend for float32, one call of the C kernel per
layer for all sequences of the step, decodes and prefills alike."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from shoal.attention.backend import AttentionShape
from shoal.attention.step_input import StepInput
from shoal.kernels.cpu import build as cpu_build
from shoal.kernels.layer_cache import LayerCache


class TorchBackend:
    """AttentionBackend in PyTorch: one padded call for all decodes, and one call for each prefill."""

    captures_mixed = False
    share_from: int | None = None

    def __init__(self, shape: AttentionShape) -> None:
        self.scale, self.softcap = shape.scale, shape.softcap

    def begin(self, step: StepInput) -> None:
        """There is nothing to plan."""

    def reads_k(self, cache: LayerCache) -> bool:
        return True

    def attend(
        self,
        q_THN: torch.Tensor,
        k_TGN: torch.Tensor | None,
        v_TGN: torch.Tensor | None,
        cache: LayerCache,
        step: StepInput,
        selected: bool = False,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out_THN = torch.empty(q_THN.shape, dtype=q_THN.dtype)
        decodes, window = step.num_decodes, cache.window
        if decodes:
            lens_B, rows_B = step.kv_lens_S[:decodes].clamp(min=1), step.rows_S[:decodes]
            positions_BQ = lens_B[:, None] - step.queries + torch.arange(step.queries)
            keys_BL, k_BGLN, v_BGLN = gather(
                cache, step, rows_B.clamp(min=0), positions_BQ[:, 0].clamp(min=0), lens_B, q_THN.dtype
            )
            is_padding_BQ = (positions_BQ < 0) | (rows_B < 0)[:, None]
            # padding looks at one key, and becomes zero below
            seen_BQL = visible(positions_BQ.clamp(min=0), keys_BL, cache)
            q_BQHN = q_THN[: step.num_decode_tokens].unflatten(0, (decodes, step.queries))
            out_BHQN = self._softmax(q_BQHN.transpose(1, 2), k_BGLN, v_BGLN, seen_BQL[:, None], sinks_H)
            out_BQHN = out_BHQN.transpose(1, 2).masked_fill(is_padding_BQ[:, :, None, None], 0)
            out_THN[: step.num_decode_tokens] = out_BQHN.flatten(0, 1)
        if step.host is None:
            assert decodes == step.num_seqs  # no graph captures a mixed step on a CPU
            return out_THN
        for s in range(decodes, step.num_seqs):
            start, end = step.host.query_starts[s : s + 2]
            kv_len = step.host.kv_lens[s]
            mask = None
            is_fresh = k_TGN is not None and cache.scales_2G is None and kv_len == end - start
            if is_fresh and (window is None or kv_len <= window):
                assert k_TGN is not None and v_TGN is not None
                k_1GLN = k_TGN[None, start:end].transpose(1, 2)
                v_1GLN = v_TGN[None, start:end].transpose(1, 2)
            else:
                positions_1T = torch.arange(kv_len - (end - start), kv_len)[None]
                keys_1L, k_1GLN, v_1GLN = gather(
                    cache,
                    step,
                    step.rows_S[s : s + 1],
                    positions_1T[:, 0],
                    step.kv_lens_S[s : s + 1],
                    q_THN.dtype,
                )
                mask = visible(positions_1T, keys_1L, cache)[0]
            out_1HTN = self._softmax(q_THN[None, start:end].transpose(1, 2), k_1GLN, v_1GLN, mask, sinks_H)
            out_THN[start:end] = out_1HTN[0].transpose(0, 1)
        return out_THN

    def _softmax(
        self,
        q_BHTN: torch.Tensor,
        k_BGLN: torch.Tensor,
        v_BGLN: torch.Tensor,
        mask: torch.Tensor | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Without a mask, query t sees keys 0 to t."""
        if self.softcap is None and sinks_H is None:
            return F.scaled_dot_product_attention(
                q_BHTN, k_BGLN, v_BGLN, mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
            )
        (_, num_heads, num_queries, _), (_, num_kv_heads, num_keys, _) = q_BHTN.shape, k_BGLN.shape
        k_BHLN, v_BHLN = (
            x.float().repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (k_BGLN, v_BGLN)
        )
        scores = q_BHTN.float() @ k_BHLN.transpose(2, 3) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is None:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks_H is not None:
            sinks_BHT1 = sinks_H.float()[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sinks_BHT1), dim=-1)
        return (scores.softmax(dim=-1)[..., :num_keys] @ v_BHLN).to(q_BHTN.dtype)


class CpuBackend(TorchBackend):
    """AttentionBackend by the C kernel, also over a cache of fp8 numbers. It needs cpu_build.load()."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        library = cpu_build.load()
        assert library is not None
        self._library = library
        self._step: StepInput | None = None
        self._sequences = cpu_build.KvSequences()

    def begin(self, step: StepInput) -> None:
        """Fills in the struct that all layers of the step share. The step is held because the struct points
        into its tensors."""
        self._step = step
        self._sequences = cpu_build.describe_sequences(
            step.rows_S, step.query_starts_S, step.kv_lens_S, step.max_kv_len
        )
        self._library.shoal_set_threads(torch.get_num_threads())

    def attend(
        self,
        q_THN: torch.Tensor,
        k_TGN: torch.Tensor | None,
        v_TGN: torch.Tensor | None,
        cache: LayerCache,
        step: StepInput,
        selected: bool = False,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if step is not self._step:
            self.begin(step)
        token_stride, *head_strides = q_THN.stride()
        assert head_strides == [q_THN.shape[2], 1] and q_THN.dtype == torch.float32
        assert sinks_H is None or (sinks_H.dtype == torch.float32 and sinks_H.is_contiguous())
        out_THN = torch.empty(q_THN.shape, dtype=torch.float32)
        described = cpu_build.describe_cache(cache, step.block_tables[cache.table], q_THN.shape[1])
        if self._library.shoal_attention(
            ctypes.addressof(described),
            ctypes.addressof(self._sequences),
            q_THN.data_ptr(),
            token_stride,
            cache.c_window,
            self.scale,
            self.softcap or 0.0,
            None if sinks_H is None else sinks_H.data_ptr(),
            out_THN.data_ptr(),
        ):
            raise MemoryError(f"no memory for the attention of {step.num_tokens} tokens")
        return out_THN


def gather(
    cache: LayerCache,
    step: StepInput,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
    lens_B: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values [B, G, L, N] of whole blocks, and the positions [B, L] of these keys. They hold all
    that the queries of each row see, from the one at positions_B up to the row's last one at lens_B - 1.
    Blocks before a window may belong to other sequences by now, so they are not read."""
    kv_layer, tables_RM = cache.blocks, step.block_tables[cache.table]
    num_blocks, block_size = len(kv_layer), kv_layer.shape[3]
    firsts_B = cache.first_key(positions_B).clamp(min=0) // block_size
    index_BM = firsts_B[:, None] + torch.arange(
        int((lens_B - firsts_B * block_size).max() - 1) // block_size + 1
    )
    # A table may hold anything beyond the sequence's end.
    blocks_BM = tables_RM[rows_B.long()[:, None], index_BM.clamp(max=tables_RM.shape[1] - 1).long()]
    blocks_BM = blocks_BM.long().clamp(0, num_blocks - 1)
    if cache.scales_2G is None:
        kv = kv_layer[blocks_BM]
    else:
        fp8 = kv_layer.view(torch.uint8)[blocks_BM].view(kv_layer.dtype)
        kv = fp8.float() * cache.scales_2G[:, :, None, None]
    kv = kv.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).to(dtype)
    keys_BL = (firsts_B * block_size)[:, None] + torch.arange(kv.shape[3])
    return keys_BL, kv[0], kv[1]


def visible(positions_BT: torch.Tensor, keys_BL: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """bool [B, T, L]: the keys that a query at each position sees."""
    keys, positions = keys_BL[:, None], positions_BT[:, :, None]
    seen = keys <= positions
    return seen if cache.window is None else seen & (keys >= cache.first_key(positions))
