"""Makes a ResolvedConfig out of an EngineConfig, once model and machine are known. The reasons of the
defaults:

block_size is 16, so that a prefix is shared to within 15 tokens while a block over all layers is one copy of
megabytes. gpu_memory_utilization is 0.9, as the driver and fragmentation need the rest. A step on a GPU takes
at most 16384 tokens, as larger matmuls are not faster; on the CPU 1024. max_num_seqs is 1024 on a large
card, as in vLLM, because many short requests are answered sooner so; 256 on a smaller one, and where the
cache is too small for more.
"""

from __future__ import annotations

import dataclasses

import torch

from shoal.config import (
    EngineConfig,
    KVEventsConfig,
    ResolvedConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
)
from shoal.engine.drafting.device import bytes_of_row
from shoal.engine.drafting.step_sizes import draft_sizes
from shoal.engine.runner.cache_plan import CachePlan, plan_cache
from shoal.engine.runner.state_rows import plan_states
from shoal.errors import ConfigError
from shoal.kernels.cpu import build as cpu_build
from shoal.kernels.state import StateLayout
from shoal.memory.available import available_bytes, total_bytes
from shoal.model_config import ModelConfig
from shoal.models.layouts.registry import BY_NAME
from shoal.models.shapes import num_weights

CPU_CACHE_BYTES = 1 << 30
CPU_SEQS, FEW_SEQS, MANY_SEQS = 64, 256, 1024  # the defaults of max_num_seqs
LARGE_CARD_BYTES = 70 << 30  # A card that is sold with 80 GB has a little less.
# MANY_SEQS are the default only where the cache has room for as many tokens of each.
TOKENS_OF_SHORT_SEQ = 256
# The largest default of max_model_len. Tables of positions and blocks grow with it: Llama 4 Scout's 10
# million would take 16 GB of a card.
LONGEST_DEFAULT = 1 << 20
# Largest shares of the cache for the state rows of the default's sequences: of FEW_SEQS, and of more.
FEW_ROWS_SHARE, ROWS_SHARE = 0.5, 0.25
FLOAT32_SHARE = 0.6  # largest share of the available host memory; the rest is for the KV cache and others
FP8_CAPABILITY = (8, 9)  # the first GPUs that convert fp8, and whose tensor cores multiply it
ALIASES = {"half": "float16", "float": "float32"}


def resolve_config(
    config: EngineConfig, model: ModelConfig, quantized_bytes: int | None = None
) -> ResolvedConfig:
    """Fills in what `config` leaves open.

    quantized_bytes: the size of the checkpoint's weights if they are quantized, else None. Raises ConfigError
    where an option is at odds with the model or the machine, and for what the machine's memory can never
    hold, before anything is made for it.
    """
    device = _device(config)
    gpu = device == "cuda"
    keep_quantized, quantizes = _keeps_quantized(config, model, quantized_bytes is not None, gpu)
    if config.kv_host_bytes > (free := available_bytes()):
        raise ConfigError(
            f"kv_host_bytes {config.kv_host_bytes} > {free}, the host memory that can be had; lower it"
        )
    max_model_len = config.max_model_len or min(model.max_position_embeddings, LONGEST_DEFAULT)
    if max_model_len > (longest := _longest(model)):
        raise ConfigError(
            f"max_model_len {max_model_len} > {longest}, the most positions this model's config allows; "
            "lower it"
        )
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    filled_in = {
        "device": device,
        "dtype": _dtype(config, model, gpu, quantized_bytes is not None or quantizes),
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs or 0,  # its default depends on the rest: it follows below
        "max_num_batched_tokens": config.max_num_batched_tokens or (16384 if gpu else 1024),
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes or (0 if gpu else CPU_CACHE_BYTES),
        "num_gpu_blocks_override": config.num_gpu_blocks_override or 0,
        "kv_disk_bytes": config.kv_disk_bytes or 0,
        "async_scheduling": gpu if config.async_scheduling is None else config.async_scheduling,
        "target_itl_ms": config.target_itl_ms or 0.0,
        "kv_events_config": config.kv_events_config or KVEventsConfig(),
        "structured_outputs_config": config.structured_outputs_config or StructuredOutputsConfig(),
    }
    resolved = ResolvedConfig(
        **(options | filled_in),
        keep_quantized=keep_quantized,
        quantizes_weights=quantizes,
        speculative=_speculation(config, model, gpu),
    )
    plan = plan_cache(resolved, model)
    if resolved.num_gpu_blocks_override and len(plan.groups) > 1:
        raise ConfigError(
            f"num_gpu_blocks_override must be unset for {config.model}, whose layers form {len(plan.groups)} "
            f"groups with KV blocks of their own, got {config.num_gpu_blocks_override}; size the cache by "
            "kv_cache_memory_bytes or gpu_memory_utilization"
        )
    if not resolved.max_num_seqs:
        resolved = dataclasses.replace(resolved, max_num_seqs=_default_num_seqs(resolved, model, plan))
    if config.speculative_config is not None and config.speculative_config.method != "auto":
        _check_drafts(resolved)
    kept_bytes = num_weights(model) if quantizes else quantized_bytes if keep_quantized else None
    _check_memory(config, resolved, model, plan, kept_bytes)
    _check_rows(resolved, model, plan)
    return resolved


def _device(config: EngineConfig) -> str:
    """Returns "cuda" or "cpu". Raises ConfigError for what the GPUs of this machine cannot do."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(
            "device 'cuda' was asked for, but torch sees no GPU; install a CUDA build of torch or use "
            "device='cpu'"
        )
    if config.tensor_parallel_size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size {config.tensor_parallel_size} > {torch.cuda.device_count()} GPUs here; "
            "lower it"
        )
    if config.kv_cache_dtype != "auto" and (chip := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype!r} needs a GPU that converts fp8 (compute capability 8.9 "
            f"or more: Ada, Hopper), and this one has {chip[0]}.{chip[1]}; leave it at 'auto'"
        )
    return device


def _speculation(config: EngineConfig, model: ModelConfig, gpu: bool) -> SpeculativeConfig | None:
    """Returns what speculation may do. Raises ConfigError for a model or machine without drafts."""
    options = config.speculative_config
    if options is not None and gpu and config.attention_backend not in ("auto", "triton"):
        if options.method == "auto":
            return None
        raise ConfigError(
            f"attention_backend must be 'auto' on a GPU with speculative_config, got "
            f"{config.attention_backend!r} and method {options.method!r}; leave one of them out: answers are "
            "the same"
        )
    if options is not None and options.method == "auto":
        if not gpu and not cpu_build.load():  # Drafts would be looked up in Python.
            return None
        options = dataclasses.replace(options, method="ngram")
    if options is not None and options.num_speculative_tokens is None:
        if model.head_drafts is None:
            raise ConfigError(
                "speculative_config.num_speculative_tokens must be given with "
                f"{options.model}, whose config names no number, got None; give one, such as 3"
            )
        options = dataclasses.replace(options, num_speculative_tokens=model.head_drafts)
    return options


def _check_drafts(config: ResolvedConfig) -> None:
    """Raises ConfigError if no step has room for the drafts that were asked for."""
    if draft_sizes(config) == {}:
        assert config.speculative is not None
        raise ConfigError(
            "speculative_config.num_speculative_tokens must be less than max_num_batched_tokens, which is "
            f"{config.max_num_batched_tokens}, got {config.speculative.num_speculative_tokens}; lower it, "
            "raise max_num_batched_tokens, or leave enable_adaptive_verification on"
        )


def _keeps_quantized(
    config: EngineConfig, model: ModelConfig, quantized: bool, gpu: bool
) -> tuple[bool, bool]:
    """Returns whether weights are quantized in memory, and whether they are quantized only while they load.
    Raises ConfigError for options that contradict the checkpoint, and for a GPU without such matmuls."""
    asked, stored = config.quantization, model.quantization
    quantizes = asked is not None and not quantized
    if asked is not None and quantized:
        method = "gguf" if stored is None else BY_NAME[stored.layout].quant_method
        if method != asked:
            raise ConfigError(
                f"quantization {asked!r} was asked for, but the weights of {config.model} are quantized "
                f"already ({method}); leave the option out"
            )
    elif quantizes and asked != "fp8":
        raise ConfigError(
            f"quantization {asked!r} was asked for, but {config.model} holds plain weights, which only 'fp8' "
            "quantizes while they load; use that, leave the option out, or take a checkpoint in that format"
        )
    keeps = quantizes or (quantized and (config.dtype == "auto" or asked is not None))
    fp8 = quantizes or (stored is not None and any(BY_NAME[own.layout].is_fp8 for own in stored.every))
    if gpu and keeps and fp8 and (capability := torch.cuda.get_device_capability(0)) < FP8_CAPABILITY:
        way_out = (
            "leave quantization out"
            if quantizes
            else "name a dtype ('bfloat16') and no quantization, so that they are unpacked while they load"
        )
        raise ConfigError(
            f"{config.model}: weights in fp8 need a GPU of compute capability 8.9 (Ada, Hopper) or newer, "
            f"and {torch.cuda.get_device_name(0)} has {'.'.join(map(str, capability))}; {way_out}"
        )
    return keeps, quantizes


def _check_rows(config: ResolvedConfig, model: ModelConfig, plan: CachePlan) -> None:
    """Raises ConfigError if the rows of states leave no room in a cache of a given size for a KV block of
    each group of layers."""
    row = plan_states(config, model, plan.block_bytes).bytes_of_sequence
    given, blocks = config.kv_cache_memory_bytes, len(plan.groups) * plan.block_bytes
    rows = (config.max_num_seqs + 1) * row
    if row and given and not config.num_gpu_blocks_override and rows + blocks > given:
        most = (given - blocks) // row - 1
        lower = f", or lower max_num_seqs to {most}" if most > 0 else ""
        raise ConfigError(
            f"kv_cache_memory_bytes must be at least {rows + blocks} for {config.model} with max_num_seqs "
            f"{config.max_num_seqs}, got {given}: the states of its recurrent layers take {row} bytes for "
            f"each sequence and a spare row; raise it{lower}"
        )


def _check_memory(
    given: EngineConfig,
    config: ResolvedConfig,
    model: ModelConfig,
    plan: CachePlan,
    quantized_bytes: int | None,
) -> None:
    """Raises ConfigError for what asks for more memory than there is.

    What an option asks for must be free now; weights and tables must be less than the whole memory. Sizes are
    below what is really needed, so this finds only what never fits. `config` is `given` with its defaults
    filled in; `quantized_bytes` is the size of weights that stay quantized.
    """
    gpu, ranks = config.device == "cuda", config.tensor_parallel_size
    itemsize = getattr(torch, config.dtype).itemsize
    blocks = -(-config.max_model_len // plan.block_size)  # entries of a table of the longest sequence
    num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len)
    row = torch.int32.itemsize * StateLayout(config.max_num_seqs, blocks, len(plan.groups)).row_stride
    row += plan_states(config, model, plan.block_bytes).bytes_of_sequence
    drafts = 0 if config.speculative is None else bytes_of_row(config.speculative, config.max_model_len)
    row += drafts
    free = torch.cuda.mem_get_info()[0] if gpu else available_bytes()
    needs = [
        ("max_num_seqs", config.max_num_seqs, row, "for each sequence's state"),
        ("max_num_batched_tokens", num_tokens, 4 * model.hidden_size * itemsize, "for each token of a step"),
        ("num_gpu_blocks_override", config.num_gpu_blocks_override, plan.block_bytes, "for each KV block"),
        ("kv_cache_memory_bytes", given.kv_cache_memory_bytes or 0, 1, ""),
    ]
    for name, count, size, what in needs:
        if count * size > free:
            each = f" {what} ({size} each)" if what else ""
            raise ConfigError(
                f"{name} {getattr(config, name)} needs {count * size} bytes{each}, and {free} are free "
                f"here; lower it to {free // size} or, as the rest of the engine wants memory too, less"
            )
    if quantized_bytes is not None:
        weights = quantized_bytes
    else:
        weights = num_weights(model) * itemsize
    weights //= ranks if gpu else 1  # on the CPU ranks share the memory
    ropes = {(a.rope, a.rotary_dim) for kind in model.cached_layers if (a := kind.attention) is not None}
    angles = config.max_model_len * sum(size for _, size in ropes)
    tables = torch.int32.itemsize * (angles + config.max_num_seqs * blocks * len(plan.groups))
    tables += config.max_num_seqs * drafts
    total = torch.cuda.get_device_properties(0).total_memory if gpu else total_bytes()
    if weights + tables > total:
        raise ConfigError(
            f"{config.model}: {num_weights(model):,} weights of {weights} bytes, and tables "
            f"of {tables} bytes for max_model_len {config.max_model_len} and max_num_seqs "
            f"{config.max_num_seqs}, are more than the {total} bytes that "
            f"{'the GPU' if gpu else 'this machine'} has; take a smaller model, or lower "
            "max_model_len or max_num_seqs"
        )


def _default_num_seqs(config: ResolvedConfig, model: ModelConfig, plan: CachePlan) -> int:
    """Default of max_num_seqs. `config` may have 0 there."""
    cache_bytes, card_bytes = config.kv_cache_memory_bytes, 0
    if config.device == "cuda":
        card_bytes = torch.cuda.get_device_properties(0).total_memory
    if config.num_gpu_blocks_override:
        cache_bytes = config.num_gpu_blocks_override * plan.block_bytes
    if not cache_bytes:
        weights = num_weights(model) * getattr(torch, config.dtype).itemsize // config.tensor_parallel_size
        cache_bytes = int(card_bytes * config.gpu_memory_utilization) - weights
    length = min(TOKENS_OF_SHORT_SEQ, config.max_model_len)
    has_many = card_bytes >= LARGE_CARD_BYTES and plan.num_sequences(cache_bytes, length, length) >= MANY_SEQS
    num_seqs = MANY_SEQS if has_many else FEW_SEQS if card_bytes else CPU_SEQS
    row_bytes = plan_states(config, model, plan.block_bytes).bytes_of_sequence
    if row_bytes and not config.num_gpu_blocks_override:
        rows = cache_bytes / row_bytes
        most = max(int(ROWS_SHARE * rows), min(FEW_SEQS, int(FEW_ROWS_SHARE * rows)))
        num_seqs = max(1, min(num_seqs, most))
    return num_seqs


def _longest(model: ModelConfig) -> int:
    """Returns how many positions the model is good for. Scaled rope reaches beyond max_position_embeddings;
    the rule is vLLM's."""
    longest = trained = model.max_position_embeddings
    for rope in {kind.attention.rope for kind in model.layers if kind.attention is not None}:
        if rope is None:
            continue
        scaled = {
            "yarn": rope.original_max_position_embeddings * rope.factor,
            "linear": trained * rope.factor,
            "dynamic": trained * rope.factor,
        }
        longest = max(longest, int(scaled.get(rope.kind, trained)))
    return longest


def _dtype(config: EngineConfig, model: ModelConfig, gpu: bool, quantized: bool) -> str:
    if config.dtype != "auto":
        return ALIASES.get(config.dtype, config.dtype)
    if gpu:
        return "bfloat16" if model.dtype in (None, "float32", "bfloat16") else "float16"
    # One stream in float32 is 6 times as fast as in bfloat16, for which PyTorch has no quick matmul of few
    # rows. So bfloat16 is for models whose weights would not fit otherwise.
    if not quantized and torch.cpu._is_avx512_bf16_supported():
        return "bfloat16" if num_weights(model) * 4 > FLOAT32_SHARE * available_bytes() else "float32"
    return "float32"
