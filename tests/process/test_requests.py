"""One request through all processes of a fleet: its timeline, its trace and its id in every log. The router and two
workers with a tiny model are processes of their own; a collector of this file takes their traces."""

import http.client
import json
import os
import signal
import subprocess
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests import tiny
from tests.fleet_processes import Processes
from tests.serving import PYTHON, ROOT
from tests.waiting import eventually

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = list(range(10, 60))
SECRET = "the treasure lies under the old oak"


class Collector:
    """Takes OTLP over HTTP. `spans`: the received spans, each with its process."""

    def __init__(self):
        self.spans, self.paths = [], set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(self.path, self.headers["content-type"], body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, path, kind, body):
        self.paths.add((path, kind))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(named, span) for span in scope.spans]

    def of(self, trace):
        return [(named, span) for named, span in list(self.spans) if span.trace_id.hex() == trace]


@pytest.fixture(scope="module")
def collector():
    collector = Collector()
    yield collector
    collector.server.shutdown()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, collector):
    folder = tmp_path_factory.mktemp("fleet")
    model = tiny.write_model(folder / "models", "llama", num_hidden_layers=32)  # 450 tokens take seconds
    patch = pytest.MonkeyPatch()
    patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    watched = ("--verbose", "--otlp-traces-endpoint", collector.url)
    own = ("--max-model-len", "512", "--served-model-name", "tiny", "--log-format", "json")
    with Processes(folder) as fleet:
        fleet.route(*watched, "--policy", "round_robin")
        for name in ("a", "b"):
            fleet.serve(name, *own, *watched, model=model)
        for name in ("a", "b"):
            fleet.wait_state(name, "ready")
        yield fleet
    patch.undo()


def said(fleet, name, request_id):
    """The log lines about a request: a worker's are JSON, the router's are text."""
    lines = [json.loads(line) for line in fleet.log(name).splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("request_id") == request_id]


def grep(fleet, request_id):
    """The same of the router's log."""
    return [line for line in fleet.log("router").splitlines() if f"id={request_id}" in line]


def timeline_of(fleet, request_id):
    status, text = fleet.ask(f"/requests/{request_id}")
    assert status == 200, text
    return json.loads(text)


def ask(fleet, request_id, **more):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "request_id": request_id}
    status, text = fleet.ask("/v1/completions", {**body, **more})
    assert status == 200, text
    return json.loads(text)


def test_a_routers_time_line_has_what_the_worker_alone_knows(fleet):
    ask(fleet, "whole")
    found = timeline_of(fleet, "whole")
    [worker] = found["workers"]
    assert (found["status"], found["prompt_tokens"], found["output_tokens"]) == ("finished", len(PROMPT), 8)
    names = [(span["name"], span["worker"]) for span in found["spans"]]
    assert Counter(names) == Counter(
        [("tokenize", ""), ("queue", ""), ("routing", worker)]
        + [(name, worker) for name in ("queue", "prefill", "decode")]
    )
    by = {(span["name"], span["worker"]): span for span in found["spans"]}
    prefill, decode = by["prefill", worker], by["decode", worker]
    assert prefill["attributes"]["tokens"] + found["cached_tokens"] == len(PROMPT)
    assert by["routing", worker]["start_s"] <= prefill["start_s"] < decode["start_s"]
    assert decode["start_s"] == found["ttft_s"] and sum(count for _, count in found["tokens"]) == 8
    assert all(0 <= span["start_s"] <= found["seconds"] for span in found["spans"])


def test_one_id_leads_through_the_logs_of_all_processes(fleet):
    ask(fleet, "one-id")
    [worker] = timeline_of(fleet, "one-id")["workers"]

    def by():
        return Counter(line["logger"] for line in said(fleet, worker, "one-id"))

    eventually(lambda: len(by()) == 2, by, 20)
    assert by() == {"shoal.fleet.native.worker_server": 1, "shoal.engine.process.core_main": 1}
    assert all("id=one-id" in line["message"] for line in said(fleet, worker, "one-id"))
    [placed, ended] = grep(fleet, "one-id")
    assert f"request goes to worker {worker} id=one-id" in placed and " POST /v1/completions 200 " in ended
    assert "one-id" not in fleet.log({"a": "b", "b": "a"}[worker])


def test_a_trace_leads_from_the_client_through_the_router_to_the_worker(fleet, collector):
    connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=60)
    headers = {
        "content-type": "application/json",
        "traceparent": f"00-{TRACE}-{PARENT}-01",
        "tracestate": "a=b",
    }
    body = {"model": "tiny", "prompt": SECRET, "max_tokens": 5, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {**headers, "x-request-id": "traced"})
    assert connection.getresponse().status == 200
    eventually(
        lambda: Counter(s.name for _, s in collector.of(TRACE))["llm_request"] == 2, lambda: collector.spans
    )
    found = collector.of(TRACE)
    roots = {named["service.instance.id"]: span for named, span in found if span.name == "llm_request"}
    [worker] = set(roots) - {"router"}
    assert worker in ("a", "b") and {named["service.name"] for named, _ in found} == {"shoal"}
    assert roots["router"].parent_span_id.hex() == PARENT
    assert roots[worker].parent_span_id == roots["router"].span_id
    assert all(span.trace_state == "a=b" for span in roots.values())
    below = Counter(
        (named["service.instance.id"], span.name) for named, span in found if span.name != "llm_request"
    )
    assert below.keys() == {("router", n) for n in ("tokenize", "queue", "routing", "prefill", "decode")} | {
        (worker, n) for n in ("queue", "prefill", "decode")
    }
    for named, span in found:
        if span.name != "llm_request":
            assert span.parent_span_id == roots[named["service.instance.id"]].span_id
    for span in roots.values():
        attributes = {a.key: a.value for a in span.attributes}
        assert attributes["gen_ai.request.id"].string_value == "traced"
        assert attributes["gen_ai.usage.output_tokens"].int_value == 5
        assert attributes["gen_ai.latency.time_to_first_token"].double_value > 0
    assert "treasure" not in str(found)
    assert collector.paths == {("/v1/traces", "application/x-protobuf")}


def test_a_move_to_another_worker_is_logged_with_its_reason(fleet):
    """Last: it kills a worker."""
    streams = [
        fleet.stream(
            "/v1/completions",
            model="tiny",
            prompt=PROMPT,
            max_tokens=450,
            ignore_eos=True,
            request_id=f"m{i}",
        )
        for i in range(6)
    ]
    eventually(lambda: any(stream.worker == "a" and stream.events for stream in streams))
    os.kill(fleet.running["a"].pid, signal.SIGKILL)
    assert all(stream.answer()["error"] is None for stream in streams)
    moved = 0
    for i in range(len(streams)):
        found = timeline_of(fleet, f"m{i}")
        moves = [span for span in found["spans"] if span["name"] == "migration"]
        assert found["output_tokens"] == 450
        for move in moves:
            moved += 1
            assert move["worker"] == "b" and move["attributes"]["from"] == "a" and move["attributes"]["why"]
            decodes = [span["worker"] for span in found["spans"] if span["name"] == "decode"]
            assert decodes == (["a", "b"] if move["attributes"]["output_tokens"] else ["b"])
            assert any("leaves worker a after" in line for line in grep(fleet, f"m{i}"))
    assert moved


@pytest.mark.slow
def test_prefill_and_decode_apart_are_told_with_the_transfer_between_them(tmp_path):
    model, own = tiny.write_model(tmp_path / "models", "llama"), ("--max-model-len", "512", "--verbose")
    with Processes(tmp_path) as fleet:
        fleet.route("--verbose", "--max-local-prefill-length", "16", "--max-prefill-queue-size", "100")
        for name, role in (("p", "prefill"), ("d", "decode")):
            fleet.serve(name, *own, "--served-model-name", "tiny", "--role", role, model=model)
        for name in ("p", "d"):
            fleet.wait_state(name, "ready")
        ask(fleet, "apart", prompt=list(range(200)))
        found = timeline_of(fleet, "apart")
        spans = {(span["name"], span["worker"]): span for span in found["spans"]}
        assert {
            ("routing", "p"),
            ("prefill", "p"),
            ("routing", "d"),
            ("transfer", "d"),
            ("decode", "d"),
        } <= set(spans)
        assert spans["transfer", "d"]["attributes"] == {"from": "worker", "blocks": 13}  # 12, and the tail
        assert spans["prefill", "p"]["attributes"]["tokens"] == 200
        placed = [line.partition("request ")[2] for line in grep(fleet, "apart") if "goes to" in line]
        assert placed == ["goes to worker d id=apart", "goes to prefill worker p id=apart"]
        for name in ("p", "d"):
            eventually(
                lambda name=name: fleet.log(name).count("id=apart") == 2,
                lambda name=name: fleet.log(name),
                20,
            )


def test_without_the_option_nothing_of_opentelemetry_is_imported():
    code = (
        "import sys, shoal.apps.serve, shoal.apps.route, shoal.server.routes, shoal.fleet.native.worker_server\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([PYTHON, "-c", code], cwd=ROOT).returncode == 0
