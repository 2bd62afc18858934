"""From the tensors that a checkpoint holds to the tensors that a decoder's layers ask for: other names, and
tensors that hold several matrices, such as all experts of a layer. An architecture's file says which
(Architecture.tensors). Parts are views. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shoal.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from shoal.model_config import ModelConfig

LAYER = re.compile(r"(model\.layers\.[0-9]{1,9}\.)(.+)")
# Tensors of quantized matrices (models/layouts/): AWQ's and GPTQ's, whose columns are the outputs, and the
# groups of inputs, which all parts share.
BY_COLUMNS, WHOLE = ("qweight", "qzeros", "scales"), ("g_idx", "weight_g_idx")
# ends of names of a tensor of all experts' fp8 scales -> what a matrix of its own calls them
FP8_SCALES = {"_scale_inv": ".weight_scale_inv", "_activation_scale": ".activation_scale"}
EXPERT = "{}"  # in names: an expert's number


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor of a checkpoint that holds all of `parts`, along its outputs. Where their names have an
    expert's number, its first dimension is the experts."""

    parts: tuple[str, ...]
    interleaved: bool = False  # the rows of the parts alternate; else they follow one another
    transposed: bool = False  # a matrix in plain numbers is [inputs, outputs]
    # From a config to the number of inputs, where some checkpoints are transposed and others are not: a
    # matrix with this number of columns is not. None: all are alike.
    inputs: Callable[[ModelConfig], int] | None = None
    # From a config to the number of runs in which the rows lie, and the shares of the parts in a run. None:
    # one run of equal parts.
    runs: Callable[[ModelConfig], tuple[int, tuple[int, ...]]] | None = None


def query_key_value(config: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """The runs of a tensor of q, k and v, of as many rows as they have heads."""
    attention = config.attention
    return 1, (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor of a checkpoint with one row, which is a vector of this name."""

    name: str


Stored = str | Stack | Row  # how a checkpoint has a tensor; a name alone: as the decoder does


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor for the decoder. `take` gets it out of the checkpoint's."""

    name: str
    shape: tuple[int, ...]
    take: Callable[[torch.Tensor], torch.Tensor]
    is_turned: bool = False  # its rows are the tensor's columns
    run: int = 0  # rows that lie side by side in a tensor of several matrices


def split(
    name: str, shape: tuple[int, ...], stored: Mapping[str, Stored], config: ModelConfig
) -> Iterator[Part]:
    """Returns the decoder's tensors that a checkpoint's tensor holds. Raises CheckpointError for a shape that
    has no room for them."""
    layer = LAYER.fullmatch(name)
    for own, target in stored.items() if layer is not None else ():
        assert layer is not None
        pattern = re.escape(own).replace(re.escape(EXPERT), "([0-9]{1,9})")
        separators = "[._]" if isinstance(target, Stack) else "[.]"  # gate_up_proj_bias
        found = re.fullmatch(rf"{pattern}({separators}.+)?", layer[2])
        if found is None:
            continue
        *experts, suffix = found.groups()
        if isinstance(target, Stack):
            runs = (1, (1,) * len(target.parts)) if target.runs is None else target.runs(config)
            suffix = FP8_SCALES.get(suffix, suffix or ".weight")
            if target.inputs is not None and shape[-1:] == (_columns(target.inputs(config), suffix, config),):
                target = replace(target, transposed=False)
            yield from _parts(name, shape, target, runs, layer[1], suffix[1:], config)
        elif isinstance(target, Row):
            yield Part(f"{layer[1]}{target.name}", shape[1:], lambda tensor: tensor[0])
        else:
            yield Part(f"{layer[1]}{target.format(*experts)}{suffix or ''}", shape, lambda tensor: tensor)
        return
    yield Part(name, shape, lambda tensor: tensor)


def _columns(inputs: int, suffix: str, config: ModelConfig) -> int:
    """Returns the columns of a matrix with this number of inputs, or of its blocks' scales."""
    wide = 0 if config.quantization is None else config.quantization.block[1]
    return -(-inputs // wide) if wide and suffix == ".weight_scale_inv" else inputs


def _one_scale_an_expert(
    count: int, of_all: bool, stack: Stack, layer: str, parameter: str
) -> Iterator[Part]:
    """`of_all`: one number is the scale of every expert."""
    for expert in range(count):

        def take(tensor: torch.Tensor, expert: int = expert) -> torch.Tensor:
            return (tensor if of_all else tensor[expert]).reshape(1)

        for part in stack.parts:
            yield Part(f"{layer}{part.format(expert)}.{parameter}", (1,), take)


def _parts(
    name: str,
    shape: tuple[int, ...],
    stack: Stack,
    runs: tuple[int, tuple[int, ...]],
    layer: str,
    parameter: str,
    config: ModelConfig,
) -> Iterator[Part]:
    count, shares = runs
    by_expert, common = EXPERT in stack.parts[0], math.gcd(*shares)
    shares = tuple(share // common for share in shares)
    total, turned = sum(shares), stack.transposed and parameter in ("weight", "weight_scale_inv")
    outs = int(by_expert) + int(turned)  # the dimension of outputs
    if parameter in BY_COLUMNS and not by_expert:  # gpt-oss' experts have scales, too
        outs = len(shape) - 1
    is_scale = parameter.endswith(("scale", "scale_inv", "scale_2"))
    if not by_expert and (parameter in WHOLE or (shape == (1,) and is_scale)):
        for part in stack.parts:
            yield Part(f"{layer}{part}.{parameter}", shape, lambda tensor: tensor)
        return
    in_blocks = config.quantization is not None and config.quantization.block[1] > 0
    if by_expert and is_scale and not in_blocks and math.prod(shape[1:]) == 1:
        of_all = len(shape) == 1 and shape[0] == 1
        num_experts = config.experts.num_experts if of_all and config.experts is not None else shape[0]
        yield from _one_scale_an_expert(num_experts, of_all, stack, layer, parameter)
        return
    if parameter == "weight_shape":  # holds the numbers of outputs and inputs
        for part, share in zip(stack.parts, shares):

            def scaled(tensor: torch.Tensor, share: int = share) -> torch.Tensor:
                sizes = tensor.clone()
                sizes[0] = sizes[0] * share // total
                return sizes

            yield Part(f"{layer}{part}.{parameter}", shape, scaled)
        return
    if len(shape) <= outs or shape[outs] % (count * total):
        raise CheckpointError(
            f"{name} has shape {list(shape)}, which does not hold {count * total} equal parts in dimension "
            f"{outs}; is it another model's file?"
        )
    if stack.interleaved:
        count = shape[outs] // total
    unit, dim = shape[outs] // (count * total), outs - int(by_expert)

    def rows_of_runs(rows: slice) -> list[int]:
        starts = range(0, shape[outs], unit * total)
        return [start + row for start in starts for row in range(rows.start, rows.stop)]

    for expert in range(shape[0]) if by_expert else (None,):
        for i, part in enumerate(stack.parts):
            own, start = list(shape[int(by_expert) :]), unit * sum(shares[:i])
            own[dim] = count * unit * shares[i]
            if turned:
                own = own[::-1]
            rows = slice(start, start + unit * shares[i])

            def take(tensor: torch.Tensor, expert: int | None = expert, rows: slice = rows) -> torch.Tensor:
                matrix = tensor if expert is None else tensor[expert]
                if dim == 0:  # packed matrices can be cut by rows alone
                    matrix = matrix[rows] if count == 1 else matrix[rows_of_runs(rows)]
                elif count == 1:
                    matrix = matrix[:, rows]
                else:
                    in_runs = matrix.unflatten(dim, (count, -1)).movedim(dim + 1, 0)[rows]
                    matrix = in_runs.movedim(0, dim + 1).flatten(dim, dim + 1)
                return matrix.T if turned else matrix

            yield Part(
                f"{layer}{part.format(expert)}.{parameter}", tuple(own), take, turned, unit * shares[i]
            )
