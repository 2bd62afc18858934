"""Models that lie in an object store, or on any file system that fsspec opens: each is copied to this
machine's disk once.

    models / NAME-URL-VERSION/         a copy that is whole, and shoal-store.json, which says from where
    models / NAME-URL-VERSION.part/    one on its way; a later try goes on with its whole files

VERSION is a hash of what lies there: names, sizes, and what the store tells of their versions. So a model
that changes gets another folder, and engines that run keep theirs. A large file comes in ranges over many
connections, as one connection to a store has a small part of the network's speed.

Every process of an engine asks for its model, and the first one copies it. The others wait at a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from shoal.errors import CheckpointError, ConfigError
from shoal.io_threads import IoThreads
from shoal.object_store import ObjectStore, shown
from shoal.weights.default_model import cache_folder

logger = logging.getLogger(__name__)

RECEIPT = "shoal-store.json"
THREADS = 16
RANGE_BYTES = 32 << 20
MAX_TRIES = 3  # of a copy whose original changes meanwhile
NAME_CHARS = 80
# A copy that is younger than this when the machine goes down may not be on its disk, though its names are.
WRITE_BACK_S = 600.0
UPTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux counts sleep in the first alone
# Under these names stores tell what changes with a file's content, or at least with its writing.
VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "created")


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    path: str  # in the store
    num_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A copy that is whole."""

    url: str
    folder: Path

    @property
    def path(self) -> Path:
        """Its folder, or its .gguf file."""
        return self.folder / _name(self.url) if self.url.endswith(".gguf") else self.folder

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())

    @property
    def last_used(self) -> float:
        """Seconds since 1970."""
        return self.folder.stat().st_mtime


def is_url(model: str) -> bool:
    return "://" in model


def fetch(url: str, is_wanted: Callable[[str], bool], download_dir: str | None = None) -> Path:
    """The folder or the .gguf file of a model on this machine, which is copied unless this version of it is
    here. `is_wanted` says by its name whether a file of a folder belongs to the model. Where the store can't
    be looked at, an earlier copy is used, and a warning says so. Raises CheckpointError."""
    model = _open(url, is_wanted, download_dir)
    if isinstance(model, Path):
        return model
    try:
        return model.newest_copy().path
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001   backends raise what they like
        old = None if isinstance(error, FileNotFoundError | PermissionError) else model.last_copy()
        if old is None:
            raise _unusable(model, error) from None
        logger.warning("the model %s can't be looked at (%s); its copy %s is used", url, error, old.folder)
        return old.path


def look(
    url: str, is_wanted: Callable[[str], bool], download_dir: str | None = None
) -> tuple[Path | None, int]:
    """Where the model is on this machine, if this version of it is, and how many bytes it has in its store.
    Nothing is copied. Raises CheckpointError."""
    model = _open(url, is_wanted, download_dir)
    if isinstance(model, Path):
        return model, 0
    try:
        files = model.files()
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001   backends raise what they like
        raise _unusable(model, error) from None
    copy = StoredModel(url, model.folder(files))
    return copy.path if _is_whole(copy.folder) else None, sum(file.num_bytes for file in files)


def _open(url: str, is_wanted: Callable[[str], bool], download_dir: str | None) -> _Model | Path:
    """A path if the URL names one of this machine. Raises CheckpointError."""
    if shown(url) != url:
        raise CheckpointError(
            f"the model's URL {shown(url)} has a password, which would show wherever the model is named; "
            "leave it out, and give it as the store's package for fsspec reads it from the environment"
        )
    try:
        store = ObjectStore(url, "model")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    return Path(store.root) if store.is_local else _Model(url, store, is_wanted, models_folder(download_dir))


def _unusable(model: _Model, error: Exception) -> CheckpointError:
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.300}"
    return CheckpointError(
        f"the model {model.url} can't be copied to {model.root} ({reason}); check its name, the network, the "
        "credentials in the environment and the folder (SHOAL_CACHE), or name a local model"
    )


def models_folder(download_dir: str | None) -> Path:
    return cache_folder() / "models" if download_dir is None else Path(download_dir).expanduser()


def stored_models(download_dir: str | None = None) -> list[StoredModel]:
    """The copies that are whole, by URL and then by their last use."""
    return _copies(models_folder(download_dir))


def _copies(root: Path) -> list[StoredModel]:
    found = []
    for receipt in root.glob(f"*/{RECEIPT}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it is none of ours
            if receipt.parent.suffix != ".part":
                found.append(StoredModel(str(json.loads(receipt.read_bytes())["url"]), receipt.parent))
    return sorted(found, key=lambda model: (model.url, model.last_used))


class _Model:
    """A model in a store, and what this machine has of it. Methods raise what the backend raises."""

    def __init__(self, url: str, store: ObjectStore, is_wanted: Callable[[str], bool], root: Path) -> None:
        self.url, self.root = url, root
        self._store, self._is_wanted = store, is_wanted
        self._stem = f"{_name(url)[:NAME_CHARS]}-{_digest(url)}"

    def files(self) -> list[_File]:
        """What there is of it in the store, by name. Raises CheckpointError for what is no model."""
        fs, is_file = self._store.fs, self.url.endswith(".gguf")
        if is_file:
            entries = [fs.info(self._store.root)]
        else:
            entries = [entry for entry in fs.ls(self._store.root, detail=True) if entry["type"] == "file"]
            self._check({_name(entry["name"]) for entry in entries})
        found = []
        for entry in entries:
            name = _name(entry["name"])
            if not is_file and (name == RECEIPT or not self._is_wanted(name)):
                continue
            if entry.get("size") is None:  # a web server tells a file's size when it is asked for that file
                entry = {**entry, **fs.info(entry["name"])}
            if entry.get("size") is None:
                raise CheckpointError(f"the model {self.url}: its store does not tell how large {name} is")
            version = json.dumps([str(entry[key]) for key in VERSIONS if key in entry])
            found.append(_File(name, entry["name"], int(entry["size"]), version))
        return sorted(found, key=lambda file: file.name)

    def _check(self, names: set[str]) -> None:
        if "config.json" in names:
            return
        gguf = sorted(name for name in names if name.endswith(".gguf"))
        way_out = f"name its file {self.url.rstrip('/')}/{gguf[0]}" if gguf else "name one, or a .gguf file"
        raise CheckpointError(f"{self.url} holds no config.json, so it is no Hugging Face model; {way_out}")

    def folder(self, files: Sequence[_File]) -> Path:
        """Where the copy of this version lies, or would."""
        versions = [(file.name, file.num_bytes, file.version) for file in files]
        return self.root / f"{self._stem}-{_digest(json.dumps(versions))}"

    def newest_copy(self) -> StoredModel:
        """Raises CheckpointError if there is no room, or no end of changes."""
        for _ in range(MAX_TRIES):
            files = self.files()
            folder = self.folder(files)
            if not _is_whole(folder):
                with self._lock():
                    if not _is_whole(folder):  # nobody has copied it meanwhile
                        unfinished = folder.with_name(f"{folder.name}.part")
                        self._clear(folder, unfinished)
                        _copy(self._store, self.url, files, unfinished)
                        if self.files() != files:
                            continue
                        unfinished.rename(folder)
            with contextlib.suppress(OSError):  # nobody may write into an image
                os.utime(folder)
            return StoredModel(self.url, folder)
        raise CheckpointError(f"the model {self.url} changes while it is copied; wait until it is written")

    def _clear(self, folder: Path, unfinished: Path) -> None:
        """Removes a copy that is not whole, and unfinished ones of versions that are gone."""
        for path in (folder, *self.root.glob(f"{glob.escape(self._stem)}-*.part")):
            if path != unfinished:
                shutil.rmtree(path, ignore_errors=True)

    def last_copy(self) -> StoredModel | None:
        """The one that was used last, of whatever version."""
        own = [model for model in _copies(self.root) if model.url == self.url and _is_whole(model.folder)]
        return own[-1] if own else None

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One process at a time has it, and loses it when it ends, however it ends."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / f"{self._stem}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _is_whole(folder: Path) -> bool:
    """Whether there is a copy, and it was on the disk when the machine last went down."""
    try:
        copied = (folder / RECEIPT).stat().st_mtime
    except FileNotFoundError:
        return False
    booted = time.time() - time.clock_gettime(UPTIME)
    return not 0 < booted - copied < WRITE_BACK_S


def _copy(store: ObjectStore, url: str, files: Sequence[_File], folder: Path) -> None:
    """Brings the files into the folder, but for those that are there. Raises CheckpointError if there is no
    room, and what the backend raises."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {file.name: file.num_bytes for file in files}
    for path in folder.iterdir():
        if path.stat().st_size != sizes.get(path.name):
            path.unlink()
    missing = [file for file in files if not (folder / file.name).exists()]
    num_bytes, free = sum(file.num_bytes for file in missing), shutil.disk_usage(folder).free
    if num_bytes > free:
        raise CheckpointError(
            f"the model {url} needs {num_bytes / 1e9:.1f} GB more in {folder.parent}, where "
            f"{free / 1e9:.1f} are free; set SHOAL_CACHE or download_dir to a folder with room, or remove "
            "some of `shoal models`"
        )
    print(f"fetching {url} ({num_bytes / 1e9:.2f} GB) into {folder.parent}", file=sys.stderr, flush=True)
    errors: list[Exception] = []
    jobs = [(file, range_) for file in missing for range_ in _ranges(file)]
    threads = IoThreads("model-store", THREADS, len(jobs))
    try:
        with tqdm(total=num_bytes, unit="B", unit_scale=True, leave=False, disable=None) as bar:
            copied = {file.name: _prepared(folder, file) for file in missing}
            waiting = [
                (
                    file,
                    range_,
                    threads.submit(partial(_copy_range, store, file, range_, copied[file.name], errors)),
                )
                for file, range_ in jobs
            ]
            for file, range_, future in waiting:
                if future is None or not future.result():
                    raise errors[0] if errors else OSError("no thread could be started")
                bar.update(len(range_))
                if range_.stop == file.num_bytes:
                    copied[file.name].rename(folder / file.name)
    finally:
        threads.close()
    (folder / RECEIPT).write_text(json.dumps({"url": url}))


def _ranges(file: _File) -> list[range]:
    starts = range(0, max(1, file.num_bytes), RANGE_BYTES)
    return [range(start, min(start + RANGE_BYTES, file.num_bytes)) for start in starts]


def _prepared(folder: Path, file: _File) -> Path:
    path = folder / f"{file.name}.tmp"
    with path.open("wb") as made:
        made.truncate(file.num_bytes)
    return path


def _copy_range(
    store: ObjectStore, file: _File, range_: range, target: Path, errors: list[Exception]
) -> bool:
    if errors:
        return False  # the copy is given up
    try:
        # A server that knows no ranges can give a small file all the same.
        part = {} if len(range_) == file.num_bytes else {"start": range_.start, "end": range_.stop}
        data = store.fs.cat_file(file.path, **part)
        if len(data) != len(range_):
            raise OSError(f"{file.path} gave {len(data)} bytes for {len(range_)} from {range_.start} on")
        with target.open("r+b") as opened:
            opened.seek(range_.start)
            opened.write(data)
    except Exception as error:  # noqa: BLE001   backends raise what they like
        errors.append(error)
        return False
    return True


def _name(path: str) -> str:
    """The last part of a path or a URL."""
    return PurePosixPath(path).name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
