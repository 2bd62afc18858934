"""The tensors that a trainer sends, under the decoder's names. A trainer has the names of checkpoints, or of
transformers' parameters. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoal.errors import CheckpointError
from shoal.model_config import ModelConfig
from shoal.models.checkpoint_names import Part, split
from shoal.models.registry import BY_NAME
from shoal.weights.safetensors import text_name

if TYPE_CHECKING:
    import torch


def trainer_parts(name: str, shape: tuple[int, ...], config: ModelConfig) -> Iterator[Part]:
    """Yields the decoder's tensors that a trainer's tensor holds: none if it belongs to another part of a
    multimodal model than the text model. Raises CheckpointError for a shape that has no room for them."""
    if (own := text_name(name)) is None:
        return
    for part in split(own, shape, BY_NAME[config.architecture].tensors, config):
        layer, is_fused, projection = part.name.rpartition(".experts.")
        if is_fused and len(part.shape) == 3 and projection in ("gate_up_proj", "down_proj"):
            yield from _experts(part, f"{layer}.experts", projection)
        else:
            yield part


def _experts(part: Part, path: str, projection: str) -> Iterator[Part]:
    """transformers 5 holds the experts of a layer in two tensors, gate_up_proj [E, 2F, D] and down_proj
    [E, D, F]. In a checkpoint each expert has three, which are views here."""
    num_experts, rows, inputs = part.shape
    names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    if rows % len(names):
        raise CheckpointError(
            f"{part.name} has {rows} rows, so gate and up differ in size; send as many rows of each"
        )
    size = rows // len(names)
    for expert in range(num_experts):
        for i, name in enumerate(names):

            def take(tensor: torch.Tensor, expert: int = expert, start: int = i * size) -> torch.Tensor:
                return part.take(tensor)[expert, start : start + size]

            yield Part(f"{path}.{expert}.{name}.weight", (size, inputs), take)
