"""An engine that sleeps at level 2 takes another model: what it generates then is what a fresh engine of that
model generates, and an update that fails leaves the old one asleep and well."""

import gc
import json
import random
import shutil
import weakref
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal import SamplingParams
from shoal.engine.offload.tiers import KvTiers
from shoal.engine.peers.peers import KvPeers
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.runner import runner as runner_module
from shoal.engine.step_loop import StepLoop
from shoal.errors import CheckpointError, ConfigError, EngineDeadError, UnavailableError
from shoal.kv_events import AllBlocksCleared, BlockStored
from tests import tiny
from tests.cpu.weights.test_weights_gguf import write_gguf
from tests.sleeping_engines import sleeping_engines

PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((3, 40, 70))]
COUNT = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


def ids_of(llm, prompts=PROMPTS):
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY)]


def of_the_oracle(folder):
    return [tiny.greedy(folder, p, COUNT) for p in PROMPTS]


@pytest.fixture(scope="module")
def other(root):
    """Another architecture and other shapes than `folder`'s; another template, and other defaults."""
    target = root / "other"
    shutil.copytree(tiny.write_model(root, "granite"), target)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    (target / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "do_sample": True}))
    return target


@pytest.fixture
def build():
    with sleeping_engines() as build:
        yield build


def test_another_model_and_the_old_one_again_generate_as_fresh_engines_do(build, folder, other):
    llm = build(folder)
    num_blocks = llm.stats().num_blocks
    assert ids_of(llm) == of_the_oracle(folder)
    for version, path in enumerate((other, folder, other), start=1):
        llm.sleep(level=2)
        assert llm.update_weights(path) == version == llm.weights_version
        assert llm.core.sleep_state().asleep == {"kv_cache"}
        with pytest.raises(UnavailableError, match="sleeps"):
            ids_of(llm)
        llm.wake_up()
        assert ids_of(llm) == of_the_oracle(path)
        llm.core.check()
    assert llm.stats().num_blocks != num_blocks, "the cache has as many blocks of the new shape as fit"
    with build(other) as fresh:
        assert llm.stats().num_blocks == fresh.stats().num_blocks
        assert llm.check_weights() == fresh.check_weights()
        assert llm.memory_usage() == fresh.memory_usage()


@pytest.mark.parametrize("awake", [None, ["weights"]])
def test_it_is_taken_wherever_the_old_weights_are(build, folder, other, awake):
    llm = build(folder)
    llm.sleep(level=2)
    if awake:
        llm.wake_up(tags=awake)
    llm.update_weights(other)
    usage = llm.memory_usage()
    assert usage["weights"]["device_bytes"] and not usage["kv_cache"]["device_bytes"]
    llm.wake_up(tags=["kv_cache"])
    assert ids_of(llm) == of_the_oracle(other)


def test_sleep_goes_on_as_before_with_the_new_model(build, folder, other):
    llm = build(folder, sleep_offload="file")
    llm.sleep(level=2)
    llm.update_weights(other)
    llm.wake_up()
    for level in (1, 2):
        llm.sleep(level=level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(other)  # in place: the same shapes
        assert ids_of(llm) == of_the_oracle(other)
    llm.update_weights_from_tensors(load_file(other / "model.safetensors"))
    assert llm.weights_version == 3 and ids_of(llm) == of_the_oracle(other)


def test_what_speaks_text_follows(build, folder, other):
    llm = build(folder, chat_template="{% for m in messages %}old{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "hello"}]
    assert llm.chat_prompt(messages)["prompt"] == "oldhello"
    llm.sleep(level=2)
    llm.update_weights(other)
    llm.wake_up()
    assert llm.chat_prompt(messages)["prompt"] == "[hello]"
    assert llm.get_default_sampling_params().temperature == 0.25
    assert llm.config.model == str(other)
    [answer] = llm.chat(messages, GREEDY)
    assert answer.outputs[0].token_ids == tiny.greedy(other, answer.prompt_token_ids, COUNT)


def test_the_vocabulary_is_the_new_models(build, folder, tmp_path):
    small = tmp_path / "small.gguf"
    write_gguf(small, "qwen3", "Q8_0")
    llm = build(folder, skip_tokenizer_init=True, dtype="auto", max_model_len=64)
    prompts = [[i % 90 for i in prompt[:40]] for prompt in PROMPTS]
    llm.sleep(level=2)
    llm.update_weights(small)
    llm.wake_up()
    with build(small, skip_tokenizer_init=True, dtype="auto", max_model_len=64) as fresh:
        assert ids_of(llm, prompts) == ids_of(fresh, prompts)
    with pytest.raises(ValueError, match="200"):
        llm.generate([[200]], GREEDY)
    assert llm.config.keep_quantized


def test_another_packing_is_another_model(build, tmp_path):
    paths = {kind: tmp_path / f"{kind}.gguf" for kind in ("Q4_0", "Q8_0")}
    for kind, path in paths.items():
        write_gguf(path, "qwen3", kind)
    options = dict(dtype="auto", skip_tokenizer_init=True, max_model_len=64)
    prompts = [[i % 90 for i in prompt[:40]] for prompt in PROMPTS]
    llm = build(paths["Q4_0"], **options)
    llm.sleep(level=2)
    llm.update_weights(paths["Q8_0"])
    llm.wake_up()
    with build(paths["Q8_0"], **options) as fresh:
        assert ids_of(llm, prompts) == ids_of(fresh, prompts)


def test_an_engine_made_with_random_weights_takes_a_real_model(build, folder, other):
    llm = build(folder, load_format="dummy")
    llm.sleep(level=2)
    llm.update_weights(other)
    llm.wake_up()
    assert ids_of(llm) == of_the_oracle(other)


def test_kept_requests_are_aborted_because_their_tokens_mean_nothing_to_another_model(build, folder, other):
    llm = build(folder)
    stream = llm.stream(PROMPTS[1], GREEDY)
    first = next(stream)
    llm.sleep(level=2, mode="keep")
    llm.update_weights(other)
    *_, last = stream
    assert last.outputs[0].finish_reason == "abort"
    assert last.outputs[0].token_ids[: len(first.outputs[0].token_ids)] == first.outputs[0].token_ids
    llm.wake_up()
    assert ids_of(llm) == of_the_oracle(other)


def test_listeners_hear_that_all_blocks_are_gone_and_then_of_the_new_models(build, folder, other):
    llm = build(folder, kv_events_config={"enable_kv_cache_events": True, "publisher": "null"})
    ids_of(llm)
    llm.sleep(level=2)
    llm.drain_kv_events()
    llm.update_weights(other)
    events = [event for batch in llm.drain_kv_events() for event in batch.events]
    assert events == [AllBlocksCleared()]
    llm.wake_up()
    outputs = llm.generate(PROMPTS, GREEDY)
    assert not any(output.num_cached_tokens for output in outputs)
    events = [event for batch in llm.drain_kv_events() for event in batch.events]
    assert events and all(isinstance(event, BlockStored) for event in events)
    assert sum(len(event.block_hashes) for event in events) == len(
        llm.core.scheduler.blocks.pool.cached_keys()
    )


def test_tiers_below_begin_anew_and_a_disk_keeps_each_models_blocks(build, folder, other, tmp_path):
    llm = build(
        folder,
        kv_host_bytes=4 << 20,
        kv_disk_path=str(tmp_path / "kv"),
        kv_disk_bytes=64 << 20,
        kv_offload_policy="register",
        kv_load_policy="always",
    )
    ids_of(llm)
    llm.core.flush_kv()
    for path in (other, folder):
        llm.sleep(level=2)
        llm.update_weights(path)
        llm.wake_up()
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [list(o.outputs[0].token_ids) for o in outputs] == of_the_oracle(path)
        # The disk has what the first model computed, for it alone.
        assert any(o.num_cached_tokens for o in outputs) == (path == folder)
        llm.core.check()


def test_the_old_model_leaves_nothing_behind(build, folder, other):
    llm = build(folder)
    seen = []
    for path in (other, folder, other):
        runner = llm.core.ranks.runner
        seen += [weakref.ref(runner.model), weakref.ref(runner.cache), weakref.ref(llm.core)]
        del runner
        llm.sleep(level=2)
        llm.update_weights(path)
    gc.collect()
    assert [ref() for ref in seen] == [None] * len(seen)


# What fails


def broken(target, model, what):
    """A copy of the model that cannot be served."""
    shutil.copytree(model, target)
    if what == "a shard is missing":
        weights = load_file(target / "model.safetensors")
        weights.popitem()
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    elif what == "cut off":
        with open(target / "model.safetensors", "r+b") as file:
            file.truncate(4000)
    elif what == "no tokenizer":
        (target / "tokenizer.json").unlink()
    elif what == "strange defaults":
        (target / "generation_config.json").write_text('{"top_p": 7}')
    elif what == "too short":
        config = json.loads((target / "config.json").read_text())
        config["max_position_embeddings"] = 128
        (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    "what, words",
    [
        ("a shard is missing", "lacks the tensor"),
        ("cut off", "model.safetensors"),
        ("no tokenizer", "tokenizer.json"),
        ("strange defaults", "top_p"),
        ("too short", "max_model_len 256 > 128"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_leaves_the_old_model_asleep_and_well(
    build, folder, other, tmp_path, what, words
):
    llm = build(folder, kv_host_bytes=4 << 20)
    bad = broken(tmp_path / "bad", other, what)
    llm.sleep(level=2)
    asleep = llm.memory_usage()
    for _ in range(2):
        with pytest.raises((CheckpointError, ConfigError), match=words) as raised:
            llm.update_weights(bad)
        assert "It sleeps on with" in str(raised.value) and "wake it up" in str(raised.value)
        assert llm.memory_usage() == asleep and llm.weights_version == 0 and llm.is_sleeping
    llm.wake_up()
    llm.update_weights(folder)
    assert ids_of(llm) == of_the_oracle(folder)
    assert ids_of(llm) == of_the_oracle(folder)  # from the prefix cache
    llm.sleep(level=2)
    llm.update_weights(other)
    llm.wake_up()
    assert ids_of(llm) == of_the_oracle(other)


@pytest.mark.parametrize("error", [MemoryError("no room"), torch.OutOfMemoryError("no room")])
def test_a_model_that_finds_no_room_leaves_the_old_one_asleep_and_well(
    build, folder, other, monkeypatch, error
):
    llm = build(folder, kv_host_bytes=4 << 20, kv_disk_path=None)
    stream = llm.stream(PROMPTS[1], GREEDY)
    next(stream)
    llm.sleep(level=2, mode="keep")
    with monkeypatch.context() as patch, pytest.raises(UnavailableError, match=r"no room\. It sleeps on"):

        def fails(*args, **options):
            raise error

        patch.setattr(runner_module, "load_weights", fails)
        llm.update_weights(other)
    llm.wake_up(tags=["weights"])
    llm.update_weights(folder)
    llm.wake_up()
    *_, last = stream  # the kept request continues
    assert list(last.outputs[0].token_ids) == tiny.greedy(folder, PROMPTS[1], COUNT)
    assert ids_of(llm) == of_the_oracle(folder)


def test_a_failure_holds_nothing_that_was_built_by_half(build, folder, other, monkeypatch):
    """A caller may keep the error, and want the memory."""
    llm, half_built = build(folder), []
    llm.sleep(level=2)

    def fails(model, *args, **options):
        half_built.append(weakref.ref(model))
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(runner_module, "load_weights", fails)
    with pytest.raises(UnavailableError) as raised:
        llm.update_weights(other)
    assert [ref() for ref in half_built] == [None] and raised.value.__context__ is None


def test_an_interrupt_while_the_other_model_is_built_leaves_the_old_one(build, folder, other, monkeypatch):
    llm = build(folder, kv_host_bytes=4 << 20)
    llm.sleep(level=2)

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner_module, "load_weights", interrupted)
        llm.update_weights(other)
    llm.update_weights(other)
    llm.wake_up()
    assert ids_of(llm) == of_the_oracle(other)


def test_no_call_reaches_tiers_whose_memory_was_given_back(build, folder, other, monkeypatch):
    """Regression: the core dropped its own reference to the tiers, and its step loop kept another."""
    llm = build(folder, kv_host_bytes=4 << 20)
    llm.sleep(level=2)
    core, calls, close = llm.core, [], Ranks.close

    def close_after_a_tick(ranks):
        if ranks is core.ranks:
            core.tick()
        close(ranks)

    monkeypatch.setattr(KvTiers, "tick", lambda tiers: bool(calls.append(tiers)))
    monkeypatch.setattr(Ranks, "close", close_after_a_tick)
    llm.update_weights(other)
    assert llm.core is not core and not calls


@pytest.mark.parametrize("owner, name", [(StepLoop, "report"), (KvPeers, "close")])
def test_an_interrupt_while_one_hands_over_to_the_other_ends_both(
    build, folder, other, monkeypatch, owner, name
):
    llm = build(folder, kv_host_bytes=4 << 20, kv_transfer_config={"kv_role": "kv_consumer"})
    llm.sleep(level=2)

    def interrupted(*args):
        monkeypatch.undo()  # later calls work
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.update_weights(other)
    with pytest.raises(EngineDeadError, match="build a new one"):
        llm.wake_up()


# What is refused


@pytest.mark.parametrize(
    "sleep, words",
    [
        (None, r"of another model: its architecture.*sleep at level 2"),
        (dict(level=1), r"sleep at level 2"),
        (dict(level=0), r"sleep at level 2"),
        (dict(level=2, tags=["weights"]), r"sleep at level 2"),
    ],
)
def test_an_engine_that_has_not_given_its_model_up_takes_no_other(build, folder, other, sleep, words):
    llm = build(folder)
    if sleep is not None:
        llm.sleep(**sleep)
    with pytest.raises(CheckpointError, match=words):
        llm.update_weights(other)
    llm.wake_up()
    if sleep is not None and sleep["level"] == 2:
        llm.update_weights(folder)
    assert ids_of(llm) == of_the_oracle(folder) and llm.config.model == str(folder)


def test_an_engine_in_a_trainers_group_takes_no_other_model(build, folder, other):
    llm = build(folder)
    llm.core.ranks.runner.weights.groups["trainer"] = SimpleNamespace(close=lambda: None)
    llm.sleep(level=2)
    with pytest.raises(ConfigError, match=r"groups \['trainer'\]; destroy them first"):
        llm.update_weights(other)
    llm.destroy_weights_update_group("trainer")
    assert llm.update_weights(other) == 1


def test_an_engine_without_sleep_mode_takes_no_other_model(build, folder, other):
    llm = build(folder, enable_sleep_mode=False)
    with pytest.raises(CheckpointError, match=r"build a new engine for it, or .*enable_sleep_mode"):
        llm.update_weights(other)
    assert ids_of(llm) == of_the_oracle(folder)
