"""Every option of the engine and of the server, checked when a config is built and never changed later.

Names and defaults are vLLM's where it has them. Unknown options are errors that suggest the nearest;
vllm_options.py says what becomes of vLLM's that are not here. What depends on the model or the device is
filled in by engine/resolve.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import ConfigError, RequestError
from shoal.option_fields import check_fields, option
from shoal.sampling_params import GENERATION_FIELDS, SamplingParams, sampling_defaults
from shoal.vllm_options import EARLIER_OPTIONS, ENGINE_OPTIONS, NESTED_OPTIONS, translate

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2"
MAX_NUM_SEQS = 1 << 16  # each has a row of state and of the sampler on the device, used or not
MOST_BATCHES = 2**30 - 1
SERVER_TARGET_ITL_MS = 50.0  # 20 tokens a second: faster than people read
DTYPES = ("auto", "float32", "float16", "bfloat16", "half", "float")
QUANTIZATIONS = ("fp8", "compressed-tensors", "awq", "gptq")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
# options of a worker in a fleet alone
OF_WORKERS = ("worker_id", "worker_tags", "weights_from_peers", "fleet_key_file")


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """How the engine tells others which KV blocks it has cached. Fields are vLLM's. Raises ConfigError."""

    enable_kv_cache_events: bool = option(False, "events are made", section="kv_events_config")
    publisher: str = option(
        "zmq", '"null": for this process only, see `LLM.drain_kv_events`', choices=("zmq", "null")
    )
    endpoint: str = option(
        "tcp://lo:5557",
        "bound if it has a `*`, a `::` or a network interface (`lo` is loopback), or is ipc or inproc; else "
        "connected to",
    )
    replay_endpoint: str | None = option(None, "bound: where a listener asks for what it missed")
    buffer_steps: int = option(
        10_000, "batches kept for replay; who has missed more gets a snapshot", low=0, high=MOST_BATCHES
    )
    hwm: int = option(
        100_000, "batches that wait for one slow listener; it misses those beyond", low=1, high=MOST_BATCHES
    )
    max_queue_size: int = option(
        100_000, "batches that wait to be published; beyond, steps wait too", low=1, high=MOST_BATCHES
    )
    topic: str = option("", "the first frame of each message; listeners subscribe to its beginning")
    curve_secret_key_file: str | None = option(
        None, "ZMQ CURVE: the engine's keys, as `zmq.auth.create_certificates` writes them"
    )
    curve_client_keys_dir: str | None = option(
        None, "ZMQ CURVE: the folder with the public keys (`*.key`) of those who may listen"
    )

    @classmethod
    def of(cls, value: KVEventsConfig | dict[str, Any] | str | None) -> KVEventsConfig | None:
        """From fields, or JSON of them."""
        if value is None or isinstance(value, cls):
            return value
        return cls(**_fields_of(cls, "kv_events_config", value))

    def __post_init__(self) -> None:
        if not isinstance(self.enable_kv_cache_events, bool):
            raise ConfigError(
                f"kv_events_config.enable_kv_cache_events {self.enable_kv_cache_events!r} is neither true "
                "nor false"
            )
        check_fields(self, ConfigError, "kv_events_config.")
        if not isinstance(self.topic, str):
            raise ConfigError(f"kv_events_config.topic {self.topic!r} is no text")
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if not (value is None and name == "replay_endpoint") and not _is_endpoint(value):
                raise ConfigError(
                    f"kv_events_config.{name} {value!r} is no endpoint of ZMQ; tcp://lo:5557 "
                    "and ipc:///tmp/kv-events are"
                )
        for name in ("curve_secret_key_file", "curve_client_keys_dir"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"kv_events_config.{name} {value!r} is no path")
        if (self.curve_secret_key_file is None) != (self.curve_client_keys_dir is None):
            raise ConfigError(
                "kv_events_config.curve_secret_key_file and curve_client_keys_dir belong "
                "together; give both or neither"
            )
        if self.endpoint == self.replay_endpoint:
            raise ConfigError(
                f"kv_events_config.replay_endpoint {self.replay_endpoint!r} is the endpoint too; give each "
                "its own"
            )


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """Whether and how KV blocks go from engine to engine. The first three fields are vLLM's. Raises
    ConfigError."""

    kv_role: str = option(
        "kv_both",
        '"kv_producer": others read the blocks of prompts computed here; "kv_consumer": blocks are read from '
        "others",
        choices=("kv_producer", "kv_consumer", "kv_both"),
        section="kv_transfer_config",
    )
    kv_ip: str = option("127.0.0.1", "the address at which readers ask; loopback is for this host alone")
    kv_port: int = option(0, "likewise; 0: any that is free", low=0, high=65535)
    lease_s: float = option(30.0, "seconds that blocks are held for a reader that is silent", above=0)

    @classmethod
    def of(cls, value: KVTransferConfig | dict[str, Any] | str | None) -> KVTransferConfig | None:
        """From fields, or JSON of them."""
        if value is None or isinstance(value, cls):
            return value
        return cls(**_fields_of(cls, "kv_transfer_config", value))

    def __post_init__(self) -> None:
        check_fields(self, ConfigError, "kv_transfer_config.")
        if not isinstance(self.kv_ip, str) or not self.kv_ip:
            raise ConfigError(f"kv_transfer_config.kv_ip {self.kv_ip!r} is no address")
        if self.kv_ip in ("0.0.0.0", "::"):
            raise ConfigError(
                f"kv_transfer_config.kv_ip {self.kv_ip!r} is no address that a reader could ask at; give the "
                "one by which other hosts reach this one"
            )

    @property
    def lends(self) -> bool:
        """Whether others may read the cache."""
        return self.kv_role != "kv_consumer"

    @property
    def reads(self) -> bool:
        return self.kv_role != "kv_producer"

    @property
    def is_local(self) -> bool:
        """Whether readers are on this host."""
        return self.kv_ip == "localhost" or self.kv_ip == "::1" or self.kv_ip.startswith("127.")


@dataclass(frozen=True, slots=True)
class StructuredOutputsConfig:
    """Defaults of structured outputs, for requests that do not say. Fields are vLLM's. Raises ConfigError."""

    disable_additional_properties: bool = option(
        True,
        "objects have only the keys that their schema names, unlike in vLLM: small models invent keys until "
        "max_tokens",
        section="structured_outputs_config",
    )
    disable_any_whitespace: bool = option(False, "JSON has no white space between its tokens")

    @classmethod
    def of(cls, value: StructuredOutputsConfig | dict[str, Any] | str | None) -> StructuredOutputsConfig:
        """From fields, or JSON of them."""
        if isinstance(value, cls):
            return value
        return cls(**_fields_of(cls, "structured_outputs_config", {} if value is None else value))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not isinstance(value := getattr(self, field.name), bool):
                raise ConfigError(
                    f"structured_outputs_config.{field.name} {value!r:.200} is neither true nor false"
                )


def _check_sampling(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for defaults that a request could not have."""
    name = "override_generation_config"
    for field in config:
        if field not in GENERATION_FIELDS:
            raise ConfigError(
                f"{name} must have the fields {', '.join(GENERATION_FIELDS)}, got {field!r:.100}"
            )
    try:
        SamplingParams(**sampling_defaults(config))
    except RequestError as error:
        raise ConfigError(f"{name}: {error}") from None


def _json_object(name: str, value: Any) -> dict[str, Any] | None:
    """The value of an option that is a dict, or JSON of one. Raises ConfigError."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError:
            found = value
    if found is not None and not (isinstance(found, dict) and all(isinstance(key, str) for key in found)):
        raise ConfigError(f"{name} must be a dict or a JSON object, got {value!r:.200}; give one")
    return found


def _fields_of(config: type, option_name: str, value: Any) -> dict[str, Any]:
    """`value`, a dict or JSON of one, if the dataclass `config` has all its keys. Raises ConfigError."""
    fields = value
    if isinstance(value, str):
        try:
            fields = json.loads(value)
        except ValueError:
            fields = None
    names = [f.name for f in dataclasses.fields(config)]
    if isinstance(fields, dict):
        whole = {f"{option_name}.{name}": one for name, one in fields.items()}
        whole, lines = translate(whole, NESTED_OPTIONS, str)
        for line in lines:
            logger.warning("%s", line)
        fields = {name.removeprefix(f"{option_name}."): one for name, one in whole.items()}
    if not isinstance(fields, dict):
        raise ConfigError(
            f"{option_name} {value!r:.200} is neither a dict nor a JSON object; its fields are "
            f"{', '.join(names)}"
        )
    for name in fields:
        if name not in names:
            nearest = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(names)}"
            raise ConfigError(f"{option_name} has no field {name!r}; {hint}")
    return fields


def _is_endpoint(value: Any) -> bool:
    kind, _, address = value.partition("://") if isinstance(value, str) else ("", "", "")
    port = address.rpartition(":")[2]
    return bool(address) and (
        kind in ("ipc", "inproc")
        or (kind == "tcp" and port.isascii() and port.isdigit() and int(port) < 2**16)
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of the engine. Raises ConfigError that names the option, its value and the limit."""

    model: str = option(
        DEFAULT_MODEL,
        'folder, .gguf file, model of the hub (org/name, org/name:Q4_K_M), URL of a store, or "smollm2"',
        common=True,
        section="model and tokenizer",
    )
    tokenizer: str | None = option(None, "folder or tokenizer.json; default: the model's own")
    skip_tokenizer_init: bool = option(False, "token ids only")
    revision: str | None = option(None, "branch, tag or commit of a hub id; version of a model in a store")
    hf_overrides: dict[str, Any] | None = option(
        None, 'fields of config.json in JSON, in the place of the model\'s: {"rope_theta": 1e6}'
    )
    download_dir: str | None = option(
        None, "where files from the hub or a store are kept; default: the hub library's cache, or Shoal's"
    )
    load_format: str = option(
        "auto", 'the format of the weights; "dummy": random ones', choices=("auto", "safetensors", "dummy")
    )
    check_weights: bool = option(
        False,
        "before loading, read every weight: all are finite and none "
        "absurd, and files of the hub's cache have their checksums",
    )
    dtype: str = option(
        "auto",
        '"auto": on a GPU float16 if the checkpoint is, else bfloat16; on the CPU bfloat16 if the processor '
        "supports it, else float32",
        common=True,
        choices=DTYPES,
    )
    quantization: str | None = option(
        None,
        '"fp8": matrices of attention, MLPs and experts become fp8 while they load, with a scale for each '
        "output. Of a checkpoint that is quantized: its own method, or nothing",
        choices=QUANTIZATIONS,
    )
    device: str = option(
        "auto", '"cuda" if there is one, else "cpu"', common=True, choices=("auto", "cpu", "cuda")
    )
    max_model_len: int | None = option(
        None, "default: what the model was trained for", common=True, section="limits and memory", low=1
    )
    max_num_seqs: int | None = option(
        None,
        "sequences that run at once; default: 1024 on a GPU of 80 GB whose cache holds them, 256 on other "
        "GPUs, 64 on the CPU",
        common=True,
        low=1,
        high=MAX_NUM_SEQS,
    )
    max_num_batched_tokens: int | None = option(
        None, "token budget of a step; default: 16384 on a GPU, 1024 on the CPU", low=1
    )
    block_size: int = option(16, "tokens a KV block, a power of two", low=1, high=256)
    gpu_memory_utilization: float = option(
        0.9, "this engine's share of the card", common=True, above=0, high=1
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "on the CPU the size of the cache (default 1 GiB); on a GPU it overrides the share",
        common=True,
        low=1,
    )
    num_gpu_blocks_override: int | None = option(None, "KV blocks, whatever would fit", low=1)
    enable_prefix_caching: bool = option(
        True, "requests share the KV blocks of equal beginnings", section="KV cache"
    )
    kv_cache_dtype: str = option(
        "auto",
        '"auto": that of the model; "fp8" or "fp8_e4m3": a byte a number, with the checkpoint\'s k_scale and '
        "v_scale, or 1",
        common=True,
        choices=KV_CACHE_DTYPES,
    )
    kv_events_config: KVEventsConfig | None = option(
        None,
        "tell routers which KV blocks are cached, as vLLM does: its fields in JSON, "
        'such as {"enable_kv_cache_events": true, '
        '"endpoint": "tcp://lo:5557"}',
    )
    kv_transfer_config: KVTransferConfig | None = option(
        None,
        "exchange KV blocks with other engines, so that one computes a prompt and another one goes on: "
        'fields in JSON, such as {"kv_role": "kv_both"}',
    )
    kv_host_bytes: int = option(
        0, "host memory, of all ranks together, that keeps KV blocks which leave the device", low=0
    )
    kv_disk_path: str | None = option(None, "folder that keeps KV blocks over a restart")
    kv_disk_bytes: int | None = option(None, "most bytes of the files there", low=1)
    kv_store: str | None = option(
        None, "URL of a folder or bucket, as fsspec reads it, that shares KV blocks with other engines"
    )
    kv_offload_policy: str = option(
        "evict",
        '"evict": the coldest blocks go to the next tier ahead of their eviction; "register": '
        "every block goes at once",
        choices=("evict", "register"),
    )
    kv_offload_min_uses: int = option(
        1, "blocks that were used less often are not worth a lower tier; 2 leaves out what came once", low=1
    )
    kv_offload_bandwidth: int | None = option(
        None, "bytes a second that may leave the device; blocks beyond are lost; default: no bound", low=1
    )
    kv_eviction_policy: str = option("lru", "which block of a lower tier goes first", choices=("lru", "lfu"))
    kv_load_policy: str = option(
        "cost",
        '"cost": what a lower tier has is fetched only where that is quicker than computing it',
        choices=("cost", "always"),
    )
    kv_flush_timeout: float = option(
        10.0, "seconds an engine that ends may take to write KV blocks to disk or store", low=0
    )
    enforce_eager: bool = option(False, "no CUDA graphs", section="execution")
    compile_cache: str | None = option(
        None, "URL of a folder or bucket, as fsspec reads it, where engines share what they have compiled"
    )
    cudagraph_capture_sizes: list[int] | None = option(
        None, "batch sizes with a graph of their own; default: a ladder up to max_num_seqs"
    )
    tensor_parallel_size: int = option(1, "devices that share the work of each layer", common=True, low=1)
    peer_all_reduce: bool = option(
        True,
        "several GPUs: sums of few tokens by kernels that write into the other GPUs' memory, if these "
        "agree with NCCL in a test at the start; else, and for more tokens, by NCCL",
    )
    attention_backend: str = option(
        "auto",
        '"auto": "triton" on a GPU, else "cpu"',
        choices=("auto", "triton", "cpu", "flashinfer", "flash_attn"),
    )
    disable_cascade_attn: bool = option(
        False, "decodes read a shared prefix each for itself, as if it were its own"
    )
    async_scheduling: bool | None = option(None, "schedule step n+1 while n runs; default: on a GPU")
    scheduling_policy: str = option(
        "fcfs", '"fcfs": the first to come; "priority": the lowest number', choices=("fcfs", "priority")
    )
    target_itl_ms: float | None = option(
        None,
        "milliseconds between two tokens of an answer: beside answers under way, a step takes no more prompt "
        f"tokens than that allows; 0: no target; default: {SERVER_TARGET_ITL_MS:g} for `shoal serve`, "
        "elsewhere none",
        low=0,
    )
    long_prefill_token_threshold: int = option(
        0, "most prompt tokens of one sequence in a step while others wait; 0: the whole budget", low=0
    )
    generation_config: str = option(
        "auto",
        '"vllm": ignore the model\'s generation_config.json for default sampling parameters',
        section="requests",
        choices=("auto", "vllm"),
    )
    override_generation_config: dict[str, Any] | None = option(
        None,
        'sampling parameters that requests do not give, in JSON: {"temperature": 0.5}; '
        "max_new_tokens is also the most that an answer may have",
    )
    chat_template: str | None = option(None, "a Jinja template or a path to one; default: the model's own")
    structured_outputs_config: StructuredOutputsConfig | None = option(
        None,
        'JSON; {"disable_additional_properties": false} lets objects have keys that their schema does '
        'not name, {"disable_any_whitespace": true} leaves out white space',
    )
    max_logprobs: int = option(20, "most logprobs a request may ask for; -1: no limit", low=-1)
    logprobs_mode: str = option(
        "raw_logprobs",
        'log-probabilities of answers: "raw_logprobs", the model\'s own, or "processed_logprobs", of what '
        "tokens are sampled from: with penalties, temperature and filters",
        choices=("raw_logprobs", "processed_logprobs"),
    )
    seed: int = option(0, "of requests that bring none")
    enable_sleep_mode: bool = option(
        False, "weights and KV cache in regions whose memory `sleep` gives back", section="sleep mode"
    )
    sleep_offload: str = option(
        "host",
        'where a level 1 sleep keeps the weights: "host", or "file": read again from the checkpoint',
        choices=("host", "file"),
    )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Builds a config from user options: unknown names raise, meaningless ones of vLLM warn."""
        return cls(**cls.known_options(options))

    @classmethod
    def known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the options that are fields. Translates options of vLLM's, with a warning for each that has
        no effect. Raises ConfigError for those that are refused and for unknown names."""
        names = [f.name for f in dataclasses.fields(cls)]
        # Options of a server alone, such as served_model_name, are options of vLLM's LLM() as well.
        of_vllm = [
            dataclasses.replace(o, own="", why="it is of `shoal serve`")
            if o.own and o.own not in names
            else o
            for o in (*ENGINE_OPTIONS, *EARLIER_OPTIONS)
        ]
        options, lines = translate(options, of_vllm, str)
        for line in lines:
            logger.warning("%s", line)
        for name in [name for name in options if name not in names]:
            nearest = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else "`shoal generate --help-all` lists them"
            raise ConfigError(f"unknown option {name!r}={options[name]!r}; {hint}")
        return options

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"block_size {self.block_size} is not a power of two from 1 to 256; 16 is the default"
            )
        for name in ("hf_overrides", "override_generation_config"):
            object.__setattr__(self, name, _json_object(name, getattr(self, name)))
        _check_sampling(self.override_generation_config or {})
        object.__setattr__(
            self, "structured_outputs_config", StructuredOutputsConfig.of(self.structured_outputs_config)
        )
        object.__setattr__(self, "kv_events_config", events := KVEventsConfig.of(self.kv_events_config))
        if events is not None and events.enable_kv_cache_events and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config enables events of cached blocks, and enable_prefix_caching False caches "
                "none; drop one"
            )
        object.__setattr__(self, "kv_transfer_config", KVTransferConfig.of(self.kv_transfer_config))
        self._check_kv_transfer()
        self._check_kv_tiers()
        sizes = self.cudagraph_capture_sizes
        if sizes is not None and (not sizes or not all(isinstance(s, int) and s > 0 for s in sizes)):
            raise ConfigError(
                f"cudagraph_capture_sizes {sizes!r} must be a list of batch sizes from 1 up; the default is "
                "a ladder"
            )

    def for_model(self, model: str) -> EngineConfig:
        """These options for another model. Those that name files of this one, or a version of it, are left
        out, and its weights are read from its files."""
        load_format = "auto" if self.load_format == "dummy" else self.load_format
        return dataclasses.replace(
            self,
            model=model,
            tokenizer=None,
            chat_template=None,
            revision=None,
            hf_overrides=None,
            load_format=load_format,
        )

    def sampling_config(self, of_model: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of generation_config.json that count, `of_model` has the model's own."""
        found = dict(of_model) if self.generation_config == "auto" else {}
        return found | (self.override_generation_config or {})

    @property
    def closes_objects(self) -> bool:
        """Whether an object of a JSON schema has only the keys that the schema names, if neither the schema
        nor the request says otherwise."""
        return StructuredOutputsConfig.of(self.structured_outputs_config).disable_additional_properties

    @property
    def has_kv_tiers(self) -> bool:
        return bool(self.kv_host_bytes or self.kv_disk_path or self.kv_store)

    def _check_kv_transfer(self) -> None:
        transfer = self.kv_transfer_config
        if transfer is None:
            return
        if not self.enable_prefix_caching:
            raise ConfigError(
                "kv_transfer_config exchanges blocks by what they hold, and enable_prefix_caching False "
                "keeps no account of that; drop one"
            )
        if transfer.lends and self.enable_sleep_mode:
            raise ConfigError(
                f"kv_transfer_config with kv_role {transfer.kv_role!r} lets other processes map the KV "
                "cache, and enable_sleep_mode has to give its memory back; drop one, or take kv_role "
                "'kv_consumer'"
            )

    def _check_kv_tiers(self) -> None:
        for name in ("kv_disk_path", "kv_store"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(
                    f"{name} {value!r} names no place; give a path"
                    + (" or a URL" if name == "kv_store" else "")
                )
        if self.kv_disk_bytes and self.kv_disk_path is None:
            raise ConfigError(
                f"kv_disk_bytes {self.kv_disk_bytes} without kv_disk_path; say where the blocks are to be "
                "kept"
            )
        if self.kv_disk_path is not None and not self.kv_disk_bytes:
            raise ConfigError(
                f"kv_disk_path {self.kv_disk_path!r} without kv_disk_bytes; say how much of that disk may "
                "be used"
            )
        if self.kv_cache_dtype != "auto" and self.attention_backend in ("flashinfer", "flash_attn"):
            raise ConfigError(
                f"attention_backend {self.attention_backend!r} does not read a cache of kv_cache_dtype "
                f"{self.kv_cache_dtype!r}; leave one of the two at 'auto'"
            )
        if self.has_kv_tiers and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_host_bytes, kv_disk_path and kv_store keep blocks that requests share, and "
                "enable_prefix_caching False "
                "lets them share none; drop one or the other"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """An EngineConfig whose defaults are filled in for one model on one machine: `resolve_config` makes it.

    Fields named here have no None any more. In the others None is a value of its own, such as "no disk tier".
    """

    device: str  # "cpu" or "cuda"
    dtype: str  # the name of a torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int  # 0: as much as gpu_memory_utilization leaves
    num_gpu_blocks_override: int  # 0: as many as fit
    kv_disk_bytes: int  # 0 without a disk tier
    async_scheduling: bool
    target_itl_ms: float  # 0: no target
    kv_events_config: KVEventsConfig
    structured_outputs_config: StructuredOutputsConfig
    keep_quantized: bool  # weights lie in memory in fewer bits
    quantizes_weights: bool  # they become so while they load: the checkpoint's are plain


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Options of `shoal serve` beside the engine's; vLLM's names where it has them. Raises ConfigError."""

    host: str = option(
        "127.0.0.1",
        "0.0.0.0 serves every network this machine is on",
        common=True,
        section="addresses and names",
    )
    port: int = option(8000, "0: any that is free", common=True, low=0, high=65535)
    uds: str | None = option(
        None, "serve on a Unix socket at this path (mode 0600) in place of host and port"
    )
    admin_host: str = option("127.0.0.1", "where the admin port is offered")
    admin_port: int | None = option(
        None,
        "sleep, weights, pause and profile are offered here alone; default: not at all",
        low=0,
        high=65535,
    )
    profile_dir: str = option("shoal-traces", "the folder below which /start_profile writes traces")
    served_model_name: list[str] | None = option(
        None,
        "names clients use; the first is the one answered with; default: the model as given",
        common=True,
    )
    api_key: list[str] | None = option(
        None,
        "a request must bring one of them, but for health, metrics and pages; SHOAL_API_KEY adds some "
        "(comma-separated); without this option, VLLM_API_KEY is a key, too",
        common=True,
        section="who may call",
    )
    api_key_file: str | None = option(None, "one key a line")
    allowed_origins: list[str] | None = option(
        None, 'CORS: sites whose pages may call; "*" for all; default: none'
    )
    allowed_methods: list[str] | None = option(None, "CORS; default: all")
    allowed_headers: list[str] | None = option(None, "CORS; default: all")
    allow_credentials: bool = option(False, "CORS: pages may send cookies")
    max_body_bytes: int = option(
        32 << 20, "of a request; more is a 413", section="limits of requests", low=1024
    )
    max_total_body_bytes: int = option(
        1 << 30, "of all requests under way together; more are a 429", low=1024
    )
    max_queued_requests: int = option(1024, "beyond what runs; more are a 429", low=0)
    responses_store_bytes: int = option(
        0,
        "keep so much of the last hour's answers of /v1/responses, so that clients may send their ids "
        "(`previous_response_id`, `item_reference`) in place of the conversation; 0: keep none",
        low=0,
    )
    max_connections: int | None = option(
        None,
        "connections a port takes; beyond them the longest idle one is closed, and without one the new "
        "one gets a 503; default: what the limit of open files leaves",
        low=1,
    )
    request_timeout: float | None = option(
        None, "seconds a request may take in all; a request's own `timeout` may be shorter", above=0
    )
    read_timeout: float = option(30.0, "seconds a client may take to send its request", above=0)
    write_timeout: float = option(120.0, "seconds a client may take none of its answer", above=0)
    shutdown_timeout: float = option(30.0, "seconds running requests get after SIGTERM", low=0)
    engine_timeout: float = option(
        60.0,
        "seconds without a sign of life, or without the end of a step, after which the engine counts as "
        "hung: its requests fail and /health is 503; 0: never",
        section="engines",
        low=0,
    )
    restart: bool = option(False, "start a dead or hung engine core again")
    swap: bool = option(False, "several models: one is awake, the others sleep", common=True)
    swap_patience: float = option(
        5.0, "seconds a sleeping model's requests wait while others still begin", low=0
    )
    tool_call_parser: str = option(
        "auto",
        '"auto": the one that fits the chat template',
        section="tools and templates",
        choices=("auto", "granite", "hermes", "llama3_json", "mistral", "qwen3_coder", "none"),
    )
    reasoning_parser: str = option(
        "auto", '"auto": the one that fits the chat template', choices=("auto", "qwen3", "none")
    )
    log_requests: str = option(
        "all",
        "which requests get a line in the log; health checks and the like do with --verbose only",
        choices=("all", "errors", "off"),
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "send a trace of each request to the OpenTelemetry collector whose OTLP/HTTP port is here, such as "
        "http://127.0.0.1:4318; needs shoal[otel]",
    )
    log_format: str = option("text", '"json": a JSON object a line', choices=("text", "json"))
    disable_fastapi_docs: bool = option(False, "neither /docs nor /openapi.json is there")
    enable_log_requests: bool = option(
        False,
        "a line when a request arrives, with its id, its size and its parameters; its prompts with --verbose "
        "only",
    )
    max_log_len: int | None = option(
        None, "most characters, or token ids, of a prompt in that line; default: all", low=0
    )
    enable_force_include_usage: bool = option(False, "every stream of OpenAI's API ends with its usage")
    return_tokens_as_token_ids: bool = option(
        False, 'log-probabilities name tokens by their ids ("token_id:123"), unless a request says otherwise'
    )
    default_chat_template_kwargs: dict[str, Any] | None = option(
        None,
        "variables of the chat template in JSON, where a request gives none of that name: "
        '{"enable_thinking": false}',
    )
    trust_request_chat_template: bool = option(
        False, "requests may bring a chat template (in the sandbox, but one may run for ever)"
    )
    root_path: str | None = option(
        None, "the prefix that a proxy in front leaves in paths: /llm, for /llm/v1 as for /v1"
    )
    middleware: list[str] | None = option(
        None, "ASGI middleware around the public port, outermost first: package.module.Class"
    )
    ssl_keyfile: str | None = option(None, "TLS: the private key", section="TLS")
    ssl_certfile: str | None = option(None, "TLS: the certificate")
    ssl_ca_certs: str | None = option(
        None, "TLS: the authorities whose certificates clients may show, a PEM file"
    )
    ssl_cert_reqs: int = option(
        0, "TLS: 1: a client's certificate is checked if it has one; 2: it must have one", low=0, high=2
    )
    ssl_ciphers: str | None = option(None, "TLS: the ciphers, in OpenSSL's form; default: Python's")
    plane: str | None = option(
        None,
        "join the fleet whose plane is here, as a worker: tcp://127.0.0.1:PORT, ipc:///PATH or "
        "nats://HOST:4222; the port is then any free one, unless it is given",
        common=True,
        section="fleet",
    )
    role: str = option(
        "both", "what this worker does in a fleet", common=True, choices=("both", "prefill", "decode")
    )
    worker_id: str | None = option(None, "its name in the fleet; default: made of host and process")
    worker_tags: list[str] | None = option(
        None, "its tags in the fleet: a request with the header X-Shoal-Tags: a,b goes to workers with both"
    )
    fleet_key_file: str | None = option(
        None,
        "the secret that the processes of a fleet share; without it, fleets do not leave this machine",
        common=True,
    )
    weights_from_peers: bool = option(
        False,
        "take the weights out of the memory of another worker of the fleet that has the same, and from files "
        "where there is none",
    )
    fleet_host: str = option("127.0.0.1", "where routers reach this worker's tokens")
    fleet_port: int = option(0, "likewise; 0: any that is free", low=0, high=65535)

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if 0 < self.engine_timeout < 2:
            raise ConfigError(
                f"engine_timeout {self.engine_timeout!r} is less than 2 s, as short as a busy "
                "machine may pause; choose 2 or more, or 0 for no limit"
            )
        if self.allow_credentials and "*" in (self.allowed_origins or ()):
            raise ConfigError(
                "allow_credentials with allowed_origins '*' is what no browser accepts; name the origins"
            )
        if self.admin_port == self.port != 0 and self.admin_host == self.host and self.uds is None:
            raise ConfigError(
                f"admin_port {self.admin_port} is the public port too; give each a port of its own"
            )
        if self.plane is None and (self.role != "both" or any(getattr(self, name) for name in OF_WORKERS)):
            raise ConfigError(
                f"role, {', '.join(OF_WORKERS)} are of a worker in a fleet; name the fleet's --plane, too"
            )
        if wrong := [tag for tag in self.worker_tags or () if tag != tag.strip() or not tag or "," in tag]:
            raise ConfigError(
                f"worker_tags {wrong[0]!r:.100} is no tag; leave out commas and spaces at its ends"
            )
        name = "default_chat_template_kwargs"
        object.__setattr__(self, name, _json_object(name, self.default_chat_template_kwargs))
        if self.root_path is not None:
            if not self.root_path.startswith("/") or not self.root_path.strip("/"):
                raise ConfigError(
                    f"root_path must begin with a slash, got {self.root_path!r:.200}; give /llm"
                )
            object.__setattr__(self, "root_path", self.root_path.rstrip("/"))
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile belong together; give both or neither")
        if self.ssl_certfile is None and (self.ssl_ca_certs or self.ssl_cert_reqs or self.ssl_ciphers):
            raise ConfigError(
                "ssl_ca_certs, ssl_cert_reqs and ssl_ciphers need TLS; give ssl_certfile and ssl_keyfile, too"
            )
        if (self.ssl_cert_reqs > 0) != (self.ssl_ca_certs is not None):
            raise ConfigError(
                f"ssl_cert_reqs {self.ssl_cert_reqs} and ssl_ca_certs {self.ssl_ca_certs!r} belong together; "
                "give ssl_ca_certs with ssl_cert_reqs 1 or 2"
            )


def check_lends(role: str, engine: EngineConfig) -> None:
    """Raises ConfigError for a worker that computes prompts for others and would lend them no blocks."""
    exchange = engine.kv_transfer_config
    if role == "prefill" and (exchange is None or not exchange.lends):
        given = None if exchange is None else exchange.kv_role
        raise ConfigError(
            f"a worker of the role prefill lends its KV blocks, and with kv_transfer_config {given!r} it "
            "would lend none, so each prompt would be computed twice; leave kv_transfer_config out, or take "
            "kv_role kv_producer or kv_both"
        )
