"""Sleep mode and new weights on the CPU: the same tokens after any sleep, clear refusals meanwhile, nothing
half done."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from shoal import SamplingParams
from shoal.engine.lifecycle.sleep import Sleeper
from shoal.engine.runner import rank_memory
from shoal.engine.runner.rank_memory import CpuRegions
from shoal.errors import CheckpointError, ConfigError, UnavailableError
from shoal.models.loading import Loading
from shoal.stats import SleepState
from shoal.weights.transfer import SharedTensors, open_tensor
from tests import tiny
from tests.cpu.weights.test_weights_gguf import write_gguf
from tests.sleeping_engines import sleeping_engines
from tests.tiny_families import write_family

PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((3, 17, 40, 70))]
COUNT = 14


def params(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | options)


def ids_of(outputs):
    return [list(o.outputs[0].token_ids) for o in outputs]


def tokens(llm):
    return ids_of(llm.generate(PROMPTS, params()))


def begin(llm):
    """A request that runs."""
    stream = llm.stream(PROMPTS[1], params())
    next(stream)
    return stream


@pytest.fixture(scope="module")
def expected(folder):
    return [tiny.greedy(folder, p, COUNT) for p in PROMPTS]


@pytest.fixture
def build():
    with sleeping_engines(32 << 20) as build:
        yield build


@pytest.fixture
def changed(folder, tmp_path):
    """The same model with other weights."""
    return copy_of(
        folder,
        tmp_path / "changed",
        lambda name, weight: weight.flip(0) if "embed" in name or "down_proj" in name else weight,
    )


def copy_of(folder, target, change):
    shutil.copytree(folder, target)
    weights = {
        name: change(name, weight).contiguous()
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def fail_once(monkeypatch, owner, name, error, after=0):
    """Call number `after` of the method raises, the others work."""
    real, calls = getattr(owner, name), []

    def call(*args, **options):
        calls.append(args)
        if len(calls) == after + 1:
            raise error
        return real(*args, **options)

    monkeypatch.setattr(owner, name, call)


def interrupt_behind(monkeypatch, owner, name):
    """The method does its work, and the interrupt comes before its caller continues. Later calls work."""
    real, calls = getattr(owner, name), []

    def call(*args):
        result = real(*args)
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, call)


# Sleeping and waking


@pytest.mark.parametrize("offload", ["host", "file"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_level_1_gives_the_same_tokens_and_no_cached_prefix(folder, build, expected, offload, asynchronous):
    llm = build(folder, sleep_offload=offload, async_scheduling=asynchronous)
    for _ in range(3):
        outputs = llm.generate(PROMPTS, params())
        assert ids_of(outputs) == expected and not any(o.num_cached_tokens for o in outputs)
        llm.sleep(level=1)
        llm.wake_up()


def test_what_sleeps_is_given_back_and_counted(folder, build):
    llm = build(folder)
    awake = llm.memory_usage()
    weights, cache = awake["weights"]["device_bytes"], awake["kv_cache"]["device_bytes"]
    assert weights > 100_000 and 30 << 20 < cache <= 32 << 20
    report = llm.sleep(level=1)
    assert (report.freed_bytes, report.host_bytes, report.region_bytes) == (cache, weights, 0)
    assert report.seconds > 0
    assert llm.memory_usage() == {
        "weights": {"device_bytes": 0, "reserved_bytes": weights, "host_bytes": weights, "ready_bytes": 0},
        "kv_cache": {"device_bytes": 0, "reserved_bytes": cache, "host_bytes": 0, "ready_bytes": 0},
    }
    report = llm.wake_up()
    assert (report.taken_bytes, report.host_bytes, report.region_bytes) == (cache, 0, weights + cache)
    report = llm.sleep(level=2)
    assert (report.freed_bytes, report.host_bytes) == (cache + weights, 0)


def test_the_kernel_gets_the_pages_of_a_sleeping_engine():
    """In a process of its own, where nothing else comes and goes: resident memory falls by the cache's size,
    and by the weights' too."""
    code = """
import sys, tempfile
from pathlib import Path
from types import SimpleNamespace
from shoal import LLM, SamplingParams
sys.path.insert(0, "benchmarks")
import workloads

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

workloads.SHAPES["small"] = dict(workloads.QWEN3, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
                                 head_dim=256, tie_word_embeddings=True)
llm = LLM(workloads.write_model(tempfile.mkdtemp(), "small"), load_format="dummy", dtype="float32", device="cpu", max_model_len=512,
          kv_cache_memory_bytes=128 << 20, enable_sleep_mode=True)
blocks = llm.stats().num_blocks
prompts = [[i + 1] + [7] * 510 for i in range(blocks // 32)]  # each fills 32 blocks of 16 tokens
llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
assert blocks == 256 and len(prompts) == 8
sizes = [resident()]
for level in (1, 2):
    llm.sleep(level=level)
    sizes.append(resident())
assert sizes[0] - sizes[1] > 120 and sizes[1] - sizes[2] > 300, sizes
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_wakes_in_stages_with_new_weights_in_between(folder, build, changed):
    llm = build(folder)
    llm.sleep(level=2)
    with pytest.raises(UnavailableError, match="weights are asleep"):
        llm.update_weights(changed)
    with pytest.raises(UnavailableError, match="weights are asleep"):
        llm.check_weights()
    llm.wake_up(tags=["weights"])
    assert llm.is_sleeping
    llm.update_weights(changed)
    assert llm.is_sleeping
    with pytest.raises(UnavailableError, match=r"sleep.*kv_cache"):
        tokens(llm)
    llm.wake_up(tags=["kv_cache"])
    assert not llm.is_sleeping and tokens(llm) == [tiny.greedy(changed, p, COUNT) for p in PROMPTS]


def test_regions_can_sleep_one_by_one(folder, build, expected):
    llm = build(folder)
    assert tokens(llm) == expected
    assert llm.sleep(level=1, tags=["kv_cache"]).host_bytes == 0
    assert llm.core.sleep_state().asleep == {"kv_cache"}
    assert llm.sleep(level=1, tags=["weights"]).host_bytes > 0
    llm.wake_up(tags=["kv_cache"])
    assert llm.is_sleeping
    llm.wake_up(tags=["weights"])
    assert not llm.is_sleeping and tokens(llm) == expected


def test_weights_that_sleep_alone_leave_the_cache_and_its_prefixes(folder, build, expected):
    llm = build(folder)
    assert tokens(llm) == expected
    llm.sleep(level=1, tags=["weights"])
    llm.wake_up()
    outputs = llm.generate(PROMPTS, params())
    assert ids_of(outputs) == expected and outputs[-1].num_cached_tokens > 0


def test_to_sleep_twice_or_to_wake_twice_is_harmless(folder, build, expected):
    llm = build(folder)
    first = llm.sleep(level=1)
    again = llm.sleep(level=1)
    assert first.freed_bytes > 0 == again.freed_bytes
    llm.wake_up()
    again = llm.wake_up()
    assert again.taken_bytes == 0 and not llm.is_sleeping and tokens(llm) == expected


def test_level_2_after_level_1_drops_the_kept_weights(folder, build, expected):
    llm = build(folder)
    llm.sleep(level=1)
    report = llm.sleep(level=2)
    assert report.freed_bytes == llm.memory_usage()["weights"]["reserved_bytes"] and report.host_bytes == 0
    assert llm.core.sleep_state().level == 2
    llm.wake_up()
    with pytest.raises(UnavailableError, match="weights"):
        tokens(llm)
    llm.update_weights(folder)
    assert tokens(llm) == expected


def test_level_1_after_level_2_does_not_bring_weights_back(folder, build, expected):
    llm = build(folder)
    llm.sleep(level=2)
    llm.sleep(level=1)
    assert llm.core.sleep_state().level == 2
    llm.wake_up()
    with pytest.raises(UnavailableError, match="weights"):
        tokens(llm)
    llm.update_weights(folder)
    assert tokens(llm) == expected


def test_level_2_loses_the_content_of_the_weights(folder, build):
    llm = build(folder)
    before = llm.check_weights()
    llm.sleep(level=2)
    llm.wake_up()
    lost = llm.check_weights()
    assert lost.keys() == before.keys() and not set(lost.values()) & set(before.values())
    llm.update_weights(folder)
    assert llm.check_weights() == before


def test_level_0_pauses_only(folder, build, expected):
    llm = build(folder)
    assert tokens(llm) == expected
    report = llm.sleep(level=0)
    assert llm.is_sleeping and llm.core.sleep_state().level == 0 and report.freed_bytes == 0
    with pytest.raises(UnavailableError, match=r"sleeps.*paused.*resume"):
        tokens(llm)
    llm.sleep(level=1, tags=["kv_cache"])
    llm.wake_up()
    assert tokens(llm) == expected


def test_a_pause_needs_no_sleep_mode(folder, build, expected):
    llm = build(folder, enable_sleep_mode=False)
    stream = begin(llm)
    llm.sleep(level=0, mode="keep")
    assert llm.is_sleeping and llm.core.sleep_state() == SleepState(0)
    with pytest.raises(UnavailableError, match=r"sleeps.*paused.*resume"):
        tokens(llm)
    llm.wake_up()
    *_, last = stream
    assert list(last.outputs[0].token_ids) == expected[1] and tokens(llm) == expected


def test_the_state_is_that_of_the_deepest_sleep_and_a_pause_hides_nothing(folder, build):
    llm = build(folder)
    assert llm.core.sleep_state() == SleepState()
    llm.sleep(level=1)
    assert llm.core.sleep_state() == SleepState(1, {"weights", "kv_cache"}, "host")
    llm.sleep(level=2)
    llm.sleep(level=0)
    llm.sleep(level=1)
    assert llm.core.sleep_state() == SleepState(2, {"weights", "kv_cache"})
    llm.wake_up(tags=["weights"])
    assert llm.core.sleep_state() == SleepState(2, {"kv_cache"})
    llm.wake_up()
    assert llm.core.sleep_state() == SleepState()


def test_two_engines_sleep_independently(folder, build, expected):
    one, two = build(folder), build(folder)
    one.sleep(level=2)
    assert not two.is_sleeping and tokens(two) == expected
    two.sleep(level=1)
    one.wake_up()
    one.update_weights(folder)
    assert tokens(one) == expected
    two.wake_up()
    assert tokens(two) == expected


def test_a_hundred_cycles_grow_nothing(folder, build, expected):
    llm = build(folder)
    llm.generate(PROMPTS, params())
    usage, count = llm.memory_usage(), len(os.listdir("/proc/self/fd"))
    for i in range(100):
        llm.sleep(level=1 + i % 2)
        llm.wake_up()
        if i % 2:
            llm.update_weights(folder)
    assert (
        llm.memory_usage() == usage
        and len(os.listdir("/proc/self/fd")) <= count + 2
        and tokens(llm) == expected
    )


def test_an_engine_ends_while_it_sleeps(folder, build):
    llm = build(folder)
    llm.sleep(level=1)
    llm.exit()


# Requests that run


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("level, tags", [(0, None), (1, None), (1, ["kv_cache"]), (1, ["weights"])])
def test_kept_requests_go_on_after_waking_as_if_nothing_had_been(
    folder, build, expected, asynchronous, level, tags
):
    llm = build(folder, async_scheduling=asynchronous)
    streams = [llm.stream(p, params()) for p in PROMPTS]
    for i, stream in enumerate(streams):
        for _ in range(i + 1):
            next(stream)
    llm.sleep(level=level, tags=tags, mode="keep")
    assert llm.is_sleeping
    llm.core.check()
    llm.wake_up()
    for stream, tokens_ in zip(streams, expected):
        *_, last = stream
        assert list(last.outputs[0].token_ids) == tokens_ and last.outputs[0].finish_reason == "length"
    llm.core.check()


def test_kept_requests_with_penalties_and_seeds_draw_the_same(folder, build):
    llm = build(folder)
    drawn = params(temperature=1.1, seed=5, repetition_penalty=1.3, logprobs=2)
    plain = llm.generate(PROMPTS[2], drawn)[0].outputs[0]
    stream = llm.stream(PROMPTS[2], drawn)
    next(stream), next(stream)
    llm.sleep(level=1, mode="keep")
    llm.wake_up()
    *_, last = stream
    assert last.outputs[0].token_ids == plain.token_ids and len(last.outputs[0].logprobs) == COUNT


def test_aborted_requests_end_and_keep_what_they_had(folder, build, expected):
    llm = build(folder)
    stream = begin(llm)
    llm.sleep(level=1)
    *_, last = stream  # its end is reported while the engine sleeps
    assert (
        last.outputs[0].finish_reason == "abort"
        and last.outputs[0].token_ids == expected[1][: len(last.outputs[0].token_ids)]
    )
    assert not llm.core.has_work and llm.stats().num_running == 0
    llm.wake_up()
    assert tokens(llm) == expected


def test_mode_wait_lets_requests_end_first(folder, build, expected):
    llm = build(folder)
    stream = begin(llm)
    with pytest.raises(UnavailableError, match="still running"):
        llm.core.sleep(mode="wait")
    assert not llm.is_sleeping
    llm.sleep(level=1, mode="wait")
    *_, last = stream
    assert last.outputs[0].finish_reason == "length" and list(last.outputs[0].token_ids) == expected[1]
    llm.wake_up()
    assert tokens(llm) == expected


def test_mode_wait_waits_for_nothing_where_the_engine_cannot_sleep(folder, build):
    llm = build(folder, enable_sleep_mode=False)
    stream = begin(llm)
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        llm.sleep(level=1, mode="wait")
    assert llm.core.has_work
    stream.close()


def test_mode_wait_leaves_requests_alone_that_an_earlier_sleep_kept(folder, build, expected):
    llm = build(folder)
    stream = begin(llm)
    llm.sleep(level=1, tags=["kv_cache"], mode="keep")
    llm.sleep(level=1, mode="wait")
    llm.sleep(level=0, mode="wait")
    llm.wake_up()
    *_, last = stream
    assert last.outputs[0].finish_reason == "length" and list(last.outputs[0].token_ids) == expected[1]


def test_to_wait_for_a_kept_request_is_refused_while_the_engine_sleeps(folder, build, expected):
    llm = build(folder)
    for lost, word in ((False, "sleeps"), (True, "update_weights")):
        stream = llm.stream(PROMPTS[1], params())
        next(stream)
        llm.sleep(level=2 if lost else 1, mode="keep")
        if lost:
            llm.wake_up()
        with pytest.raises(UnavailableError, match=word):
            next(stream)
        llm.wake_up()
    llm.update_weights(folder)
    assert tokens(llm) == expected


def test_requests_are_refused_on_demand(folder, build, expected):
    llm = build(folder)
    llm.core.refuse("about to sleep")
    with pytest.raises(UnavailableError, match="about to sleep"):
        tokens(llm)
    llm.core.refuse(None)
    assert tokens(llm) == expected


# Bad calls and failures


@pytest.mark.parametrize(
    "bad",
    [
        dict(level=3),
        dict(level=-1),
        dict(level=True),
        dict(level="1"),
        dict(tags=["nonsense"]),
        dict(tags=[]),
        dict(tags="weights"),
        dict(mode="maybe"),
    ],
    ids=str,
)
def test_bad_calls_change_nothing(folder, build, expected, bad):
    llm = build(folder)
    stream = llm.stream(PROMPTS[0], params())
    next(stream)
    with pytest.raises(ConfigError):
        llm.sleep(**bad)
    if "tags" in bad:
        with pytest.raises(ConfigError):
            llm.wake_up(tags=bad["tags"])
    if "mode" in bad:
        with pytest.raises(ConfigError):
            llm.sleep(level=0, **bad)
    assert not llm.is_sleeping
    *_, last = stream
    assert list(last.outputs[0].token_ids) == expected[0]


def test_sleep_mode_has_to_be_asked_for(folder, build):
    llm = build(folder, enable_sleep_mode=False)
    for level in (1, 2):
        with pytest.raises(ConfigError, match="enable_sleep_mode"):
            llm.sleep(level=level)
    assert llm.memory_usage()["weights"]["device_bytes"] > 0
    with pytest.raises(ConfigError, match="sleep_offload"):
        build(folder, sleep_offload="cloud")


def test_a_sleep_without_host_memory_changes_nothing(folder, build, expected, monkeypatch):
    llm = build(folder)
    stream = llm.stream(PROMPTS[0], params())
    next(stream)
    fail_once(monkeypatch, CpuRegions, "release", MemoryError("16 bytes needed, 3 free"))
    with pytest.raises(UnavailableError, match="3 free"):
        llm.sleep(level=1)
    assert not llm.is_sleeping
    *_, last = stream
    assert list(last.outputs[0].token_ids) == expected[0]
    llm.sleep(level=1)
    llm.wake_up()
    assert tokens(llm) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_that_fails_changes_nothing_and_can_be_tried_again(
    folder, build, expected, monkeypatch, level
):
    llm = build(folder)
    llm.sleep(level=level)
    asleep = llm.memory_usage()
    fail_once(monkeypatch, CpuRegions, "take", MemoryError("the card is full"))
    with pytest.raises(UnavailableError, match="full"):
        llm.wake_up()
    assert llm.is_sleeping and llm.memory_usage() == asleep
    llm.wake_up()
    if level == 2:
        llm.update_weights(folder)
    assert tokens(llm) == expected


def test_a_wake_whose_file_cannot_be_read_can_be_tried_again(folder, build, expected, monkeypatch):
    llm = build(folder, sleep_offload="file")
    llm.sleep(level=1)
    asleep = llm.memory_usage()
    assert asleep["weights"]["host_bytes"] == asleep["weights"]["device_bytes"] == 0
    fail_once(monkeypatch, Loading, "take", CheckpointError("cannot be read"))
    with pytest.raises(CheckpointError, match="cannot be read"):
        llm.wake_up()
    assert llm.is_sleeping and llm.memory_usage() == asleep
    llm.wake_up()
    assert tokens(llm) == expected


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("offload", ["host", "file"])
def test_an_interrupt_behind_a_sleep_leaves_an_engine_that_knows_what_sleeps(
    folder, build, expected, monkeypatch, level, offload
):
    """The memory has gone when the interrupt comes, and nobody has noted it yet."""
    llm = build(folder, sleep_offload=offload)
    assert tokens(llm) == expected
    interrupt_behind(monkeypatch, CpuRegions, "release")
    with pytest.raises(KeyboardInterrupt):
        llm.sleep(level=level)
    assert llm.is_sleeping and llm.core.sleep_state().asleep == {"weights", "kv_cache"}
    with pytest.raises(UnavailableError, match=f"sleeps .level {level}"):
        tokens(llm)
    llm.wake_up()
    if level == 2:
        with pytest.raises(UnavailableError, match="a sleep was interrupted"):
            tokens(llm)
        llm.update_weights(folder)
    assert tokens(llm) == expected


@pytest.mark.parametrize("after", [1, 40])
def test_an_interrupt_in_the_middle_of_a_sleep_loses_weights_knowingly(
    folder, build, expected, monkeypatch, after
):
    """Some tensors' pages have been dropped, all weights' and some of the cache's."""
    llm = build(folder)
    assert tokens(llm) == expected
    num_tensors = len(list(llm.core.ranks.runner.model.parameters()))
    fail_once(monkeypatch, rank_memory, "drop_pages", KeyboardInterrupt(), min(after, num_tensors))
    with pytest.raises(KeyboardInterrupt):
        llm.sleep(level=2)
    assert "weights" in llm.core.sleep_state().asleep
    llm.wake_up()
    with pytest.raises(UnavailableError, match="weights are not there: a sleep was interrupted"):
        tokens(llm)
    llm.update_weights(folder)
    assert tokens(llm) == expected


@pytest.mark.parametrize("level, offload", [(1, "host"), (1, "file"), (2, "host")])
def test_an_interrupt_behind_a_wake_up_leaves_an_engine_that_knows_what_is_awake(
    folder, build, expected, monkeypatch, level, offload
):
    llm = build(folder, sleep_offload=offload)
    llm.sleep(level=level)
    interrupt_behind(monkeypatch, CpuRegions, "take")
    with pytest.raises(KeyboardInterrupt):
        llm.wake_up()
    assert not llm.is_sleeping
    if (level, offload) != (1, "host"):
        with pytest.raises(UnavailableError, match="weights are not there"):
            tokens(llm)
        llm.update_weights(folder)
    assert tokens(llm) == expected


def test_an_interrupt_between_the_commands_of_several_ranks_leaves_an_engine_that_knows(
    folder, build, expected, monkeypatch
):
    """All ranks have released their memory then, and each reports its own."""
    llm = build(folder)
    call = llm.core.ranks.call
    monkeypatch.setattr(llm.core.ranks, "call", lambda *command: call(*command) * 2)
    fail_once(monkeypatch, Sleeper, "_settle", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.sleep(level=1)
    assert llm.core.sleep_state().asleep == {"weights", "kv_cache"}
    llm.wake_up()
    assert tokens(llm) == expected


def test_an_interrupt_before_anything_has_gone_changes_nothing(folder, build, expected, monkeypatch):
    llm = build(folder)
    fail_once(monkeypatch, CpuRegions, "release", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.sleep(level=2)
    assert not llm.is_sleeping and tokens(llm) == expected


def test_weights_that_are_no_files_are_kept_on_the_host(folder, build, tmp_path):
    own = copy_of(folder, tmp_path / "own", lambda name, weight: weight)
    llm = build(own, sleep_offload="file")
    llm.update_weights_from_tensors({"model.norm.weight": torch.full((48,), 0.5)})
    before = tokens(llm)
    assert llm.sleep(level=1).host_bytes > 0
    llm.wake_up()
    assert tokens(llm) == before
    llm.update_weights(own)
    os.utime(own / "model.safetensors", ns=(1, 1))  # written since
    assert llm.sleep(level=1).host_bytes > 0


def test_a_file_that_changes_during_sleep_is_not_taken_for_the_weights(folder, build, tmp_path):
    own = copy_of(folder, tmp_path / "own", lambda name, weight: weight)
    llm = build(own, sleep_offload="file")
    llm.sleep(level=1)
    os.utime(own / "model.safetensors", ns=(1, 1))
    llm.wake_up()
    with pytest.raises(UnavailableError, match=r"weights.*changed while"):
        tokens(llm)
    assert llm.update_weights(own) == 1


# New weights


def test_new_weights_change_the_tokens_and_the_version(folder, build, expected, changed):
    llm = build(folder, enable_sleep_mode=False)
    assert llm.weights_version == 0 and tokens(llm) == expected
    sums = llm.check_weights()
    assert llm.update_weights(changed) == llm.weights_version == 1
    outputs = llm.generate(PROMPTS, params())
    assert ids_of(outputs) == [tiny.greedy(changed, p, COUNT) for p in PROMPTS] and not any(
        o.num_cached_tokens for o in outputs
    )
    renewed = llm.check_weights()
    assert {name for name in sums if sums[name] != renewed[name]} == {
        "rank0.embed_tokens.weight",
        *(f"rank0.layers.{i}.mlp.down_proj.weight" for i in range(3)),
    }
    assert llm.update_weights(folder) == 2
    assert tokens(llm) == expected and llm.check_weights() == sums


def test_engines_of_equal_weights_have_equal_checksums(folder, build):
    assert build(folder).check_weights() == build(folder, enable_sleep_mode=False).check_weights()


def test_running_requests_go_on_under_the_new_weights(folder, build, changed):
    llm = build(folder)
    stream = llm.stream(PROMPTS[1], params())
    for _ in range(5):
        had = list(next(stream).outputs[0].token_ids)
    llm.update_weights(changed)
    *_, last = stream
    rest = tiny.greedy(changed, PROMPTS[1] + had, COUNT - len(had))
    assert list(last.outputs[0].token_ids) == had + rest


@pytest.mark.parametrize(
    "name, what", [("llama", "architecture"), ("qwen3-tied", "head_dim"), ("qwen3-moe", "architecture")]
)
def test_another_model_is_refused_by_name_and_changes_nothing(root, folder, build, expected, name, what):
    llm = build(folder)
    with pytest.raises(CheckpointError, match=f"{name}.*{what}"):
        llm.update_weights(tiny.write_model(root, name))
    assert llm.weights_version == 0 and tokens(llm) == expected


def test_damaged_checkpoints_are_refused_before_anything_changes(folder, build, expected, tmp_path):
    llm = build(folder)
    weights = load_file(folder / "model.safetensors")
    damaged = {
        "lacks": {k: v for k, v in weights.items() if "norm" not in k},
        "shape": weights | {"model.norm.weight": torch.ones(7)},
        "does not have": weights | {"model.surplus.weight": torch.ones(7)},
    }
    for word, content in damaged.items():
        bad = tmp_path / word
        shutil.copytree(folder, bad)
        save_file(content, bad / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=f"(?s){word}"):
            llm.update_weights(bad)
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    with open(cut / "model.safetensors", "r+b") as file:
        file.truncate(os.path.getsize(cut / "model.safetensors") - 100)
    for bad in (cut, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match=bad.name):
            llm.update_weights(bad)
    assert llm.weights_version == 0 and tokens(llm) == expected


@pytest.mark.parametrize("error", [CheckpointError("a bad sector"), KeyboardInterrupt("a bad sector")])
def test_an_update_that_breaks_off_is_not_generated_from(
    folder, build, expected, monkeypatch, changed, error
):
    llm = build(folder)
    fail_once(monkeypatch, Loading, "take", error, after=7)
    with pytest.raises(type(error), match="bad sector"):
        llm.update_weights(changed)
    assert llm.weights_version == 0
    with pytest.raises(UnavailableError, match=r"weights.*broke off"):
        tokens(llm)
    llm.sleep(level=1)
    llm.wake_up()
    with pytest.raises(UnavailableError, match=r"weights.*broke off"):
        tokens(llm)
    llm.update_weights(folder)
    assert tokens(llm) == expected


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_packed_weights_sleep_and_are_replaced_where_they_are(build, tmp_path, kind):
    paths = tmp_path / "one.gguf", tmp_path / "two.gguf", tmp_path / "other.gguf"
    for seed, path in enumerate(paths[:2]):
        write_gguf(path, "qwen3", kind, seed)
    write_gguf(paths[2], "qwen3", "Q8_0" if kind == "Q4_0" else "Q4_0")
    options = {"dtype": "auto", "skip_tokenizer_init": True, "max_model_len": 128}
    prompts = [[i % 96 for i in prompt] for prompt in PROMPTS]

    def tokens(llm):
        return ids_of(llm.generate(prompts, params()))

    alone = [tokens(build(path, **options)) for path in paths[:2]]
    assert alone[0] != alone[1]
    llm = build(paths[0], **options)
    assert tokens(llm) == alone[0]
    for level, path, wanted in ((1, None, alone[0]), (2, paths[1], alone[1]), (2, paths[0], alone[0])):
        llm.sleep(level=level)
        llm.wake_up()
        if path is not None:
            llm.update_weights(path)
        assert tokens(llm) == wanted
    with pytest.raises(CheckpointError, match="packed from"):
        llm.update_weights(paths[2])
    with pytest.raises(CheckpointError, match="packed"):
        llm.update_weights_from_tensors({"model.norm.weight": torch.ones(64)})
    assert tokens(llm) == alone[0]


# Tensors


def test_tensors_of_layers_that_draft_are_left_out(build, tmp_path):
    """Regression: they were refused as unknown, though the files have them."""
    folder = write_family(tmp_path, "glm4-moe")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    llm = build(folder)
    last = f"model.layers.{config['num_hidden_layers']}"
    draft = {f"{last}.eh_proj.weight": torch.ones(48, 96), f"{last}.input_layernorm.weight": torch.ones(48)}
    llm.update_weights_from_tensors(draft | load_file(folder / "model.safetensors"))
    with pytest.raises(CheckpointError, match="input_layernorm"):
        llm.update_weights_from_tensors({f"{last}1.input_layernorm.weight": torch.ones(48)})


def test_tensors_of_this_process_replace_some_or_all_weights(folder, build, expected, changed):
    llm = build(folder)
    weights = load_file(changed / "model.safetensors")
    llm.update_weights_from_tensors({name: weight for name, weight in weights.items() if "embed" in name})
    llm.update_weights_from_tensors(
        {
            name: weight.bfloat16().float() if "norm" in name else weight
            for name, weight in weights.items()
            if "down_proj" in name
        }
    )
    assert llm.weights_version == 2 and tokens(llm) == [tiny.greedy(changed, p, COUNT) for p in PROMPTS]


def test_after_level_2_all_tensors_have_to_come_in_any_number_of_calls(folder, build, expected):
    llm = build(folder)
    llm.sleep(level=2)
    llm.wake_up()
    items = list(load_file(folder / "model.safetensors").items())
    for start in range(0, len(items), 10):
        with pytest.raises(UnavailableError, match="weights"):
            tokens(llm)
        llm.update_weights_from_tensors(dict(items[start : start + 10]))
    assert tokens(llm) == expected


def test_a_trainers_own_parameters_fit_also_where_its_experts_are_one_tensor(root, build):
    """transformers 5 holds a layer's experts fused; its parameters are what an RL trainer has at hand."""
    path = tiny.write_model(root, "qwen3-moe")
    llm, trainer = build(path), transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before = tokens(llm)
    parameters = dict(trainer.named_parameters())
    assert any(parameter.ndim == 3 for parameter in parameters.values())
    with SharedTensors(parameters) as shared:
        for given in (parameters, shared.handles):
            llm.sleep(level=2)
            llm.wake_up()
            llm.update_weights_from_tensors(given)
            assert tokens(llm) == before


@pytest.mark.parametrize("name", ["phi3-window", "qwen3.5-vision", "nemotron-h"])
def test_merged_and_renamed_parameters_fit_on_all_ways(name, root, build):
    """Regression: over shared memory and process groups only names of the decoder were known."""
    path = write_family(root, name)
    llm = build(path)
    parameters = dict(tiny._oracle(path).state_dict())  # with buffers, such as a router's correction
    sent = iter(parameters.values())
    group = SimpleNamespace(
        device=torch.device("cpu"),
        broadcast=lambda tensor: tensor.copy_(next(sent).detach()),
        close=lambda: None,
    )
    llm.core.ranks.runner.weights.groups["trainer"] = group
    before = tokens(llm)
    listed = [
        [get(tensor) for tensor in parameters.values()] for get in (lambda t: t.dtype, lambda t: [*t.shape])
    ]
    with SharedTensors(parameters) as shared:
        for update in (
            lambda: llm.update_weights_from_tensors(shared.handles),
            lambda: llm.update_weights_from_distributed([*parameters], *listed, "trainer"),
        ):
            llm.sleep(level=2)
            llm.wake_up()
            update()
            assert tokens(llm) == before
    assert next(sent, None) is None  # all were received


def test_tensors_that_do_not_fit_are_refused_before_anything_changes(folder, build, expected):
    llm = build(folder)
    good = {"model.norm.weight": torch.zeros(48)}
    for bad, word in (
        ({"model.nope.weight": torch.ones(48)}, "nope"),
        ({"model.layers.0.input_layernorm.weight": torch.ones(47)}, "47"),
        ({"model.layers.0.input_layernorm.weight": torch.ones(48, dtype=torch.int32)}, "int32"),
    ):
        with pytest.raises(CheckpointError, match=word):
            llm.update_weights_from_tensors(good | bad)
    for nothing in (torch.zeros(48, device="meta"), [0.0] * 48):
        with pytest.raises(ConfigError, match=r"model\.norm\.weight must be a tensor with data"):
            llm.update_weights_from_tensors(good | {"model.norm.weight": nothing})
    whole = {"name": "model.norm.weight", "dtype": "float32", "shape": [48]}
    for nonsense in (
        [{"name": "model.norm.weight"}],
        [7],
        7,
        [whole | {"dtype": "nn"}],
        [whole | {"shape": "x"}],
        [whole | {"shape": 3}],
    ):
        with pytest.raises(ConfigError, match="handles"):
            llm.update_weights_from_tensors(nonsense)
    assert llm.weights_version == 0 and tokens(llm) == expected


def test_shared_tensors_arrive_as_they_were_sent():
    sent = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.arange(6.0).view(2, 3).t()}
    with SharedTensors(sent) as shared:
        assert [h["name"] for h in shared.handles] == list(sent)
        received = {h["name"]: open_tensor(h) for h in shared.handles}
        handles = shared.handles
    assert all(torch.equal(received[name], tensor) for name, tensor in sent.items())
    with pytest.raises(CheckpointError, match="'a'"):
        open_tensor(handles[0])


def test_a_group_is_not_joined_with_impossible_options(folder, build):
    llm = build(folder)
    for options, word in (
        (dict(backend="carrier-pigeon"), "carrier-pigeon"),
        (dict(backend="nccl"), "nccl"),
        (dict(master_port=0), "port"),
        (dict(rank_offset=2), "world_size"),
    ):
        given = {
            "master_address": "127.0.0.1",
            "master_port": 29500,
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        } | options
        with pytest.raises(ConfigError, match=word):
            llm.init_weights_update_group(**given)
    with pytest.raises(ConfigError, match=r"weights update group .* does not exist"):
        llm.update_weights_from_distributed(["model.norm.weight"], ["float32"], [[48]])
