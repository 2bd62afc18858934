"""MTP heads of published forms in an engine: they draft what `transformers` makes of the same files, and tokens are
those without drafts."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.api import Request
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.errors import CheckpointError, ConfigError
from shoal.sampling_params import SamplingParams
from shoal.weights.source import resolve
from tests import tiny
from tests.mtp_heads import NEAR_LAST, QWENS, MtpOracle, write_mtp

K = 3
PROMPT = list(range(40, 75))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def build():
    cores = []

    def make(path, k=K, **options):
        defaults = dict(
            dtype="float32",
            device="cpu",
            max_model_len=128,
            max_num_seqs=1,
            kv_cache_memory_bytes=8 << 20,
            speculative_config=dict(
                method="mtp", num_speculative_tokens=k, enable_adaptive_verification=False
            ),
        )
        cores.append(EngineCore(EngineConfig(model=str(path), **defaults | options), resolve(str(path))))
        return cores[-1]

    yield make
    for core in cores:
        core.exit()


def answer(core, prompt, n, each_step=lambda tokens: None):
    core.add(Request("a", prompt, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)))
    found = []
    while core.has_work:
        found += [token for output in core.step() for token in output.token_ids]
        if found:
            each_step(found)
    return found


@pytest.mark.parametrize("name", [*NEAR_LAST, *QWENS])
def test_drafts_are_those_of_transformers_head(name, root, build):
    """After prompts in chunks and from the prefix cache, and after steps whose drafts are wrong."""
    folder = write_mtp(root, name)
    oracle, core = MtpOracle(folder), build(folder, max_num_batched_tokens=16)
    drafts_RK, compared = core.ranks.runner.drafting.rows.drafts_RK, []

    def compare(tokens):
        if len(tokens) < 12:
            compared.append(drafts_RK[0].tolist())
            assert compared[-1] == oracle.drafts(PROMPT + tokens, K), len(tokens)

    want = tiny.greedy(folder, PROMPT, 12)
    for _ in range(2):
        assert answer(core, PROMPT, 12, compare) == want
    assert len(compared) >= 10


def test_a_model_without_a_head_is_refused_by_name(root, build):
    with pytest.raises(ConfigError, match=r"speculative_config\.method must not be 'mtp'.*no MTP head"):
        build(tiny.write_model(root, "llama"))


def test_by_default_a_head_drafts_one_token(root, build):
    assert build(write_mtp(root, "glm4-moe"), None).config.speculative.num_speculative_tokens == 1


def test_the_target_alone_does_without_the_head(root, build):
    folder = write_mtp(root, "qwen3.5")
    core = build(folder, speculative_config=None)
    assert len(core.ranks.runner.cache.layers) == 4
    assert answer(core, PROMPT, 12) == tiny.greedy(folder, PROMPT, 12)


def test_copies_of_the_targets_vocabulary_are_not_loaded_again(root, build, tmp_path):
    """Published heads of DeepSeek repeat the embedding and the output head; one that has others keeps them."""
    folder = write_mtp(root, "glm4-moe")
    module = build(folder).ranks.runner.head.module
    assert module.embed_tokens is None and module.lm_head is None
    shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.shared_head.head.weight"] *= -1
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    own = build(tmp_path / "other").ranks.runner.head.module.lm_head
    assert (own.plain_weight() == -tensors["lm_head.weight"]).all()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: tensors.pop("mtp.norm.weight"), "MTP head lacks model.norm.weight"),
        (lambda tensors: tensors.update({"mtp.fc.bias": torch.zeros(48)}), "MTP head holds model.fc.bias"),
        (
            lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(48, 48)}),
            r"model\.fc\.weight of its MTP head has shape \[48, 48\]",
        ),
    ],
    ids=["missing", "surplus", "shape"],
)
def test_files_that_do_not_fit_are_refused_by_the_tensors_name(change, message, root, build, tmp_path):
    folder = write_mtp(root, "qwen3.5")
    shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message) as caught:
        build(tmp_path / "other")
    assert str(tmp_path / "other") in str(caught.value)
