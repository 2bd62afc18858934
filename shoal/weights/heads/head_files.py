"""`HeadFiles`: the files of a draft head, of any kind, and how its tensors reach the module. Only the module
needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shoal.errors import CheckpointError
from shoal.model_config import ModelConfig

if TYPE_CHECKING:
    from shoal.attention.backend import Backends
    from shoal.kernels.ops import Ops
    from shoal.layers.loading import Loaded
    from shoal.layers.matrix import Holding
    from shoal.layers.parallel import TensorParallel
    from shoal.models.decoder import Decoder
    from shoal.models.heads.head import DraftHead


class HeadFiles(Protocol):
    """Parts are read on first use, which raises CheckpointError."""

    @property
    def path(self) -> Path:
        """The file or the folder, as errors name it."""
        ...

    @property
    def decoder(self) -> ModelConfig:
        """The head's layers, and the sizes and norms of all of it."""
        ...

    @property
    def num_drafts(self) -> int | None:
        """The drafts a step that its authors advise. None: not said."""
        ...

    def check(self) -> None:
        """Checks the files' headers, before anything is made for the weights. Raises CheckpointError."""
        ...

    def weight_files(self) -> list[Path]:
        """The files that hold weights, without the target's. Raises CheckpointError if a file is missing."""
        ...

    def build(
        self,
        target: Decoder,
        tp: TensorParallel,
        ops: Ops,
        backends: Backends,
        quantizes: bool = ...,
        holding: Holding = ...,
    ) -> DraftHead:
        """The head's module, without numbers. `quantizes`, `holding`: as a Decoder takes them."""
        ...

    def tensors(self) -> Iterator[tuple[str, Loaded]]:
        """Yields the tensors under the module's names."""
        ...


def load_head(head: DraftHead, files: HeadFiles, *, dummy: bool = False) -> None:
    """Fills the head with its files' tensors, or with small random ones (`dummy`). Raises CheckpointError
    that names the folder and the tensor."""
    from shoal.models.loading import checkpoint_tensors, finish, make_up

    if dummy:
        make_up(head, files.decoder, next(head.parameters()).device, seed=1)
        return
    awaited = {tensor.name: tensor for tensor in checkpoint_tensors(head, files.decoder)}
    try:
        for name, tensor in files.tensors():
            if name not in awaited:
                raise CheckpointError(f"it holds {name}, which a draft head does not have")
            awaited.pop(name).load(tensor, name)
        if awaited:
            raise CheckpointError(f"it lacks {len(awaited)} tensors, the first is {min(awaited)}")
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{files.path}: {error}") from None
    finish(head)
