"""Options: which values are possible, and what is decided once model and machine are known."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from shoal import LLM, EngineArgs, SamplingParams
from shoal.cli import option_tables
from shoal.config import EngineConfig, KVEventsConfig, ResolvedConfig, ServerConfig, StructuredOutputsConfig
from shoal.engine import resolve as resolve_module
from shoal.engine.resolve import resolve_config
from shoal.engine.runner.cache_plan import plan_cache
from shoal.engine.runner.state_rows import plan_states
from shoal.errors import ConfigError
from shoal.models.config_json import config_from_json
from shoal.server.apis.protocol import SamplingFields

QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}


def resolve(**options):
    return resolve_config(EngineConfig(device="cpu", **options), config_from_json(QWEN, "config.json"))


def test_a_context_of_millions_is_to_be_asked_for():
    """Regression: Llama 4 Scout's default was 10 million positions, whose tables took 16 GB of a card."""
    model = config_from_json(QWEN | {"max_position_embeddings": 10_485_760}, "config.json")
    for asked, resolved in ((None, 1 << 20), (10_485_760, 10_485_760)):
        config = EngineConfig(device="cpu", load_format="dummy", max_model_len=asked)
        assert resolve_config(config, model).max_model_len == resolved


@pytest.mark.parametrize(
    ("config", "name", "bad", "limit"),
    [
        (EngineConfig, "max_model_len", 0, "from 1 to 2^63 - 1"),
        (EngineConfig, "max_model_len", 2**63, "from 1 to 2^63 - 1"),
        (EngineConfig, "max_num_seqs", 65537, "from 1 to 65536"),
        (EngineConfig, "max_num_batched_tokens", True, "from 1"),
        (EngineConfig, "kv_disk_bytes", "5", "from 1"),
        (EngineConfig, "tensor_parallel_size", None, "from 1"),
        (EngineConfig, "max_logprobs", -2, "from -1"),
        (EngineConfig, "kv_host_bytes", 1.5, "from 0"),
        (EngineConfig, "block_size", 24, "power of two"),
        (EngineConfig, "gpu_memory_utilization", 0, "(0, 1]"),
        (EngineConfig, "gpu_memory_utilization", 1.01, "(0, 1]"),
        (EngineConfig, "gpu_memory_utilization", math.nan, "(0, 1]"),
        (EngineConfig, "kv_flush_timeout", -1, "[0, inf)"),
        (EngineConfig, "kv_flush_timeout", math.inf, "[0, inf)"),
        (EngineConfig, "kv_flush_timeout", 10**400, "[0, inf)"),
        (EngineConfig, "dtype", "int8", "auto, float32, float16"),
        (EngineConfig, "device", "tpu", "auto, cpu, cuda"),
        (EngineConfig, "kv_load_policy", None, "cost, always"),
        (EngineConfig, "enable_prefix_caching", "no", "must be True or False, got 'no'"),
        (EngineConfig, "enforce_eager", None, "must be True or False, got None"),
        (EngineConfig, "async_scheduling", 2, "must be True or False, got 2"),
        (EngineConfig, "seed", "x", "must be an integer, got 'x'"),
        (ServerConfig, "port", 65536, "from 0 to 65535"),
        (ServerConfig, "admin_port", -1, "from 0 to 65535"),
        (ServerConfig, "max_body_bytes", 1023, "from 1024"),
        (ServerConfig, "request_timeout", 0, "(0, inf)"),
        (ServerConfig, "read_timeout", None, "(0, inf)"),
        (ServerConfig, "shutdown_timeout", -0.1, "[0, inf)"),
        (ServerConfig, "log_format", "xml", "text, json"),
    ],
)
def test_a_value_outside_its_limits_is_named_with_them(config, name, bad, limit):
    with pytest.raises(ConfigError) as error:
        config(**{name: bad})
    message = str(error.value)
    assert message.startswith(f"{name} ") and limit in message and "\n" not in message


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (EngineConfig, dict(gpu_memory_utilization=1, kv_flush_timeout=0, max_logprobs=-1, block_size=256)),
        (EngineConfig, dict(max_model_len=None, kv_offload_bandwidth=None, max_num_seqs=65536)),
        (ServerConfig, dict(port=0, admin_port=None, request_timeout=None, shutdown_timeout=0)),
    ],
)
def test_values_at_their_limits_are_possible(config, options):
    built = config(**options)
    assert {name: getattr(built, name) for name in options} == options


@pytest.mark.parametrize(
    ("supported", "share", "dtype"),
    [(True, 0.1, "float32"), (True, 0.9, "bfloat16"), (False, 0.9, "float32")],
    ids=["room", "little memory", "unsupported"],
)
def test_a_cpu_computes_in_float32_unless_only_bfloat16_fits(monkeypatch, supported, share, dtype):
    """Regression: bfloat16 was chosen on each processor that supports it, where one stream takes 6 times as
    long."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    free = 1 << 33  # `share` of it in float32
    monkeypatch.setattr(resolve_module, "available_bytes", lambda: free)
    monkeypatch.setattr(resolve_module, "total_bytes", lambda: 2 * free)
    monkeypatch.setattr(resolve_module, "num_weights", lambda _: int(share * free / 4))
    assert resolve().dtype == dtype


def test_a_resolved_config_has_decided_what_depends_on_model_and_machine():
    resolved = resolve()
    assert type(resolved) is ResolvedConfig
    decided = {f.name: getattr(resolved, f.name) for f in dataclasses.fields(ResolvedConfig) if f.kw_only}
    assert decided.pop("dtype") == "float32"
    assert decided == {
        "device": "cpu",
        "max_model_len": 512,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "kv_cache_memory_bytes": 1 << 30,
        "num_gpu_blocks_override": 0,
        "kv_disk_bytes": 0,
        "async_scheduling": False,
        "target_itl_ms": 0.0,
        "kv_events_config": KVEventsConfig(),
        "structured_outputs_config": StructuredOutputsConfig(),
        "keep_quantized": False,
        "quantizes_weights": False,
        "speculative": None,
    }


def pretend_cards(monkeypatch, num_bytes):
    """Makes torch report two GPUs with `num_bytes` of memory, all of it free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    card = SimpleNamespace(total_memory=num_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (num_bytes, num_bytes))


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    pretend_cards(monkeypatch, 80 << 30)
    config = EngineConfig(device="cuda", tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="tensor_parallel_size 4 > 2 GPUs here; lower it"):
        resolve_config(config, config_from_json(QWEN, "config.json"))


@pytest.mark.parametrize(
    ("card_gib", "options", "expected"),
    [
        (140, {}, 1024),
        (79, {}, 1024),
        (48, {}, 256),
        (140, dict(max_num_seqs=300), 300),
        (48, dict(max_num_seqs=2000), 2000),
        # the cache of the two layers below takes 256 bytes a token
        (140, dict(kv_cache_memory_bytes=1024 * 256 * 256), 1024),
        (140, dict(kv_cache_memory_bytes=1024 * 256 * 256 - 1), 256),
        (140, dict(kv_cache_memory_bytes=1024 * 64 * 256, max_model_len=64), 1024),
        (140, dict(num_gpu_blocks_override=1024 * 256 // 16), 1024),
        (140, dict(num_gpu_blocks_override=1024 * 256 // 16 - 1), 256),
    ],
)
def test_a_large_card_runs_as_many_sequences_at_once_as_its_cache_holds(
    monkeypatch, card_gib, options, expected
):
    pretend_cards(monkeypatch, card_gib << 30)
    config = EngineConfig(device="cuda", **options)
    assert resolve_config(config, config_from_json(QWEN, "config.json")).max_num_seqs == expected


def test_a_large_model_leaves_less_room_for_sequences(monkeypatch):
    pretend_cards(monkeypatch, 79 << 30)
    shape = dict(
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
    )
    model = config_from_json(QWEN | shape, "config.json")
    found = [
        resolve_config(EngineConfig(device="cuda", tensor_parallel_size=size), model).max_num_seqs
        for size in (1, 2)
    ]
    assert found == [256, 1024]  # a card has 6 GiB left, or 36


@pytest.mark.parametrize(
    "cache_rows, expected", [(100, 50), (400, 200), (600, 256), (2000, 500), (9000, 1024)]
)
def test_rows_of_states_take_half_of_the_cache_for_few_sequences_and_a_quarter_for_more(
    monkeypatch, cache_rows, expected
):
    pretend_cards(monkeypatch, 140 << 30)
    family = dict(model_type="qwen3_5_text", architectures=["Qwen3_5ForCausalLM"], num_hidden_layers=4)
    model = config_from_json(QWEN | family, "config.json")
    config = resolve_config(EngineConfig(device="cuda"), model)
    row = plan_states(config, model, plan_cache(config, model).block_bytes).bytes_of_sequence
    given = EngineConfig(device="cuda", kv_cache_memory_bytes=cache_rows * row)
    assert resolve_config(given, model).max_num_seqs == expected


def test_what_is_given_is_kept():
    given = dict(
        dtype="half",
        max_model_len=100,
        max_num_seqs=3,
        kv_disk_path="/x",
        kv_disk_bytes=7,
        async_scheduling=True,
    )
    resolved = resolve(**given)
    assert {name: getattr(resolved, name) for name in given} == given | {"dtype": "float16"}


def test_a_resolved_config_reaches_another_rank_as_it_is():
    resolved = resolve(kv_events_config={"enable_kv_cache_events": True}, cudagraph_capture_sizes=[1, 2])
    assert ResolvedConfig(**dataclasses.asdict(resolved)) == resolved


@pytest.mark.parametrize(
    ("dtype", "quantized_bytes", "kept"),
    [("auto", 1000, True), ("float32", 1000, False), ("auto", None, False)],
)
def test_quantized_weights_stay_so_on_the_cpu_unless_a_dtype_is_named(dtype, quantized_bytes, kept):
    config = EngineConfig(device="cpu", dtype=dtype)
    resolved = resolve_config(config, config_from_json(QWEN, "config.json"), quantized_bytes)
    assert resolved.keep_quantized is kept


# What is said about options comes from their fields


def test_the_page_of_options_says_what_the_fields_say():
    assert option_tables.PAGE.read_text("utf-8") == option_tables.page(), (
        "run `python -m shoal.cli.option_tables`"
    )


@pytest.mark.parametrize("what", [LLM, EngineArgs])
def test_the_documentation_of_what_takes_options_names_each_with_its_meaning(what):
    for field in dataclasses.fields(EngineConfig):
        assert f"\n    {field.name}: " in what.__doc__ and field.metadata["help"] in what.__doc__


def test_a_request_over_http_may_have_every_sampling_parameter():
    """Except `detokenize`; each endpoint has its own `logprobs`."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(SamplingFields.__struct_fields__) == names - {"detokenize", "logprobs"}
