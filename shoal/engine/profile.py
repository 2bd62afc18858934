"""Traces of a running engine for Perfetto (ui.perfetto.dev): steps and host work by name, kernels on a line
of their own.

Torch's profiler writes one file for each rank. While no trace is being made, a span costs one function call.
`StepClock` says how long the GPU stood idle between steps.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shoal.errors import ConfigError

NOTHING = contextlib.nullcontext()
_active: Profiler | None = None  # a process has one, as torch's profiler is global


class Profiler:
    """A trace of this process, from now until `stop`. Raises ConfigError if one is being made already, or if
    `folder` can't be written."""

    def __init__(self, folder: str, rank: int, device: torch.device) -> None:
        global _active
        if _active is not None:
            raise ConfigError("a trace is being made already; end it with stop_profile first")
        path = Path(folder).expanduser()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder {folder} for traces cannot be made: {error.strerror}; name another"
            ) from None
        if not os.access(path, os.W_OK):
            raise ConfigError(f"the folder {folder} for traces cannot be written to; name another")
        self.file = path / f"shoal-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-rank{rank}.trace.json.gz"
        self.device = device
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile = profile(activities=activities)
        self._profile.start()
        _active = self

    def stop(self) -> str:
        """Writes the trace and returns its path."""
        global _active
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._profile.stop()
        _active = None
        self._profile.export_chrome_trace(str(self.file))
        return str(self.file)


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """Gives what runs inside it a name in the trace, if one is being made."""
    return NOTHING if _active is None else record_function(name)


class StepClock:
    """Records when the GPU begins and ends each step, by events on its stream. Nothing waits for them before
    `stop`."""

    def __init__(self) -> None:
        self._steps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._steps.append((start, end))

    def stop(self) -> tuple[float, float]:
        """Returns the seconds from the beginning of the first step to the end of the last, and how many of
        them lay between steps."""
        torch.cuda.synchronize()
        if not self._steps:
            return 0.0, 0.0
        idle = sum(end.elapsed_time(start) for (_, end), (start, _) in pairwise(self._steps))
        return self._steps[0][0].elapsed_time(self._steps[-1][1]) / 1e3, idle / 1e3


class RankProfile:
    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._profiler: Profiler | None = None
        self._clock: StepClock | None = None

    def start(self, folder: str) -> None:
        """Begins a trace, which `stop` writes into `folder`. Raises ConfigError if one is being made already,
        or the folder can't be written."""
        if self._profiler is not None:
            raise ConfigError("a trace is being made already; end it with stop_profile first")
        self._profiler = Profiler(folder, self._rank, self._device)

    def stop(self) -> str:
        """Writes the trace, and returns its path. Raises ConfigError if none is being made."""
        if self._profiler is None:
            raise ConfigError("no trace is being made; begin one with start_profile")
        profiler, self._profiler = self._profiler, None
        return profiler.stop()

    def start_clock(self) -> None:
        """On a GPU, notes the times of each step from now on."""
        self._clock = StepClock() if self._device.type == "cuda" else None

    def stop_clock(self) -> tuple[float, float] | None:
        """Seconds since the first step, and how many of them the GPU waited for the next step. None on a
        CPU."""
        clock, self._clock = self._clock, None
        return None if clock is None else clock.stop()

    def clocked(self) -> contextlib.AbstractContextManager[None]:
        """A step runs inside it."""
        return NOTHING if self._clock is None else self._clock.step()
