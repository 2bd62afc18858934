"""Reads the JSON files of a checkpoint. They are not trusted: a file without an object, or one that is too
large or too deep, raises a CheckpointError that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError

# The largest published files have some 16 MiB: indexes of models with tens of thousands of experts. A parsed
# file takes up to 30 times its bytes, so this limit bounds the memory of one file at 1 GiB.
MAX_JSON_BYTES = 32 << 20


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a file, and {} if there is no such file. Raises CheckpointError."""
    if not path.exists():
        return {}
    return parse_object(read_bounded(path, MAX_JSON_BYTES), str(path))


def read_bounded(path: Path, most: int) -> bytes:
    """Returns the content of a file of at most `most` bytes. Raises CheckpointError if the path is not a
    regular file (a pipe would never end), cannot be read, or has more bytes."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} must be a regular file")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > most:
        raise CheckpointError(
            f"{path} must have at most {most} bytes; files of this kind have far fewer, is it another one?"
        )
    return content


def parse_object(content: bytes, where: str) -> dict[str, Any]:
    """Returns the JSON object in `content`. Raises CheckpointError that names `where`."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"{where} is not readable JSON: {error}; fetch it again") from None
    except RecursionError:
        raise CheckpointError(f"{where} is not readable JSON: it is too deep; fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a {type(value).__name__} instead of an object")
    return value
