"""The shared tier: blocks as files or objects under an fsspec URL, for many engines on many machines at once.

    url / fingerprint / name of the spec / rank / first byte of the key / key.kv

Names say what objects hold and readers verify every byte, so writers need no locks. A store may be slow or
dead: its answers are remembered for a while, every call ends in time with "no", and after a few failures in a
row no calls are made until a trial succeeds. Nothing is evicted here; the store does that itself (an object
store's lifecycle rules).
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import takewhile
from typing import Any, Generic, TypeVar

from shoal.errors import ConfigError
from shoal.files.io_threads import Breaker, IoThreads, close_all, done
from shoal.files.object_store import ObjectStore, shown
from shoal.kv.layout import CacheSpec
from shoal.kv.tiers.block_file import BlockFormat, BlockMeta, Event, spec_name
from shoal.kv.tiers.tier import TierStats

logger = logging.getLogger(__name__)
T = TypeVar("T", bool, int)

PRESENT_S, ABSENT_S = 300.0, 10.0  # how long an answer is valid
MAX_KNOWN = 1 << 18  # remembered answers: about 40 MiB


class Call(Generic[T]):
    """An answer that is given once: by the job, or with "no" by the clock. Afterwards the job must not
    touch its caller's buffer."""

    def __init__(self, no: T, deadline: float) -> None:
        self.no: T = no
        self.deadline = deadline
        self.future: Future[T] = Future()
        self._lock = threading.Lock()

    def answer(self, result: T, before: Callable[[], None] | None = None) -> bool:
        """Gives the answer, and says if it was in time. `before` runs first, for the last write to the
        buffer."""
        with self._lock:
            if self.future.done():
                return False
            if before is not None:
                before()
            self.future.set_result(result)
            return True

    def taken(self, take: Callable[[], bytes]) -> bytes | None:
        """Returns `take()`, a copy from the buffer, if there still is time."""
        with self._lock:
            return None if self.future.done() else take()


class StoreTier:
    """A Tier (kv/tiers/tier.py) under an fsspec URL. Raises ConfigError, from its constructor alone, if
    fsspec or the URL's backend is missing or nothing can be written there. Futures are done after
    `timeout_s` seconds at the latest. `other_specs`: of further groups of layers, whose blocks have as many
    bytes."""

    must_be_asked = True

    def __init__(
        self,
        url: str,
        fingerprint: bytes,
        spec: CacheSpec,
        threads: int = 8,
        max_pending: int = 64,
        timeout_s: float = 10.0,
        other_specs: Sequence[CacheSpec] = (),
    ) -> None:
        self.url, self.spec, self.timeout_s = shown(url), spec, timeout_s
        self._format = BlockFormat(fingerprint, spec, other_specs)
        self._objects = ObjectStore(url, "kv_store")
        self._fs = self._objects.fs
        folder = spec_name(spec, other_specs)
        self._root = f"{self._objects.root}/{fingerprint.hex()}/{folder}/rank{spec.tp_rank}"
        # For each key: True if the block is there, and until when that is valid
        self._known: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._problems: Counter[str] = Counter()
        self._breaker = Breaker(failures=3)
        self._lock = threading.Lock()  # guards the fields above
        self._reads = IoThreads("kv-store-read", threads, 16 * max_pending)
        self._writes = IoThreads("kv-store-write", threads, max_pending)
        self._calls: deque[Call[Any]] = deque()  # in the order of their deadlines
        self._closed = False
        self._changed = threading.Condition()
        self._clock = threading.Thread(target=self._watch, name="kv-store-clock", daemon=True)
        self._clock.start()
        self._probe()

    # Look-up

    def contains(self, key: bytes) -> bool:
        """Says if the block is there, as far as known. No I/O."""
        answer = self._known.get(key)
        return answer is not None and answer[0] and time.monotonic() < answer[1]

    def match(self, keys: Sequence[bytes]) -> int:
        """Returns how many of the first keys are there, as far as known. No I/O."""
        return sum(1 for _ in takewhile(self.contains, keys))

    def look_up(self, keys: Sequence[bytes]) -> Future[int]:
        """Asks the store, then returns the same as `match`. Engines write prefixes from their start, so a few
        questions are enough (binary search); a hole in the middle is noticed when it is read."""
        keys = list(keys)
        known = self.match(keys)
        answer = self._known.get(keys[known]) if known < len(keys) else None
        if known == len(keys) or (answer is not None and not answer[0] and time.monotonic() < answer[1]):
            return done(known)
        return self._submit(self._reads, 0, partial(self._look_up, keys, known))

    # Blocks in and out

    def write(self, meta: BlockMeta, data: memoryview) -> Future[bool]:
        """Writes a block; the result says if it is in the store."""
        assert data.nbytes == self.spec.block_bytes
        if self.contains(meta.key):
            return done(True)
        return self._submit(self._writes, False, partial(self._write, meta, data))

    def read(self, meta: BlockMeta, into: memoryview) -> Future[bool]:
        """Reads a block; the result says if it is in `into`, every byte verified. If not, `into` has
        undefined content."""
        assert into.nbytes == self.spec.block_bytes and not into.readonly
        return self._submit(self._reads, False, partial(self._read, meta, into))

    def forget(self, keys: Iterable[bytes]) -> None:
        """Counts these blocks as absent for a while; they stay in the store."""
        self._remember(keys, False)

    def reset(self) -> None:
        """Does nothing: other engines use the store too."""

    def take_events(self) -> list[Event]:
        """Returns no events: other engines change the store's content too."""
        return []

    # Life

    def close(self, timeout_s: float = 5.0) -> None:
        """Drops waiting jobs and waits for running ones, up to `timeout_s`."""
        close_all((self._writes, self._reads), timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._clock.join()
        for call in self._calls:  # their jobs hang
            call.answer(call.no)

    def stats(self) -> TierStats:
        """Returns the state; `blocks` and `num_bytes` count this engine's writes, as the total is unknown."""
        with self._lock:
            counts, pending = self._counts, self._writes.pending + self._reads.pending
            return TierStats(
                blocks=counts["written"],
                num_bytes=counts["bytes"],
                capacity_bytes=0,
                capacity_blocks=0,
                pending=pending,
                written=counts["written"],
                read=counts["read"],
                evicted=0,
                refused=counts["refused"],
                problems=dict(self._problems),
            )

    # Jobs: may raise what the backend raises

    def _look_up(self, keys: list[bytes], known: int, call: Call[int]) -> None:
        there = known
        if self._is_there(keys[known]):  # most often the first decides, or the last
            last = len(keys) - 1
            there = (
                len(keys)
                if self._is_there(keys[last])
                else bisect_left(range(last), True, lo=known + 1, key=lambda i: not self._is_there(keys[i]))
            )
        self._remember(keys[:there], True)
        self._remember(keys[there : there + 1], False)
        call.answer(there)

    def _write(self, meta: BlockMeta, data: memoryview, call: Call[bool]) -> None:
        path = self._path(meta.key)
        if not self._is_there(meta.key):
            value = call.taken(lambda: b"".join((self._format.seal(meta, data), data)))
            if value is None:
                return
            self._objects.put(path, value)
            with self._lock:
                self._counts["written"] += 1
                self._counts["bytes"] += len(value)
        self._remember([meta.key], True)
        call.answer(True)

    def _read(self, meta: BlockMeta, into: memoryview, call: Call[bool]) -> None:
        path, front_bytes = self._path(meta.key), self._format.front_bytes(meta)
        try:
            value = memoryview(self._fs.cat_file(path))
        except FileNotFoundError:
            self._lost(meta.key, "missing")
            call.answer(False)
            return
        whole = value.nbytes == front_bytes + self.spec.block_bytes
        problem = self._format.problem(meta, value[:front_bytes], value[front_bytes:]) if whole else "torn"
        if problem is not None:
            self._lost(meta.key, problem)
            try:
                self._fs.rm_file(path)  # first, as the caller may write the block anew once it has the answer
            finally:
                call.answer(False)
        elif call.answer(True, before=partial(into.cast("B").__setitem__, slice(None), value[front_bytes:])):
            self._remember([meta.key], True)
            with self._lock:
                self._counts["read"] += 1

    def _is_there(self, key: bytes) -> bool:
        """Returns whether the store has the block. fsspec's `exists` would say no to every error."""
        try:
            self._fs.info(self._path(key))
        except FileNotFoundError:
            return False
        return True

    # Calls

    def _submit(self, threads: IoThreads, no: T, job: Callable[[Call[T]], None]) -> Future[T]:
        call = Call(no, time.monotonic() + self.timeout_s)
        with self._lock:
            future = threads.submit(partial(self._run, job, call)) if self._breaker.allows() else None
            if future is None:
                self._counts["refused"] += 1
                return done(no)
        with self._changed:
            self._calls.append(call)
            self._changed.notify_all()
        # Threads that are closed drop their jobs.
        future.add_done_callback(lambda ended: call.answer(no))
        return call.future

    def _run(self, job: Callable[[Call[T]], None], call: Call[T]) -> bool:
        if call.future.done():  # it waited too long
            return False
        try:
            job(call)
        except Exception as error:  # noqa: BLE001   backends raise what they like, not OSError alone
            if call.answer(call.no):
                self._failed(type(error).__name__, error)
            return False
        if time.monotonic() < call.deadline:  # a late answer does not count as a success
            with self._lock:
                self._breaker.succeeded()
        return True

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed)
                if self._closed:
                    return
                call, now = self._calls[0], time.monotonic()
                if now < call.deadline and not call.future.done():
                    self._changed.wait_for(lambda: self._closed, call.deadline - now)
                    continue
                self._calls.popleft()
            if call.answer(call.no):
                self._failed("timeout", None)

    # Known keys

    def _remember(self, keys: Iterable[bytes], there: bool) -> None:
        until = time.monotonic() + (PRESENT_S if there else ABSENT_S)
        with self._lock:
            for key in keys:
                self._known[key] = (there, until)
                self._known.move_to_end(key)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _lost(self, key: bytes, problem: str) -> None:
        self._remember([key], False)
        self._count(problem, key.hex())

    def _failed(self, kind: str, error: Exception | None) -> None:
        with self._lock:
            self._breaker.failed()
        self._count(kind, error)

    def _count(self, kind: str, what: Any) -> None:
        with self._lock:
            self._problems[kind] += 1
            first = self._problems[kind] == 1
        if first:
            logger.warning(
                "%s: the store tier continues without a block: %s (%s); more of this kind are only counted",
                self.url,
                kind,
                what,
            )

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._root}/{name[:2]}/{name}.kv"

    def _probe(self) -> None:
        """Writes and removes a small object, so that a wrong URL or missing rights are noticed at the
        start."""

        def put(call: Call[bool]) -> None:
            path = f"{self._root}/probe-{secrets.token_hex(8)}"
            try:
                self._objects.put(path, b"shoal")
                self._fs.rm_file(path)
                call.answer(True)
            except Exception as error:  # noqa: BLE001   backends raise what they like
                reasons.append(f"{type(error).__name__}: {error}")
                call.answer(False)

        reasons: list[str] = []
        if not self._submit(self._writes, False, put).result():
            self.close(0.0)
            why = reasons[0] if reasons else f"no answer in {self.timeout_s:g} s"
            raise ConfigError(f"kv_store {self.url} can't be written: {why}; check the URL and the rights")
