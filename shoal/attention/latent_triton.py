"""The GPU's backend of latent attention: decodes and short prefills in the absorbed form, long ones in the
expanded form, by what takes fewer operations. The kernels are in kernels/latent/.

Shapes: T tokens of the step, H query heads of this rank; kernels/latent/reference.py has the others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from shoal.attention.latent import is_expanded_cheaper
from shoal.attention.latent_prefill import HopperLatentPrefill
from shoal.attention.splits import CAPTURED_WAVES
from shoal.attention.step_input import HostView, StepInput
from shoal.attention.unpacked import UnpackedBlocks, fit_unpacked, plan_blocks
from shoal.kernels.hopper import HAS_GLUON, empty_matmul_input, is_hopper
from shoal.kernels.latent.attention import (
    MAX_TILE_ROWS,
    LatentWorkspace,
    latent_attention,
    latent_tiles,
    num_row_tiles,
)
from shoal.kernels.latent.expanded import expanded_attention
from shoal.kernels.latent.project import FEW_TOKENS, absorb_queries, project_values
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.rounding import cdiv
from shoal.kinds.latent import LatentKind

if HAS_GLUON:
    from shoal.kernels.latent.hopper_decode import hopper_latent_attention, takes_latents
    from shoal.kernels.latent.hopper_project import hopper_absorb_queries, hopper_project_values, takes_heads

MIN_SPLIT = 64  # the fewest keys that are worth a program of their own
# The most programs of hopper_decode.py that share a sequence's keys: the matmul with V adds their parts.
HOPPER_SPLITS = 48
# The most memory for keys and values made of cached latents. A step that would take more is absorbed.
MAX_EXPANDED_BYTES = 1 << 29


class TritonLatentBackend:
    """LatentBackend in Triton. Steps that share it must run one after the other, because they share its
    workspace."""

    captures_mixed = True
    share_from: int | None = None  # all heads read a key at once anyway

    def __init__(
        self,
        kind: LatentKind,
        device: torch.device,
        dtype: torch.dtype,
        holding: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """holding: the region for partial results, which need not outlive a step."""
        self.kind, self.dtype = kind, dtype
        on_gpu = device.type == "cuda"
        # Without a GPU (in Triton's interpreter) any number will do. With 8, small cases are split.
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 8
        self.num_sms = num_sms
        self.slots = 2 * num_sms  # programs of latent_kernel at once
        self.on_hopper = HAS_GLUON and is_hopper(device) and takes_latents(kind, dtype)
        self.workspace = LatentWorkspace.allocate(
            CAPTURED_WAVES * self.slots * MAX_TILE_ROWS,
            CAPTURED_WAVES * self.slots,
            kind.kv_lora_rank,
            device,
            holding,
        )
        self.prefill = HopperLatentPrefill(kind, device, dtype, num_sms)
        # Hopper's kernel reads the rotated part of a key in each head.
        key = kind.query_dim if self.prefill.is_supported else kind.qk_nope_head_dim
        key_bytes = kind.num_heads * (key + kind.v_head_dim) * dtype.itemsize
        self.max_gathered = MAX_EXPANDED_BYTES // key_bytes  # cached tokens whose keys may be expanded
        self.expands = False  # the prefills of this step are expanded
        self.gathered: dict[int, UnpackedBlocks] = {}  # their blocks if they are not fresh, by block table

    def tile_rows(self, queries: int) -> int:
        """Rows of a tile of decodes with as many queries; 0: of prefills."""
        num_rows = queries * self.kind.num_heads if queries else None
        return latent_tiles(num_rows, self.dtype).block_m

    def splits(self, step: StepInput, num_tiles: int, slots: int) -> int:
        """Into how many programs the keys of a tile are split: one wave of programs if tiles alone do not
        fill the GPU, and more in a captured mixed step, most of whose places are empty. Captured graphs get
        the same number each time. `slots`: programs at once."""
        waves = CAPTURED_WAVES if step.sparse_decodes else 1
        return max(1, min(waves * slots // num_tiles, cdiv(step.max_kv_len, MIN_SPLIT)))

    def begin(self, step: StepInput) -> None:
        """Chooses the form of the step's prefills. A captured step does not know them, and is absorbed."""
        self.expands = self._expands(step)
        self.gathered.clear()
        if self.expands:
            self.prefill.begin(step)

    def _expands(self, step: StepInput) -> bool:
        host = step.host
        if host is None or step.num_seqs == step.num_decodes:
            return False
        if step.fresh_prefills:
            return True
        return fit_unpacked(step, host, self.max_gathered) and self._is_expanded_cheaper(step, host)

    def _is_expanded_cheaper(self, step: StepInput, host: HostView) -> bool:
        """Says whether most queries of the step's prefills belong to sequences for which it is."""
        votes = 0
        for s in range(step.num_decodes, step.num_seqs):
            num_queries = host.query_starts[s + 1] - host.query_starts[s]
            cheaper = is_expanded_cheaper(self.kind, num_queries, host.kv_lens[s])
            votes += num_queries if cheaper else -num_queries
        return votes > 0

    def attend(
        self,
        q_THX: torch.Tensor,
        latent_TN: torch.Tensor,
        kv_b_HWC: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: LayerCache,
        step: StepInput,
    ) -> torch.Tensor:
        out_THV = empty_matmul_input(q_THX, *q_THX.shape[:2], self.kind.v_head_dim)
        absorbed = step.num_decode_tokens if self.expands else step.num_tokens
        if absorbed:
            self.attend_absorbed(q_THX[:absorbed], kv_b_HWC, cos_sin, cache, step, out_THV[:absorbed])
        if self.expands:
            self.attend_expanded(q_THX, latent_TN, kv_b_HWC, cos_sin, cache, step, out_THV)
        return out_THV

    def attend_absorbed(
        self,
        q_THX: torch.Tensor,
        kv_b_HWC: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: LayerCache,
        step: StepInput,
        out_THV: torch.Tensor,
    ) -> None:
        """Writes out_THV of the decodes' tokens, and of the prefills' unless these are expanded."""
        kind = self.kind
        num_prefills = step.num_seqs - step.num_decodes
        few = len(q_THX) <= FEW_TOKENS and not num_prefills
        rotation = cos_sin, step.positions_T, kind.interleaved, kind.query_scaling
        wide = self.on_hopper and takes_heads(q_THX, kind)
        if wide:
            q_THN = hopper_absorb_queries(q_THX, kv_b_HWC, *rotation)
        else:
            q_THN = absorb_queries(q_THX, kv_b_HWC, *rotation, few)
        sums_THC, parts = None, None
        if not few:
            sums_THC = empty_matmul_input(q_THX, *q_THX.shape[:2], kind.kv_lora_rank)
        places = step.kv_lens_S, step.rows_S, step.block_tables[cache.table]
        sequences = step.query_starts_S, *places
        if step.num_decodes:
            rows = self.tile_rows(step.queries)
            num_tiles = step.num_decodes * cdiv(step.queries * kind.num_heads, rows)
            if self.on_hopper:
                parts = hopper_latent_attention(
                    q_THN,
                    cache,
                    sums_THC,
                    *places,
                    self.workspace,
                    kind.scale,
                    splits=min(HOPPER_SPLITS, self.splits(step, num_tiles, self.num_sms)),
                    min_split=MIN_SPLIT,
                    num_seqs=step.num_decodes,
                    queries=step.queries,
                    num_sms=self.num_sms,
                )
            else:
                parts = latent_attention(
                    q_THN,
                    cache,
                    sums_THC,
                    *sequences,
                    self.workspace,
                    kind.scale,
                    splits=self.splits(step, num_tiles, self.slots),
                    min_split=MIN_SPLIT,
                    num_seqs=step.num_decodes,
                    queries=step.queries,
                )
        if num_prefills and not self.expands:
            # In a captured mixed step the empty places for decodes wrote zeros over some of these tokens.
            num_tokens = step.max_prefill_tokens
            rows = self.tile_rows(0)
            num_tiles = num_row_tiles(num_tokens, num_prefills, kind.num_heads, rows)
            latent_attention(
                q_THN,
                cache,
                sums_THC,
                *sequences,
                self.workspace,
                kind.scale,
                splits=self.splits(step, num_tiles, self.slots),
                min_split=MIN_SPLIT,
                num_seqs=num_prefills,
                first_seq=step.num_decodes,
                num_tokens=num_tokens,
            )
        if wide:
            assert sums_THC is not None
            hopper_project_values(sums_THC, kv_b_HWC, out_THV)
            return
        sums = sums_THC if parts is None else parts
        assert sums is not None
        project_values(sums, kv_b_HWC, out_THV)

    def attend_expanded(
        self,
        q_THX: torch.Tensor,
        latent_TN: torch.Tensor,
        kv_b_HWC: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: LayerCache,
        step: StepInput,
        out_THV: torch.Tensor,
    ) -> None:
        """Writes out_THV of the prefills' tokens. Fresh prefills see their own latents alone."""
        kind, latents_LN, key_starts_S = self.kind, latent_TN, step.query_starts_S
        if not step.fresh_prefills:
            gathered, block_size = self.gathered.get(cache.table), cache.blocks.shape[3]
            if gathered is None:
                assert step.host is not None
                gathered = plan_blocks(step, step.host, cache.table, block_size)
                self.gathered[cache.table] = gathered
            latents_LN = cache.blocks[gathered.blocks_B.long(), 0, 0].flatten(0, 1)
            key_starts_S = gathered.firsts_S * block_size
        if self.prefill.work is not None:
            places = key_starts_S, cache.table, step
            self.prefill.attend(q_THX, latents_LN, kv_b_HWC, cos_sin, *places, out_THV)
            return
        kv_LY = torch.mm(latents_LN[:, : kind.kv_lora_rank], kv_b_HWC.flatten(0, 1).T)
        expanded_attention(
            q_THX,
            kv_LY,
            latents_LN,
            out_THV,
            cos_sin,
            step.query_starts_S,
            key_starts_S,
            step.kv_lens_S,
            kind.scale,
            kind.interleaved,
            kind.query_scaling,
            first_seq=step.num_decodes,
            num_tokens=step.max_prefill_tokens,
        )
