"""`keep_matrices`: gives a module without memory weights as a checkpoint has them, quantized or plain."""

from __future__ import annotations

import torch
from torch import nn

from shoal.layers.experts import Experts
from shoal.layers.matrix import Holding, MatrixLayer


def keep_matrices(module: nn.Module, device: torch.device, quantizes: bool, holding: Holding) -> None:
    """Has every matrix of a module on the meta device get its memory on `device`, inside of `holding`, when
    its tensors arrive. With `quantizes`, plain ones become fp8. All else gets memory at once."""
    if device.type == "cpu":
        with torch.device("meta"):
            for experts in [layer for layer in module.modules() if isinstance(layer, Experts)]:
                experts.divide()
    for layer in module.modules():
        if isinstance(layer, MatrixLayer):
            layer.keep(device, quantizes, holding)
    module.to_empty(device=device)
