"""The matrices that make keys and values from latents, in GGUF files: keys' and values' apart, head by head.
Here they are one again, in plain numbers, as layers hold them. Older files have the whole one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from shoal.kernels.quant.quantized_tensor import QuantizedTensor

KEYS, VALUES = ".k_b_proj.weight", ".v_b_proj.weight"
WHOLE = ".kv_b_proj.weight"


def whole_name(name: str) -> str | None:
    """Returns the name of the matrix that this tensor is a part of. None: it is a tensor of its own."""
    for part in (KEYS, VALUES):
        if name.endswith(part):
            return name.removesuffix(part) + WHOLE
    return None


def whole_shape(parts: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """The shape of the matrix of these parts: keys' [heads, rank, key] and values' [heads, value, rank]."""
    (heads, rank, key), (_, value, _) = parts[KEYS], parts[VALUES]
    return heads * (key + value), rank


def suffix_of(name: str) -> str:
    return KEYS if name.endswith(KEYS) else VALUES


def joined(parts: Mapping[str, Iterable[torch.Tensor | QuantizedTensor]]) -> torch.Tensor:
    """Returns the matrix whose parts are these, head by head."""
    keys, values = (torch.stack([_plain(own) for own in parts[suffix]]) for suffix in (KEYS, VALUES))
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


def _plain(matrix: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    return matrix.dequantize() if isinstance(matrix, QuantizedTensor) else matrix.float()
