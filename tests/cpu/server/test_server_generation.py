"""Running answers: their ends, and the slot in the queue that a client which leaves gives back."""

import asyncio
import time

import pytest

from shoal.errors import RequestError
from shoal.fake_engine import FakeEngine
from shoal.sampling_params import SamplingParams
from shoal.server.errors import ApiError
from shoal.server.served.generation import Generation
from shoal.server.served.model import LoadedModel, Prompt, ServedModel
from shoal.telemetry.timeline import Timeline
from tests.fake_server import END, FakeServer, byte_tokenizer, engine_saying, ids_of, post, read_until
from tests.waiting import eventually


class EchoEngine(FakeEngine):
    """Says the prompt again and again."""

    def _output(self, request, done, end, limit):
        self.reply = request.prompt_token_ids
        return super()._output(request, done, end, limit)


class Reluctant(FakeEngine):
    """Takes its time to let a request go."""

    async def generate(self, request):
        try:
            async for output in super().generate(request):
                yield output
        finally:
            await asyncio.sleep(0.5)


def served(engine):
    return ServedModel(
        ["m"],
        engine,
        LoadedModel(
            byte_tokenizer(), max_model_len=256, vocab_size=300, eos_token_ids=(END,), max_num_seqs=4
        ),
    )


def generation(model, n=1, max_tokens=200, **options):
    return Generation(
        model,
        [Prompt(ids_of("ab"))],
        SamplingParams(n=n, max_tokens=max_tokens),
        Timeline("r", "m", "/v1/completions", time.perf_counter()),
        request_id="r",
        **options,
    )


def test_an_answer_that_met_its_stop_string_ends_in_the_engine_while_others_go_on():
    with FakeServer(EchoEngine(300, token_seconds=0.02)) as server:
        body = {"prompt": ["ab", "xy"], "max_tokens": 250, "stop": "ba", "stream": True}
        connection = server.raw(post("/v1/completions", body))
        read_until(connection, b'"finish_reason":"stop"')
        eventually(lambda: len(server.engine._running) == 1)
        assert server.model.admission.active == 2, (
            "the other one ended too soon for this test to say anything"
        )
        connection.close()


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_what_lies_behind_a_stop_string_counts_nowhere_however_tokens_were_merged(seconds):
    with FakeServer(engine_saying("hello world, ", token_seconds=seconds)) as server:
        body = {"prompt": "x", "max_tokens": 100, "stop": "wor", "logprobs": 1, "return_token_ids": True}
        _, answer = server.json("/v1/completions", body)
        [choice] = answer["choices"]
        assert (
            choice["text"] == "hello "
            and choice["finish_reason"] == "stop"
            and choice["token_ids"] == ids_of("hello wor")
        )
        assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) == 9
        assert server.metric("vllm:generation_tokens_total") == 9


def test_a_request_sent_away_before_its_first_token_is_no_first_token():
    with FakeServer(FakeEngine(300, prefill_seconds=60.0)) as server:
        connection = server.raw(post("/v1/completions", {"prompt": "x"}))
        eventually(lambda: server.engine._running)
        assert server.request("/sleep", b"", admin=True)[0] == 200
        assert b'"finish_reason":"abort"' in read_until(connection, b"}}")
        assert (
            server.metric("vllm:time_to_first_token_seconds_count")
            == server.metric("vllm:prompt_tokens_total")
            == 0
        )


@pytest.mark.parametrize("n", [1, 3])
def test_a_task_that_is_cancelled_twice_gives_up_its_slot(n):
    async def run():
        model = served(Reluctant(300, token_seconds=60.0))

        async def read():
            async with generation(model, n) as answers:
                async for _ in answers:
                    pass

        task = asyncio.create_task(read())
        while not model.engine._running:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        assert model.admission.active == 0
        model.close()

    asyncio.run(run())


def test_a_deadline_that_comes_while_a_whole_answer_is_released_spoils_nothing():
    async def run():
        model = served(Reluctant(300))
        async with generation(model, max_tokens=3, timeout=0.3) as answers:
            async for [delta] in answers:
                if len(delta.token_ids):
                    break  # leaving takes half a second
        assert model.admission.active == 0
        with pytest.raises(ApiError, match="longer than"):
            async with generation(served(FakeEngine(300, token_seconds=60.0)), timeout=0.1) as answers:
                async for _ in answers:
                    pass
        model.close()

    asyncio.run(run())


# Another model


def test_a_served_model_that_becomes_another_speaks_for_it_and_keeps_its_queue():
    async def become():
        model = served(FakeEngine(300))
        model.admission.enter(3)
        model.become(LoadedModel(None, 32, vocab_size=300, eos_token_ids=(END,), max_num_seqs=5))
        assert model.max_model_len == 32 and model.loaded.tokenizer is None and model.changed.is_set()
        with pytest.raises(RequestError, match="without a tokenizer"):
            await model.encode(["text"])
        assert (model.admission.active, model.admission.limit) == (3, 5 + 1024)
        model.close()

    asyncio.run(become())


def test_stop_strings_of_a_model_are_no_defaults_without_a_tokenizer():
    """Regression: every request to such a server was refused, as stop strings need text."""
    for tokenizer, expected in ((byte_tokenizer(), {"stop": ["x"]}), (None, {})):
        loaded = LoadedModel(tokenizer, 32, 300, (END,), 5, generation_config={"stop_strings": ["x"]})
        assert loaded.default_params == expected
