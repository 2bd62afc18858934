"""Prefills by flash-attn or FlashInfer, the documented values `flash_attn` and `flashinfer` of
`attention_backend`. vLLM's values of that option map to them (options/vllm.py); "auto" never chooses them.

Decodes stay with our Triton kernel, because they run in CUDA graphs with lengths that live on the device, and
both libraries plan decodes on the host. Neither package is a dependency. Building an engine raises
ConfigError if the chosen package is missing. Shapes: T tokens, S sequences, H query heads, G kv heads,
N head size, M blocks a sequence.
"""

from __future__ import annotations

import importlib
from itertools import pairwise
from types import ModuleType

import torch

from shoal.attention.backend import AttentionShape
from shoal.attention.step_input import StepInput
from shoal.attention.triton import TritonBackend
from shoal.errors import ConfigError
from shoal.kernels.layer_cache import LayerCache


def import_or_refuse(module: str, package: str, option: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"attention_backend {option!r} needs the package {package}, which is not usable here ({error}); "
            f"pip install {package}, or choose attention_backend 'triton'"
        ) from error


def require_half(option: str, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        raise ConfigError(
            f"attention_backend {option!r} computes in float16 or bfloat16, not float32; set dtype or "
            "choose 'triton'"
        )


def refuse_others(option: str, sinks_H: torch.Tensor | None, cache: LayerCache) -> None:
    """Raises ConfigError for attention that the libraries do not have."""
    missing = "sinks" if sinks_H is not None else "chunks of positions" if cache.in_chunks else None
    if missing is not None:
        raise ConfigError(
            f"attention_backend {option!r} has no {missing}, which this model's layers have; choose 'triton'"
        )


class FlashAttentionBackend(TritonBackend):
    """flash-attn 2. Prefills that follow a cached prefix take its paged path, which needs blocks of a
    multiple of 256 tokens."""

    captures_mixed = False  # prefills are planned on the host

    def __init__(
        self,
        shape: AttentionShape,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        require_half("flash_attn", dtype)
        if block_size % 256:
            raise ConfigError(
                f"block_size {block_size} is not a multiple of 256, as attention_backend 'flash_attn' "
                "needs; set it to 256"
            )
        self.varlen = import_or_refuse("flash_attn", "flash-attn", "flash_attn").flash_attn_varlen_func
        super().__init__(shape, block_size, max_num_seqs, max_model_len, device, dtype)

    def begin(self, step: StepInput) -> None:
        if step.host is None:  # a step of decodes alone, which are not flash-attn's
            return
        prefills = slice(step.num_decodes, None)
        self.max_query_len = max(end - start for start, end in pairwise(step.host.query_starts))
        self.query_starts = step.query_starts_S[prefills] - step.num_decode_tokens
        self.kv_starts = torch.nn.functional.pad(
            step.kv_lens_S[prefills].cumsum(0, dtype=torch.int32), (1, 0)
        )
        rows_S = step.rows_S[prefills].long()
        # Blocks that were given back are before windows, so whichever block is read does not count.
        self.block_tables = [tables_RM[rows_S].clamp(min=0) for tables_RM in step.block_tables]

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
        refuse_others("flash_attn", sinks_H, cache)
        first = step.num_decode_tokens
        if k_TGN is None or v_TGN is None or not step.fresh_prefills:
            k, v = cache.blocks.transpose(2, 3).unbind(1)
            paged = {"block_table": self.block_tables[cache.table]}
        else:
            k, v, paged = k_TGN[first:], v_TGN[first:], {}
        out_THN[first:] = self.varlen(
            q_THN[first:],
            k,
            v,
            self.query_starts,
            self.kv_starts,
            self.max_query_len,
            step.max_kv_len,
            softmax_scale=self.scale,
            softcap=self.softcap or 0.0,
            causal=True,
            window_size=(cache.window - 1 if cache.window else -1, -1),
            **paged,
        )


class FlashInferBackend(TritonBackend):
    """FlashInfer's paged prefill. Its "HND" cache layout is ours, whatever the block size."""

    captures_mixed = False  # prefills are planned on the host

    def __init__(
        self,
        shape: AttentionShape,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        require_half("flashinfer", dtype)
        flashinfer = import_or_refuse("flashinfer", "flashinfer-python", "flashinfer")
        super().__init__(shape, block_size, max_num_seqs, max_model_len, device, dtype)
        self.shape, self.dtype = shape, dtype
        # FlashInfer's documentation recommends this size.
        scratch = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "HND")
        # Window and block table of the plan that the wrapper holds for this step. None: there is no plan yet.
        self.planned: tuple[int | None, int] | None = None

    def begin(self, step: StepInput) -> None:
        self.planned = None  # The first layer makes the plan, as it knows the window.

    def plan(self, step: StepInput, cache: LayerCache) -> None:
        """Makes the wrapper's plan, on the host. It is made once a step if all layers have the same
        window and block table. Lengths come from the host, block ids from the device's tables."""
        assert step.host is not None  # captures_mixed is False
        first = step.num_decodes
        lens = torch.tensor(step.host.kv_lens[first:], dtype=torch.int32)
        block_size = cache.blocks.shape[3]
        num_blocks_S = (lens + block_size - 1) // block_size
        tables_SM = step.block_tables[cache.table][step.rows_S[first:].long()]
        used = torch.arange(tables_SM.shape[1]) < num_blocks_S[:, None]
        starts = torch.tensor(step.host.query_starts[first:], dtype=torch.int32) - step.num_decode_tokens
        self.wrapper.plan(
            starts,
            torch.nn.functional.pad(num_blocks_S.cumsum(0, dtype=torch.int32), (1, 0)),
            tables_SM[used.to(tables_SM.device)].clamp(min=0),  # blocks that were given back don't count
            (lens - 1) % block_size + 1,
            self.shape.num_heads,
            self.shape.num_kv_heads,
            self.shape.head_dim,
            block_size,
            causal=True,
            sm_scale=self.scale,
            logits_soft_cap=self.softcap,
            window_left=cache.window - 1 if cache.window else -1,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )
        self.planned = cache.window, cache.table

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
        refuse_others("flashinfer", sinks_H, cache)
        if self.planned != (cache.window, cache.table):
            self.plan(step, cache)
        first = step.num_decode_tokens
        out_THN[first:] = self.wrapper.run(q_THN[first:], cache.blocks)
