"""The options of a router: flags of `shoal route`, and keys of `[router]` in a fleet's file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shoal.errors import ConfigError
from shoal.fields import check_fields, option
from shoal.fleet.policy import POLICIES, RouterWeights
from shoal.fleet.toml_file import build, check_keys, keys_of
from shoal.fleet.worker_spec import WorkerSpec, check_distinct, parse_worker

# Options of `shoal serve` that are of an engine, of a worker, or a router's own in FleetConfig.
NOT_OF_A_ROUTER = (
    "max_queued_requests",
    "profile_dir",
    "served_model_name",
    "engine_timeout",
    "restart",
    "swap",
    "swap_patience",
    "tool_call_parser",
    "reasoning_parser",
    "plane",
    "role",
    "worker_id",
    "fleet_key_file",
    "fleet_host",
    "fleet_port",
)


@dataclass(frozen=True)
class FleetConfig:
    """Raises ConfigError that names the option, its value and the limit."""

    policy: str = option(
        "kv", "which worker gets a request", common=True, section="router", choices=tuple(POLICIES)
    )
    worker: list[str] | None = option(
        None,
        "a worker that speaks HTTP: URL, or URL,kv_events=tcp://...,replay=tcp://...,block_size=16,id=b,"
        "tag=x,dp_size=2,api_key_file=F; again for each",
        common=True,
    )
    plane: str | None = option(
        None,
        "where our own workers join: tcp://127.0.0.1:PORT or ipc:///PATH for one host, nats://... for many",
        common=True,
    )
    fleet_key_file: str | None = option(
        None, "the key of the plane and of our workers' ports; without it they are loopback", common=True
    )
    block_size: int = option(
        16, "tokens a KV block, of workers that do not tell theirs", common=True, low=1, high=1 << 20
    )
    migration_limit: int = option(
        3,
        "workers that may fail a request which has tokens, before it ends with an error",
        common=True,
        low=0,
    )
    max_queued_requests: int = option(
        1024, "of a model, that wait for a worker with room; more are a 429", common=True, low=0
    )
    seed: int | None = option(None, "of random choices; default: another each time")
    tokenizer: str | None = option(
        None, "folder or tokenizer.json, for workers without /tokenize; it serves routing alone", common=True
    )
    lease: float = option(
        6.0, "seconds until a worker on the plane that died is gone from everyone's view", low=0.5
    )
    check_interval: float = option(5.0, "seconds between two health checks of a worker", above=0)
    hang_timeout: float = option(
        25.0,
        "seconds without a token, with a probe of one token in them, until a worker counts as hung; 0: never",
        low=0,
    )
    busy_kv_usage: float | None = option(
        None, "the share of its KV cache beyond which a worker gets nothing new", above=0, high=1
    )
    busy_prefill_tokens: int | None = option(
        None, "tokens of prompts under way beyond which a worker gets nothing new", low=1
    )
    wake_on_request: bool = option(
        False, "a request for a model whose workers all sleep wakes one; else it is refused"
    )
    weights: RouterWeights | None = option(
        None,
        'weights of the cost, in JSON: {"prefill_load_scale": 2}; in a fleet\'s file each is a key of '
        "[router]",
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        check_distinct(self.workers)
        object.__setattr__(self, "weights", _weights_of(self.weights))

    @cached_property
    def workers(self) -> tuple[WorkerSpec, ...]:
        """The foreign workers that it begins with."""
        return tuple(parse_worker(text, self.block_size) for text in self.worker or ())


def _weights_of(value: RouterWeights | dict[str, Any] | str | None) -> RouterWeights:
    """From fields, or JSON of them. Raises ConfigError."""
    if isinstance(value, RouterWeights):
        return value
    fields: Any = value or {}
    if isinstance(value, str):
        try:
            fields = json.loads(value)
        except ValueError:
            fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f'weights {value!r:.200} is no JSON object; write {{"prefill_load_scale": 2}}')
    check_keys(fields, keys_of(RouterWeights), "weights")
    for name, weight in fields.items():
        if isinstance(weight, int | float) and not 0 <= weight < math.inf:
            raise ConfigError(f"{name} {weight!r} is no weight; choose a finite number from 0 up")
    return build(RouterWeights, fields)
