"""The options of a router: flags of `shoal route`, and keys of `[router]` in a fleet's file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from shoal.errors import ConfigError
from shoal.fleet.routing.policy import DISK_CREDIT, HOST_CREDIT, POLICIES, RouterWeights
from shoal.fleet.worker_spec import WorkerSpec, check_distinct, parse_worker
from shoal.options.fields import check_fields, option

DEFAULTS = RouterWeights()
REMOVED_OPTIONS = {  # options of earlier releases, with the reason of their removal
    "overlap_score_credit_decay": "the credit of a cached block does not depend on the waiting prefills",
    "track_prefill_tokens": "blocks to compute always count",
    "host_cache_hit_weight": f"a cached block in host memory always counts {HOST_CREDIT:g}",
    "disk_cache_hit_weight": f"a cached block on disk always counts {DISK_CREDIT:g}",
}
# Options of `shoal serve` for engines and workers, and options that FleetConfig has itself.
NO_ROUTER_OPTIONS = (
    "max_queued_requests",
    "profile_dir",
    "served_model_name",
    "engine_timeout",
    "restart",
    "swap",
    "swap_patience",
    "tool_call_parser",
    "default_chat_template_kwargs",
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
        "kv",
        "routing policy: chooses the worker of a request",
        common=True,
        section="router",
        choices=tuple(POLICIES),
    )
    worker: list[str] | None = option(
        None,
        "external worker: URL, or "
        "URL,kv_events=tcp://...,replay=tcp://...,block_size=16,id=b,tag=x,dp_size=2,api_key_file=F; once "
        "per worker",
        common=True,
    )
    plane: str | None = option(
        None,
        "address of the plane that native workers join: tcp://127.0.0.1:PORT or ipc:///PATH for one host, "
        "nats://... for many",
        common=True,
    )
    fleet_key_file: str | None = option(
        None,
        "file with the key of the plane and of native workers' ports; without it they use loopback only",
        common=True,
    )
    block_size: int = option(
        16, "tokens per KV block, for workers that do not report it", common=True, low=1, high=1 << 20
    )
    migration_limit: int = option(
        3,
        "most moves of a request with tokens to another worker, before it ends with an error",
        common=True,
        low=0,
    )
    max_queued_requests: int = option(
        1024, "most requests per model that wait for a worker; further ones get a 429", common=True, low=0
    )
    seed: int | None = option(None, "seed of random choices; default: another at each start")
    tokenizer: str | None = option(
        None, "folder or tokenizer.json for routing to workers without /tokenize", common=True
    )
    lease: float = option(6.0, "seconds after which a dead worker is removed from the plane", low=0.5)
    check_interval: float = option(5.0, "seconds between two health checks of a worker", above=0)
    hang_timeout: float = option(
        25.0,
        "seconds without a token, and with an unanswered probe, after which a worker counts as hung; 0: "
        "never",
        low=0,
    )
    busy_kv_usage: float | None = option(
        None, "share of its KV cache in use, above which a worker gets no new requests", above=0, high=1
    )
    busy_prefill_tokens: int | None = option(
        None, "tokens of its running prompts, above which a worker gets no new requests", low=1
    )

    max_local_prefill_length: int = option(
        1000,
        "uncached tokens of a prompt, up to which the decode worker computes it; longer prompts go to a "
        "prefill worker, if there is one",
        low=0,
    )
    max_prefill_queue_size: int = option(
        2,
        "most prompts that wait for a prefill worker; decode workers compute further ones; 0: none waits",
        low=0,
    )
    prefill_timeout: float = option(
        60.0,
        "seconds after which a prompt goes to its decode worker if no prefill worker has computed it",
        above=0,
    )
    enable_p2p: bool = option(
        False,
        "let a worker read a cached prefix of another worker, where that is quicker than computing it; both "
        "need kv_role kv_both",
    )
    wake_on_request: bool = option(
        False,
        "wake a worker for a request if all workers of the model sleep; otherwise the request is refused",
    )
    prefill_load_scale: float = option(
        DEFAULTS.prefill_load_scale,
        "weight of a block to compute; a block of a running request has weight 1",
        section="cost of a worker (policy kv), in KV blocks",
        low=0,
    )
    overlap_score_credit: float = option(
        DEFAULTS.overlap_score_credit,
        "credit of a cached block, in blocks to compute: above 1 it also offsets waiting prefills",
        low=0,
    )
    decode_active_request_weight: float = option(
        DEFAULTS.decode_active_request_weight, "weight of a running request", low=0
    )
    recent_prefill_weight: float = option(
        DEFAULTS.recent_prefill_weight,
        "weight of a block of prefill work that the worker got recently",
        low=0,
    )
    router_temperature: float = option(
        DEFAULTS.router_temperature, "temperature of a softmax over the costs; 0: the least cost", low=0
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        check_distinct(self.workers)

    @property
    def weights(self) -> RouterWeights:
        return RouterWeights(**{entry.name: getattr(self, entry.name) for entry in fields(RouterWeights)})

    @cached_property
    def workers(self) -> tuple[WorkerSpec, ...]:
        """The external workers that it begins with."""
        return tuple(parse_worker(text, self.block_size) for text in self.worker or ())
