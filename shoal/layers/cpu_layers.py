"""All layers of a dense decoder as one C call, for float32 on packed weights.

It must equal the models' path, which calls one op after the other. Python's way into C for each op takes, at
one stream of a small model, half as long as the arithmetic.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from shoal.attention.step_input import StepInput
from shoal.kernels.cpu import build as cpu_build
from shoal.kernels.cpu.linear import CpuWeight
from shoal.kernels.layer_cache import LayerCache


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer. Norms and biases are float32."""

    qkv: CpuWeight
    o: CpuWeight
    gate_up: CpuWeight
    down: CpuWeight
    qkv_bias: torch.Tensor | None
    o_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    # norms of what is added to the residual; None: it is added as it is
    after_attention: torch.Tensor | None = None
    after_mlp: torch.Tensor | None = None


class CpuLayers:
    """The layers of one model, ready to be run. It holds the weights that its structs point to."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        num_heads: int,
        eps: float,
        scale: float,
        activation: str = "silu",
    ) -> None:
        library = cpu_build.load()
        assert library is not None  # Without the library there is no CpuWeight.
        self._run = library.shoal_layers
        self._layers, self._num_heads, self._eps, self._scale = tuple(layers), num_heads, eps, scale
        self._activation = cpu_build.ACTIVATIONS[activation]
        self._described: tuple[object, ...] = (None, None, None)  # the structs were filled in from these
        self._structs: ctypes.Array[cpu_build.Layer] = (cpu_build.Layer * 0)()
        first = layers[0]
        self._scratch_floats = (
            first.qkv.header.outs + first.o.header.cols + first.gate_up.header.outs + first.down.header.cols
        )

    def _describe(
        self, caches: Sequence[LayerCache], tables: Sequence[torch.Tensor], ropes: Sequence[torch.Tensor]
    ) -> None:
        """Fills in the structs of layers that have these caches, block tables and rope tables, which are the
        same in all steps."""
        names = [field.name for field in fields(LayerWeights)]
        first = caches[0].blocks
        for cache in caches:  # the C call takes these from the first layer
            assert (cache.blocks.shape, cache.blocks.stride()) == (first.shape, first.stride())
            assert tables[cache.table].stride() == tables[0].stride()
        self._described = caches, tables, ropes
        self._structs = (cpu_build.Layer * len(caches))(
            *(
                cpu_build.Layer(
                    *(_address(getattr(weights, name)) for name in names),
                    _address(cos_sin),
                    cache.blocks.data_ptr(),
                    _address(cache.scales_2G),
                    tables[cache.table].data_ptr(),
                    cache.c_window,
                )
                for weights, cache, cos_sin in zip(self._layers, caches, ropes, strict=True)
            )
        )

    def __call__(
        self,
        residual_TD: torch.Tensor,
        step: StepInput,
        caches: Sequence[LayerCache],
        ropes: Sequence[torch.Tensor],
    ) -> torch.Tensor | None:
        """Runs all layers. `residual_TD` holds the embeddings, and all results but the last layer's are added
        to it in place. That last result is returned, for the final norm to add; if it was normed, it is
        added, too. `ropes`: each layer's rope table. Raises MemoryError."""
        if any(a is not b for a, b in zip((caches, step.block_tables, ropes), self._described)):
            self._describe(caches, step.block_tables, ropes)
        tokens = residual_TD.shape[0]
        x_TD = torch.empty_like(residual_TD)
        scratch = torch.empty(tokens * self._scratch_floats, dtype=torch.float32)
        assert residual_TD.is_contiguous() and residual_TD.dtype == torch.float32
        assert step.positions_T.dtype == step.rows_T.dtype == torch.int32
        cache = cpu_build.describe_cache(caches[0], step.block_tables[caches[0].table], self._num_heads)
        sequences = cpu_build.describe_sequences(
            step.rows_S, step.query_starts_S, step.kv_lens_S, step.max_kv_len
        )
        described = cpu_build.Tokens(
            step.positions_T.data_ptr(),
            step.rows_T.data_ptr(),
            tokens,
            self._activation,
            self._eps,
            self._scale,
        )
        if self._run(
            ctypes.addressof(self._structs),
            len(self._layers),
            ctypes.addressof(cache),
            ctypes.addressof(sequences),
            ctypes.addressof(described),
            residual_TD.data_ptr(),
            x_TD.data_ptr(),
            scratch.data_ptr(),
        ):
            raise MemoryError(f"no memory for a step of {tokens} tokens")
        return x_TD if self._layers[-1].after_mlp is None else None


def _address(value: CpuWeight | torch.Tensor | None) -> int | None:
    if isinstance(value, torch.Tensor):
        assert value.dtype == torch.float32 and value.is_contiguous()
        return value.data_ptr()
    return None if value is None else value.address
