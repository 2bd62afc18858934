"""Outputs that wait for a slow reader are merged, and none is lost."""

import asyncio

import pytest

from shoal.api import FinishReason, Logprob, Output
from shoal.collector import Collector
from shoal.config import EngineConfig
from shoal.control import UpdateWeights
from shoal.engine.process.async_llm import AsyncLLM
from shoal.errors import EngineDeadError
from shoal.wire import ModelInfo, Ready, Reply


def test_a_slow_reader_finds_one_output_with_everything_in_it():
    async def check():
        collector = Collector()
        collector.put(
            Output("r", [1], [{1: Logprob(-1.0)}], [None, {5: Logprob(-2.0)}], num_cached_tokens=16)
        )
        for i in range(2, 1000):
            collector.put(Output("r", [i], [{i: Logprob(-1.0)}]))
        collector.put(
            Output("r", [1000], [{1000: Logprob(-1.0)}], finish_reason=FinishReason.STOP, stop_reason=7)
        )
        output = await collector.get()
        assert (
            output.token_ids == list(range(1, 1001))
            and [next(iter(x)) for x in output.logprobs] == output.token_ids
        )
        assert output.prompt_logprobs == [None, {5: Logprob(-2.0)}] and output.num_cached_tokens == 16
        assert output.finish_reason is FinishReason.STOP and output.stop_reason == 7
        assert collector.output is None

    asyncio.run(check())


def test_a_ticket_for_kv_blocks_survives_a_slow_reader():
    async def check():
        collector = Collector()
        collector.put(Output("r", [1], kv_ticket=b"a ticket"))
        collector.put(Output("r", [2], finish_reason=FinishReason.LENGTH))
        output = await collector.get()
        assert (output.token_ids, output.kv_ticket) == ([1, 2], b"a ticket")

    asyncio.run(check())


def test_a_reader_that_waits_gets_each_output():
    async def check():
        collector, seen = Collector(), []

        async def read():
            while len(seen) < 3:
                seen.append((await collector.get()).token_ids)

        reader = asyncio.create_task(read())
        for i in range(3):
            await asyncio.sleep(0)
            collector.put(Output("r", [i]))
            await asyncio.sleep(0)
        await asyncio.wait_for(reader, 10)
        assert seen == [[0], [1], [2]]

    asyncio.run(check())


def test_what_came_before_the_end_is_delivered_before_the_error():
    async def check():
        collector = Collector()
        collector.put(Output("r", [1]))
        collector.fail(EngineDeadError("gone"))
        assert (await collector.get()).token_ids == [1]
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="gone"):
                await collector.get()

    asyncio.run(check())


def test_an_error_wakes_the_reader():
    async def check():
        collector = Collector()
        reader = asyncio.create_task(collector.get())
        await asyncio.sleep(0)
        collector.fail(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(reader, 10)

    asyncio.run(check())


def test_an_engine_that_stays_dead_can_be_asked_for_ever():
    """Its error is one object, raised each time: frames must not pile up on it, with all that they hold."""

    async def check():
        llm = AsyncLLM(EngineConfig(), restart=False, engine_timeout=0)
        llm.dead = EngineDeadError("gone")
        collector = Collector()
        collector.fail(llm.dead)
        for _ in range(50):
            for ask in (llm.stats, collector.get):
                with pytest.raises(EngineDeadError):
                    await ask()
        depth, frame = 0, llm.dead.__traceback__
        while frame is not None:
            depth, frame = depth + 1, frame.tb_next
        assert depth < 10

    asyncio.run(check())


def test_an_update_whose_caller_leaves_is_still_followed():
    """An HTTP client may be gone before the core has read the weights. The core becomes the other model nevertheless, so the parent must follow."""

    class Core:
        def send(self, message):
            self.call_id = message.call_id

    async def check():
        llm, followed = AsyncLLM(EngineConfig(), restart=False, engine_timeout=0), asyncio.Event()

        async def follow():
            followed.set()

        llm._core, llm.on_other_model = Core(), follow
        llm.info = ModelInfo("old", 1, 8, 8, 8, (0,), {}, 8, 64, 8, 8, "cpu", "float32")
        caller = asyncio.create_task(llm.control(UpdateWeights("other")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        llm._on_message(Ready(ModelInfo("other", 1, 8, 8, 8, (0,), {}, 8, 64, 8, 8, "cpu", "float32")))
        llm._on_message(Reply(llm._core.call_id, 2))
        await asyncio.wait_for(followed.wait(), 10)
        assert llm.config.model == llm.info.model == "other"

    asyncio.run(check())


@pytest.mark.parametrize(
    ("options", "source", "loaded"),
    [
        ({"model": "s3://bucket/model", "revision": "0123"}, "s3://bucket/model", (None, "auto")),
        ({"model": "org/model", "revision": "0123"}, "org/finetune", (None, "auto")),
        ({"model": "org/model", "revision": "0123"}, "org/model", ("0123", "auto")),
        ({"model": "made-up", "load_format": "dummy"}, "trained", (None, "auto")),
        ({"model": "made-up", "load_format": "dummy"}, "made-up", (None, "dummy")),
    ],
)
def test_a_core_that_is_restarted_loads_the_weights_of_the_last_update(options, source, loaded):
    """Regression: the revision and load_format of the start were kept, so a restarted core served the old or
    random weights without an error, or found no such revision."""

    class Core:
        def send(self, message):
            self.call_id = message.call_id

    async def check():
        llm = AsyncLLM(EngineConfig(**options), restart=True, engine_timeout=0)
        llm._core = Core()
        llm.info = ModelInfo("old", 1, 8, 8, 8, (0,), {}, 8, 64, 8, 8, "cpu", "float32")
        updating = asyncio.create_task(llm.control(UpdateWeights(source)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        llm._on_message(Reply(llm._core.call_id, 2))
        assert await updating == 2
        assert llm.config.model == source and (llm.config.revision, llm.config.load_format) == loaded

    asyncio.run(check())
