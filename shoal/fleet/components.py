"""What a fleet's file says of workers, as components: their command lines, GPUs and cores."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.config import EngineConfig, ServerConfig
from shoal.errors import ConfigError
from shoal.fleet.fleet_file import ForeignWorkers, OwnWorkers
from shoal.fleet.processes import Component
from shoal.fleet.toml_file import keys_of
from shoal.options import flag_of

GPU = re.compile(r"nvidia\d+")
Group = OwnWorkers | ForeignWorkers


def components_of(
    groups: Sequence[Group],
    plane_url: str,
    *,
    more_words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    prefix: str = "",
    may_grow: bool = False,
) -> list[Component]:
    """A component for each group. `more_words` and `environment` are for each of our workers; `prefix` begins
    all names. `may_grow`: groups that name no GPUs share all that are left, so that any of them may get more
    workers. Raises ConfigError if this machine has too few GPUs for the groups that name none."""
    gpus = _gpus()
    free = iter(gpus)
    shared = {**(environment or {}), **_cores(groups, bool(gpus))}
    components: list[Component] = []
    for number, group in enumerate(groups, 1):
        devices = None if group.devices is None else [str(device) for device in sorted(group.devices)]
        if isinstance(group, ForeignWorkers):
            name, words = Path(group.words[0]).name, tuple(group.words)
        else:
            name, words = _name(group), _command(group, plane_url, more_words)
            if devices is None and gpus and group.options.get("device") != "cpu":
                wanted = group.count * group.devices_per_worker
                devices = gpus if may_grow else _take(free, wanted, number, len(gpus))
        name = prefix + name
        others = [component.name for component in components]
        components.append(
            Component(
                name=name if name not in others else f"{name}-{number}",
                command=words,
                environment=shared if isinstance(group, OwnWorkers) else {},
                devices=tuple(devices or ()),
                devices_per_worker=group.devices_per_worker,
                shares_devices=may_grow and group.devices is None,
                # Another engine may have processes that it must end itself.
                death_signal=signal.SIGKILL if isinstance(group, OwnWorkers) else signal.SIGTERM,
            )
        )
    return components


def _name(group: OwnWorkers) -> str:
    """Short, and fit for ids: "Qwen3-8B", "Qwen3-8B-prefill"."""
    short = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(group.served_name).name).strip("-") or "worker"
    return short if group.role == "both" else f"{short}-{group.role}"


def _command(group: OwnWorkers, plane_url: str, more_words: Sequence[str]) -> tuple[str, ...]:
    words = [sys.executable, "-m", "shoal", "serve", group.model, "--port", "0", "--plane", plane_url]
    words += ["--role", group.role, "--worker-id", "{id}"]
    if group.name is not None:
        words += ["--served-model-name", group.name]
    known = {*keys_of(EngineConfig), *keys_of(ServerConfig)}
    for name, value in group.options.items():
        if name in known:  # others have been warned of
            words += _flag(name, value)
    return (*words, *more_words)


def _flag(name: str, value: Any) -> list[str]:
    """An option as words of the command line."""
    if isinstance(value, bool):
        return [flag_of(name) if value else flag_of(f"no_{name}")]
    if isinstance(value, list):
        return [flag_of(name), *map(str, value)]
    return [f"{flag_of(name)}={json.dumps(value) if isinstance(value, dict) else value}"]


def _gpus() -> list[str]:
    """The GPUs of this machine that this process may use, as CUDA names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number in range(len([x for x in os.listdir("/dev") if GPU.fullmatch(x)]))]


def _take(free: Iterator[str], wanted: int, number: int, num_gpus: int) -> list[str]:
    found = list(itertools.islice(free, wanted))
    if len(found) < wanted:
        raise ConfigError(
            f"[[workers]] {number} needs {wanted} GPUs, and of the {num_gpus} here {len(found)} are left; "
            "lower count, name devices (a GPU may be named twice, with a smaller gpu_memory_utilization), or "
            'take options = { device = "cpu" }'
        )
    return found


def _cores(groups: Sequence[Group], has_gpus: bool) -> dict[str, str]:
    """Workers that compute on the CPU share its cores, as each would take all of them."""
    on_cpu = 0
    for group in groups:
        if isinstance(group, OwnWorkers) and (not has_gpus or group.options.get("device") == "cpu"):
            on_cpu += group.count
    if on_cpu < 2 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // on_cpu))}
