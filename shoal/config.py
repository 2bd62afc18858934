"""Every option of the engine and of the server, checked when a config is built and never changed later.

Names and defaults are vLLM's where it has them. An unknown option is an error that suggests the nearest name;
options/vllm.py handles vLLM's options that Shoal does not have. engine/resolve.py fills in the defaults that
depend on the model or the device.
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
from shoal.options.fields import check_fields, option
from shoal.options.vllm import EARLIER_OPTIONS, ENGINE_OPTIONS, NESTED_OPTIONS, translate
from shoal.sampling_params import GENERATION_FIELDS, SamplingParams, sampling_defaults

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2"
MAX_NUM_SEQS = 1 << 16  # each takes a row of state and of the sampler on the device, used or not
MOST_BATCHES = 2**30 - 1
SERVER_TARGET_ITL_MS = 50.0  # 20 tokens a second: faster than people read
DTYPES = ("auto", "float32", "float16", "bfloat16", "half", "float")
QUANTIZATIONS = ("fp8", "compressed-tensors", "awq", "gptq", "auto-round", "mxfp4", "modelopt", "fbgemm_fp8")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
STATE_DTYPES = ("auto", "float32", "bfloat16")
MOST_DRAFTS = 64  # more are hardly ever all accepted, and a step has room for them in each sequence
MOST_LOOKUP_TOKENS = 64
DEFAULT_LOOKUP_TOKENS = 5
MOST_EARLIER_ANSWERS = 10_000  # vLLM's default; each new request is compared with all of them
# Sizes of steps are then 1, 2, 3, 5 and 9 tokens. Three equal tokens are seldom a coincidence, and of several
# earlier places the one with most equal tokens is the likeliest to continue in the same way.
AUTO_DRAFTS = {"num_speculative_tokens": 8, "prompt_lookup_min": 3, "prompt_lookup_max": 8}
SERVER_SPECULATION = {"method": "auto"}  # the default of `shoal serve` and `shoal chat`
# options that only a worker of a fleet has
WORKER_ONLY_OPTIONS = ("worker_id", "worker_tags", "weights_from_peers", "fleet_key_file")


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """KV events: messages about the KV blocks that this engine has cached. Fields are vLLM's. Raises
    ConfigError."""

    enable_kv_cache_events: bool = option(False, "publish KV events", section="kv_events_config")
    publisher: str = option(
        "zmq",
        '"zmq": to listeners; "null": within this process only, see `LLM.drain_kv_events`',
        choices=("zmq", "null"),
    )
    endpoint: str = option(
        "tcp://lo:5557",
        "ZMQ address of the events; bound if it has a `*`, a `::` or a network interface (`lo` is "
        "loopback), or is ipc or inproc, else connected to",
    )
    replay_endpoint: str | None = option(
        None, "ZMQ address to bind, where listeners request the batches that they missed"
    )
    buffer_steps: int = option(
        10_000,
        "batches kept for replay; a listener that missed more gets a snapshot",
        low=0,
        high=MOST_BATCHES,
    )
    hwm: int = option(
        100_000, "queued batches per slow listener; further ones are dropped for it", low=1, high=MOST_BATCHES
    )
    max_queue_size: int = option(
        100_000, "batches queued for publishing; when the queue is full, steps wait", low=1, high=MOST_BATCHES
    )
    topic: str = option("", "first frame of each message; listeners subscribe to its prefix")
    curve_secret_key_file: str | None = option(
        None, "ZMQ CURVE: file with the engine's keys, as `zmq.auth.create_certificates` writes it"
    )
    curve_client_keys_dir: str | None = option(
        None, "ZMQ CURVE: folder with the public keys (`*.key`) of the allowed listeners"
    )

    @classmethod
    def of(cls, value: KVEventsConfig | dict[str, Any] | str | None) -> KVEventsConfig | None:
        """Builds a config from fields, or from JSON of them."""
        if value is None or isinstance(value, cls):
            return value
        return cls(**_fields_of(cls, "kv_events_config", value))

    def __post_init__(self) -> None:
        if not isinstance(self.enable_kv_cache_events, bool):
            raise ConfigError(
                "kv_events_config.enable_kv_cache_events must be true or false, got "
                f"{self.enable_kv_cache_events!r}; choose one"
            )
        check_fields(self, ConfigError, "kv_events_config.")
        if not isinstance(self.topic, str):
            raise ConfigError(f"kv_events_config.topic must be a string, got {self.topic!r}; give one")
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if not (value is None and name == "replay_endpoint") and not _is_endpoint(value):
                raise ConfigError(
                    f"kv_events_config.{name} must be a ZMQ address, got {value!r}; give one such as "
                    "tcp://lo:5557 or ipc:///tmp/kv-events"
                )
        for name in ("curve_secret_key_file", "curve_client_keys_dir"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"kv_events_config.{name} must be a path, got {value!r}; give one")
        if (self.curve_secret_key_file is None) != (self.curve_client_keys_dir is None):
            raise ConfigError(
                "kv_events_config.curve_secret_key_file and curve_client_keys_dir belong "
                "together; give both or neither"
            )
        if self.endpoint == self.replay_endpoint:
            raise ConfigError(
                "kv_events_config.replay_endpoint must differ from endpoint, got "
                f"{self.replay_endpoint!r} for both; give each an address of its own"
            )


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """KV transfer between engines. The first three fields are vLLM's. Raises ConfigError."""

    kv_role: str = option(
        "kv_both",
        '"kv_producer": other engines read the blocks of prompts computed here; "kv_consumer": this engine '
        'reads blocks of others; "kv_both": both',
        choices=("kv_producer", "kv_consumer", "kv_both"),
        section="kv_transfer_config",
    )
    kv_ip: str = option(
        "127.0.0.1", "address for the requests of reading engines; loopback allows only engines of this host"
    )
    kv_port: int = option(0, "port for these requests; 0: any free port", low=0, high=65535)
    lease_s: float = option(30.0, "seconds for which blocks are held for a silent reader", above=0)

    @classmethod
    def of(cls, value: KVTransferConfig | dict[str, Any] | str | None) -> KVTransferConfig | None:
        """Builds a config from fields, or from JSON of them."""
        if value is None or isinstance(value, cls):
            return value
        return cls(**_fields_of(cls, "kv_transfer_config", value))

    def __post_init__(self) -> None:
        check_fields(self, ConfigError, "kv_transfer_config.")
        if not isinstance(self.kv_ip, str) or not self.kv_ip:
            raise ConfigError(f"kv_transfer_config.kv_ip must be an IP address, got {self.kv_ip!r}; give one")
        if self.kv_ip in ("0.0.0.0", "::"):
            raise ConfigError(
                "kv_transfer_config.kv_ip must be an address that readers can connect to, got "
                f"{self.kv_ip!r}; give the one by which other hosts reach this one"
            )

    @property
    def lends(self) -> bool:
        """True if other engines may read the cache."""
        return self.kv_role != "kv_consumer"

    @property
    def reads(self) -> bool:
        return self.kv_role != "kv_producer"

    @property
    def is_local(self) -> bool:
        """True if all readers are on this host."""
        return self.kv_ip == "localhost" or self.kv_ip == "::1" or self.kv_ip.startswith("127.")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Drafts: how many of them a step may verify for each sequence, and where they are from. Answers are the
    same with and without. Names and defaults are vLLM's, but for `enable_adaptive_verification`, which is on
    by default. Raises ConfigError."""

    method: str = option(
        dataclasses.MISSING,
        'source of the drafts; "ngram": what followed the last tokens where they stood before in the prompt '
        'or the answer; "suffix": the same with the most frequent of all continuations; "eagle3": a draft '
        'head, see `model`; "mtp": the head in the model\'s own checkpoint, or in `model`; "auto": ngram '
        "with good numbers, and no drafts on a CPU without a C compiler or with another library's attention",
        section="speculative_config",
        choices=("ngram", "suffix", "eagle3", "mtp", "auto"),
    )
    # None for a head until engine/resolve.py fills in the head's own number.
    num_speculative_tokens: int = option(
        None,
        "most drafts of a sequence in a step; required for ngram; default: "
        "suffix_decoding_max_tree_depth for suffix, the head's own number for eagle3 and mtp",
        low=1,
        high=MOST_DRAFTS,
    )
    prompt_lookup_min: int = option(
        None,
        "ngram: fewest tokens that must be equal at the earlier place; default: prompt_lookup_max, or 5",
        low=1,
        high=MOST_LOOKUP_TOKENS,
    )
    prompt_lookup_max: int = option(
        None,
        "ngram: most tokens that are compared; default: prompt_lookup_min, or 5",
        low=1,
        high=MOST_LOOKUP_TOKENS,
    )
    suffix_decoding_max_tree_depth: int = option(
        24, "suffix: most tokens of match and drafts together", low=1, high=MOST_DRAFTS
    )
    suffix_decoding_max_cached_requests: int = option(
        0,
        "suffix: earlier answers of the engine that are kept to look drafts up in, of requests with the same "
        "cache_salt",
        low=0,
        high=MOST_EARLIER_ANSWERS,
    )
    suffix_decoding_max_spec_factor: float = option(
        1.0, "suffix: most drafts for each token of the match", low=0, high=MOST_DRAFTS
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, "suffix: drafts end where their estimated probability is lower", low=0, high=1
    )
    model: str | None = option(
        None,
        "eagle3: folder or hub id of the draft head; mtp: .gguf file of the head, if the model's lacks it",
    )
    revision: str | None = option(None, "branch, tag or commit of that hub id")
    enable_adaptive_verification: bool = option(
        True,
        "drafts are as long as measured costs and acceptance make worthwhile, often 0; false: always as many "
        "as there are",
    )

    @classmethod
    def of(cls, value: SpeculativeConfig | dict[str, Any] | str | None) -> SpeculativeConfig | None:
        """Builds a config from fields, or from JSON of them. JSON's null is None: no drafts."""
        if value is None or isinstance(value, cls) or (isinstance(value, str) and value.strip() == "null"):
            return None if isinstance(value, str) else value
        fields = _fields_of(cls, "speculative_config", value)
        if "method" not in fields:
            raise ConfigError(
                "speculative_config.method must be one of ngram, suffix, eagle3, mtp, auto, got nothing; "
                "choose one"
            )
        return cls(**fields)

    def __post_init__(self) -> None:
        check_fields(self, ConfigError, "speculative_config.")
        for name in ("model", "revision"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"speculative_config.{name} must be a text, got {value!r}; give one")
        if self.method == "eagle3" and self.model is None:
            raise ConfigError(
                "speculative_config.model must be the checkpoint of the draft head with method 'eagle3', got "
                "None; give its folder or hub id"
            )
        if not self.has_head and self.model is not None:
            raise ConfigError(
                f"speculative_config.model must be left out with method {self.method!r}, got {self.model!r}; "
                "it is for 'eagle3' and 'mtp'"
            )
        if self.method == "auto":
            for name, number in AUTO_DRAFTS.items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, number)
        if self.method == "ngram" and self.num_speculative_tokens is None:
            raise ConfigError(
                f"speculative_config.num_speculative_tokens must be an integer from 1 to {MOST_DRAFTS} with "
                "method 'ngram', got None; give one, such as 5"
            )
        if self.method == "suffix" and self.num_speculative_tokens is None:
            object.__setattr__(self, "num_speculative_tokens", self.suffix_decoding_max_tree_depth)
        if self.method != "suffix" and self.suffix_decoding_max_cached_requests:
            raise ConfigError(
                "speculative_config.suffix_decoding_max_cached_requests must be 0 with method "
                f"{self.method!r}, got {self.suffix_decoding_max_cached_requests}; choose method 'suffix', "
                "or leave it out"
            )
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None:
            least = DEFAULT_LOOKUP_TOKENS if most is None else most
        if most is None:
            most = least
        if least > most:
            raise ConfigError(
                f"speculative_config.prompt_lookup_min must be at most prompt_lookup_max, got {least} > "
                f"{most}; lower one or raise the other"
            )
        object.__setattr__(self, "prompt_lookup_min", least)
        object.__setattr__(self, "prompt_lookup_max", most)

    @property
    def queries(self) -> int:
        """The most tokens of a decode in one step."""
        return 1 + self.num_speculative_tokens

    @property
    def has_head(self) -> bool:
        """True if a draft head drafts."""
        return self.method in ("eagle3", "mtp")


@dataclass(frozen=True, slots=True)
class StructuredOutputsConfig:
    """Defaults of structured outputs, which a request may override. Fields are vLLM's. Raises ConfigError."""

    disable_additional_properties: bool = option(
        True,
        "give objects only the keys that their schema names, unlike vLLM: small models invent keys until "
        "max_tokens",
        section="structured_outputs_config",
    )
    disable_any_whitespace: bool = option(False, "leave out white space between the tokens of JSON")

    @classmethod
    def of(cls, value: StructuredOutputsConfig | dict[str, Any] | str | None) -> StructuredOutputsConfig:
        """Builds a config from fields, or from JSON of them."""
        if isinstance(value, cls):
            return value
        return cls(**_fields_of(cls, "structured_outputs_config", {} if value is None else value))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not isinstance(value := getattr(self, field.name), bool):
                raise ConfigError(
                    f"structured_outputs_config.{field.name} must be true or false, got {value!r:.200}; "
                    "choose one"
                )


def _check_sampling(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for defaults that a request must not have."""
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
    """Returns the value of an option that is a dict, or JSON of one. Raises ConfigError."""
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
    """Returns `value`, a dict or JSON of one, as fields of the dataclass `config`. Raises ConfigError for
    unknown keys."""
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
            f"{option_name} must be a dict or a JSON object, got {value!r:.200}; its fields are "
            f"{', '.join(names)}"
        )
    for name in fields:
        if name not in names:
            nearest = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose one of {', '.join(names)}"
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
        'folder, .gguf file, model of the hub (org/name, org/name:Q4_K_M), URL of a store, "smollm2" or '
        '"gemma3-270m"',
        common=True,
        section="model and tokenizer",
    )
    tokenizer: str | None = option(None, "folder or tokenizer.json; default: the model's own")
    skip_tokenizer_init: bool = option(False, "take and return token ids only")
    revision: str | None = option(None, "branch, tag or commit of a hub id; version of a model in a store")
    hf_overrides: dict[str, Any] | None = option(
        None, 'fields of config.json in JSON, which replace the model\'s: {"rope_theta": 1e6}'
    )
    download_dir: str | None = option(
        None, "folder of the files from the hub or a store; default: the hub library's cache, or Shoal's"
    )
    load_format: str = option(
        "auto", 'format of the weights; "dummy": random weights', choices=("auto", "safetensors", "dummy")
    )
    check_weights: bool = option(
        False,
        "read every weight before loading: all must be finite and none absurdly large, and files of the "
        "hub's cache must have their checksums",
    )
    dtype: str = option(
        "auto",
        'data type of weights and activations; "auto": on a GPU float16 if the checkpoint has it, else '
        "bfloat16; on the CPU float32, or bfloat16 if float32 lacks memory and the processor supports it",
        common=True,
        choices=DTYPES,
    )
    quantization: str | None = option(
        None,
        '"fp8": quantize the matrices of attention, MLPs and experts while they load, with a scale for each '
        "output. A quantized checkpoint allows only its own method, or none",
        choices=QUANTIZATIONS,
    )
    device: str = option(
        "auto",
        'device of the engine; "auto": "cuda" if there is a GPU, else "cpu"',
        common=True,
        choices=("auto", "cpu", "cuda"),
    )
    max_model_len: int | None = option(
        None,
        "most tokens of a prompt and its answer; default: the model's context length, at most 1048576",
        common=True,
        section="limits and memory",
        low=1,
    )
    max_num_seqs: int | None = option(
        None,
        "most sequences in a batch; default: 1024 on a GPU of 80 GB whose cache holds them, 256 on other "
        "GPUs, 64 on the CPU",
        common=True,
        low=1,
        high=MAX_NUM_SEQS,
    )
    max_num_batched_tokens: int | None = option(
        None, "most tokens of a step; default: 16384 on a GPU, 1024 on the CPU", low=1
    )
    block_size: int = option(16, "tokens per KV block, a power of two", low=1, high=256)
    gpu_memory_utilization: float = option(
        0.9, "this engine's share of the GPU's memory", common=True, above=0, high=1
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "size of the KV cache in bytes; default: 1 GiB on the CPU, on a GPU what gpu_memory_utilization "
        "leaves",
        common=True,
        low=1,
    )
    num_gpu_blocks_override: int | None = option(
        None,
        "number of KV blocks, in place of as many as fit; not for models whose layers form several groups",
        low=1,
    )
    enable_prefix_caching: bool = option(
        True, "share KV blocks between requests with the same prefix", section="KV cache"
    )
    kv_cache_dtype: str = option(
        "auto",
        'data type of the cache; "auto": the model\'s; "fp8" or "fp8_e4m3": one byte per number, with the '
        "checkpoint's k_scale and v_scale, or 1",
        common=True,
        choices=KV_CACHE_DTYPES,
    )
    mamba_ssm_cache_dtype: str = option(
        "auto",
        'data type of the states of recurrent layers; "auto": the one that the model\'s config names, or '
        "float32",
        choices=STATE_DTYPES,
    )
    kv_events_config: KVEventsConfig | None = option(
        None,
        "KV events for routers, with vLLM's fields, in JSON, "
        'such as {"enable_kv_cache_events": true, '
        '"endpoint": "tcp://lo:5557"}',
    )
    kv_transfer_config: KVTransferConfig | None = option(
        None,
        "KV transfer between engines, so that one computes a prompt and another one continues, in JSON, "
        'such as {"kv_role": "kv_both"}',
    )
    kv_host_bytes: int = option(
        0, "bytes of host memory, over all ranks, for KV blocks evicted from the device", low=0
    )
    kv_disk_path: str | None = option(None, "folder for KV blocks, which survive a restart")
    kv_disk_bytes: int | None = option(None, "most bytes of the files in kv_disk_path", low=1)
    kv_store: str | None = option(
        None, "fsspec URL of a folder or bucket through which engines share KV blocks"
    )
    kv_offload_policy: str = option(
        "evict",
        '"evict": the coldest blocks go to the next tier ahead of their eviction; "register": '
        "every block goes at once",
        choices=("evict", "register"),
    )
    kv_offload_min_uses: int = option(
        1, "uses after which a block is kept in a lower tier; 2 leaves out blocks that were used once", low=1
    )
    kv_offload_bandwidth: int | None = option(
        None,
        "most bytes per second that leave the device; further blocks are dropped; default: no limit",
        low=1,
    )
    kv_eviction_policy: str = option("lru", "order of eviction from a lower tier", choices=("lru", "lfu"))
    kv_load_policy: str = option(
        "cost",
        '"cost": fetch blocks from a lower tier only where that is quicker than computing them',
        choices=("cost", "always"),
    )
    kv_flush_timeout: float = option(
        10.0, "seconds for writing KV blocks to disk or store when the engine ends", low=0
    )
    enforce_eager: bool = option(False, "run without CUDA graphs", section="execution")
    compile_cache: str | None = option(
        None, "fsspec URL of a folder or bucket through which engines share compiled kernels"
    )
    cudagraph_capture_sizes: list[int] | None = option(
        None, "batch sizes with a CUDA graph each; default: a ladder up to max_num_seqs"
    )
    tensor_parallel_size: int = option(1, "devices that share the work of each layer", common=True, low=1)
    peer_all_reduce: bool = option(
        True,
        "with several GPUs: all-reduce of few tokens by kernels that write into the other GPUs' memory, if a "
        "test at the start agrees with NCCL; else, and for more tokens, by NCCL",
    )
    attention_backend: str = option(
        "auto",
        'kernels of attention; "auto": "triton" on a GPU, else "cpu"',
        choices=("auto", "triton", "cpu", "flashinfer", "flash_attn"),
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        "speculative decoding with vLLM's fields, in JSON, such as "
        '{"method": "ngram", "num_speculative_tokens": 5}; null: none; default: {"method": "auto"} for '
        "`shoal serve` and `shoal chat`, elsewhere none",
    )
    disable_cascade_attn: bool = option(False, "let each decode read a shared prefix by itself")
    async_scheduling: bool | None = option(None, "schedule step n+1 while n runs; default: on a GPU")
    scheduling_policy: str = option(
        "fcfs",
        'order of waiting requests; "fcfs": by arrival; "priority": lowest number first',
        choices=("fcfs", "priority"),
    )
    target_itl_ms: float | None = option(
        None,
        "target for the milliseconds between two tokens of an answer, which limits the prompt tokens of a "
        f"step while answers are running; 0: no target; default: {SERVER_TARGET_ITL_MS:g} for `shoal serve`, "
        "elsewhere none",
        low=0,
    )
    long_prefill_token_threshold: int = option(
        0, "most prompt tokens of one sequence in a step while other prompts wait; 0: no limit", low=0
    )
    generation_config: str = option(
        "auto",
        'source of default sampling parameters; "auto": the model\'s generation_config.json; "vllm": vLLM\'s',
        section="requests",
        choices=("auto", "vllm"),
    )
    override_generation_config: dict[str, Any] | None = option(
        None,
        'default sampling parameters in JSON: {"temperature": 0.5}; max_new_tokens also limits every answer',
    )
    chat_template: str | None = option(None, "Jinja template, or path to one; default: the model's own")
    structured_outputs_config: StructuredOutputsConfig | None = option(
        None,
        'defaults of structured outputs in JSON; {"disable_additional_properties": false} allows keys that a '
        'schema does not name, {"disable_any_whitespace": true} leaves out white space',
    )
    max_logprobs: int = option(
        20, "most log-probabilities per token that a request may ask for; -1: no limit", low=-1
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        'log-probabilities of answers: "raw_logprobs", the model\'s own, or "processed_logprobs", after '
        "penalties, temperature and filters",
        choices=("raw_logprobs", "processed_logprobs"),
    )
    seed: int = option(0, "seed of requests without one")
    enable_sleep_mode: bool = option(
        False, "keep weights and KV cache in memory that `sleep` can release", section="sleep mode"
    )
    sleep_offload: str = option(
        "host",
        'place of the weights during a level 1 sleep: "host" memory, or "file": read again from the '
        "checkpoint",
        choices=("host", "file"),
    )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Builds a config from a user's options. Raises ConfigError for unknown names; warns of vLLM's
        options without effect."""
        return cls(**cls.known_options(options))

    @classmethod
    def known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the options that are fields. Translates options of vLLM's, with a warning for each that has
        no effect. Raises ConfigError for refused options and unknown names."""
        names = [f.name for f in dataclasses.fields(cls)]
        # Options of a server alone, such as served_model_name, are options of vLLM's LLM() as well.
        of_vllm = [
            dataclasses.replace(o, own="", why="it is an option of `shoal serve`")
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
                f"block_size must be a power of two from 1 to 256, got {self.block_size}; 16 is the default"
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
                "kv_events_config enables events about cached blocks, and enable_prefix_caching False caches "
                "no blocks; drop one"
            )
        object.__setattr__(self, "kv_transfer_config", KVTransferConfig.of(self.kv_transfer_config))
        object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        self._check_kv_transfer()
        self._check_kv_tiers()
        sizes = self.cudagraph_capture_sizes
        if sizes is not None and (not sizes or not all(isinstance(s, int) and s > 0 for s in sizes)):
            raise ConfigError(
                f"cudagraph_capture_sizes must be a list of batch sizes from 1, got {sizes!r}; leave it out "
                "for a ladder of sizes"
            )

    def for_model(self, model: str) -> EngineConfig:
        """Returns these options for another model, without the options that name files or a version of this
        model. Its weights are read from its files."""
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
        """Returns the default sampling parameters; `of_model` are the fields of the model's
        generation_config.json."""
        found = dict(of_model) if self.generation_config == "auto" else {}
        return found | (self.override_generation_config or {})

    @property
    def closes_objects(self) -> bool:
        """True if an object of a JSON schema has only the keys that the schema names, unless the schema or
        the request says otherwise."""
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
                "kv_transfer_config finds blocks by the hashes of their tokens, and enable_prefix_caching "
                "False computes no hashes; drop one"
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
                    f"{name} must be a path{' or a URL' if name == 'kv_store' else ''}, got {value!r}; give "
                    "one"
                )
        if self.kv_disk_bytes and self.kv_disk_path is None:
            raise ConfigError(
                f"kv_disk_bytes {self.kv_disk_bytes} needs kv_disk_path, the folder of the blocks; add it"
            )
        if self.kv_disk_path is not None and not self.kv_disk_bytes:
            raise ConfigError(
                f"kv_disk_path {self.kv_disk_path!r} needs kv_disk_bytes, the most bytes of its files; add it"
            )
        if self.kv_cache_dtype != "auto" and self.attention_backend in ("flashinfer", "flash_attn"):
            raise ConfigError(
                f"attention_backend {self.attention_backend!r} does not read a cache of kv_cache_dtype "
                f"{self.kv_cache_dtype!r}; leave one of the two at 'auto'"
            )
        if self.has_kv_tiers and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_host_bytes, kv_disk_path and kv_store keep blocks that requests share, and "
                "enable_prefix_caching False lets requests share no blocks; drop one or the other"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """An EngineConfig whose defaults are filled in for one model on one machine; `resolve_config` builds it.

    Fields named here are never None. In the other fields None has a meaning, such as "no disk tier".
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
    keep_quantized: bool  # weights stay quantized in memory
    quantizes_weights: bool  # plain weights are quantized while they load
    # speculative_config with the number of drafts; None: a step computes one token of a decode
    speculative: SpeculativeConfig | None

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        object.__setattr__(self, "speculative", SpeculativeConfig.of(self.speculative))  # ranks get fields

    @property
    def queries(self) -> int:
        """The most tokens of a decode in one step."""
        return 1 if self.speculative is None else self.speculative.queries

    @property
    def cache_option(self) -> str:
        """The option that decides the size of the KV cache, with its value."""
        for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
            if value := getattr(self, name):
                return f"{name} {value}"
        return f"gpu_memory_utilization {self.gpu_memory_utilization}"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Options of `shoal serve` but for the engine's; vLLM's names where it has them. Raises ConfigError."""

    host: str = option(
        "127.0.0.1",
        "address to listen on; 0.0.0.0 serves every network of this machine",
        common=True,
        section="addresses and names",
    )
    port: int = option(8000, "port to listen on; 0: any free port", common=True, low=0, high=65535)
    uds: str | None = option(None, "path of a Unix socket (mode 0600) to serve on, in place of host and port")
    admin_host: str = option("127.0.0.1", "address of the admin port")
    admin_port: int | None = option(
        None,
        "port of the admin API (sleep, weights, pause, profile), which no other port has; default: no admin "
        "API",
        low=0,
        high=65535,
    )
    profile_dir: str = option("shoal-traces", "folder below which /start_profile writes traces")
    served_model_name: list[str] | None = option(
        None,
        "names of the model for clients; answers have the first; default: the model as given",
        common=True,
    )
    api_key: list[str] | None = option(
        None,
        "keys; a request must have one, except for health, metrics and pages; SHOAL_API_KEY adds "
        "keys (comma-separated); without this option, VLLM_API_KEY is a key, too",
        common=True,
        section="access",
    )
    api_key_file: str | None = option(None, "file of API keys, one per line")
    allowed_origins: list[str] | None = option(
        None, 'CORS: origins that may send requests; "*" for all; default: none'
    )
    allowed_methods: list[str] | None = option(None, "CORS: methods that pages may use; default: all")
    allowed_headers: list[str] | None = option(None, "CORS: headers that pages may send; default: all")
    allow_credentials: bool = option(False, "CORS: pages may send cookies")
    max_body_bytes: int = option(
        32 << 20,
        "most bytes of a request's body; a larger one gets a 413",
        section="limits of requests",
        low=1024,
    )
    max_total_body_bytes: int = option(
        1 << 30, "most bytes of the bodies of all active requests; further requests get a 429", low=1024
    )
    max_queued_requests: int = option(1024, "most requests that wait; further ones get a 429", low=0)
    responses_store_bytes: int = option(
        0,
        "bytes of the last hour's answers of /v1/responses to keep, so that clients may send their ids "
        "(`previous_response_id`, `item_reference`) in place of the conversation; 0: keep none",
        low=0,
    )
    max_connections: int | None = option(
        None,
        "most connections of a port; beyond them the longest idle one is closed, and if none is idle the new "
        "one gets a 503; default: what the limit of open files leaves",
        low=1,
    )
    request_timeout: float | None = option(
        None, "most seconds of a request; its own `timeout` may be shorter", above=0
    )
    read_timeout: float = option(30.0, "most seconds for a client to send its request", above=0)
    write_timeout: float = option(
        120.0, "most seconds in which a client reads nothing of its answer", above=0
    )
    shutdown_timeout: float = option(30.0, "seconds for running requests to end after SIGTERM", low=0)
    engine_timeout: float = option(
        60.0,
        "seconds without a heartbeat, or without the end of a step, after which the engine counts as hung: "
        "its requests fail and /health is 503; 0: never",
        section="engines",
        low=0,
    )
    restart: bool = option(False, "start a dead or hung engine core again")
    swap: bool = option(False, "serve several models in turn: one is awake, the others sleep", common=True)
    swap_patience: float = option(
        5.0, "with swap: seconds for which the awake model still starts requests while another's wait", low=0
    )
    tool_call_parser: str = option(
        "auto",
        'format of tool calls in the model\'s text; "auto": by the chat template',
        section="tools and templates",
        choices=(
            "auto",
            "cohere_command3",
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "deepseek_v4",
            "ernie45",
            "functiongemma",
            "gemma4",
            "glm45",
            "granite",
            "hermes",
            "hunyuan_a13b",
            "hy_v3",
            "internlm",
            "kimi_k2",
            "lfm2",
            "llama3_json",
            "llama4_pythonic",
            "minimax_m2",
            "mistral",
            "muse_glimmer",
            "nemotron_json",
            "olmo3",
            "openai",
            "phi4_mini_json",
            "qwen3_coder",
            "seed_oss",
            "none",
        ),
    )
    reasoning_parser: str = option(
        "auto",
        'format of reasoning in the model\'s text; "auto": by the chat template',
        choices=(
            "auto",
            "cohere_command3",
            "gemma4",
            "granite",
            "hy_v3",
            "mistral",
            "muse_glimmer",
            "openai_gptoss",
            "qwen3",
            "seed_oss",
            "none",
        ),
    )
    log_requests: str = option(
        "all",
        "requests with a line in the log; health checks, metrics and pages have one only with --verbose",
        choices=("all", "errors", "off"),
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "OTLP/HTTP address of an OpenTelemetry collector, such as http://127.0.0.1:4318, for a trace of each "
        "request; needs shoal[otel]",
    )
    log_format: str = option(
        "text", 'format of the log; "json": one JSON object per line', choices=("text", "json")
    )
    disable_fastapi_docs: bool = option(False, "serve neither /docs nor /openapi.json")
    enable_log_requests: bool = option(
        False,
        "log a line when a request arrives, with its id, size and parameters; with its prompts only if "
        "--verbose",
    )
    max_log_len: int | None = option(
        None,
        "most characters, or token ids, of a prompt in the line of enable_log_requests; default: all",
        low=0,
    )
    enable_force_include_usage: bool = option(False, "end every stream of OpenAI's API with its usage")
    return_tokens_as_token_ids: bool = option(
        False,
        'name tokens in log-probabilities by their ids ("token_id:123"), unless a request says otherwise',
    )
    default_chat_template_kwargs: dict[str, Any] | None = option(
        None, 'default variables of the chat template in JSON: {"enable_thinking": false}'
    )
    trust_request_chat_template: bool = option(
        False, "allow a chat template in a request (it runs in the sandbox, but may run for ever)"
    )
    root_path: str | None = option(
        None, "path prefix that a proxy in front does not remove: with /llm, /llm/v1 is served as /v1"
    )
    middleware: list[str] | None = option(
        None, "ASGI middleware of the public port, outermost first: package.module.Class"
    )
    ssl_keyfile: str | None = option(None, "file of the private key", section="TLS")
    ssl_certfile: str | None = option(None, "file of the certificate")
    ssl_ca_certs: str | None = option(None, "PEM file of the authorities that sign certificates of clients")
    ssl_cert_reqs: int = option(
        0, "certificates of clients; 0: not checked; 1: checked if present; 2: required", low=0, high=2
    )
    ssl_ciphers: str | None = option(None, "ciphers in OpenSSL's form; default: Python's")
    plane: str | None = option(
        None,
        "address of the plane of a fleet to join as a worker: tcp://127.0.0.1:PORT, ipc:///PATH or "
        "nats://HOST:4222; --port then defaults to any free one",
        common=True,
        section="fleet",
    )
    role: str = option(
        "both", "work of this worker in a fleet", common=True, choices=("both", "prefill", "decode")
    )
    worker_id: str | None = option(
        None, "name of this worker in the fleet; default: made of host and process"
    )
    worker_tags: list[str] | None = option(
        None, "tags of this worker: a request with the header X-Shoal-Tags: a,b goes to workers with both"
    )
    fleet_key_file: str | None = option(
        None,
        "file of the secret that the processes of a fleet share; without it, a fleet is limited to this "
        "machine",
        common=True,
    )
    weights_from_peers: bool = option(
        False,
        "load weights from the memory of another worker of the fleet that has the same ones; from files if "
        "no worker has them",
    )
    fleet_host: str = option("127.0.0.1", "address at which routers connect to this worker")
    fleet_port: int = option(0, "port at which routers connect; 0: any free port", low=0, high=65535)

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if 0 < self.engine_timeout < 2:
            raise ConfigError(
                f"engine_timeout must be 0 or >= 2, got {self.engine_timeout!r}: a busy machine may pause "
                "for two seconds; choose 2 or more, or 0 for no limit"
            )
        if self.allow_credentials and "*" in (self.allowed_origins or ()):
            raise ConfigError(
                "allow_credentials with allowed_origins '*' is refused by every browser; name the origins"
            )
        if self.admin_port == self.port != 0 and self.admin_host == self.host and self.uds is None:
            raise ConfigError(
                f"admin_port must differ from port, got {self.admin_port} for both; give each a port of its "
                "own"
            )
        if self.plane is None and (
            self.role != "both" or any(getattr(self, name) for name in WORKER_ONLY_OPTIONS)
        ):
            raise ConfigError(
                f"role, {', '.join(WORKER_ONLY_OPTIONS)} are for a worker of a fleet; add the fleet's --plane"
            )
        if wrong := [tag for tag in self.worker_tags or () if tag != tag.strip() or not tag or "," in tag]:
            raise ConfigError(
                f"worker_tags must have no commas and no outer spaces, got {wrong[0]!r:.100}; leave them out"
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
    """Raises ConfigError for a prefill worker that would lend no blocks."""
    exchange = engine.kv_transfer_config
    if role == "prefill" and (exchange is None or not exchange.lends):
        given = None if exchange is None else exchange.kv_role
        raise ConfigError(
            f"a worker of the role prefill must lend its KV blocks, got kv_transfer_config {given!r}, with "
            "which each prompt would be computed twice; leave kv_transfer_config out, or take kv_role "
            "kv_producer or kv_both"
        )
