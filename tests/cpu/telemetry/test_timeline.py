"""Timelines of a server's last requests, which contain no text of the requests."""

import json
import time

import msgspec
import pytest

from shoal.api import FinishReason, Output, Span
from shoal.collector import merge
from shoal.telemetry.timeline import (
    MAX_BATCHES,
    MAX_KEPT,
    MAX_SPANS,
    RequestDetails,
    RequestSummary,
    Timeline,
    Timelines,
)
from tests.fake_server import FakeServer, engine_saying, post, read_until
from tests.waiting import eventually

SECRET = "the treasure lies under the old oak"
COMPLETE = "/v1/completions"
ROUNDED = 3e-6  # Seconds: starts and lengths are reported in whole microseconds, each rounded by itself.
ENDPOINTS = [
    (COMPLETE, {"prompt": SECRET, "max_tokens": 5}),
    (COMPLETE, {"prompt": SECRET, "max_tokens": 5, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}),
    ("/v1/responses", {"input": SECRET, "max_output_tokens": 5}),
    ("/v1/messages", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}),
    ("/api/chat", {"messages": [{"role": "user", "content": SECRET}], "options": {"num_predict": 5}}),
    ("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5}}),
]


def line():
    return Timeline("r", "tiny", COMPLETE, time.perf_counter())


def told(server, request_id):
    status, _, text = server.request(f"/requests/{request_id}")
    assert status == 200, text
    return msgspec.json.decode(text, type=RequestDetails)


@pytest.fixture(scope="module")
def server():
    with FakeServer(engine_saying("Never to be told. ", prefill_seconds=0.01, token_seconds=0.002)) as server:
        yield server


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=[f"{p}-{'stream' in b}" for p, b in ENDPOINTS])
def test_every_endpoint_has_a_time_line_of_what_happened_and_not_of_what_was_said(server, path, body):
    assert server.request(path, body, headers={"x-request-id": f"id of {path}"})[0] == 200
    found = told(server, f"id%20of%20{path}")
    assert (found.id, found.model, found.endpoint) == (f"id of {path}", "tiny", path)
    assert (found.status, found.finish_reason, found.workers) == ("finished", "length", [])
    prompt = len(server.engine.seen[-1].prompt_token_ids)
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (prompt, 5, 0)
    assert abs(found.started_at - time.time()) < 60
    assert 0 < found.ttft_s <= found.seconds and found.itl_s > 0
    assert [span.name for span in found.spans] == ["tokenize", "queue", "prefill", "decode"]
    starts = [span.start_s for span in found.spans]
    assert starts == sorted(starts) and starts[0] >= 0
    prefill, decode = found.spans[2], found.spans[3]
    assert prefill.seconds >= 0.01
    assert prefill.start_s + prefill.seconds == pytest.approx(found.ttft_s, abs=0.02)
    assert decode.start_s == pytest.approx(found.ttft_s, abs=ROUNDED) and decode.seconds > 0
    assert sum(count for _, count in found.tokens) == 5
    arrivals = [at for at, _ in found.tokens]
    assert arrivals == sorted(arrivals) and arrivals[0] == found.ttft_s
    whole = server.request("/requests")[2] + server.request(f"/requests/id%20of%20{path}")[2]
    assert "treasure" not in whole and "Never" not in whole


def test_the_list_has_the_newest_first_and_each_as_its_own_page_has_it(server):
    for name in ("first", "second"):
        server.request(COMPLETE, {"prompt": "a", "max_tokens": 2}, headers={"x-request-id": name})
    [newest, older, *_] = json.loads(server.request("/requests")[2])["requests"]
    assert (newest["id"], older["id"]) == ("second", "first")
    page = json.loads(server.request("/requests/second")[2])
    assert {name: page[name] for name in newest} == newest
    assert set(page) - set(newest) == {"spans", "tokens"}
    assert set(newest) == set(RequestSummary.__struct_fields__)


def test_as_many_requests_are_listed_as_are_asked_for(server):
    for name in ("older", "newer"):
        server.request(COMPLETE, {"prompt": "a", "max_tokens": 2}, headers={"x-request-id": name})
    whole = [one["id"] for one in server.json("/requests")[1]["requests"]]
    assert [one["id"] for one in server.json("/requests?limit=1")[1]["requests"]] == ["newer"]
    assert [one["id"] for one in server.json(f"/requests?limit={MAX_KEPT}")[1]["requests"]] == whole


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("limit=0", "limit must be from 1 to 256, got '0'"),
        ("limit=257", "limit must be from 1 to 256, got '257'"),
        ("limit=-1", "limit must be from 1 to 256, got '-1'"),
        ("limit=" + "9" * 5000, "limit must be from 1 to 256, got '999"),
        ("limit=%C2%B2", "limit must be from 1 to 256, got '²'"),
        ("limit=", "limit must be from 1 to 256, got ''"),
        ("limit=1&limit=2", "limit must be given once, got it 2 times"),
        ("limits=1", "unknown parameter 'limits'; /requests takes limit"),
    ],
)
def test_a_wrong_limit_is_a_400_that_names_it(server, query, told):
    status, found = server.json(f"/requests?{query}")
    assert status == 400 and found["error"]["message"].startswith(told), found


def test_a_request_of_several_answers_has_the_tokens_of_all(server):
    server.request(COMPLETE, {"prompt": "a", "max_tokens": 3, "n": 2}, headers={"x-request-id": "two"})
    found = told(server, "two")
    assert found.output_tokens == 6 and sum(count for _, count in found.tokens) == 6
    assert [span.name for span in found.spans].count("decode") == 2


def test_a_request_that_runs_is_told_as_far_as_it_has_come_and_one_whose_client_leaves_ends_as_aborted():
    with FakeServer(engine_saying("slowly ", token_seconds=0.05)) as server:
        connection = server.raw(
            post(COMPLETE, {"prompt": "a", "max_tokens": 200, "stream": True, "request_id": "runs"})
        )
        read_until(connection, b"data: ")
        found = told(server, "runs")
        assert (found.status, found.finish_reason) == ("running", None)
        assert found.ttft_s is not None and found.spans[-1].name == "decode"
        connection.close()
        eventually(lambda: told(server, "runs").status == "finished")
        assert told(server, "runs").finish_reason == "abort"


def test_a_request_that_waits_for_its_first_token_is_told_so_also_when_its_client_gives_up():
    with FakeServer(engine_saying("never ", prefill_seconds=600)) as server:
        connection = server.raw(post(COMPLETE, {"prompt": "a", "stream": True, "request_id": "waits"}))
        eventually(lambda: server.engine.seen)
        found = told(server, "waits")
        assert [span.name for span in found.spans] == ["tokenize", "waiting"]
        tokenize, waiting = found.spans
        assert waiting.start_s == pytest.approx(tokenize.start_s + tokenize.seconds, abs=ROUNDED)
        assert waiting.start_s + waiting.seconds <= found.seconds + ROUNDED and found.ttft_s is None
        connection.close()
        eventually(lambda: told(server, "waits").status == "finished")
        found = told(server, "waits")
        assert [span.name for span in found.spans] == ["tokenize", "waiting"]
        assert found.spans[1].start_s + found.spans[1].seconds == pytest.approx(found.seconds, abs=ROUNDED)


def test_a_wait_is_at_the_worker_that_is_known_to_have_the_request():
    placed = line()
    placed.answer()
    placed.add([Span("queue", 3.0, 2.0), Span("routing", 1.0, 0.5, "w")], placed.began + 3)
    *_, waiting = placed.all_spans()
    assert (waiting.name, waiting.worker, round(waiting.start_s, 3)) == ("waiting", "w", 2.5)
    placed.answers[0].tokens(1, placed.began + 4)
    assert [span.name for span in placed.all_spans()] == ["queue", "routing", "decode"]


def test_an_answer_without_a_token_is_no_wait_once_it_is_there():
    """The same holds for embeddings."""
    embedded = line()
    embedded.answer().push(Output("r", [], finish_reason=FinishReason.STOP), embedded.began + 1)
    embedded.end(has_failed=False)
    assert embedded.all_spans() == []


def test_an_answer_that_has_ended_grows_no_more_while_others_run():
    both = line()
    short, long = both.answer(), both.answer()
    for answer in (short, long):
        answer.tokens(1, both.began)
    short.push(Output("r", [1], finish_reason=FinishReason.LENGTH), both.began + 0.5)
    assert sorted(span.seconds == pytest.approx(0.5) for span in both.all_spans()) == [False, True]


def test_a_request_that_fails_or_is_refused_by_the_engine_is_told_as_failed():
    with FakeServer(engine_saying("x", error_after=3)) as server:
        body = {"prompt": "a", "max_tokens": 9}
        assert server.request(COMPLETE, body, headers={"x-request-id": "fails"})[0] == 500
        found = told(server, "fails")
        assert (found.status, found.finish_reason) == ("failed", "error")
        server.engine.refuses = "not today"
        assert server.request(COMPLETE, body, headers={"x-request-id": "refused"})[0] == 400
        found = told(server, "refused")
        assert (found.status, found.ttft_s, found.output_tokens) == ("failed", None, 0)


def test_an_error_in_place_of_the_first_token_tells_where_the_time_went():
    with FakeServer(engine_saying("x", error_after=1, prefill_seconds=0.01)) as server:
        server.request(COMPLETE, {"prompt": "a", "max_tokens": 9}, headers={"x-request-id": "fails"})
        found = told(server, "fails")
        assert [span.name for span in found.spans] == ["tokenize", "queue", "prefill"]
        assert (found.status, found.output_tokens) == ("failed", 0)


def test_an_id_that_no_request_has_is_a_404_that_says_where_to_look(server):
    status, _, text = server.request("/requests/nobody")
    assert status == 404 and "/requests lists them" in text


def test_requests_are_shown_to_those_who_have_a_key():
    with FakeServer(api_key=["sesame"]) as server:
        for path in ("/requests", "/requests/any"):
            assert server.request(path)[0] == 401
        assert server.request("/requests", headers={"authorization": "Bearer sesame"})[0] == 200


def test_what_is_kept_has_bounds():
    kept = Timelines()
    for _ in range(MAX_KEPT + 5):
        kept.add(line())
    assert len(kept.newest_first()) == MAX_KEPT
    long = line()
    answer = long.answer()
    for i in range(MAX_BATCHES + 10):
        answer.tokens(2, long.began + i)
    long.add([Span("transfer", 0.0, 0.0)] * (MAX_SPANS + 10), long.began)
    found = long.details()
    assert len(found.tokens) == MAX_BATCHES and found.output_tokens == 2 * (MAX_BATCHES + 10)
    assert len([span for span in found.spans if span.name == "transfer"]) == MAX_SPANS


def test_a_move_to_another_worker_cuts_the_decode():
    moved = line()
    answer, at = moved.answer(), moved.began
    answer.tokens(1, at + 1, "a")
    move = Span("migration", 1.0, 1.0, "b", {"from": "a", "why": "it was killed", "output_tokens": 1})
    moved.add([move], at + 4)
    answer.tokens(1, at + 4)
    answer.tokens(1, at + 5)
    moved.end(has_failed=False)
    shown = [(span.name, span.worker, round(span.start_s), round(span.seconds)) for span in moved.all_spans()]
    assert shown == [("decode", "a", 1, 2), ("migration", "b", 3, 1), ("decode", "b", 4, 1)]
    assert moved.summary().workers == ["b", "a"]


def test_outputs_that_wait_for_a_slow_reader_keep_the_spans_of_all():
    first = Output("r", [1], spans=[Span("queue", 2.0, 1.0)])
    merge(first, Output("r", [2], finish_reason=FinishReason.STOP, spans=[Span("migration", 0.5, 0.5)]))
    merge(first, Output("r", []))
    assert [span.name for span in first.spans] == ["queue", "migration"] and first.queued_seconds == 1.0
