"""A rank's folder of block files, and the leftovers of other processes next to it. Raises OSError; the index
is disk.py's.

    path / fingerprint / name of the spec / rank / first byte of the key / key.kv

A file is written in its writer's own folder and renamed when it is complete. A lock on a folder shows that
its owner lives: the lock ends with the process, however that ends. Where the file system has no locks, every
owner counts as alive, and leftovers stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence

from shoal.kv.layout import CacheSpec
from shoal.kv.tiers.block_file import spec_name

FILE_NAME = re.compile(r"([0-9a-f]{32})\.kv")
SUBFOLDER = re.compile(r"[0-9a-f]{2}")
RANK = re.compile(r"rank(\d+)")
FINGERPRINT = re.compile(r"[0-9a-f]{32}")
WRITING = "writing-"
# errors of folders that others removed, never made, or protect
NOT_OURS = (FileNotFoundError, NotADirectoryError, PermissionError)
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class BlockFolder:
    """Files are written past the page cache where memory and file system allow: at twice the rate for a tenth
    of the CPU time."""

    def __init__(
        self, path: str, fingerprint: bytes, spec: CacheSpec, other_specs: Sequence[CacheSpec] = ()
    ) -> None:
        self.path, self.spec = path, spec
        self.spec_folder = os.path.join(path, fingerprint.hex(), spec_name(spec, other_specs))
        self.root = os.path.join(self.spec_folder, f"rank{spec.tp_rank}")
        self.direct = hasattr(os, "O_DIRECT")
        self._unfinished = ""  # the folder of files being written
        self._locks: list[int] = []  # descriptors
        self._made: set[str] = set()  # subfolders that are there

    def file(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.root}/{name[:2]}/{name}.kv"

    # Life

    def enter(self) -> None:
        """Makes the folders and locks them: a shared lock on the spec's folder, an exclusive one on the
        folder of unfinished files."""
        for attempt in range(3):
            self.leave()
            try:
                make_private(self.path, self.root)
                self._lock(self.spec_folder, fcntl.LOCK_SH)
                self._unfinished = os.path.join(self.root, WRITING + secrets.token_hex(8))
                os.mkdir(self._unfinished, 0o700)
                self._lock(self._unfinished, fcntl.LOCK_EX)
                return
            except FileNotFoundError:  # somebody prunes empty folders just now
                if attempt == 2:
                    raise

    def restore(self) -> None:
        """Makes again what somebody has removed."""
        self._made.clear()
        if not os.path.isdir(self._unfinished):
            self.enter()

    def leave(self) -> None:
        for fd in self._locks:
            os.close(fd)
        self._locks.clear()
        with contextlib.suppress(OSError):
            os.rmdir(self._unfinished)

    @property
    def is_there(self) -> bool:
        return os.path.isdir(self.root)

    @property
    def is_open_to_others(self) -> bool:
        """Says if others than its owner may list or enter the folder, or if another user owns it. Raises
        OSError."""
        status = os.stat(self.path)
        return bool(status.st_mode & 0o077) or status.st_uid != os.geteuid()

    # Files

    def prepare(self, key: bytes, front: bytes, data: memoryview) -> str:
        """Writes an unfinished file; returns its path. Nothing is left of one that fails."""
        subfolder = os.path.dirname(self.file(key))
        if subfolder not in self._made:
            with contextlib.suppress(FileExistsError):
                # not the folders above it: if they are gone, so is all that was there
                os.mkdir(subfolder, 0o700)
            self._made.add(subfolder)
        path = os.path.join(self._unfinished, key.hex())
        aligned = mmap.mmap(-1, len(front))
        aligned[:] = front
        try:
            if self.direct:
                try:
                    write_file(path, [memoryview(aligned), data.cast("B")], os.O_DIRECT)
                    return path
                except OSError as error:
                    if error.errno != errno.EINVAL:  # not here, or not from this memory
                        raise
                    self.direct = False
            write_file(path, [memoryview(aligned), data.cast("B")], 0)
        except OSError:
            delete(path)
            raise
        return path

    def finish(self, key: bytes, unfinished: str) -> None:
        try:
            os.replace(unfinished, self.file(key))
        except OSError:
            delete(unfinished)
            raise

    def load(self, key: bytes, front_bytes: int, into: memoryview) -> bytearray | None:
        """Returns the file's first bytes; the rest is in `into`. None: it has another length, or is not a
        regular file."""
        # Not blocking: somebody might have put a pipe there.
        fd = os.open(self.file(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            front = bytearray(front_bytes)
            if not stat.S_ISREG(status.st_mode) or status.st_size != front_bytes + into.nbytes:
                return None
            if not read_all(fd, [memoryview(front), into.cast("B")]):
                return None
            with contextlib.suppress(OSError):
                os.utime(fd)  # the age at the next start
            return front
        finally:
            os.close(fd)

    # Look-up

    def blocks(self) -> Iterator[tuple[str, bytes | None, os.stat_result]]:
        """Yields this rank's files with the key in their name (None: not a block's name) and their status.
        Nothing is opened."""
        for path, status in self._files(self.root):
            match = FILE_NAME.fullmatch(os.path.basename(path))
            yield path, None if match is None else bytes.fromhex(match[1]), status

    def abandoned(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yields the files of models, layouts and sizes that no living process uses; a rank's share of
        them, so that ranks don't compete."""
        for fingerprint in names(self.path, FINGERPRINT):
            for spec in names(os.path.join(self.path, fingerprint)):
                folder = os.path.join(self.path, fingerprint, spec)
                if folder == self.spec_folder or not is_abandoned(folder):
                    continue
                for rank in names(folder, RANK):
                    if int(rank[4:]) % self.spec.tp_size == self.spec.tp_rank:
                        for path, status in self._files(os.path.join(folder, rank)):
                            if FILE_NAME.fullmatch(os.path.basename(path)):
                                yield path, status

    def prune(self, path: str) -> None:
        """Removes the folders that the deletion of a file of others has left empty."""
        if path.startswith(self.root):
            return
        with contextlib.suppress(OSError):
            while (path := os.path.dirname(path)) != self.path:
                os.rmdir(path)

    def _files(self, rank_folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yields the files in the subfolders. Deletes the unfinished files of dead writers."""
        for name in names(rank_folder):
            folder = os.path.join(rank_folder, name)
            if name.startswith(WRITING) and is_abandoned(folder):
                for leftover in names(folder):
                    delete(os.path.join(folder, leftover))
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            elif SUBFOLDER.fullmatch(name):
                with contextlib.suppress(*NOT_OURS), os.scandir(folder) as entries:
                    for entry in entries:
                        try:
                            status = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:  # others delete what we look at
                            continue
                        yield entry.path, status

    def _lock(self, folder: str, kind: int) -> None:
        fd = os.open(folder, DIRECTORY)
        self._locks.append(fd)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, kind)  # may wait for the moment that an is_abandoned takes


def make_private(path: str, below: str) -> None:
    """Makes `path` and what leads from there to `below`, for the owner alone: os.makedirs gives its mode to
    the last folder only. Folders that exist stay as they are, and those above `path` get the usual rights."""
    above = os.path.dirname(os.path.abspath(path))
    if not os.path.exists(above):
        os.makedirs(above, exist_ok=True)
    names = os.path.relpath(below, path).split(os.sep)
    for depth in range(len(names) + 1):
        folder = os.path.join(path, *names[:depth])
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise


def is_abandoned(folder: str) -> bool:
    try:
        fd = os.open(folder, DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def delete(path: str) -> None:
    """Deletes a file. A folder at this path belongs to somebody else and stays."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
        os.unlink(path)


def names(folder: str, pattern: re.Pattern[str] | None = None) -> list[str]:
    """Lists a folder. Empty if it is not a folder, or not readable."""
    try:
        return [name for name in os.listdir(folder) if pattern is None or pattern.fullmatch(name)]
    except NOT_OURS:
        return []


def write_file(path: str, buffers: list[memoryview], flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        while buffers:
            advance(buffers, os.writev(fd, buffers))
    finally:
        os.close(fd)


def read_all(fd: int, buffers: list[memoryview]) -> bool:
    """Fills the buffers from the start of the file. False: the file is shorter."""
    offset = 0
    while buffers:
        count = os.preadv(fd, buffers, offset)
        if count == 0:
            return False
        offset += count
        advance(buffers, count)
    return True


def advance(buffers: list[memoryview], count: int) -> None:
    """Drops the first `count` bytes."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]
