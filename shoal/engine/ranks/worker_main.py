"""The process of a rank other than 0: `python -m shoal.engine.ranks.worker_main`. workers.py starts it with
inherited file descriptors; the table of commands that it serves is made in ranks.py.

It calls the factory that rank 0 names, which returns a table of commands: a name and the function it runs.
Then it runs the commands in the order in which rank 0 gives them. It ends, whatever it is doing, when the
socket to rank 0 closes: on WorkerProcesses.close() and on any death of rank 0. (PR_SET_PDEATHSIG would not
do, as it fires when the *thread* that started us ends.) Nothing it holds outlives the process, so it always
leaves by os._exit: finalizers could wait for ranks that are gone.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from shoal.engine.ranks.channel import ChannelReader, pack
from shoal.engine.ranks.progress import Progress
from shoal.errors import UnavailableError, UserError
from shoal.memory.thread_stacks import STACKS


def main() -> NoReturn:
    rank, world_size, memory_fd, data_fd, room_fd, progress_fd, link_fd = map(int, sys.argv[1:])
    for fd in (memory_fd, data_fd, room_fd, progress_fd, link_fd):
        os.set_inheritable(fd, False)  # a compiler we start must not keep the socket open
    link = socket.socket(fileno=link_fd)
    STACKS.is_own_process = True
    threading.Thread(target=_end_with_rank_0, args=(link,), name="shoal-end-with-rank-0", daemon=True).start()
    try:
        channel = ChannelReader(memory_fd, data_fd, room_fd)
        _serve(rank, world_size, channel, Progress(progress_fd, world_size), link)
    except BaseException:  # noqa: BLE001 - the loop of a process: rank 0 learns of it by our death and from these last words
        traceback.print_exc()
        os._exit(1)


def _end_with_rank_0(link: socket.socket) -> NoReturn:
    try:
        link.recv(1)  # rank 0 sends nothing: this returns when it closes or dies
    finally:
        os._exit(0)


def _serve(
    rank: int, world_size: int, channel: ChannelReader, progress: Progress, link: socket.socket
) -> NoReturn:
    _, target, (init,) = channel.get()
    module, _, name = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
        table: Mapping[str, Callable[..., Any]] = factory(rank=rank, world_size=world_size, **init)
    except UserError as error:
        _reply(link, None, False, _describe(error))
        os._exit(1)
    while True:
        progress.end_command(rank)
        call_id, command, args = channel.get()
        if call_id is None:
            table[command](*args)
            continue
        try:
            _reply(link, call_id, True, table[command](*args))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is rank 0's to judge
            _reply(link, call_id, False, _describe(error))


def _describe(error: Exception) -> tuple[str, str]:
    """The name of the class, and what to say."""
    if isinstance(error, (UserError, UnavailableError)):
        return type(error).__name__, str(error)
    return type(error).__name__, f"{error}\n{''.join(traceback.format_exception(error))}"


def _reply(link: socket.socket, call_id: int | None, ok: bool, value: Any) -> None:
    """With call_id None: why there will be no replies."""
    link.sendall(b"".join(pack((call_id, ok, value))))


if __name__ == "__main__":
    main()
