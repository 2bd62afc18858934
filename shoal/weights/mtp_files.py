"""`MtpFiles`: the MTP head in a model's own folder, whose tensors are beside the text model's, quantized or
not. Only the tensors need torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import CheckpointError
from shoal.model_config import ModelConfig
from shoal.models.config_fields import ConfigFields
from shoal.models.heads.mtp_family import MtpFamily
from shoal.models.heads.mtp_registry import BY_ARCHITECTURE
from shoal.models.layouts.registry import BY_NAME as LAYOUTS
from shoal.weights.quantized import EVERY_DTYPE, folder_tensors, tensor_headers
from shoal.weights.safetensors import (
    EMBEDDING,
    HEAD,
    KV_SCALE,
    TensorHeader,
    equal_tensors,
    full_name,
    has_weights,
    safetensors_headers,
)

if TYPE_CHECKING:
    from shoal.attention.backend import Backends
    from shoal.kernels.ops import Ops
    from shoal.layers.loading import Loaded
    from shoal.layers.matrix import Holding
    from shoal.layers.parallel import TensorParallel
    from shoal.models.decoder import Decoder
    from shoal.models.heads.mtp import MtpHead

# the two ends of the vocabulary
ENDS = frozenset(name.removesuffix(".weight") for name in (EMBEDDING, HEAD))


@dataclass(frozen=True)
class MtpFiles:
    """A head that exists, but for a folder without weights."""

    folder: Path
    target: ModelConfig
    layers: ModelConfig  # the target's, with the head's layers
    family: MtpFamily

    num_drafts = 1  # a step, as vLLM has it for a head of one module

    @cached_property
    def headers(self) -> dict[str, TensorHeader]:
        """The tensors as the files have them, under the module's names; none where there are no weights."""
        if not has_weights(self.folder):
            return {}
        found = safetensors_headers(self.folder, EVERY_DTYPE, self.own_name)
        return {name: header for _, headers in found for name, header in headers.items()}

    @cached_property
    def decoder(self) -> ModelConfig:
        """The target's config with the head's layers. A quantized model's head may be in plain numbers."""
        quantization = self.layers.quantization
        if quantization is None:
            return self.layers
        suffix = f".{LAYOUTS[quantization.layout].marker}"
        is_quantized = any(name.endswith(suffix) for name in self.headers)
        return self.layers if is_quantized else replace(self.layers, quantization=None)

    @cached_property
    def own(self) -> frozenset[str]:
        """The modules that the head has for itself, as MtpHead takes them. Most files repeat the target's
        embedding and output head."""
        head = EMBEDDING if self.target.tie_word_embeddings else HEAD
        others = {EMBEDDING: EMBEDDING, HEAD: head}
        held = {end for end in ENDS if any(name.startswith(f"{end}.") for name in self.headers)}
        equal = equal_tensors(self.folder, self.own_name, others) if held else ()
        ends = {end.removeprefix("model.") for end in held if f"{end}.weight" not in equal}
        return frozenset(ends if self.family.shares_norm else ends | {"norm"})

    @cached_property
    def _prefixes(self) -> Mapping[str, str]:
        return self.family.names(self.target, len(self.layers.layers))

    def own_name(self, name: str) -> str | None:
        """The Naming of the head's tensors."""
        inner = full_name(name).removeprefix("model.")
        for prefix, target in self._prefixes.items():
            if inner.startswith(prefix):
                own = target + inner.removeprefix(prefix)
                own = own if own.startswith("lm_head.") else f"model.{own}"
                is_unread = KV_SCALE.fullmatch(own) or own.endswith(".rotary_emb.inv_freq")
                return None if is_unread else own
        return None

    def build(
        self,
        target: Decoder,
        tp: TensorParallel,
        ops: Ops,
        backends: Backends,
        quantizes: bool = False,
        holding: Holding = nullcontext,
    ) -> MtpHead:
        """The head's module."""
        from shoal.models.heads.mtp import MtpHead

        return MtpHead(self.decoder, target, tp, ops, backends, self.own, quantizes, holding)

    def check(self) -> None:
        """Raises CheckpointError unless the files hold the tensors of the head, and no others of it."""
        from shoal.models.shapes import mtp_shapes

        found = tensor_headers(self.folder, self.decoder, self._read_name)
        for name, shape in mtp_shapes(self.decoder, self.own):
            if name not in found:
                raise CheckpointError(f"{self.folder}: its MTP head lacks {name}; is a shard missing?")
            if (own := found.pop(name).shape) != shape:
                raise CheckpointError(
                    f"{self.folder}: {name} of its MTP head has shape {list(own)}, but the config asks for "
                    f"{list(shape)}"
                )
        if found:
            raise CheckpointError(f"{self.folder}: its MTP head holds {min(found)}, which such a head lacks")

    def difference(self, other: MtpFiles) -> str | None:
        """Returns why the tensors of `other` have no place in a module that was built for these files. None:
        they have."""
        if (self.decoder.layers, self.decoder.quantization) != (
            other.decoder.layers,
            other.decoder.quantization,
        ):
            return "its MTP head has other layers than the engine's"
        if self.own != other.own:
            return "its MTP head and the engine's do not have the same ends of the vocabulary for themselves"
        return None

    def weight_files(self) -> list[Path]:
        """Files in addition to the target's, which hold the head."""
        return []

    def tensors(self) -> Iterator[tuple[str, Loaded]]:
        """Yields the tensors under the module's names."""
        yield from folder_tensors(self.folder, self.decoder, self._read_name)

    def _read_name(self, name: str) -> str | None:
        """The Naming of the tensors that are not the target's again."""
        own = self.own_name(name)
        if own is None or any(own.startswith(f"{end}.") for end in self._shared):
            return None
        return own

    @property
    def _shared(self) -> set[str]:
        return {end for end in ENDS if end.removeprefix("model.") not in self.own}


def find_mtp(folder: Path, config: ModelConfig, fields: ConfigFields) -> MtpFiles | None:
    """Returns the MTP head in the folder of this config. None: it has none, or one of another kind than Shoal
    reads. A folder without weights has one if its family has. Raises CheckpointError for a head that is not
    supported."""
    family = BY_ARCHITECTURE.get(config.architecture)
    if family is None:
        return None
    layers = family.layers(config, fields)
    files = MtpFiles(folder, config, replace(config, layers=layers), family)
    if has_weights(folder) and not files.headers:
        return None
    if config.num_draft_layers > 1:
        raise CheckpointError(
            f"{fields.where}: num_nextn_predict_layers must be 1 for method 'mtp', got "
            f"{config.num_draft_layers}; choose another method, or leave speculative_config out: answers are "
            "the same"
        )
    return files
