"""The GPU's attention backend: Triton kernels on the paged cache.

This file chooses the kernel of each step and owns the decode workspace; splits.py says into how many programs
a task is cut. The kernels are in kernels/attention: paged_attention.py, prefix_attention.py (prefixes which
decodes share) and hopper_attention.py (large prefills on Hopper).
Shapes: T tokens of the step, H query heads, G kv heads, N head size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product

import torch

from shoal.attention.backend import AttentionShape
from shoal.attention.hopper_prefill import HopperPrefill
from shoal.attention.splits import (
    CUT,
    CUT_SPLITS,
    FULL_SPLIT,
    PREFIX_PROGRAMS_PER_SM,
    PROGRAMS_PER_SM,
    SHARE_FROM,
    captured_splits,
    decode_splits,
    is_large,
    prefill_splits,
    prefix_parts,
)
from shoal.attention.step_input import StepInput
from shoal.kernels.attention.paged_attention import (
    DecodeWorkspace,
    PrefillWorkspace,
    chunk_rows,
    decode_attention,
    num_prefill_tasks,
    prefill_attention,
    queries_per_tile,
)
from shoal.kernels.attention.prefix_attention import prefix_attention
from shoal.kernels.drafting.draft_rows import most_decodes
from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.layer_cache import LayerCache

MIN_SPLIT = 64  # the fewest keys that are worth a program of their own
MIN_PREFILL_SPLIT = 512  # the fewest keys that are worth a program of their own beside a tile's others


class TritonBackend:
    """Steps that share a backend must run one after the other, because they share its workspace."""

    captures_mixed = True
    share_from: int | None = SHARE_FROM

    def __init__(
        self,
        shape: AttentionShape,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        fp8_cache: bool = False,
        holding: Callable[[], AbstractContextManager[None]] = nullcontext,
        queries: int = 1,
    ) -> None:
        """holding: the region for partial results, which need not outlive a step. queries: the most tokens of
        a decode in one step, which has at most `most_decodes(queries)` decodes if these are several."""
        num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.fp8_cache = fp8_cache
        self.scale, self.softcap, self.num_kv_heads = shape.scale, shape.softcap, num_kv_heads
        on_gpu = device.type == "cuda"
        # Without a GPU (in Triton's interpreter) any number will do. With 8, small cases are split.
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 8
        self.hopper = HopperPrefill(shape, max_model_len, device, dtype, fp8_cache, self.num_sms)
        self.group = num_heads // num_kv_heads

        # Number of queries that share a tile, by the number of queries of a decode.
        self.tile_queries = [
            0,
            *(queries_per_tile(self.group, n, head_dim, dtype) for n in range(1, queries + 1)),
        ]

        def most_partials(num_seqs: int, queries: int) -> int:
            """Returns the largest number of partial results per kv head in a step of `num_seqs` decodes."""
            num_tiles = self.num_tiles(num_seqs, queries)
            sizes = num_tiles, num_kv_heads, max_model_len, self.num_sms, head_dim
            splits = max(decode_splits(*sizes), CUT_SPLITS, captured_splits(*sizes))
            parts = prefix_parts(num_seqs, num_kv_heads, self.num_sms)
            return num_tiles * self.tile_queries[queries] * self.group * (splits + parts)

        counts = product(range(1, max_num_seqs + 1), range(1, queries + 1))
        steps = [(n, k) for n, k in counts if k == 1 or n <= most_decodes(k)]
        self.workspace = DecodeWorkspace.allocate(
            num_kv_heads * max(most_partials(*step) for step in steps),
            num_kv_heads * max(self.num_tiles(*step) for step in steps),
            head_dim,
            device,
            holding,
        )
        # per tile with splits
        self.chunk_queries = chunk_rows(self.group, head_dim, dtype, fp8_cache) // self.group
        self.prefill_workspace = PrefillWorkspace.allocate(
            self.num_sms * PROGRAMS_PER_SM, self.group, head_dim, dtype, device, holding, fp8_cache
        )

    def num_tiles(self, num_seqs: int, queries: int) -> int:
        """Returns the number of tiles of `num_seqs` decodes of `queries` tokens."""
        return num_seqs * -(-queries // self.tile_queries[queries])

    def begin(self, step: StepInput) -> None:
        """Orders the work of a large step's prefills. There is nothing else to plan, as kernels read lengths
        and block tables on the device."""
        self.hopper.begin(step)

    def reads_k(self, cache: LayerCache) -> bool:
        return not self.fp8_cache and not self.hopper.takes(cache)

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
        out_THN = empty_matmul_input(q_THN, *q_THN.shape)
        if step.num_decodes:
            self.decode(q_THN, cache, step, out_THN, sinks_H)
        if step.num_seqs > step.num_decodes:
            self.prefill(q_THN, k_TGN, v_TGN, cache, step, out_THN, selected, sinks_H)
        return out_THN

    def decode(
        self,
        q_THN: torch.Tensor,
        cache: LayerCache,
        step: StepInput,
        out_THN: torch.Tensor,
        sinks_H: torch.Tensor | None,
    ) -> None:
        """Writes out_THN of the decodes' tokens; an empty place gets zeros."""
        tables_RM = step.block_tables[cache.table]
        num_tiles = self.num_tiles(step.num_decodes, step.queries)
        head_dim = q_THN.shape[2]
        sizes = num_tiles, self.num_kv_heads, step.max_kv_len, self.num_sms, head_dim
        num_cut = None
        if step.sparse_decodes:
            splits = captured_splits(*sizes)
        elif step.queries == 1 and is_large(step.num_decodes, self.num_kv_heads, self.num_sms, head_dim):
            num_cut, splits = CUT, CUT_SPLITS
        else:
            splits = decode_splits(*sizes)
        short = cache.window is not None and cache.window <= FULL_SPLIT  # one program's keys at any length
        parts, prefix_lens_S = 0, None
        if step.prefixes is not None and cache.window is None and step.num_decodes >= SHARE_FROM:
            parts = prefix_parts(step.num_decodes, self.num_kv_heads, self.num_sms)
            prefix_lens_S = step.prefixes.lens_S
            # decode_attention must be the very next launch: its kernel works beside this one's (pdl.py).
            prefix_attention(
                q_THN,
                cache,
                step.prefixes.decode_groups,
                step.prefixes.members_S,
                tables_RM,
                self.workspace,
                step.num_decodes,
                PREFIX_PROGRAMS_PER_SM * self.num_sms,
                splits,
                parts,
                self.scale,
                queries=step.queries,
                softcap=self.softcap,
            )
        decode_attention(
            q_THN,
            cache,
            out_THN,
            step.rows_S,
            step.kv_lens_S,
            tables_RM,
            self.workspace,
            step.num_decodes,
            None if short else splits,
            self.scale,
            min_split=MIN_SPLIT,
            prefix_lens_S=prefix_lens_S,
            max_parts=parts,
            num_cut=None if short else num_cut,
            queries=step.queries,
            softcap=self.softcap,
            sinks_H=sinks_H,
        )

    def prefill(
        self,
        q_THN: torch.Tensor,
        k_TGN: torch.Tensor | None,
        v_TGN: torch.Tensor | None,
        cache: LayerCache,
        step: StepInput,
        out_THN: torch.Tensor,
        selected: bool,
        sinks_H: torch.Tensor | None,
    ) -> None:
        """Writes out_THN of the prefills' tokens. It comes after `decode`: in a captured mixed step the empty
        places for decodes wrote zeros over some of these tokens."""
        if self.hopper.takes(cache):
            self.hopper.prefill(q_THN, cache, step, out_THN, selected, sinks_H)
            return
        paged, splits = k_TGN is None or cache.scales_2G is not None or not step.fresh_prefills, 1
        if paged and cache.window is None:
            sizes = step.max_prefill_tokens, step.num_seqs - step.num_decodes, self.num_kv_heads
            splits = prefill_splits(num_prefill_tasks(*sizes, self.chunk_queries), self.num_sms)
        prefill_attention(
            q_THN,
            k_TGN,
            v_TGN,
            cache,
            out_THN,
            step.query_starts_S,
            step.kv_lens_S,
            step.rows_S,
            step.block_tables[cache.table],
            step.num_decodes,
            step.max_prefill_tokens,
            self.scale,
            paged=paged,
            splits=splits,
            min_split=MIN_PREFILL_SPLIT,
            workspace=self.prefill_workspace,
            softcap=self.softcap,
            sinks_H=sinks_H,
        )
