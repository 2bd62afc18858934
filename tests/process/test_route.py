"""`shoal route` as its operators see it: workers that join, leave and break, the fleet's view, and
metrics."""

import concurrent.futures
import contextlib
import json
import signal
import socket

import pytest

from shoal.config import KVEventsConfig
from shoal.kv.events.publisher import KvEvents
from tests.external_worker import MODEL, ExternalWorkerThread, Fault, ids_of, written
from tests.serving import DEADLINE_S, Route, free_port
from tests.waiting import eventually

PROMPT = "A shoal of fish swims as one, and nobody leads. " * 3
TOKENS = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens")


@pytest.fixture
def routers(tmp_path):
    """Starts routers of these options."""
    running = []

    def start(*options):
        running.append(Route(tmp_path, *options))
        return running[-1].ready()

    yield start
    for router in running:
        router.stop()


@pytest.fixture
def workers():
    """Two stand-ins."""
    with ExternalWorkerThread(delay=0.01) as a, ExternalWorkerThread(delay=0.01) as b:
        yield a, b


def specs(*workers):
    return [part for name, one in zip("abc", workers) for part in ("--worker", f"{one.url},id={name}")]


def complete(router, prompt=PROMPT, **more):
    return router.ask("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 8, **more})


def states(router):
    return {name: worker["state"] for name, worker in router.fleet().items()}


def test_a_request_before_any_worker_is_told_to_come_again(routers):
    router = routers("--worker", f"http://127.0.0.1:{free_port()},id=late")
    for body in ({"model": MODEL}, {}):
        status, text, headers = router.request("/v1/completions", {"prompt": "x", **body})
        assert status == 503 and int(headers["retry-after"]) >= 0 and "late" in text
    assert json.loads(router.ask("/v1/models")[1])["data"] == []
    assert router.ask("/health")[0] == 200
    assert router.fleet()["late"]["state"] == "broken" and router.fleet()["late"]["why"]


def test_workers_are_operated_on_the_admin_port_alone(routers, workers):
    a, b = workers
    router = routers(*specs(a), "--policy", "round_robin").await_workers(1)
    status, text = router.operate("/fleet/workers", {"add": [f"{b.url},id=b,tag=new"]})
    assert (status, json.loads(text)) == (200, {"added": ["b"], "removed": []})
    router.await_workers(2)
    assert router.fleet()["b"]["tags"] == ["new"]
    for _ in range(4):
        assert complete(router)[0] == 200
    assert len(a.received) == len(b.received) == 2
    assert router.operate("/fleet/drain/a", {})[0] == 200 and states(router)["a"] == "draining"
    for _ in range(4):
        assert complete(router)[0] == 200
    assert len(a.received) == 2
    assert router.operate("/fleet/resume/a", {})[0] == 200 and states(router)["a"] == "ready"
    status, text, _ = router.request(
        "/v1/completions", {"model": MODEL, "prompt": "x"}, {"X-Shoal-Tags": "new"}
    )
    assert status == 200 and len(b.received) == 7
    assert router.operate("/fleet/workers", {"remove": ["a"]})[0] == 200 and set(states(router)) == {"b"}
    for path, body, expected in (
        ("/fleet/drain/nobody", {}, 404),
        ("/fleet/workers", {"remove": ["nobody"]}, 404),
        ("/fleet/workers", {"add": [f"{a.url},id=b"]}, 400),
        ("/fleet/workers", {"add": ["http://127.0.0.1:9,colour=red"]}, 400),
        ("/fleet/config", {"policy": "random"}, 400),
        ("/fleet/config", {"busy_kv_usage": 7}, 400),
    ):
        assert router.operate(path, body)[0] == expected, path
        assert router.ask(path, body)[0] == 404, "not on the public port"
    assert json.loads(router.operate("/fleet/config", {"busy_kv_usage": 0.5})[1])["busy_kv_usage"] == 0.5


def test_select_says_where_a_request_goes_and_sends_nothing(routers, workers):
    router = routers(*specs(*workers), "--policy", "kv_approx", "--seed", "3").await_workers(2)
    status, text, headers = router.request(
        "/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
    )
    assert status == 200 and json.loads(text)["choices"][0]["text"] == written(PROMPT, 2)
    blocks = len(ids_of(PROMPT)) // 16
    for body in ({"prompt": PROMPT}, {"token_ids": ids_of(PROMPT)}):
        chosen = json.loads(router.ask("/fleet/select", {"model": MODEL, **body})[1])
        assert (chosen["worker"], chosen["overlap_blocks"]) == (headers["x-shoal-worker"], blocks)
        assert min(chosen["costs"], key=chosen["costs"].get) == chosen["worker"]
    assert sum(len(one.received) for one in workers) == 1
    assert router.ask("/fleet/select", {"model": MODEL})[0] == 400
    assert router.ask("/fleet/select", {"model": "nothing", "prompt": "x"})[0] == 404


def test_what_happens_is_measured(routers, workers):
    a, b = workers
    router = routers(*specs(a, b), "--policy", "round_robin").await_workers(2)
    a.faults = [Fault(500, times=1)]
    for number in range(4):
        assert complete(router, f"{number} {PROMPT}")[0] == 200
    assert router.metric("dynamo_router_overhead_total_ms_count") == 5, "four requests, one of them twice"
    for part in ("block_hashing", "indexer_find_matches", "scheduling"):
        assert router.metric(f"dynamo_router_overhead_{part}_ms_count") == 5
    assert router.metric("shoal:worker_requests_total") == 5
    assert router.metric("dynamo_frontend_model_migration_total") == 1
    assert router.metric("shoal:worker_state") == 2 and router.metric("vllm:num_requests_running") == 0
    assert router.metric("dynamo_frontend_queued_requests") == 0 == router.metric("shoal:worker_breaks_total")
    assert router.metric("http_requests_total") >= 4
    before = [router.metric(f"vllm:{name}_total") for name in TOKENS]
    for stream in (False, True):
        assert complete(router, max_tokens=7, stream=stream)[0] == 200
    more = [router.metric(f"vllm:{name}_total") - was for name, was in zip(TOKENS, before)]
    assert more == [2 * len(PROMPT), 2 * (len(PROMPT) // 2), 14]
    [named] = json.loads(router.ask("/api/tags")[1])["models"]
    assert named["name"] == f"{MODEL}:latest"


def test_each_rank_of_a_data_parallel_worker_gets_the_prompts_that_it_has(routers, workers):
    """Two ranks behind one address, each with KV events of its own at port + rank, as vLLM has them."""
    worker, _ = workers
    events_port, replay_port = free_ports(2), free_ports(2)
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"tcp://lo:{events_port}",
        replay_endpoint=f"tcp://lo:{replay_port}",
    )
    ranks = [KvEvents(config, rank) for rank in range(2)]
    try:
        prompts = [f"{rank}: {PROMPT}" for rank in range(2)]
        for rank, events, prompt in zip(range(2), ranks, prompts):
            tokens = ids_of(prompt)[:128]
            events.stored([bytes([rank, number] * 8) for number in range(8)], None, tokens)
            events.flush()
        ends = f"kv_events=tcp://127.0.0.1:{events_port},replay=tcp://127.0.0.1:{replay_port}"
        router = routers("--worker", f"{worker.url},id=a,dp_size=2,{ends}").await_workers(1)
        for rank, prompt in [*enumerate(prompts), *enumerate(prompts)]:
            question = {"model": MODEL, "prompt": prompt}
            eventually(
                lambda q=question: json.loads(router.ask("/fleet/select", q)[1])["overlap_blocks"] == 8,
                router.text,
            )
            assert complete(router, prompt)[0] == 200
            assert worker.received[-1].headers["X-data-parallel-rank"] == str(rank)
        assert router.fleet()["a"]["cached_blocks"] >= 16, "of both ranks"
    finally:
        for events in ranks:
            events.close()


def free_ports(count):
    """Returns the first of several free ports in succession."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def test_a_worker_that_dies_is_left_out_and_comes_back(routers, workers):
    a, b = workers
    with ExternalWorkerThread() as c:
        router = routers(*specs(a, b, c), "--check-interval", "0.5").await_workers(3)
    eventually(lambda: states(router)["c"] == "broken", router.text)
    for number in range(6):
        assert complete(router, f"{number} {PROMPT}")[0] == 200
    assert len(a.received) + len(b.received) == 6
    with ExternalWorkerThread(port=int(c.url.rpartition(":")[2])):
        eventually(lambda: states(router)["c"] == "ready", router.text)


def test_routers_on_one_plane_share_what_they_have_sent_and_one_may_be_killed(routers, workers):
    plane = f"tcp://127.0.0.1:{free_port()}"
    options = [*specs(*workers), "--plane", plane, "--policy", "least_loaded", "--lease", "1"]
    first = routers(*options).await_workers(2)
    second = routers(*options).await_workers(2)
    eventually(lambda: second.metric("shoal:router_peers") == 1, second.text)
    for worker in workers:
        worker.delay = 0.2
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, second, max_tokens=40)
        eventually(lambda: sum(w["active_requests"] for w in first.fleet().values()) == 1, first.text)
        running.result()
        eventually(lambda: sum(w["active_requests"] for w in first.fleet().values()) == 0, first.text)
        pool.submit(complete, second, max_tokens=1000)
        eventually(lambda: sum(w["active_requests"] for w in first.fleet().values()) == 1, first.text)
        second.process.send_signal(signal.SIGKILL)
        eventually(lambda: sum(w["active_requests"] for w in first.fleet().values()) == 0, first.text)
    assert states(first) == {"a": "ready", "b": "ready"} and complete(first, max_tokens=1)[0] == 200


def test_a_terminal_that_is_closed_lets_requests_end_as_sigterm_does(routers, workers):
    """Regression: requests were cut off, as kernel and shell send the signal more than once."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    try:
        router = routers(*specs(*workers)).await_workers(2)
    finally:
        signal.signal(signal.SIGHUP, before)
    for worker in workers:
        worker.delay = 0.1
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, router, max_tokens=20)
        eventually(lambda: sum(w["active_requests"] for w in router.fleet().values()) == 1, router.text)
        router.process.send_signal(signal.SIGHUP)
        eventually(lambda: router.ask("/health")[0] == 503, router.text)
        router.process.send_signal(signal.SIGHUP)
        assert running.result()[0] == 200
    assert router.process.wait(DEADLINE_S) == 0


def test_under_nohup_a_terminal_that_is_closed_changes_nothing(routers, workers):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # children have it so, too
    try:
        router = routers(*specs(*workers)).await_workers(2)
    finally:
        signal.signal(signal.SIGHUP, before)
    router.process.send_signal(signal.SIGHUP)
    assert complete(router)[0] == 200
    router.process.send_signal(signal.SIGTERM)
    assert router.process.wait(DEADLINE_S) == 0
