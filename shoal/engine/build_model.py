"""`build_model`: one rank's decoder and draft head, whose weights are not loaded yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from shoal.attention.backend import AttentionBackend
from shoal.attention.select import select_backends
from shoal.config import ResolvedConfig
from shoal.engine.drafting.rank_head import RankHead, build_head
from shoal.kernels.ops import Ops
from shoal.layers.mixer import mixer_shape
from shoal.layers.parallel import TensorParallel
from shoal.models.decoder import Decoder
from shoal.weights.source import CheckpointFiles


def build_model(
    config: ResolvedConfig,
    files: CheckpointFiles,
    tp: TensorParallel,
    ops: Ops,
    device: torch.device,
    holding: Callable[[str], AbstractContextManager[None]],
) -> tuple[Decoder, RankHead | None, AttentionBackend]:
    """Returns the decoder, its draft head if the config names one, and one of its attention backends, all of
    which are of one class. `holding`: puts what is allocated into the region of memory of this name."""
    model_config, dtype = files.config, getattr(torch, config.dtype)
    in_weights = partial(holding, "weights")
    with _defaults(dtype, device):
        backends = select_backends(
            config,
            device,
            dtype,
            [mixer_shape(a, tp.size) for kind in model_config.cached_layers if (a := kind.attention)],
            # Partial results of attention are released with the cache: 0.2 GiB for 256 sequences.
            holding=partial(holding, "kv_cache"),
        )
        quantizes = config.keep_quantized, config.quantizes_weights
        with in_weights():
            model = Decoder(model_config, tp, ops, backends, *quantizes, in_weights)
        model.allocate_ropes(config.max_model_len)
        head = build_head(config, files, model, tp, ops, backends, in_weights)
    return model, head, next(iter(backends.values()))


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Makes these torch's defaults inside this context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
