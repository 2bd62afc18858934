"""Models that take turns, over fake engines: their order, and the fate of requests when a change goes
wrong."""

import asyncio
import random
from collections import deque

import pytest

from shoal.api import FinishReason, Request
from shoal.engine.process.swap import Swapper, Turns
from shoal.errors import ConfigError, EngineDeadError, RequestError, UnavailableError
from shoal.fake_engine import FakeEngine
from shoal.sampling_params import SamplingParams
from tests.fake_server import FakeServer

NAMES = ("a", "b", "c")


# Whose turn it is


def turns_with(awake="a", running=0, patience=5.0, **waiting):
    turns = Turns(patience)
    turns.awake, turns.running[awake] = awake, running
    for name, times in waiting.items():
        turns.waiting[name] = deque(times)
    return turns


def test_the_awake_models_requests_begin_at_once():
    assert turns_with(running=3).may_begin("a", 0.0)
    assert not turns_with().may_begin("b", 0.0)


def test_they_wait_once_another_model_has_waited_too_long():
    turns = turns_with(running=3, b=[10.0, 19.0])
    assert turns.may_begin("a", 15.0) and not turns.may_begin("a", 15.1)


def test_a_change_waits_for_the_running_requests():
    assert turns_with(running=1, b=[1.0]).next() is None
    assert turns_with(running=0, b=[1.0]).next() == "b"


def test_the_longest_wait_comes_first():
    assert turns_with(b=[3.0], c=[2.0, 9.0]).next() == "c"
    assert turns_with(a=[1.0], b=[3.0]).next() == "a"


def test_the_awake_models_queue_moves_on_when_the_others_have_left():
    assert turns_with(running=2, a=[1.0], b=[]).next() == "a"
    assert turns_with(running=2, a=[1.0], b=[2.0]).next() is None


def test_nothing_begins_during_a_change():
    turns = turns_with(b=[1.0])
    turns.switching = True
    assert turns.next() is None and not turns.may_begin("a", 0.0)


# Doing it


class Checked(FakeEngine):
    """Knows its fellows: never may two be awake."""

    group: list
    fails: Exception | None = None
    ready: int = 0

    async def wake_up(self, tags=None):
        if self.fails is not None:
            raise self.fails
        assert all(e.state.level is not None for e in self.group if e is not self)
        return await super().wake_up(tags)

    async def memory_usage(self):
        return {"weights": {"device_bytes": 100, "host_bytes": 0, "ready_bytes": self.ready}}


async def build(patience=0.05, available=lambda: 1000, ready=0, **settings):
    swapper, engines, models = Swapper(patience, available), {}, {}
    group = []
    for name in NAMES:
        engine = Checked(300, **settings)
        engine.group, engine.ready = group, ready
        group.append(engine)
        engines[name] = engine
        models[name] = await swapper.add(name, engine, f"/{name}", engine.vocab_size)
    return swapper, engines, models


def request(i, tokens=4):
    return Request(f"r{i}", [1, 2], SamplingParams(max_tokens=tokens))


async def run(model, i, tokens=4):
    ids, last = [], None
    async for output in model.generate(request(i, tokens)):
        ids += output.token_ids
        last = output.finish_reason
    return len(ids), last


def scenario(function):
    async def bounded():
        await asyncio.wait_for(function(), 60)

    def test():
        asyncio.run(bounded())

    test.__name__ = function.__name__
    return test


@scenario
async def test_a_request_wakes_its_model_and_puts_the_other_to_sleep():
    swapper, engines, models = await build()
    for name in ("a", "b", "a", "c"):
        assert await run(models[name], 0) == (4, FinishReason.LENGTH)
        assert swapper.turns.awake == name
        assert [n for n in NAMES if not (await models[n].sleep_state()).is_sleeping] == [name]
    assert all(engines[n].state.level == 1 for n in "ab")


@scenario
async def test_a_request_that_no_model_could_take_wakes_none():
    swapper, _, models = await build()
    assert await run(models["a"], 0) == (4, FinishReason.LENGTH)
    for ids in ([], [10**6]):
        with pytest.raises(RequestError, match="prompt"):
            async for _ in models["b"].generate(Request("bad", ids, SamplingParams())):
                pass
    assert swapper.turns.awake == "a"


@scenario
async def test_random_load_is_answered_whole_whoever_it_is_for():
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    swapper, _, models = await build(patience=0.02, token_seconds=0.001)

    async def one(i):
        await asyncio.sleep(rng.random() * 0.5)
        tokens = rng.randrange(1, 30)
        assert await run(models[rng.choice(NAMES)], i, tokens) == (tokens, FinishReason.LENGTH)

    await asyncio.gather(*[one(i) for i in range(150)])
    assert not any(swapper.turns.running.values()) and not any(swapper.turns.waiting.values())


@scenario
async def test_a_stream_of_requests_for_one_model_starves_nobody():
    _, _, models = await build(patience=0.05, token_seconds=0.002)
    stop = False

    async def hog(i):
        while not stop:
            await run(models["a"], f"{i}-{random.random()}", 20)

    hogs = [asyncio.create_task(hog(i)) for i in range(4)]
    await asyncio.sleep(0.1)
    assert await run(models["b"], "patient") == (4, FinishReason.LENGTH)
    stop = True
    await asyncio.gather(*hogs)


@scenario
async def test_a_model_that_cannot_wake_sends_its_requests_away_and_hurts_nobody():
    swapper, engines, models = await build()
    await run(models["a"], 0)
    engines["b"].fails = MemoryError("taken")
    results = await asyncio.gather(*[run(models["b"], i) for i in range(3)], return_exceptions=True)
    assert all(isinstance(r, UnavailableError) for r in results)
    assert (await models["b"].sleep_state()).is_sleeping and swapper.turns.awake is None
    assert await run(models["a"], 1) == (4, FinishReason.LENGTH)
    engines["b"].fails = None
    assert await run(models["b"], 2) == (4, FinishReason.LENGTH)


@scenario
async def test_a_model_that_hung_when_its_turn_ended_gives_way_once_it_goes_on():
    swapper, engines, models = await build()
    await run(models["a"], 0)
    engines["a"]._dead = EngineDeadError("no sign of life for 60 s")
    with pytest.raises(UnavailableError, match="could not be woken"):  # its memory is still taken
        await run(models["b"], 1)
    engines["a"]._dead = None
    assert await run(models["b"], 2) == (4, FinishReason.LENGTH)
    assert swapper.turns.awake == "b" and engines["a"].state.level == 1


@scenario
async def test_a_dead_model_says_so_and_the_others_go_on():
    _, engines, models = await build()
    await run(models["a"], 0)
    engines["a"].kill()
    with pytest.raises(EngineDeadError):
        await run(models["a"], 1)
    engines["a"].state.level = 1  # a dead process holds no memory
    assert await run(models["b"], 2) == (4, FinishReason.LENGTH)
    with pytest.raises(EngineDeadError):
        await run(models["a"], 3)
    assert await run(models["c"], 4) == (4, FinishReason.LENGTH)


@scenario
async def test_a_request_that_waits_can_be_aborted_or_left():
    swapper, _, models = await build(patience=60, token_seconds=0.01)
    running = asyncio.create_task(run(models["a"], 0, 50))
    await asyncio.sleep(0.05)
    aborted, left = asyncio.create_task(run(models["b"], 1)), asyncio.create_task(run(models["b"], 2))
    await asyncio.sleep(0.05)
    assert (await models["b"].stats()).num_waiting == 2
    await models["b"].abort("r1")
    left.cancel()
    assert await aborted == (0, FinishReason.ABORT)
    with pytest.raises(asyncio.CancelledError):
        await left
    assert (await models["b"].stats()).num_waiting == 0
    assert await running == (50, FinishReason.LENGTH)
    assert swapper.turns.awake == "a" and (await models["b"].sleep_state()).is_sleeping


@scenario
async def test_short_host_memory_drops_the_weights_that_were_used_least_recently():
    engines = {}

    def taken():
        return sum(100 for e in engines.values() if e.state.level == 1)

    _, found, models = await build(available=lambda: 250 - taken())
    engines.update(found)
    for name in ("a", "b", "c", "a"):
        assert (await run(models[name], 0))[0] == 4
        assert taken() <= 200
    assert engines["c"].state.level is not None and engines["b"].state.level is not None
    assert sum(e.weights_version for e in engines.values()) >= 1, (
        "somebody's weights were dropped and came back from the file"
    )


def test_a_model_whose_weights_were_dropped_is_shown_so():
    async def after_a_swap():
        _, _, models = await build(available=lambda: 0)
        await run(models["a"], 0)
        await run(models["b"], 1)
        return models

    models = asyncio.run(after_a_swap())
    for name, state in (("a", "discard_all"), ("b", "awake")):
        with FakeServer(models[name]) as server:
            text = server.request("/metrics")[2]
        assert f'vllm:engine_sleep_state{{engine="0",model_name="tiny",sleep_state="{state}"}} 1.0' in text


@scenario
async def test_host_memory_that_is_held_ready_for_the_weights_need_not_be_found_again():
    _, engines, models = await build(available=lambda: 0, ready=100)
    for name in ("a", "b", "a"):
        assert (await run(models[name], 0))[0] == 4
    assert engines["b"].state.level == 1 and engines["a"].weights_version == 0


@scenario
async def test_a_model_whose_weights_find_no_host_memory_drops_them():
    """The estimate said that they would fit; the engine, which has to take the memory, says no."""
    _, engines, models = await build()
    real = engines["a"].sleep

    async def short(level=1, tags=None, mode="abort"):
        if level == 1:
            raise UnavailableError("16 bytes of host memory are needed, 3 are free")
        return await real(level, tags, mode)

    engines["a"].sleep = short
    for name in ("a", "b", "a"):
        assert await run(models[name], 0) == (4, FinishReason.LENGTH)
    assert engines["a"].weights_version == 1, "read again from its file"


@scenario
async def test_sleeping_by_hand_is_refused():
    _, _, models = await build()
    with pytest.raises(ConfigError, match="--swap"):
        await models["a"].sleep(1)
    with pytest.raises(ConfigError, match="--swap"):
        await models["a"].wake_up()


@scenario
async def test_new_weights_of_a_sleeping_model_are_loaded_in_its_turn():
    swapper, _, models = await build()
    assert await models["b"].update_weights("/other") == 1
    assert swapper.turns.awake == "b" and swapper.models["b"].path == "/other"
