"""The disk tier: one file a block, found again after a restart. Nothing wrong is ever served, nothing that fails is ever raised.

    path / fingerprint / group of the spec / rank / first byte of the key / key.kv

A file is written under another name, in a folder of its writer's, and renamed when it is whole; there is no fsync: what a power failure
tears is noticed by its length or checksum. Several engines may use one path: names say what files hold, so one may find, overwrite or evict
another's file and that only costs a miss; each counts the files that it found at its start or wrote itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import re
import secrets
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from shoal.errors import ConfigError
from shoal.kv.block_file import BlockFormat, BlockMeta, BlockSpec
from shoal.kv.io_threads import IoThreads, done
from shoal.kv.policy import make_order

logger = logging.getLogger(__name__)

Event = BlockMeta | bytes    # a block was stored, or the one of this key was removed
PAGE = 4096                  # file systems give space in such pieces
FILE_NAME = re.compile(r"([0-9a-f]{32})\.kv")
SUBFOLDER = re.compile(r"[0-9a-f]{2}")
FINGERPRINT = re.compile(r"[0-9a-f]{32}")
WRITING = "writing-"         # folders of files that are not whole yet
RETRY_S, MAX_RETRY_S = 1.0, 300.0
FULL = (errno.ENOSPC, errno.EDQUOT)
# This file can't be written, but others can; this process is short of something, which says nothing of the file.
OF_ONE_FILE = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY)
OF_OURSELVES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts since the start, but for the first three."""

    blocks: int
    num_bytes: int               # as disks have them: whole pages
    pending: int                 # reads and writes that wait or run
    written: int
    read: int
    evicted: int
    refused: int                 # writes that were not tried: too many waited, or the tier rests after an error
    problems: dict[str, int]     # kind -> count; each cost a block, none a wrong answer


class DiskTier:
    """Raises ConfigError, from its constructor alone, if `path` can't be used or `max_bytes` is less than one file.

    Buffers must stay as they are until the future of their read or write is done. With `record_events` somebody must call take_events.
    """

    def __init__(self, path: str, max_bytes: int, fingerprint: bytes, spec: BlockSpec, policy: str = "lru", threads: int = 2,
                 max_pending: int = 64, record_events: bool = False) -> None:
        self.path, self.max_bytes, self.spec = path, max_bytes, spec
        self._format = BlockFormat(fingerprint, spec)
        if max_bytes < (least := in_pages(self._format.least_bytes + PAGE)):
            raise ConfigError(f"kv_disk_bytes {max_bytes} is less than the {least} bytes of one block's file; raise it")
        self._group = os.path.join(path, fingerprint.hex(), spec.group)
        self._root = os.path.join(self._group, f"rank{spec.tp_rank}")
        self._order = make_order(policy)
        self._bytes: dict[bytes, int] = {}           # findable blocks and what their files take
        self._announced: set[bytes] = set()          # of those, the ones whose event was recorded
        self._doomed: dict[bytes, int] = {}          # forgotten, not deleted yet
        self._foreign: list[tuple[str, int]] = []    # files of models that nobody runs, (path, bytes), youngest first
        self._used = 0                               # bytes of all these, and of writes under way
        self._writing: dict[bytes, Future[bool]] = {}
        self._unwanted: set[bytes] = set()           # forgotten while they are written
        self._events: list[Event] | None = [] if record_events else None
        self._counts: Counter[str] = Counter()
        self._problems: Counter[str] = Counter()
        self._rests_until, self._retry_s = 0.0, RETRY_S
        self._lock = threading.Lock()                # of the fields above; never held during I/O
        self._files = threading.RLock()              # of names: deletions and renames are one at a time, and agree with the index
        self._reads = IoThreads("kv-disk-read", threads, max_pending * 16)
        self._writes = IoThreads("kv-disk-write", threads, max_pending)
        self._folders: list[int] = []                # descriptors that hold locks
        self._own = ""                               # the folder of files that we have not finished
        self._made: set[str] = set()                 # subfolders that are there
        try:
            self._enter()
            self._scan()
        except OSError as error:
            self._leave()
            raise ConfigError(f"kv_disk_path {path} can't be used: {error.strerror or error} ({error.filename}); "
                              "name a folder that can be created and written") from None

    # What is there

    def contains(self, key: bytes) -> bool:
        return key in self._bytes

    def match(self, keys: Iterable[bytes]) -> int:
        """How many of the first keys are there."""
        count = 0
        with self._lock:
            for key in keys:
                if key not in self._bytes:
                    break
                count += 1
        return count

    def touch(self, keys: Sequence[bytes]) -> None:
        """These blocks of a sequence, in its order, are wanted again: they stay longer, the head longer than the tail."""
        with self._lock:
            for key in reversed(keys):
                if key in self._bytes:
                    self._order.use(key)

    # Blocks in and out

    def write(self, meta: BlockMeta, data: memoryview) -> Future[bool]:
        """Whether the block is on disk. A block that is there already is not written again."""
        assert data.nbytes == self.spec.block_bytes
        with self._lock:
            if meta.key in self._bytes:
                return done(True)
            running = self._writing.get(meta.key)
            if running is not None and not running.done():
                self._unwanted.discard(meta.key)
                return running
            future = self._writes.submit(partial(self._write, meta, data)) if time.monotonic() >= self._rests_until else None
            if future is None:
                self._counts["refused"] += 1
                return done(False)
            self._writing[meta.key] = future
            return future

    def read(self, meta: BlockMeta, into: memoryview) -> Future[bool]:
        """Whether the block is in `into` now, every byte verified. If not, `into` holds anything, and the block is not there any more
        unless the cause will pass."""
        assert into.nbytes == self.spec.block_bytes and not into.readonly
        future = self._reads.submit(partial(self._read, meta, into)) if self.contains(meta.key) else None
        return future if future is not None else done(False)

    def forget(self, keys: Iterable[bytes] | None = None) -> None:
        """These blocks (all, without `keys`) can't be found any more; their files are deleted in the background."""
        with self._lock:
            keys = [*self._bytes, *self._writing] if keys is None else list(keys)
            for key in keys:
                if key in self._writing:
                    self._unwanted.add(key)
                if key in self._bytes:
                    self._doomed[key] = self._doomed.get(key, 0) + self._bytes[key]
                    self._drop(key)
        self._writes.submit(self._delete_doomed)

    # Life

    def flush(self, timeout_s: float) -> int:
        """Waits for the writes under way, no longer than this. Returns how many are left."""
        return self._writes.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Drops what waits (flush first), lets what runs come to its end, within the time."""
        deadline = time.monotonic() + timeout_s
        self._writes.close(timeout_s)
        self._reads.close(max(0.0, deadline - time.monotonic()))
        self._delete_doomed(deadline)
        self._leave()

    def take_events(self) -> list[Event]:
        """What was stored (written, or read for the first time since the start) and removed since the last call, in order."""
        with self._lock:
            events, self._events = self._events or [], None if self._events is None else []
            return events

    def stats(self) -> TierStats:
        with self._lock:
            counts = self._counts
            return TierStats(len(self._bytes), self._used, self._writes.pending + self._reads.pending, counts["written"], counts["read"],
                             counts["evicted"], counts["refused"], dict(self._problems))

    def check(self) -> None:
        """Proves the books, when nothing is pending."""
        with self._lock:
            assert sorted(self._order) == sorted(self._bytes), "the order has other keys than the index"
            held = sum(self._bytes.values()) + sum(self._doomed.values()) + sum(num_bytes for _, num_bytes in self._foreign)
            assert held == self._used <= self.max_bytes, f"{held} bytes are held, {self._used} counted, {self.max_bytes} allowed"
            assert self._announced <= self._bytes.keys() and not self._unwanted

    # Jobs

    def _write(self, meta: BlockMeta, data: memoryview) -> bool:
        front = self._format.seal(meta, data)
        num_bytes = in_pages(len(front) + data.nbytes)
        reserved = written = False
        try:
            reserved = self._make_room(num_bytes)
            if reserved:
                try:
                    written = self._store(meta, front, data, num_bytes)
                except OSError as error:    # a folder that is gone comes back; a full disk is a bound like our own: once
                    if error.errno == errno.ENOENT:
                        self._restore_folders()
                    elif error.errno not in FULL or not self._evict():
                        raise
                    written = self._store(meta, front, data, num_bytes)
                self._rests_until, self._retry_s = 0.0, RETRY_S
            else:
                self._problem("no room", meta.key)
        except OSError as error:
            self._fail(error, meta.key)
        with self._lock:
            if reserved and not written:
                self._used -= num_bytes
            self._writing.pop(meta.key, None)
            self._unwanted.discard(meta.key)
        return written

    def _store(self, meta: BlockMeta, front: bytes, data: memoryview, num_bytes: int) -> bool:
        """False: nobody wants it any more. Raises OSError, with nothing left behind."""
        path, temporary = self._path(meta.key), os.path.join(self._own, meta.key.hex())
        subfolder = os.path.dirname(path)
        if subfolder not in self._made:
            os.makedirs(subfolder, 0o700, exist_ok=True)
            self._made.add(subfolder)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                write_all(fd, [memoryview(front), data.cast("B")])
            finally:
                os.close(fd)
            with self._files:
                if meta.key in self._unwanted:
                    os.unlink(temporary)
                    return False
                os.replace(temporary, path)
                with self._lock:
                    self._used -= self._doomed.pop(meta.key, 0)    # what it replaced
                    self._bytes[meta.key] = num_bytes
                    self._order.use(meta.key)
                    self._counts["written"] += 1
                    self._announce(meta)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return True

    def _read(self, meta: BlockMeta, into: memoryview) -> bool:
        try:
            # Not blocking: somebody might have put a pipe there.
            fd = os.open(self._path(meta.key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                problem = self._load(fd, meta, into)
                if problem is None:
                    with contextlib.suppress(OSError):
                        os.utime(fd)    # the next start's order
            finally:
                os.close(fd)
        except OSError as error:
            problem = "missing" if error.errno == errno.ENOENT else name_of(error)
            if error.errno in OF_OURSELVES:
                self._problem(problem, meta.key)
                return False
        if problem is not None:
            self._problem(problem, meta.key)
            self._remove(meta.key)
            if problem == "missing" and not os.path.isdir(self._root):
                self._forget_vanished()
            return False
        with self._lock:
            self._counts["read"] += 1
            self._announce(meta)
        return True

    def _load(self, fd: int, meta: BlockMeta, into: memoryview) -> str | None:
        """What is wrong with the file; None: the block is in `into`."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return "no file"
        front = bytearray(self._format.front_bytes(meta))
        if status.st_size != self._format.num_bytes(meta) or not read_all(fd, [memoryview(front), into.cast("B")]):
            return self._format.problem(meta, os.pread(fd, PAGE, 0), None)
        return self._format.problem(meta, front, into)

    # Room

    def _make_room(self, num_bytes: int) -> bool:
        """Counts them as used, once enough files are deleted. False: even without any it is too much. Raises OSError."""
        while True:
            with self._lock:
                if self._used + num_bytes <= self.max_bytes:
                    self._used += num_bytes
                    return True
            if not self._evict():
                return False

    def _evict(self) -> bool:
        """Deletes a file: a forgotten one, else one of a model that nobody runs, else the coldest. False: there is none. Raises OSError."""
        with self._files:
            with self._lock:
                doomed, coldest = next(iter(self._doomed), None), next(iter(self._order), None)
                if doomed is not None:
                    path, num_bytes = self._path(doomed), self._doomed.pop(doomed)
                elif self._foreign:
                    path, num_bytes = self._foreign.pop()
                elif coldest is not None:
                    path, num_bytes = self._path(coldest), self._bytes[coldest]
                else:
                    return False
            try:
                delete(path)
            except OSError:
                with self._lock:    # it stays, and is the last to be tried again
                    if doomed is not None:
                        self._doomed[doomed] = num_bytes
                    elif coldest is not None and path == self._path(coldest):
                        self._order.use(coldest)
                    else:
                        self._foreign.insert(0, (path, num_bytes))
                raise
            with self._lock:
                self._used -= num_bytes
                if doomed is None:
                    self._counts["evicted"] += 1
                    if coldest is not None and path == self._path(coldest):
                        self._drop(coldest)
        if not path.startswith(self._root):
            remove_empty_folders(path, self.path)
        return True

    def _delete_doomed(self, deadline: float = math.inf) -> bool:
        while time.monotonic() < deadline:
            with self._files:
                with self._lock:
                    if not self._doomed:
                        return True
                try:
                    self._evict()
                except OSError as error:
                    self._fail(error, None)
                    return False
        return False

    def _remove(self, key: bytes) -> None:
        """A file that is of no use."""
        path = self._path(key)
        with self._files:
            try:
                delete(path)
                remains = False
            except OSError:
                remains = True
            with self._lock:
                num_bytes = self._bytes.get(key, 0)
                self._drop(key)
                if remains:
                    self._foreign.append((path, num_bytes))
                else:
                    self._used -= num_bytes

    # Folders

    def _enter(self) -> None:
        """Makes our folders and locks them: the group's shared, which says that its files are in use; our own for unfinished files."""
        self._leave()
        os.makedirs(self._root, 0o700, exist_ok=True)
        lock_folder(self._group, fcntl.LOCK_SH, self._folders)
        self._own = os.path.join(self._root, WRITING + secrets.token_hex(8))
        os.mkdir(self._own, 0o700)
        lock_folder(self._own, fcntl.LOCK_EX, self._folders)

    def _leave(self) -> None:
        for fd in self._folders:
            os.close(fd)
        self._folders.clear()
        with contextlib.suppress(OSError):
            os.rmdir(self._own)

    def _restore_folders(self) -> None:
        with self._files:
            if not os.path.isdir(self._root):
                self._forget_vanished()
            if not os.path.isdir(self._own):
                self._enter()
            self._made.clear()

    def _forget_vanished(self) -> None:
        with self._lock:
            self._used -= sum(self._bytes.values()) + sum(self._doomed.values())
            self._doomed.clear()
            for key in list(self._bytes):
                self._drop(key)

    def _scan(self) -> None:
        """Takes the index from names and sizes, ages from the times of last use. Nothing is opened: who reads a file verifies it."""
        start = time.perf_counter()
        found = []
        for path, status in self._files_of(self._root):
            match = FILE_NAME.fullmatch(os.path.basename(path))
            if match is None or not stat.S_ISREG(status.st_mode):
                self._problem("no file", path)
            elif status.st_size < self._format.least_bytes:
                self._problem("torn", path)
                delete(path)
            else:
                found.append((status.st_mtime_ns, bytes.fromhex(match[1]), in_pages(status.st_size)))
        for _, key, num_bytes in sorted(found):
            self._bytes[key] = num_bytes
            self._order.use(key)
        foreign = []
        for fingerprint in names_in(self.path, FINGERPRINT):
            for group in names_in(os.path.join(self.path, fingerprint)):
                folder = os.path.join(self.path, fingerprint, group)
                if folder == self._group or not is_abandoned(folder):
                    continue
                for rank in names_in(folder, re.compile(r"rank\d+")):
                    if int(rank[4:]) % self.spec.tp_size == self.spec.tp_rank:    # ranks share the work
                        foreign += [(status.st_mtime_ns, path, in_pages(status.st_size))
                                    for path, status in self._files_of(os.path.join(folder, rank)) if FILE_NAME.fullmatch(path[-35:])]
        self._foreign = [(path, num_bytes) for _, path, num_bytes in sorted(foreign, reverse=True)]
        self._used = sum(self._bytes.values()) + sum(num_bytes for _, num_bytes in self._foreign)
        if found or foreign:
            logger.info("%s: %d blocks of this model, %d files of others, %.1f GiB; read in %.2f s", self.path, len(found), len(foreign),
                        self._used / 2**30, time.perf_counter() - start)
        self._make_room(0)

    def _files_of(self, rank_folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """What lies in its subfolders. Unfinished files whose writer is dead are deleted."""
        for name in names_in(rank_folder):
            folder = os.path.join(rank_folder, name)
            if name.startswith(WRITING) and is_abandoned(folder):
                for leftover in names_in(folder):
                    self._problem("left unfinished", leftover)
                    delete(os.path.join(folder, leftover))
                os.rmdir(folder)
            elif SUBFOLDER.fullmatch(name):
                with os.scandir(folder) as entries:
                    for entry in entries:
                        yield entry.path, entry.stat(follow_symlinks=False)

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._root}/{name[:2]}/{name}.kv"

    # Under self._lock

    def _drop(self, key: bytes) -> None:
        """From the index; its bytes are the caller's to count."""
        if self._bytes.pop(key, None) is None:
            return
        self._order.discard(key)
        if key in self._announced:
            self._announced.remove(key)
            if self._events is not None:
                self._events.append(key)

    def _announce(self, meta: BlockMeta) -> None:
        if self._events is not None and meta.key in self._bytes and meta.key not in self._announced:
            self._announced.add(meta.key)
            self._events.append(meta)

    # Problems

    def _problem(self, kind: str, what: bytes | str | None) -> None:
        """Counts it; the first of its kind is logged."""
        with self._lock:
            self._problems[kind] += 1
            first = self._problems[kind] == 1
        if first:
            name = what.hex() if isinstance(what, bytes) else what
            logger.warning("%s: a block is lost to the disk tier: %s (%s); more of this kind are only counted", self.path, kind, name)

    def _fail(self, error: OSError, what: bytes | None) -> None:
        """A write failed. Unless that is this file's own trouble, the tier takes no more for a while, longer each time."""
        self._problem(name_of(error), what)
        if error.errno not in OF_ONE_FILE + OF_OURSELVES:
            with self._lock:
                self._rests_until = time.monotonic() + self._retry_s
                self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)


def in_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def name_of(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error))


def delete(path: str) -> None:
    """Whatever is not a file there is somebody else's and stays."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
        os.unlink(path)


def remove_empty_folders(path: str, end: str) -> None:
    with contextlib.suppress(OSError):
        while (path := os.path.dirname(path)) != end:
            os.rmdir(path)


def names_in(folder: str, pattern: re.Pattern[str] | None = None) -> list[str]:
    """Empty if it is no folder."""
    try:
        return [name for name in os.listdir(folder) if pattern is None or pattern.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def lock_folder(folder: str, kind: int, held: list[int]) -> None:
    """Adds the descriptor whose closing, or whose process's death, gives up the lock. Where there are no locks, nobody is thought dead."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    held.append(fd)
    with contextlib.suppress(OSError):
        fcntl.flock(fd, kind | fcntl.LOCK_NB)


def is_abandoned(folder: str) -> bool:
    """Whether no living process, of this host at least, holds a lock on it."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def write_all(fd: int, pieces: list[memoryview]) -> None:
    while pieces:
        advance(pieces, os.writev(fd, pieces))


def read_all(fd: int, pieces: list[memoryview]) -> bool:
    """Fills them from the start of the file. False: it ended before."""
    offset = 0
    while pieces:
        count = os.preadv(fd, pieces, offset)
        if count == 0:
            return False
        offset += count
        advance(pieces, count)
    return True


def advance(pieces: list[memoryview], count: int) -> None:
    """Drops so many first bytes."""
    while pieces and count >= len(pieces[0]):
        count -= len(pieces.pop(0))
    if count:
        pieces[0] = pieces[0][count:]
