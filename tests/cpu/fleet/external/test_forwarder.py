"""Requests on their way to external workers: what goes on, what comes back, and what is seen of a worker that
fails."""

import asyncio
import functools
import json
import random
import time
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from shoal.errors import BusyError, UnavailableError, WorkerFailedError
from shoal.fleet.clock import LoopClock
from shoal.fleet.external import link as external_link
from shoal.fleet.external import stream as external_stream
from shoal.fleet.external.forwarder import ExternalForwarder
from shoal.fleet.external.link import ExternalLink, new_session
from shoal.fleet.external.prompt_tokens import PromptTokens
from shoal.fleet.external.request import ExternalRequest
from shoal.fleet.external.sse import SseReader
from shoal.fleet.external.stream import ExternalStream
from shoal.fleet.index.indexer import KvIndexer
from shoal.fleet.routing.dispatcher import Dispatcher
from shoal.fleet.routing.kv_router import KvRouter
from shoal.fleet.worker import Worker, WorkerLoad
from shoal.fleet.worker_spec import parse_worker
from shoal.fleet_api import ExternalCall
from shoal.telemetry.timeline import Timeline
from shoal.telemetry.tracing import TRACE_HEADERS
from tests import external_worker
from tests.external_worker import MODEL, ExternalWorker, Fault, ids_of, template, written
from tests.fake_server import byte_tokenizer

PROMPT = "Which fish swim together? "
MESSAGES = [{"role": "user", "content": "Which fish swim together?"}]


def line(headers=()):
    """headers: the client's, whose trace context is forwarded."""
    found = Timeline("request", "tiny", "/v1/completions", time.perf_counter())
    found.trace_headers = {
        name: headers[name.encode()].decode() for name in TRACE_HEADERS if name.encode() in headers
    }
    return found


class Answer:
    def __init__(self, answer, body):
        self.status, self.headers, self.body = answer.status, dict(answer.headers), body
        self.worker = self.headers.get(b"x-shoal-worker", b"").decode()
        self.is_stream = answer.content_type.startswith(b"text/event-stream")
        self.text, self.finish, self.usage, self.chunks, self.is_done = "", None, None, [], False
        if not self.is_stream:
            self.json = json.loads(body)
            return
        for data in SseReader().feed(body):
            assert not self.is_done, "something came behind [DONE]"
            if data == b"[DONE]":
                self.is_done = True
                continue
            chunk = json.loads(data)
            self.chunks.append(chunk)
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk["choices"]:
                self.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                self.finish = choice["finish_reason"] or self.finish


class Front:
    def __init__(self, workers, *, limit=3, keys=(), dp_size=1):
        self.workers, self.limit, self.keys, self.dp_size = workers, limit, keys, dp_size

    async def start(self, stack):
        clock = LoopClock()
        router = KvRouter(KvIndexer(16), policy="round_robin", clock=clock.now)
        self.dispatcher = Dispatcher(router, max_queued=2, clock=clock)
        session = new_session()
        stack.push_async_callback(session.close)
        for i, worker in enumerate(self.workers):
            await stack.enter_async_context(worker)
            key = f",api_key_file={self.keys[i]}" if self.keys else ""
            link = ExternalLink(
                parse_worker(f"{worker.url},id={'abcdef'[i]},dp_size={self.dp_size}{key}"), session
            )
            known = Worker(await link.check(), link, clock.now)
            known.reached()
            self.dispatcher.add(known)
        self.tokens = PromptTokens(self.dispatcher, None)
        self.forwarder = ExternalForwarder(self.dispatcher, self.tokens, migration_limit=self.limit)

    async def begin(self, path="/v1/completions", data=None, headers=None, **body):
        data = json.dumps({"model": MODEL, **body}).encode() if data is None else data
        headers = {b"content-type": b"application/json", **(headers or {})}
        self.line = line(headers)
        return await self.forwarder.forward(ExternalCall(self.line, "POST", path, headers, data))

    async def ask(self, *args, **body):
        answer = await self.begin(*args, **body)
        return Answer(answer, b"".join([piece async for piece in answer.chunks]))

    async def stream(self, form, prompt=PROMPT, **body):
        """A stream of completions or of a chat whose prompt is MESSAGES."""
        given = {"prompt": prompt} if form == "completion" else {"messages": MESSAGES}
        path = "/v1/completions" if form == "completion" else "/v1/chat/completions"
        return await self.ask(path, stream=True, **given, **body)


@asynccontextmanager
async def front(*workers, **options):
    async with AsyncExitStack() as stack:
        made = Front(workers, **options)
        await made.start(stack)
        yield made


def prompt_of(form):
    return PROMPT if form == "completion" else template(MESSAGES)


# What goes on and what comes back


def running(test):
    """Runs an async test; what hangs fails."""

    @functools.wraps(test)
    def run(**given):
        asyncio.run(asyncio.wait_for(test(**given), 60))

    return run


@running
async def test_a_body_goes_on_as_it_came():
    a = ExternalWorker()
    async with front(a) as router:
        bodies = [
            b'{"model":"toy",  "messages":[{"role":"user","content":[{"type":"image_url"}]}], "unheard_of":{"x":[1e400,-0]} }',
            b'{"model":"toy","n":2,"stream":false,"prompt":"x"}',
        ]
        await router.ask("/v1/messages?beta=true", data=bodies[0])
        await router.ask("/v1/embeddings", data=bodies[1])
        await router.ask(
            "/v1/chat/completions", data=json.dumps({"model": MODEL, "messages": MESSAGES, "x": 1}).encode()
        )
        assert [one.data for one in a.received[:2]] == bodies and a.received[2].body["x"] == 1
        assert [one.path for one in a.received[:2]] == ["/v1/messages?beta=true", "/v1/embeddings"]


@running
async def test_a_stream_has_nothing_that_the_client_did_not_ask_for():
    async with front(ExternalWorker()) as router:
        for form in ("completion", "chat"):
            plain = await router.stream(form, max_tokens=4)
            assert plain.text == written(prompt_of(form), 4) and plain.usage is None and plain.is_done
            assert "token_ids" not in str(plain.chunks) and "usage" not in str(plain.chunks)
            full = await router.stream(
                form, max_tokens=4, return_token_ids=True, stream_options={"include_usage": True}
            )
            assert [i for c in full.chunks for x in c["choices"] for i in x.get("token_ids", [])] == ids_of(
                full.text
            )
            assert str(full.chunks).count("prompt_token_ids") == 1
            assert full.usage["completion_tokens"] == 4 and full.is_done


@running
async def test_a_server_that_does_not_say_done_has_not_failed():
    a = ExternalWorker()
    a.says_done = False
    async with front(a) as router:
        for options in ({}, {"n": 2}, {"max_tokens": 1}, {"stream_options": {"include_usage": True}}):
            answer = await router.stream("completion", **{"max_tokens": 5, **options})
            assert answer.text == written(PROMPT, options.get("max_tokens", 5)) and answer.is_done
            assert answer.finish == "length" and (answer.usage is not None) == ("stream_options" in options)
        assert len(a.received) == 4 and router.dispatcher.workers["a"].is_reached


@running
async def test_connections_to_a_worker_are_used_again():
    a = ExternalWorker()
    a.end_delay = 0.05
    async with front(a) as router:
        for stream in (True, False, True, True):
            await router.ask(prompt="x", max_tokens=3, stream=stream)
        assert len({one.peer for one in a.received}) == 1


@running
async def test_a_server_that_refuses_unknown_fields_is_asked_without_ours():
    a = ExternalWorker(unknown_fields=("return_token_ids",))
    async with front(a) as router:
        for _ in range(2):
            answer = await router.stream("completion", max_tokens=4)
            assert answer.status == 200 and answer.text == written(PROMPT, 4)
        assert len(a.received) == 3, "it was found out once"


@running
async def test_headers_go_on_but_for_the_clients_key_in_whose_place_is_the_workers_own(tmp_path):
    (tmp_path / "key").write_text("of the worker")
    a = ExternalWorker()
    async with front(a, keys=[tmp_path / "key"]) as router:
        await router.ask(
            prompt="x",
            headers={
                b"authorization": b"Bearer of the router",
                b"traceparent": b"00-1-2-03",
                b"content-type": b"application/x-www-form-urlencoded",
            },
        )
        (one,) = a.received
        assert one.headers["Authorization"] == "Bearer of the worker"
        assert one.headers["traceparent"] == "00-1-2-03"
        assert one.headers["Content-Type"] == "application/json", "vLLM takes no form, which curl calls it"


@running
async def test_a_data_parallel_rank_is_named_to_the_worker():
    a = ExternalWorker()
    async with front(a, dp_size=2) as router:
        for _ in range(2):
            await router.ask(prompt="x")
        assert {one.headers["X-data-parallel-rank"] for one in a.received} == {"0", "1"}


@running
async def test_a_refusal_is_passed_on_unchanged_and_not_tried_elsewhere():
    a, b = ExternalWorker(), ExternalWorker()
    a.faults, b.faults = [Fault(404)], [Fault(404)]
    async with front(a, b) as router:
        for stream in (False, True):
            answer = await router.ask(prompt="x", stream=stream)
            assert answer.status == 404 and answer.json["error"]["message"] == "a fault on demand"
        assert len(a.received + b.received) == 2
        assert all(worker.is_reached for worker in router.dispatcher.workers.values())


@running
async def test_a_worker_that_refuses_the_routers_key_is_a_failure_of_the_fleet_and_not_the_clients():
    a, b = ExternalWorker(), ExternalWorker()
    a.faults = [Fault(401)]
    async with front(a, b) as router:
        for _ in range(2):
            answer = await router.ask(prompt="x", max_tokens=2)
            assert answer.status == 200 and answer.worker == "b"


@running
async def test_a_full_worker_means_waiting_and_a_full_queue_means_busy():
    a = ExternalWorker()
    a.faults = [Fault(429, times=3, headers={"Retry-After": "0.2"})]
    async with front(a) as router:
        answers = await asyncio.gather(
            *(router.ask(prompt="x", max_tokens=4) for _ in range(3)), return_exceptions=True
        )
        busy = [one for one in answers if isinstance(one, BusyError)]
        assert len(busy) == 1, "two wait, one finds the queue full"
        assert all(one.json["choices"][0]["text"] == written("x", 4) for one in answers if one not in busy)


# Failures


@pytest.mark.parametrize("kind", [500, "break", "garble", "error"])
@pytest.mark.parametrize("form", ["completion", "chat"])
@running
async def test_a_failure_before_the_first_token_is_followed_by_another_try(form, kind):
    a, b = ExternalWorker(), ExternalWorker()
    a.faults = [Fault(kind)]
    async with front(a, b) as router:
        for _ in range(2):
            answer = await router.stream(form, max_tokens=8)
            assert answer.text == written(prompt_of(form), 8) and answer.worker == "b"


@running
async def test_a_request_that_every_worker_fails_at_ends():
    a, b = ExternalWorker(), ExternalWorker()
    a.faults, b.faults = [Fault(500)], [Fault(500)]
    async with front(a, b) as router:
        with pytest.raises(WorkerFailedError, match="500"):
            await router.ask(prompt="x")
        assert len(a.received) == len(b.received) == 1


@running
async def test_a_request_that_has_waited_and_is_given_up_leaves_the_queue():
    a = ExternalWorker()
    a.faults = [Fault(429, times=1, headers={"Retry-After": "0.1"}), Fault(500)]
    async with front(a) as router:
        with pytest.raises(WorkerFailedError, match="500"):
            await router.ask(prompt="x")
        assert router.dispatcher.times.queue.sum > 0 and router.dispatcher.queue.length == 0


@running
async def test_an_answer_without_a_byte_is_passed_on():
    async def nothing(request):
        return web.Response(status=200, headers={"Content-Type": "application/x-ndjson"})

    a = ExternalWorker()
    async with front(a) as router:
        app = web.Application()
        app.router.add_post("/api/chat", nothing)
        async with TestServer(app) as server:
            [worker] = router.dispatcher.workers.values()
            worker.link._url = str(server.make_url("")).rstrip("/")
            answer = await router.begin("/api/chat", stream=True)
            assert answer.status == 200 and [piece async for piece in answer.chunks if piece] == []


@running
async def test_a_worker_without_the_adapter_is_no_other_try():
    a, b = ExternalWorker(), ExternalWorker(adapters=("poems",))
    b.faults = [Fault("break")]
    async with front(a, b) as router:
        with pytest.raises(WorkerFailedError):
            await router.ask(data=b'{"model":"poems","prompt":"x"}')
        assert not a.received and len(b.received) == 2 and router.dispatcher.workers["b"].is_reached


@pytest.mark.parametrize("form", ["completion", "chat"])
@running
async def test_a_time_line_tells_of_a_move_and_not_of_what_the_worker_said(form):
    a, b = ExternalWorker(), ExternalWorker()
    a.faults = [Fault("break", 4)]
    async with front(a, b) as router:
        await router.stream(form, max_tokens=10)
        told = router.line
        assert (told.output_tokens, told.prompt_tokens) == (10, len(ids_of(prompt_of(form))))
        spans = told.all_spans()
        names = [(span.name, span.worker) for span in spans]
        assert names[:4] == [("queue", ""), ("routing", "a"), ("prefill", "a"), ("decode", "a")]
        assert {"migration", "routing", "prefill", "decode"} == {
            name for name, worker in names if worker == "b"
        }
        [move] = [span for span in spans if span.name == "migration"]
        assert move.attributes == {"from": "a", "why": "it failed", "output_tokens": 4}
        assert told.summary().workers == ["a", "b"] and told.finish_reason == "length"


@running
async def test_a_whole_answers_tokens_are_counted_as_its_worker_counts_them():
    async with front(ExternalWorker()) as router:
        await router.ask(prompt=PROMPT, max_tokens=7)
        told = router.line
        assert (told.output_tokens, told.prompt_tokens) == (7, len(ids_of(PROMPT)))
        assert told.finish_reason == "length"
        assert [span.name for span in told.all_spans()] == ["queue", "routing", "prefill", "decode"]


@running
async def test_an_answer_that_counts_no_tokens_has_its_time_at_the_worker():
    async with front(ExternalWorker()) as router:
        await router.ask("/tokenize", prompt=PROMPT)
        assert [span.name for span in router.line.all_spans()] == ["queue", "routing", "prefill"]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("form", ["completion", "chat"])
@running
async def test_a_stream_that_breaks_anywhere_is_one_stream_to_the_client(form, seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    alphabet = rng.choice(["letters", "unicode", "junk"])
    sizes = rng.choice([(1,), (1, 2, 3), (5,)])
    primes = alphabet == "junk" or rng.random() < 0.5
    workers = [
        ExternalWorker(alphabet=alphabet, chunk_sizes=sizes, primes=primes, seed=seed + i) for i in range(4)
    ]
    async with front(*workers) as router:
        for _ in range(6):
            for worker in workers[:3]:
                worker.faults = [Fault(rng.choice(["break", "garble", "error"]), rng.randrange(12), times=1)]
            limit, wants_ids = rng.randrange(1, 40), primes and rng.random() < 0.3
            more = {"stream_options": {"include_usage": True}} | (
                {"return_token_ids": True} if wants_ids else {}
            )
            answer = await router.stream(form, max_tokens=limit, **more)
            prompt = prompt_of(form)
            assert (
                answer.text == written(prompt, limit, alphabet)
                and answer.finish == "length"
                and answer.is_done
            )
            assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (
                len(ids_of(prompt)),
                limit,
            )
            assert answer.usage["total_tokens"] == len(ids_of(prompt)) + limit
            assert len({(c["id"], c["object"], c["created"], c["model"]) for c in answer.chunks}) == 1
            roles = [x for c in answer.chunks for x in c["choices"] if (x.get("delta") or {}).get("role")]
            assert len(roles) == (form == "chat")
            if wants_ids and alphabet == "letters":
                assert [
                    i for c in answer.chunks for x in c["choices"] for i in x.get("token_ids", [])
                ] == ids_of(answer.text)


@pytest.mark.parametrize("form", ["completion", "chat"])
@running
async def test_a_worker_lost_behind_its_last_token_is_not_missed(form):
    a, b = ExternalWorker(), ExternalWorker()
    a.faults, b.faults = [Fault("break", 9)], [Fault("break", 9)]
    async with front(a, b) as router:
        for options in ({}, {"stream_options": {"include_usage": True}}):
            answer = await router.stream(form, max_tokens=9, **options)
            assert answer.text == written(prompt_of(form), 9) and answer.finish == "length" and answer.is_done
            assert options == {} or answer.usage["completion_tokens"] == 9
        assert len(a.received + b.received) == 2, "nothing went elsewhere"


@pytest.mark.parametrize("seed", range(12))
@running
async def test_a_stop_string_that_two_workers_write_ends_the_answer(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    whole = written(PROMPT, 40)
    at = rng.randrange(2, 30)
    stop = whole[at : at + 4]
    at = whole.index(stop)
    a, b, c = (ExternalWorker(chunk_sizes=(1, 2), seed=seed + i) for i in range(3))
    async with front(a, b, c) as router:
        for after in range(1, at + 4):
            a.faults = [Fault("break", after, times=1)]
            b.faults = [Fault("break", after, times=1)]
            answer = await router.stream(
                "completion", max_tokens=40, stop=[stop, "never"], stream_options={"include_usage": True}
            )
            assert answer.text == whole[:at] and answer.finish == "stop" and answer.is_done, (after, stop)
            assert answer.usage["completion_tokens"] <= at + 12, (
                "what was held back counts, as it was generated"
            )


@running
async def test_stop_strings_over_a_break_need_somebody_who_detokenizes():
    a, b = (ExternalWorker(has_tokenizer=False) for _ in range(2))
    a.faults = [Fault("break", 12)]
    async with front(a, b) as router:
        with pytest.raises(UnavailableError, match="detokenize"):
            await router.stream("completion", max_tokens=40, stop=["never"])
        a.faults = [Fault("break", 12)]
        assert (await router.stream("completion", max_tokens=40, stop="!")).text == written(PROMPT, 40)


@running
async def test_migrations_have_a_limit():
    workers = [ExternalWorker() for _ in range(4)]
    async with front(*workers, limit=2) as router:
        for worker in workers:
            worker.faults = [Fault("break", 3)]
        answer = await router.begin(prompt=PROMPT, max_tokens=30, stream=True)
        with pytest.raises(UnavailableError, match="migration-limit"):
            async for _ in answer.chunks:
                pass
        assert sum(len(worker.received) for worker in workers) == 3 and router.forwarder.num_migrations == 2


@pytest.mark.parametrize(
    "body, why",
    [
        ({"n": 2}, "several answers"),
        ({"response_format": {"type": "json_object"}}, "grammar"),
        ({"guided_regex": "[a-z]+"}, "grammar"),
        ({"structured_outputs": {"choice": ["a"]}}, "grammar"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "messages": MESSAGES}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images"),
    ],
    ids=["n", "format", "regex", "choice", "tools", "image"],
)
@running
async def test_what_cannot_be_taken_up_ends_with_an_error_that_says_so(body, why):
    a, b = ExternalWorker(), ExternalWorker()
    a.faults, b.faults = [Fault("break", 5)], [Fault("break", 5)]
    async with front(a, b) as router:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        given = body if "messages" in body else {"prompt": PROMPT, **body}
        answer = await router.begin(path, stream=True, max_tokens=20, **given)
        with pytest.raises(UnavailableError, match=why):
            async for _ in answer.chunks:
                pass
        assert len(a.received + b.received) == 1


@running
async def test_a_break_without_token_ids_is_told():
    a, b = (ExternalWorker(gives_ids=False) for _ in range(2))
    async with front(a, b) as router:
        assert (await router.stream("completion", max_tokens=9)).text == written(PROMPT, 9)
        a.faults, b.faults = [Fault("break", 5)], [Fault("break", 5)]
        answer = await router.begin(prompt=PROMPT, max_tokens=20, stream=True)
        with pytest.raises(UnavailableError, match="token ids"):
            async for _ in answer.chunks:
                pass


@running
async def test_a_whole_answer_is_generated_again_elsewhere():
    a, b = ExternalWorker(), ExternalWorker()
    a.faults = [Fault("break", 5)]
    async with front(a, b) as router:
        answer = await router.ask(prompt=PROMPT, max_tokens=20)
        assert answer.json["choices"][0]["text"] == written(PROMPT, 20) and answer.worker == "b"


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("stream", [False, True])
@running
async def test_what_waits_for_a_hung_worker_goes_on_elsewhere_once_it_is_taken_for_dead(stream, after):
    a, b = ExternalWorker(), ExternalWorker()
    a.faults = [Fault("hang", after)]
    async with front(a, b) as router:
        hung = router.dispatcher.workers["a"]

        async def watch():
            while not a.received:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            hung.hung(WorkerFailedError("no token for long"))

        watching = asyncio.create_task(watch())
        answer = await router.ask(prompt=PROMPT, max_tokens=20, stream=stream)
        await watching
        text = answer.text if stream else answer.json["choices"][0]["text"]
        assert text == written(PROMPT, 20) and len(b.received) == 1


@pytest.mark.parametrize("stream", [False, True])
@running
async def test_a_stream_that_waits_at_a_worker_moves_to_one_that_is_idle(stream):
    """An answer that is not a stream does not say whether it has begun, so it stays."""
    a, b = ExternalWorker(), ExternalWorker()
    a.faults = [Fault("hang", 0, times=1)]
    async with front(a, b) as router:
        waited = router.dispatcher.workers["a"]

        async def watch():
            while not a.received:
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.1)
            waited.loads = [WorkerLoad(num_running=3, num_waiting=1)]
            router.dispatcher.rebalance()
            await asyncio.sleep(0.5)
            if not stream:
                assert not b.received
                waited.hung(WorkerFailedError("no token for long"))

        watching = asyncio.create_task(watch())
        answer = await router.ask(prompt=PROMPT, max_tokens=20, stream=stream)
        await watching
        text = answer.text if stream else answer.json["choices"][0]["text"]
        assert text == written(PROMPT, 20) and answer.worker == "b" and len(b.received) == 1
        assert (waited.num_failed, waited.active, waited.is_reached) == (
            (0, 0, True) if stream else (1, 0, False)
        )
        assert a.received[0].state == "left"


@pytest.mark.parametrize("stream", [False, True])
@running
async def test_a_client_that_leaves_is_gone_at_the_worker(stream):
    a = ExternalWorker(delay=0.05)
    async with front(a) as router:
        if stream:
            answer = await router.begin(prompt=PROMPT, max_tokens=1000, stream=True)
            async with aclosing(answer.chunks) as chunks:
                await anext(chunks)
        else:
            asked = asyncio.create_task(router.ask(prompt=PROMPT, max_tokens=1000))
            while not a.received:
                await asyncio.sleep(0.01)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        while a.received[0].state == "running":
            await asyncio.sleep(0.01)
        assert a.received[0].state == "left" and router.dispatcher.workers["a"].active == 0


def test_chunks_that_show_nothing_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(external_stream, "MOST_HELD", 10)
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()
    stream = ExternalStream(ExternalRequest(ExternalCall(line(), "POST", "/v1/completions", {}, body)))
    empty = json.dumps({"choices": [{"index": 0, "text": ""}]}).encode()
    for _ in range(10):
        assert stream.push(empty) == (b"", 0)
    with pytest.raises(WorkerFailedError, match="more than 10 consecutive chunks"):
        stream.push(empty)


@running
async def test_an_echoed_prompt_of_megabytes_passes():
    a, b = ExternalWorker(), ExternalWorker()
    a.faults = [Fault("break", 5)]
    async with front(a, b) as router:
        prompt = [97] * 1_000_000
        answer = await router.ask(prompt=prompt, max_tokens=8, stream=True)
        assert answer.text == written(prompt, 8)
        assert len(b.received[0].prompt) > 1_000_000


# Tokens for routing


@running
async def test_tokens_are_asked_of_a_worker_and_a_worker_without_a_tokenizer_is_found_out_once():
    a, b = ExternalWorker(has_tokenizer=False), ExternalWorker()
    async with front(a) as router:
        numbers = await router.tokens.tokens_of({"prompt": "eight ch" * 4})
        assert len(numbers) == 8 and numbers[0] == numbers[2] != numbers[1]
        await router.tokens.tokens_of({"prompt": "more"})
        chat = await router.tokens.tokens_of({"messages": MESSAGES})
        longer = await router.tokens.tokens_of(
            {"messages": [*MESSAGES, {"role": "assistant", "content": "Herrings do."}]}
        )
        assert list(longer[: len(chat)]) == list(chat), "a conversation that goes on begins alike"
        assert a.asked.count("/tokenize") == 2, "once for texts and once for messages"
    async with front(b) as router:
        assert await router.tokens.tokens_of({"prompt": "text"}) == ids_of("text")
        assert await router.tokens.tokens_of({"prompt": ["text", "more"]}) == ids_of("text")
        assert await router.tokens.tokens_of({"messages": MESSAGES}) == ids_of(template(MESSAGES))
        assert (
            await router.tokens.tokens_of({"prompt": [1, 2]})
            == [1, 2]
            == await router.tokens.tokens_of({"token_ids": [1, 2]})
        )


@running
async def test_only_a_worker_that_has_the_adapter_is_asked_for_tokens():
    a, b = ExternalWorker(), ExternalWorker(adapters=("poems",))
    async with front(a, b) as router:
        for _ in range(2):
            assert await router.tokens.tokens_of({"model": "poems", "prompt": "x"}) == ids_of("x")
        assert "/tokenize" not in a.asked and b.asked.count("/tokenize") == 2


@running
async def test_a_worker_is_not_asked_for_tokens_of_images_nor_when_it_was_late(monkeypatch):
    monkeypatch.setattr(external_link, "TOKENIZE_SECONDS", 0.05)
    a = ExternalWorker()
    async with front(a) as router:
        image = {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look: "},
                {"type": "image_url", "image_url": {"url": "data:,x"}},
            ],
        }
        numbers = await router.tokens.tokens_of({"messages": [image]})
        assert "/tokenize" not in a.asked and b"data:,x" in bytes(numbers)
        a.tokenize_delay = 30.0
        for _ in range(3):
            await router.tokens.tokens_of({"prompt": "a text"})
        assert a.asked.count("/tokenize") == 1
        a.tokenize_delay = 0.0
        await router.dispatcher.workers["a"].link.check()
        assert await router.tokens.tokens_of({"prompt": "a text"}) == ids_of("a text")


@running
async def test_cached_tokens_are_counted_in_the_routers_own_units():
    a = ExternalWorker(has_tokenizer=False)
    async with front(a) as router:
        prompt = (
            "eight ch" * 8
        )  # 16 numbers of four bytes; 64 tokens to the worker, which says that half are cached
        for stream in (False, True):
            worker = router.dispatcher.workers["a"]
            before = worker.cached_tokens
            await router.ask(prompt=prompt, max_tokens=2, stream=stream)
            assert worker.cached_tokens - before == 8


@running
async def test_the_operators_tokenizer_comes_first():
    a = ExternalWorker()
    async with front(a) as router:
        tokenizer = byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
        tokens = PromptTokens(router.dispatcher, tokenizer)
        assert await tokens.tokens_of({"prompt": "text"}) == tokenizer.encode("text")
        long = "many words " * 1000
        assert await tokens.tokens_of({"prompt": long}) == tokenizer.encode(long)
        chat = tokenizer.encode(MESSAGES[0]["content"], add_special_tokens=False)
        assert await tokens.tokens_of({"messages": MESSAGES}) == chat
        assert "/tokenize" not in a.asked
        given = {"messages": MESSAGES, "chat_template": "{% for i in range(10**12) %}x{% endfor %}"}
        assert await tokens.tokens_of(given) == ids_of(template(MESSAGES)), (
            "a program of the client's runs at the worker"
        )


@pytest.mark.parametrize("wrong", [-7, 10**30, "5", None, 1.5])
def test_token_counts_that_cannot_be_count_as_none(wrong):
    """They were indexes of a chain of blocks, and fell into counters."""
    usage = {
        "prompt_tokens": wrong,
        "completion_tokens": wrong,
        "prompt_tokens_details": {"cached_tokens": wrong},
    }
    assert external_stream.TokenCounts.of(usage) == external_stream.TokenCounts()
    good = external_stream.TokenCounts.of({**usage, "prompt_tokens": 4})
    assert (good.prompt, good.cached, good.generated) == (4, 0, 0)


@running
async def test_an_answer_with_impossible_counts_goes_to_the_client_as_it_is(monkeypatch):
    details = {"cached_tokens": -3}
    usage = {"prompt_tokens": -7, "completion_tokens": -5, "prompt_tokens_details": details}
    monkeypatch.setattr(external_worker._Answer, "usage", lambda answer: usage)
    async with front(ExternalWorker()) as router:
        answer = await router.stream("completion", max_tokens=4, stream_options={"include_usage": True})
        assert answer.text == written(prompt_of("completion"), 4) and answer.usage == usage
