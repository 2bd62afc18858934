"""The floor is the one by which the peers were measured; small cases are reckoned by hand."""

import importlib.util
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import transformers
from transformers import masking_utils

from shoal.bench.floor import Ceilings, Floor, LayerWork
from shoal.model_config import ModelConfig
from shoal.models.config_json import config_from_json
from tests import tiny, tiny_families

spec = importlib.util.spec_from_file_location(
    "workloads", Path(__file__).parents[3] / "benchmarks" / "workloads.py"
)
workloads = importlib.util.module_from_spec(spec)
spec.loader.exec_module(workloads)

H200 = Ceilings(4.28e12, 680e12)


def model(shape: str) -> ModelConfig:
    return config_from_json(workloads.SHAPES[shape], shape)


@pytest.mark.parametrize(
    ("shape", "workload", "seconds"),
    [
        ("qwen3-0.6b", "nano", 3.77),
        ("qwen3-0.6b", "single", 0.159),
        ("qwen3-0.6b", "prefill", 0.2606),
        ("qwen3-0.6b", "decode", 2.11),
        ("qwen3-0.6b", "shared", 0.17),
        ("qwen3-8b", "nano", 11.25),
        ("qwen3-8b", "single", 1.843),
        ("qwen3-8b", "prefill", 2.913),
        ("qwen3-8b", "decode", 6.57),
        ("qwen3-8b", "shared", 1.23),
    ],
)
def test_floors_are_those_of_the_comparison(shape, workload, seconds):
    prompts, outputs = workloads.workload(workload)
    floor = (
        Floor(model(shape), H200)
        .run([len(p) for p in prompts], outputs, 256, 2048 if workload == "shared" else 0)
        .seconds
    )
    assert floor == pytest.approx(seconds, rel=0.02)


TINY = dict(
    architectures=["Qwen3MoeForCausalLM"],
    vocab_size=10,
    hidden_size=4,
    intermediate_size=8,
    num_hidden_layers=1,
    head_dim=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)


def test_experts_are_read_when_tokens_choose_them():
    config = config_from_json(
        dict(TINY, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=4), "tiny"
    )
    floor = Floor(config, Ceilings(1.0, 1e30))
    dense, expert = 2 * (4 * 2 * 2 * 3 + 4 * 8 + 4 * 10), 2 * 3 * 4 * 4
    assert floor.decode([0]).seconds == dense + 2 * expert
    assert floor.decode([0] * 100).seconds == pytest.approx(dense + 8 * expert)


def test_mlps_without_gates_have_two_matrices():
    """The published Nemotron 3 Nano has 31.6 billion weights, of which embeddings are left out here."""
    nemotron = model("nemotron-3-nano-30b")
    works = [LayerWork.of(nemotron, kind) for kind in nemotron.layers]
    weights = sum(work.dense + work.expert * work.num_experts for work in works)
    assert weights + 2 * nemotron.hidden_size * nemotron.vocab_size == pytest.approx(31.6e9, rel=0.005)


def test_matmuls_in_fp8_take_half_of_the_time():
    floor, halved = (Floor(model("qwen3-8b"), H200, matmul_rate=rate).prefill(4096) for rate in (1, 2))
    assert halved.operations == floor.operations
    attention = 36 * 4 * 32 * 128 * 4096 * 4097 // 2 / 680e12
    assert halved.seconds - attention == pytest.approx((floor.seconds - attention) / 2)


def test_requests_wait_for_a_place():
    floor = Floor(model("qwen3-0.6b"), H200)
    together, in_turn = floor.run([100] * 4, [50] * 4, 4).seconds, floor.run([100] * 4, [50] * 4, 1).seconds
    assert in_turn == pytest.approx(4 * floor.run([100], [50], 1).seconds) and together < in_turn / 3


def test_a_prefill_after_cached_tokens_is_the_rest_of_the_whole():
    floor = Floor(model("qwen3-0.6b"), H200)
    parts = floor.prefill(2000) + floor.prefill(1000, 2000)
    assert floor.prefill(3000).seconds + floor.prefill(0).seconds == pytest.approx(parts.seconds)


def test_layers_with_wide_mlps_and_keys_of_other_layers_count_as_they_are():
    """Regression: MLPs of double width counted as those of other layers, and layers without keys and values
    as if they had some."""
    name, values, _ = tiny_families.FAMILIES["gemma4-shared"]
    published = getattr(transformers, name)(**values)
    published.text_config.vocab_size = tiny.VOCAB
    config = config_from_json(
        dict(published.to_dict(), architectures=["Gemma4ForConditionalGeneration"]), "tiny"
    )
    with torch.device("meta"):
        layers = transformers.AutoModelForCausalLM.from_config(published.text_config)
    weights = sum(
        module.weight.numel()
        for name, module in layers.named_modules()
        if isinstance(module, torch.nn.Linear) and "embed" not in name
    )
    floor = Floor(config, Ceilings(1.0, 1e30))
    own = [kind.attention for kind in config.layers if kind.attention.kv_layer is None]
    numbers = sum(2 * kind.num_kv_heads * kind.head_dim for kind in own)
    assert len(own) == 6
    assert floor.decode([0]).seconds == 2 * weights
    assert floor.decode([1]).seconds == 2 * (weights + numbers)


def test_shared_keys_are_read_by_the_sequence_that_sees_most_of_them():
    """Regression: where the first sequence's window was past the shared keys, no sequence read them."""
    config = config_from_json(
        dict(TINY, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=8), "tiny"
    )
    floor = Floor(config, Ceilings(1.0, 1e30))
    weights, number = floor.decode([]).seconds, 2 * 2 * 2
    assert floor.decode([40, 10, 12], shared=8).seconds == weights + number * (8 + 8 + 8 - 4)


@pytest.mark.parametrize("in_chunks", [False, True])
def test_tokens_see_what_their_windows_or_chunks_show(in_chunks):
    """Regression: chunks of positions counted as windows, so a token saw a whole chunk at any position."""
    window, length = 8, 21
    if in_chunks:
        shows = masking_utils.chunked_causal_mask_function(window, torch.zeros(1, dtype=torch.int))
    else:
        shows = masking_utils.sliding_window_causal_mask_function(window)
    layer = LayerWork(0, 0, 0, 0, 1, 1, window, in_chunks=in_chunks)
    seen = shows(0, 0, torch.arange(length)[:, None], torch.arange(length)).sum(1).tolist()
    assert [layer.seen(keys) for keys in range(length + 1)] == [0, *seen]
    assert [layer.pairs(tokens) for tokens in range(length + 1)] == [*accumulate(seen, initial=0)]


def test_the_layers_of_llama4_see_their_chunks():
    name, values, _ = tiny_families.FAMILIES["llama4"]
    published = getattr(transformers, name)(**values).to_dict()
    config = config_from_json(dict(published, architectures=["Llama4ForCausalLM"]), "tiny")
    floor = Floor(config, Ceilings(1.0, 1e30))
    chunk, per_token = values["attention_chunk_size"], 2 * 2 * config.layers[0].attention.num_kv_heads * 16
    first, second = (floor.decode([length]).bytes_moved for length in (chunk, chunk + 1))
    in_chunks = sum(kind.attention.in_chunks for kind in config.layers)
    assert in_chunks
    assert second - first == per_token * (len(config.layers) - in_chunks - in_chunks * (chunk - 1))
