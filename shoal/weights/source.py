"""CheckpointFiles: a model from a folder, a .gguf file, a package, the Hugging Face hub, or a store,
with the files next to its weights.

This file resolves names and reads configs. safetensors.py and gguf/tensors.py read tensors. No torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shoal.config import SpeculativeConfig
from shoal.errors import CheckpointError, ConfigError, RequestError
from shoal.files.json_file import read_object
from shoal.model_config import ModelConfig
from shoal.models.config_gguf import config_from_gguf
from shoal.models.config_json import config_from_json, overridden, text_config
from shoal.models.configs.fields import ConfigFields, token_ids
from shoal.sampling_params import RENAMED_FIELDS, SamplingParams, sampling_defaults
from shoal.weights import hub, store
from shoal.weights.gguf.header import MAGIC, GGUFHeader, read_header, read_longrope, read_rope_factors
from shoal.weights.gguf.ollama import as_llama_cpp
from shoal.weights.heads.eagle3_files import resolve_eagle3
from shoal.weights.heads.head_files import HeadFiles
from shoal.weights.heads.mtp_files import MtpFiles, find_apart, find_gguf_mtp, find_mtp
from shoal.weights.hub import is_model_file
from shoal.weights.hub_names import HubModel, hub_model, library_hint
from shoal.weights.packaged_models import BY_FILE, PACKAGED
from shoal.weights.safetensors import has_head, has_own_head, has_weights, shards

logger = logging.getLogger(__name__)

TOKEN_ID = re.compile(r"[0-9]{1,9}")
WAYS = (
    "name a folder, a .gguf file, a model of the hub (org/name, org/name:Q4_K_M), a URL (s3://...), "
    f"{' or '.join(map(repr, PACKAGED))}"
)
IGNORE = ", or ignore the file with the option generation_config 'vllm'"


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint that exists. Its parts are read on first use, which raises CheckpointError for damaged or
    unsupported ones."""

    folder: Path
    file: Path | None = None  # the GGUF file, if it is one
    revision: str | None = None  # a store's model: its version, which may be outdated there
    overrides: dict[str, Any] = field(default_factory=dict, compare=False)  # fields of config.json
    head: HeadFiles | None = None  # a draft head of this model

    @property
    def kind(self) -> str:
        return "hf" if self.file is None else "gguf"

    @property
    def path(self) -> Path:
        """The GGUF file or the folder, as errors name it."""
        return self.file or self.folder

    def check(self) -> CheckpointFiles:
        """Returns itself. Raises CheckpointError for a folder without a model, and for a model that Shoal
        cannot run, before its tokenizer and its weights are read."""
        if self.file is None and not (self.folder / "config.json").exists():
            gguf = sorted(self.folder.glob("*.gguf"))
            way_out = f"name its file {gguf[0]}" if gguf else "name one, a .gguf file or a hub id"
            if (self.folder / "adapter_config.json").exists():
                way_out = "it holds an adapter (adapter_config.json): merge it into its model's weights"
            raise CheckpointError(
                f"{self.folder} holds no config.json, so it can't be a Hugging Face model; {way_out}"
            )
        _ = self.config
        return self

    def overridden(self, overrides: dict[str, Any] | None) -> CheckpointFiles:
        """Returns the files with these fields in the place of config.json's. Raises ConfigError for a GGUF
        file."""
        if not overrides:
            return self
        if self.file is not None:
            raise ConfigError(
                f"hf_overrides must be left out for {self.file}, got {overrides!r:.200}; they are fields of "
                "a config.json, and a GGUF file has none"
            )
        return replace(self, overrides=overrides)

    def with_head(
        self, options: SpeculativeConfig | None, download_dir: str | None = None
    ) -> CheckpointFiles:
        """Returns the files with the draft head of these options, if they have one. Raises CheckpointError if
        it was made for another model, and ConfigError for method 'mtp' where the model has no such head."""
        if options is None or not options.has_head:
            return self
        if options.method == "mtp":
            return self.with_own_head() if options.model is None else self._with_apart(options.model)
        assert options.model is not None
        head = resolve_eagle3(options.model, options.revision, download_dir)
        head.config.check_target(self.config, str(head.path))
        return replace(self, head=head)

    def with_own_head(self) -> CheckpointFiles:
        """Returns the files with the MTP head that they hold. Raises ConfigError if they hold none."""
        head = self.find_own_head()
        if head is None:
            raise ConfigError(
                f"speculative_config.method must not be 'mtp' for {self.path}, which holds no MTP head that "
                "is read; choose another, or leave speculative_config out: answers are the same"
            )
        return replace(self, head=head)

    def _with_apart(self, model: str) -> CheckpointFiles:
        """Returns the files with the MTP head in this GGUF file. Raises ConfigError for a model in a
        folder."""
        if self.file is None:
            raise ConfigError(
                f"speculative_config.model must be left out with method 'mtp' for {self.path}, got "
                f"{model!r:.200}; a head in a file of its own goes with a model in a .gguf file"
            )
        head = _gguf_file(Path(model).expanduser())
        return replace(self, head=find_apart(head.header, self.header, self._own_config))

    def find_own_head(self) -> MtpFiles | None:
        """Returns the checkpoint's own MTP head, or None if it has none. Raises CheckpointError for a head
        that is not supported."""
        if self.file is not None:
            return find_gguf_mtp(self.header, self._own_config)
        fields = text_config(self._fields, str(self.folder))
        return find_mtp(self.folder, self._own_config, ConfigFields(fields, str(self.folder / "config.json")))

    def following(self, head: HeadFiles | None) -> CheckpointFiles:
        """Returns the files with the draft head that an engine has under these weights if it had `head`
        before: the MTP head that they hold, or else the same one."""
        own = self.find_own_head() if isinstance(head, MtpFiles) and not head.is_apart else None
        return replace(self, head=own or head)

    @cached_property
    def header(self) -> GGUFHeader:
        """The header of a GGUF file; folders have no such header."""
        assert self.file is not None
        return as_llama_cpp(read_header(self.file))

    @cached_property
    def config(self) -> ModelConfig:
        own, head = self._own_config, self.head
        if head is None:
            return own
        return replace(own, head_layers=head.decoder.layers, head_drafts=head.num_drafts)

    @property
    def _fields(self) -> Mapping[str, Any]:
        """The content of config.json, with the overrides."""
        if not (self.folder / "config.json").exists():
            raise CheckpointError(
                f"{self.folder} holds no config.json; it is not the folder of a Hugging Face model"
            )
        config = overridden(self._read_json("config.json"), self.overrides)
        read = text_config(config, str(self.folder / "config.json"))
        if read.get("quantization_config") or read.get("compression_config"):
            return config
        stored = self._read_json("hf_quant_config.json").get("quantization")  # ModelOpt's own file
        if not isinstance(stored, dict) or stored.get("quant_algo") is None:
            return config
        return {**config, "quantization_config": {"quant_method": "modelopt", **stored}}

    @cached_property
    def _own_config(self) -> ModelConfig:
        if self.file is None:
            config = config_from_json(self._fields, str(self.folder / "config.json"))
            if self._unties(config):
                return replace(config, tie_word_embeddings=False)
            if not self._lacks_head(config):
                return config
            if "text_config" in self._fields and self._fields.get("tie_word_embeddings") is None:
                # transformers ties the head of most multimodal classes, whatever their text_config says
                return replace(config, tie_word_embeddings=True)
            logger.warning("%s has no output head (lm_head): it embeds, and does not generate", self.folder)
            # The embedding replaces the head, and its logits are never used.
            return replace(config, tie_word_embeddings=True, has_head=False)
        return config_from_gguf(
            self.metadata,
            self.header.shapes,
            str(self.file),
            read_rope_factors(self.header),
            read_longrope(self.header),
        )

    def _lacks_head(self, config: ModelConfig) -> bool:
        """Says if the files lack an output head although the config does not tie it to the embedding, as
        models for embeddings are stored."""
        if config.tie_word_embeddings or not has_weights(self.folder):
            return False
        try:
            return not has_head(self.folder)
        except CheckpointError:
            return False  # the check of all tensors reports it, where weights are wanted

    def _unties(self, config: ModelConfig) -> bool:
        """Says if the files hold an output head that differs from the embedding although the config ties
        them, as after a fine-tune or a resize. The head is used, as in transformers 5."""
        if not config.tie_word_embeddings or not has_weights(self.folder):
            return False
        try:
            differs = has_own_head(self.folder)
        except CheckpointError:
            return False  # the check of all tensors reports it, where weights are wanted
        if differs:
            logger.warning(
                "%s: config.json ties the embeddings, but lm_head differs from the embedding, and is used",
                self.folder,
            )
        return differs

    @property
    def metadata(self) -> dict[str, Any]:
        """The key-value pairs of a GGUF file, its tokenizer's included; {} for a folder."""
        if self.file is None:
            return {}
        packaged = BY_FILE.get(self.file.name)
        if packaged is None or not packaged.chat_template:
            return self.header.metadata
        return {"tokenizer.chat_template": packaged.chat_template, **self.header.metadata}

    @property
    def quantized_bytes(self) -> int | None:
        """The bytes of the tensors of a GGUF file that are read, or of all in a folder whose config says that
        they are quantized; else None. In a folder without weights, the bytes that their quants would take."""
        if self.file is not None:
            apart = self.head if isinstance(self.head, MtpFiles) and self.head.is_apart else None
            first, is_read = self.config.num_layers, self.head is not None and apart is None
            count = 0 if is_read else self.config.num_draft_layers
            unread = tuple(f"blk.{i}." for i in range(first, first + count))
            tensors = self.header.tensors.values()
            of_head = 0 if apart is None else apart.path.stat().st_size
            return of_head + sum(info.num_bytes for info in tensors if not info.name.startswith(unread))
        if self.config.quantization is None:
            return None
        if not has_weights(self.folder):
            from shoal.models.shapes import num_weights  # It imports torch.

            return num_weights(self.config) * self.config.quantization.bits // 8
        return sum(path.stat().st_size for path in shards(self.folder))

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The model's default sampling parameters; {} if it has none."""
        if self.file is None:
            found = self._read_json("generation_config.json")
            check_defaults(found, str(self.folder / "generation_config.json"))
            return found
        packaged = BY_FILE.get(self.file.name)
        return dict(packaged.generation_config) if packaged is not None else {}

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text, from all files that name some. Llama 3 has several."""
        ids = set(self.config.eos_token_ids)
        if self.file is None:
            named = self._read_json("generation_config.json").get("eos_token_id")
            ids |= set(token_ids(named, f"{self.folder / 'generation_config.json'}: eos_token_id"))
            ids |= set(_eos_of_tokenizer(self._read_json("tokenizer_config.json")))
        return tuple(sorted(ids))

    def _read_json(self, name: str) -> dict[str, Any]:
        return read_object(self.folder / name)


def resolve(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    overrides: dict[str, Any] | None = None,
    with_weights: bool = True,
) -> CheckpointFiles:
    """Finds a checkpoint. Downloads packaged models, models of the hub and URLs of stores, the last without
    .safetensors files unless `with_weights`; a path that exists on this machine is used as it is. `revision`:
    of a model of the hub, or the version of a model in a store. `overrides`: fields in place of
    config.json's, for the check of a model of the hub before its download; without weights it is not checked.
    Raises CheckpointError, and ConfigError for a revision of a packaged model."""
    if not model:
        raise CheckpointError(f"the model's name is empty; {WAYS}")
    on_hub = hub_model(model)
    if on_hub is None and store.is_url(model):
        copy = store.download(model, is_model_file, revision, download_dir, with_weights=with_weights)
        return replace(_found(copy.path), revision=copy.version)
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return CheckpointFiles(path)
        if path.exists():
            return _gguf_file(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~user of a user that does not exist
        raise CheckpointError(f"the model path {model!r:.200} cannot be read: {error!s:.200}") from None
    if (packaged := PACKAGED.get(model)) is not None:
        if revision is not None:
            raise ConfigError(f"revision {revision!r}: {model} has one version; leave --revision out")
        return _gguf_file(packaged.download())
    if on_hub is not None:
        return _found(hub.download(on_hub, revision, download_dir, overrides, is_checked=with_weights))
    if hint := library_hint(model):
        raise CheckpointError(f"no file and no model is called {model!r:.200}; {hint}")
    raise CheckpointError(f"the model path {model} does not exist; {WAYS}")


def is_model_here(text: str) -> bool:
    """Says if a text names a packaged model, a .gguf file or a path that exists."""
    if text in PACKAGED or text.endswith(".gguf"):
        return True
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long
        return False


def is_model_name(text: str) -> bool:
    """Says if a text may name a model: a local one, a model of the hub, something like a path, or a URL with
    a path (an origin has none)."""
    if is_model_here(text) or hub_model(text) is not None or text.startswith(("/", ".", "~")):
        return True
    try:
        return store.is_url(text) and urlsplit(text).path.strip("/") != ""
    except ValueError:  # half a bracket
        return False


def _gguf_file(path: Path) -> CheckpointFiles:
    try:
        if not path.is_file():  # reading from a pipe would never end
            raise FileNotFoundError("not a regular file")
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if magic != MAGIC:
        raise CheckpointError(
            f"{path} is not a GGUF file; for a Hugging Face model, name the folder that holds its config.json"
        )
    return CheckpointFiles(path.parent, path)


def local_snapshot(model: HubModel, download_dir: str | None = None) -> CheckpointFiles | None:
    """Returns the cached files of a model of the hub; None if they are missing. Downloads nothing. Raises
    CheckpointError for a name that the hub does not allow."""
    path = hub.cached(model, download_dir)
    return None if path is None else _found(path)


def _found(path: Path) -> CheckpointFiles:
    return CheckpointFiles(path) if path.is_dir() else _gguf_file(path)


def check_defaults(generation_config: dict[str, Any], where: str) -> None:
    """Raises CheckpointError for defaults that would make every request fail."""
    defaults = sampling_defaults(generation_config)
    own_names = {name: own for own, name in RENAMED_FIELDS.items()}
    large = [name for name, value in defaults.items() if isinstance(value, int) and abs(value) >= 1 << 31]
    if large:
        name = own_names.get(large[0], large[0])
        raise CheckpointError(f"{where}: {name} has more than 31 bits; give a smaller one{IGNORE}")
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        message, name = str(error), error.field or ""
        if name in own_names:
            message = message.replace(name, own_names[name], 1)
        raise CheckpointError(f"{where}: {message}{IGNORE}") from None


def _eos_of_tokenizer(config: dict[str, Any]) -> list[int]:
    """Returns the id of tokenizer_config.json's eos_token, if that file lists its added tokens."""
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = config.get("added_tokens_decoder")
    if text is None or not isinstance(added, dict):
        return []
    return [
        int(i)
        for i, entry in added.items()
        if TOKEN_ID.fullmatch(i) and isinstance(entry, dict) and entry.get("content") == text
    ]
