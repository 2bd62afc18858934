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
        self.scale = shape.scale

    def begin(self, step: StepInput) -> None:
        """There is nothing to plan."""

    def reads_k(self, cache: LayerCache) -> bool:
        return True

    def attend(
        self,
        q_THN: torch.Tensor,
        k_TGN: torch.Tensor,
        v_TGN: torch.Tensor,
        cache: LayerCache,
        step: StepInput,
        selected: bool = False,
    ) -> torch.Tensor:
        out_THN = torch.empty(q_THN.shape, dtype=q_THN.dtype)
        decodes, window = step.num_decodes, cache.window
        if decodes:
            lens_B, rows_B = step.kv_lens_S[:decodes].clamp(min=1), step.rows_S[:decodes]
            k_BGLN, v_BGLN = gather(cache, step, rows_B.clamp(min=0), int(lens_B.max()), q_THN.dtype)
            positions_BQ = lens_B[:, None] - step.queries + torch.arange(step.queries)
            is_padding_BQ = (positions_BQ < 0) | (rows_B < 0)[:, None]
            # padding looks at one key, and becomes zero below
            seen_BQL = visible(positions_BQ.clamp(min=0), k_BGLN.shape[2], window)
            q_BQHN = q_THN[: step.num_decode_tokens].unflatten(0, (decodes, step.queries))
            out_BHQN = self._softmax(q_BQHN.transpose(1, 2), k_BGLN, v_BGLN, seen_BQL[:, None])
            out_BQHN = out_BHQN.transpose(1, 2).masked_fill(is_padding_BQ[:, :, None, None], 0)
            out_THN[: step.num_decode_tokens] = out_BQHN.flatten(0, 1)
        if step.host is None:
            assert decodes == step.num_seqs  # no graph captures a mixed step on a CPU
            return out_THN
        for s in range(decodes, step.num_seqs):
            start, end = step.host.query_starts[s : s + 2]
            kv_len = step.host.kv_lens[s]
            mask = None
            is_fresh = cache.scales_2G is None and kv_len == end - start
            if is_fresh and (window is None or kv_len <= window):
                k_1GLN = k_TGN[None, start:end].transpose(1, 2)
                v_1GLN = v_TGN[None, start:end].transpose(1, 2)
            else:
                k_1GLN, v_1GLN = gather(cache, step, step.rows_S[s : s + 1], kv_len, q_THN.dtype)
                mask = visible(torch.arange(kv_len - (end - start), kv_len), k_1GLN.shape[2], window)
            out_1HTN = self._softmax(q_THN[None, start:end].transpose(1, 2), k_1GLN, v_1GLN, mask)
            out_THN[start:end] = out_1HTN[0].transpose(0, 1)
        return out_THN

    def _softmax(
        self, q_BHTN: torch.Tensor, k_BGLN: torch.Tensor, v_BGLN: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q_BHTN, k_BGLN, v_BGLN, mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )


class CpuBackend(TorchBackend):
    """AttentionBackend by the C kernel, also over a cache of fp8 numbers. It needs cpu_build.load()."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        library = cpu_build.load()
        assert library is not None
        self._library = library
        self._step: StepInput | None = None
        self._sequences = cpu_build.Sequences()

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
        k_TGN: torch.Tensor,
        v_TGN: torch.Tensor,
        cache: LayerCache,
        step: StepInput,
        selected: bool = False,
    ) -> torch.Tensor:
        if step is not self._step:
            self.begin(step)
        token_stride, *head_strides = q_THN.stride()
        assert head_strides == [q_THN.shape[2], 1] and q_THN.dtype == torch.float32
        out_THN = torch.empty(q_THN.shape, dtype=torch.float32)
        described = cpu_build.describe_cache(cache, step.block_tables[cache.table], q_THN.shape[1])
        if self._library.shoal_attention(
            ctypes.addressof(described),
            ctypes.addressof(self._sequences),
            q_THN.data_ptr(),
            token_stride,
            cache.window or 0,
            self.scale,
            out_THN.data_ptr(),
        ):
            raise MemoryError(f"no memory for the attention of {step.num_tokens} tokens")
        return out_THN


def gather(
    cache: LayerCache, step: StepInput, rows_B: torch.Tensor, max_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, G, L, N] of whole blocks that hold the first max_len positions of each row."""
    kv_layer, tables_RM = cache.blocks, step.block_tables[cache.table]
    num_blocks = -(-max_len // kv_layer.shape[3])
    # A table may hold anything beyond the sequence's end.
    blocks_BM = tables_RM[rows_B.long(), :num_blocks].long().clamp(0, len(kv_layer) - 1)
    if cache.scales_2G is None:
        kv = kv_layer[blocks_BM]
    else:
        fp8 = kv_layer.view(torch.uint8)[blocks_BM].view(kv_layer.dtype)
        kv = fp8.float() * cache.scales_2G[:, :, None, None]
    kv = kv.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).to(dtype)
    return kv[0], kv[1]


def visible(positions: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """bool [..., L]: the keys that a query at each position sees."""
    keys_L, positions = torch.arange(num_keys), positions.unsqueeze(-1)
    seen = keys_L <= positions
    return seen if window is None else seen & (keys_L > positions - window)
