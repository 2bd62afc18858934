"""Engines whose KV cache has fp8 numbers: the oracle is transformers, whose keys and values are rounded by
torch before each attention. Blocks of another dtype or of other scales are never taken for one's own."""

import json
import random
import shutil

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file, save_file

from shoal import LLM, SamplingParams
from shoal.apps.serve import _cache_config
from shoal.config import EngineConfig
from shoal.engine import resolve
from shoal.engine.process.core_main import _describe
from shoal.errors import CheckpointError, ConfigError
from shoal.kv.layout import CacheSpec, Layout
from shoal.kv.tiers.block_file import identity, spec_name
from shoal.weights.kv_scales import kv_scales, name_of
from shoal.weights.loader import check_shapes
from shoal.weights.source import CheckpointFiles
from tests import quantized, tiny
from tests.cpu.engine.test_handover import (
    BLOCKS,
    all_is_given_back,
    blocks_in,
    core_of,
    decode,
    failures,
    prefill,
    request,
    run,
)

LAYERS, KV_HEADS = tiny.COMMON["num_hidden_layers"], tiny.COMMON["num_key_value_heads"]
PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((1, 15, 17, 40, 100))]
FP8 = dict(kv_cache_dtype="fp8")
Scales = dict[str, torch.Tensor]


def greedy(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | options)


def ids_of(outputs):
    return [o.outputs[0].token_ids for o in outputs]


def scales_by_head(factor: float = 1.0) -> Scales:
    """As compressed-tensors names them, one for each head."""
    r = torch.Generator().manual_seed(3)
    return {
        f"model.layers.{i}.self_attn.{kind}_scale": (torch.rand(KV_HEADS, generator=r) + 0.02) * factor
        for i in range(LAYERS)
        for kind in "kv"
    }


def scales_by_layer() -> Scales:
    """As ModelOpt names them, one for each layer."""
    return {
        f"model.layers.{i}.self_attn.{kind}_proj.{kind}_scale": torch.tensor([0.05 + 0.01 * i])
        for i in range(LAYERS)
        for kind in "kv"
    }


def scales_of_both() -> Scales:
    """As AutoFP8 names them, one for each layer's keys and values."""
    both = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor(0.05 + 0.01 * i) for i in range(LAYERS)}
    return both | {"model.layers.0.self_attn.q_scale": torch.tensor(0.5)}  # which is left alone


def with_scales(root, name: str, target, scales: Scales):
    """A copy of a tiny checkpoint, with scales of the cache."""
    shutil.copytree(tiny.write_model(root, name), target)
    file = target / "model.safetensors"
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    return target


def files_of(folder) -> CheckpointFiles:
    return CheckpointFiles(folder)


@pytest.fixture
def oracle(monkeypatch):
    """Gives the log-probabilities of a prompt's tokens, of a model whose attention reads rounded keys and
    values: what is beyond 448 is cut off."""

    def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        scale = scale.view(1, -1, 1, 1)
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    @torch.no_grad()
    def logprobs(folder, kind: str, ids: list[int], scales: torch.Tensor) -> torch.Tensor:
        module = getattr(transformers.models, kind)
        module = getattr(module, f"modeling_{kind}")
        plain = module.eager_attention_forward

        def attend(layer, query, key, value, *args, **kwargs):
            of_keys, of_values = scales[layer.layer_idx]
            return plain(layer, query, rounded(key, of_keys), rounded(value, of_values), *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(module, "eager_attention_forward", attend)
            return tiny.logprobs(folder, ids)

    return logprobs


def logprobs_of(output, ids: list[int]) -> torch.Tensor:
    return torch.tensor(
        [position[token].logprob for token, position in zip(ids[1:], output.prompt_logprobs[1:])]
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("scales", ["none", "by layer", "by head", "of both"])
def test_log_probabilities_are_those_of_rounded_keys_and_values(root, tmp_path, oracle, kind, scales):
    ways = {"by layer": scales_by_layer, "by head": scales_by_head, "of both": scales_of_both}
    given = ways[scales]() if scales in ways else {}
    folder = with_scales(root, kind, tmp_path / "model", given)
    found = kv_scales(files_of(folder))
    assert (found is None) == (scales == "none")
    scales_L2G = torch.ones(LAYERS, 2, KV_HEADS) if found is None else torch.stack(found)
    ids = PROMPTS[-1]
    # transformers does not know the scales' names, and says so
    want = oracle(tiny.write_model(root, kind), kind, ids, scales_L2G).gather(
        1, torch.tensor(ids[1:] + [0])[:, None]
    )
    plain = tiny.logprobs(tiny.write_model(root, kind), ids).gather(1, torch.tensor(ids[1:] + [0])[:, None])
    with LLM(str(folder), dtype="float32", device="cpu", max_model_len=256, **FP8) as llm:
        for options in ({}, {"max_tokens": 1}):
            [output] = llm.generate([ids], greedy(prompt_logprobs=0, **options))
            got = logprobs_of(output, ids)
            off = (got - want[:-1, 0]).abs()
            # A number at the middle of two may be rounded either way, as sums are made in another order.
            assert off.mean() < 2e-3 and off.max() < 0.1, (off.mean(), off.max())
            assert (got - plain[:-1, 0]).abs().mean() > 10 * off.mean(), "rounding shows"


@pytest.mark.parametrize(
    "options",
    [
        dict(async_scheduling=True),
        dict(max_num_batched_tokens=24, max_num_seqs=8),
        dict(block_size=4),
        dict(num_gpu_blocks_override=9, max_model_len=140),
        dict(enable_prefix_caching=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3", "olmo2", "mistral-window"])
def test_tokens_do_not_depend_on_how_the_engine_runs(build, name, options):
    expected = ids_of(build(name, **FP8).generate(PROMPTS, greedy()))
    engine = build(name, **FP8 | options)
    for _ in range(2):  # the second time from the prefix cache
        assert ids_of(engine.generate(PROMPTS, greedy())) == expected


def test_without_a_compiler_the_tokens_are_the_same(build, monkeypatch):
    expected = ids_of(build("qwen3", **FP8).generate(PROMPTS, greedy()))
    monkeypatch.setattr("shoal.kernels.cpu.ops.LIBRARY", None)
    monkeypatch.setattr("shoal.kernels.cpu.build.load", lambda: None)
    assert ids_of(build("qwen3", **FP8).generate(PROMPTS, greedy())) == expected


@pytest.mark.parametrize("value", ["fp8", "fp8_e4m3"])
def test_as_much_memory_holds_four_times_the_blocks_of_float32(build, value):
    plain, fp8 = build(), build(kv_cache_dtype=value)
    assert fp8.stats().num_blocks // 4 == plain.stats().num_blocks
    info = _describe(fp8.core)
    assert info.kv_block_bytes * 4 == _describe(plain.core).kv_block_bytes
    assert _cache_config(fp8.core.config, info)["cache_dtype"] == "float8_e4m3fn"
    assert _cache_config(plain.core.config, _describe(plain.core))["cache_dtype"] == "float32"


def test_an_engine_with_plain_numbers_leaves_scales_alone(build, root, tmp_path):
    folder = with_scales(root, "qwen3", tmp_path / "model", scales_by_head())
    with LLM(str(folder), dtype="float32", device="cpu", max_model_len=256) as llm:
        assert ids_of(llm.generate(PROMPTS, greedy())) == ids_of(build("qwen3").generate(PROMPTS, greedy()))


def test_scales_of_one_are_said_so(root, caplog):
    folder = tiny.write_model(root, "llama")
    for kind in ("fp8", "auto"):
        caplog.clear()
        with LLM(str(folder), dtype="float32", device="cpu", max_model_len=256, kv_cache_dtype=kind):
            assert ("gives no scales" in caplog.text) == (kind == "fp8")


# Bad input


def changed(scales: Scales, name: str, value: torch.Tensor | None) -> Scales:
    return {key: x for key, x in (scales | {name: value}).items() if x is not None}


K0, V2 = "model.layers.0.self_attn.k_scale", "model.layers.2.self_attn.v_scale"


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        (changed(scales_by_head(), V2, None), "lacks v_scale of layer 2"),
        (
            changed(scales_by_head(), K0, torch.ones(3)),
            r"k_scale has shape \[3\].* one number, or one for each of 2",
        ),
        (changed(scales_by_head(), K0, torch.tensor([0.5, 0.0])), "has 0 to 0.5, but scales are positive"),
        (changed(scales_by_head(), K0, torch.tensor([float("nan")])), "scales are positive"),
        (changed(scales_by_head(), K0, torch.tensor([-1.0])), "scales are positive"),
        (
            scales_by_head() | {"model.layers.3.self_attn.k_scale": torch.ones(1)},
            "layer 3, but the model has 3",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_scales_that_are_missing_or_wrong_are_refused_at_start(root, tmp_path, scales, words):
    folder = with_scales(root, "qwen3", tmp_path / "model", scales)
    with pytest.raises(CheckpointError, match=words):
        LLM(str(folder), dtype="float32", device="cpu", max_model_len=256, **FP8)


def test_a_tensor_that_is_no_scale_is_still_refused(root, tmp_path):
    folder = with_scales(
        root, "qwen3", tmp_path / "model", {"model.layers.0.self_attn.k_proj.v_scale": torch.ones(1)}
    )
    with pytest.raises(CheckpointError, match="does not have"):
        check_shapes(files_of(folder))


@pytest.mark.parametrize("backend", ["flashinfer", "flash_attn"])
def test_a_backend_that_cannot_read_it_is_refused_by_name(backend):
    with pytest.raises(ConfigError, match=rf"attention_backend '{backend}' does not read .*'fp8'; leave one"):
        EngineConfig(model="m", attention_backend=backend, **FP8)


@pytest.mark.parametrize("value", ["fp8_e5m2", "int8", "", 8])
def test_another_dtype_is_refused(value):
    with pytest.raises(ConfigError, match=rf"kv_cache_dtype must be one of .*fp8.*, got {value!r}"):
        EngineConfig(model="m", kv_cache_dtype=value)


@pytest.mark.parametrize(("chip", "is_refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_a_gpu_that_does_not_convert_fp8_is_refused(root, monkeypatch, chip, is_refused):
    files = files_of(tiny.write_model(root, "qwen3"))
    config = EngineConfig(model=str(files.folder), device="cuda", **FP8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: chip)
    monkeypatch.setattr(resolve, "_check_memory", lambda *_: None)
    monkeypatch.setattr(resolve, "_default_num_seqs", lambda *_: 8)
    if is_refused:
        with pytest.raises(ConfigError, match=r"needs a GPU that converts fp8.* 8.0; leave it at 'auto'"):
            resolve.resolve_config(config, files.config)
    else:
        assert resolve.resolve_config(config, files.config).kv_cache_dtype == "fp8"


# Blocks of others


def spec(**options) -> CacheSpec:
    return CacheSpec(Layout.WHOLE_BLOCKS, 2, 2, 8, "float8_e4m3fn", 16, **options)


def test_caches_of_other_scales_do_not_go_together_and_say_why():
    one, two = spec(scales="1" * 16), spec(scales="2" * 16)
    assert one.mismatch(spec(scales="1" * 16)) is None and spec().mismatch(spec()) is None
    assert one.mismatch(two) == f"scales is {'1' * 16} on one side and {'2' * 16} on the other"
    assert spec().mismatch(one) == f"scales is none on one side and {'1' * 16} on the other"
    assert len({spec_name(s) for s in (one, two, spec())}) == 3


def test_equal_scales_have_equal_names_on_every_rank():
    scales = torch.rand(3, 2, 4)
    assert name_of(scales) == name_of(scales.clone()) != name_of(scales + 1)


OTHERS = {
    "plain numbers": dict(kv_cache_dtype="auto"),
    "other scales": dict(scales=scales_by_head(0.5)),
    "the same": {},
}


@pytest.fixture
def folders(root, tmp_path):
    """A folder for some scales."""

    def make(scales: Scales):
        target = tmp_path / name_of(torch.cat(list(scales.values())))
        return target if target.exists() else with_scales(root, "qwen3", target, scales)

    return make


@pytest.mark.parametrize("kind", OTHERS)
def test_a_worker_reads_only_blocks_that_mean_the_same(folders, kind):
    options = {"scales": scales_by_head(), **FP8} | OTHERS[kind]
    lender = core_of(folders(scales_by_head()), "kv_producer", **FP8)
    reader = core_of(folders(options.pop("scales")), "kv_consumer", **options)
    try:
        # so that nothing but the caches differs, as checkpoints that differ in scales alone may have one name
        reader.ranks.runner.peers.name_model(lender.ranks.runner.peers._peers.model)
        [expected] = run(reader, request("alone"))
        assert reader.reset_prefix_cache()
        first = prefill(lender)
        rest = decode(reader, first)
        if kind == "the same":
            assert first.tokens + rest.tokens == expected.tokens
            assert blocks_in(reader) == BLOCKS and not failures(reader)
        else:
            assert blocks_in(reader) == 0 and failures(reader) == {"incompatible": 1}
        all_is_given_back(lender, reader)
    finally:
        lender.exit()
        reader.exit()


@pytest.mark.parametrize("kind", OTHERS)
def test_a_disk_gives_only_blocks_that_mean_the_same(folders, tmp_path, kind):
    disk = dict(kv_disk_path=str(tmp_path / "kv"), kv_disk_bytes=64 << 20, kv_load_policy="always")
    base = dict(dtype="float32", device="cpu", max_model_len=192)
    prompt = PROMPTS[-1]

    def answer(folder, **options):
        with LLM(str(folder), **base | options) as llm:
            [output] = llm.generate([prompt], greedy())
            return output.outputs[0].token_ids, output.num_cached_tokens

    assert answer(folders(scales_by_head()), **FP8, **disk)[1] == 0
    options = {"scales": scales_by_head(), **FP8} | OTHERS[kind]
    folder = folders(options.pop("scales"))
    tokens, cached = answer(folder, **options, **disk)
    assert cached == (96 if kind == "the same" else 0)
    assert tokens == answer(folder, **options)[0]
    with LLM(str(folders(scales_by_head())), **base | FP8 | disk) as llm:
        assert llm.stats().kv_tiers["disk"].used_bytes > 0, "the first one's blocks are still there"
        assert llm.generate([prompt], greedy())[0].num_cached_tokens == 96


def test_blocks_come_back_from_host_memory_as_they_were(build):
    options = dict(num_gpu_blocks_override=14, max_model_len=192, kv_load_policy="always", **FP8)
    prompts = [random.Random(i).choices(range(256), k=100) for i in range(9)]
    expected = ids_of(build(max_model_len=192, **FP8).generate(prompts, greedy()))
    llm = build(kv_host_bytes=16 << 20, **options)
    for cached in (0, 96):
        for prompt, tokens in zip(prompts, expected):
            [output] = llm.generate([prompt], greedy())
            assert (output.outputs[0].token_ids, output.num_cached_tokens) == (tokens, cached)
    assert llm.stats().kv_tiers["host"].fetched_blocks >= 40


def test_the_identity_of_a_plain_cache_has_no_scales_so_that_disks_of_before_stay_of_use():
    plain = CacheSpec(Layout.WHOLE_BLOCKS, 2, 2, 8, "float32", 16)
    assert identity(plain) == ["whole_blocks", 2, 2, 8, "float32", 16, 1, 0]


# Sleep and new weights


def test_it_sleeps_and_wakes(build):
    llm = build(enable_sleep_mode=True, **FP8)
    expected = ids_of(llm.generate(PROMPTS, greedy()))
    for level in (1, 2):
        llm.sleep(level=level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(llm.core.config.model)
        assert ids_of(llm.generate(PROMPTS, greedy())) == expected


def test_weights_with_other_scales_are_another_model(folders):
    first, other = folders(scales_by_head()), folders(scales_by_head(0.25))
    options = dict(dtype="float32", device="cpu", max_model_len=256, **FP8)
    with LLM(str(other), **options) as llm:
        expected = ids_of(llm.generate(PROMPTS, greedy()))
    with LLM(str(first), enable_sleep_mode=True, **options) as llm:
        assert llm.update_weights(first) == 1
        name = llm.core.ranks.runner.cache.plan.specs[0].scales
        llm.sleep(level=2)
        llm.update_weights(other)
        llm.wake_up()
        assert llm.core.ranks.runner.cache.plan.specs[0].scales != name
        assert ids_of(llm.generate(PROMPTS, greedy())) == expected


# Checkpoints of compressed-tensors


SCHEME = QuantizationArgs(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)


@pytest.fixture
def quantized_folder(tmp_path):
    """A checkpoint with fp8 weights whose config has this kv_cache_scheme."""

    def make(scheme):
        quantized.write(tmp_path, "fp8-channel")
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"]["kv_cache_scheme"] = scheme
        (tmp_path / "config.json").write_text(json.dumps(config))
        file = tmp_path / "model.safetensors"
        layers, tensors = config["num_hidden_layers"], load_file(file)
        names = [f"model.layers.{i}.self_attn.{kind}_scale" for i in range(layers) for kind in "kv"]
        save_file(tensors | {name: torch.tensor([0.125]) for name in names}, file, metadata={"format": "pt"})
        return tmp_path

    return make


def test_a_checkpoint_with_fp8_weights_brings_the_scales_of_its_cache(quantized_folder):
    folder = quantized_folder(SCHEME.model_dump(mode="json"))
    assert all((scales_2G == 0.125).all() for scales_2G in kv_scales(files_of(folder)))
    with LLM(str(folder), device="cpu", max_model_len=256, **FP8) as llm:
        caches = llm.core.ranks.runner.cache.layers
        assert all((cache.scales_2G == 0.125).all() for cache in caches)
        [output] = llm.generate(PROMPTS[-1:], greedy(prompt_logprobs=0))
    assert logprobs_of(output, PROMPTS[-1]).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"num_bits": 4}, "num_bits 4"), ({"type": "int"}, "type 'int'"), ({"dynamic": True}, "dynamic True")],
    ids=str,
)
def test_another_scheme_for_the_cache_is_refused(quantized_folder, changes, words):
    folder = quantized_folder(SCHEME.model_dump(mode="json") | changes)
    with pytest.raises(CheckpointError, match=rf"kv_cache_scheme.*{words} is not supported"):
        assert files_of(folder).config is None


@pytest.mark.parametrize("scheme", ["fp8", [1], 8])
def test_a_scheme_that_is_none_is_refused(quantized_folder, scheme):
    with pytest.raises(CheckpointError, match=r"kv_cache_scheme .* is not supported"):
        assert files_of(quantized_folder(scheme)).config is None
