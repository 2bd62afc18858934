"""`WorkerProcesses`: starts, commands, watches and ends the ranks other than 0, for rank 0, the user's
process. worker_main.py runs in each, channel.py carries commands, progress.py finds a rank that hangs.

A rank is a fresh Python process (engine/ranks/worker_main.py) that inherits file descriptors and nothing
else. Commands go to all ranks through the ring of engine/ranks/channel.py. Replies come back through a socket
pair per rank, whose end of file also signals the death of the other side. Each rank counts the commands that
it has run in shared memory (engine/ranks/progress.py), by which one that hangs is noticed. Everything shared
is anonymous, so nothing can collide or be left behind: when rank 0 dies, even by SIGKILL, its ranks end
themselves.
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
from typing import IO, Any, Generic, TypeVar

import numpy as np

from shoal import errors
from shoal.engine.ranks.channel import PREFIX, ChannelWriter, pack, unpack
from shoal.engine.ranks.progress import LOOK_S, Progress
from shoal.errors import EngineDeadError, UnavailableError, UserError

Result = TypeVar("Result")

STDERR_TAIL = 2000  # characters of a dead rank's stderr that the error quotes
EXIT_TIMEOUT_S = 5.0  # a rank that has not ended itself by then is killed
# A rank whose socket closed is dead or about to be. Its exit code comes when the kernel has freed its memory.
REAP_TIMEOUT_S = 0.8
LONGEST_LINE = 1 << 16  # bytes; a longer line of output is passed on in pieces


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
class _RankFailure:
    """A received failure of a rank. `build` makes the exception where it is raised, so that a rank's
    UserError is a UserError for the caller too."""

    kind: type[Exception]
    message: str

    @classmethod
    def from_reply(cls, rank: int, kind: str, message: str) -> _RankFailure:
        found = getattr(errors, kind, None)
        if isinstance(found, type) and issubclass(found, (UserError, UnavailableError)):
            return cls(found, f"rank {rank}: {message}")
        return cls(RuntimeError, f"rank {rank}: {kind}: {message}")

    def build(self) -> Exception:
        return self.kind(self.message)


class Pending(Generic[Result]):
    """A command whose replies are awaited. If the object is dropped, so are the replies."""

    def __init__(self, monitor: _Monitor, num_ranks: int) -> None:
        self.monitor, self.num_ranks = monitor, num_ranks
        self.replies: dict[int, Any] = {}  # rank -> result or _RankFailure

    @property
    def complete(self) -> bool:
        """True if results() would return, or raise, at once."""
        return len(self.replies) == self.num_ranks or self.monitor.failure is not None

    def results(self) -> list[Result]:
        """Returns the results of ranks 1 and up, in rank order. If the command raised, this raises the lowest
        rank's error: the same UserError, or a RuntimeError with the traceback. Raises EngineDeadError when a
        rank dies or hangs."""
        results = []
        for outcome in self.outcomes():
            if isinstance(outcome, Exception):
                raise outcome
            results.append(outcome)
        return results

    def outcomes(self) -> list[Result | Exception]:
        """Returns the results or exceptions of ranks 1 and up, in rank order. Waits, and fails for a dead
        rank, as `results` does."""
        monitor = self.monitor
        with monitor.news:
            monitor.news.wait_for(lambda: self.complete)
        if len(self.replies) < self.num_ranks:
            monitor.check()
        replies = [self.replies[rank] for rank in sorted(self.replies)]
        return [reply.build() if isinstance(reply, _RankFailure) else reply for reply in replies]


class WorkerProcesses:
    """Ranks 1 to world_size - 1. Each serves the table of commands (a name and the function it runs) that
    `target` ("package.module:factory") returns for (rank=, world_size=, **init). To be used by one thread at
    a time: the ranks run the commands in the order in which they are given.

    The constructor returns at once; the ranks start meanwhile. An error in a factory is raised by the next
    call: as the same UserError, or as EngineDeadError. The ranks are in a process group of their own, so
    Ctrl-C reaches rank 0 alone, which decides. They end with close(), with the last reference to the group,
    at exit, and when this process dies.
    """

    def __init__(self, world_size: int, target: str, init: dict[str, Any]) -> None:
        self.world_size = world_size
        self._monitor = _Monitor(world_size)
        self._channel = ChannelWriter(world_size - 1, self._monitor.failed_fd, self._monitor.check)
        self._last_id = 0
        # runs at exit too
        self._finalizer = weakref.finalize(self, _end, self._monitor, self._channel, os.getpid())
        try:
            for rank in range(1, world_size):
                fds = *self._channel.reader_fds(rank - 1), self._monitor.progress.memory_fd
                self._monitor.ranks.append(_start_rank(rank, world_size, fds))
            self._monitor.start()
            self._put(None, target, (init,), is_quick=False)
        except BaseException:
            self.close()
            raise

    def send(self, command: str, *args: Any) -> None:
        """Has every rank run the command; nothing comes back. A rank in which it raises dies of it. It should
        be quick: a rank that does nothing in it while rank 0 waits counts as hung."""
        self._put(None, command, args, is_quick=True)

    def submit(self, command: str, *args: Any) -> Pending[Any]:
        """Has every rank run the command and answer. `.results()` collects the answers; rank 0 can do its own
        part before."""
        self._last_id += 1
        pending: Pending[Any] = Pending(self._monitor, self.world_size - 1)
        self._monitor.pending[self._last_id] = pending
        self._put(self._last_id, command, args, is_quick=False)
        return pending

    def _put(self, call_id: int | None, command: str, args: tuple[Any, ...], is_quick: bool) -> None:
        self.check()
        try:
            pieces = pack((call_id, command, args))
        except (TypeError, ValueError, OverflowError) as error:
            raise _name_culprit(command, args, error) from error
        self._monitor.progress.give(command, is_quick)
        self._channel.put(pieces)

    def check(self, wait_s: float = 0.0) -> None:
        """Raises if a rank has died: EngineDeadError, or the UserError that kept it from starting. A dying
        rank can cause an error of our own first (a collective that breaks); `wait_s` gives the news of its
        death that long to arrive."""
        if wait_s:
            with self._monitor.news:
                self._monitor.news.wait_for(lambda: self.failed, wait_s)
        self._monitor.check()

    @property
    def failed(self) -> bool:
        """True if `check()` would raise. For loops that wait for something else."""
        return self._monitor.failure is not None

    def watch_waits(self, waits: Callable[[], bool]) -> None:
        """`waits` says whether rank 0 waits for the others now, inside of what looks like its own work. Only
        while it does, a rank that does nothing counts as hung."""
        self._monitor.waits.append(waits)

    def when_failed(self, callback: Callable[[], None]) -> None:
        """Has `callback` called once, from the watching thread, when a rank has died or the group is
        closed."""
        self._monitor.callbacks.append(callback)

    def close(self) -> None:
        """Ends all ranks, whatever they are doing, within EXIT_TIMEOUT_S, and frees the shared memory. Safe
        to call twice."""
        self._finalizer()


def _start_rank(rank: int, world_size: int, shared_fds: tuple[int, ...]) -> _Rank:
    link, their_link = socket.socketpair()
    link.setblocking(False)
    output_fd, their_output_fd = os.pipe()
    output = os.fdopen(output_fd, "rb", buffering=0)
    os.set_blocking(output_fd, False)
    fds = (*shared_fds, their_link.fileno())
    # -P and our own sys.path let a rank import what rank 0 can, and nothing else. -u shows its prints soon.
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


def _name_culprit(command: str, args: tuple[Any, ...], error: Exception) -> TypeError:
    for i, arg in enumerate(args):
        try:
            pack(arg)
        except (TypeError, ValueError, OverflowError) as reason:
            return TypeError(f"argument {i} of {command!r} cannot be sent to the other ranks: {reason}")
    return TypeError(f"the arguments of {command!r} cannot be sent to the other ranks: {error}")


class _Monitor:
    """The ranks' processes and the thread that listens to them. The thread receives replies, passes output
    on, and notices deaths."""

    def __init__(self, world_size: int) -> None:
        self.ranks: list[_Rank] = []
        self.progress = Progress.create(world_size)
        self.waits: list[Callable[[], bool]] = []
        self.pending: weakref.WeakValueDictionary[int, Pending[Any]] = weakref.WeakValueDictionary()
        self.failure: _RankFailure | None = None
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
        """Listens until every rank has closed its socket, as it does when it ends."""
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                selector.register(rank.link, selectors.EVENT_READ, partial(self._take_replies, rank))
                selector.register(rank.output, selectors.EVENT_READ, partial(self._pass_on, rank))
            num_alive = len(self.ranks)
            while num_alive:
                self._look()
                for key, _ in selector.select(LOOK_S):
                    if key.data():
                        continue
                    selector.unregister(key.fileobj)
                    if isinstance(key.fileobj, socket.socket):
                        num_alive -= 1

    def _look(self) -> None:
        """Ends all ranks if one of them hangs."""
        if self.failure is not None:
            return
        pids = {rank.rank: rank.process.pid for rank in self.ranks}
        why = self.progress.look(pids, any(waits() for waits in self.waits), time.monotonic())
        if why is not None:
            self._fail(_RankFailure(EngineDeadError, why))
            self._kill()

    def _kill(self) -> None:
        for rank in self.ranks:
            rank.process.kill()

    def _take_replies(self, rank: _Rank) -> bool:
        """Returns False at the end of file: the rank is dead, and that has been recorded."""
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
            self._deliver(rank, call_id, reply if ok else _RankFailure.from_reply(rank.rank, *reply))
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
            if code is None:
                how = "is ending"
            elif code < 0:
                how = f"was killed by {_signal_name(-code)}"
            else:
                how = f"exited with code {code}"
            if (command := self.progress.command_of(rank.rank)) is not None:
                how += f" in {command!r}"
            words = f"; the end of its output:\n{rank.tail.rstrip()}" if rank.tail else "; it printed nothing"
            self._fail(
                _RankFailure(EngineDeadError, f"rank {rank.rank} (pid {rank.process.pid}) {how}{words}")
            )
        self._kill()  # the others could only wait for the dead one

    def _fail(self, failure: _RankFailure) -> None:
        """Records a failure. Only the first one counts."""
        with self.news:
            if self.failure is not None:
                return
            self.failure = failure
            self.news.notify_all()
        os.eventfd_write(self.failed_fd, 1)
        for callback in self.callbacks:
            callback()

    def _pass_on(self, rank: _Rank) -> bool:
        """Copies a rank's output to our stderr, line by line. Returns False at its end."""
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
        self._fail(_RankFailure(EngineDeadError, "the worker group is closed; build a new engine"))
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
        self.progress.close()
        os.close(self.failed_fd)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end(monitor: _Monitor, channel: ChannelWriter, owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a fork of rank 0 exits, and the ranks are not its own
        return
    monitor.end_ranks(EXIT_TIMEOUT_S)
    channel.close()
