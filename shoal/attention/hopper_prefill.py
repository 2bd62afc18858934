"""HopperPrefill: which prefills of the Triton backend get Hopper's own kernel, and its plan of a step."""

from __future__ import annotations

import torch

from shoal.attention.backend import AttentionShape
from shoal.attention.step_input import StepInput
from shoal.attention.unpacked import UnpackedBlocks, plan_blocks
from shoal.kernels.attention.fp8_cache import unpack_blocks
from shoal.kernels.hopper import HAS_GLUON
from shoal.kernels.layer_cache import LayerCache

if HAS_GLUON:
    from shoal.kernels.attention import hopper_attention as hopper

# From this many prefill tokens on the kernel gets them. It takes the host longer to launch.
HOPPER_FROM = 512


class HopperPrefill:
    """Steps that share it must run one after the other."""

    def __init__(
        self,
        shape: AttentionShape,
        block_size: int,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        fp8_cache: bool,
        num_sms: int,
    ) -> None:
        self.is_supported = HAS_GLUON and hopper.is_supported(device, dtype, shape.head_dim, block_size)
        self.shape, self.block_size, self.max_model_len = shape, block_size, max_model_len
        self.fp8_cache, self.num_sms = fp8_cache, num_sms
        # The tiles of the step's prefills, if the kernel gets them; those with selected tokens come first.
        self.work: torch.Tensor | None = None
        self.selected_work = 0  # how many tiles have selected tokens
        self.unpacked: UnpackedBlocks | None = None  # for prefills from an fp8 cache
        self.taken = torch.zeros(1, dtype=torch.int32, device=device)

    def begin(self, step: StepInput) -> None:
        """Orders the work of a large step's prefills."""
        self.work = None
        host = step.host
        if not self.is_supported or host is None or step.max_prefill_tokens < HOPPER_FROM:
            return
        work, self.selected_work = hopper.prefill_work(
            host.query_starts,
            host.kv_lens,
            step.num_decodes,
            self.shape.num_heads // self.shape.num_kv_heads,
            host.selected_tokens,
        )
        if self.fp8_cache:
            self.unpacked = plan_blocks(step, host, self.block_size, self.max_model_len)
            if self.unpacked is None:
                return
        on_device = host.upload(work.reshape(-1)).to(step.rows_S.device, non_blocking=True)
        self.work = on_device.view(work.shape)

    def takes(self, cache: LayerCache) -> bool:
        """Says if the kernel computes the step's prefills in a layer of this cache."""
        return self.work is not None and cache.window is None

    def prefill(
        self, q_THN: torch.Tensor, cache: LayerCache, step: StepInput, out_THN: torch.Tensor, selected: bool
    ) -> None:
        """Writes out_THN of the prefills' tokens, or of the tiles that have selected ones."""
        assert self.work is not None
        work = self.work[: self.selected_work] if selected else self.work
        if not len(work):
            return
        blocks, rows_S, tables_RM = cache.blocks, step.rows_S, step.block_tables[cache.table]
        if cache.scales_2G is not None:
            assert self.unpacked is not None
            blocks = unpack_blocks(cache, self.unpacked.blocks_B[cache.table], q_THN.dtype)
            rows_S, tables_RM = self.unpacked.firsts_S, self.unpacked.table_B1
        hopper.hopper_prefill_attention(
            q_THN, blocks, out_THN, work, self.taken, rows_S, tables_RM, self.shape.scale, self.num_sms
        )
