"""Findings of checks, and the target that the user asked for: a machine that serves one model, or a fleet's
file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.config import ServerConfig
from shoal.fleet.config import FleetConfig
from shoal.fleet.file.fleet_file import FleetFile, NativeWorkers
from shoal.fleet.planner.config import ON_THIS_HOST, PlannerConfig

GPU_DEVICE = re.compile(r"nvidia\d+")
GIB, MIB = 1 << 30, 1 << 20


class Verdict(StrEnum):
    WORKS = "works"
    LIMITED = "limited"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Finding:
    """`about`: what was looked at. `found`: what is there. `means`: what that is for the user, and `remedy`:
    what to do about it, both "" where all is well. `is_asked`: whether what the user asked for needs it."""

    about: str
    verdict: Verdict
    found: str
    means: str = ""
    remedy: str = ""
    is_asked: bool = True


Findings = Iterator[Finding]


def works(about: str, found: str, *, is_asked: bool = True) -> Finding:
    return Finding(about, Verdict.WORKS, found, is_asked=is_asked)


def limited(about: str, found: str, means: str, remedy: str, *, is_asked: bool = True) -> Finding:
    return Finding(about, Verdict.LIMITED, found, means, remedy, is_asked)


def fails(about: str, found: str, means: str, remedy: str, *, is_asked: bool = True) -> Finding:
    return Finding(about, Verdict.FAILS, found, means, remedy, is_asked)


@dataclass(frozen=True)
class CheckTarget:
    """The service that is to run here. Without a fleet's file it is one worker with `shoal serve`'s options.

    path: the fleet's file; None: no file. mistake: why that file cannot be read, if so. given: the options
    that the user named, as {"model", "port", "plane"}; other options are checked too, and may fail.
    """

    fleet: FleetFile
    path: str | None = None
    mistake: str | None = None
    given: frozenset[str] = field(default_factory=frozenset)

    @property
    def server(self) -> ServerConfig:
        return self.fleet.server

    @property
    def router(self) -> FleetConfig:
        return self.fleet.router

    @property
    def planner(self) -> PlannerConfig:
        return self.fleet.planner

    def is_given(self, name: str) -> bool:
        """Says if the user asked for this option's value: by name, or with a whole file that can be read."""
        return (self.path is not None and self.mistake is None) or name in self.given

    @property
    def is_here(self) -> bool:
        """Says if workers are processes of this machine."""
        return self.planner.connector in ON_THIS_HOST

    @property
    def own(self) -> list[NativeWorkers]:
        """Returns the native workers that are to run on this machine."""
        if not self.is_here:
            return []
        return [group for group in self.fleet.workers if isinstance(group, NativeWorkers)]

    @property
    def needs_gpu(self) -> bool:
        return any(group.devices is not None or group.options.get("device") == "cuda" for group in self.own)

    @property
    def may_use_gpu(self) -> bool:
        return any(group.options.get("device") != "cpu" for group in self.own)

    @property
    def ranks(self) -> int:
        """The most processes that one engine has."""
        return max((group.devices_per_worker for group in self.own), default=1)

    def options(self, name: str) -> list[object]:
        """The values that our workers' tables give to an option of `shoal serve`."""
        return [group.options[name] for group in self.own if group.options.get(name) is not None]


def gpu_devices() -> list[str]:
    """The device files of NVIDIA GPUs, which are there if the driver is loaded."""
    return sorted(name for name in os.listdir("/dev") if GPU_DEVICE.fullmatch(name))


def in_units(num_bytes: int) -> str:
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.0f} MiB"
    return f"{num_bytes / 1024:.0f} KiB"
