"""Fingerprints: equal for equal weights from any source, different for every change of a token's KV."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.kinds.rope import RopeConfig
from shoal.models.config_json import config_from_json
from shoal.weights.fingerprint import weights_fingerprint
from tests.cpu.models.test_model_config import PUBLISHED
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
    return weights_fingerprint(llm.collective_rpc("checksums"), llm.core.model_config, 512)


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
    found = weights_fingerprint(sums, config, 512)
    for changed in (
        config.with_attention(rope=RopeConfig(theta=1e6)),
        replace(config, rms_norm_eps=1e-3),
        config.with_attention(num_kv_heads=1),
        config.with_attention(window=8),
        replace(config, layers=(config.layers[0].with_attention(window=8), *config.layers[1:])),
        replace(config, layers=(config.layers[0].with_attention(num_heads=1), *config.layers[1:])),
    ):
        assert weights_fingerprint(sums, changed, 512) != found
    assert (
        weights_fingerprint(
            sums, replace(config, eos_token_ids=(1,), max_position_embeddings=99, dtype=None), 512
        )
        == found
    )
    shards = [{name: value for name, value in sums[0].items() if "layers" in name}, sums[0]]
    assert weights_fingerprint(shards, config, 512) != weights_fingerprint(shards[::-1], config, 512), (
        "ranks have an order"
    )


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(1e4, "longrope", 2.0, 64, factors=(1.0, 2.0), long_factors=(3.0, 4.0)),
        RopeConfig(1e4, "dynamic", 2.0, 64),
    ],
    ids=["longrope", "dynamic"],
)
def test_the_engines_length_counts_where_ropes_depend_on_it(rope):
    """Regression: an engine read KV that one with longrope's other table had written to a disk or lent."""
    config = config_from_json(PUBLISHED["Qwen3-0.6B"], "config.json").with_attention(rope=rope)
    found = [weights_fingerprint([], config, length) for length in (32, 64, 65, 128)]
    assert found[0] == found[1] != found[2]
    assert (found[2] == found[3]) == (rope.kind == "longrope")


# Fingerprints that engines have written to disks, for configs of published models with some changes.
WRITTEN = [
    ("Llama-3.2-1B", {}, "1829d00f78f6559d218c30d31a5260c4"),
    ("Qwen2.5 with the yarn of its model card", {}, "eb5be3fa8174216ef24912c2defdbdab"),
    ("Qwen3-0.6B", {}, "95a7eba3d4b33eb541a16881ceece944"),
    ("Mistral-7B-v0.1", {}, "d30562bcdee46175817a3fe6a7f92037"),
    ("Qwen3-30B-A3B", {}, "b4776732c617ea4980db3dfe0c9cfa54"),
    ("OLMo-2-1124-7B", {}, "7a5e4f1d12ea56f420e82141bcd1b41a"),
    ("granite-3.1-8b-instruct", {}, "0cbe72e7d2f2feaa5689f1166f587204"),
    ("Qwen3-30B-A3B", dict(decoder_sparse_step=2), "473e206acad06683bb38118bd603c248"),
    ("Qwen3-30B-A3B", dict(mlp_only_layers=[0, 1]), "7050d5b7fa05719d7dcce17b92af0e2d"),
    ("Qwen3-30B-A3B", dict(decoder_sparse_step=4, mlp_only_layers=[3]), "e1d3d5950bb4ce5eca9a6af9ee726616"),
    (
        "Qwen3-0.6B",
        dict(use_sliding_window=True, sliding_window=1024, max_window_layers=20),
        "2bf85c6dc235a5619026798ad59b51ae",
    ),
]

SMALL = dict(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    sliding_window=32,
)
# The same for kinds of attention that are listed whole, in one field or layer by layer.
WRITTEN_KINDS = [
    (
        "GptOssForCausalLM",
        dict(num_local_experts=4, num_experts_per_tok=2),
        "ebde67fa277cc15b6a4752105f9441eb",
    ),
    ("Gemma2ForCausalLM", dict(query_pre_attn_scalar=16), "a118535552a1ddfd8f4ccb34a19019cf"),
    ("Cohere2ForCausalLM", {}, "0a739200cd932bcc9cdb712e28d40bb5"),
]


@pytest.mark.parametrize(("name", "changes", "written"), WRITTEN)
def test_kv_that_an_earlier_version_wrote_is_found(name, changes, written):
    config = config_from_json(PUBLISHED[name] | changes, name)
    assert weights_fingerprint([{"model.norm.weight": "0123456789abcdef"}], config, 512).hex() == written


@pytest.mark.parametrize(("architecture", "changes", "written"), WRITTEN_KINDS)
def test_kv_of_listed_attention_is_found(architecture, changes, written):
    """Regression: a new field of AttentionKind renamed the KV of all models whose attention is listed."""
    config = config_from_json(SMALL | dict(architectures=[architecture]) | changes, architecture)
    assert weights_fingerprint([{"model.norm.weight": "0123456789abcdef"}], config, 512).hex() == written
