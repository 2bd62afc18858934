"""Latent attention on the CPU, in PyTorch."""

from __future__ import annotations

import torch

from shoal.attention.latent import is_expanded_cheaper
from shoal.attention.step_input import StepInput
from shoal.kernels.latent import reference
from shoal.kernels.layer_cache import LayerCache
from shoal.kinds.latent import LatentKind


class TorchLatentBackend:
    """LatentBackend in PyTorch, one sequence after the other."""

    captures_mixed = False
    share_from: int | None = None

    def __init__(self, kind: LatentKind) -> None:
        self.kind = kind

    def begin(self, step: StepInput) -> None:
        """There is nothing to plan."""

    def attend(
        self,
        q_THX: torch.Tensor,
        latent_TN: torch.Tensor,
        kv_b_HWC: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: LayerCache,
        step: StepInput,
    ) -> torch.Tensor:
        kind, tables_RM = self.kind, step.block_tables[cache.table]
        out_THV = q_THX.new_zeros((*q_THX.shape[:2], kind.v_head_dim))
        starts, kv_lens, rows = step.query_starts_S.tolist(), step.kv_lens_S.tolist(), step.rows_S.tolist()
        for s, (row, kv_len) in enumerate(zip(rows, kv_lens, strict=True)):
            start, end = starts[s], starts[s + 1]
            if s < step.num_decodes:
                start, end = s * step.queries, (s + 1) * step.queries
            if row < 0 or kv_len == 0:
                continue
            latents_LN = reference.gather_latents(cache, tables_RM[row], kv_len)
            rotation = cos_sin, step.positions_T[start:end], kind.interleaved, kind.query_scaling
            if is_expanded_cheaper(kind, end - start, kv_len):
                q = torch.cat(reference.rotated_queries(q_THX[start:end], *rotation), dim=2)
                out = reference.attend_expanded(q, latents_LN, kv_b_HWC, kind.v_head_dim, kind.scale)
            else:
                q = reference.absorb_queries(q_THX[start:end], kv_b_HWC, *rotation)
                sums = reference.attend_to_latents(q, latents_LN, kind.kv_lora_rank, kind.scale)
                out = reference.project_values(sums, kv_b_HWC, kind.v_head_dim)
            out_THV[start:end] = out
        return out_THV
