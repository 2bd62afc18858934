"""`SimConfig`: a simulated fleet, from a fleet's TOML file with a table `[sim]`, or made in Python.

model = "qwen3-8b"

[[workers]]
count = 8

[router]
policy = "kv"

[sim]
gpu = "h200"
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.files.toml_file import build, check_keys, keys_of, read_document, table, tables
from shoal.fleet.config import REMOVED_OPTIONS, FleetConfig
from shoal.fleet.file.fleet_file import ROUTER_OPTIONS, TOP_KEYS, WORKER_OPTIONS, NativeWorkers
from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.planner.engine_profile import read_profile
from shoal.fleet.registry.registry import ROLES
from shoal.fleet.routing.policy import RouterWeights, check_policy
from shoal.fleet.simulator.timing import find_timing
from shoal.fleet.simulator.trace import TRACE_BLOCK_SIZE
from shoal.fleet.simulator.worker import PAGE

SIM_KEYS = (
    "gpu",
    "profile",
    "cache_tokens",
    "event_delay_ms",
    "block_size",
    "worker_start_s",
    "transfer_GB_s",
)


@dataclass(frozen=True, slots=True)
class SimWorkers:
    """A group of equal workers: the simulated options of `shoal serve`, with its defaults on a GPU. Raises
    ConfigError."""

    count: int = 1
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 16384
    gpu_memory_utilization: float = 0.9
    kv_host_bytes: int = 0
    role: str = "both"
    model: str | None = None  # None: the file's model
    name: str | None = None  # its name in the trace; None: the model

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"role must be one of {', '.join(ROLES)}, got {self.role!r}")
        if self.kv_host_bytes < 0:
            raise ConfigError(
                f"kv_host_bytes must be at least 0, got {self.kv_host_bytes} (0: without a host tier)"
            )
        if self.count < 0:
            raise ConfigError(f"count must be at least 0, got {self.count}; give 1 or more")
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs must be from 1 to max_num_batched_tokens ({self.max_num_batched_tokens}), got "
                f"{self.max_num_seqs}; each decoding sequence takes one token of a step"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be a share of memory, got {self.gpu_memory_utilization}; 0.9 "
                "is the default"
            )


@dataclass(frozen=True, slots=True)
class SimConfig:
    """`profile`: a file of `shoal plan --profile` with all workers' times, in place of `gpu` and a published
    model. `cache_tokens`: size of a worker's KV cache; None: from the GPU's memory or the profile.
    `event_delay_ms`: delay of KV events to the router's index. `block_size`: tokens of a block in the trace.
    `worker_start_s`: start-up time of an added worker, during which its GPU counts. `transfer_GB_s`: speed
    from a prefill to a decode worker. Raises ConfigError."""

    model: str
    gpu: str = "h200"
    profile: str | None = None
    workers: Sequence[SimWorkers] = (SimWorkers(),)
    policy: str = "kv"
    seed: int = 0
    weights: RouterWeights = field(default_factory=RouterWeights)
    cache_tokens: int | None = None
    event_delay_ms: float = 0.0
    block_size: int = TRACE_BLOCK_SIZE
    worker_start_s: float = 30.0
    transfer_GB_s: float = 50.0
    max_local_prefill_length: int = FleetConfig.max_local_prefill_length
    max_prefill_queue_size: int = FleetConfig.max_prefill_queue_size
    planner: PlannerConfig = field(default_factory=PlannerConfig)

    def __post_init__(self) -> None:
        if self.profile is not None:
            self._check_profile(self.profile)
        else:
            for group in self.workers:
                find_timing(self.gpu, group.model or self.model)
        check_policy(self.policy)
        if self.block_size < PAGE or self.block_size % PAGE:
            raise ConfigError(
                f"block_size must be a multiple of {PAGE} tokens, got {self.block_size}; Mooncake's is 512"
            )
        if self.cache_tokens is not None and self.cache_tokens < self.block_size:
            raise ConfigError(
                f"cache_tokens must hold one block of {self.block_size} tokens, got {self.cache_tokens}; "
                "give more"
            )
        if not 0 <= self.event_delay_ms < math.inf:
            raise ConfigError(f"event_delay_ms must be >= 0, got {self.event_delay_ms} (0 = no delay)")
        if not 0 <= self.worker_start_s < math.inf:
            raise ConfigError(f"worker_start_s must be >= 0, got {self.worker_start_s}; 30 is the default")
        if not 0 < self.transfer_GB_s < math.inf:
            raise ConfigError(f"transfer_GB_s must be above 0, got {self.transfer_GB_s}; 50 is the default")
        groups = [(self.name_of(group), group.role) for group in self.workers]
        if self.planner.enabled and len(set(groups)) < len(groups):
            raise ConfigError(
                f"[[workers]] must have one table per model and role for the planner, got {len(groups)} "
                "tables, two of them with the same model and role; write one"
            )
        if self.planner.enabled:
            self._check_planner()
        for name, role in groups:
            if role == "prefill" and (name, "decode") not in groups:
                raise ConfigError(
                    f"{name!r} has prefill workers and no decode workers to compute prompts for; add "
                    '[[workers]] with role = "decode"'
                )
            if role == "both" and (name, "decode") in groups:
                raise ConfigError(
                    f"{name!r} has workers with the roles both and decode, which is not simulated; choose one"
                )
        for name in {name for name, _ in groups}:
            own = [group for group in self.workers if self.name_of(group) == name]
            if not any(group.count for group in own if group.role != "prefill"):
                raise ConfigError(
                    f"{name!r} must have a worker; give [[workers]] a count of 1 or more, or --workers"
                )

    def _check_planner(self) -> None:
        for group in self.workers:
            counted, gpus = self.planner.gpus_of(group.role), self.gpus_per_worker
            if counted != gpus:
                option = "prefill_engine_num_gpu" if group.role == "prefill" else "decode_engine_num_gpu"
                raise ConfigError(
                    f"[planner] counts {counted} GPUs for a worker of the role {group.role}, and the "
                    f"simulated ones have {gpus}; write {option} = {gpus}, or give the profile of such a "
                    "worker ([sim] profile)"
                )
        self.planner.check_workers((group.role, group.count) for group in self.workers)

    @property
    def gpus_per_worker(self) -> int:
        """GPUs of the measured worker; without a profile the times are for one GPU."""
        return 1 if self.profile is None else read_profile(self.profile).data.num_gpus

    def _check_profile(self, profile: str) -> None:
        read_profile(profile)
        if len({self.name_of(group) for group in self.workers}) > 1:
            raise ConfigError(
                f"profile needs a fleet with one model, got several; leave profile {profile!r} out"
            )
        if any(group.role != "both" or group.kv_host_bytes for group in self.workers):
            raise ConfigError(
                f"profile {profile!r} has no times of KV blocks from host memory or from another "
                'worker; take role = "both" and no kv_host_bytes, or leave it out'
            )

    def name_of(self, group: SimWorkers) -> str:
        return group.name or group.model or self.model


def read_sim_config(
    path: str | Path,
    *,
    policy: str | None = None,
    num_workers: int | None = None,
    seed: int | None = None,
    planner: Mapping[str, Any] | None = None,
) -> SimConfig:
    """Reads a file; the arguments override it. `num_workers`: for a fleet with a single [[workers]] table.
    `planner`: keys of [planner]. Raises ConfigError."""
    document = read_document(path)
    try:
        return _config_of(document, policy, num_workers, seed, planner or {})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _config_of(
    document: Mapping[str, Any],
    policy: str | None,
    num_workers: int | None,
    seed: int | None,
    planner: Mapping[str, Any],
) -> SimConfig:
    # Many keys of a fleet's file have no effect here: ports, keys, the plane.
    check_keys(document, TOP_KEYS, "the file")
    if "model" not in document:
        raise ConfigError('"model" is missing; give the name of a published shape, such as "qwen3-8b"')
    given = table(document, "sim")
    check_keys(given, SIM_KEYS, "[sim]")
    router = table(document, "router")
    check_keys(router, ROUTER_OPTIONS, "[router]", REMOVED_OPTIONS)
    planned = {**table(document, "planner"), **planner}
    check_keys(planned, keys_of(PlannerConfig), "[planner]")
    values = {"model": document["model"], **given}
    for name, value in (("policy", policy), ("seed", seed)):
        if value is not None or name in router:
            values[name] = router[name] if value is None else value
    for name in ("max_local_prefill_length", "max_prefill_queue_size"):
        if name in router:
            values[name] = router[name]
    weights = keys_of(RouterWeights)
    values["weights"] = build(RouterWeights, {name: router[name] for name in weights if name in router})
    values["workers"] = _workers_of(document, num_workers)
    values["planner"] = build(PlannerConfig, planned)
    config: SimConfig = build(SimConfig, values)
    for entry in tables(document, "workers"):
        size = table(entry, "options").get("tensor_parallel_size", config.gpus_per_worker)
        if size != config.gpus_per_worker:
            raise ConfigError(
                f"tensor_parallel_size {size!r} is not simulated: the times are for a worker with "
                f"{config.gpus_per_worker} GPUs; give the profile of such a worker ([sim] profile), or leave "
                "it out"
            )
    return config


def _workers_of(document: Mapping[str, Any], num_workers: int | None) -> list[SimWorkers]:
    groups = []
    for entry in tables(document, "workers") or [{}]:
        check_keys(entry, keys_of(NativeWorkers), "[[workers]]")
        options = table(entry, "options")
        check_keys(options, WORKER_OPTIONS, "options of [[workers]]")
        simulated = {name: options[name] for name in keys_of(SimWorkers) if name in options}
        simulated |= {name: entry[name] for name in ("count", "role", "model", "name") if name in entry}
        groups.append(build(SimWorkers, simulated))
    if num_workers is not None:
        if len(groups) != 1:
            raise ConfigError(
                f"--workers needs a file with one [[workers]] table, got {len(groups)}; set count in the file"
            )
        groups = [dataclasses.replace(groups[0], count=num_workers)]
    return groups
