"""`Progress`: finds a rank that hangs, from outside: by its count of commands, by the kernel's figures of its
process, and by whether rank 0 waits for it. workers.py looks at it, and ends a rank that hangs.

A rank counts its commands in a word of shared memory that is its own. Nothing else is asked of it, as one
that hangs can say nothing.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LOOK_S = 0.5  # between two looks
# A rank that is stopped (SIGSTOP, a debugger) may have been stopped by mistake, for a moment.
STOPPED_S = 2.0
# So long a rank may do nothing in a quick command. On the CPU it may compute for minutes, which is not
# nothing.
IDLE_S = 10.0
BUSY_SHARE = 0.05  # share of a processor core above which a process computes
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class _Watched:
    """Observations of a rank that runs a command."""

    ended: int = -1  # the commands that it had run
    stopped_s: float = 0.0
    cpu_seconds: float = 0.0


class Progress:
    """`create` makes rank 0's, whose methods give, look and command_of are for it alone. The other ranks map
    its memory, and count."""

    def __init__(self, memory_fd: int, world_size: int) -> None:
        self.memory_fd = memory_fd
        self._ended = np.frombuffer(mmap.mmap(memory_fd, 8 * world_size), np.int64)
        self._given = 0
        # The commands that some rank may not have run yet: number, name, and whether it should end soon.
        self._commands: deque[tuple[int, str, bool]] = deque()
        self._watched: dict[int, _Watched] = {}
        # How long no rank has done anything while rank 0 waited for them in a quick command. One that
        # computes may be the one that all others wait for.
        self._idle_s = 0.0
        self._looked_at: float | None = None

    @classmethod
    def create(cls, world_size: int) -> Progress:
        memory_fd = os.memfd_create("shoal-progress")
        os.ftruncate(memory_fd, 8 * world_size)
        return cls(memory_fd, world_size)

    def close(self) -> None:
        os.close(self.memory_fd)

    def end_command(self, rank: int) -> None:
        """This rank has run its next command."""
        self._ended[rank] += 1

    def give(self, command: str, is_quick: bool) -> None:
        """Notes that one more command was sent to all ranks. A quick command does not load or compile
        anything."""
        self._given += 1
        self._commands.append((self._given, command, is_quick))

    def command_of(self, rank: int) -> str | None:
        """The command that a rank is in. None: it has run all of them."""
        found = self._current(int(self._ended[rank]))
        return None if found is None else found[1]

    def _current(self, ended: int) -> tuple[int, str, bool] | None:
        return next((command for command in list(self._commands) if command[0] == ended + 1), None)

    def look(self, pids: Mapping[int, int], rank_0_waits: bool, now: float) -> str | None:
        """To be called every LOOK_S or so. Returns why the ranks can't continue, if one of them hangs. `now`:
        seconds of the monotonic clock."""
        # After a longer interval this process itself was stopped.
        elapsed = min(now - self._looked_at, 2 * LOOK_S) if self._looked_at is not None else 0.0
        self._looked_at = now
        slowest = min((int(self._ended[rank]) for rank in pids), default=self._given)
        while self._commands and self._commands[0][0] <= slowest:
            self._commands.popleft()
        behind = {
            rank: found for rank in pids if (found := self._current(int(self._ended[rank]))) is not None
        }
        is_idle = rank_0_waits and set(behind) == set(self._watched)
        self._watched = {rank: self._watched.get(rank, _Watched()) for rank in behind}
        for rank, (number, _, is_quick) in behind.items():
            state, cpu_seconds = _process(pids[rank])
            watched = self._watched[rank]
            is_idle &= is_quick and state in "ST" and watched.ended == number - 1
            is_idle &= cpu_seconds - watched.cpu_seconds <= BUSY_SHARE * elapsed
            watched.stopped_s = watched.stopped_s + elapsed if state == "T" else 0.0
            watched.ended, watched.cpu_seconds = number - 1, cpu_seconds
        self._idle_s = self._idle_s + elapsed if behind and is_idle else 0.0
        stopped = [rank for rank in behind if self._watched[rank].stopped_s >= STOPPED_S]
        if stopped:
            return self._describe(stopped, behind, pids, "is stopped (by SIGSTOP or a debugger)")
        if self._idle_s >= IDLE_S:
            return self._describe(
                sorted(behind), behind, pids, f"hangs: it has done nothing for {IDLE_S:g} s"
            )
        return None

    def _describe(
        self,
        ranks: list[int],
        behind: Mapping[int, tuple[int, str, bool]],
        pids: Mapping[int, int],
        what: str,
    ) -> str:
        return "; ".join(f"rank {rank} (pid {pids[rank]}) {what} in {behind[rank][1]!r}" for rank in ranks)


def _process(pid: int) -> tuple[str, float]:
    """The state of a process, as in proc(5), and the processor time that it has used. One that is stopped by
    a debugger counts as stopped (T)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # It has ended, which others notice.
        return "X", 0.0
    return fields[0].upper(), (int(fields[11]) + int(fields[12])) / TICKS
