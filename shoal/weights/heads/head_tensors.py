"""`HeadTensors`: the tensors of a draft head in its model's own files: `InFolder`, next to the text model's,
or `InGGUF`, after the model's last layer. Only the tensors need torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shoal.model_config import ModelConfig
from shoal.weights.gguf.header import GGUFHeader
from shoal.weights.quantized import EVERY_DTYPE, folder_tensors, tensor_headers
from shoal.weights.safetensors import Naming, are_equal, equal_tensors, has_weights, safetensors_headers

if TYPE_CHECKING:
    from shoal.layers.loading import Loaded


class HeadTensors(Protocol):
    """A `naming` goes from a name in the checkpoint to the module's, None for a tensor that is not the
    head's. All methods raise CheckpointError."""

    @property
    def path(self) -> Path:
        """The file or the folder, as errors name it."""
        ...

    @property
    def is_there(self) -> bool:
        """False for a folder without weights."""
        ...

    def names(self, config: ModelConfig, naming: Naming) -> Collection[str]:
        """The tensors as the files have them."""
        ...

    def shapes(self, config: ModelConfig, naming: Naming) -> dict[str, tuple[int, ...]]:
        """The tensors as the head's module has them, a quantized matrix as one."""
        ...

    def equal(self, naming: Naming, others: Mapping[str, str]) -> Collection[str]:
        """The tensors, from `others`, that have the same bytes as the text model's tensor named there."""
        ...

    def tensors(self, config: ModelConfig, naming: Naming) -> Iterator[tuple[str, Loaded]]:
        """Yields the tensors of `shapes`."""
        ...


@dataclass(frozen=True)
class InFolder:
    path: Path

    @property
    def is_there(self) -> bool:
        return has_weights(self.path)

    def names(self, config: ModelConfig, naming: Naming) -> Collection[str]:
        found = safetensors_headers(self.path, EVERY_DTYPE, naming)
        return {name for _, headers in found for name in headers}

    def shapes(self, config: ModelConfig, naming: Naming) -> dict[str, tuple[int, ...]]:
        headers = tensor_headers(self.path, config, naming)
        return {name: header.shape for name, header in headers.items()}

    def equal(self, naming: Naming, others: Mapping[str, str]) -> Collection[str]:
        return equal_tensors(self.path, naming, others)

    def tensors(self, config: ModelConfig, naming: Naming) -> Iterator[tuple[str, Loaded]]:
        return folder_tensors(self.path, config, naming)


@dataclass(frozen=True)
class InGGUF:
    header: GGUFHeader
    is_there = True

    @property
    def path(self) -> Path:
        return self.header.path

    def names(self, config: ModelConfig, naming: Naming) -> Collection[str]:
        return self.shapes(config, naming)

    def shapes(self, config: ModelConfig, naming: Naming) -> dict[str, tuple[int, ...]]:
        from shoal.weights.gguf.tensors import gguf_shapes

        return gguf_shapes(self.header, config, naming)

    def equal(self, naming: Naming, others: Mapping[str, str]) -> Collection[str]:
        from shoal.weights.gguf.tensors import stored_tensors

        stored = dict(stored_tensors(self.header))
        own = {target: info for name, info in stored.items() if (target := naming(name)) is not None}
        return {
            name
            for name, other in others.items()
            if name in own
            and other in stored
            and own[name].kind == stored[other].kind
            and are_equal(own[name].span(self.path), stored[other].span(self.path))
        }

    def tensors(self, config: ModelConfig, naming: Naming) -> Iterator[tuple[str, Loaded]]:
        from shoal.weights.gguf.tensors import gguf_tensors

        return gguf_tensors(self.header, config, naming)
