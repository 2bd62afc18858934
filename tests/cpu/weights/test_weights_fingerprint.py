"""Fingerprints: equal for equal weights from any source, different for every change of a token's KV."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.weights.fingerprint import weights_fingerprint
from tests.cpu.weights.test_weights_gguf import write_gguf


@pytest.fixture
def build(root, engine_options):
    """As everywhere, but of any folder under `root`."""
    from shoal import LLM

    engines = []

    def make(name, **options):
        engines.append(LLM(str(root / name), **engine_options | options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.exit()


def of(llm):
    return weights_fingerprint(llm.collective_rpc("checksums"), llm.core.model_config)


def copy_of(folder, target, change=lambda name, weight: weight):
    shutil.copytree(folder, target)
    weights = {
        name: change(name, weight).contiguous()
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_the_same_weights_under_two_paths_agree_and_one_changed_number_does_not(
    build, root, folder, tmp_path
):
    def nudge(name, weight):
        if name == "model.layers.1.mlp.up_proj.weight":
            weight = weight.clone()
            weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
        return weight

    found = of(build("qwen3"))
    assert len(found) == 16
    moved, tuned = copy_of(folder, root / "moved"), copy_of(folder, root / "tuned", nudge)
    for path in (moved, tuned):
        (path / "complete").touch()
    assert of(build("moved")) == found != of(build("tuned"))


def test_an_update_changes_it_and_a_return_brings_it_back(build, folder, root):
    llm = build("qwen3")
    before = of(llm)
    llm.update_weights_from_tensors({"model.norm.weight": torch.ones(48)})
    assert of(llm) != before
    llm.update_weights(str(folder))
    assert of(llm) == before


def test_the_dtype_of_the_weights_counts(build, folder):
    assert of(build("qwen3")) != of(build("qwen3", dtype="bfloat16"))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_packed_weights_have_fingerprints_of_their_own(build, root, folder, kind):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_gguf(root / f"{name}-{kind}.gguf", "qwen3", kind, seed)
    found = [of(build(f"{name}-{kind}.gguf", dtype="auto", tokenizer=str(folder))) for name in "abc"]
    assert found[0] == found[1] != found[2]


def test_what_the_config_says_of_the_kv_counts_and_the_rest_does_not(build, folder):
    llm = build("qwen3")
    config, sums = llm.core.model_config, llm.collective_rpc("checksums")
    found = weights_fingerprint(sums, config)
    for changed in (
        replace(config, rope=replace(config.rope, theta=1e6)),
        replace(config, rms_norm_eps=1e-3),
        replace(config, num_kv_heads=1),
        replace(config, windows=(8,) * config.num_layers),
    ):
        assert weights_fingerprint(sums, changed) != found
    assert (
        weights_fingerprint(sums, replace(config, eos_token_ids=(1,), max_position_embeddings=99, dtype=None))
        == found
    )
    shards = [{name: value for name, value in sums[0].items() if "layers" in name}, sums[0]]
    assert weights_fingerprint(shards, config) != weights_fingerprint(shards[::-1], config), (
        "ranks have an order"
    )
