"""Whole servers while something is killed under them: ranks, engines asleep and awake, models that take
turns."""

import concurrent.futures
import json
import os
import signal
import socket
import time

import psutil
import pytest

from tests.serving import DEADLINE_S, TINY, Serve
from tests.tiny import write_model
from tests.waiting import eventually

pytestmark = pytest.mark.slow
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
BODY = {"prompt": "hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: str(write_model(root, name)) for name in ("qwen3", "llama")}


@pytest.fixture
def serve(tmp_path):
    servers = []

    def start(*arguments):
        servers.append(Serve(tmp_path, *arguments))
        return servers[-1].ready()

    yield start
    for server in servers:
        server.stop()


def load(server, count, **more):
    """Returns threads and result futures of `count` streams that have begun."""
    began = []

    def one(_):
        data = json.dumps({**BODY, **more}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as connection:
            connection.sendall(HEAD % len(data) + data)
            answer = connection.recv(65536)
            began.append(1)
            while part := connection.recv(65536):
                answer += part
            return answer

    pool = concurrent.futures.ThreadPoolExecutor(count)
    futures = [pool.submit(one, i) for i in range(count)]
    eventually(lambda: len(began) == count, server.text)
    return pool, futures


def ends(loaded):
    """Returns the result of each stream. No stream hangs."""
    pool, futures = loaded
    answers = [future.result(DEADLINE_S) for future in futures]
    pool.shutdown()
    return answers


def complete(server, **more):
    status, text = server.ask("/v1/completions", {**BODY, "max_tokens": 8, "stream": False, **more})
    return status, json.loads(text)


def gone(processes):
    return not psutil.wait_procs(processes, timeout=DEADLINE_S)[1]


@pytest.mark.parametrize("which", [0, 1], ids=["the first rank", "the second rank"])
def test_a_rank_that_is_killed_under_load_ends_its_requests_and_all_ranks_come_back(
    which, serve, checkpoints
):
    server = serve(checkpoints["qwen3"], "--tensor-parallel-size", "2", "--restart", *TINY)
    expected = complete(server)[1]["choices"][0]["text"]
    processes = sorted(server.cores(), key=lambda p: p.create_time())
    assert len(processes) >= 2
    loaded = load(server, 8)
    processes[which].kill()
    answers = ends(loaded)
    assert all(b'"error"' in answer or b"[DONE]" in answer for answer in answers)
    assert any(b"SIGKILL" in answer for answer in answers), answers[0][-500:]
    eventually(lambda: server.ask("/health")[0] == 200, server.text)
    assert complete(server)[1]["choices"][0]["text"] == expected
    assert gone(processes), "a rank of the old engine is left"
    assert "Traceback" not in server.text() and server.sockets() == []


@pytest.mark.parametrize("restart", [True, False])
def test_an_engine_that_is_killed_in_its_sleep_is_noticed(restart, serve, checkpoints):
    server = serve(checkpoints["llama"], "--enable-sleep-mode", *TINY, *(["--restart"] if restart else []))
    expected = complete(server)[1]["choices"][0]["text"]
    assert server.ask("/sleep?level=1", {}, server.admin)[0] == 200
    assert complete(server)[0] == 503
    server.cores()[0].kill()
    eventually(lambda: server.ask("/health")[0] == 503 or "was started again" in server.text(), server.text)
    if restart:
        eventually(lambda: server.ask("/health")[0] == 200, server.text)
        assert complete(server)[1]["choices"][0]["text"] == expected, "it comes back awake"
    else:
        status, answer = complete(server)
        assert status == 503 and "SIGKILL" in answer["error"]["message"]
        assert server.ask("/wake_up", {}, server.admin)[0] == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DEADLINE_S) == 0
    assert "Traceback" not in server.text()


@pytest.mark.parametrize("victim", ["awake", "asleep"])
def test_of_models_that_take_turns_one_may_be_killed(victim, serve, checkpoints):
    models = ("--model", f"a={checkpoints['qwen3']}", "--model", f"b={checkpoints['llama']}")
    server = serve(*models, "--swap", "--swap-patience", "0.2", *TINY)
    expected = {
        name: complete(server, model=name)[1]["choices"][0]["text"] for name in "ba"
    }  # a is awake now
    pids = {name: pid_of(server, name) for name in "ab"}
    process = psutil.Process(pids["a" if victim == "awake" else "b"])
    loaded = load(server, 4, model="a")
    process.kill()
    answers = ends(loaded)
    if victim == "asleep":
        assert all(b"[DONE]" in answer and b'"error"' not in answer for answer in answers)
        left, lost = "a", "b"
    else:
        assert any(b"SIGKILL" in answer for answer in answers)
        left, lost = "b", "a"
    status, answer = complete(server, model=lost)
    assert status == 503 and "SIGKILL" in answer["error"]["message"]
    for _ in range(3):
        status, answer = complete(server, model=left)
        assert status == 200 and answer["choices"][0]["text"] == expected[left]
        assert complete(server, model=lost)[0] == 503
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(DEADLINE_S) == 0
    assert "Traceback" not in server.text()


def pid_of(server, name):
    """The engine's process: engines are started in the order of the models."""
    cores = sorted(
        (p for p in server.cores() if p.ppid() == server.process.pid), key=lambda p: p.create_time()
    )
    assert len(cores) == 2
    return cores["ab".index(name)].pid


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_sleeping_and_waking_under_load_ends_or_answers_every_request(mode, serve, checkpoints):
    server = serve(checkpoints["llama"], "--enable-sleep-mode", *TINY)
    expected = complete(server)[1]["choices"][0]["text"]
    end = time.monotonic() + 5
    statuses = set()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:

        def client(_):
            while time.monotonic() < end:
                status, answer = complete(server, max_tokens=30)
                statuses.add(status)
                assert status in (200, 503), answer

        clients = [pool.submit(client, i) for i in range(10)]
        while time.monotonic() < end:
            for level in (0, 1):
                assert server.ask(f"/sleep?level={level}&mode={mode}", {}, server.admin)[0] == 200
                assert server.ask("/wake_up", {}, server.admin)[0] == 200
        for each in clients:
            each.result(DEADLINE_S)
    assert 200 in statuses
    assert complete(server)[1]["choices"][0]["text"] == expected
    assert server.metric("vllm:num_requests_running") == 0 and server.metric("vllm:kv_cache_usage_perc") == 0
    assert "Traceback" not in server.text()


def test_a_server_on_a_unix_socket_is_a_whole_one(tmp_path, serve, checkpoints):
    path = tmp_path / "shoal.sock"
    server = serve(checkpoints["llama"], "--uds", path, *TINY)
    data = json.dumps({**BODY, "max_tokens": 4}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(HEAD % len(data) + data)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert b"[DONE]" in answer and f"unix:{path}" in server.text()
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.process.wait(DEADLINE_S) == 0 and not path.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-num-seqs", "100000000"), "max_num_seqs must be an integer from 1 to 65536, got 100000000"),
        (("--num-gpu-blocks-override", "100000000000"), "num_gpu_blocks_override"),
        (("--kv-cache-memory-bytes", str(10**15)), "kv_cache_memory_bytes"),
        (("--kv-host-bytes", str(10**15)), "kv_host_bytes"),
        (("--max-model-len", str(10**12)), "max_model_len"),
        (("--block-size", str(2**40)), "block_size"),
        (("--max-num-seqs", str(10**30)), "max_num_seqs"),
    ],
    ids=str,
)
def test_a_number_beyond_the_machine_is_told_in_one_line(arguments, words, tmp_path, checkpoints):
    server = Serve(tmp_path, checkpoints["llama"], "--device", "cpu", *arguments)
    assert server.process.wait(DEADLINE_S) == 1
    last = server.text().strip().splitlines()[-1]
    assert last.startswith("shoal: ") and words in last and "Traceback" not in server.text()
