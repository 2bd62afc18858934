"""`CachePlan`: which layers of a model share KV blocks, and where each group of layers is in a block.
Whatever needs the shape of a cache derives it from this; kv_cache.py has the memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import msgspec
import torch

from shoal.config import ResolvedConfig
from shoal.kernels.reference import FP8_MAX
from shoal.kv.groups import CacheKind, LayerGroup, make_groups
from shoal.kv.layout import CacheSpec, Layout
from shoal.model_config import ModelConfig
from shoal.weights.kv_scales import kv_scales, name_of
from shoal.weights.source import CheckpointFiles

logger = logging.getLogger(__name__)

FP8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class CachePlan:
    """One rank's cache. Blocks of all groups have the same bytes, on all ranks."""

    groups: tuple[LayerGroup, ...]
    specs: tuple[CacheSpec, ...]  # for each group, a cache that has its layers alone

    @property
    def block_bytes(self) -> int:
        return self.specs[0].block_bytes

    @property
    def num_blocks(self) -> int:
        return self.specs[0].num_blocks

    @property
    def dtype(self) -> str:
        return self.specs[0].dtype

    @property
    def block_size(self) -> int:
        """The fewest tokens of a block."""
        return min(group.block_size for group in self.groups)

    @property
    def keeps_all(self) -> bool:
        """True if the first group has a block for each token of a sequence, as no window drops any."""
        return self.groups[0].window is None

    def num_sequences(self, cache_bytes: int, num_tokens: int, chunk: int) -> float:
        """Returns how many sequences of this length a cache has room for, if a step computes up to `chunk`
        tokens in all: one sequence has blocks for them, the others for the next token."""
        blocks = cache_bytes // self.block_bytes
        first, other = (
            sum(group.most_blocks(num_tokens, min(size, num_tokens)) for group in self.groups)
            for size in (chunk, 1)
        )
        return blocks / first if blocks < first else 1 + (blocks - first) / other

    def capacity(self, max_model_len: int, chunk: int) -> str:
        """Describes what the cache has room for, if a step computes up to `chunk` tokens of a sequence."""
        sizes = sorted({group.block_size for group in self.groups})
        blocks = f"{self.num_blocks} KV blocks of {' or '.join(map(str, sizes))} tokens"
        if len(self.groups) > 1:
            blocks += f" in {len(self.groups)} groups of layers"
        fitting = self.num_sequences(self.num_blocks * self.block_bytes, max_model_len, chunk)
        num_tokens = self.num_tokens(max_model_len, chunk)
        return f"{blocks} ({num_tokens} tokens of full context, {fitting:.1f} sequences of {max_model_len})"

    def num_tokens(self, max_model_len: int, chunk: int) -> int:
        """Returns how many tokens the sequences of this length that the cache has room for have together."""
        return int(
            self.num_sequences(self.num_blocks * self.block_bytes, max_model_len, chunk) * max_model_len
        )

    def bytes_of_tokens(self, num_tokens: int) -> int:
        """Returns the bytes of this many tokens far before the end of a sequence, where windows no longer see
        them. A model whose layers all slide is taken to keep them."""
        kept = [group for group in self.groups if group.window is None] or self.groups
        return sum(self.block_bytes * num_tokens // group.block_size for group in kept)

    def with_specs(self, **changes: object) -> CachePlan:
        """Returns the plan with these changes of every spec."""
        return replace(self, specs=tuple(msgspec.structs.replace(spec, **changes) for spec in self.specs))


def plan_cache(config: ResolvedConfig, model: ModelConfig, tp_rank: int = 0) -> CachePlan:
    """Returns the plan of a rank's cache of one block, but for the scales of an fp8 cache. Raises LayoutError
    if the ranks can't share the model's KV heads."""
    kinds: list[CacheKind | None] = []
    alone: dict[int, CacheSpec] = {}  # a cache of each layer
    for i, kind in enumerate(model.cached_layers):
        attention = kind.attention
        if attention is None or attention.kv_layer is not None:
            kinds.append(None)
            continue
        alone[i] = CacheSpec(
            layout=Layout.WHOLE_BLOCKS,
            num_layers=1,
            num_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            dtype=config.dtype if config.kv_cache_dtype == "auto" else FP8,
            block_size=config.block_size,
            tp_rank=tp_rank,
            tp_size=config.tensor_parallel_size,
            planes=attention.planes,
        )
        shape = attention.planes, attention.num_kv_heads, attention.head_dim
        # One chunk of positions hides nothing, and other layers have quicker kernels.
        is_whole = attention.in_chunks and config.max_model_len <= (attention.window or 0)
        window = None if is_whole else attention.window
        kinds.append(CacheKind(alone[i].token_layer_bytes, window, shape))
    groups, block_bytes = make_groups(kinds, config.block_size)
    specs = []
    for group in groups:
        num_layers, size = len(group.layers), group.block_size
        spec = msgspec.structs.replace(alone[group.layers[0]], num_layers=num_layers, block_size=size)
        specs.append(msgspec.structs.replace(spec, padding=block_bytes - spec.block_bytes))
    return CachePlan(groups, tuple(specs))


def with_scales(
    plan: CachePlan, config: ResolvedConfig, files: CheckpointFiles, warns: bool
) -> tuple[CachePlan, list[torch.Tensor] | None]:
    """Returns the plan with the scales of an fp8 cache, and the scales; None for another cache. `warns` of a
    checkpoint without scales. Raises CheckpointError."""
    if plan.dtype != FP8:
        return plan, None
    scales = cache_scales(config, files)
    if warns and all((scales_2G == 1).all() for scales_2G in scales):
        logger.warning(
            "kv_cache_dtype %r: %s gives no scales (k_scale, v_scale), so keys and values beyond %g are cut "
            "off",
            config.kv_cache_dtype,
            files.path,
            FP8_MAX,
        )
    return plan.with_specs(scales=name_of(scales)), scales


def may_share_prefixes(config: ResolvedConfig, plan: CachePlan) -> bool:
    """Returns whether decodes may share a prefix, whose keys are then read once for all of them. A layer with
    a sliding window reads only the last keys of a sequence, so a model of such layers alone has nothing to
    share."""
    return plan.keeps_all and config.enable_prefix_caching and not config.disable_cascade_attn


def cache_scales(config: ResolvedConfig, files: CheckpointFiles) -> list[torch.Tensor]:
    """Returns the scales of an fp8 cache for each layer, float32 [2, kv heads of the model]: the
    checkpoint's, or 1. Raises CheckpointError."""
    model = files.config
    found = None if config.load_format == "dummy" else kv_scales(files)
    attentions = [kind.attention for kind in (model.cached_layers if found is None else model.head_layers)]
    return (found or []) + [
        torch.ones((2, 0) if a is None else (a.planes, a.num_kv_heads)) for a in attentions
    ]
