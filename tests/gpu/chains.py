"""Chains of layers that a GPU launches without waiting: in order, and equal each time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.layers.packed_weight import FusedWeight


def check_chain(x: torch.Tensor, add_layer: Callable[[torch.Tensor], object]) -> None:
    """`add_layer` adds a layer to the residual, in place, 40 times from x on. The result must be the same
    whether each one is waited for, none, or all are a graph that is replayed."""

    def chain(wait: bool) -> torch.Tensor:
        residual = x.clone()
        for _ in range(40):
            add_layer(residual)
            if wait:
                torch.cuda.synchronize()
        return residual

    expected = chain(True)
    assert torch.equal(chain(False), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(False)
    for _ in range(20):
        graph.replay()
        assert torch.equal(captured, expected)


def check_chain_of_rings(x: torch.Tensor, up: FusedWeight, down: FusedWeight) -> None:
    """A layer of one row, with the norm in the product where the GPU has rings."""
    norm = torch.ones(x.shape[1], device=x.device, dtype=x.dtype)

    def add_layer(residual: torch.Tensor) -> None:
        hidden = up.of_norm(residual, norm, 1e-6, None, "silu")
        if hidden is None:
            hidden = up.gated(up.normed(None, residual, norm, 1e-6), None)
        down.add(hidden, None, residual)

    check_chain(x, add_layer)
