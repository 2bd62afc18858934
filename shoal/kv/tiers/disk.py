"""The disk tier: one file a block, found again after a restart. It never serves a wrong block and never
raises an error of the disk.

There is no fsync: a file that a power failure tears is noticed by its length or checksum. Several engines may
use one path: names say what files hold, so one may overwrite or evict another's file and that only costs a
miss; each counts the files that it found at its start or wrote itself, so the bound holds for each of them,
not for their sum.
"""

from __future__ import annotations

import errno
import logging
import math
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import takewhile

from shoal.errors import ConfigError
from shoal.files.io_threads import Breaker, IoThreads, close_all, done
from shoal.kv.layout import CacheSpec
from shoal.kv.tiers.block_file import BlockFormat, BlockMeta, Event, in_pages
from shoal.kv.tiers.block_folder import BlockFolder, delete
from shoal.kv.tiers.eviction import EvictionOrder
from shoal.kv.tiers.tier import TierStats

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
OF_ONE_FILE = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY)  # other files can be written
# Errors of this process, which say nothing of the files
OF_OURSELVES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)


class DiskTier:
    """A Tier (kv/tiers/tier.py) in the folder `path`, of at most `max_bytes`. Raises ConfigError, from its
    constructor alone, if the folder can't be used or `max_bytes` is less than one file. With `record_events`
    the caller must call take_events. `other_specs`: of further groups of layers, whose blocks have as many
    bytes.
    """

    must_be_asked = False

    def __init__(
        self,
        path: str,
        max_bytes: int,
        fingerprint: bytes,
        spec: CacheSpec,
        policy: str = "lru",
        threads: int = 4,
        max_pending: int = 64,
        record_events: bool = False,
        other_specs: Sequence[CacheSpec] = (),
    ) -> None:
        self.path, self.max_bytes, self.spec = path, max_bytes, spec
        self._format = BlockFormat(fingerprint, spec, other_specs)
        least = in_pages(self._format.least_bytes)
        self._max_blocks = max_bytes // least
        if not self._max_blocks:
            raise ConfigError(
                f"kv_disk_bytes must be at least {least} a rank, one block's file, got {max_bytes}; raise it"
            )
        self._folder = BlockFolder(path, fingerprint, spec, other_specs)
        self._order = EvictionOrder(policy)
        self._bytes: dict[bytes, int] = {}  # findable blocks, and what their files take
        self._verified: set[bytes] = set()  # findable blocks that were written or read since the start
        # Files to delete before any other (forgotten blocks, abandoned models), with their bytes
        self._doomed: dict[str, int] = {}
        self._stuck = 0  # bytes of files that can't be deleted
        self._used = 0  # bytes of all these, and of writes under way
        self._writing: dict[bytes, Future[bool]] = {}
        self._unwanted: set[bytes] = set()  # forgotten while they are written
        self._events: list[Event] | None = [] if record_events else None
        self._counts: Counter[str] = Counter()
        self._problems: Counter[str] = Counter()
        self._breaker = Breaker(failures=1)
        self._lock = threading.Lock()  # guards the fields above; never held during I/O
        # Held over each deletion and each rename, together with the update of the index
        self._names = threading.RLock()
        self._reads = IoThreads("kv-disk-read", threads, 16 * max_pending)
        self._writes = IoThreads("kv-disk-write", threads, max_pending)
        try:
            self._folder.enter()
            if self._folder.is_open_to_others:
                logger.warning(
                    "kv_disk_path %s is open to others than this process's user, and users' texts "
                    "can be recovered from blocks: chmod 700 it",
                    path,
                )
            self._scan()
        except OSError as error:
            self._folder.leave()
            raise ConfigError(
                f"kv_disk_path {path} can't be used: {error}; name a folder that can be created and written"
            ) from None

    # Look-up

    def contains(self, key: bytes) -> bool:
        return key in self._bytes

    def match(self, keys: Iterable[bytes]) -> int:
        """Returns how many of the first keys are there, as far as known. No I/O."""
        return sum(1 for _ in takewhile(self.contains, keys))

    def look_up(self, keys: Sequence[bytes]) -> Future[int]:
        return done(self.match(keys))

    # Blocks in and out

    def write(self, meta: BlockMeta, data: memoryview) -> Future[bool]:
        """Writes a block; the result says if it is on disk. A block that is there already is not written
        again."""
        assert data.nbytes == self.spec.block_bytes
        with self._lock:
            if meta.key in self._bytes:
                return done(True)
            running = self._writing.get(meta.key)
            if running is not None and not running.done():
                self._unwanted.discard(meta.key)
                return running
            future = self._writes.submit(partial(self._write, meta, data)) if self._breaker.allows() else None
            if future is None:
                self._counts["refused"] += 1
                return done(False)
            self._writing[meta.key] = future
            return future

    def read(self, meta: BlockMeta, into: memoryview) -> Future[bool]:
        """Reads a block and counts a use; the result says if it is in `into`, every byte verified. If not,
        `into` has undefined content, and the block is forgotten unless the cause is temporary."""
        assert into.nbytes == self.spec.block_bytes and not into.readonly
        with self._lock:
            if meta.key not in self._bytes:
                return done(False)
            self._order.use(meta.key)
        return self._reads.submit(partial(self._read, meta, into)) or done(False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forgets these blocks. Their files are deleted in the background."""
        with self._lock:
            self._forget(list(keys))

    def reset(self) -> None:
        """Forgets all blocks. Their files are deleted in the background."""
        with self._lock:
            self._forget([*self._bytes, *self._writing])

    # Life

    def close(self, timeout_s: float = 5.0) -> None:
        """Drops waiting jobs and waits for running ones, up to `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        close_all((self._writes, self._reads), timeout_s)
        with self._lock:
            forgotten = [path for path in self._doomed if path.startswith(self._folder.root)]
        self._delete_all(forgotten, deadline)
        self._folder.leave()

    def take_events(self) -> list[Event]:
        """Returns the blocks stored (written, or read for the first time since the start) and removed since
        the last call, in order."""
        with self._lock:
            events, self._events = self._events or [], None if self._events is None else []
            return events

    def stats(self) -> TierStats:
        with self._lock:
            counts = self._counts
            return TierStats(
                blocks=len(self._bytes),
                num_bytes=self._used,
                capacity_bytes=self.max_bytes,
                capacity_blocks=self._max_blocks,
                pending=self._writes.pending + self._reads.pending,
                written=counts["written"],
                read=counts["read"],
                evicted=counts["evicted"],
                refused=counts["refused"],
                problems=dict(self._problems),
            )

    def check(self) -> None:
        """Checks that order, index and byte counts agree, when nothing is pending."""
        with self._lock:
            assert self._order.keys() == self._bytes.keys(), "the order has other keys than the index"
            self._order.check()
            held = sum(self._bytes.values()) + sum(self._doomed.values()) + self._stuck
            assert held == self._used <= self.max_bytes, (
                f"{held} bytes are held, {self._used} counted, {self.max_bytes} allowed"
            )
            assert self._verified <= self._bytes.keys() and not self._unwanted and not self._writing

    # Jobs

    def _write(self, meta: BlockMeta, data: memoryview) -> bool:
        num_bytes, reserved, written = 0, False, False
        try:
            front = self._format.seal(meta, data)
            num_bytes = in_pages(len(front) + data.nbytes)
            reserved = self._make_room(num_bytes)
            if reserved:
                try:
                    self._store(meta, front, data, num_bytes)
                except OSError as error:
                    if not self._mend(error):
                        raise
                    self._store(meta, front, data, num_bytes)
                written = True
        except OSError as error:
            self._problem(name_of(error), meta.key)
            if error.errno not in OF_ONE_FILE + OF_OURSELVES:
                with self._lock:
                    self._breaker.failed()
        finally:
            with self._lock:
                if written:
                    self._breaker.succeeded()
                elif reserved:
                    self._used -= num_bytes
                self._writing.pop(meta.key, None)
                self._unwanted.discard(meta.key)
        return written

    def _store(self, meta: BlockMeta, front: bytes, data: memoryview, num_bytes: int) -> None:
        unfinished, path = self._folder.prepare(meta.key, front, data), self._folder.file(meta.key)
        with self._names:
            self._folder.finish(meta.key, unfinished)
            with self._lock:
                self._used -= self._doomed.pop(path, 0)  # the file that this one replaced
                self._bytes[meta.key] = num_bytes
                self._order.use(meta.key)
                self._counts["written"] += 1
                unwanted = meta.key in self._unwanted
                if unwanted:
                    self._doom(meta.key)
                else:
                    self._verify(meta)
            if unwanted:
                self._delete_all([path])

    def _mend(self, error: OSError) -> bool:
        """Says if the cause is gone: makes a vanished folder again, and evicts a block if the disk is
        full."""
        if error.errno == errno.ENOENT:
            with self._names:
                if not self._folder.is_there:
                    with self._lock:
                        for key in list(self._bytes):
                            self._doom(key)
                self._folder.restore()
            return True
        return error.errno in FULL and self._delete_one()

    def _read(self, meta: BlockMeta, into: memoryview) -> bool:
        try:
            front = self._folder.load(meta.key, self._format.front_bytes(meta), into)
            problem = "torn" if front is None else self._format.problem(meta, front, into)
        except OSError as error:
            problem = "missing" if error.errno == errno.ENOENT else name_of(error)
            if error.errno in OF_OURSELVES:
                self._problem(problem, meta.key)
                return False
        if problem is None:
            with self._lock:
                self._counts["read"] += 1
                self._verify(meta)
            return True
        if problem == "missing" and not self.contains(meta.key):  # we have deleted it since it was asked for
            return False
        self._problem(problem, meta.key)
        with self._lock:
            doomed = list(self._bytes) if problem == "missing" and not self._folder.is_there else [meta.key]
            paths = [self._doom(key) for key in doomed if key in self._bytes]
        self._delete_all(paths)
        return False

    # Room

    def _make_room(self, num_bytes: int) -> bool:
        """Reserves `num_bytes` after deleting enough files. False: there are not enough. Raises OSError if
        a file can't be deleted."""
        while True:
            with self._names:
                with self._lock:
                    if self._used + num_bytes <= self.max_bytes:
                        self._used += num_bytes
                        return True
                if not self._delete_one():
                    self._problem("no room", f"a file of {num_bytes} bytes, {self.max_bytes} allowed")
                    return False

    def _delete_one(self) -> bool:
        """Deletes a doomed file, else the coldest block's. False: nothing was left to delete. Raises
        OSError."""
        with self._names:
            with self._lock:
                path = next(iter(self._doomed), None)
                if path is None and (coldest := self._order.coldest()) is not None:
                    path = self._doom(coldest)
                    self._counts["evicted"] += 1
            if path is not None:
                self._delete(path)
            return path is not None

    def _delete(self, path: str) -> None:
        """Deletes a doomed file, unless it has been replaced meanwhile. Raises OSError; then the file
        stays, and counts, until the next start."""
        with self._names:
            if path not in self._doomed:
                return
            try:
                delete(path)
            except OSError:
                with self._lock:
                    self._stuck += self._doomed.pop(path)
                raise
            with self._lock:
                self._used -= self._doomed.pop(path)
            self._folder.prune(path)

    def _delete_all(self, paths: list[str], deadline: float = math.inf) -> bool:
        for path in paths:
            if time.monotonic() < deadline:
                try:
                    self._delete(path)
                except OSError as error:
                    self._problem(name_of(error), path)
        return True

    def _scan(self) -> None:
        """Builds the index from names and sizes, ages from the times of last use. Nothing is opened: each
        read verifies its file."""
        start = time.perf_counter()
        found = []
        for path, key, status in self._folder.blocks():
            if key is None or not stat.S_ISREG(status.st_mode):
                self._problem("no block", path)
            elif status.st_size < self._format.least_bytes:
                self._problem("torn", path)
                delete(path)
            else:
                found.append((status.st_mtime_ns, key, in_pages(status.st_size)))
        for _, key, num_bytes in sorted(found):
            self._bytes[key] = num_bytes
            self._order.use(key)
        abandoned = sorted(
            (status.st_mtime_ns, path, in_pages(status.st_size)) for path, status in self._folder.abandoned()
        )
        self._doomed = {path: num_bytes for _, path, num_bytes in abandoned}
        self._used = sum(self._bytes.values()) + sum(self._doomed.values())
        if found or abandoned:
            logger.info(
                "%s: %d blocks of this model and %d files of others, %.1f GiB, found in %.2f s",
                self.path,
                len(found),
                len(abandoned),
                self._used / 2**30,
                time.perf_counter() - start,
            )
        self._make_room(0)

    # Under self._lock

    def _forget(self, keys: list[bytes]) -> None:
        self._unwanted |= self._writing.keys() & set(keys)
        paths = [self._doom(key) for key in keys if key in self._bytes]
        self._writes.submit(partial(self._delete_all, paths))

    def _doom(self, key: bytes) -> str:
        """Forgets a block. Returns its file, which must be deleted and whose bytes still count."""
        path = self._folder.file(key)
        self._doomed[path] = self._doomed.get(path, 0) + self._bytes.pop(key)
        self._order.discard(key)
        if key in self._verified:
            self._verified.remove(key)
            if self._events is not None:
                self._events.append(key)
        return path

    def _verify(self, meta: BlockMeta) -> None:
        """Records that the file holds this block."""
        if meta.key in self._bytes and meta.key not in self._verified:
            self._verified.add(meta.key)
            if meta.parent is not None:
                self._order.follow(meta.key, meta.parent)
            if self._events is not None:
                self._events.append(meta)

    # Without it

    def _problem(self, kind: str, what: bytes | str) -> None:
        """Counts a problem; logs the first of its kind."""
        with self._lock:
            self._problems[kind] += 1
            first = self._problems[kind] == 1
        if first:
            logger.warning(
                "%s: the disk tier continues without a block: %s (%s); more of this kind are only counted",
                self.path,
                kind,
                what.hex() if isinstance(what, bytes) else what,
            )


def name_of(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error))
