"""Traces and timings of one rank's steps, which users ask for."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from shoal.engine.profile import NOTHING, Profiler, StepClock
from shoal.errors import ConfigError


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

    def clocked(self) -> AbstractContextManager[None]:
        """A step runs inside it."""
        return NOTHING if self._clock is None else self._clock.step()
