"""Models in an object store, or on any file system that fsspec opens. Each is downloaded to this machine's
disk once.

    models / NAME-URL-VERSION/         a complete local copy, and shoal-store.json with its URL
    models / NAME-URL-VERSION.part/    an unfinished download; the next try keeps its complete files

A remote model is the files in the store now (`_RemoteModel`); a local copy is a folder of one version
(`ModelCopy`). VERSION is a hash of the files' names, sizes and the versions that the store reports. So a
model that changes gets another folder, and running engines keep theirs: the first process of an engine learns
the version, and its other processes ask for this one. A large file comes in ranges over many connections, as
one connection to a store has a small part of the network's speed.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from shoal.errors import CheckpointError, ConfigError
from shoal.files.io_threads import IoThreads
from shoal.files.object_store import ObjectStore, shown
from shoal.files.user_dirs import cache_folder

logger = logging.getLogger(__name__)

RECEIPT = "shoal-store.json"
THREADS = 16
RANGE_BYTES = 16 << 20
RANGE_TRIES, AGAIN_S = 3, 1.0  # tries for one range, and the pause between them
MAX_TRIES = 3  # downloads of a model that changes meanwhile
NAME_CHARS = 80
PART = ".part"
PASSWORD = re.compile(r"//[^/@:]*:[^/@]*@")
# Stores report under these names a value that changes with a file's content, or at least with each write.
VERSIONS = (
    *("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest"),
    *("mtime", "LastModified", "last_modified", "Last-Modified", "created"),
)


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    path: str  # in the store
    num_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class ModelCopy:
    """A folder with one version of a model, complete or unfinished."""

    url: str
    folder: Path

    @property
    def path(self) -> Path:
        """The folder, or its .gguf file."""
        return self.folder / _name(self.url) if self.url.endswith(".gguf") else self.folder

    @property
    def version(self) -> str:
        return self.folder.name.removesuffix(PART).rpartition("-")[2]

    @property
    def is_whole(self) -> bool:
        return self.folder.suffix != PART and self.folder.is_dir()

    def remove(self) -> None:
        """Removes the copy. An interrupted removal leaves an unfinished copy. Raises OSError."""
        going = self.folder.with_name(f"{self.folder.name}-removed{PART}")
        self.folder.rename(going)
        shutil.rmtree(going)


def is_url(model: str) -> bool:
    return "://" in model


def download(
    url: str,
    is_wanted: Callable[[str], bool],
    version: str | None = None,
    download_dir: str | None = None,
    *,
    with_weights: bool = True,
) -> ModelCopy:
    """Returns a local copy of a model, and downloads it unless this version is here. `version` None: the
    store's current one, or the copy used last if the store can't be reached, with a warning.
    `is_wanted(name)` says if a file of the folder belongs to the model. `with_weights` False leaves
    .safetensors files out, in a separate copy. A file:// URL is used in place, without a copy. Raises
    CheckpointError."""
    remote = _open(url, is_wanted, download_dir, with_weights)
    if isinstance(remote, ModelCopy):
        return remote
    if version is not None and (copy := remote.local_copy(version)).is_whole:
        return copy
    try:
        files = remote.files()
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001   backends raise what they like
        old = None if version is not None or _is_refusal(error) else remote.last_used_copy()
        if old is None:
            raise _unusable(remote, error) from None
        logger.warning(
            "the store of the model %s can't be reached (%s); its copy %s is used", url, error, old.folder
        )
        return old
    _check_version(url, version, remote.version_of(files))
    try:
        copy = remote.download(files)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001   backends raise what they like
        raise _unusable(remote, error) from None
    _check_version(url, version, copy.version)  # it may have changed while it was copied
    return copy


def find_local(
    url: str, is_wanted: Callable[[str], bool], download_dir: str | None = None
) -> tuple[Path | None, int]:
    """Returns the model's path on this machine, or None with the bytes that a download would transfer beyond
    an unfinished copy's files. Downloads nothing. Raises CheckpointError."""
    remote = _open(url, is_wanted, download_dir)
    if isinstance(remote, ModelCopy):
        return remote.path, 0
    try:
        files = remote.files()
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001   backends raise what they like
        if not _is_refusal(error) and (old := remote.last_used_copy()) is not None:
            return old.path, 0
        raise _unusable(remote, error) from None
    copy = remote.local_copy(remote.version_of(files))
    if copy.is_whole:
        return copy.path, 0
    there = _part_of(copy)
    return None, sum(file.num_bytes for file in files if not (there / file.name).exists())


def _open(
    url: str, is_wanted: Callable[[str], bool], download_dir: str | None, with_weights: bool = True
) -> _RemoteModel | ModelCopy:
    """Opens the model of a URL; a file:// URL is a local copy already. Raises CheckpointError."""
    if PASSWORD.search(url):
        raise CheckpointError(
            f"the model's URL {shown(url)} has a password, which would appear wherever the model is named; "
            "leave it out, and set it in the environment as the store's package for fsspec reads it"
        )
    try:
        store = ObjectStore(url, "model")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if store.is_local:
        path = Path(store.root)
        return ModelCopy(url.rstrip("/"), path.parent if url.endswith(".gguf") else path)
    return _RemoteModel(url, store, is_wanted, models_folder(download_dir), with_weights)


def _check_version(url: str, wanted: str | None, found: str) -> None:
    if wanted not in (None, found):
        raise CheckpointError(
            f"the model {url} has version {found} now, and {wanted} is not on this machine any more; leave "
            "the revision out, or start the engine again"
        )


def _is_refusal(error: Exception) -> bool:
    """Says if the store answered with a refusal."""
    return isinstance(error, FileNotFoundError | PermissionError) or getattr(error, "status", 0) in (401, 403)


def _unusable(remote: _RemoteModel, error: Exception) -> CheckpointError:
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.300}"
    return CheckpointError(
        f"the model {remote.url} can't be copied to {remote.root} ({reason}); check its name, the network, "
        "the credentials in the environment and the folder (SHOAL_CACHE), or name a local model"
    )


def models_folder(download_dir: str | None) -> Path:
    """Returns the folder of local copies. Raises CheckpointError for an unknown user's home folder."""
    try:
        return cache_folder() / "models" if download_dir is None else Path(download_dir).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"download_dir {download_dir!r}: {error}; name another folder") from None


def local_copies(download_dir: str | None = None) -> list[ModelCopy]:
    """Returns all copies, unfinished ones included, by URL and then by last use."""
    return _copies(models_folder(download_dir))


def _copies(root: Path) -> list[ModelCopy]:
    found = []
    for receipt in root.glob(f"*/{RECEIPT}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # another program's file
            copy = ModelCopy(str(json.loads(receipt.read_bytes())["url"]), receipt.parent)
            found.append((copy.url, copy.folder.stat().st_mtime, copy))
    return [copy for _, _, copy in sorted(found, key=lambda entry: entry[:2])]


class _RemoteModel:
    """A model in a store. Methods raise the backend's errors."""

    def __init__(
        self, url: str, store: ObjectStore, is_wanted: Callable[[str], bool], root: Path, with_weights: bool
    ) -> None:
        self.url, self.root = url if url.endswith("://") else url.rstrip("/"), root
        self._store, self._is_wanted, self._with_weights = store, is_wanted, with_weights
        digest = _digest(self.url if with_weights else f"{self.url} text")
        self._stem = f"{_name(self.url)[:NAME_CHARS]}-{digest}"

    def files(self) -> list[_File]:
        """Lists the model's files in the store, by name. Raises CheckpointError if they are not a model."""
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
            if name.endswith(".safetensors") and not self._with_weights:
                continue
            if entry.get("size") is None:  # a web server reports a size for a single file only
                entry = {**entry, **fs.info(entry["name"])}
            if entry.get("size") is None:
                raise CheckpointError(
                    f"the model {self.url}: its store does not report the size of {name}; copy the model "
                    "by hand"
                )
            version = json.dumps([str(entry[key]) for key in VERSIONS if key in entry])
            found.append(_File(name, entry["name"], int(entry["size"]), version))
        return sorted(found, key=lambda file: file.name)

    def _check(self, names: set[str]) -> None:
        if "config.json" in names:
            return
        gguf = sorted(name for name in names if name.endswith(".gguf"))
        way_out = f"name its file {self.url}/{gguf[0]}" if gguf else "name one, or a .gguf file"
        raise CheckpointError(
            f"{self.url} holds no config.json, so it can't be a Hugging Face model; {way_out}"
        )

    def version_of(self, files: Sequence[_File]) -> str:
        return _digest(json.dumps([(file.name, file.num_bytes, file.version) for file in files]))

    def local_copy(self, version: str) -> ModelCopy:
        """Returns the local copy of this version, which may not exist yet."""
        return ModelCopy(self.url, self.root / f"{self._stem}-{version}")

    def download(self, files: list[_File]) -> ModelCopy:
        """Returns a local copy of these files, which the store has now, and downloads what is missing. Raises
        CheckpointError if the disk is full, or if the files keep changing."""
        for _ in range(MAX_TRIES):
            copy = self.local_copy(self.version_of(files))
            if not copy.is_whole:
                with self._lock():
                    if not copy.is_whole:  # no other process has copied it meanwhile
                        part = _part_of(copy)
                        self._clear(part)
                        _download_files(self._store, self.url, files, part)
                        listed, files = files, self.files()
                        if files != listed:
                            continue
                        part.rename(copy.folder)
            with contextlib.suppress(OSError):  # a container image may be read-only
                os.utime(copy.folder)
            return copy
        raise CheckpointError(f"the model {self.url} changes while it is copied; wait until it is written")

    def _clear(self, part: Path) -> None:
        """Removes other unfinished copies: their versions are outdated."""
        for path in self.root.glob(f"{glob.escape(self._stem)}-*{PART}"):
            if path != part:
                shutil.rmtree(path, ignore_errors=True)

    def last_used_copy(self) -> ModelCopy | None:
        """Returns the complete copy used last, of any version."""
        copies = [copy for copy in _copies(self.root) if copy.folder.name.startswith(f"{self._stem}-")]
        own = [copy for copy in copies if copy.is_whole]
        return own[-1] if own else None

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Holds a lock between processes, which ends with its process in any case."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / f"{self._stem}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that copies {self.url}", file=sys.stderr, flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _part_of(copy: ModelCopy) -> Path:
    """Returns the folder of a copy until it is complete."""
    return copy.folder.with_name(f"{copy.folder.name}{PART}")


def _download_files(store: ObjectStore, url: str, files: Sequence[_File], folder: Path) -> None:
    """Downloads the files that the folder lacks. Raises CheckpointError if the disk is full, and the
    backend's errors."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {file.name: file.num_bytes for file in files}
    for path in folder.iterdir():
        if path.stat().st_size != sizes.get(path.name):
            path.unlink()
    (folder / RECEIPT).write_text(json.dumps({"url": url}))
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
    if large := next((job for job in jobs if len(job[1]) < job[0].num_bytes), None):
        _read_range(store, *large)  # notices a server without ranges before all threads ask it
    threads = IoThreads("model-store", THREADS, len(jobs))
    try:
        with tqdm(total=num_bytes, unit="B", unit_scale=True, leave=False, disable=None) as bar:
            copied = {file.name: _prepared(folder, file) for file in missing}
            waiting = [
                (
                    file,
                    range_,
                    threads.submit(partial(_download_range, store, file, range_, copied[file.name], errors)),
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


def _ranges(file: _File) -> list[range]:
    starts = range(0, max(1, file.num_bytes), RANGE_BYTES)
    return [range(start, min(start + RANGE_BYTES, file.num_bytes)) for start in starts]


def _prepared(folder: Path, file: _File) -> Path:
    path = folder / f"{file.name}.tmp"
    with path.open("wb") as made:
        made.truncate(file.num_bytes)
    return path


def _download_range(
    store: ObjectStore, file: _File, range_: range, target: Path, errors: list[Exception]
) -> bool:
    """Downloads one range and syncs it to the disk, so that a power failure never leaves half a file under
    its final name."""
    for number in range(1, RANGE_TRIES + 1):
        if errors:
            return False  # the download has failed
        try:
            data = _read_range(store, file, range_)
            with target.open("r+b") as opened:
                opened.seek(range_.start)
                opened.write(data)
                opened.flush()
                os.fdatasync(opened.fileno())
            return True
        except Exception as error:  # noqa: BLE001   backends raise what they like
            if number == RANGE_TRIES or _is_refusal(error) or isinstance(error, CheckpointError):
                errors.append(error)
            else:
                time.sleep(AGAIN_S)
    return False


def _read_range(store: ObjectStore, file: _File, range_: range) -> bytes:
    # A server that knows no ranges can give a small file all the same.
    part = {} if len(range_) == file.num_bytes else {"start": range_.start, "end": range_.stop}
    data = bytes(store.fs.cat_file(file.path, **part))
    if len(data) == len(range_):
        return data
    text = f"{file.path} gave {len(data)} bytes for {len(range_)} from {range_.start} on"
    if len(data) > len(range_):
        raise CheckpointError(f"{text}: its server knows no ranges; take another, or copy the model by hand")
    raise OSError(text)


def _name(path: str) -> str:
    """The last part of a path or a URL."""
    return PurePosixPath(path).name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
