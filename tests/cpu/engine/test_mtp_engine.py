"""MTP heads of published forms in an engine: they draft what `transformers` makes of the same files, and tokens are
those without drafts."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.api import Request
from shoal.engine.runner import commands
from shoal.engine.runner.start_up import rehearse
from shoal.errors import CheckpointError, ConfigError
from shoal.kernels.state import Field
from shoal.sampling_params import SamplingParams
from tests import mtp_chains, quantized, tiny
from tests.eagle3_heads import follow, ring
from tests.mtp_heads import (
    ERNIE,
    NEAR_LAST,
    NEMOTRONS,
    PROMPT,
    QWENS,
    K,
    LayersOracle,
    MtpOracle,
    answer,
    make_core,
    write_mtp,
)

pytestmark = pytest.mark.usefixtures("quick_starts")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def build():
    cores = []

    def make(path, k=K, **options):
        cores.append(make_core(path, k, **options))
        return cores[-1]

    yield make
    for core in cores:
        core.exit()


@pytest.mark.parametrize(
    "name, ranks",
    [*((name, 1) for name in (*NEAR_LAST, *QWENS, *NEMOTRONS, ERNIE)), ("glm4-flash", 2), ("qwen3.5-moe", 2)],
)
def test_drafts_are_those_of_transformers_head(name, ranks, root, build):
    """After prompts in chunks and from the prefix cache, and after steps whose drafts are wrong."""
    folder = write_mtp(root, name)
    oracle = (LayersOracle if name in (*NEMOTRONS, ERNIE) else MtpOracle)(folder)
    core = build(folder, max_num_batched_tokens=16, tensor_parallel_size=ranks)
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


def of_two_blocks(root, name, target):
    """The checkpoint with a second block of other numbers after the head's."""
    shutil.copytree(write_mtp(root, name), target)
    tensors, config = (
        load_file(target / "model.safetensors"),
        json.loads((target / "config.json").read_text()),
    )
    number = config["num_hidden_layers"]
    prefixes = {f"model.layers.{number}.": f"model.layers.{number + 1}.", "mtp.layers.0.": "mtp.layers.1."}
    prefixes |= {f"model.mtp_{own}.0.": f"model.mtp_{own}.1." for own in ("block", "emb_norm", "hidden_norm")}
    prefixes["model.mtp_linear_proj.0."] = "model.mtp_linear_proj.1."
    for key, tensor in [*tensors.items()]:
        for prefix, other in prefixes.items():
            if key.startswith(prefix):
                tensors[key.replace(prefix, other)] = tensor * -2
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    key = "mtp_num_hidden_layers" if name in QWENS else "num_nextn_predict_layers"
    (target / "config.json").write_text(json.dumps(config | {key: 2}))
    return target


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe", "qwen3.5", ERNIE])
def test_of_several_blocks_the_first_drafts_all_tokens(name, root, build, tmp_path, caplog):
    folder, drafts = of_two_blocks(root, name, tmp_path / "two"), []
    for own in (folder, write_mtp(root, name)):
        with caplog.at_level(logging.INFO):
            core, found = build(own), []
        rows = core.ranks.runner.drafting.rows
        answer(core, PROMPT, 12, lambda _, rows=rows, found=found: found.append(rows.drafts_RK[0].tolist()))
        drafts.append(found)
    assert drafts[0] == drafts[1]
    assert "the first of 2 MTP blocks drafts" in caplog.text
    assert answer(build(folder, speculative_config=None), PROMPT, 12) == answer(build(folder), PROMPT, 12)


def test_several_blocks_of_unknown_names_are_refused(root, build, tmp_path):
    folder = of_two_blocks(root, NEMOTRONS[0], tmp_path / "two")
    with pytest.raises(
        CheckpointError, match="num_nextn_predict_layers must be 1 for method 'mtp' with this"
    ):
        build(folder)


def test_made_up_weights_have_a_head_too(root, build):
    assert len(answer(build(write_mtp(root, "deepseek-v3"), load_format="dummy"), PROMPT, 12)) == 12


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
    other = write_other(folder, tmp_path / "other", change)
    with pytest.raises(CheckpointError, match=message) as caught:
        build(other)
    assert str(other) in str(caught.value)


def of_head(core):
    (sums,) = core.ranks.call(commands.CHECKSUMS)
    return {name: found for name, found in sums.items() if name.startswith("head.")}


def write_other(folder, target, change):
    """Writes the checkpoint with changed tensors to `target`, and returns it."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_new_checkpoint_brings_its_head(root, build, tmp_path):
    folder = write_mtp(root, "qwen3.5")
    other = write_other(folder, tmp_path / "a", lambda tensors: tensors["mtp.fc.weight"].mul_(2))
    core, want = build(folder), of_head(build(other))
    before = of_head(core)
    assert before != want
    core.update_weights(str(other))
    assert of_head(core) == want


def test_a_new_checkpoint_without_a_head_leaves_the_head_as_it_is(root, build, tmp_path):
    def headless(tensors):
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]
        tensors["model.embed_tokens.weight"] *= 2

    folder = write_mtp(root, "qwen3.5")
    other = write_other(folder, tmp_path / "a", headless)
    core = build(folder)
    before = of_head(core)
    core.update_weights(str(other))
    assert of_head(core) == before
    assert answer(core, PROMPT, 12) == tiny.greedy(other, PROMPT, 12)


def test_a_head_with_an_end_of_the_vocabulary_for_itself_is_another_model(root, build, tmp_path):
    other = write_other(
        write_mtp(root, "glm4-moe"),
        tmp_path / "a",
        lambda tensors: tensors["model.layers.3.shared_head.head.weight"].mul_(-1),
    )
    core = build(write_mtp(root, "glm4-moe"))
    with pytest.raises(CheckpointError, match="its MTP head and the engine's do not have the same ends"):
        core.update_weights(str(other))


@pytest.mark.parametrize("level", [1, 2])
def test_a_head_sleeps_and_wakes(level, root, build):
    folder = write_mtp(root, "glm4-moe")
    core = build(folder, enable_sleep_mode=True)
    before = of_head(core)
    core.sleep(level)
    core.wake_up()
    if level == 2:
        core.update_weights(str(folder))
    assert of_head(core) == before and len(before) >= 10
    assert answer(core, PROMPT, 12) == tiny.greedy(folder, PROMPT, 12)


WIDE = dict(
    hidden_size=256,
    intermediate_size=384,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    layer_types=["full_attention"] * 4,
)


@pytest.mark.parametrize("left", ["mtp.", "lm_head"], ids=["head in plain numbers", "head quantized"])
@pytest.mark.parametrize("kind", ["fp8-blocks", "int4", "nvfp4"])
def test_a_head_of_a_quantized_model_may_be_quantized_or_not(kind, left, root, build, tmp_path):
    """A quantized head drafts the same tokens as its unpacked numbers. 4 bits are unpacked in this test, as activations
    are rounded otherwise."""
    packed = tmp_path / "packed"
    shutil.copytree(write_mtp(root / kind, "qwen3.5", **WIDE), packed)
    unpacked = quantized.repack(packed, kind, left)
    plain = tmp_path / "plain"
    shutil.copytree(packed, plain)
    save_file(unpacked, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    core = build(packed, dtype="auto" if kind == "fp8-blocks" else "float32")
    module = core.ranks.runner.head.module
    is_packed = module.layers[0].mlp.down_proj.weight is None
    assert is_packed == (kind == "fp8-blocks" and left != "mtp.")
    oracle, drafts_RK = MtpOracle(plain), core.ranks.runner.drafting.rows.drafts_RK

    def compare(tokens):
        if len(tokens) < 8:
            assert drafts_RK[0].tolist() == oracle.drafts(PROMPT + tokens, K)

    assert answer(core, PROMPT, 8, compare) == tiny.greedy(plain, PROMPT, 8)
    if kind == "int4":
        assert answer(build(packed, dtype="auto"), PROMPT, 8) == answer(
            build(packed, dtype="auto", speculative_config=None), PROMPT, 8
        )


@pytest.mark.parametrize("length", [30, 31, 32, 33])
def test_a_head_drafts_all_tokens_after_a_prompt_that_fills_its_blocks(length, root, build):
    """Regression: the step that ends a prompt had no block for a head's further slots, so fewer drafts came of it."""
    core = build(write_mtp(root, "glm4-moe"))
    counts = []
    core.add(Request("a", PROMPT[:length], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)))
    while not counts and core.has_work:
        core.step()
        counts.append(int(core.ranks.runner.state.table[0, Field.NUM_DRAFTS]))
    assert counts == [K]


def test_tokens_that_padding_has_left_are_never_embedded(root, build):
    """Regression: on a GPU a rehearsal's token after the last one, which is in the spare row, was beyond the
    vocabulary."""
    core = build(write_mtp(root, "glm4-moe"))
    steps = core.ranks.runner.steps
    steps.drafting.rows.history_RL[-1] = 1 << 30
    rehearse(steps, 2, 5)
    rehearse(steps, 1, 1)
    core.ranks.runner.state.reset()
    assert answer(core, PROMPT, 12) == tiny.greedy(write_mtp(root, "glm4-moe"), PROMPT, 12)


RING = ring(7)


@pytest.mark.parametrize(
    "options", [{}, dict(max_num_batched_tokens=16), dict(tensor_parallel_size=2)], ids=str
)
@pytest.mark.parametrize("kind, k", [("embedding", 3), ("hidden", 1), ("hidden", 3), ("attention", 3)])
def test_a_head_that_is_right_is_always_right(kind, k, options, tmp_path, build):
    """For prompts whole, in chunks, and from the prefix cache."""
    core = build(mtp_chains.write_chain(tmp_path, RING, kind), k, max_num_seqs=4, **options)
    prompt, n = [3, *follow(RING, 3, 39)], 1 + 8 * (k + 1)
    for _ in range(3):
        lengths = []
        found = answer(core, prompt, n, lambda tokens, lengths=lengths: lengths.append(len(tokens)))
        assert found == follow(RING, prompt[-1], n)
        assert sorted(set(lengths)) == [1 + i * (k + 1) for i in range(9)]


def test_the_tokens_of_a_step_are_the_ones_that_the_model_computed(root, build, monkeypatch):
    """Drafts are, and neither a head's slots nor places for drafts that there are not."""
    core = build(write_mtp(root, "qwen3.5"), max_num_seqs=3, max_num_batched_tokens=24)
    model, computed = core.ranks.runner.model, []
    forward = type(model).forward

    def counted(self, step, *args, **options):
        computed.append(int((step.positions_T >= 0).sum()))
        return forward(self, step, *args, **options)

    monkeypatch.setattr(type(model), "forward", counted)
    for i, length in enumerate((30, 3, 50, 7, 1)):
        core.add(
            Request(str(i), PROMPT[:1] * length, SamplingParams(seed=i, max_tokens=9 + i, ignore_eos=True))
        )
    drafted = []
    while core.has_work:
        drafted += [output.drafted for output in core.step() if output.drafted is not None]
    stats = core.stats()
    assert stats.step_tokens == sum(computed) and sum(stats.steps_by_tokens) == len(computed)
    assert sum(one.num_verified for one in drafted) > 20


def test_a_head_that_is_wrong_costs_no_token(tmp_path, build):
    core = build(mtp_chains.write_chain(tmp_path, RING, "wrong"))
    lengths = []
    assert answer(core, [3], 40, lambda tokens: lengths.append(len(tokens))) == follow(RING, 3, 40)
    assert sorted(set(lengths)) == [*range(1, 41)]
