"""The memory of one layer: `LayerCache`, its keys and values in the paged cache, or `LayerState`,
its states in the rows of running sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from shoal.kernels.draft_spans import DraftSpans

_Position = TypeVar("_Position", int, torch.Tensor)


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """A view of the cache for one layer. It is made once for a cache and serves all steps, so graphs may
    capture its addresses. B blocks, G kv heads on this rank, N head size."""

    blocks: torch.Tensor  # [B, 2, G, block_size, N]: keys, then values; a view into the cache of all layers
    table: int = 0  # which of StepInput.block_tables has the ids of this layer's blocks
    window: int | None = None  # how many positions a token sees, with its own; None: all before it
    # float32 [2, G]: the cache has fp8 numbers (reference.py: `to_fp8`), kv head g's to be multiplied by
    # scales_2G[0, g] (keys) and scales_2G[1, g] (values). None: the cache has plain numbers.
    scales_2G: torch.Tensor | None = None
    in_chunks: bool = False  # windows begin at multiples of their size, as Llama 4's do

    def first_key(self, position: _Position) -> _Position:
        """Returns the first position that a token at this one sees; it may be below 0. It takes tensors,
        too."""
        if self.window is None:
            return position * 0
        return position // self.window * self.window if self.in_chunks else position - self.window + 1

    @property
    def c_window(self) -> int:
        """The window as C kernels take it: 0 is none, and below 0 are chunks."""
        return (-1 if self.in_chunks else 1) * (self.window or 0)


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """A view of the state rows for one recurrent layer, made once, as a LayerCache is. There are R rows, as
    in the batch state, and a spare one, which padding (row -1) writes. A sequence whose first token of a step
    is at position 0 begins from zeros, whatever its row holds. C channels, W width of the convolution."""

    conv_RCW: torch.Tensor  # [R + 1, C, W - 1]: the last inputs of the convolution, the oldest first
    state_R: torch.Tensor | None  # [R + 1, heads, ...]; None: the layer is a convolution alone
    # With speculation: the kept inputs of drafts (kernels/draft_spans.py), [R + 1, drafts, ...], of
    # the convolution and of the state, and the spans of all decodes that there may be
    kept_conv_RKC: torch.Tensor | None = None
    kept_state_RKX: torch.Tensor | None = None
    drafts: DraftSpans | None = None


LayerMemory = LayerCache | LayerState | None  # None: the layer keeps nothing
