"""`shoal bench serve` against a small server of our own: what it sends and what it counts. Nothing here looks
at a clock."""

import asyncio
import itertools
import json
import math
import os
import signal
import statistics

import numpy
import pytest
from aiohttp import web

from shoal.bench import serving
from shoal.bench.serving import ServeBench
from shoal.cli.main import build_parser, main
from shoal.errors import ConfigError, UnavailableError


class Server:
    """Answers each request with `chunks`, lists of the texts of choices, then `usage`; `behave` may answer in
    its own way instead."""

    def __init__(self, chunks=("a", "b", "c"), usage=None, behave=None):
        self.chunks, self.behave = chunks, behave
        self.usage = {"prompt_tokens": 7, "completion_tokens": 6} if usage is None else usage
        self.requests, self.keys, self.running, self.most_running = [], [], 0, 0

    async def models(self, request):
        return web.json_response({"data": [{"id": "first"}, {"id": "second"}]})

    async def answer(self, request):
        body = await request.json()
        number = len(self.requests)
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if self.behave is not None and (response := await self.behave(number, request)) is not None:
            return response
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for text in self.chunks:
            choice = {"delta": {"content": text}} if "messages" in body else {"text": text}
            await response.write(
                b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"
            )
            await asyncio.sleep(0.001)
        if self.usage:
            await response.write(
                b"data: " + json.dumps({"choices": [], "usage": self.usage}).encode() + b"\n\n"
            )
        self.running -= 1
        await response.write(b": a comment\n\ndata: [DONE]\n\n")
        return response


def measure(server, **options):
    async def main():
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/v1/models", server.models),
                web.post("/v1/completions", server.answer),
                web.post("/v1/chat/completions", server.answer),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            defaults = {"base_url": url, "num_prompts": 8, "random_input_len": 5, "random_output_len": 6}
            return await serving.run(ServeBench(**defaults | options))
        finally:
            await runner.cleanup()

    return asyncio.run(main())


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_tokens_are_the_servers_count_and_gaps_are_those_between_chunks(endpoint):
    result = measure(Server(), endpoint=endpoint)
    assert result["completed"] == 8 and result["failed"] == 0 and result["model_id"] == "first"
    assert result["total_input_tokens"] == 56 and result["total_output_tokens"] == 48
    assert [len(gaps) for gaps in result["itls"]] == [2] * 8 and result["output_lens"] == [6] * 8
    assert all(t > 0 for t in result["ttfts"]) and result["mean_ttft_ms"] == pytest.approx(
        statistics.fmean(result["ttfts"]) * 1e3
    )
    tpots = [sum(gaps) / 5 for gaps in result["itls"]]
    assert result["mean_tpot_ms"] == pytest.approx(statistics.fmean(tpots) * 1e3)
    ends = [t + sum(gaps) for t, gaps in zip(result["ttfts"], result["itls"])]
    assert result["median_e2el_ms"] == pytest.approx(statistics.median(ends) * 1e3)
    assert result["output_throughput"] == pytest.approx(48 / result["duration"])


def test_options_reach_the_server():
    server = Server()
    measure(
        server,
        model="other",
        api_key="sesame",
        ignore_eos=True,
        temperature=0.0,
        vocab_size=50,
        random_prefix_len=3,
    )
    assert set(server.keys) == {"Bearer sesame"} and len(server.requests) == 8
    for body in server.requests:
        assert (
            body["model"] == "other"
            and body["max_tokens"] == 6
            and body["ignore_eos"] is True
            and body["temperature"] == 0.0
        )
        assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
        assert (
            len(body["prompt"]) == 8
            and max(body["prompt"]) < 50
            and body["prompt"][:3] == server.requests[0]["prompt"][:3]
        )
    server = Server()
    measure(server, endpoint="chat")
    assert all(
        len(b["messages"][0]["content"].split()) == 5 and "temperature" not in b and "ignore_eos" not in b
        for b in server.requests
    )


def test_warm_up_is_not_counted():
    server = Server()
    assert measure(server, num_warmups=3)["completed"] == 8 and len(server.requests) == 11
    assert not {str(b["prompt"]) for b in server.requests[:3]} & {
        str(b["prompt"]) for b in server.requests[3:]
    }


def test_concurrency_is_limited():
    server = Server(chunks=["x"] * 5)
    result = measure(server, max_concurrency=2)
    assert server.most_running <= 2 and result["max_concurrent_requests"] <= 2 and result["completed"] == 8


def test_ctrl_c_ends_the_measurement_with_what_was_answered():
    async def behave(number, request):
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.5)

    result = measure(Server(behave=behave), max_concurrency=1)
    assert (result["completed"], result["failed"]) == (3, 0)


def test_failures_are_counted_and_shown_and_spoil_no_figure():
    async def behave(number, request):
        if number == 0:
            return web.json_response({"error": {"message": "too busy"}}, status=429)
        if number > 4:
            return None
        response = web.StreamResponse()
        await response.prepare(request)
        if number == 1:
            await response.write(b'data: {"choices": [{"text": "half"}]}\n\n')
            request.transport.close()
        elif number == 2:
            await response.write(
                b'data: {"choices": [{"text": "half"}]}\n\ndata: {"error": {"message": "engine died"}}\n\n'
            )
        elif number == 3:
            await response.write(b'data: {"choices": [{"text": "half"}]}\n\n')
        else:
            await response.write(b"data: {no json\n\n")
        return response

    result = measure(Server(behave=behave), max_concurrency=1)
    assert result["completed"] == 3 and result["failed"] == 5 and result["total_output_tokens"] == 18
    errors = result["errors"]
    assert (
        "429" in errors[0]
        and "too busy" in errors[0]
        and "engine died" in errors[2]
        and "[DONE]" in errors[3]
        and all(errors[:5])
    )
    assert errors[5:] == [""] * 3 and result["output_lens"][:5] == [0] * 5
    shown = serving.table(result, [99])
    assert (
        "Failed requests:                         5" in shown
        and "1 x HTTP 429" in shown
        and "engine died" in shown
    )


def test_an_answer_without_usage_or_text_is_a_failure():
    assert "usage" in measure(Server(usage={}))["errors"][0]
    result = measure(Server(chunks=()))
    assert result["failed"] == 8 and "without text" in result["errors"][0] and result["mean_ttft_ms"] == 0


def test_no_server_is_one_clear_error():
    with pytest.raises(UnavailableError, match=r"no server answers at http://127.0.0.1:9 .*is it up"):
        asyncio.run(serving.run(ServeBench(base_url="http://127.0.0.1:9")))


def test_arrivals_have_the_rate_and_the_burstiness():
    def gaps(**options):
        times = serving.arrival_times(ServeBench(num_prompts=20_000, request_rate=50.0, **options))
        return [b - a for a, b in itertools.pairwise(times)]

    for burstiness in (0.25, 1.0, 4.0):  # a gamma distribution's deviation is mean / sqrt(shape)
        found = gaps(burstiness=burstiness)
        assert statistics.fmean(found) == pytest.approx(1 / 50, rel=0.05)
        assert statistics.pstdev(found) == pytest.approx(1 / 50 / math.sqrt(burstiness), rel=0.1)
    assert gaps() == gaps() != gaps(seed=1)
    assert serving.arrival_times(ServeBench(num_prompts=3)) == [0.0] * 3


def test_lengths_vary_within_the_ratio():
    asks = serving.make_requests(
        ServeBench(num_prompts=500, random_input_len=100, random_output_len=10, random_range_ratio=0.3)
    )
    assert {len(a.prompt) for a in asks} == set(range(70, 131)) and {a.output_len for a in asks} == set(
        range(7, 14)
    )


def test_conversations_come_from_a_file(tmp_path):
    path = tmp_path / "conversations.json"
    turns = [
        [{"from": "human", "value": f"question {i}"}, {"from": "gpt", "value": "x" * 40}] for i in range(3)
    ]
    path.write_text(
        json.dumps([{"conversations": t} for t in turns] + [{"conversations": [{"value": "alone"}]}])
    )
    options = {"dataset_name": "sharegpt", "dataset_path": str(path), "num_prompts": 7}
    asks = serving.make_requests(ServeBench(**options))
    assert (
        len(asks) == 7
        and {a.prompt for a in asks} == {f"question {i}" for i in range(3)}
        and {a.output_len for a in asks} == {10}
    )
    assert {a.output_len for a in serving.make_requests(ServeBench(**options, sharegpt_output_len=5))} == {5}
    for broken in ("[{}]", "not json", "[]"):
        path.write_text(broken)
        with pytest.raises(ConfigError, match="dataset_path"):
            serving.make_requests(ServeBench(**options))


@pytest.mark.parametrize(
    "options, hint",
    [
        ({"num_prompts": 0}, "num_prompts must be .*, got 0"),
        ({"request_rate": 0.0}, "request_rate"),
        ({"request_rate": math.nan}, "request_rate"),
        ({"burstiness": -1.0}, "burstiness"),
        ({"random_range_ratio": 1.0}, "random_range_ratio"),
        ({"endpoint": "embeddings"}, "endpoint"),
        ({"dataset_name": "sharegpt"}, "dataset_path"),
        ({"dataset_path": "x"}, "dataset_path"),
        ({"base_url": "localhost"}, "base_url"),
        ({"metric_percentiles": "50,x"}, "metric_percentiles"),
        ({"metric_percentiles": "101"}, "metric_percentiles"),
        ({"max_concurrency": 0}, "max_concurrency"),
    ],
)
def test_impossible_options_are_named(options, hint):
    with pytest.raises(ConfigError, match=hint):
        ServeBench(**options)


def test_percentiles_are_numpys():
    values = [5.0, 1.0, 4.0, 4.5, 9.0, 2.0]
    for p in (0, 1, 25, 50, 90, 99, 100):
        assert serving.percentile(values, p) == pytest.approx(numpy.percentile(values, p))


def test_the_plot_and_the_table_show_a_result(tmp_path):
    # with figures, and with failures alone
    for result in (measure(Server(), request_rate=1e4), measure(Server(usage={}))):
        path = tmp_path / "plot.picture"
        serving.plot(result, str(path))
        assert path.read_bytes().startswith(b"\x89PNG")
        assert ("Median TTFT (ms)" in serving.table(result, [99])) == (
            result["completed"] > 0
        ) and json.dumps(result)


def test_the_command_takes_vllms_flags():
    flags = (
        "--request-rate inf --num-prompts 5 --ignore-eos --save-result --result-filename x "
        "--max-concurrency 4"
    )
    arguments = build_parser().parse_args(["bench", "serve", *flags.split()])
    assert (
        math.isinf(arguments.request_rate)
        and arguments.max_concurrency == 4
        and arguments.ignore_eos
        and arguments.save_result
    )


def test_vllms_command_lines_measure_the_same(monkeypatch, tmp_path, capsys):
    """Regression: --backend, --host and --port, and vLLM's path as --endpoint ended with unknown options."""
    found = []

    def command(bench, result_file, plot_file):
        found.append((bench.base_url, bench.endpoint, bench.model, bench.random_input_len, result_file))
        return {"completed": 1}

    monkeypatch.setattr(serving, "command", command)

    def bench_serve(flags):
        return main(["bench", "serve", *flags.split()])

    vllms = "--backend vllm --model m --tokenizer t --host 10.0.0.1 --port 8001 --input-len 7"
    rest = f"--percentile-metrics ttft,itl --trust-remote-code --save-result --result-dir {tmp_path}"
    assert bench_serve(f"{vllms} {rest}") == 0
    assert bench_serve("--backend openai-chat --endpoint /v1/chat/completions --port 9") == 0
    assert bench_serve("--endpoint /v1/completions --base-url http://a --port 9") == 0
    assert bench_serve("--backend openai-chat") == 0
    assert found == [
        ("http://10.0.0.1:8001", "completions", "m", 7, str(tmp_path / "bench-serve.json")),
        ("http://127.0.0.1:9", "chat", None, 1024, None),
        ("http://a", "completions", None, 1024, None),
        ("http://127.0.0.1:8000", "chat", None, 1024, None),
    ]
    assert bench_serve("--goodput ttft:100") == 1
    assert bench_serve("--backend tgi") == 1
    assert "must be one of completions, chat, got 'tgi'" in capsys.readouterr().err
