"""fleet.toml: a whole fleet in one file, which `shoal fleet up` starts.

model = "smollm2"             # for workers without a model
port = 8000                   # and other options of the server, with underscores

[[workers]]                   # a group of equal workers; the table may be repeated
count = 2
options = { max_model_len = 4096 }

[router]                      # options of `shoal route`, with underscores
policy = "kv"

[plane]
url = "nats://10.0.0.1:4222"  # default: an embedded one, for this host only

[planner]                     # adds and removes workers as the load changes
enabled = true

All errors are found before any process starts.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.config import DEFAULT_MODEL, EngineConfig, KVTransferConfig, ServerConfig, check_lends
from shoal.errors import ConfigError
from shoal.files.toml_file import build, check_keys, keys_of, read_document, table, tables
from shoal.fleet.config import NO_ROUTER_OPTIONS, REMOVED_OPTIONS, FleetConfig
from shoal.fleet.connectors.state_file import PORTS
from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.planner.engine_profile import EngineProfile
from shoal.fleet.planner.planner import read_profiles
from shoal.fleet.registry.open import NATS
from shoal.fleet.registry.registry import ROLES
from shoal.fleet.worker_spec import parse_worker
from shoal.options.vllm import ALL_OPTIONS, translate

MAX_COUNT = 4096
# Options of `shoal serve` that the fleet sets for its workers.
GIVEN_OPTIONS = frozenset(
    {
        "model",
        "served_model_name",
        "host",
        "port",
        "uds",
        "admin_host",
        "admin_port",
        "swap",
        "swap_patience",
        "plane",
        "role",
        "worker_id",
        "fleet_key_file",
        "fleet_port",
    }
)
WORKER_OPTIONS = frozenset([*keys_of(EngineConfig), *keys_of(ServerConfig)]) - GIVEN_OPTIONS
SERVER_OPTIONS = frozenset(keys_of(ServerConfig)) - frozenset(NO_ROUTER_OPTIONS)
ROUTER_OPTIONS = frozenset(keys_of(FleetConfig)) - {"plane"}
TOP_KEYS = SERVER_OPTIONS | {"model", "workers", "router", "plane", "planner", "sim"}


@dataclass(frozen=True, slots=True)
class NativeWorkers:
    """A group of equal native workers. `name`: the model's name for clients; None: the loaded name.
    `devices`: numbers of their GPUs, which are divided in order; None: free GPUs. `options`: options of
    `shoal serve`. `resources`: Ray's reservation for each worker in addition to its GPUs, such as {"CPU": 4};
    unused on one host. Raises ConfigError."""

    model: str
    name: str | None = None
    role: str = "both"
    count: int = 1
    devices: list[int] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    resources: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise ConfigError(
                "model must not be empty; give a folder, .gguf file, hub id or URL, or leave it out"
            )
        _check_name(self.name)
        if self.role not in ROLES:
            raise ConfigError(f"role must be one of {', '.join(ROLES)}, got {self.role!r}")
        # vLLM's options are passed to the workers, whose logs report the ones without an effect.
        options, _ = translate(self.options, ALL_OPTIONS, str)
        check_keys(options, WORKER_OPTIONS, "options of [[workers]]")
        engine_names = keys_of(EngineConfig)
        engine = {name: value for name, value in options.items() if name in engine_names}
        config = build(EngineConfig, {"model": self.model, **engine})
        if "kv_transfer_config" in engine:  # otherwise it follows from the role
            check_lends(self.role, config)
        server = {name: value for name, value in options.items() if name not in engine_names}
        build(ServerConfig, {**server, "plane": "the fleet's"})  # set at its start
        _check_count(self.count, self.devices, self.devices_per_worker)
        _check_resources(self.resources)

    @property
    def served_name(self) -> str:
        return self.name or self.model

    @property
    def devices_per_worker(self) -> int:
        return int(self.options.get("tensor_parallel_size", 1))


@dataclass(frozen=True, slots=True)
class ExternalWorkers:
    """A group of equal external workers. `command`: the command line of one. `name`: the model's name for
    clients, which the planner needs. `worker`: the address for the router, in the form of --worker without an
    id. In command and worker `{port}`, `{events_port}` and `{replay_port}` stand for free ports. Raises
    ConfigError."""

    command: str
    name: str | None = None
    worker: str = "http://127.0.0.1:{port}"
    count: int = 1
    devices: list[int] | None = None
    devices_per_worker: int = 1

    def __post_init__(self) -> None:
        if not self.words:
            raise ConfigError("command must not be empty; give the command line of a worker")
        _check_name(self.name)
        trial = self.worker
        for name in PORTS:
            place = "{" + name + "}"
            if place in self.worker and place not in self.command:
                raise ConfigError(
                    f"worker {self.worker!r:.200} has {place}, and command {self.command!r:.200} has not; "
                    "write it where the command takes that port, or the port's number in worker"
                )
            trial = trial.replace(place, "1")
        parse_worker(trial)
        if ",id=" in self.worker:
            raise ConfigError(
                f"worker must not have an id, got {self.worker!r:.200}; remove it: the fleet numbers workers"
            )
        if self.count > 1 and "{port}" not in self.worker:
            raise ConfigError(
                f"worker {self.worker!r:.200}: {self.count} workers cannot share a port; write {{port}} "
                "there and in command"
            )
        _check_count(self.count, self.devices, self.devices_per_worker)

    @property
    def words(self) -> list[str]:
        try:
            return shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"command {self.command!r:.200} cannot be split into words: {error}") from None


def _check_name(name: str | None) -> None:
    if name is not None and not name.strip():
        raise ConfigError("name must not be empty; give the model's name for clients, or leave it out")


def _check_resources(resources: Mapping[str, float]) -> None:
    if "GPU" in resources:
        raise ConfigError("resources must not have GPU; set tensor_parallel_size in the worker's options")
    for name, amount in resources.items():
        if not 0 <= amount < math.inf:
            raise ConfigError(
                f"resources {name} must be above 0, got {amount:g}; give an amount, as {{ CPU = 4 }}"
            )


def _check_count(count: int, devices: list[int] | None, devices_per_worker: int) -> None:
    if not 0 <= count <= MAX_COUNT:
        raise ConfigError(f"count must be from 0 to {MAX_COUNT}, got {count}; give another count")
    if devices is None:
        return
    if any(device < 0 for device in devices):
        raise ConfigError(f"devices must be at least 0, got {devices}; 0 is the first GPU")
    if len(devices) < count * devices_per_worker:
        raise ConfigError(
            f"devices must name {devices_per_worker} GPUs for each of {count} workers, got {devices}; name "
            "more (a GPU may be named twice), or lower count"
        )
    if devices_per_worker > 1 and len(set(devices)) < len(devices):
        raise ConfigError(
            f"devices {devices} names a GPU twice, and each of these workers takes {devices_per_worker} that "
            "differ; name each once, and let workers of another [[workers]] share it"
        )


@dataclass(frozen=True, slots=True)
class FleetFile:
    """The content of a fleet's file. `server`: options of the router's ports. `router`: routing options;
    without [plane], `plane` stays None. `may_grow`: the file has options of a planner, in this process or
    another one."""

    workers: list[NativeWorkers | ExternalWorkers]
    server: ServerConfig
    router: FleetConfig
    planner: PlannerConfig
    may_grow: bool = False

    def __post_init__(self) -> None:
        if self.planner.enabled:
            self.check_planner()

    def _check_role_changes(self) -> None:
        """Checks that workers which change their role have the same options as the workers of that role."""
        first: dict[str, NativeWorkers] = {}
        for number, group in enumerate(self.workers, 1):
            if isinstance(group, ExternalWorkers):
                continue
            other = first.setdefault(group.served_name, group)
            if other is group:
                continue
            kv = "kv_transfer_config"
            parts = [{**each.options, kv: None} for each in (group, other)]
            if parts[0] != parts[1]:
                raise ConfigError(
                    f"[[workers]] {number}: with [planner] change_roles workers of {group.served_name} take "
                    "each other's role, and these have other options than those before; give all the same"
                )
            if not _exchanges(group) or not _exchanges(other):
                raise ConfigError(
                    f"[[workers]] {number}: with [planner] change_roles workers of {group.served_name} take "
                    "each other's role, so all have to lend and read KV blocks; add kv_transfer_config = "
                    '{ kv_role = "kv_both" } to their options'
                )

    def check_planner(self) -> None:
        """Raises ConfigError for workers that the planner cannot size."""
        seen: set[tuple[str, str]] = set()
        for number, group in enumerate(self.workers, 1):
            cannot_sleep = isinstance(group, NativeWorkers) and not group.options.get("enable_sleep_mode")
            if self.planner.park_level is not None and cannot_sleep:
                raise ConfigError(
                    f"[[workers]] {number}: [planner] park_level puts workers to sleep, and these cannot; "
                    "add enable_sleep_mode = true to their options"
                )
            name, role = _sized(group)
            if name is None:
                raise ConfigError(
                    f"[[workers]] {number} has a command and no name, and [planner] needs to know what it "
                    "sizes; write name = what /v1/models of that server says"
                )
            is_on_cpu = isinstance(group, NativeWorkers) and group.options.get("device") == "cpu"
            gpus, counted = group.devices_per_worker, self.planner.gpus_of(role)
            if gpus > counted and not is_on_cpu:
                option = "prefill_engine_num_gpu" if role == "prefill" else "decode_engine_num_gpu"
                raise ConfigError(
                    f"[[workers]] {number}: each of these takes {gpus} GPUs, and [planner] counts {counted} "
                    f"for one of the role {role}; write {option} = {gpus}"
                )
            if (name, role) in seen:
                raise ConfigError(
                    f"[[workers]] {number}: the planner needs to know which {role} workers of {name} to add, "
                    "and there are two tables of them; write one"
                )
            seen.add((name, role))
        self.planner.check_workers((_sized(group)[1], group.count) for group in self.workers)
        if self.planner.change_roles:
            self._check_role_changes()
        self.read_profiles()

    def read_profiles(self) -> dict[str, EngineProfile]:
        """Returns the planner's profiles by model. Raises ConfigError."""
        names = (_sized(group)[0] for group in self.workers)
        return read_profiles(self.planner, dict.fromkeys(name for name in names if name is not None))


def _exchanges(group: NativeWorkers) -> bool:
    """Returns True if its workers can lend and read KV blocks, as each role must."""
    transfer = KVTransferConfig.of(group.options.get("kv_transfer_config"))
    return group.role == "decode" if transfer is None else transfer.lends and transfer.reads


def _sized(group: NativeWorkers | ExternalWorkers) -> tuple[str | None, str]:
    """Returns model and role of the group's workers."""
    return (group.name, "both") if isinstance(group, ExternalWorkers) else (group.served_name, group.role)


def read_fleet_file(path: str | Path) -> FleetFile:
    """Reads a fleet's file. Raises ConfigError with the file, the key, and its possible values."""
    document = read_document(path)
    try:
        return _fleet_of(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _fleet_of(document: Mapping[str, Any]) -> FleetFile:
    check_keys(document, TOP_KEYS, "the file")
    plane = table(document, "plane")
    check_keys(plane, ("url",), "[plane]")
    router = table(document, "router")
    check_keys(router, ROUTER_OPTIONS, "[router]", REMOVED_OPTIONS)
    if "url" in plane:
        router = {**router, "plane": plane["url"]}
    groups: list[NativeWorkers | ExternalWorkers] = []
    for number, entry in enumerate(tables(document, "workers"), 1):
        try:
            groups.append(_group_of(entry, document.get("model", DEFAULT_MODEL)))
        except ConfigError as error:
            raise ConfigError(f"[[workers]] {number}: {error}") from None
    _check_names(groups)
    config = build(FleetConfig, router)
    options = table(document, "planner")
    check_keys(options, keys_of(PlannerConfig), "[planner]")
    planner = build(PlannerConfig, options)
    if config.plane is None or not config.plane.startswith(NATS):  # otherwise partners may be on other hosts
        _check_roles(groups, planner)
    server = {name: document[name] for name in SERVER_OPTIONS if name in document}
    return FleetFile(groups, build(ServerConfig, server), config, planner, "planner" in document)


def _group_of(entry: Mapping[str, Any], model: Any) -> NativeWorkers | ExternalWorkers:
    if "command" in entry:
        check_keys(entry, keys_of(ExternalWorkers), "[[workers]] with a command")
        return build(ExternalWorkers, entry)
    check_keys(entry, [*keys_of(NativeWorkers), "command"], "[[workers]]")
    return build(NativeWorkers, {"model": model, **entry})


def _check_names(groups: Sequence[NativeWorkers | ExternalWorkers]) -> None:
    """Raises ConfigError for a name of several models."""
    models: dict[str, str] = {}
    for group in groups:
        if (
            isinstance(group, NativeWorkers)
            and models.setdefault(group.served_name, group.model) != group.model
        ):
            raise ConfigError(
                f"name {group.served_name!r} must be for one model, got {models[group.served_name]!r} and "
                f"{group.model!r}; give each its own"
            )


def _check_roles(groups: Sequence[NativeWorkers | ExternalWorkers], planner: PlannerConfig) -> None:
    """Raises ConfigError for prefill workers without workers that read KV blocks. If these have count = 0, a
    planner must add one without a load: without decode workers requests are refused, so no queue forms."""
    own = [group for group in groups if isinstance(group, NativeWorkers)]
    partners = [group for group in own if group.role == "decode" or _reads(group)]
    adds = planner.enabled and not planner.no_operation
    served = {group.served_name for group in partners}
    served_at_first = {group.served_name for group in partners if group.count or adds}
    for group in own:
        if group.role != "prefill":
            continue
        if group.served_name not in served:
            raise ConfigError(
                f"{group.served_name!r} has prefill workers and no decode workers to compute prompts for; "
                'add [[workers]] with role = "decode" (or "both" and options.kv_transfer_config = '
                '{ kv_role = "kv_both" }), or take role = "both" for all'
            )
        if group.count and group.served_name not in served_at_first:
            raise ConfigError(
                f"{group.served_name!r} has prefill workers, and all workers to compute prompts for have "
                "count = 0; give these a count of 1 or more, or have a planner add one ([planner] enabled = "
                "true)"
            )


def _reads(group: NativeWorkers) -> bool:
    """Returns True if workers of the role `both` are configured to read KV blocks of others."""
    transfer = KVTransferConfig.of(group.options.get("kv_transfer_config"))
    return group.role == "both" and transfer is not None and transfer.reads
