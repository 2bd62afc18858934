"""ExternalLink: models, load and health of an external worker."""

import asyncio
import logging

import pytest
from aiohttp import web

from shoal.errors import WorkerFailedError
from shoal.fleet.external import link as external_link
from shoal.fleet.external.link import ExternalLink, is_exposed, new_session, read_loads
from shoal.fleet.worker import WorkerLoad
from shoal.fleet.worker_spec import parse_worker

VLLM = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 1e-05
vllm:num_requests_running_total{engine="0",model_name="m"} 77.0
"""
LLAMA = "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n"
SGLANG = 'sglang:num_running_reqs{model_name="m",tp_rank="0"} 4.0\nsglang:token_usage{model_name="m",tp_rank="0"} 0.5\n'


def with_server(routes, use, spec=""):
    """`routes`: (method, path) -> status and JSON, or a function of the request. `use` gets the link and the
    requests that came."""
    asked = []

    async def answer(request):
        asked.append((request.method, request.path, await request.read(), dict(request.headers)))
        found = routes.get((request.method, request.path), (404, {}))
        return web.json_response(found[1], status=found[0])

    async def run():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with new_session() as session:
                url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                await use(ExternalLink(parse_worker(f"{url}{spec}"), session), asked)
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(run(), 30))


MODELS = {
    "data": [
        {"id": "base", "parent": None, "max_model_len": 77},
        {"id": "poems", "parent": "base"},
        {"id": 7},
        None,
    ]
}


def test_models_and_adapters_are_told_apart():
    async def use(link, asked):
        info = await link.check()
        assert info.models == ("base",) and info.adapters == {"poems"} and info.is_external
        assert (
            link.max_model_len("base") == 77 == link.max_model_len(None)
            and link.max_model_len("poems") is None
        )

    with_server({("GET", "/health"): (200, {}), ("GET", "/v1/models"): (200, MODELS)}, use, "/v1")


def test_a_server_without_health_is_asked_for_it_once():
    async def use(link, asked):
        for _ in range(3):
            await link.check()
        assert [path for _, path, _, _ in asked].count("/health") == 1

    with_server({("GET", "/v1/models"): (200, MODELS)}, use)


@pytest.mark.parametrize(
    "routes, why",
    [
        ({("GET", "/health"): (503, {})}, "503"),
        ({("GET", "/v1/models"): (401, {})}, "api_key_file"),
        ({("GET", "/v1/models"): (200, {"data": []})}, "no model"),
        ({("GET", "/v1/models"): (200, [])}, "200"),
        ({("GET", "/health"): (200, {}), ("GET", "/v1/models"): (500, {})}, "500"),
    ],
    ids=["loading", "key", "empty", "nonsense", "broken"],
)
def test_what_is_wrong_with_a_worker_is_said(routes, why):
    async def use(link, asked):
        with pytest.raises(WorkerFailedError, match=why):
            await link.check()

    with_server(routes, use)


def test_an_answer_without_end_is_a_failure(monkeypatch):
    monkeypatch.setattr(external_link, "MAX_ANSWER_BYTES", 1000)
    models = {"data": [{"id": f"model-{number}"} for number in range(1000)]}

    async def use(link, asked):
        with pytest.raises(WorkerFailedError, match="more than 1000 bytes"):
            await link.check()

    with_server({("GET", "/v1/models"): (200, models)}, use)


def test_nobody_there_is_a_failure_that_needs_no_second_try():
    async def run():
        async with new_session() as session:
            link = ExternalLink(parse_worker("http://127.0.0.1:9,id=a"), session)
            with pytest.raises(WorkerFailedError) as failure:
                await link.check()
            assert failure.value.is_absent
            assert str(failure.value) == "the worker a failed: ClientConnectorError: Connection refused"

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"]
)
def test_clients_are_not_told_where_a_worker_is(answer):
    async def speak(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def run():
        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, new_session() as session:
            link = ExternalLink(parse_worker(f"http://localhost:{port},id=a"), session)
            with pytest.raises(WorkerFailedError, match=r"the worker a failed: \w") as failure:
                async with link.exchange("GET", "/secret") as exchange:
                    await exchange.whole()
            assert not any(
                part in str(failure.value) for part in ("localhost", "127.0.0.1", str(port), "secret")
            )

    asyncio.run(run())


def test_a_worker_offers_no_more_models_than_the_limit(caplog):
    models = {"data": [{"id": f"model-{number}"} for number in range(external_link.MAX_MODELS + 5)]}

    async def use(link, asked):
        for _ in range(3):
            assert len((await link.check()).models) == external_link.MAX_MODELS
        assert caplog.text.count("the first 1000 are served") == 1

    with_server({("GET", "/v1/models"): (200, models)}, use)


@pytest.mark.parametrize("status", [200, 400, 429])
def test_a_canary_is_one_token_and_any_answer_of_a_working_server_will_do(status):
    async def use(link, asked):
        await link.canary()
        assert b'"max_tokens":1' in asked[-1][2] and asked[-1][1] == "/v1/chat/completions"

    with_server({("GET", "/v1/models"): (200, MODELS), ("POST", "/v1/chat/completions"): (status, {})}, use)


def test_a_canary_that_fails_is_told():
    async def use(link, asked):
        with pytest.raises(WorkerFailedError, match="500"):
            await link.canary()

    with_server({("GET", "/v1/models"): (200, MODELS), ("POST", "/v1/completions"): (500, {})}, use)


@pytest.mark.parametrize(
    "text, loads",
    [
        (
            VLLM,
            [
                WorkerLoad(num_running=3, num_waiting=2, kv_usage=0.25),
                WorkerLoad(num_running=1, kv_usage=1e-5, rank=1),
            ],
        ),
        (LLAMA, [WorkerLoad(num_running=2, num_waiting=1)]),
        (SGLANG, [WorkerLoad(num_running=4, kv_usage=0.5)]),
        (
            "python_info 1\nvllm:num_requests_running{} what\nvllm:num_requests_waiting 1.2.3\nsglang:token_usage NaN",
            [],
        ),
    ],
    ids=["vllm", "llama.cpp", "sglang", "others"],
)
def test_loads_are_read_out_of_metrics(text, loads):
    assert read_loads(text) == loads


def test_a_server_without_metrics_is_asked_once():
    async def use(link, asked):
        assert await link.loads() == [] == await link.loads()
        assert len(asked) == 1

    with_server({}, use)


def test_llama_cpp_is_not_asked_for_tokens():
    async def use(link, asked):
        assert link.may_tokenize("prompt")
        await link.check()
        assert not link.may_tokenize("prompt") and not link.may_tokenize("messages")

    with_server({("GET", "/v1/models"): (200, {"data": [{"id": "m", "owned_by": "llamacpp"}]})}, use)


@pytest.mark.parametrize(
    "url, exposed",
    [
        ("http://127.0.0.1:1", False),
        ("http://localhost:1", False),
        ("http://[::1]:1", False),
        ("https://gpu.example.org", False),
        ("http://gpu.example.org", True),
        ("http://192.0.2.1:9", True),
    ],
)
def test_plain_http_beyond_this_host_is_warned_of_unless_there_is_a_key(url, exposed, tmp_path, caplog):
    assert is_exposed(url) == exposed
    (tmp_path / "key").write_text("sesame")

    async def run():
        async with new_session() as session:
            ExternalLink(parse_worker(f"{url},id=a,api_key_file={tmp_path / 'key'}"), session)
            assert not caplog.records
            ExternalLink(parse_worker(f"{url},id=a"), session)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert bool(caplog.records) == exposed
