"""Chooses the backend of latent attention. select.py chooses the other attention's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from shoal.attention.latent import LatentBackend
from shoal.attention.latent_cpu import TorchLatentBackend
from shoal.config import ResolvedConfig
from shoal.errors import ConfigError
from shoal.kinds.latent import LatentKind


def latent_backend(
    name: str,
    config: ResolvedConfig,
    device: torch.device,
    dtype: torch.dtype,
    holding: Callable[[], AbstractContextManager[None]],
    kind: LatentKind,
) -> LatentBackend:
    """Returns the backend for layers of `kind`. `name` and `holding`: as in select.py. Raises ConfigError for
    what it does not run."""
    if name not in ("cpu", "triton"):
        raise ConfigError(
            f"attention_backend must be 'auto' for a model with latent attention, got {name!r}; its kernels "
            "are Shoal's own"
        )
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            "kv_cache_dtype must be 'auto' for a model with latent attention, got "
            f"{config.kv_cache_dtype!r}; its cache holds latents, which are small, in the model's dtype"
        )
    if name == "cpu":
        return TorchLatentBackend(kind)
    from shoal.attention.latent_triton import TritonLatentBackend

    return TritonLatentBackend(kind, device, dtype, holding)
