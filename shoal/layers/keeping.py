"""`keep_matrices`: has the matrices of a module stored as its checkpoint has them, quantized or plain."""

from __future__ import annotations

import torch
from torch import nn

from shoal.layers.experts import Experts, MoE
from shoal.layers.matrix import Holding, MatrixLayer


def keep_matrices(module: nn.Module, device: torch.device, quantizes: bool, holding: Holding) -> None:
    """Prepares a module on the meta device: each matrix gets its memory on `device`, inside of `holding`,
    when its tensors arrive, and everything else at once. `quantizes`: plain matrices become fp8."""
    with torch.device("meta"):
        for moe in [layer for layer in module.modules() if isinstance(layer, MoE)]:
            moe.split_shared()
        if device.type == "cpu":
            for experts in [layer for layer in module.modules() if isinstance(layer, Experts)]:
                experts.divide()
    for layer in module.modules():
        if isinstance(layer, MatrixLayer):
            layer.keep(device, quantizes, holding)
    # to_empty() does the same by empty_like, which for meta tensors imports all of sympy: a third of a start.
    module._apply(lambda meta: torch.empty(meta.shape, dtype=meta.dtype, device=device))
