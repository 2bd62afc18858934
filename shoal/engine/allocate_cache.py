"""`allocate_cache`: has every rank make its KV cache, and finds the room for snapshots of states."""

from __future__ import annotations

import torch

from shoal.config import ResolvedConfig
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.runner import commands
from shoal.engine.scheduling.state_blocks import SnapshotRoom
from shoal.errors import ConfigError

SNAPSHOTS_A_SEQ = 4  # two of its prompt, one of its answer, and one that is being taken
FEW_SNAPSHOTS = 16  # with which four sequences can continue


def allocate_cache(config: ResolvedConfig, ranks: Ranks) -> tuple[int, SnapshotRoom | None]:
    """Has every rank make its KV cache, as large as the smallest room allows. Returns the number of blocks,
    and the room for snapshots, None if no layer has states. Raises ConfigError."""
    runner = ranks.runner
    block_bytes = runner.cache.plan.block_bytes
    if config.device == "cuda":
        ranks.call(commands.COMPILE_AHEAD)
    num_blocks = config.num_gpu_blocks_override or min(ranks.call(commands.NUM_BLOCKS_THAT_FIT))
    if num_blocks < (least := len(runner.cache.plan.groups)):
        each = f"{least} groups of layers, of which each needs a" if least > 1 else "a single"
        raise ConfigError(
            f"{config.cache_option} leaves no room for {each} KV block of {block_bytes} bytes; raise it or "
            f"lower max_num_batched_tokens{' or max_num_seqs' if runner.states.rows.numel() else ''}"
        )
    snapshots = _snapshot_room(config, runner.states.plan.num_blocks)
    try:
        ranks.call(commands.ALLOCATE, num_blocks, 0 if snapshots is None else snapshots.reserved)
    except (MemoryError, torch.OutOfMemoryError):
        raise ConfigError(
            f"{num_blocks} KV blocks of {block_bytes} bytes don't fit in memory; lower "
            "num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization"
        ) from None
    return num_blocks, snapshots


def _snapshot_room(config: ResolvedConfig, size: int) -> SnapshotRoom | None:
    """Returns the room for snapshots of `size` KV blocks each. They share the memory of the cache with KV.
    Only where the number of KV blocks is given, they have memory of their own: for some of each sequence, but
    not more than the KV blocks have, unless that is little."""
    if not size:
        return None
    given = config.num_gpu_blocks_override if config.enable_prefix_caching else 0
    most = SNAPSHOTS_A_SEQ * config.max_num_seqs * size
    reserved = min(most, max(given, FEW_SNAPSHOTS * size)) if given else 0
    return SnapshotRoom(size, reserved, drafts=config.speculative is not None)
