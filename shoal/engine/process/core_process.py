"""`CoreProcess`: the core's process as its parent starts, watches and ends it. core_main.py runs in the
child; async_llm.py gives the messages their meaning. Torch-free; used in one asyncio loop.

Messages go through two ZMQ sockets in a private temporary folder. The folder is removed as soon as both are
connected, so nothing is left behind, whichever process dies when. The child ends when its standard input
closes. Its output is passed on to the parent's stderr. When it dies, the end of its output is a note of the
EngineDeadError.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import zmq

from shoal import wire
from shoal.config import EngineConfig
from shoal.errors import EngineDeadError, UserError
from shoal.telemetry import logs
from shoal.wire import Dead, FromCore, Message, ModelInfo, Ready, Start

STDERR_TAIL = 2000  # characters of a dead core's last words that its error quotes
CONNECT_POLL_S = 0.02
# A core that ends by itself sends a reason, which may arrive this long after its death is known.
LAST_WORDS_S = 0.5
EXIT_TIMEOUT_S = 10.0
MESSAGES_A_TURN = 64  # read before the loop gets to do something else


class CoreProcess:
    """Built by `start`. After `on_end` or close() no message arrives any more and `send` raises
    EngineDeadError."""

    def __init__(
        self, device: str, on_message: Callable[[FromCore], None], on_end: Callable[[EngineDeadError], None]
    ) -> None:
        self.info: ModelInfo | None = None
        self.ended: EngineDeadError | None = None
        self._on_message, self._on_end = on_message, on_end
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[ModelInfo] = self._loop.create_future()
        self._gone = asyncio.Event()
        self._tail = ""
        with contextlib.ExitStack() as undo:  # gives everything back if something cannot be had
            try:
                self._context = zmq.Context()
                undo.callback(self._context.destroy, linger=0)
                self._folder = Path(tempfile.mkdtemp(prefix="shoal-"))  # 0700
                undo.callback(self._remove_folder)
                self._to_core = self._context.socket(zmq.PUSH)
                self._from_core = self._context.socket(zmq.PULL)
                self._to_core.sndhwm = self._from_core.rcvhwm = 0
                self._to_core.linger = self._from_core.linger = 0
                self._to_core.bind(f"ipc://{self._folder}/in")
                self._from_core.bind(f"ipc://{self._folder}/out")
                self._process = _spawn(self._folder, device)
                undo.callback(_end_at_once, self._process)
                self._pidfd = os.pidfd_open(self._process.pid)
            except zmq.ZMQError as error:
                why = f"a socket to the engine's process cannot be opened: {error}"
                raise OSError(error.errno, why) from None
            undo.pop_all()
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._socket_fd: int = self._from_core.fileno()
        self._loop.add_reader(self._output, self._pass_on)
        self._loop.add_reader(self._pidfd, self._exited)
        self._loop.add_reader(self._socket_fd, self._read)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        peer_weights: Awaitable[bytes | None] | None,
        on_message: Callable[[FromCore], None],
        on_end: Callable[[EngineDeadError], None],
    ) -> CoreProcess:
        """Returns when the engine is ready. `peer_weights`: another worker's weights (wire.Start), which may
        arrive while the process starts. Raises the UserError that kept the engine from starting, or
        EngineDeadError; on_end is not called for these. Raises OSError where the system has no process or no
        descriptor left for it."""
        self = cls(config.device, on_message, lambda error: None)
        try:
            await self._send_first(Start(config, None if peer_weights is None else await peer_weights))
            self.info = await self._ready
        except BaseException:
            await self.close()
            raise
        self._remove_folder()
        self._on_end = on_end
        if self.ended is not None:  # it died in the moment that it was ready
            await self.close()
            raise self.ended
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> None:
        """Never waits. Raises EngineDeadError, also where the process no longer listens and its death is
        about to be noticed, and TypeError, ValueError or OverflowError for what cannot be encoded."""
        if self.ended is not None:
            raise self.ended.with_traceback(None)  # it is raised often, and frames would pile up on it
        try:
            self._to_core.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError(f"the engine core (pid {self.pid}) no longer listens") from None

    async def close(self) -> None:
        """Ends the process, whatever it is doing, and its ranks with it. Safe to call twice."""
        self._end(EngineDeadError("the engine was closed"), notify=False)
        try:
            await asyncio.wait_for(self._gone.wait(), EXIT_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._gone.wait()

    def kill(self, why: EngineDeadError) -> None:
        """Ends a process that no longer listens. Waiting calls raise `why`."""
        self._process.kill()
        self._end(why)

    # Inside

    async def _send_first(self, message: Start) -> None:
        """Sends it as soon as the core has connected."""
        data = wire.encode(message)
        while not self._ready.done():
            try:
                self._to_core.send(data, zmq.NOBLOCK)
                return
            except zmq.Again:
                await asyncio.sleep(CONNECT_POLL_S)

    def _read(self) -> None:
        """Reads all messages. The descriptor reports new data only once, so this continues until none is
        left."""
        for _ in range(MESSAGES_A_TURN):
            if self._from_core.closed:
                return
            try:
                data = self._from_core.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = wire.decode_from_core(data)
            if isinstance(message, Ready) and not self._ready.done():
                self._ready.set_result(message.info)
            elif isinstance(message, Dead):
                self._last_words(message)
            else:
                self._on_message(message)
        self._loop.call_soon(self._read)

    def _last_words(self, message: Dead) -> None:
        error = message.error.build()
        if not self._ready.done() and isinstance(error, UserError):
            self._ready.set_exception(error)
        self._end(wire.dead(message.error))

    def _exited(self) -> None:
        code = self._process.poll()
        if code is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._read()
        if code == 1 and self.ended is None:
            self._loop.call_later(LAST_WORDS_S, self._bury, code)
        else:
            self._bury(code)

    def _bury(self, code: int) -> None:
        self._pass_on()
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        tail = self._tail.rstrip()
        error = EngineDeadError(
            f"the engine core (pid {self.pid}) {how}{'' if self._ready.done() else ' while it was starting'}"
        )
        # for the log, not for clients
        error.add_note(f"the end of its output:\n{tail}" if tail else "it printed nothing")
        self._end(error)
        self._loop.remove_reader(self._output)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._gone.set()

    def _end(self, error: EngineDeadError, notify: bool = True) -> None:
        """Ends the core with this error. Later errors are dropped."""
        if self.ended is not None:
            return
        self.ended = error
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._loop.remove_reader(self._socket_fd)
        self._context.destroy(linger=0)
        self._remove_folder()
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # marks it as retrieved, as it may have no waiter any more
        if notify:
            self._on_end(error)

    def _remove_folder(self) -> None:
        """Removes the folder of the sockets. rmtree would need a descriptor, and there may be none left."""
        for name in ("in", "out"):
            (self._folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it has gone already
            self._folder.rmdir()

    def _pass_on(self) -> None:
        """Copies the core's output to our stderr."""
        while True:
            try:
                data = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._output)
                return
            text = data.decode(errors="replace")
            self._tail = (self._tail + text)[-STDERR_TAIL:]
            if sys.stderr is not None:
                with contextlib.suppress(OSError, ValueError):  # our stderr may be closed
                    sys.stderr.write(text)
                    sys.stderr.flush()


def _spawn(folder: Path, device: str) -> subprocess.Popen[bytes]:
    """Starts the child in a process group of its own, so that Ctrl-C reaches us alone."""
    level = str(logging.getLogger().getEffectiveLevel())
    # With -P and our sys.path the child can import what we can, and nothing else. With -u its output is
    # seen at once.
    command = [
        sys.executable,
        "-P",
        "-u",
        "-X",
        "faulthandler",
        "-m",
        "shoal.engine.process.core_entry",
        str(folder),
        level,
        logs.current_style(),
        device,
    ]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    return subprocess.Popen(
        command,
        env=env,
        process_group=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _end_at_once(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
