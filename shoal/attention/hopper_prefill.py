"""HopperPrefill: which prefills of the Triton backend get Hopper's own kernel, and its plan of a step."""

from __future__ import annotations

import torch

from shoal.attention.backend import AttentionShape
from shoal.attention.step_input import StepInput
from shoal.attention.unpacked import UnpackedBlocks, fit_unpacked, plan_blocks
from shoal.kernels.attention.fp8_cache import unpack_blocks
from shoal.kernels.hopper import HAS_GLUON
from shoal.kernels.layer_cache import LayerCache

if HAS_GLUON:
    from shoal.kernels.attention import hopper_attention as hopper

# From this many prefill tokens on the kernel gets them. It takes the host longer to launch.
HOPPER_FROM = 512
# A window of fewer of its tiles of keys stays with Triton, as most of what they compute would be masked.
WINDOW_TILES = 8


class HopperPrefill:
    """Steps that share it must run one after the other."""

    def __init__(
        self,
        shape: AttentionShape,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        fp8_cache: bool,
        num_sms: int,
    ) -> None:
        self.is_supported = HAS_GLUON and hopper.is_supported(device, dtype, shape.head_dim, shape.softcap)
        self.shape, self.max_model_len = shape, max_model_len
        self.fp8_cache, self.num_sms = fp8_cache, num_sms
        self.keys = hopper.item_tiles(shape.head_dim).keys if HAS_GLUON else 0
        # The tiles of the step's prefills, if the kernel gets them; those with selected tokens come first.
        self.work: torch.Tensor | None = None
        self.selected_work = 0  # how many tiles have selected tokens
        # for prefills from an fp8 cache: the step's blocks, by block table
        self.unpacked: dict[int, UnpackedBlocks] = {}
        self.taken = torch.zeros(1, dtype=torch.int32, device=device)

    def begin(self, step: StepInput) -> None:
        """Orders the work of a large step's prefills."""
        self.work = None
        self.unpacked.clear()
        host = step.host
        if not self.is_supported or host is None or step.max_prefill_tokens < HOPPER_FROM:
            return
        if self.fp8_cache and not fit_unpacked(step, host, self.max_model_len):
            return
        work, self.selected_work = hopper.prefill_work(
            host.query_starts,
            host.kv_lens,
            step.num_decodes,
            self.shape.num_heads // self.shape.num_kv_heads,
            self.shape.head_dim,
            host.selected_tokens,
        )
        on_device = host.upload(work.reshape(-1)).to(step.rows_S.device, non_blocking=True)
        self.work = on_device.view(work.shape)

    def takes(self, cache: LayerCache) -> bool:
        """Says if the kernel computes the step's prefills in a layer of this cache."""
        if self.work is None or cache.in_chunks:
            return False
        if cache.scales_2G is not None:  # Unpacked blocks begin with the sequence.
            return cache.window is None
        wide = cache.window is None or cache.window >= WINDOW_TILES * self.keys
        return wide and hopper.takes_blocks(cache.blocks)

    def prefill(
        self,
        q_THN: torch.Tensor,
        cache: LayerCache,
        step: StepInput,
        out_THN: torch.Tensor,
        selected: bool,
        sinks_H: torch.Tensor | None,
    ) -> None:
        """Writes out_THN of the prefills' tokens, or of the tiles that have selected ones."""
        assert self.work is not None
        work = self.work[: self.selected_work] if selected else self.work
        if not len(work):
            return
        blocks, rows_S, tables_RM = cache.blocks, step.rows_S, step.block_tables[cache.table]
        if cache.scales_2G is not None:
            unpacked = self.unpacked.get(cache.table)
            if unpacked is None:
                assert step.host is not None
                unpacked = plan_blocks(step, step.host, cache.table, blocks.shape[3])
                self.unpacked[cache.table] = unpacked
            blocks = unpack_blocks(cache, unpacked.blocks_B, q_THN.dtype)
            rows_S, tables_RM = unpacked.firsts_S, unpacked.table_B1
        hopper.hopper_prefill_attention(
            q_THN,
            blocks,
            out_THN,
            work,
            self.taken,
            rows_S,
            tables_RM,
            self.shape.scale,
            self.num_sms,
            sinks_H,
            cache.window,
        )
