"""`MtpFiles`: the MTP head in a model's own folder or GGUF file, or in a GGUF file of its own, quantized or
not. Of several blocks the first is read, which drafts all tokens. Only the tensors need torch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import CheckpointError
from shoal.model_config import ModelConfig
from shoal.models.configs.fields import ConfigFields
from shoal.models.heads.mtp_family import HeadNames, MtpFamily
from shoal.models.heads.mtp_registry import BY_ARCHITECTURE
from shoal.models.layouts.registry import BY_NAME as LAYOUTS
from shoal.weights.gguf.header import GGUFHeader
from shoal.weights.heads.head_tensors import HeadTensors, InFolder, InGGUF
from shoal.weights.safetensors import EMBEDDING, HEAD, KV_SCALE, full_name

if TYPE_CHECKING:
    from shoal.attention.backend import Backends
    from shoal.kernels.ops import Ops
    from shoal.layers.loading import Loaded
    from shoal.layers.matrix import Holding
    from shoal.layers.parallel import TensorParallel
    from shoal.models.decoder import Decoder
    from shoal.models.heads.mtp import MtpHead

logger = logging.getLogger(__name__)

# the two ends of the vocabulary
NORM = "model.norm.weight"
ENDS = frozenset(name.removesuffix(".weight") for name in (EMBEDDING, HEAD))


@dataclass(frozen=True)
class MtpFiles:
    """A head that exists, but for a folder without weights."""

    stored: HeadTensors
    target: ModelConfig
    layers: ModelConfig  # the target's, with the head's layers
    family: MtpFamily
    head_names: HeadNames  # the family's for such files
    is_apart: bool = False  # in a file of its own

    num_drafts = 1  # a step, as vLLM has it for a head of one module

    @property
    def path(self) -> Path:
        return self.stored.path

    @cached_property
    def names(self) -> Collection[str]:
        """The tensors as the files have them, under the module's names; none where there are no weights."""
        return self.stored.names(self.layers, self.own_name) if self.stored.is_there else ()

    @cached_property
    def decoder(self) -> ModelConfig:
        """The target's config with the head's layers. A quantized model's head may be in plain numbers."""
        quantization = self.layers.quantization
        if quantization is None:
            return self.layers
        markers = tuple(f".{LAYOUTS[own.layout].marker}" for own in quantization.every)
        is_quantized = any(name.endswith(markers) for name in self.names)
        return self.layers if is_quantized else replace(self.layers, quantization=None)

    @cached_property
    def own(self) -> frozenset[str]:
        """The modules that the head has for itself, as MtpHead takes them. Most files repeat the target's
        embedding and output head. GGUF files may lack the last norm, which is then the target's (llama.cpp's
        rule)."""
        head = EMBEDDING if self.target.tie_word_embeddings else HEAD
        others = {EMBEDDING: EMBEDDING, HEAD: head}
        held = {end for end in ENDS if any(name.startswith(f"{end}.") for name in self.names)}
        equal = self.stored.equal(self.own_name, others) if held else ()
        ends = {end.removeprefix("model.") for end in held if f"{end}.weight" not in equal}
        lacks_norm = isinstance(self.stored, InGGUF) and NORM not in self.names
        return frozenset(ends if self.family.shares_norm or lacks_norm else ends | {"norm"})

    @cached_property
    def _prefixes(self) -> Mapping[str, str]:
        return self.head_names(self.target, len(self.layers.layers))

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

        if (count := self.target.num_draft_layers) > 1:
            logger.info("%s: the first of %d MTP blocks drafts, the others are left out", self.path, count)
        found = self.stored.shapes(self.decoder, self._read_name)
        for name, shape in mtp_shapes(self.decoder, self.own):
            if name not in found:
                raise CheckpointError(f"{self.path}: its MTP head lacks {name}; is a shard missing?")
            if (own := found.pop(name)) != shape:
                raise CheckpointError(
                    f"{self.path}: {name} of its MTP head has shape {list(own)}, but the config asks for "
                    f"{list(shape)}"
                )
        if found:
            raise CheckpointError(f"{self.path}: its MTP head holds {min(found)}, which such a head lacks")

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
        return [self.path] if self.is_apart else []

    def tensors(self) -> Iterator[tuple[str, Loaded]]:
        """Yields the tensors under the module's names."""
        yield from self.stored.tensors(self.decoder, self._read_name)

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
    return None if family is None else _found(InFolder(folder), config, fields, family, family.names)


def find_gguf_mtp(header: GGUFHeader, config: ModelConfig) -> MtpFiles | None:
    """Returns the MTP head in this GGUF file. None: the file has none. Raises CheckpointError for a head that
    is not supported."""
    if not config.num_draft_layers:
        return None
    family = BY_ARCHITECTURE.get(config.architecture)
    if family is None or family.gguf_names is None:
        raise CheckpointError(
            f"{header.path}: nextn_predict_layers must be 0 for method 'mtp', got {config.num_draft_layers}: "
            f"the heads of {header.metadata['general.architecture']} files are not read; choose another "
            "method, or leave speculative_config out: answers are the same"
        )
    fields = ConfigFields({}, str(header.path))
    return _found(InGGUF(header), config, fields, family, family.gguf_names)


def find_apart(header: GGUFHeader, target: GGUFHeader, config: ModelConfig) -> MtpFiles:
    """Returns the MTP head in a GGUF file of its own, for the model of this config in the file `target`.
    Raises CheckpointError if the file has none, or one of another model."""
    path, architecture = header.path, target.metadata["general.architecture"]
    found = header.metadata.get("general.architecture")
    if found != architecture:
        raise CheckpointError(
            f"{path}: general.architecture of an MTP head must be {architecture!r}, as {target.path} has it, "
            f"got {found!r:.80}; give the head of this model"
        )
    given = ConfigFields(
        {key.removeprefix(f"{architecture}."): value for key, value in header.metadata.items()}, str(path)
    )
    count = given.count("nextn_predict_layers", 0, least=0)
    num_layers, size = given.count("block_count") - count, given.count("embedding_length")
    files = find_gguf_mtp(header, replace(config, num_draft_layers=count))
    if files is None:
        raise CheckpointError(f"{path} holds no MTP head; give another file as speculative_config.model")
    if (num_layers, size) != (config.num_layers, config.hidden_size):
        raise CheckpointError(
            f"{path}: its MTP head was made for {num_layers} layers of size {size}, and {target.path} has "
            f"{config.num_layers} of {config.hidden_size}; give the head of this model"
        )
    return replace(files, is_apart=True)


def _found(
    stored: HeadTensors, config: ModelConfig, fields: ConfigFields, family: MtpFamily, names: HeadNames
) -> MtpFiles | None:
    layers = family.layers(config, fields)
    files = MtpFiles(stored, config, replace(config, layers=layers), family, names)
    if stored.is_there and not files.names:
        return None
    if config.num_draft_layers > 1 and not family.reads_first:
        raise CheckpointError(
            f"{fields.where}: num_nextn_predict_layers must be 1 for method 'mtp' with this architecture, "
            f"got {config.num_draft_layers}; choose another method, or leave speculative_config out: answers "
            "are the same"
        )
    return files
