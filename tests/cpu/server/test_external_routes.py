"""The public port of a router with an external model: which requests are passed on, and what the port itself adds."""

import asyncio
import json
import logging

import pytest

from shoal.config import ServerConfig
from shoal.errors import BusyError, UnavailableError
from shoal.fleet_api import ExternalAnswer
from shoal.server.app import Server
from shoal.server.operator.external_routes import with_external_models
from shoal.server.routes import PUBLIC_ROUTES, described
from shoal.server.served.catalog import Catalog
from shoal.server.served.external_model import ExternalModel

STREAM = b"text/event-stream; charset=utf-8"


class Workers:
    """A Forwarder whose workers answer as the test sets."""

    def __init__(self, *chunks, error=None, status=200, content_type=b"application/json", delay=0.0):
        self.chunks, self.error, self.status = chunks, error, status
        self.content_type, self.delay = content_type, delay
        self.calls, self.was_left = [], False

    async def forward(self, call):
        self.calls.append(call)
        if self.error is not None and not self.chunks:
            raise self.error
        return ExternalAnswer(self.status, [(b"x-shoal-worker", b"w")], self._said(), self.content_type)

    async def _said(self):
        try:
            for chunk in self.chunks:
                await asyncio.sleep(self.delay)
                yield chunk
            if self.error is not None:
                raise self.error
        finally:
            self.was_left = True


class Reply:
    def __init__(self, messages):
        self.status = messages[0]["status"]
        self.headers = dict(messages[0]["headers"])
        self.body = b"".join([message.get("body", b"") for message in messages[1:]])

    @property
    def error(self):
        return json.loads(self.body)["error"]


def ask(
    workers,
    path="/v1/completions",
    body=b'{"model":"external"}',
    headers=(),
    *,
    method=None,
    is_draining=False,
    config=None,
    **model,
):
    """One request to the port, in a loop of its own."""

    async def run():
        catalog = Catalog([], [ExternalModel(["external"], workers, **model)])
        app = Server(catalog, config or ServerConfig(), described(with_external_models(PUBLIC_ROUTES)))
        if is_draining:
            await app.drain(1.0)
        sent, given = [], [{"type": "http.request", "body": body}]
        left = asyncio.Event()

        async def receive():
            if given:
                return given.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        path_only, _, query = path.partition("?")
        verb = method or ("GET" if body is None else "POST")
        given[0]["body"] = body or b""
        scope = {
            "type": "http",
            "method": verb,
            "path": path_only,
            "query_string": query.encode(),
            "headers": list(headers),
        }
        scope |= {"scheme": "http", "client": ("127.0.0.1", 1)}
        await app(scope, receive, send)
        assert all(not admission.active for admission in catalog.admissions)
        return Reply(sent)

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_a_request_is_passed_on_as_it_came_and_the_worker_is_named():
    workers = Workers(b'{"any":"thing"}', status=200)
    body = b'{"model":"external:latest", "unheard_of": [1, {}]}'
    reply = ask(workers, "/v1/chat/completions?a=b", body, [(b"x-request-id", b"mine")])
    assert (reply.status, reply.body, reply.headers[b"x-shoal-worker"]) == (200, b'{"any":"thing"}', b"w")
    (call,) = workers.calls
    assert (call.body, call.path, call.line.id) == (body, "/v1/chat/completions?a=b", "mine")
    assert reply.headers[b"x-request-id"] == b"mine" and workers.was_left


def test_what_the_router_says_for_every_request_is_in_the_body_that_is_passed_on():
    config = ServerConfig(enable_force_include_usage=True, return_tokens_as_token_ids=True)
    workers = Workers(b"{}")
    ask(workers, body=b'{"model":"external","stream":true,"stream_options":{"x":1}}', config=config)
    ask(workers, body=b'{"model":"external","return_tokens_as_token_ids":false}', config=config)
    streamed, whole = [json.loads(call.body) for call in workers.calls]
    assert streamed["stream_options"] == {"x": 1, "include_usage": True}
    assert streamed["return_tokens_as_token_ids"] is True
    assert whole == {"model": "external", "return_tokens_as_token_ids": False}


def test_a_request_that_names_no_model_goes_to_the_first():
    workers = Workers(b"{}")
    assert ask(workers, body=b'{"prompt":"x"}').status == 200


def test_a_refusal_of_the_worker_is_the_answer():
    workers = Workers(b'{"error":{"message":"no"}}', status=422)
    reply = ask(workers)
    assert reply.status == 422 and reply.error == {"message": "no"}
    assert workers.calls[0].line.summary().status == "failed"


def test_a_stream_is_passed_on_piece_by_piece():
    reply = ask(Workers(b"data: 1\n\n", b"data: [DONE]\n\n", content_type=STREAM))
    assert reply.body == b"data: 1\n\ndata: [DONE]\n\n" and reply.headers[b"content-type"] == STREAM


@pytest.mark.parametrize(
    "error, status",
    [(BusyError("full", 2.5), 429), (UnavailableError("nobody"), 503)],
    ids=["busy", "nobody"],
)
def test_errors_before_the_answer_have_a_status_and_retry_after(error, status):
    reply = ask(Workers(error=error))
    assert reply.status == status and float(reply.headers[b"retry-after"]) >= 1 and reply.error["message"]


def test_an_error_within_a_stream_is_its_last_event():
    reply = ask(Workers(b"data: 1\n\n", error=UnavailableError("it broke"), content_type=STREAM))
    assert reply.status == 200
    first, event, done, rest = reply.body.split(b"\n\n")
    assert (first, done, rest) == (b"data: 1", b"data: [DONE]", b"")
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "it broke"


@pytest.mark.parametrize("limit", ["body", "server"])
def test_a_deadline_ends_the_request_at_the_worker_too(limit):
    workers = Workers(b"{}", delay=20)
    if limit == "body":
        reply = ask(workers, body=b'{"model":"external","timeout":0.1}')
    else:
        reply = ask(workers, request_timeout=0.1)
    assert reply.status == 504 and "0.1 s" in reply.error["message"] and workers.was_left


def test_a_server_that_drains_takes_nothing_new():
    workers = Workers(b"{}")
    assert ask(workers, is_draining=True).status == 503 and not workers.calls


@pytest.mark.parametrize("status", [200, 422])
def test_the_log_tells_of_a_request_what_its_worker_did(status, caplog):
    class Told(Workers):
        async def forward(self, call):
            answer = call.line.answer()
            call.line.prompt_tokens, call.line.cached_tokens = 31, 16
            answer.tokens(1, call.line.began + 1.0, "w1")
            answer.tokens(2, call.line.began + 2.0)
            call.line.reasons.add("tool_calls")
            return await super().forward(call)

    caplog.set_level(logging.INFO, "shoal")
    ask(Told(b"{}", status=status))
    [record] = [record for record in caplog.records if "/v1/completions" in record.getMessage()]
    told = "model=external in=31 cached=16 out=3 ttft=1.000s speed=2.0/s finish=tool_calls worker=w1"
    assert told in record.getMessage()
    assert record.levelno == (logging.INFO if status == 200 else logging.WARNING)


def test_a_tokenizer_is_asked_for_by_the_query():
    workers = Workers(b'{"chat_template":"x"}')
    for path in ("/tokenizer_info?model=external", "/tokenizer_info"):
        assert json.loads(ask(workers, path, None).body) == {"chat_template": "x"}
    assert ask(workers, "/tokenizer_info", None, method="HEAD").status == 200 and workers.calls.pop()
    reply = ask(workers, "/tokenizer_info?model=stranger", None)
    assert reply.status == 404 and "stranger" in reply.error["message"]
    assert [call.path for call in workers.calls] == ["/tokenizer_info?model=external", "/tokenizer_info"]


def test_models_and_mistakes_are_reported():
    workers = Workers(b"{}")
    listed = json.loads(ask(workers, "/v1/models", None, max_model_len=77).body)["data"]
    assert [(card["id"], card["max_model_len"]) for card in listed] == [("external", 77)]
    assert json.loads(ask(workers, "/v1/models/external", None).body)["id"] == "external"
    reply = ask(workers, body=b'{"model":"stranger","prompt":"x"}')
    assert reply.status == 404 and "external" in reply.error["message"]
    assert ask(workers, body=b"no JSON").status == 400 and not workers.calls
    for path in ("/health", "/metrics", "/load", "/docs", "/api/tags", "/api/ps"):
        assert ask(workers, path, None).status == 200, path
