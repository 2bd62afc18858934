"""A draft head beside its target: its layer in the KV cache, and its weights in sleep, updates and fingerprints."""

import json

import pytest
import torch

from shoal.api import Request
from shoal.config import EngineConfig, SpeculativeConfig
from shoal.engine.core import EngineCore
from shoal.engine.runner import commands
from shoal.errors import CheckpointError, ConfigError
from shoal.sampling_params import SamplingParams
from shoal.weights.fingerprint import checkpoint_fingerprint
from shoal.weights.source import resolve
from tests import tiny
from tests.cpu.models.test_eagle3 import layer_config, tensors_of
from tests.eagle3_oracle import write_head

PROMPT, COUNT = list(range(40, 70)), 12
FORMS = dict(
    kv_cache_memory_bytes=4 << 20, max_model_len=128, dtype="float32", device="cpu", enable_sleep_mode=True
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def head(target, tmp_path_factory):
    return write_head(tmp_path_factory.mktemp("head"), layer_config(target), tensors_of(target))


@pytest.fixture
def build(target):
    cores = []

    def make(head=None, **options):
        files = resolve(str(target))
        cores.append(
            EngineCore(
                EngineConfig(model=str(target), **FORMS | options),
                files if head is None else files.with_head(named(head)),
            )
        )
        return cores[-1]

    yield make
    for core in cores:
        core.exit()


def named(head):
    return SpeculativeConfig("eagle3", 1, model=str(head))


def answer(core):
    core.add(Request("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)))
    found = []
    while core.has_work:
        for output in core.step():
            found += output.token_ids
    return found


def sums(core):
    return core.ranks.call(commands.CHECKSUMS)[0]


def of_head(core):
    return {name: found for name, found in sums(core).items() if name.startswith("head.")}


@pytest.mark.parametrize("options", [{}, dict(tensor_parallel_size=1, kv_cache_dtype="fp8")], ids=str)
def test_the_heads_layer_is_one_more_in_the_cache_of_the_targets(options, build, head):
    plain, core = build(**options), build(head, **options)
    (group,), (own,) = plain.ranks.runner.cache.plan.groups, core.ranks.runner.cache.plan.groups
    assert own.layers == (*group.layers, 8) and own.block_size == group.block_size
    assert core.num_blocks == plain.num_blocks * 8 // 9
    assert len(core.ranks.runner.cache.layers) == 9


def test_a_head_with_other_kv_heads_has_a_group_of_its_own(build, target, tmp_path):
    layer = layer_config(target) | {"num_key_value_heads": 3}
    tensors = tensors_of(target)
    for name in "kv":
        key = f"midlayer.self_attn.{name}_proj.weight"
        tensors[key] = torch.cat((tensors[key], tensors[key]))[:24]
    core = build(write_head(tmp_path, layer, tensors))
    *groups, last = core.ranks.runner.cache.plan.groups
    assert sum((group.layers for group in groups), ()) == tuple(range(8)) and last.layers == (8,)
    assert answer(core) == tiny.greedy(target, PROMPT, COUNT)


def test_answers_are_those_without_the_head(build, head, target):
    assert answer(build(head)) == tiny.greedy(target, PROMPT, COUNT)


def test_new_weights_of_the_target_leave_the_head_as_it_is(build, head, target, tmp_path):
    core = build(head)
    before = of_head(core)
    assert len(before) >= 10
    assert sums(core).keys() - before.keys() == sums(build()).keys()
    other = tiny.write_changed(target, tmp_path / "other")
    core.update_weights(str(other))
    assert of_head(core) == before
    assert answer(core) == tiny.greedy(other, PROMPT, COUNT)


@pytest.mark.parametrize("level", [1, 2])
def test_the_head_sleeps_and_wakes_with_the_target(level, build, head, target):
    core = build(head)
    before = sums(core)
    core.sleep(level)
    core.wake_up()
    if level == 2:
        core.update_weights(str(target))
    assert sums(core) == before
    assert answer(core) == tiny.greedy(target, PROMPT, COUNT)


def test_made_up_weights_have_a_head_too(build, head):
    core = build(head, load_format="dummy")
    assert len(answer(core)) == COUNT


def test_caches_of_a_target_with_and_without_a_head_have_other_names(build, head, target, tmp_path):
    tensors = tensors_of(target)
    tensors["fc.weight"] = tensors["fc.weight"] * 2
    other = write_head(tmp_path, layer_config(target), tensors)
    files = resolve(str(target))
    found = {
        checkpoint_fingerprint(f, False, 512)
        for f in (files, files.with_head(named(head)), files.with_head(named(other)))
    }
    assert len(found) == 3
    assert of_head(build(head)) != of_head(build(other))


def test_a_head_of_another_model_is_refused_by_name(target, head, tmp_path):
    other = tiny.write_model(tmp_path, "llama", num_hidden_layers=8, hidden_size=96)
    with pytest.raises(CheckpointError, match="hidden_size must be 96 as in the model, got 48"):
        resolve(str(other)).with_head(named(head))


def test_a_head_that_does_not_divide_is_refused(target, head):
    from shoal.models.parallel import check_parallel

    with pytest.raises(ConfigError, match="num_attention_heads 6"):
        check_parallel(resolve(str(target)).with_head(named(head)).head.decoder, 4)


def test_the_config_of_a_head_may_be_shorter_than_its_target(build, head):
    config = json.loads((head / "config.json").read_text())
    assert config["max_position_embeddings"] == 16
    module = build(head).ranks.runner.head.module
    assert [table.shape[0] for table in module.ropes] == [128]
