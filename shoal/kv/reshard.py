"""Blocks of caches sharded by one tensor-parallel size, laid out for another: up or down, any ratio that
divides the heads.

For shards [d0, d1, tokens, heads / src_tp, head_dim] and f = dst_tp / src_tp this is `reshape(d0, d1, tokens,
f, heads / dst_tp, head_dim) .permute(3, 0, 1, 2, 4, 5)`; here it is one gather of head ranges from wherever
they lie to wherever they belong, without that tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.kv.copy import check_compatible, copy_shards
from shoal.kv.layout import LayoutError
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
    if not srcs or not dsts:
        raise LayoutError(f"{len(srcs)} sources and {len(dsts)} destinations: it takes one or more of each")
    for views in (srcs, dsts):
        ranks = [view.spec.tp_rank for view in views]
        if len(set(ranks)) < len(ranks):
            raise LayoutError(f"the ranks of one side are {ranks}: each may come once")
        for view in views:
            check_compatible(views[0], view, besides=("tp_rank",))
            if (view.storage.kind, view.storage.device) != (views[0].storage.kind, views[0].storage.device):
                raise LayoutError(
                    f"the shards of one side lie in {views[0].storage.kind} storage on "
                    f"{views[0].storage.device} and "
                    f"{view.storage.kind} storage on {view.storage.device}: it takes one kind"
                )
    check_compatible(srcs[0], dsts[0], besides=("layout", "tp_rank", "tp_size"))
    missing = _heads(dsts) - _heads(srcs)
    if missing:
        raise LayoutError(
            f"no source has head {min(missing)}: the sources are ranks "
            f"{[view.spec.tp_rank for view in srcs]} of "
            f"{srcs[0].spec.tp_size}"
        )
    return copy_shards(srcs, src_ids, dsts, dst_ids, stream)


def _heads(views: Sequence[BlockView]) -> set[int]:
    return {view.spec.tp_rank * view.spec.heads + i for view in views for i in range(view.spec.heads)}
