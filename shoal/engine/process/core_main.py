"""The core's process: core_process.py, in the parent, starts it, core_entry.py is its first module, and
engine/core.py is the engine that it steps.

The main thread steps the engine, and one thread decodes incoming messages, so that a big one never waits for
a step, nor a step for it. Each thread sends its own messages: a thread for them would get Python's lock only
when the main thread waits for the device, after the launch of the next step. Between two steps the main
thread applies all received messages: requests, aborts, calls. Without work it sleeps in the queue. When the
parent ends, the standard input of this process closes. The process then ends whatever it is doing, and its
ranks with it.
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
from typing import Any, NoReturn, assert_never

import msgspec
import zmq

from shoal import wire
from shoal.control import (
    CheckWeights,
    MemoryUsage,
    ReadSleepState,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    UpdateWeights,
    WakeUp,
    name_of,
)
from shoal.engine.core import EngineCore
from shoal.engine.turns import only_young_garbage
from shoal.errors import ShoalError, UnavailableError
from shoal.memory.thread_stacks import STACKS
from shoal.stats import MemoryReport
from shoal.telemetry import logs
from shoal.telemetry.logs import about
from shoal.weights.source import resolve
from shoal.wire import (
    BEAT_S,
    Abort,
    Add,
    Beat,
    Call,
    CheckIntegrity,
    CoreCommand,
    Dead,
    Failure,
    FlushKv,
    LendKv,
    LendWeights,
    ModelInfo,
    Outputs,
    ReadStats,
    Ready,
    Refused,
    Reply,
    Start,
    TakeBackKv,
    TakeBackWeights,
    ToCore,
)

LAST_WORDS_S = 5.0  # to send the messages that are left when the process ends
TICK_S = 0.002  # between polls of copies to lower tiers while there is no request
PR_SET_PDEATHSIG = 1
IN, OUT = "in", "out"  # the sockets' names in the folder, as the core sees them

logger = logging.getLogger(__name__)

Inbox = SimpleQueue[ToCore | BaseException]


class Outbox:
    """The way to the parent, for all threads."""

    def __init__(self, folder: str) -> None:
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.sndhwm = 0  # so that it never waits
        self._socket.connect(f"ipc://{folder}/{OUT}")

    def put(self, message: wire.Message) -> None:
        data = wire.encode(message)
        with self._lock:
            self._socket.send(data)

    def close(self) -> None:
        """Returns when the last messages have been sent, or could not be. Nobody sends any more."""
        self._lock.acquire()
        self._socket.close(linger=int(LAST_WORDS_S * 1000))
        self._context.term()


class CoreLoop:
    """Drives an engine by the messages in `inbox`. A message may replace `core` by another one."""

    def __init__(self, core: EngineCore, inbox: Inbox, outbox: Outbox) -> None:
        self.core, self.inbox, self.outbox = core, inbox, outbox
        self.postponed: list[Call] = []  # sleeps in mode "wait", which run when the requests have ended
        # The content of Beat. The thread that sends beats reads both.
        self.progress = 0
        self.doing = ""

    def run(self) -> NoReturn:
        """Steps until the engine ends. Raises the error that ended it."""
        while True:
            if self.postponed and not self.core.has_work:
                self._sleep_at_last()
            while not self.core.has_work and self.core.tick():  # KV blocks are on their way to lower tiers
                self.handle_messages(block=True, timeout_s=TICK_S)
            self.handle_messages(block=not self.core.has_work)
            if self.core.has_work:
                self.doing = "step"
                outputs = self.core.step()
                self.progress += 1
                if outputs:
                    self.outbox.put(Outputs(outputs))

    def handle_messages(self, block: bool, timeout_s: float | None = None) -> None:
        self.doing = ""
        try:
            while True:
                self._handle(self.inbox.get(block, timeout_s))
                block = False
        except Empty:
            pass

    def _handle(self, message: ToCore | BaseException) -> None:
        if isinstance(message, Add):
            request = message.request
            try:
                self.core.add(request)
                logger.debug(about(request.log_id, f"is taken, of {len(request.prompt_token_ids)} tokens"))
            except Exception as error:
                if not isinstance(error, ShoalError):
                    logger.exception(about(request.log_id, "could not be taken"))
                self.outbox.put(Refused(request.request_id, Failure.of(error)))
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self.core.abort(request_id)
        elif isinstance(message, Call):
            self._call(message)
        elif isinstance(message, BaseException):
            raise message

    def _call(self, call: Call) -> None:
        command = call.command
        if isinstance(command, Sleep) and self._must_wait(command):
            self.postponed.append(call)
            self.core.refuse(
                "the engine goes to sleep when its running requests have ended; try again when it is awake"
            )
            return
        self.doing = name_of(command)
        try:
            result = self._run(command)
        except Exception as error:
            if not isinstance(error, ShoalError):
                logger.exception("%s failed", name_of(command))
            self.outbox.put(Reply(call.call_id, error=Failure.of(error)))
            if self.core.error is not None:
                raise self.core.error from error
        else:
            self.outbox.put(Reply(call.call_id, result))
        finally:
            self.doing = ""
            self.progress += 1

    def _must_wait(self, sleep: Sleep) -> bool:
        """True if requests run that are to end before that sleep. For one that fails in any case nothing
        waits."""
        return sleep.mode == "wait" and self.core.has_work and self.core.sleeper.is_possible(sleep.level)

    def _run(self, command: CoreCommand) -> Any:
        core = self.core
        match command:
            case Sleep(level, tags, mode):
                return core.sleep(level, tags, mode)
            case WakeUp(tags):
                return self._wake_up(tags)
            case ReadSleepState():
                return core.sleep_state()
            case ResetPrefixCache():
                return core.reset_prefix_cache()
            case UpdateWeights(source):
                return self._update_weights(source)
            case CheckWeights():
                return core.check_weights()
            case MemoryUsage():
                return core.memory_usage()
            case StartProfile(folder):
                return core.start_profile(folder)
            case StopProfile():
                return core.stop_profile()
            case ReadStats():
                return core.stats()
            case FlushKv():
                return core.flush_kv()
            case CheckIntegrity():
                return core.check()
            case LendKv(token_ids, cache_salt, adapter):
                return core.lend_kv(token_ids, cache_salt, adapter)
            case TakeBackKv(ticket):
                return core.take_back_kv(ticket)
            case LendWeights(name, borrower):
                return core.exports.export(name, borrower)
            case TakeBackWeights(borrower):
                return core.exports.end(borrower)
            case _:
                assert_never(command)

    def _wake_up(self, tags: list[str] | None) -> MemoryReport:
        """Calls off a sleep that still waits for running requests: the last word counts."""
        calls, self.postponed = self.postponed, []
        error = Failure.of(UnavailableError("wake_up was called before the running requests had ended"))
        for call in calls:
            self.outbox.put(Reply(call.call_id, error=error))
        if calls:
            self.core.refuse(None)
        return self.core.wake_up(tags)

    def _update_weights(self, source: str) -> int:
        """Updates the weights. The parent is notified if the engine has become another model."""
        gc.unfreeze()  # Otherwise nothing would ever collect the model that goes.
        try:
            core = self.core.update_weights(source)
            if core is not self.core:
                self.core = core
                core.prepare_grammars()
                self.outbox.put(Ready(_describe(core)))
        finally:
            gc.freeze()
        return core.weights.version

    def _sleep_at_last(self) -> None:
        calls, self.postponed = self.postponed, []
        self.core.refuse(None)
        for call in calls:
            self._call(call)

    def send_beats(self) -> NoReturn:
        """Runs in a thread of its own."""
        # With a GPU a host may spin while it waits, so its processor time proves nothing.
        on_cpu = self.core.config.device == "cpu"
        while True:
            cpu_seconds = time.process_time() if on_cpu else 0.0
            self.outbox.put(Beat(self.progress, self.doing, cpu_seconds))
            time.sleep(BEAT_S)


def main() -> NoReturn:
    folder, level, style = sys.argv[1:]
    logs.set_up(int(level), style)
    STACKS.is_own_process = True
    # A service manager signals the whole group, but the parent decides when this process ends.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(
        target=_end_with_parent, args=(folder,), name="shoal-end-with-parent", daemon=True
    ).start()
    inbox: Inbox = SimpleQueue()
    outbox = Outbox(folder)
    threading.Thread(target=_receive, args=(folder, inbox, outbox), name="shoal-receive", daemon=True).start()
    try:
        start = inbox.get()
        if not isinstance(start, Start):
            raise RuntimeError(f"the first message was {start!r:.200}")
        core, info = _build(start)
        outbox.put(Ready(info))
        loop = CoreLoop(core, inbox, outbox)
        threading.Thread(target=loop.send_beats, name="shoal-beats", daemon=True).start()
        # The first message shows that the parent knows that the core is ready, and has removed the folder.
        loop.handle_messages(block=True)
        _die_with_parent()  # from here on the kernel itself may end us
        loop.run()
    except BaseException as error:  # noqa: BLE001 - the loop of a process: the parent learns of it by these last words
        try:
            if not isinstance(error, ShoalError):
                traceback.print_exc()
            outbox.put(Dead(Failure.of(error)))
            outbox.close()
        finally:
            os._exit(1)  # finalizers could wait for ranks that are gone


def _build(start: Start) -> tuple[EngineCore, ModelInfo]:
    config = start.config
    with only_young_garbage:
        files = resolve(config.model, config.revision, config.download_dir, overrides=config.hf_overrides)
        files = files.overridden(config.hf_overrides)
        core = EngineCore(config, files, peer_weights=start.peer_weights)
        core.prepare_grammars()
    # All objects of now stay. A full collection would scan them in the middle of a step.
    gc.freeze()
    return core, _describe(core)


def _describe(core: EngineCore) -> ModelInfo:
    files, resolved = core.files, core.config
    vocab_size = core.model_config.vocab_size
    return ModelInfo(
        model=resolved.model,
        pid=os.getpid(),
        max_model_len=resolved.max_model_len,
        vocab_size=vocab_size,
        hidden_size=core.model_config.hidden_size,
        eos_token_ids=tuple(i for i in files.eos_token_ids if i < vocab_size),
        generation_config=resolved.sampling_config(files.generation_config),
        num_blocks=core.num_blocks,
        kv_cache_tokens=core.kv_cache_tokens,
        block_size=resolved.block_size,
        max_num_seqs=resolved.max_num_seqs,
        device=resolved.device,
        dtype=resolved.dtype,
        kv_role=resolved.kv_transfer_config.kv_role if resolved.kv_transfer_config is not None else "",
        kv_block_bytes=core.ranks.runner.cache.plan.bytes_of_tokens(resolved.block_size) * core.ranks.size,
        kv_cache_dtype=core.ranks.runner.cache.plan.dtype,
        most_new_tokens=(resolved.override_generation_config or {}).get("max_new_tokens"),
        most_drafts=resolved.speculative.queries - 1 if resolved.speculative is not None else 0,
        generates=core.model_config.has_head,
        state_bytes=core.ranks.runner.states.plan.row_bytes * core.ranks.size,
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
                answer = wire.refusal(data, error)
                if answer is None:
                    inbox.put(error)
                else:
                    outbox.put(answer)


def _end_with_parent(folder: str) -> NoReturn:
    try:
        # The parent writes nothing, so this returns when it closes our standard input, or dies.
        while os.read(0, 1):
            pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _die_with_parent() -> None:
    """A second way to end with the parent, as a native call that never returns would hold up
    _end_with_parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
