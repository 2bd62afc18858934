"""PackedExperts: the weights of all experts of a layer in fewer bits, and what a matmul takes of them."""

from __future__ import annotations

import torch

from shoal.kernels.matmul.gpu_fp8 import Fp8Weight
from shoal.kernels.matmul.loaders import TiledWeight
from shoal.kernels.matmul.mxfp4_experts import ExpertRuns
from shoal.kernels.matmul.tile_matmul import Weight

PackedExperts = TiledWeight | Fp8Weight | ExpertRuns  # the rows of all experts


def expert_matrix(weight: torch.Tensor | PackedExperts) -> Weight | ExpertRuns:
    """All experts' rows as matmuls take them."""
    return weight.matrix if isinstance(weight, Fp8Weight) else weight
