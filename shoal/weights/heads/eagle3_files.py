"""`Eagle3Files`: the checkpoint of an EAGLE-3 head, a folder or a model of the hub. Only the tensors need
torch."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import CheckpointError
from shoal.files.json_file import read_object
from shoal.model_config import ModelConfig
from shoal.models.heads.eagle3_config import Eagle3Config, read_eagle3
from shoal.weights import hub
from shoal.weights.hub_names import hub_model
from shoal.weights.safetensors import DTYPES, has_weights, safetensors_headers, safetensors_tensors, shards

if TYPE_CHECKING:
    import torch

    from shoal.attention.backend import Backends
    from shoal.kernels.ops import Ops
    from shoal.layers.matrix import Holding
    from shoal.layers.parallel import TensorParallel
    from shoal.models.decoder import Decoder
    from shoal.models.heads.eagle3 import Eagle3Head

HEAD_DTYPES = DTYPES | {"I64": 8, "I32": 4, "BOOL": 1}
PICKLED = "pytorch_model.bin"  # the first published heads are in this form alone
IDS, EMBEDDING = "model.d2t", "model.embed_tokens.weight"
UNREAD = ("model.t2d",)  # which of the target's tokens are drafted: it follows from IDS


@dataclass(frozen=True)
class Eagle3Files:
    """A folder that exists. Its parts are read on first use, which raises CheckpointError."""

    folder: Path

    @cached_property
    def config(self) -> Eagle3Config:
        path = self.folder / "config.json"
        if not path.exists():
            raise CheckpointError(f"{self.folder} holds no config.json; it is not the folder of a draft head")
        return read_eagle3(read_object(path), str(path))

    @cached_property
    def names(self) -> frozenset[str]:
        """The tensors, under the module's names; none where there are no weights."""
        if has_weights(self.folder):
            headers = safetensors_headers(self.folder, HEAD_DTYPES)
            return frozenset(_own_name(name) for _, tensors in headers for name in tensors)
        return frozenset(name for name, _ in self._pickled())

    @property
    def path(self) -> Path:
        return self.folder

    @property
    def decoder(self) -> ModelConfig:
        """The head's layers."""
        return self.config.decoder

    @property
    def num_drafts(self) -> int | None:
        """The drafts a step that its config names."""
        return self.config.num_drafts

    def build(
        self,
        target: Decoder,
        tp: TensorParallel,
        ops: Ops,
        backends: Backends,
        quantizes: bool = False,
        holding: Holding = nullcontext,
    ) -> Eagle3Head:
        """The head's module, in plain numbers."""
        from shoal.models.heads.eagle3 import Eagle3Head

        embedding = None if EMBEDDING in self.names else target.embed_tokens
        return Eagle3Head(self.config, target.config, tp, ops, backends, embedding, has_ids=IDS in self.names)

    def check(self) -> None:
        """Does nothing: tensors that do not fit are found as they are loaded."""

    def weight_files(self) -> list[Path]:
        """The files that hold weights. Raises CheckpointError if a file is missing."""
        return sorted(shards(self.folder)) if has_weights(self.folder) else [self.folder / PICKLED]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors under the module's names."""
        if not has_weights(self.folder):
            yield from self._pickled()
            return
        for name, tensor in safetensors_tensors(self.folder, HEAD_DTYPES):
            if (own := _own_name(name)) not in UNREAD:
                yield own, tensor

    def _pickled(self) -> Iterator[tuple[str, torch.Tensor]]:
        path = self.folder / PICKLED
        if not path.exists():
            return
        import torch

        try:  # nothing but tensors is unpickled
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            tensors = {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
        except (OSError, RuntimeError, AttributeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"cannot read {path}: {error!s:.200}; fetch it again") from None
        for name, tensor in tensors.items():
            if (own := _own_name(name)) not in UNREAD:
                yield own, tensor


def _own_name(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = name.replace("midlayer.", "layers.0.", 1)
    return name if name.startswith("lm_head.") else f"model.{name}"


def resolve_eagle3(model: str, revision: str | None = None, download_dir: str | None = None) -> Eagle3Files:
    """Finds the checkpoint of a draft head: a folder, or a model of the hub, which is downloaded in this
    revision. Raises CheckpointError."""
    path = Path(model).expanduser()
    if path.is_dir():
        return Eagle3Files(path)
    if path.exists() or (on_hub := hub_model(model)) is None:
        raise CheckpointError(
            f"the draft head {model!r:.200} must be a folder or a model of the hub (org/name); name one"
        )
    found = hub.download(on_hub, revision, download_dir, is_checked=False, more_files=[PICKLED])
    return Eagle3Files(found)
