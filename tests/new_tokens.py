"""New tokens of sequences in a cache, and what a chain of plain PyTorch makes of them."""

from __future__ import annotations

import torch

from shoal.kernels.attention.reference import paged_attention
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.reference import qk_norm_rope_store

BF16 = torch.bfloat16


class Case:
    """New tokens of sequences with these lengths. Slots of the cache that no sequence owns hold NaN."""

    def __init__(
        self,
        lens: list[int],
        heads: int,
        kv_heads: int,
        size: int,
        norms: bool = True,
        ropes: bool = True,
        window: int | None = None,
        sinks: bool = False,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.heads, self.size, self.window = heads, size, window
        most = max(*lens, 1)
        blocks = -(-most // 16)
        cache = torch.full((len(lens) * blocks, 2, 2, kv_heads, 16, size), float("nan"), dtype=BF16)
        tables = torch.full((len(lens) + 1, blocks + 2), 2**30, dtype=torch.int32)
        order = torch.randperm(len(lens) * blocks, dtype=torch.int32).view(len(lens), blocks)
        rows = [len(lens) - i if n else -1 for i, n in enumerate(lens)]
        for row, n, ids in zip(rows, lens, order):
            if n:
                tables[row, : -(-n // 16)] = ids[: -(-n // 16)]
                for at in range(n - 1):
                    cache[ids[at // 16], 1, :, :, at % 16] = torch.randn(2, kv_heads, size)
        self.qkv = torch.randn(len(lens), (heads + 2 * kv_heads) * size).to(BF16).to(device)
        self.norms = tuple((1 + 0.2 * torch.randn(2, size)).to(BF16).to(device)) if norms else (None, None)
        self.cos_sin = torch.randn(most + 1, size).to(device) if ropes else None
        self.sinks = (2 * torch.randn(heads)).to(device) if sinks else None
        self.rows = torch.tensor(rows, dtype=torch.int32, device=device)
        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)
        self.positions, self.tables, self.cache = self.lens - 1, tables.to(device), cache.to(device)

    def layer(self) -> LayerCache:
        return LayerCache(self.cache[:, 1], window=self.window)

    def inputs(self) -> tuple:
        rope = 1e-6, self.cos_sin, self.positions, self.rows, self.tables, self.layer()
        return (self.qkv, *self.norms, *rope, self.lens, self.size**-0.5, self.sinks)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the chain, [T, H * N], and the cache's layer after it."""
        qkv, cache = self.qkv.cpu().clone(), self.cache.cpu()[:, 1].clone()
        norms = [None if norm is None else norm.cpu() for norm in self.norms]
        cos_sin = None if self.cos_sin is None else self.cos_sin.cpu()
        rows, lens, tables = self.rows.cpu(), self.lens.cpu(), self.tables.cpu()
        qk_norm_rope_store(qkv, *norms, 1e-6, cos_sin, lens - 1, rows, tables, LayerCache(cache))
        q_THN = qkv.view(len(qkv), -1, self.size)[:, : self.heads]
        starts = torch.arange(len(qkv) + 1, dtype=torch.int32)
        given = q_THN.float(), cache.float(), starts, lens, rows, tables, self.size**-0.5
        sinks = None if self.sinks is None else self.sinks.cpu()
        out = paged_attention(*given, self.window, sinks_H=sinks)
        return out.reshape(len(qkv), -1), cache


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Outputs, weights and rotated queries are rounded to 8 bits."""
    error = (out.float().cpu() - expected).norm() / expected.norm()
    assert error < 6e-3, error
