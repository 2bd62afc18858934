"""Files or objects under an fsspec URL: opens the URL, and writes objects atomically."""

from __future__ import annotations

import re
import secrets
from typing import Any

from shoal.errors import ConfigError

# Stores whose put is atomic. In others an object is written under another name and moved.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "obs", "memory"}


class ObjectStore:
    """The file system `fs` of a URL, and the path `root` in it. Calls raise the exceptions of the backend.
    `option`: the option with the URL, for errors. Raises ConfigError if fsspec or its backend is missing."""

    def __init__(self, url: str, option: str) -> None:
        self.fs, path = _open(url, option)
        self.root = path.rstrip("/")
        protocols = {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)
        self.is_local = "file" in protocols  # `root` is a path of this machine
        self._moves = not protocols & OBJECT_STORES
        self._made: set[str] = set()  # existing folders

    def put(self, path: str, value: bytes) -> None:
        """Writes an object atomically: readers never see a part of it."""
        if not self._moves:
            self.fs.pipe_file(path, value)
            return
        folder = path.rpartition("/")[0]
        if folder not in self._made:
            self.fs.makedirs(folder, exist_ok=True)
            self._made.add(folder)
        unfinished = f"{path}.{secrets.token_hex(8)}.tmp"
        try:
            self.fs.pipe_file(unfinished, value)
            self.fs.mv(unfinished, path)
        except Exception:
            self._made.discard(folder)  # it may not exist any more
            try:
                self.fs.rm_file(unfinished)
            except Exception:  # noqa: BLE001   backends raise any exception; the first error counts
                pass
            raise


def _open(url: str, option: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise ConfigError(
            f"{option} {shown(url)} needs fsspec; install it with: pip install 'shoal[store]'"
        ) from None
    try:
        # The clients' caches of folders would hide files of other writers.
        options = {"use_listings_cache": False} if url.partition("://")[0] in OBJECT_STORES else {}
        return fsspec.core.url_to_fs(url, **options)
    except Exception as error:  # noqa: BLE001   backends raise any exception
        raise ConfigError(
            f"{option} {shown(url)} can't be opened: {error} (each kind of store has a package of its own)"
        ) from None


def shown(url: str) -> str:
    """Returns the URL without a password."""
    return re.sub(r"//[^/@]*@", "//", url)
