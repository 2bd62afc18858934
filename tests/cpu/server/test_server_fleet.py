"""The API of a server in front of a fleet: sessions reach the engine, and answers name their worker."""

import logging

import pytest

from shoal.fake_engine import FakeEngine
from tests.fake_server import NAME, FakeServer, ids_of, post
from tests.waiting import eventually


class FleetLike(FakeEngine):
    """Writes into each request which worker has it, as FleetEngine does."""

    name = "w1"

    async def generate(self, request):
        request.worker = self.name
        async for output in super().generate(request):
            yield output


def server(name="w1", **options):
    engine = FleetLike(300, reply=ids_of("hello world "), **options)
    engine.name = name
    return FakeServer(engine)


MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4, "model": NAME},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "a", "options": {"num_predict": 4}},
    "/v1/embeddings": {"input": "a"},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}},
}


CASES = [(path, {"stream": stream}) for path in ROUTES for stream in (True, False)]
CASES = [(path, more) for path, more in CASES if path != "/v1/embeddings"] + [("/v1/embeddings", {})]


@pytest.mark.parametrize("path, more", CASES)
def test_answers_name_their_worker_and_sessions_reach_the_engine(path, more):
    with server() as served:
        body = ROUTES[path] | more
        status, headers, text = served.request(path, body, headers={"X-Session-ID": "s1"})
        assert status == 200, text
        assert {k.lower(): v for k, v in headers.items()}["x-shoal-worker"] == "w1"
        assert served.last_request().session == "s1"
        assert served.request(path, body)[0] == 200
        assert served.last_request().session is None


@pytest.mark.parametrize("budget", [0, 2])
def test_an_answer_whose_reasoning_is_ended_names_its_worker(budget):
    """Regression: an end of reasoning that was due at once was sent before a worker was chosen."""
    engine = FleetLike(300, reply=ids_of("hello world "))
    with FakeServer(engine, model={"reasoning_parser": "qwen3"}) as served:
        body = {"prompt": "<think>", "max_tokens": 20, "thinking_token_budget": budget, "stream": True}
        status, headers, text = served.request("/v1/completions", body)
        assert status == 200 and len(engine.seen) == (1 if budget == 0 else 2), text
        assert {k.lower(): v for k, v in headers.items()}["x-shoal-worker"] == "w1"


def test_the_log_of_a_request_names_its_workers(caplog):
    caplog.set_level(logging.INFO, "shoal.server.http.request_log")
    with server() as served:
        assert served.request("/v1/completions", ROUTES["/v1/completions"])[0] == 200
    [line] = [each.getMessage() for each in caplog.records if each.name == "shoal.server.http.request_log"]
    assert " worker=w1 id=" in line  # uvicorn's own lines come too where another test has set its level


@pytest.mark.parametrize(
    "path, user",
    [
        ("/v1/completions", {"user": "u"}),
        ("/v1/chat/completions", {"user": "u"}),
        ("/v1/responses", {"user": "u"}),
        ("/v1/embeddings", {"user": "u"}),
        ("/v1/messages", {"metadata": {"user_id": "u"}}),
    ],
)
def test_the_bodys_user_is_the_session_where_no_header_is(path, user):
    with server() as served:
        assert served.request(path, ROUTES[path] | user)[0] == 200
        assert served.last_request().session == "u"
        assert served.request(path, ROUTES[path] | user, headers={"X-Session-ID": "h"})[0] == 200
        assert served.last_request().session == "h"


def test_a_server_without_a_fleet_names_no_worker():
    with server(name="") as served:
        _, headers, _ = served.request("/v1/completions", ROUTES["/v1/completions"])
        assert "x-shoal-worker" not in {name.lower() for name in headers}


def test_a_request_that_runs_tells_at_which_worker_it_waits():
    with server(prefill_seconds=600) as served:
        body = {"prompt": "a", "stream": True, "request_id": "waits"}
        connection = served.raw(post("/v1/completions", body))
        eventually(lambda: served.engine.seen)
        found = served.json("/requests/waits")[1]
        assert [(span["name"], span["worker"]) for span in found["spans"]] == [
            ("tokenize", ""),
            ("waiting", "w1"),
        ]
        assert found["workers"] == ["w1"] and found["status"] == "running"
        connection.close()
