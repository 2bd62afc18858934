"""Chooses the attention backends, one per head shape. "auto" is Triton on a GPU and the CPU backend
elsewhere; the others must be asked for by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from shoal.attention.backend import AttentionBackend, AttentionShape, Backends
from shoal.attention.latent_select import latent_backend
from shoal.config import ResolvedConfig
from shoal.errors import ConfigError
from shoal.kinds.latent import LatentKind

logger = logging.getLogger(__name__)


def select_backends(
    config: ResolvedConfig,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Iterable[AttentionShape | LatentKind],
    holding: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Backends:
    """Returns the backends that `config` names, one for each of this rank's head shapes. holding: the region
    of memory that is given back while the engine sleeps and need not keep its content. Raises ConfigError if
    the backend is not installed or is for another device."""
    name = config.attention_backend
    if name == "auto":
        name = "triton" if device.type == "cuda" else "cpu"
        logger.info("attention backend: %s (auto)", name)
    if (name == "cpu") != (device.type == "cpu"):
        raise ConfigError(
            f"attention_backend {config.attention_backend!r} does not run on {device.type}; leave it at "
            "'auto'"
        )
    build: Callable[..., AttentionBackend]
    sizes: tuple[Any, ...] = config.block_size, config.max_num_seqs, config.max_model_len, device, dtype
    if name == "cpu":
        from shoal.attention.cpu import CpuBackend, TorchBackend
        from shoal.kernels.cpu.build import load

        build, sizes = CpuBackend if dtype == torch.float32 and load() is not None else TorchBackend, ()
    elif name == "triton":
        from shoal.attention.triton import TritonBackend

        fp8_cache = config.kv_cache_dtype != "auto"
        build = partial(TritonBackend, fp8_cache=fp8_cache, holding=holding, queries=config.queries)
    else:
        from shoal.attention import flash

        build = flash.FlashInferBackend if name == "flashinfer" else flash.FlashAttentionBackend
    build_latent = partial(latent_backend, name, config, device, dtype, holding)
    backends: Backends = {
        shape: build_latent(shape) if isinstance(shape, LatentKind) else build(shape, *sizes)
        for shape in dict.fromkeys(shapes)
    }
    if name != "cpu" and len(backends) > 1:
        from shoal.attention.workspaces import share_workspaces

        share_workspaces([*backends.values()])
    return backends
