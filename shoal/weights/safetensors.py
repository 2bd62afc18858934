"""The tensors of a Hugging Face folder's safetensors files, one by one, as views of the memory-mapped files.

Headers are read here, so that a stranger's file is bounded and checked, and named in errors, before the
library maps its tensors. Only the tensors need torch.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import safetensors

from shoal.errors import CheckpointError
from shoal.files.json_file import MAX_JSON_BYTES, parse_object, read_object

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"[^/\\\0]+\.safetensors")
MAX_DIMS = 5  # that convolutions over time have
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Span = tuple[Path, int, int]  # a file, and a tensor's first byte in it and its end
# The text model within a multimodal one, by the prefixes of old and new checkpoints.
TEXT_MODEL = re.compile(r"(?:model\.)?language_model\.(?:model\.)?")
# Other parts than the text model: encoders and projectors of images and sounds, and draft heads.
OTHER_PART = re.compile(
    r"(?:model\.)?(?:vision|visual|image|audio|embed_vision|embed_audio|multi_modal|mm_|patch_merger|mtp[._])"
)
DRAFT_HEAD = re.compile(r"(?:model\.)?mtp[._]")
# Prefixes of some families -> what other families have.
PREFIXES = {
    "model.embedding_norm.": "model.norm.",
    "model.final_layernorm.": "model.norm.",
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
    "backbone.": "model.",
    "model.blocks.": "model.layers.",  # Kimi K2.5 as transformers writes it
}
# Scales of keys or values (kv_scales.py), which no layer loads.
KV_SCALE = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:k_proj\.(?=k_)|v_proj\.(?=v_))?([kvq]|kv)_scale")
COMPARED_BYTES = 1 << 20
# A format's name -> bytes of a number. Weights are real numbers, or packed as a layout says
# (models/layouts/).
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
PACKED_DTYPES = {"F8_E4M3": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8}
# From a tensor's name in a checkpoint to the module's. None: the tensor is not read.
Naming = Callable[[str], str | None]


class TensorHeader(NamedTuple):
    """A tensor's entry in the header of a file."""

    dtype: str  # a name in DTYPES or PACKED_DTYPES; for a quantized matrix its layout's name
    shape: tuple[int, ...]


def text_name(name: str) -> str | None:
    """The Naming of the text model."""
    return None if OTHER_PART.match(name) else full_name(name)


def safetensors_tensors(
    folder: Path, dtypes: Mapping[str, int] = DTYPES, naming: Naming = text_name
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor with its name. Raises CheckpointError that names the file, and the tensor if it
    concerns one, also for a tensor of another dtype than these."""
    for path, tensors in safetensors_headers(folder, dtypes, naming):
        with _reading(path), safetensors.safe_open(path, framework="pt", device="cpu") as file:
            stored = {naming(name): name for name in file.keys()}  # noqa: SIM118  the file is not a dict
            for name, header in tensors.items():
                yield name, file.get_tensor(stored[name]).view(header.shape)


def full_name(name: str) -> str:
    """Returns the name that a causal model gives to a tensor. A checkpoint that was saved from the model
    below the head, as Qwen3-Embedding's, leaves out the `model.` before it; one of a multimodal model says
    that it is the language model's, as do some fine-tunes of its text model alone."""
    text = TEXT_MODEL.match(name)
    own = name if text is None else name[text.end() :]
    if own.startswith("lm_head."):
        return own
    if text is not None or own.startswith(("embed_tokens.", "layers.", "norm.")):
        own = f"model.{own}"
    for prefix, usual in PREFIXES.items():
        if own.startswith(prefix):
            return usual + own.removeprefix(prefix)
    return own


def has_weights(folder: Path) -> bool:
    return (folder / INDEX).exists() or any(folder.glob("*.safetensors"))


def shards(folder: Path) -> dict[Path, list[str]]:
    """Returns each file with the names of the tensors to take from it; an empty list means all of them. The
    index decides, if it exists; else Mistral's second copy of the same weights is left out. A file may be a
    link to another folder, as in the hub's cache, but the index names it without a path. Raises
    CheckpointError."""
    index = folder / INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} holds no *.safetensors file" + _other_formats(folder))
        usual = [path for path in files if not path.name.startswith("consolidated")]
        return {path: [] for path in usual or files}
    file_of = read_object(index).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise CheckpointError(
            f"{index} must be an index of tensors, but its weight_map is {file_of!r:.80}; fetch it again"
        )
    result: dict[Path, list[str]] = {}
    for name, file in file_of.items():
        if not isinstance(file, str) or not SHARD.fullmatch(file):
            raise CheckpointError(
                f"{index}: the weight_map has {name!r:.80} in {file!r:.80}; it must name a "
                ".safetensors file next to it"
            )
        result.setdefault(folder / file, []).append(name)
    for path, names in result.items():
        if not path.exists():
            raise CheckpointError(
                f"the shard {path} is missing ({len(names)} tensors, the first is {names[0]}); fetch it again"
            )
    return result


def safetensors_headers(
    folder: Path, dtypes: Mapping[str, int] = DTYPES, naming: Naming = text_name
) -> Iterator[tuple[Path, dict[str, TensorHeader]]]:
    """Yields each file with the headers of the tensors to take from it. Raises CheckpointError."""
    taken: set[str] = set()
    for path, names in shards(folder).items():
        held, _ = _read_header(path, dtypes, naming)
        own = {name: target for name in names or sorted(held) if (target := naming(name)) is not None}
        for name, target in own.items():
            if name not in held:
                raise CheckpointError(
                    f"{path} does not hold the tensor {name}, which {INDEX} says it does; fetch both again"
                )
            if target in taken:
                raise CheckpointError(
                    f"{path} holds the tensor {name}, and so does another file of the "
                    "folder; remove one of them"
                )
            taken.add(target)
        yield path, {target: held[name] for name, target in own.items()}


def has_head(folder: Path) -> bool:
    """Returns whether the folder has an output head. Raises CheckpointError."""
    return any(
        full_name(name).startswith("lm_head.")
        for path, names in shards(folder).items()
        for name in names or _read_header(path, DTYPES | PACKED_DTYPES)[1]
    )


def has_own_head(folder: Path) -> bool:
    """Returns whether the folder has an output head that differs from its embedding. Raises
    CheckpointError."""
    spans = _spans(folder)
    if HEAD not in spans:
        return any(name.startswith("lm_head.") for name in spans)  # a quantized one
    return EMBEDDING in spans and not are_equal(spans[HEAD], spans[EMBEDDING])


def equal_tensors(folder: Path, naming: Naming, others: Mapping[str, str]) -> frozenset[str]:
    """Returns the tensors under their names by `naming` which have the same bytes as the text model's tensor
    that `others` names. Raises CheckpointError."""
    spans, theirs = _spans(folder, naming), _spans(folder)
    return frozenset(
        name
        for name, other in others.items()
        if name in spans and other in theirs and are_equal(spans[name], theirs[other])
    )


def _spans(folder: Path, naming: Naming = full_name) -> dict[str, Span]:
    """The place of each tensor in the folder's files."""
    spans: dict[str, Span] = {}
    for path in shards(folder):
        for name, span in _read_header(path, DTYPES | PACKED_DTYPES)[1].items():
            if (own := naming(name)) is not None:
                spans[own] = path, *span
    return spans


def are_equal(span: Span, other_span: Span) -> bool:
    """Says if two ranges of files have the same bytes. Raises CheckpointError."""
    with _reading(span[0]), _mapped(*span) as tensor, _mapped(*other_span) as other:
        return len(tensor) == len(other) and all(
            tensor[at : at + COMPARED_BYTES] == other[at : at + COMPARED_BYTES]
            for at in range(0, len(tensor), COMPARED_BYTES)
        )


@contextmanager
def _mapped(path: Path, start: int, end: int) -> Iterator[memoryview]:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as whole,
        whole[start:end] as part,
    ):
        yield part


def tensor_spans(path: Path, dtypes: Mapping[str, int]) -> list[tuple[int, int]]:
    """Returns the start and the end of each tensor in a file, in order. Raises CheckpointError."""
    return sorted(_read_header(path, dtypes)[1].values())


def _read_header(
    path: Path, dtypes: Mapping[str, int], naming: Naming = text_name
) -> tuple[dict[str, TensorHeader], dict[str, tuple[int, int]]]:
    """Returns each tensor's header, and its start and end in the file; of tensors that `naming` leaves out,
    the latter alone. Raises CheckpointError unless the tensors fill the file without gaps, as their shapes
    say."""
    try:
        if not path.is_file():  # a pipe would never end
            raise FileNotFoundError("no such file")
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, MAX_JSON_BYTES):
                raise CheckpointError(
                    f"{path}: the header says that it has {length} bytes, of {size} in "
                    f"the file and {MAX_JSON_BYTES} that are read; fetch it again"
                )
            header = parse_object(file.read(length), f"{path}: the header")
    except (OSError, struct.error) as error:
        raise CheckpointError(f"cannot read {path}: {error}; fetch it again") from None
    header.pop("__metadata__", None)
    tensors: dict[str, TensorHeader] = {}
    spans: list[tuple[int, int, str]] = []
    for name, info in header.items():
        where = f"{path}: the tensor {name!r:.200}"
        fields = info if isinstance(info, dict) else {}
        if naming(name) is not None:
            tensors[name] = _parse_tensor(fields, where, dtypes)
        start, end = _parse_span(fields.get("data_offsets"), where)
        if name in tensors:
            _check_size(tensors[name], end - start, where, dtypes)
        spans.append((start, end, name))
    position, before = 0, "the header"
    for start, end, name in sorted(spans):
        if 8 + length + end > size:
            raise CheckpointError(
                f"cannot read {path}: it is truncated: the tensor {name} ends at byte "
                f"{8 + length + end}, the file at {size}; fetch it again"
            )
        if start != position:
            raise CheckpointError(
                f"{path}: the tensor {name} begins at byte {start} of the data, but "
                f"{before} ends at {position}; fetch it again"
            )
        position, before = end, name
    return tensors, {name: (8 + length + start, 8 + length + end) for start, end, name in spans}


def _parse_span(offsets: Any, where: str) -> tuple[int, int]:
    """The first byte of a tensor in the data, and its end."""
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets {offsets!r:.80}; they must be a start and an end")
    return offsets[0], offsets[1]


def _parse_tensor(fields: Mapping[str, Any], where: str, dtypes: Mapping[str, int]) -> TensorHeader:
    """Parses one entry of a header but for the tensor's place in the data. A number without an axis, as some
    scales are, has one of length 1 from here on."""
    dtype, shape = fields.get("dtype"), fields.get("shape")
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise CheckpointError(
            f"{where} has dtype {dtype!r:.40}, which is not supported; these are: {', '.join(dtypes)}"
        )
    shape = [1] if shape == [] else shape
    # transformers writes the shared experts of a model without any as tensors of shape [D, 0].
    if not _are_counts(shape) or not 1 <= len(shape) <= MAX_DIMS:
        raise CheckpointError(
            f"{where} has shape {shape!r:.80}, which is not 1 to {MAX_DIMS} integers of at least 0"
        )
    return TensorHeader(dtype, tuple(shape))


def _check_size(header: TensorHeader, num_bytes: int, where: str, dtypes: Mapping[str, int]) -> None:
    """Raises CheckpointError unless a tensor of this type and shape takes `num_bytes`."""
    if num_bytes != (expected := math.prod(header.shape) * dtypes[header.dtype]):
        raise CheckpointError(
            f"{where} of dtype {header.dtype} and shape {list(header.shape)} takes {expected} bytes, its "
            f"data_offsets are {num_bytes} apart; fetch it again"
        )


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    if not isinstance(values, list):
        return False
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; fetch it again") from None


def _other_formats(folder: Path) -> str:
    """Returns the end of the error about a folder without safetensors."""
    other = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
    if other:
        return f" but {other[0]}: convert to safetensors, or name a .gguf file itself"
    return "; is the download complete?"
