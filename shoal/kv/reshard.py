"""Blocks of caches sharded by one tensor-parallel size, laid out for another: up or down, any ratio that
divides the heads.

For shards [d0, d1, tokens, heads / src_tp, head_dim] and f = dst_tp / src_tp this is `reshape(d0, d1, tokens,
f, heads / dst_tp, head_dim) .permute(3, 0, 1, 2, 4, 5)`; here it is one gather of head ranges from wherever
they lie to wherever they belong, without that tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.kv.copy import copy_shards
from shoal.kv.layout import LayoutError, shared_heads
from shoal.kv.view import BlockView


def reshard(
    srcs: Sequence[BlockView],
    src_ids: Sequence[int],
    dsts: Sequence[BlockView],
    dst_ids: Sequence[int],
    stream: torch.cuda.Stream | None = None,
) -> torch.cuda.Event | None:
    """Block dst_ids[i] of every destination becomes its share of the heads of block src_ids[i]. Either side
    may be some of its ranks, if the sources have every head that the destinations ask for; layouts may differ
    too. One kernel on a device. Returns the event of the end, or None if it is done. Raises LayoutError and
    BlockCopyError."""
    for views in (srcs, dsts):
        for view in views[1:]:
            if (view.storage.kind, view.storage.device) != (views[0].storage.kind, views[0].storage.device):
                raise LayoutError(
                    f"the shards of one side lie in {views[0].storage.kind} storage on "
                    f"{views[0].storage.device} and "
                    f"{view.storage.kind} storage on {view.storage.device}: it takes one kind"
                )
    shared_heads([view.spec for view in srcs], [view.spec for view in dsts])
    return copy_shards(srcs, src_ids, dsts, dst_ids, stream)
