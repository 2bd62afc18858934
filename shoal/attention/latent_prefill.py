"""HopperLatentPrefill: which prefills over latents get Hopper's kernel of attention, and its plan of a step.

Their keys and values are made of latents, [2, H, L, N]: keys with the rotated part that all heads share, then
values. To the kernel each line is a block of its own, so a sequence may begin anywhere.
"""

from __future__ import annotations

import torch

from shoal.attention.step_input import StepInput
from shoal.kernels.hopper import HAS_GLUON
from shoal.kernels.latent.expanded import rotate_queries
from shoal.kernels.rounding import cdiv
from shoal.kinds.latent import LatentKind

if HAS_GLUON:
    from shoal.kernels.attention import hopper_attention as hopper

# From this many prefill tokens on the kernel gets them: it takes the host three more launches.
HOPPER_FROM = 4096
BOX = 16  # lines that the kernel looks up together
COPIED = 4  # numbers of 16 bits that are copied together


class HopperLatentPrefill:
    """Steps that share it must run one after the other."""

    def __init__(self, kind: LatentKind, device: torch.device, dtype: torch.dtype, num_sms: int) -> None:
        self.kind, self.num_sms = kind, num_sms
        self.is_supported = (
            HAS_GLUON
            and hopper.is_supported(device, dtype, kind.query_dim, None)
            and kind.v_head_dim == kind.query_dim
            and kind.query_scaling is None
            and all(
                size % COPIED == 0 for size in (kind.kv_lora_rank, kind.qk_nope_head_dim, kind.rotary_dim)
            )
        )
        self.work: torch.Tensor | None = None  # the tiles of the step's prefills, if the kernel gets them
        self.taken = torch.zeros(1, dtype=torch.int32, device=device)
        self.tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # rows and tables, by block table

    def begin(self, step: StepInput) -> None:
        """Orders the work of a large step's prefills, which are expanded."""
        self.work, host = None, step.host
        self.tables.clear()
        if not self.is_supported or host is None or step.max_prefill_tokens < HOPPER_FROM:
            return
        work, _ = hopper.prefill_work(
            host.query_starts, host.kv_lens, step.num_decodes, 1, self.kind.query_dim
        )
        on_device = host.upload(work.reshape(-1)).to(step.rows_S.device, non_blocking=True)
        self.work = on_device.view(work.shape)

    def attend(
        self,
        q_THX: torch.Tensor,
        latents_LN: torch.Tensor,
        kv_b_HWC: torch.Tensor,
        cos_sin: torch.Tensor,
        key_starts_S: torch.Tensor,
        table: int,
        step: StepInput,
        out_THV: torch.Tensor,
    ) -> None:
        """Writes out_THV of the prefills' tokens, and rotates their queries in place. Sequence s has latents
        from key_starts_S[s] on."""
        assert self.work is not None
        kind, first = self.kind, step.num_decode_tokens
        (num_heads, _, size), plain, width = kv_b_HWC.shape, kind.qk_nope_head_dim, kind.query_dim
        rotate_queries(q_THX[first:], cos_sin, step.positions_T[first:], kind.interleaved)
        lines = len(latents_LN)
        kv_2HLN = q_THX.new_empty(2, num_heads, lines, width)
        c_HLC = latents_LN[:, :size].expand(num_heads, lines, size)
        torch.bmm(c_HLC, kv_b_HWC[:, :plain].transpose(1, 2), out=kv_2HLN[0, :, :, :plain])
        torch.bmm(c_HLC, kv_b_HWC[:, plain:].transpose(1, 2), out=kv_2HLN[1])
        # COPIED numbers at a time
        rotated_LE = latents_LN[:, size:].view(torch.int64)
        kv_2HLN[0, :, :, plain:].view(torch.int64).copy_(rotated_LE.expand(num_heads, -1, -1))
        if table not in self.tables:
            boxes = torch.arange(cdiv(step.max_kv_len, BOX), dtype=torch.int32, device=q_THX.device)
            rows_S = torch.arange(step.num_seqs, dtype=torch.int32, device=q_THX.device)
            self.tables[table] = rows_S, key_starts_S[: step.num_seqs, None] + BOX * boxes
        rows_S, tables_SM = self.tables[table]
        hopper.hopper_prefill_attention(
            q_THX,
            kv_2HLN.as_strided(
                (1, 2, num_heads, BOX, width), (width, num_heads * lines * width, lines * width, width, 1)
            ),
            out_THV,
            self.work,
            self.taken,
            rows_S,
            tables_SM,
            kind.scale,
            self.num_sms,
        )
