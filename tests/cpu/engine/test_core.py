"""The core and its step loop through what is public: requests in, outputs out, a step at a time. The oracle of
tokens is `transformers`."""

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shoal.api import FinishReason, Request
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.ranks import ranks
from shoal.engine.runner import runner
from shoal.errors import ConfigError, EngineDeadError, RequestError, UnavailableError
from shoal.sampling_params import SamplingParams
from shoal.weights.source import resolve
from tests import tiny

PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((3, 17, 40))]
COUNT = 10
ENOUGH = 500  # steps


@pytest.fixture(scope="module")
def expected(folder):
    return [tiny.greedy(folder, p, COUNT) for p in PROMPTS]


@pytest.fixture
def build(folder):
    cores = []

    def make(**options):
        defaults = {
            "dtype": "float32",
            "device": "cpu",
            "max_model_len": 128,
            "kv_cache_memory_bytes": 4 << 20,
            "enable_sleep_mode": True,
        }
        config = EngineConfig(model=str(folder), **defaults | options)
        cores.append(EngineCore(config, resolve(config.model, None, None)))
        return cores[-1]

    yield make
    for core in cores:
        if core.error is None:
            core.check()
        core.exit()


def request(name, prompt, **options):
    params = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | options
    return Request(name, prompt, SamplingParams(**params))


class Collected:
    """Outputs of a core's steps, by request."""

    def __init__(self, core):
        self.core, self.tokens, self.last = core, {}, {}

    def step(self):
        outputs = self.core.step()
        for output in outputs:
            assert output.request_id not in self.ended, "an output after the last one"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.last[output.request_id] = output
        return outputs

    @property
    def ended(self):
        return {name for name, output in self.last.items() if output.finish_reason is not None}

    def finish(self):
        for _ in range(ENOUGH):
            if not self.core.has_work:
                return self
            self.step()
        raise AssertionError("the work does not end")


# Steps


@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_that_come_between_steps_give_the_oracles_tokens_and_end_once(build, expected, asynchronous):
    core = build(async_scheduling=asynchronous)
    collected = Collected(core)
    for i, prompt in enumerate(PROMPTS):
        core.add(request(str(i), prompt))
        collected.step()
    collected.finish()
    assert [collected.tokens[str(i)] for i in range(len(PROMPTS))] == expected
    assert {output.finish_reason for output in collected.last.values()} == {FinishReason.LENGTH}
    assert not core.has_work and core.step() == []


@pytest.mark.parametrize("asynchronous, late", [(False, 0), (True, 1)])
def test_asynchronous_scheduling_tells_each_token_one_step_later(build, asynchronous, late):
    core = build(async_scheduling=asynchronous)
    core.add(request("a", PROMPTS[0]))
    seen = [len(core.step()) for _ in range(4)]
    assert seen == [0] * late + [1] * (4 - late)
    core.abort("a")
    Collected(core).finish()


def test_drained_steps_are_told_by_the_next_step(build, expected):
    core = build(async_scheduling=True)
    collected = Collected(core)
    core.add(request("a", PROMPTS[1]))
    collected.step()
    core.loop.drain()
    assert core.has_work and "a" not in collected.tokens
    collected.finish()
    assert collected.tokens["a"] == expected[1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_aborted_request_ends_with_abort_and_the_others_go_on(build, expected, asynchronous):
    core = build(async_scheduling=asynchronous)
    collected = Collected(core)
    for i, prompt in enumerate(PROMPTS):
        core.add(request(str(i), prompt))
    while len(collected.tokens.get("1", [])) < 3:
        collected.step()
    core.abort("1")
    core.abort("nobody")
    collected.finish()
    assert collected.last["1"].finish_reason is FinishReason.ABORT
    assert collected.tokens["1"] == expected[1][: len(collected.tokens["1"])]
    assert [collected.tokens[i] for i in "02"] == [expected[0], expected[2]]
    assert core.stats().num_running == core.stats().num_waiting == 0


def test_a_request_that_is_finished_from_outside_says_where_it_stopped(build):
    core = build()
    collected = Collected(core)
    core.add(request("a", PROMPTS[0]))
    collected.step()
    core.finish("a", "the end")
    collected.finish()
    assert collected.last["a"].finish_reason is FinishReason.STOP
    assert collected.last["a"].stop_reason == "the end"


def test_prompt_log_probabilities_come_whole_with_the_first_token_of_a_prompt_in_pieces(build, folder):
    """One step holds the end of the first prompt and the beginning of the second."""
    core = build(max_num_batched_tokens=20)
    collected = Collected(core)
    prompts = {"a": PROMPTS[1], "b": PROMPTS[2]}
    for name, prompt in prompts.items():
        core.add(request(name, prompt, prompt_logprobs=0, logprobs=0, max_tokens=1))
    collected.finish()
    for name, prompt in prompts.items():
        found, oracle = collected.last[name].prompt_logprobs, tiny.logprobs(folder, prompt)
        assert found[0] is None and len(found) == len(prompt)
        for i, entry in enumerate(found[1:]):
            token = prompt[i + 1]
            assert entry[token].logprob == pytest.approx(oracle[i, token].item(), abs=1e-3)
        [drawn] = collected.tokens[name]
        assert collected.last[name].logprobs[0][drawn].rank == 1


# Requests


def test_an_impossible_request_is_refused_and_leaves_no_trace(build, expected):
    core = build(max_logprobs=3)
    for bad, word in (
        (request("a", [1, tiny.VOCAB]), "vocabulary"),
        (request("a", [1, -1]), "vocabulary"),
        (request("a", [1, 1 << 40]), "vocabulary"),
        (request("a", [1], stop_token_ids=[tiny.VOCAB]), "stop_token_ids"),
        (request("a", [1], allowed_token_ids=[tiny.VOCAB]), "allowed_token_ids"),
        (request("a", [1], logprobs=4), "max_logprobs"),
        (request("a", [1] * 200), "max_model_len"),
    ):
        with pytest.raises(RequestError, match=word):
            core.add(bad)
        assert not core.has_work
    core.add(request("a", PROMPTS[0]))
    assert Collected(core).finish().tokens["a"] == expected[0]


def test_a_core_that_refuses_takes_no_request_and_finishes_those_it_has(build, expected):
    core = build()
    core.add(request("a", PROMPTS[0]))
    core.refuse("not today")
    with pytest.raises(UnavailableError, match="not today"):
        core.add(request("b", PROMPTS[0]))
    assert Collected(core).finish().tokens == {"a": expected[0]}
    core.refuse(None)
    core.add(request("b", PROMPTS[0]))
    assert Collected(core).finish().tokens == {"b": expected[0]}


# A paused engine


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("level", [0, 1])
def test_kept_requests_are_no_work_while_the_core_sleeps(build, expected, asynchronous, level):
    core = build(async_scheduling=asynchronous)
    collected = Collected(core)
    for i, prompt in enumerate(PROMPTS):
        core.add(request(str(i), prompt))
    for _ in range(4):
        collected.step()
    core.sleep(level, mode="keep")
    assert "sleeps" in core.paused
    collected.finish()
    assert not collected.ended and core.step() == []
    core.wake_up()
    assert core.paused is None and core.has_work
    collected.finish()
    assert [collected.tokens[str(i)] for i in range(len(PROMPTS))] == expected


def test_a_core_whose_weights_are_lost_stands_still_until_an_update(build, folder, expected):
    core = build()
    core.add(request("a", PROMPTS[0]))
    core.sleep(2, mode="keep")
    core.wake_up()
    assert "update_weights" in core.paused and not core.has_work
    with pytest.raises(UnavailableError, match="update_weights"):
        core.add(request("b", PROMPTS[0]))
    core.update_weights(str(folder))
    assert core.paused is None
    assert Collected(core).finish().tokens["a"] == expected[0]


def test_an_interrupt_while_sleep_waits_for_the_last_step_leaves_a_whole_core(build, expected, monkeypatch):
    core = build(async_scheduling=True)
    collected = Collected(core)
    core.add(request("a", PROMPTS[1]))
    collected.step()

    def interrupted(result):
        raise KeyboardInterrupt

    monkeypatch.setattr(core.ranks, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        core.sleep(1, mode="keep")
    monkeypatch.undo()
    collected.finish()
    assert collected.last["a"].finish_reason is FinishReason.ABORT
    core.check()
    core.sleep(1)
    core.wake_up()
    core.add(request("b", PROMPTS[1]))
    assert collected.finish().tokens["b"] == expected[1]


# Failures


def test_a_failed_step_ends_the_core_for_good(build, monkeypatch):
    core = build()
    core.add(request("a", PROMPTS[0]))

    def broken(packed, options):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(core.ranks, "step", broken)
    with pytest.raises(EngineDeadError, match="a step failed: an illegal memory access"):
        core.step()
    monkeypatch.undo()
    assert isinstance(core.error, EngineDeadError)
    for use in (core.step, core.sleep, core.memory_usage, core.check_weights):
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            use()
    assert not core.tick()


@pytest.mark.parametrize("bug", [AssertionError(), KeyError(7), IndexError("list index out of range")])
def test_a_bug_in_a_step_ends_the_core(build, monkeypatch, bug):
    """Regression: exceptions other than RuntimeError were taken for Ctrl-C, and the core continued with a state that may have been corrupt."""
    core = build()
    core.add(request("a", PROMPTS[0]))

    def broken(*args):
        raise bug

    monkeypatch.setattr(core.scheduler, "schedule", broken)
    with pytest.raises(EngineDeadError, match=f"a step failed: {type(bug).__name__}"):
        core.step()
    monkeypatch.undo()
    with pytest.raises(EngineDeadError, match=type(bug).__name__):
        core.step()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["step", "wait"])
def test_an_interrupt_aborts_the_requests_and_the_core_goes_on(
    build, expected, monkeypatch, asynchronous, where
):
    core = build(async_scheduling=asynchronous)
    collected = Collected(core)
    core.add(request("a", PROMPTS[2]))
    real, calls = getattr(core.ranks, where), itertools.count()

    def interrupted(*args):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(core.ranks, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        collected.finish()
    collected.finish()
    assert collected.last["a"].finish_reason is FinishReason.ABORT
    core.check()
    core.add(request("b", PROMPTS[2]))
    collected.finish()
    assert collected.tokens["b"] == expected[2] and collected.last["b"].num_cached_tokens == 0


def test_a_core_that_was_ended_says_so_and_may_be_ended_again(build):
    threads = torch.get_num_threads()
    core = build()
    core.exit()
    core.exit()
    for use in (core.step, core.memory_usage, lambda: core.collective_rpc("state_digest")):
        with pytest.raises(EngineDeadError, match="was ended"):
            use()
    assert torch.get_num_threads() == threads


def test_a_cache_smaller_than_one_conversation_is_a_warning_with_its_option(build, caplog):
    core = build(kv_cache_memory_bytes=1 << 15)
    assert core.kv_cache_tokens < 128
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"end at {core.kv_cache_tokens} tokens" in line and "raise kv_cache_memory_bytes 32768" in line
    with pytest.raises(RequestError, match="shorten it or raise kv_cache_memory_bytes"):
        core.add(request("a", [1] * 120))


def test_cores_of_one_process_start_one_after_the_other(build, expected, monkeypatch):
    """Regression: two cores that started in threads used one default type, and on a GPU one stream of
    captures, at the same time."""
    starting, most = [], []

    def model_runner(config, *rest):
        starting.append(config)
        time.sleep(0.2)  # the other thread has time to start, too
        most.append(len(starting))
        try:
            return runner.ModelRunner(config, *rest)
        finally:
            starting.remove(config)

    monkeypatch.setattr(ranks, "ModelRunner", model_runner)
    with ThreadPoolExecutor() as threads:
        single, double = threads.map(lambda dtype: build(dtype=dtype), ["float32", "bfloat16"])
    assert most == [1, 1]
    assert {p.dtype for p in double.ranks.runner.model.parameters()} == {torch.bfloat16}
    single.add(request("a", PROMPTS[0]))
    assert Collected(single).finish().tokens["a"] == expected[0]


def test_a_core_that_cannot_start_says_why_and_leaves_nothing(build, monkeypatch):
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes 100 leaves no room for a single KV block"):
        build(kv_cache_memory_bytes=100)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(ranks, "ModelRunner", full)
        with pytest.raises(ConfigError, match="does not fit into the memory that is free of the GPU"):
            build()
    core = build()
    core.add(request("a", PROMPTS[0]))
    Collected(core).finish()
