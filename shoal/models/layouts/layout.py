"""Layout: how one kind of checkpoint stores a matrix in fewer bits, as several tensors under one name.

A layout reads its part of config.json, says which tensors make up a matrix, and joins them. Adding one is a
file like these and a line in registry.py. No torch: `join` imports what it needs when the first matrix comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import CheckpointError
from shoal.kinds.quantization import Quantization
from shoal.models.configs.fields import ConfigFields

if TYPE_CHECKING:
    import torch

    from shoal.kernels.quant.quantized_tensor import QuantizedTensor

HALVES = ("F16", "BF16", "F32")  # the types of scales


class Stored(NamedTuple):
    """A tensor of a matrix: its shape and what its numbers may be, by safetensors' names."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


ONE = Stored((1,), ("F32",))
# Names of the scale of a matrix's input. It is not used: activations are scaled token by token, or stay in
# 16 bits or more.
INPUT_SCALES = ("input_scale", "activation_scale", "input_global_scale")


@dataclass(frozen=True)
class Layout:
    name: str
    quant_method: str  # as config.json names it
    marker: str  # a matrix is stored so if there is a tensor `<its name>.<marker>`
    # From the quantization_config to what it says of this layout. None: no matrix is in this layout. Raises
    # CheckpointError for what is contradictory or not supported.
    read: Callable[[ConfigFields], Quantization | None]
    # From the shapes of the tensors that are there, by suffix, to the matrix's [outs, inputs].
    matrix_shape: Callable[[Mapping[str, tuple[int, ...]]], tuple[int, int]]
    # The tensors of such a matrix, by suffix.
    tensors: Callable[[int, int, Quantization], dict[str, Stored]]
    join: Callable[[Mapping[str, torch.Tensor], Quantization], QuantizedTensor]
    # From the matrix's [outs, inputs] to one of zeros on a device. None: its numbers decide how a matrix is
    # stored in an engine's memory, so one of zeros would be stored in another way.
    zeros: Callable[[int, int, Quantization, torch.device], QuantizedTensor] | None = None
    experts_only: bool = False  # all other matrices are plain
    is_fp8: bool = False  # GPUs before Ada have no matmuls of it
    unread: tuple[str, ...] = ()  # suffixes of further tensors that a matrix may have


def joined(found: Iterable[Quantization]) -> Quantization | None:
    """Returns the first of these with the others, each once; None for none."""
    every = [*dict.fromkeys(replace(own, others=()) for one in found for own in one.every)]
    return replace(every[0], others=tuple(every[1:])) if every else None


def made_up(
    layout: Layout,
    quantization: Quantization,
    outs: int,
    inputs: int,
    device: torch.device,
    generator: torch.Generator,
) -> QuantizedTensor:
    """A matrix of random numbers, small and finite, as the layout stores it."""
    import torch

    def numbers(name: str, stored: Stored) -> torch.Tensor:
        kind, shape = stored.dtypes[0], stored.shape
        if name.endswith("g_idx"):
            groups = torch.arange(inputs, dtype=torch.int32, device=device) // (
                quantization.block[1] or inputs
            )
            return groups.flip(0) if quantization.act_order else groups
        if name == "weight_shape":
            return torch.tensor([outs, inputs])
        if kind in HALVES:
            scales = torch.empty(shape, dtype=torch.float32, device=device)
            return scales.uniform_(0.0, 0.002, generator=generator)
        if name == "qzeros" and quantization.bits == 8:
            return (
                torch.full(shape, 128 - quantization.zeros_minus_one, dtype=torch.int32, device=device)
                * 0x01010101
            )
        if kind == "I32":
            return torch.randint(
                -(1 << 31), 1 << 31, shape, dtype=torch.int32, device=device, generator=generator
            )
        if kind == "I8":
            return torch.randint(-128, 128, shape, dtype=torch.int8, device=device, generator=generator)
        if kind == "F8_E4M3":
            plain = torch.empty(shape, dtype=torch.float32, device=device)
            return plain.uniform_(-20.0, 20.0, generator=generator).to(torch.float8_e4m3fn)
        # exponents of mxfp4 and mxfp8 around 2^-8
        low, high = (116, 121) if name in ("weight_scale", "scales") else (0, 256)
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)

    stored = layout.tensors(outs, inputs, quantization)
    return layout.join({name: numbers(name, one) for name, one in stored.items()}, quantization)


def choice(fields: ConfigFields, key: str, allowed: tuple[object, ...]) -> object:
    """A value that is one of `allowed`. Raises CheckpointError that names both."""
    value = fields.get(key)
    if not any(value is one or (value == one and type(value) is type(one)) for one in allowed):
        shown = ", ".join(repr(one) for one in allowed)
        raise CheckpointError(f"{fields.where}: {key} {value!r:.80} is not supported; these are: {shown}")
    return value


def group_size(fields: ConfigFields) -> int:
    """Inputs that share a scale; 0 for -1, all of them."""
    return 0 if fields.get("group_size") == -1 else fields.count("group_size")


def num_groups(inputs: int, size: int) -> int:
    """Raises CheckpointError if the inputs are not whole groups."""
    size = size or inputs
    if inputs % size:
        raise CheckpointError(f"{inputs} inputs are not whole groups of {size}, the group_size")
    return inputs // size


def num_groups_or_parts(inputs: int, size: int) -> int:
    """Returns the number of groups, of which the last one may be cut short."""
    return -(-inputs // (size or inputs))


def of_whole_groups(numbers_OG: torch.Tensor, inputs: int, size: int) -> torch.Tensor:
    """Returns the numbers (scales or zero points) of smaller groups, all of one size, in place of groups of
    `size` inputs whose last one may be cut short."""
    if not size or inputs % size == 0:
        return numbers_OG
    whole = math.gcd(inputs, size)
    return numbers_OG.repeat_interleave(size // whole, dim=1)[:, : inputs // whole]


def unpack(words: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """The eight 4-bit numbers of each int32, which lie side by side along `dim`: uint8. Number `order[i]`
    has bits 4 i and up."""
    import torch

    numbers: list[torch.Tensor] = [words] * 8
    for i, place in enumerate(order):
        numbers[place] = ((words >> (4 * i)) & 15).to(torch.uint8)
    return torch.stack(numbers, dim=dim + 1).flatten(dim, dim + 1)
