"""The core's process: `python -m shoal.engine.process.core_main FOLDER LOG_LEVEL LOG_STYLE`, run by
core_process.py.

The main thread steps the engine. One thread decodes what comes, another encodes what goes, so that a big
message never waits for a step nor a step for it. Between two steps all that has come is taken in: requests,
aborts, calls. Without work the main thread sleeps in the queue. The process ends, whatever it is doing, when
its standard input does: that is the end of its parent; its ranks end with it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import msgspec
import zmq

from shoal import logs, wire
from shoal.api import MemoryReport, SleepState, check_sleep
from shoal.engine.core import EngineCore
from shoal.errors import RequestError, ShoalError, UnavailableError
from shoal.weights.source import resolve
from shoal.wire import (
    BEAT_S,
    Abort,
    Add,
    Beat,
    Call,
    Dead,
    Failure,
    ModelInfo,
    Outputs,
    Ready,
    Refused,
    Reply,
    Start,
    ToCore,
)

LAST_WORDS_S = 5.0  # for the messages that are still to be sent when the process ends
TICK_S = 0.002  # between looks at what goes on while there is no request
PR_SET_PDEATHSIG = 1
IN, OUT = "in", "out"  # the sockets' names in the folder, as the core sees them

logger = logging.getLogger(__name__)

Inbox = SimpleQueue[ToCore | BaseException]
Outbox = SimpleQueue[wire.Message | None]


class CoreLoop:
    """Drives an EngineCore by what lies in `inbox`."""

    def __init__(self, core: EngineCore, inbox: Inbox, outbox: Outbox) -> None:
        self.core, self.inbox, self.outbox = core, inbox, outbox
        self.sleepers: list[Call] = []  # sleep in mode "wait": run when the requests have ended
        self.progress = 0  # steps so far; both are read by the thread that sends beats
        self.doing = ""

    def run(self) -> NoReturn:
        """Raises what ended the engine."""
        core = self.core
        while True:
            if self.sleepers and not core.has_work:
                self._sleep_at_last()
            while not core.has_work and core.tick():  # KV blocks are on their way to lower tiers
                self.take_in(block=True, timeout_s=TICK_S)
            self.take_in(block=not core.has_work)
            if core.has_work:
                self.doing = "step"
                outputs = core.step()
                self.progress += 1
                if outputs:
                    self.outbox.put(Outputs(outputs))

    def take_in(self, block: bool, timeout_s: float | None = None) -> None:
        self.doing = ""
        try:
            while True:
                self._handle(self.inbox.get(block, timeout_s))
                block = False
        except Empty:
            pass

    def _handle(self, message: ToCore | BaseException) -> None:
        if isinstance(message, Add):
            try:
                self.core.add(message.request)
            except Exception as error:
                if not isinstance(error, ShoalError):
                    logger.exception("a request could not be taken")
                self.outbox.put(Refused(message.request.request_id, Failure.of(error)))
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self.core.abort(request_id)
        elif isinstance(message, Call):
            self._call(message)
        elif isinstance(message, BaseException):
            raise message

    def _call(self, call: Call) -> None:
        self.doing = call.method
        try:
            if call.method == "sleep" and call.args[2] == "wait" and self.core.has_work:
                check_sleep(*call.args)
                self.sleepers.append(call)
                self.core.refuse(
                    "the engine goes to sleep when its running requests have ended; try again when it is "
                    "awake"
                )
                return
            result = getattr(self, "do_" + call.method)(*call.args)
        except Exception as error:
            if not isinstance(error, ShoalError):
                logger.exception("%s failed", call.method)
            self.outbox.put(Reply(call.call_id, error=Failure.of(error)))
            if self.core.error is not None:
                raise self.core.error from error
        else:
            self.outbox.put(Reply(call.call_id, result))
        finally:
            self.doing = ""

    def send_beats(self) -> NoReturn:
        """Runs in a thread of its own."""
        # Beside a GPU a host may spin while it waits, so its processor time proves nothing.
        on_cpu = self.core.config.device == "cpu"
        while True:
            self.outbox.put(Beat(self.progress, self.doing, time.process_time() if on_cpu else 0.0))
            time.sleep(BEAT_S)

    def _sleep_at_last(self) -> None:
        calls, self.sleepers = self.sleepers, []
        self.core.refuse(None)
        for call in calls:
            self._call(call)

    # What can be called: api.Control and two more

    def do_sleep(self, level: int, tags: list[str] | None, mode: str) -> MemoryReport:
        return self.core.sleep(level, tags, mode)

    def do_wake_up(self, tags: list[str] | None) -> MemoryReport:
        """Calls off a sleep that still waits for running requests: the last word counts."""
        sleepers, self.sleepers = self.sleepers, []
        for call in sleepers:
            self.outbox.put(
                Reply(
                    call.call_id,
                    error=Failure.of(UnavailableError("wake_up came before the running requests had ended")),
                )
            )
        if sleepers:
            self.core.refuse(None)
        return self.core.wake_up(tags)

    def do_sleep_state(self) -> SleepState:
        return self.core.sleep_state()

    def do_reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()

    def do_update_weights(self, source: str) -> int:
        return self.core.update_weights(source)

    def do_check_weights(self) -> dict[str, str]:
        return self.core.check_weights()

    def do_memory_usage(self) -> dict[str, dict[str, int]]:
        return self.core.memory_usage()

    def do_start_profile(self, folder: str) -> None:
        self.core.start_profile(folder)

    def do_stop_profile(self) -> list[str]:
        return self.core.stop_profile()

    def do_flush_kv(self) -> None:
        """What an engine does at its end, ahead of it."""
        self.core.flush_kv()

    def do_stats(self) -> Any:
        return self.core.stats()

    def do_check(self) -> None:
        """Proves the books of scheduler and tiers, for tests."""
        self.core.check()


def main() -> NoReturn:
    folder, level, style = sys.argv[1:]
    logs.set_up(int(level), style)
    # a service manager signals the whole group: it is the parent that decides
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(
        target=_end_with_parent, args=(folder,), name="shoal-end-with-parent", daemon=True
    ).start()
    inbox: Inbox = SimpleQueue()
    outbox: Outbox = SimpleQueue()
    threading.Thread(target=_receive, args=(folder, inbox, outbox), name="shoal-receive", daemon=True).start()
    sender = threading.Thread(target=_send, args=(folder, outbox), name="shoal-send", daemon=True)
    sender.start()
    try:
        start = inbox.get()
        if not isinstance(start, Start):
            raise RuntimeError(f"the first message was {start!r:.200}")
        core, info = _build(start)
        outbox.put(Ready(info))
        loop = CoreLoop(core, inbox, outbox)
        threading.Thread(target=loop.send_beats, name="shoal-beats", daemon=True).start()
        # once anything comes the parent has heard that we are ready, and has removed the folder:
        loop.take_in(block=True)
        _die_with_parent()  # from here on the kernel itself may end us
        loop.run()
    except BaseException as error:  # noqa: BLE001 - the loop of a process: the parent learns of it by these last words
        if not isinstance(error, ShoalError):
            traceback.print_exc()
        outbox.put(Dead(Failure.of(error)))
        outbox.put(None)
        sender.join(LAST_WORDS_S)
        os._exit(1)  # finalizers could wait for ranks that are gone


def _build(start: Start) -> tuple[EngineCore, ModelInfo]:
    config = start.config
    files = resolve(config.model, config.revision, config.download_dir)
    core = EngineCore(config, files)
    # what is there now stays: a full collection would look at all of it, for 0.1 s in the middle of some step
    gc.freeze()
    vocab_size, resolved = core.model_config.vocab_size, core.config
    return core, ModelInfo(
        model=resolved.model,
        pid=os.getpid(),
        max_model_len=resolved.max_model_len,
        vocab_size=vocab_size,
        hidden_size=core.model_config.hidden_size,
        eos_token_ids=tuple(i for i in files.eos_token_ids if i < vocab_size),
        generation_config=files.generation_config if config.generation_config == "auto" else {},
        num_blocks=core.num_blocks,
        block_size=resolved.block_size,
        max_num_seqs=resolved.max_num_seqs,
        device=resolved.device,
        dtype=resolved.dtype,
    )


def _receive(folder: str, inbox: Inbox, outbox: Outbox) -> NoReturn:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.rcvhwm = 0
        socket.connect(f"ipc://{folder}/{IN}")
        while True:
            data = socket.recv()
            try:
                inbox.put(wire.decode_to_core(data))
            except (msgspec.DecodeError, ShoalError) as error:
                request_id = wire.request_id_of(data)
                if request_id is None:
                    inbox.put(error)
                else:
                    outbox.put(
                        Refused(
                            request_id,
                            Failure.of(RequestError(f"the engine cannot read this request: {error}")),
                        )
                    )


def _send(folder: str, outbox: Outbox) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.sndhwm = 0
    socket.connect(f"ipc://{folder}/{OUT}")
    while (message := outbox.get()) is not None:
        socket.send(wire.encode(message))
    socket.close(linger=int(LAST_WORDS_S * 1000))
    context.term()


def _end_with_parent(folder: str) -> NoReturn:
    try:
        # the parent writes nothing: this returns when it closes our standard input, or dies
        while os.read(0, 1):
            pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _die_with_parent() -> None:
    """A second rope: a native call that never returns would hold up _end_with_parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
