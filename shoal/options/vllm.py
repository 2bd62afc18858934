"""Every option of `vllm serve`, with its effect in Shoal, as data: docs/vllm-options.md is generated from it.

An option has the same effect, or no effect and the log says why, or it is refused with an alternative. `LLM`,
the command line and a fleet's file call `translate` for vLLM's options.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import ConfigError

NO_VALUES: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOption:
    """`name` has underscores, and a dot before a field of a JSON option. `takes`: "flag", "one" value, or
    "many". Its effect, in this order:

    `own` names Shoal's option with the same effect; `words` are vLLM's values with other names in Shoal
    (None: Shoal's default), and `convert` turns a value into Shoal's. Else `accepted` has the values without
    effect (None: all), for the reason `why`, and `instead` is the alternative for other values.
    """

    name: str
    short: str = ""
    takes: str = "one"
    own: str = ""
    words: Mapping[Any, Any] = field(default_factory=dict)
    convert: Callable[[Any], Any] | None = None
    accepted: tuple[Any, ...] | None = None
    why: str = ""
    instead: str = ""

    def asks_for_nothing(self, value: Any) -> bool:
        return value is None or value == [] or self.accepted is None or value in self.accepted


# vLLM's names of parsers that read <think> and </think>.
THINK_PARSERS = (
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "ernie45",
    "glm45",
    "glm47",
    "holo2",
    "hunyuan_a13b",
    "kimi_k2",
    "minimax_m2",
    "nemotron_v3",
    "olmo3",
    "poolside_v1",
    "step3p5",
)


# vLLM's earlier names of the method that reads a head in the model's own checkpoint.
MTP_METHODS = (
    "deepseek_mtp",
    "ernie_mtp",
    "exaone_moe_mtp",
    "glm4_moe_mtp",
    "longcat_flash_mtp",
    "mimo_mtp",
    "nemotron_h_mtp",
    "pangu_ultra_moe_mtp",
    "qwen3_5_mtp",
    "qwen3_next_mtp",
    "step3p5_mtp",
)
# vLLM's other names of quantization methods
QUANTIZATION_WORDS = {
    "gguf": None,
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "inc": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
}


def _same(name: str, short: str = "", **more: Any) -> VllmOption:
    return VllmOption(name=name, short=short, **{"own": name, **more})


def _idle(names: str, why: str, takes: str = "one", short: str = "") -> list[VllmOption]:
    """Returns options that have no effect with any value."""
    return [VllmOption(name=name, short=short, takes=takes, why=why) for name in names.split()]


def _refused(
    names: str, accepted: tuple[Any, ...], why: str, instead: str, takes: str = "one", short: str = ""
) -> list[VllmOption]:
    """Returns options that are refused unless they have one of these values."""
    return [
        VllmOption(name=name, short=short, takes=takes, accepted=accepted, why=why, instead=instead)
        for name in names.split()
    ]


def _gib(value: Any) -> int:
    """Returns bytes."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**33:
        raise ConfigError(f"kv_offloading_size must be a number of GiB from 0, got {value!r:.100}; give one")
    return int(value * 2**30)


OFF = (False,)
LOG_HAS_NO_TEXT = "the log has no prompts and no answers without --verbose"
ONE_PROCESS = "one process takes all requests, and text is tokenized in its threads"
NO_REPLICAS = "a server has one engine, and replicas are workers of a fleet"
NO_EXPERT_RANKS = "the devices of tensor_parallel_size share each expert"
TEXT_ALONE = "models here read only text"
NO_ADAPTERS = "no adapters are loaded"
OWN_SNAPSHOTS = "states of recurrent layers are kept where later prompts continue"
ROUNDED_TO_NEAREST = "states of recurrent layers are rounded to the nearest number"
OWN_KERNELS = "kernels are chosen by device and model"
OWN_LOADER = "weights are read by threads of Shoal's own loader"
NEVER_SLICED = "a prompt longer than a step's budget is always computed in chunks"
ALWAYS_COUNTED = "/metrics always has what is counted"
NO_OTHER_HOST = "an engine has the devices of one host"

REPLICAS = (
    "start replicas with `shoal fleet up`: a file with `count = {value}` under [[workers]] (docs/fleet.md)"
)
WORKERS_JOIN = "start a worker for each replica with `shoal serve --plane`, or all with `shoal fleet up`"
MERGE_ADAPTER = "merge the adapter into the weights, and serve the result"
NO_PLUGINS = "leave it out: external code is not loaded"
BY_STAGES = "use --tensor-parallel-size {value}, which shares each layer among the devices"
ITS_OWN_NOISE = "a draft holds if it equals the token sampled in its place, with the noise of that place"
HEAD_AS_MODEL = "a draft head runs as the model does"

# Options of `vllm serve` for the server.
SERVER_OPTIONS: tuple[VllmOption, ...] = (
    *_refused("headless", OFF, "", WORKERS_JOIN, "flag"),
    *_idle("api_server_count", ONE_PROCESS, short="asc"),
    _same("config"),
    *_refused("grpc", OFF, "", "leave it out: the APIs are HTTP", "flag"),
    *_refused("lora_modules", NO_VALUES, "", MERGE_ADAPTER, "many"),
    _same("chat_template"),
    *_refused(
        "chat_template_content_format",
        ("auto",),
        "the form of a message's content is found in the template",
        "leave it out: the form of a message's content is found in the template",
    ),
    _same("trust_request_chat_template", takes="flag"),
    *_refused("response_role", ("assistant",), "", "leave it out: answers have the role assistant"),
    *_idle(
        "enable_auto_tool_choice", "tools may always be called, except with --tool-call-parser none", "flag"
    ),
    *_idle("exclude_tools_when_tool_choice_none", "with tool_choice none, a prompt has no tools", "flag"),
    _same(
        "tool_call_parser",
        words={
            "": None,
            "cohere_command4": "cohere_command3",
            "glm47": "glm45",
            "granite4": "hermes",
            "llama4_json": "llama3_json",
            "mimo": "qwen3_coder",
            "poolside_v1": "glm45",
            "pythonic": "llama4_pythonic",
            "qwen3_xml": "qwen3_coder",
            "step3p5": "qwen3_coder",
        },
    ),
    *_refused("tool_parser_plugin", ("",), "", NO_PLUGINS),
    *_refused("tool_server", NO_VALUES, "", "leave it out: clients run their tools themselves"),
    *_refused("log_config_file", NO_VALUES, "", "use --log-format json, and redirect standard error"),
    *_idle("enable_prompt_tokens_details", "usage always has prompt_tokens_details", "flag"),
    *_idle("enable_server_load_tracking", "/load always has the load", "flag"),
    *_idle("enable_tokenizer_info_endpoint", "/tokenizer_info is always there", "flag"),
    *_idle("enable_log_outputs", "answers are never written to the log", "flag"),
    *_idle("enable_log_deltas", "answers are never written to the log", "flag"),
    *_idle("log_error_stack", "the log always has the stack of an internal error", "flag"),
    *_refused(
        "tokens_only", OFF, "", "use --skip-tokenizer-init; /inference/v1/generate is always there", "flag"
    ),
    *_refused(
        "fingerprint_mode",
        ("none", "full", "hash"),
        "answers have no system_fingerprint",
        "leave it out: answers have no system_fingerprint",
    ),
    *_refused("fingerprint_value", NO_VALUES, "", "leave it out: answers have no system_fingerprint"),
    _same("host"),
    _same("port"),
    *_idle(
        "data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
        "dp_supervisor_probe_failure_threshold",
        NO_REPLICAS,
    ),
    _same("uds"),
    *_idle("uvicorn_log_level", "the log is Shoal's own: --verbose and --log-requests say how much it has"),
    _same("disable_uvicorn_access_log", takes="flag", own="log_requests", words={True: "off", False: None}),
    *_idle(
        "disable_access_log_for_endpoints",
        "health checks, metrics and pages are in the log with --verbose only, and --log-requests errors "
        "leaves out what succeeds",
    ),
    _same("allow_credentials", takes="flag"),
    _same("allowed_origins"),
    _same("allowed_methods"),
    _same("allowed_headers"),
    _same("api_key", takes="many"),
    _same("ssl_keyfile"),
    _same("ssl_certfile"),
    _same("ssl_ca_certs"),
    *_refused("enable_ssl_refresh", OFF, "", "restart the server when its certificate has changed", "flag"),
    _same("ssl_cert_reqs"),
    _same("ssl_ciphers"),
    *_idle("enable_request_id_headers", "answers always have the header X-Request-Id", "flag"),
    _same("disable_fastapi_docs", takes="flag"),
    _same("default_chat_template_kwargs"),
    _same("return_tokens_as_token_ids", takes="flag"),
    _same("enable_force_include_usage", takes="flag"),
    _same("enable_log_requests", takes="flag"),
    _same("max_log_len"),
    _same("root_path", words={"": None}),
    _same("middleware"),
    *_idle("h11_max_incomplete_event_size h11_max_header_count", "the head of a request has fixed limits"),
    *_idle("enable_offline_docs", "/docs needs nothing from the network", "flag"),
    *_idle("enable_flash_late_interaction", "models here do not score by late interaction", "flag"),
)

# Options of `vllm serve` for the engine, which are also arguments of vLLM's LLM().
ENGINE_OPTIONS: tuple[VllmOption, ...] = (
    _same("model"),
    *_refused(
        "runner",
        ("auto", "generate", "pooling"),
        "every model generates, and embeds",
        "leave it out: every model generates, and embeds",
    ),
    *_refused(
        "convert",
        ("auto", "none", "embed"),
        "every model generates, and embeds",
        "leave it out: models generate and embed, and do not classify",
    ),
    _same("tokenizer"),
    *_idle("tokenizer_mode", "tokenizer.json or a GGUF's metadata determines the tokenizer"),
    *_idle("trust_remote_code", "code that comes with a model is never run", "flag"),
    _same("dtype"),
    _same("seed"),
    *_refused("hf_config_path", NO_VALUES, "", "put that config.json into the model's folder"),
    *_idle("allowed_local_media_path", TEXT_ALONE),
    *_idle("allowed_media_domains", TEXT_ALONE, "many"),
    _same("revision"),
    *_idle("code_revision", "code that comes with a model is never run"),
    *_idle(
        "tokenizer_revision",
        "the tokenizer comes from the model's --revision, or from the folder --tokenizer",
    ),
    _same("max_model_len", words={-1: None, "auto": None}),
    _same("quantization", "q", words=QUANTIZATION_WORDS),
    *_refused("quantization_config", NO_VALUES, "", "use --quantization fp8, or `shoal quantize`"),
    *_idle("allow_deprecated_quantization", "no quantization here is deprecated", "flag"),
    _same("enforce_eager", takes="flag"),
    *_refused(
        "enable_return_routed_experts",
        OFF,
        "",
        "leave it out: the experts of a token are not reported",
        "flag",
    ),
    _same("max_logprobs"),
    _same("logprobs_mode"),
    *_idle("use_fp64_gumbel", "tokens are sampled in float32", "flag"),
    *_refused(
        "disable_sliding_window",
        OFF,
        "",
        "use --max-model-len with the size of the window, within which the results are the same",
        "flag",
    ),
    _same("disable_cascade_attn", takes="flag"),
    _same("skip_tokenizer_init", takes="flag"),
    *_refused("enable_prompt_embeds", OFF, "", "leave it out: prompts are texts or token ids", "flag"),
    _same("served_model_name", takes="many"),
    *_refused(
        "config_format",
        ("auto", "hf"),
        "a model is described by config.json or a GGUF's metadata",
        "name a repository or folder with a config.json, or a .gguf file",
    ),
    *_refused(
        "hf_token",
        (True,),
        "the token of `hf auth login` is always used",
        "set HF_TOKEN in the environment, as every user of the machine can read a command line",
        "optional",
    ),
    _same("hf_overrides"),
    _same("override_generation_config"),
    *_refused("pooler_config", NO_VALUES, "", "leave it out: /v1/embeddings has fixed pooling"),
    _same("generation_config"),
    _same("enable_sleep_mode", takes="flag"),
    *_idle(
        "enable_cumem_allocator", "memory is Shoal's own regions where --enable-sleep-mode needs them", "flag"
    ),
    *_idle("model_impl", "each architecture has one implementation here"),
    *_refused("override_attention_dtype", NO_VALUES, "", "use --dtype"),
    *_refused("logits_processors", NO_VALUES, "", NO_PLUGINS, "many"),
    *_refused("io_processor_plugin", NO_VALUES, "", NO_PLUGINS),
    *_idle("renderer_num_workers", ONE_PROCESS),
    _same(
        "load_format",
        words={
            "hf": "auto",
            "gguf": "auto",
            "fastsafetensors": "safetensors",
            "runai_streamer": "safetensors",
            "instanttensor": "safetensors",
        },
    ),
    _same("download_dir"),
    *_idle(
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "model_loader_extra_config pt_load_map_location",
        OWN_LOADER,
    ),
    *_idle("ignore_patterns", "only the files that are needed are downloaded", "many"),
    *_idle("use_tqdm_on_load", OWN_LOADER, "flag"),
    _same(
        "attention_backend",
        words={
            "FLASH_ATTN": "flash_attn",
            "FLASHINFER": "flashinfer",
            "TRITON_ATTN": "triton",
            "CPU_ATTN": "cpu",
            "TORCH_SDPA": "cpu",
        },
    ),
    *_idle("mamba_backend", OWN_KERNELS),
    *_idle("mamba_cache_philox_rounds", ROUNDED_TO_NEAREST),
    *_idle("enable_mamba_cache_stochastic_rounding", ROUNDED_TO_NEAREST, "flag"),
    _same(
        "reasoning_parser",
        words={"": None, "cohere_command4": "cohere_command3", **dict.fromkeys(THINK_PARSERS, "qwen3")},
    ),
    *_refused("reasoning_parser_plugin", ("",), "", NO_PLUGINS),
    *_idle(
        "distributed_executor_backend",
        "ranks are processes of one host; a fleet's workers run on Ray with `shoal fleet up --on ray`",
    ),
    *_refused("pipeline_parallel_size", (1,), "a model is one stage", BY_STAGES, short="pp"),
    *_idle("master_addr master_port", NO_OTHER_HOST),
    *_refused("nnodes", (1,), NO_OTHER_HOST, WORKERS_JOIN, short="n"),
    *_refused("node_rank", (0,), NO_OTHER_HOST, WORKERS_JOIN, short="r"),
    *_idle("distributed_timeout_seconds cpu_distributed_timeout_seconds", NO_OTHER_HOST),
    *_idle("numa_bind", "`numactl` binds a process that it starts", "flag"),
    *_idle("numa_bind_nodes numa_bind_cpus", "`numactl` binds a process that it starts", "many"),
    *_refused("device_ids", NO_VALUES, "", "set CUDA_VISIBLE_DEVICES in the environment", "many"),
    _same("tensor_parallel_size", "tp"),
    *_refused(
        "decode_context_parallel_size", (1,), "all ranks have the whole context", BY_STAGES, short="dcp"
    ),
    *_idle("dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size", NO_OTHER_HOST),
    *_refused(
        "prefill_context_parallel_size", (1,), "all ranks have the whole context", BY_STAGES, short="pcp"
    ),
    *_refused("data_parallel_size", (1,), NO_REPLICAS, REPLICAS, short="dp"),
    *_refused("data_parallel_rank", NO_VALUES, NO_REPLICAS, WORKERS_JOIN, short="dpn"),
    *_refused("data_parallel_start_rank", (0,), NO_REPLICAS, WORKERS_JOIN, short="dpr"),
    *_refused("data_parallel_size_local", (1,), NO_REPLICAS, REPLICAS, short="dpl"),
    *_idle("data_parallel_address", NO_REPLICAS, short="dpa"),
    *_idle("data_parallel_rpc_port", NO_REPLICAS, short="dpp"),
    *_idle("data_parallel_backend", NO_REPLICAS, short="dpb"),
    *_refused("data_parallel_hybrid_lb", OFF, NO_REPLICAS, WORKERS_JOIN, "flag", short="dph"),
    *_refused("data_parallel_external_lb", OFF, NO_REPLICAS, WORKERS_JOIN, "flag", short="dpe"),
    *_refused("data_parallel_multi_port_external_lb", OFF, NO_REPLICAS, WORKERS_JOIN, "flag", short="dpm"),
    *_refused(
        "enable_expert_parallel",
        OFF,
        NO_EXPERT_RANKS,
        "use --tensor-parallel-size alone, which shares each expert among the devices",
        "flag",
        short="ep",
    ),
    *_idle(
        "enable_ep_weight_filter enable_dbo enable_elastic_ep enable_eplb "
        "disable_nccl_for_dp_synchronization",
        NO_EXPERT_RANKS,
        "flag",
    ),
    *_idle(
        "all2all_backend ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold eplb_config "
        "expert_placement_strategy",
        NO_EXPERT_RANKS,
    ),
    *_idle("max_parallel_loading_workers", OWN_LOADER),
    *_idle("ray_workers_use_nsight", "`shoal profile` and /start_profile trace an engine", "flag"),
    _same("disable_custom_all_reduce", takes="flag", own="peer_all_reduce", words={True: False, False: True}),
    *_refused("worker_cls", ("auto",), "", NO_PLUGINS),
    *_refused("worker_extension_cls", ("",), "", NO_PLUGINS),
    _same("block_size"),
    _same("gpu_memory_utilization"),
    _same("kv_cache_memory_bytes"),
    _same("kv_cache_dtype"),
    _same("num_gpu_blocks_override"),
    _same("enable_prefix_caching", takes="flag"),
    *_idle("prefix_caching_hash_algo", "a block's name has 128 bits of one hash"),
    *_refused("calculate_kv_scales", OFF, "", "take a checkpoint with k_scale and v_scale", "flag"),
    *_refused("kv_cache_dtype_skip_layers", NO_VALUES, "", "use --kv-cache-dtype auto", "many"),
    *_idle("kv_sharing_fast_prefill", "models here do not share a KV cache between layers", "flag"),
    *_idle("mamba_cache_dtype", "the inputs of convolutions are kept in the model's dtype"),
    _same("mamba_ssm_cache_dtype"),
    *_idle("mamba_block_size mamba_cache_mode", OWN_SNAPSHOTS),
    _same("kv_offloading_size", own="kv_host_bytes", convert=_gib),
    *_refused(
        "kv_offloading_backend",
        ("native",),
        "host memory, a disk and a store are Shoal's own tiers",
        "use --kv-host-bytes, --kv-disk-path or --kv-store (docs/kv.md)",
    ),
    *_refused(
        "cpu_offload_gb",
        (0,),
        "weights are in the device's memory",
        "use --quantization fp8, or --tensor-parallel-size 2, so that the weights have room",
    ),
    *_idle(
        "offload_backend offload_group_size offload_num_in_group offload_prefetch_step",
        "weights are in the device's memory",
    ),
    *_idle("cpu_offload_params offload_params", "weights are in the device's memory", "many"),
    *_idle(
        "language_model_only enable_mm_embeds mm_encoder_only interleave_mm_strings skip_mm_profiling "
        "disable_chunked_mm_input enable_tower_connector_lora",
        TEXT_ALONE,
        "flag",
    ),
    *_idle(
        "limit_mm_per_prompt media_io_kwargs mm_processor_kwargs mm_processor_cache_gb "
        "mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_tp_mode "
        "mm_encoder_attn_backend mm_encoder_attn_dtype "
        "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin "
        "video_pruning_rate mm_tensor_ipc default_mm_loras",
        TEXT_ALONE,
    ),
    *_refused("enable_lora", OFF, NO_ADAPTERS, MERGE_ADAPTER, "flag"),
    *_idle("max_loras max_lora_rank lora_dtype max_cpu_loras", NO_ADAPTERS),
    *_idle("lora_target_modules", NO_ADAPTERS, "many"),
    *_idle("fully_sharded_loras specialize_active_lora enable_mixed_moe_lora_format", NO_ADAPTERS, "flag"),
    *_idle("show_hidden_metrics_for_version", ALWAYS_COUNTED),
    _same("otlp_traces_endpoint"),
    *_idle("collect_detailed_traces", "a trace always has all spans", "many"),
    *_idle(
        "kv_cache_metrics cudagraph_metrics enable_mfu_metrics disable_log_stats aggregate_engine_logging "
        "enable_logging_iteration_details",
        ALWAYS_COUNTED,
        "flag",
    ),
    *_idle("kv_cache_metrics_sample", ALWAYS_COUNTED),
    *_idle(
        "enable_layerwise_nvtx_tracing jit_monitor_verbose",
        "`shoal profile` and /start_profile trace an engine",
        "flag",
    ),
    _same("max_num_batched_tokens"),
    _same("max_num_seqs"),
    *_idle("max_num_partial_prefills max_long_partial_prefills", NEVER_SLICED),
    _same("long_prefill_token_threshold"),
    _same("scheduling_policy"),
    *_idle("enable_chunked_prefill", NEVER_SLICED, "flag"),
    *_refused("scheduler_cls", NO_VALUES, "", NO_PLUGINS),
    *_idle(
        "scheduler_reserve_full_isl", "a sequence is admitted when there are blocks for its prompt", "flag"
    ),
    *_idle("watermark", "a sequence is admitted when there are blocks for its prompt"),
    *_idle("prefill_schedule_interval", "--target-itl-ms determines how prompts and answers share the steps"),
    *_idle("disable_hybrid_kv_cache_manager", "each kind of layers keeps the blocks that it needs", "flag"),
    _same("async_scheduling", takes="flag"),
    *_idle("stream_interval", "each token is sent at once, and several together to a slow reader"),
    _same("cudagraph_capture_sizes", takes="many"),
    *_idle("max_cudagraph_capture_size", "--cudagraph-capture-sizes and --max-num-seqs determine the graphs"),
    *_idle("ir_op_priority moe_backend linear_backend kernel_config gdn_prefill_backend", OWN_KERNELS),
    *_idle("enable_flashinfer_autotune", OWN_KERNELS, "flag"),
    _same("speculative_config", "sc"),
    *_refused("spec_method", NO_VALUES, "", "use --speculative-config.method {value}"),
    *_refused("spec_model", NO_VALUES, "", "use --speculative-config.model {value}"),
    *_refused("spec_tokens", NO_VALUES, "", "use --speculative-config.num_speculative_tokens {value}"),
    *_refused(
        "diffusion_config", NO_VALUES, "", "leave it out: models here write from left to right", short="dc"
    ),
    _same("kv_transfer_config"),
    _same("kv_events_config"),
    *_refused("ec_transfer_config", NO_VALUES, "", f"leave it out: {TEXT_ALONE}"),
    *_idle("compilation_config", "graphs and kernels need no compilation of the model", short="cc"),
    *_refused("attention_config", NO_VALUES, "", "use --attention-backend", short="ac"),
    *_refused("reasoning_config", NO_VALUES, "", "use thinking_token_budget of a request"),
    *_idle("additional_config", "it is for other platforms of vLLM's"),
    _same("structured_outputs_config"),
    *_refused("profiler_config", NO_VALUES, "", "use --admin-port and --profile-dir, and /start_profile"),
    *_idle("optimization_level", "graphs and kernels need no compilation of the model", short="O"),
    *_idle("performance_mode", "--target-itl-ms determines how prompts and answers share the steps"),
    *_refused("weight_transfer_config", NO_VALUES, "", "use --admin-port, and its /update_weights"),
    *_idle("fail_on_environ_validation", "vLLM's environment variables are not read", "flag"),
    _same("shutdown_timeout"),
)

# Options of earlier releases that scripts still carry.
EARLIER_OPTIONS: tuple[VllmOption, ...] = (
    *_refused(
        "task",
        ("auto", "generate", "embed", "embedding"),
        "every model generates, and embeds",
        "leave it out: models generate and embed, and do not classify",
    ),
    *_idle("swap_space", "a preempted sequence is computed again"),
    *_idle("disable_log_requests", LOG_HAS_NO_TEXT, "flag"),
    *_idle("disable_frontend_multiprocessing", "the engine always has a process of its own", "flag"),
    *_idle("max_seq_len_to_capture", "a graph works for any length"),
    *_idle("num_scheduler_steps", "step n+1 is always scheduled while step n runs on a GPU"),
    *_idle("use_v2_block_manager", "Shoal has one block manager", "flag"),
    *_idle("guided_decoding_backend", "llguidance compiles every grammar"),
    *_idle("enable_reasoning", "--reasoning-parser is found in the chat template", "flag"),
    *_refused("rope_scaling", NO_VALUES, "", "use --hf-overrides '{{\"rope_scaling\": ...}}'"),
    *_refused("rope_theta", NO_VALUES, "", "use --hf-overrides '{{\"rope_theta\": {value}}}'"),
)

_BACKENDS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")
# Fields of JSON options that Shoal does not have.
NESTED_OPTIONS: tuple[VllmOption, ...] = (
    *_refused(
        "structured_outputs_config.backend",
        _BACKENDS,
        "llguidance compiles every grammar",
        "leave it out: llguidance compiles every grammar",
    ),
    *_idle("structured_outputs_config.disable_fallback", "llguidance compiles every grammar", "flag"),
    *_refused(
        "structured_outputs_config.enable_in_reasoning",
        OFF,
        "a grammar begins after the reasoning of an answer",
        "leave it out: a grammar begins after the reasoning of an answer",
        "flag",
    ),
    *_refused("structured_outputs_config.reasoning_parser", ("",), "", "use --reasoning-parser {value}"),
    *_refused("structured_outputs_config.reasoning_parser_plugin", ("",), "", NO_PLUGINS),
    *_refused(
        "kv_transfer_config.kv_connector",
        ("NixlConnector",),
        "blocks are transferred by CUDA IPC, shared memory or NIXL",
        "leave it out; for blocks in host memory, on a disk or in a store use --kv-host-bytes, "
        "--kv-disk-path or --kv-store",
    ),
    *_idle(
        "kv_transfer_config.engine_id kv_transfer_config.kv_rank kv_transfer_config.kv_parallel_size",
        "engines name themselves",
    ),
    *_idle(
        "kv_transfer_config.kv_buffer_device kv_transfer_config.kv_buffer_size "
        "kv_transfer_config.enable_permute_local_kv",
        "blocks are transferred from cache to cache",
    ),
    *_refused(
        "kv_transfer_config.kv_load_failure_policy",
        ("recompute",),
        "a block that does not arrive is computed",
        "leave it out: a block that does not arrive is computed",
    ),
    _same("speculative_config.method", words={"ngram_gpu": "ngram", **dict.fromkeys(MTP_METHODS, "mtp")}),
    *_refused(
        "speculative_config.rejection_sample_method",
        ("standard", "block"),
        ITS_OWN_NOISE,
        f"leave it out: {ITS_OWN_NOISE}",
    ),
    *_idle("speculative_config.draft_sample_method", ITS_OWN_NOISE),
    *_refused(
        "speculative_config.num_speculative_tokens_per_batch_size",
        NO_VALUES,
        "",
        "leave it out: the number of drafts follows measured costs",
    ),
    *_refused(
        "speculative_config.draft_tensor_parallel_size speculative_config.tensor_parallel_size",
        NO_VALUES,
        "",
        f"leave it out: {HEAD_AS_MODEL}",
    ),
    *_refused("speculative_config.quantization", NO_VALUES, "", f"leave it out: {HEAD_AS_MODEL}"),
    *_refused("speculative_config.max_model_len", NO_VALUES, "", "use --max-model-len"),
    *_idle("speculative_config.attention_backend speculative_config.moe_backend", OWN_KERNELS),
    *_refused(
        "speculative_config.parallel_drafting", OFF, "", "leave it out: drafts follow each other", "flag"
    ),
    *_refused(
        "speculative_config.use_heterogeneous_vocab", OFF, "", f"leave it out: {HEAD_AS_MODEL}", "flag"
    ),
    *_idle(
        "speculative_config.use_local_argmax_reduction speculative_config.disable_padded_drafter_batch",
        OWN_KERNELS,
        "flag",
    ),
    *_refused("kv_transfer_config.kv_connector_module_path", NO_VALUES, "", NO_PLUGINS),
    *_idle("kv_transfer_config.kv_connector_extra_config", "they are for vLLM's connectors"),
)

ALL_OPTIONS = (*SERVER_OPTIONS, *ENGINE_OPTIONS, *EARLIER_OPTIONS)


def value_of(text: str) -> Any:
    """Returns the value of a word of the command line: a number, JSON, a bool, or a string."""
    if text == "None":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def translate(
    given: Mapping[str, Any], options: Iterable[VllmOption], spell: Callable[[str], str]
) -> tuple[dict[str, Any], list[str]]:
    """Returns `given` with Shoal's options in place of vLLM's, and a line for each option without effect that
    says why. Options that are not among `options` stay. spell: returns the user's spelling of a name. Raises
    ConfigError for a refused option, with the alternative."""
    known = {option.name: option for option in options}
    found = {name: value for name, value in given.items() if name not in known}
    lines = []
    for name, value in given.items():
        if (option := known.get(name)) is None:
            continue
        if option.own:
            value = option.words.get(value, value) if isinstance(value, str | int) else value
            if option.convert is not None and value is not None:
                value = option.convert(value)
            if value is not None:  # vLLM's word for its default
                found.setdefault(option.own, value)
        elif option.asks_for_nothing(value):
            lines.append(f"{spell(name)} has no effect: {option.why or f'{value!r} asks for nothing'}")
        else:
            raise ConfigError(_refusal(spell(name), option, value))
    return found, lines


def _refusal(name: str, option: VllmOption, value: Any) -> str:
    accepted = [each for each in option.accepted or () if each != ""]
    if not accepted or option.takes == "flag":
        must = "must be left out" if value is not False else "must not be switched off"
    else:
        must = f"must be {' or '.join(map(str, accepted))}, or left out"
    got = "a text" if option.name == "hf_token" else f"{value!r:.200}"  # a secret stays out of logs
    return f"{name} {must}, got {got}; {option.instead.format(value=value)}"
