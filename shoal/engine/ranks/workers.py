"""WorkerGroup: how rank 0, the user's process, starts, commands, watches and ends the other ranks.

A rank is a fresh Python process (engine/ranks/worker_main.py) that inherits file descriptors and nothing
else. Commands go to all ranks through the ring of engine/ranks/channel.py. Replies, and each side's notice of
the other's death (end of file), go through a socket pair per rank. Everything shared is anonymous, so nothing
can collide or be left behind: when rank 0 dies, even by SIGKILL, its ranks end themselves.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

import numpy as np

from shoal import errors
from shoal.engine.ranks.channel import PREFIX, ChannelWriter, pack, unpack
from shoal.errors import EngineDeadError, UnavailableError, UserError

STDERR_TAIL = 2000  # characters of a dead rank's last words that its error quotes
EXIT_TIMEOUT_S = 5.0
# a rank whose socket closed is dead or about to be; its exit code comes when the kernel has freed its memory
REAP_TIMEOUT_S = 0.8
LONGEST_LINE = 1 << 16


@dataclass(slots=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    link: socket.socket
    output: IO[bytes]  # its stdout and stderr
    line: bytes = b""  # the unfinished last line
    tail: str = ""
    inbox: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error as it travels: rebuilt where it is raised, so that a UserError of a rank is one for the caller
    too."""

    kind: type[Exception]
    message: str

    @classmethod
    def from_reply(cls, rank: int, kind: str, message: str) -> _Failure:
        found = getattr(errors, kind, None)
        if isinstance(found, type) and issubclass(found, (UserError, UnavailableError)):
            return cls(found, f"rank {rank}: {message}")
        return cls(RuntimeError, f"rank {rank}: {kind}: {message}")

    def build(self) -> Exception:
        return self.kind(self.message)


class Pending:
    """A command whose replies are awaited. If it is dropped, they are too."""

    def __init__(self, monitor: _Monitor, method: str, num_ranks: int) -> None:
        self.monitor, self.method, self.num_ranks = monitor, method, num_ranks
        self.replies: dict[int, Any] = {}  # rank -> result or _Failure

    @property
    def complete(self) -> bool:
        """Whether results() would return, or raise, at once."""
        return len(self.replies) == self.num_ranks or self.monitor.failure is not None

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """What ranks 1 and up returned, in rank order. If the method raised, so does this (for the lowest
        rank): the same UserError, or a RuntimeError with the traceback. Raises EngineDeadError when a rank
        dies, and when one has not answered in time."""
        replies = self.outcomes(timeout_s)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def outcomes(self, timeout_s: float | None = None) -> list[Any]:
        """As results, but what a rank's method raised is a value among the others."""
        monitor = self.monitor
        with monitor.news:
            monitor.news.wait_for(
                lambda: len(self.replies) == self.num_ranks or monitor.failure is not None, timeout_s
            )
        if len(self.replies) < self.num_ranks:
            monitor.check()
            silent = sorted({r.rank for r in monitor.ranks} - self.replies.keys())
            raise EngineDeadError(f"ranks {silent} did not answer {self.method!r} within {timeout_s} s")
        replies = [self.replies[rank] for rank in sorted(self.replies)]
        return [reply.build() if isinstance(reply, _Failure) else reply for reply in replies]


class WorkerGroup:
    """Ranks 1 to world_size - 1, each serving the object that `target` ("package.module:factory") returns for
    (rank=, world_size=, **init). To be used by one thread at a time: the ranks do everything in the order it
    is asked for.

    Returns at once; the ranks start meanwhile. An error in a factory is raised by whatever is called next: as
    the same UserError, or as EngineDeadError. The ranks are in a process group of their own, so Ctrl-C
    reaches rank 0 alone, which decides. They end with close(), with the last reference to the group, at exit,
    and when this process dies.
    """

    def __init__(self, world_size: int, target: str, init: dict[str, Any]) -> None:
        self.world_size = world_size
        self._monitor = _Monitor()
        self._channel = ChannelWriter(world_size - 1, self._monitor.failed_fd, self._monitor.check)
        self._last_id = 0
        # runs at exit too
        self._finalizer = weakref.finalize(self, _end, self._monitor, self._channel, os.getpid())
        try:
            for rank in range(1, world_size):
                self._monitor.ranks.append(_start_rank(rank, world_size, self._channel.reader_fds(rank - 1)))
            self._monitor.start()
            self._send(None, target, (init,))
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> None:
        """Has every rank call `method`; nothing comes back. If it raises in a rank, that rank dies of it."""
        self._send(None, method, args)

    def submit(self, method: str, *args: Any) -> Pending:
        """Has every rank call `method` and return or raise; collect that with `.results()`. Rank 0 can do its
        own part in between."""
        self._last_id += 1
        pending = Pending(self._monitor, method, self.world_size - 1)
        self._monitor.pending[self._last_id] = pending
        self._send(self._last_id, method, args)
        return pending

    def _send(self, call_id: int | None, method: str, args: tuple[Any, ...]) -> None:
        self.check()
        try:
            pieces = pack((call_id, method, args))
        except (TypeError, ValueError, OverflowError) as error:
            raise _name_culprit(method, args, error) from error
        self._channel.put(pieces)

    def check(self, wait_s: float = 0.0) -> None:
        """Raises if a rank has died: EngineDeadError, or the UserError that kept it from starting. After an
        error of our own that a dying rank may have caused (a collective that broke), `wait_s` gives that news
        time to arrive."""
        if wait_s:
            with self._monitor.news:
                self._monitor.news.wait_for(lambda: self.failed, wait_s)
        self._monitor.check()

    @property
    def failed(self) -> bool:
        """For loops that wait for something else; then `check()` raises."""
        return self._monitor.failure is not None

    def when_failed(self, callback: Callable[[], None]) -> None:
        """`callback` is called once, from the watching thread, when a rank has died or the group is
        closed."""
        self._monitor.callbacks.append(callback)

    def close(self) -> None:
        """Ends all ranks, whatever they are doing, within EXIT_TIMEOUT_S, and frees what was shared. Safe to
        call twice."""
        self._finalizer()


def _start_rank(rank: int, world_size: int, channel_fds: tuple[int, ...]) -> _Rank:
    link, their_link = socket.socketpair()
    link.setblocking(False)
    output_fd, their_output_fd = os.pipe()
    output = os.fdopen(output_fd, "rb", buffering=0)
    os.set_blocking(output_fd, False)
    fds = (*channel_fds, their_link.fileno())
    # -P with our own sys.path: what rank 0 can import, and nothing else. -u: print() in a rank is seen at
    # once.
    command = [
        sys.executable,
        "-P",
        "-u",
        "-X",
        "faulthandler",
        "-m",
        "shoal.engine.ranks.worker_main",
        *map(str, (rank, world_size, *fds)),
    ]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with their_link, open(their_output_fd, "wb") as pipe:
        process = subprocess.Popen(
            command,
            env=env,
            pass_fds=fds,
            process_group=0,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
        )
    return _Rank(rank, process, link, output)


def _name_culprit(method: str, args: tuple[Any, ...], error: Exception) -> TypeError:
    for i, arg in enumerate(args):
        try:
            pack(arg)
        except (TypeError, ValueError, OverflowError) as reason:
            return TypeError(f"argument {i} of {method!r} cannot be sent to the other ranks: {reason}")
    return TypeError(f"the arguments of {method!r} cannot be sent to the other ranks: {error}")


class _Monitor:
    """The ranks' processes and the thread that listens to them: takes in replies, passes on their output,
    notices deaths."""

    def __init__(self) -> None:
        self.ranks: list[_Rank] = []
        self.pending: weakref.WeakValueDictionary[int, Pending] = weakref.WeakValueDictionary()
        self.failure: _Failure | None = None
        self.failed_fd = os.eventfd(0)  # readable from the first failure on
        self.news = threading.Condition()
        self.callbacks: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="shoal-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure.build()

    def _run(self) -> None:
        """Until every rank has closed its socket, which is when it ends."""
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                selector.register(rank.link, selectors.EVENT_READ, partial(self._take_replies, rank))
                selector.register(rank.output, selectors.EVENT_READ, partial(self._pass_on, rank))
            num_alive = len(self.ranks)
            while num_alive:
                for key, _ in selector.select():
                    if key.data():
                        continue
                    selector.unregister(key.fileobj)
                    if isinstance(key.fileobj, socket.socket):
                        num_alive -= 1

    def _take_replies(self, rank: _Rank) -> bool:
        """False at the end: the rank is dead, and that has been recorded."""
        try:
            data = rank.link.recv(1 << 20)
        except BlockingIOError:
            return True
        except ConnectionError:
            data = b""
        rank.inbox += data
        while len(rank.inbox) >= PREFIX.size:
            head_size, body_size = PREFIX.unpack_from(rank.inbox)
            end = PREFIX.size + head_size + body_size
            if len(rank.inbox) < end:
                break
            body = np.frombuffer(rank.inbox, np.uint8, body_size, PREFIX.size + head_size).copy()
            call_id, ok, reply = unpack(bytes(rank.inbox[PREFIX.size : end - body_size]), body)
            del rank.inbox[:end]
            self._deliver(rank, call_id, reply if ok else _Failure.from_reply(rank.rank, *reply))
        if not data:
            self._bury(rank)
        return bool(data)

    def _deliver(self, rank: _Rank, call_id: int | None, reply: Any) -> None:
        if call_id is None:  # the factory raised a UserError, which says more than the death that follows
            self._fail(reply)
            return
        with self.news:
            pending = self.pending.get(call_id)
            if pending is not None:
                pending.replies[rank.rank] = reply
                self.news.notify_all()

    def _bury(self, rank: _Rank) -> None:
        self._pass_on(rank)
        if self.failure is None:
            try:
                code: int | None = rank.process.wait(REAP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                code = None
            how = (
                "is ending"
                if code is None
                else f"was killed by {_signal_name(-code)}"
                if code < 0
                else f"exited with code {code}"
            )
            words = f"; the end of its output:\n{rank.tail.rstrip()}" if rank.tail else "; it printed nothing"
            self._fail(_Failure(EngineDeadError, f"rank {rank.rank} (pid {rank.process.pid}) {how}{words}"))
        for other in self.ranks:  # they could only wait for the dead one
            other.process.kill()

    def _fail(self, failure: _Failure) -> None:
        """The first failure is the one that counts."""
        with self.news:
            if self.failure is not None:
                return
            self.failure = failure
            self.news.notify_all()
        os.eventfd_write(self.failed_fd, 1)
        for callback in self.callbacks:
            callback()

    def _pass_on(self, rank: _Rank) -> bool:
        """Copies a rank's output to our stderr, line by line. False at its end."""
        while True:
            data = rank.output.read(1 << 16)
            if data is None:
                return True
            rank.tail = (rank.tail + data.decode(errors="replace"))[-STDERR_TAIL:]
            *lines, rank.line = (rank.line + data).split(b"\n")
            if rank.line and (not data or len(rank.line) > LONGEST_LINE):
                lines, rank.line = [*lines, rank.line], b""
            if lines and sys.stderr is not None:
                # our stderr is closed: no reason to stop watching
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(
                        "".join(f"[rank {rank.rank}] {line.decode(errors='replace')}\n" for line in lines)
                    )
                    sys.stderr.flush()
            if not data:
                return False

    def end_ranks(self, timeout_s: float) -> None:
        self._fail(_Failure(EngineDeadError, "the worker group is closed; build a new engine"))
        deadline = time.monotonic() + timeout_s
        for rank in self.ranks:
            rank.link.shutdown(socket.SHUT_WR)  # a thread of the rank waits for just this
        for rank in self.ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        if self._thread.ident is not None:
            self._thread.join()
        for rank in self.ranks:
            rank.link.close()
            rank.output.close()
        os.close(self.failed_fd)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end(monitor: _Monitor, channel: ChannelWriter, owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a fork of rank 0 that exits: the ranks aren't its own
        return
    monitor.end_ranks(EXIT_TIMEOUT_S)
    channel.close()
