"""Converts the workers of a fleet's file to components: command lines, GPUs and cores."""

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
from shoal.files.toml_file import keys_of
from shoal.fleet.connectors.connector import Component
from shoal.fleet.file.fleet_file import ExternalWorkers, NativeWorkers
from shoal.fleet.registry.open import NATS
from shoal.options.parser import flag_of

GPU = re.compile(r"nvidia\d+")
WSL = "/dev/dxg"  # device of all GPUs under Windows
Group = NativeWorkers | ExternalWorkers


def components_of(
    groups: Sequence[Group],
    plane_url: str,
    *,
    more_words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    prefix: str = "",
    may_grow: bool = False,
) -> list[Component]:
    """Returns a component for each group. `more_words` and `environment`: for each native worker; `prefix`:
    of all names. `may_grow`: groups without `devices` share all remaining GPUs, so that each of them may get
    more workers. Raises ConfigError if this machine has too few GPUs for the groups without `devices`."""
    gpus = _gpus()
    free = iter(gpus)
    shared = {**(environment or {}), **_cores(groups, bool(gpus))}
    components: list[Component] = []
    names = names_of(groups, prefix)
    for number, group in enumerate(groups, 1):
        devices = None if group.devices is None else [str(device) for device in sorted(group.devices)]
        model, source, role, worker = "", "", "both", None
        if isinstance(group, ExternalWorkers):
            words, worker, model = group.words, group.worker, group.name or ""
        else:
            words = [sys.executable, "-m", "shoal", *serve_words(group, plane_url), *more_words]
            model, source, role = group.served_name, group.model, group.role
            if devices is None and gpus and group.options.get("device") != "cpu":
                wanted = group.count * group.devices_per_worker
                devices = gpus if may_grow else _take(free, wanted, number, len(gpus))
        components.append(
            Component(
                name=names[number - 1],
                command=tuple(words),
                model=model,
                source=source,
                role=role,
                count=group.count,
                worker=worker,
                environment=shared if isinstance(group, NativeWorkers) else {},
                devices=tuple(devices or ()),
                devices_per_worker=group.devices_per_worker,
                shares_devices=may_grow and group.devices is None,
                # An external engine may have children that it must end itself.
                death_signal=signal.SIGKILL if isinstance(group, NativeWorkers) else signal.SIGTERM,
            )
        )
    return components


def check_gpus(groups: Sequence[Group], components: Sequence[Component]) -> None:
    """Raises ConfigError if this machine lacks the GPUs of native workers. GPUs of external workers are not
    checked. `components`: the components of these groups."""
    if os.path.exists(WSL):
        return
    num_gpus, free = _num_gpus(), iter(_gpus())
    for number, (group, component) in enumerate(zip(groups, components, strict=True), 1):
        if isinstance(group, ExternalWorkers) or group.options.get("device") == "cpu":
            continue
        if component.shares_devices and component.devices:
            wanted = component.count * component.devices_per_worker
            _take(free, wanted, number, len(component.devices))
        if group.devices is None and group.options.get("device") != "cuda":
            continue
        if not component.devices:
            raise ConfigError(
                f'[[workers]] {number} has device = "cuda" in its options, and this process has no GPU '
                '(CUDA_VISIBLE_DEVICES); take "cpu", or a machine with GPUs'
            )
        lacking = [name for name in component.devices if name.isdigit() and int(name) >= num_gpus]
        if lacking:
            raise ConfigError(
                f"[[workers]] {number} has devices {', '.join(dict.fromkeys(lacking))}, and this machine "
                f"has {num_gpus} GPUs, counted from 0; name others (devices), or take options = "
                '{ device = "cpu" }'
            )


def components_of_pods(groups: Sequence[Group], plane_url: str | None) -> list[Component]:
    """Returns components for Kubernetes, whose manifests have the commands. Raises ConfigError for components
    that cannot run there."""
    if plane_url is None or not plane_url.startswith(NATS):
        raise ConfigError(
            "connector 'kubernetes' has its workers on other hosts, which an embedded plane does not reach; "
            'write [plane] url = "nats://HOST:4222"'
        )
    components = []
    for name, group in zip(names_of(groups), groups, strict=True):
        if isinstance(group, ExternalWorkers):
            raise ConfigError(
                f"component {name!r} has a command, and pods of external workers belong into the router's "
                "`worker` option; leave it out of [[workers]]"
            )
        components.append(
            Component(
                name, (), model=group.served_name, source=group.model, role=group.role, count=group.count
            )
        )
    return components


def names_of(groups: Sequence[Group], prefix: str = "") -> list[str]:
    """Returns a unique, short name for each group, valid in ids, such as "Qwen3-8B" and
    "Qwen3-8B-prefill"."""
    names: list[str] = []
    for number, group in enumerate(groups, 1):
        if isinstance(group, ExternalWorkers):
            name = prefix + Path(group.words[0]).name
        else:
            short = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(group.served_name).name).strip("-") or "worker"
            name = prefix + (short if group.role == "both" else f"{short}-{group.role}")
        names.append(name if name not in names else f"{name}-{number}")
    return names


def serve_words(group: NativeWorkers, plane_url: str, port: str = "0") -> list[str]:
    """Returns the arguments of `shoal` for a worker of this group; `{id}` stands for its id."""
    words = ["serve", group.model, "--port", port, "--plane", plane_url]
    words += ["--role", group.role, "--worker-id", "{id}"]
    if group.name is not None:
        words += ["--served-model-name", group.name]
    known = {*keys_of(EngineConfig), *keys_of(ServerConfig)}
    for name, value in group.options.items():
        if name in known:  # others have been warned of
            words += _flag(name, value)
    return words


def _flag(name: str, value: Any) -> list[str]:
    """Returns an option as words of the command line."""
    if isinstance(value, bool):
        return [flag_of(name) if value else flag_of(f"no_{name}")]
    if isinstance(value, list):
        return [flag_of(name), *map(str, value)]
    return [f"{flag_of(name)}={json.dumps(value) if isinstance(value, dict) else value}"]


def _gpus() -> list[str]:
    """Returns CUDA's names of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number in range(_num_gpus())]


def _num_gpus() -> int:
    return sum(GPU.fullmatch(name) is not None for name in os.listdir("/dev"))


def _take(free: Iterator[str], wanted: int, number: int, num_gpus: int) -> list[str]:
    found = list(itertools.islice(free, wanted))
    if len(found) < wanted:
        raise ConfigError(
            f"[[workers]] {number} needs {wanted} GPUs, and {len(found)} of the {num_gpus} here are left; "
            "lower count, name devices (a GPU may be named twice, with a smaller gpu_memory_utilization), or "
            'take options = { device = "cpu" }'
        )
    return found


def _cores(groups: Sequence[Group], has_gpus: bool) -> dict[str, str]:
    """Divides the cores among the workers that compute on the CPU, as each would take all of them."""
    on_cpu = 0
    for group in groups:
        if isinstance(group, NativeWorkers) and (not has_gpus or group.options.get("device") == "cpu"):
            on_cpu += group.count
    if on_cpu < 2 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // on_cpu))}
