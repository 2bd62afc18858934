"""Shares compiled kernels between machines: an engine fetches them before it starts, and stores what it
compiled itself for the next one. Users: `--compile-cache`, `shoal compile` and fleets without a shared
volume; where a volume is shared, TRITON_CACHE_DIR and XDG_CACHE_HOME do the same.

    URL / platform / name.tar

Compiled code is stored in shoal's cache folder: C libraries, functions in CUDA C++, and Triton's folder of
kernels, one subfolder each. Their names say what they were compiled from, by which compiler and for which
processor, so copies never clash, and a wrong one is never used. Engines run what this store holds, so write
access to it must be restricted: docs/security.md.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import platform
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shoal.errors import ConfigError
from shoal.files.io_threads import IoThreads
from shoal.files.object_store import ObjectStore, shown
from shoal.files.user_dirs import cache_folder, kernel_folder

logger = logging.getLogger(__name__)

OPTION = "compile_cache"
THREADS = 8
DOWNLOAD_S = 60.0  # A store that answers slowly must not make a start slower than compiling does.
TRITON = "triton-"  # begins the names of Triton's kernels
LIBRARIES = ".so", ".cubin"  # ends the names of C libraries, and of functions in CUDA C++
GROUP = "__grp__"  # begins the file of a kernel that lists its others, with their whole paths


def keep_kernels_together() -> None:
    """Has Triton keep its kernels next to the C libraries, unless TRITON_CACHE_DIR says otherwise: so one
    folder holds all that a start compiles, and a container needs one volume."""
    if "TRITON_CACHE_DIR" in os.environ:
        return
    folder = kernel_folder()
    with contextlib.suppress(ConfigError):
        if (cache_folder() / "triton").is_dir():  # an image may bring kernels, where nothing can be written
            folder = cache_folder()
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")


@contextmanager
def shared_kernels(url: str | None) -> Iterator[None]:
    """A context for an engine's start: downloads compiled kernels before it, and uploads new ones after it,
    in the background. None: kernels are kept on this machine alone. Raises ConfigError as CompileCache
    does."""
    keep_kernels_together()
    store = None if url is None else CompileCache(url)
    if store is not None:
        logger.info("%d compiled kernels and libraries were downloaded from %s", store.download(), OPTION)
    yield
    if store is not None:
        store.upload_in_background()


class CompileCache:
    """`url`: a folder or bucket, as fsspec reads it; the attribute has no password. Raises ConfigError if it
    cannot be opened."""

    def __init__(self, url: str) -> None:
        self._store = ObjectStore(url, OPTION)
        self._root = f"{self._store.root}/{platform_name()}"
        self.url = shown(url)

    def download(self) -> int:
        """Fetches what the local cache lacks, for DOWNLOAD_S seconds at most. Returns the number of kernels
        and libraries fetched. If the store fails, a warning is logged, and they are compiled."""
        downloaded: list[str] = []

        def work() -> None:
            with self._warning("read"):
                self._each(self._there() - set(local_names()), self._download, downloaded)

        thread = threading.Thread(target=work, name="compile-cache", daemon=True)
        thread.start()
        thread.join(DOWNLOAD_S)
        if thread.is_alive():
            logger.warning(
                "%s %s is slow: what was not fetched in %g s is compiled", OPTION, self.url, DOWNLOAD_S
            )
        return len(downloaded)

    def upload(self) -> int:
        """Stores what the store lacks. Returns the number of kernels and libraries stored."""
        uploaded: list[str] = []
        with self._warning("written"):
            self._each(set(local_names()) - self._there(), self._upload, uploaded)
        return len(uploaded)

    def upload_in_background(self) -> None:
        threading.Thread(target=self.upload, name="compile-cache", daemon=True).start()

    def _there(self) -> set[str]:
        try:
            paths = self._store.fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return set()
        names = {path.rpartition("/")[2] for path in paths}
        return {name.removesuffix(".tar") for name in names if name.endswith(".tar")}

    def _download(self, name: str) -> None:
        extract(name, self._store.fs.cat_file(f"{self._root}/{name}.tar"))

    def _upload(self, name: str) -> None:
        self._store.put(f"{self._root}/{name}.tar", archive_of(name))

    def _each(self, names: Iterable[str], work: Callable[[str], None], finished: list[str]) -> None:
        """Runs `work` in daemon threads, so that a store that hangs does not keep the process from ending."""
        todo, errors = sorted(names), []

        def job(name: str) -> bool:
            try:
                work(name)
            except Exception as error:  # noqa: BLE001   backends raise what they like
                errors.append(error)
                return False
            finished.append(name)
            return True

        threads = IoThreads("compile-cache", THREADS, len(todo))
        for future in [threads.submit(partial(job, name)) for name in todo]:
            if future is not None:
                future.result()
        threads.close()
        if errors:
            raise errors[0]

    @contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Turns an error in the block into a warning: the store only saves time."""
        try:
            yield
        except Exception as error:  # noqa: BLE001   backends raise what they like
            kind = type(error).__name__
            logger.warning("%s %s could not be %s: %s: %s", OPTION, self.url, what, kind, error)


def platform_name() -> str:
    """The part of the store for this platform. Names of kernels say the rest."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    return f"{platform.system()}-{platform.machine()}-{python}-triton{triton}"


def local_names() -> list[str]:
    """Names of the complete kernels and libraries in the local cache."""
    libraries = [path.name for path in kernel_folder().iterdir() if path.suffix in LIBRARIES]
    return libraries + [TRITON + path.name for path in _triton_folder().glob("*") if _is_whole(path)]


def archive_of(name: str) -> bytes:
    """A library, or the files of a kernel, as a tar archive without folders."""
    path = _path_of(name)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for file in files:
            if file.is_file():
                archive.add(file, file.name)
    return written.getvalue()


def extract(name: str, packed: bytes) -> None:
    """Unpacks it into the local cache, completely or not at all. Raises ValueError for a malformed
    archive."""
    path = _path_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetching-") as work:
        made = Path(work, path.name)
        if name.startswith(TRITON):
            made.mkdir()
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for member in archive:
                if not member.isreg() or Path(member.name).name != member.name:
                    raise ValueError(f"{name} must hold plain files only, got {member.name!r}")
                content = archive.extractfile(member)
                assert content is not None  # it is a file
                value = content.read()
                if member.name.startswith(GROUP):
                    value = _moved(value, path)
                (made / member.name if made.is_dir() else made).write_bytes(value)
        try:
            os.replace(made, path)
        except OSError:  # another process has put it there meanwhile
            if not path.exists():
                raise


def _moved(group: bytes, folder: Path) -> bytes:
    """Rewrites the whole paths by which Triton names a kernel's files, as they are paths of the machine that
    compiled it."""
    listed = json.loads(group)
    paths = {name: str(folder / name) for name in listed["child_paths"]}
    return json.dumps({**listed, "child_paths": paths}).encode()


def _path_of(name: str) -> Path:
    kernel = name.removeprefix(TRITON)
    is_name = Path(kernel).name == kernel and kernel != ".."
    if not is_name or not (name.startswith(TRITON) or name.endswith(LIBRARIES)):
        kinds = ", ".join(f"*{suffix}" for suffix in LIBRARIES)
        raise ValueError(f"a kernel or library must be named {kinds} or {TRITON}*, got {name!r}")
    if name.startswith(TRITON):
        return _triton_folder() / kernel
    return kernel_folder() / name


def _triton_folder() -> Path:
    return Path(os.environ["TRITON_CACHE_DIR"])


def _is_whole(folder: Path) -> bool:
    """True if Triton has written all files of a kernel, or the library of a launcher."""
    if not folder.is_dir() or folder.name.startswith("fetching-"):
        return False
    names = {path.name for path in folder.iterdir()}
    if any(name.startswith("tmp.pid_") for name in names):
        return False
    groups = [name for name in names if name.startswith(GROUP)]
    if not groups:
        return any(name.endswith(".so") for name in names)
    return all(set(json.loads((folder / name).read_bytes())["child_paths"]) <= names for name in groups)
