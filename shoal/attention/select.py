"""Which attention backend an engine uses. "auto" is Triton on a GPU and our CPU backend elsewhere; the others
must be asked for by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from shoal.attention.step_input import AttentionBackend
from shoal.config import ResolvedConfig
from shoal.errors import ConfigError

logger = logging.getLogger(__name__)


def select_backend(
    config: ResolvedConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    holding: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> AttentionBackend:
    """Returns the backend that `config` names, for this rank's heads. holding: the region of memory that is
    given back while the engine sleeps and need not keep its content. Raises ConfigError if the backend is not
    installed or is for another device."""
    name = config.attention_backend
    if name == "auto":
        name = "triton" if device.type == "cuda" else "cpu"
        logger.info("attention backend: %s (auto)", name)
    if (name == "cpu") != (device.type == "cpu"):
        raise ConfigError(
            f"attention_backend {config.attention_backend!r} does not run on {device.type}; leave it at "
            "'auto'"
        )
    if name == "cpu":
        from shoal.attention.cpu import CpuBackend

        return CpuBackend(head_dim, scale)
    if name == "triton":
        from shoal.attention.triton import TritonBackend

        build: Callable[..., AttentionBackend] = partial(
            TritonBackend, fp8_cache=config.kv_cache_dtype != "auto", holding=holding
        )
    else:
        from shoal.attention import flash

        build = flash.FlashInferBackend if name == "flashinfer" else flash.FlashAttentionBackend
    return build(
        num_heads,
        num_kv_heads,
        head_dim,
        config.block_size,
        config.max_num_seqs,
        config.max_model_len,
        device,
        dtype,
        scale,
    )
