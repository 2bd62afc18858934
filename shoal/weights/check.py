"""The option `check_weights`: checks that a checkpoint's files are as the hub published them, and that its
weights are finite numbers of a plausible size.

Every byte is read, which takes about as long as loading a second time. Noise that looks like weights is
noticed by checksums alone.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from shoal.errors import CheckpointError
from shoal.kernels.quant.quantized_tensor import QuantizedTensor
from shoal.weights.loader import checkpoint_tensors
from shoal.weights.packaged_models import BY_FILE
from shoal.weights.source import CheckpointFiles

logger = logging.getLogger(__name__)

LARGEST = 65504.0  # float16's largest number; the weights of published models are far below it
CHUNK_BYTES = 1 << 24  # read from a file at a time
CHUNK_WEIGHTS = 1 << 22  # checked at a time
# a sha256 or a sha1, as the hub's cache names files
BLOB = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")


def verify_weights(files: CheckpointFiles) -> None:
    """Raises CheckpointError that names the file, and the tensor where there is one."""
    paths = [files.file] if files.file is not None else sorted(files.folder.iterdir())
    verified = sum(_verify(path) for path in paths)
    count = 0
    for name, tensor in checkpoint_tensors(files):
        _check_numbers(name, tensor, files)
        count += 1
    logger.info(
        "%s: %d tensors are finite, %d files have the checksums that they are known by",
        files.path,
        count,
        verified,
    )


def _verify(path: Path) -> bool:
    """Returns True if a checksum of this file is known and right. Raises CheckpointError if it is wrong.

    The hub's cache names what a snapshot links to by its hash: large files (LFS) by their sha256, small ones
    by git's hash."""
    target = path.resolve()
    expected = BY_FILE[path.name].sha256 if path.name in BY_FILE else ""
    if target.parent.name == "blobs" and BLOB.fullmatch(target.name):
        expected = target.name
    if not expected or not target.is_file():
        return False
    digest = hashlib.sha256()
    if len(expected) == 40:
        digest = hashlib.sha1(f"blob {target.stat().st_size}\0".encode(), usedforsecurity=False)
    try:
        with target.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if digest.hexdigest() != expected:
        raise CheckpointError(
            f"{path} has the {digest.name} {digest.hexdigest()} instead of {expected}, by "
            f"which it is known; remove {target} and fetch it again"
        )
    return True


def _check_numbers(name: str, tensor: torch.Tensor | QuantizedTensor, files: CheckpointFiles) -> None:
    for chunk in _chunks(tensor):
        low, high = (bound.item() for bound in torch.aminmax(chunk))
        if not -LARGEST <= low <= high <= LARGEST:  # NaN is neither
            where = f"{files.path}: the tensor {name} of shape {list(tensor.shape)}"
            bad = chunk.flatten()[~(chunk.flatten().abs() <= LARGEST)]
            raise CheckpointError(
                f"{where} holds {bad[0].item()!r} among its weights ({len(bad)} of "
                f"{chunk.numel()} checked are not from -{LARGEST:g} to "
                f"{LARGEST:g}); the file is damaged, fetch it again"
            )


def _chunks(tensor: torch.Tensor | QuantizedTensor) -> Iterator[torch.Tensor]:
    """The whole tensor in chunks, each in float32 if it was packed."""
    if isinstance(tensor, torch.Tensor):
        yield from tensor.reshape(-1).split(CHUNK_WEIGHTS)
        return
    rows, columns = tensor.shape
    step = max(1, CHUNK_WEIGHTS // columns)
    for start in range(0, rows, step):
        yield tensor.rows(start, min(rows, start + step)).dequantize()
