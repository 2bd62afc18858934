"""The JSON files of a checkpoint. They come from strangers: what is no object, too large or too deep is a
CheckpointError that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError

# The largest published ones, the indexes of models with tens of thousands of experts, have some 16 MiB. A
# parsed file takes up to some 30 times its bytes, so this bounds the memory of one at 1 GiB.
MAX_JSON_BYTES = 32 << 20


def read_object(path: Path) -> dict[str, Any]:
    """{} where there is no such file."""
    if not path.exists():
        return {}
    return parse_object(read_bounded(path, MAX_JSON_BYTES), str(path))


def read_bounded(path: Path, most: int) -> bytes:
    """Raises CheckpointError if it is no file (a pipe would never end), cannot be read, or has more bytes."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is no file")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > most:
        raise CheckpointError(
            f"{path} has more than {most} bytes; a file of its kind has far fewer, is it another one?"
        )
    return content


def parse_object(content: bytes, where: str) -> dict[str, Any]:
    """`where` names it in errors."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"{where} is not readable JSON: {error}; fetch it again") from None
    except RecursionError:
        raise CheckpointError(f"{where} is not readable JSON: it is too deep; fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a {type(value).__name__} instead of an object")
    return value
