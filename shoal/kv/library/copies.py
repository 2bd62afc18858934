"""Copies for other programs: a pool of copy streams, and the copy of one layer that waits for its end."""

from __future__ import annotations

import weakref

import torch

from shoal.errors import UnavailableError
from shoal.kv.block_map import BlockMap, Ids
from shoal.kv.copy import CopyStream, after_current


class NoFreeCopyStreamError(UnavailableError):
    """All streams of a pool are in use."""


class CopyStreams:
    """A pool of `size` streams. A `CopyStream` that is dropped returns its stream; the next owner's copies
    are queued after the earlier ones."""

    def __init__(self, device: torch.device | str, size: int) -> None:
        self.device = torch.device(device)
        self._free = [
            torch.cuda.Stream(self.device) if self.device.type == "cuda" else None for _ in range(size)
        ]
        self.size = size

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> CopyStream:
        """Raises NoFreeCopyStreamError."""
        try:
            stream = self._free.pop()
        except IndexError:
            raise NoFreeCopyStreamError(
                f"all {self.size} copy streams are in use: drop one, or make the pool larger"
            ) from None
        copying = CopyStream(self.device, stream)
        weakref.finalize(copying, self._free.append, stream)
        return copying


def copy_layer(block_map: BlockMap, layer: int, src_ids: Ids, dst_ids: Ids) -> None:
    """Copies one layer after what the current stream does. It is done when this returns. Raises
    BlockCopyError."""
    copying = after_current(block_map.devices, None)
    copy = copying.stage(block_map, src_ids, dst_ids)
    copy.trigger_layer(layer)
    if (event := copy.event(layer)) is not None:
        event.synchronize()
