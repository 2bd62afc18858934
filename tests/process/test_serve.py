"""`shoal serve` as a process: clients, every kind of death, drains, restarts, models that take turns."""

import concurrent.futures
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import openai
import psutil
import pytest

from shoal.cli.main import main
from shoal.engine.process.async_llm import AsyncLLM
from tests.serving import DEADLINE_S, TINY, Serve
from tests.tiny import write_model
from tests.waiting import eventually


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root, name) for name in ("qwen3", "llama")}


@pytest.fixture
def serve(tmp_path):
    servers = []

    def start(*arguments):
        servers.append(Serve(tmp_path, *arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def shared(checkpoints, tmp_path_factory):
    """For tests that leave it as they found it."""
    server = Serve(
        tmp_path_factory.mktemp("serve"), checkpoints["qwen3"], "--served-model-name", "tiny", "also", *TINY
    ).ready()
    yield server
    server.stop()


def complete(client, length=16, model="tiny", **options):
    extra = {"ignore_eos": True, **options.pop("extra", {})}
    given = {
        "model": model,
        "prompt": "hello",
        "max_tokens": length,
        "temperature": 0,
        "extra_body": extra,
        **options,
    }
    return client.completions.create(**given)


def begin(client, length=400, **options):
    """A stream that has begun."""
    stream = complete(client, length, stream=True, **options)
    parts = iter(stream)
    next(parts)
    return stream, parts


def test_clients_are_answered_under_each_name(shared, checkpoints):
    client = shared.client()
    assert [(m.id, m.root) for m in client.models.list().data] == [
        (name, str(checkpoints["qwen3"])) for name in ("tiny", "also")
    ]
    whole = complete(client)
    assert (
        whole.usage.completion_tokens == 16
        and whole.choices[0].text == complete(client, model="also").choices[0].text
    )
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5
    )
    assert isinstance(answer.choices[0].message.content, str)
    with pytest.raises(openai.NotFoundError):
        complete(client, model="other")
    assert shared.sockets() == []


def test_clients_that_leave_free_their_blocks(shared):
    client = shared.client()
    for _ in range(10):  # a busy machine may have ended them all before it is asked
        streams = [begin(client) for _ in range(6)]
        if shared.metric("vllm:num_requests_running") > 0:
            break
    else:
        pytest.fail("no request was seen running")
    for stream, _ in streams:
        stream.close()
    eventually(
        lambda: (
            shared.metric("vllm:num_requests_running") == 0 and shared.metric("vllm:kv_cache_usage_perc") == 0
        )
    )
    assert complete(client).usage.completion_tokens == 16


def test_a_killed_client_frees_its_blocks(shared):
    script = (
        f"import openai; c = openai.OpenAI(base_url='http://127.0.0.1:{shared.port}/v1', api_key='x')\n"
        "s = c.completions.create(model='tiny', prompt='hello', max_tokens=480, stream=True, "
        "extra_body={'ignore_eos': True})\n"
        "for p in s: print('part', flush=True)\n"
    )
    client = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert client.stdout.readline()
    client.kill()
    client.wait()
    eventually(
        lambda: (
            shared.metric("vllm:num_requests_running") == 0 and shared.metric("vllm:kv_cache_usage_perc") == 0
        )
    )


def test_a_reader_that_takes_nothing_holds_nobody_up(shared):
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": "hello",
            "max_tokens": 480,
            "stream": True,
            "ignore_eos": True,
            "logprobs": 20,
        }
    ).encode()
    slow = socket.create_connection(("127.0.0.1", shared.port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        f"{len(body)}\r\n\r\n"
    )
    slow.sendall(head.encode() + body)
    client = shared.client()
    texts = {complete(client, 50).choices[0].text for _ in range(3)}
    assert len(texts) == 1
    slow.close()
    eventually(lambda: shared.metric("vllm:num_requests_running") == 0)


def test_a_killed_core_fails_its_requests_and_the_server_says_so(serve, tmp_path):
    deep = write_model(tmp_path / "models", "llama", num_hidden_layers=32)  # 400 tokens take seconds
    server = serve(deep, "--served-model-name", "tiny", *TINY).ready()
    client, [core] = server.client(), server.cores()
    _, parts = begin(client)
    core.kill()
    with pytest.raises(openai.APIError, match="SIGKILL"):
        list(parts)
    status, text = server.ask("/health")
    assert status == 503 and "SIGKILL" in text
    assert "are refused from now on: restart the server; with --restart it" in server.text()
    with pytest.raises(openai.InternalServerError) as error:
        complete(client)
    assert (
        error.value.status_code == 503
        and "Traceback" not in str(error.value)
        and "INFO" not in str(error.value)
    )
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(DEADLINE_S) == 0 and server.sockets() == []


@pytest.mark.slow
def test_a_core_comes_back_with_restart(serve, checkpoints):
    server = serve(checkpoints["llama"], "--served-model-name", "tiny", "--restart", *TINY).ready()
    client = server.client()
    before = complete(client).choices[0].text
    server.cores()[0].kill()
    eventually(lambda: server.ask("/health")[0] == 503, server.text)
    eventually(lambda: server.ask("/health")[0] == 200, server.text)
    assert complete(client).choices[0].text == before and server.sockets() == []


@pytest.mark.parametrize("ready", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_core_vanishes_with_the_server(ready, serve, checkpoints):
    server = serve(checkpoints["llama"], *TINY)
    if ready:
        server.ready()
    else:
        eventually(lambda: server.cores(), server.text)
    cores = server.cores()
    server.process.kill()
    _, alive = psutil.wait_procs(cores, timeout=DEADLINE_S)
    assert not alive
    assert server.sockets() == []


def test_sigterm_under_load_lets_everything_end(serve, checkpoints):
    server = serve(checkpoints["llama"], "--served-model-name", "tiny", *TINY).ready()
    client = server.client()

    def one(i):
        parts = list(complete(client, 300 + i, stream=True, stream_options={"include_usage": True}))
        return parts[-1].usage.completion_tokens

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        futures = [pool.submit(one, i) for i in range(40)]
        states = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:request_success_total")
        eventually(lambda: sum(map(server.metric, states)) >= 40)
        cores = server.cores()
        os.killpg(server.process.pid, signal.SIGTERM)
        for core in cores:  # as a service manager does it
            core.send_signal(signal.SIGTERM)
        assert [f.result() for f in futures] == [300 + i for i in range(40)]
    assert server.process.wait(DEADLINE_S) == 0
    assert not psutil.wait_procs(cores, timeout=DEADLINE_S)[1]


def test_a_second_signal_ends_at_once(serve, checkpoints):
    server = serve(checkpoints["llama"], "--served-model-name", "tiny", "--max-num-seqs", "1", *TINY).ready()
    streams = [begin(server.client(), 480)]
    server.process.send_signal(signal.SIGINT)
    eventually(lambda: server.ask("/health")[0] == 503)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(DEADLINE_S) in (0, 1)  # 0: the answer had come to its end meanwhile
    assert len(streams) == 1


def test_sleep_by_the_admin_port(serve, checkpoints):
    server = serve(checkpoints["qwen3"], "--served-model-name", "tiny", "--enable-sleep-mode", *TINY).ready()
    client = server.client()
    before = complete(client).choices[0].text
    for level in (0, 1, 2):
        assert server.ask(f"/sleep?level={level}&mode=wait", {}, server.admin)[0] == 200
        assert server.ask("/health")[0] == 200
        with pytest.raises(openai.InternalServerError) as error:
            complete(client)
        assert error.value.status_code == 503 and error.value.response.headers["retry-after"]
        assert server.ask("/wake_up", {}, server.admin)[0] == 200
        if level == 2:
            assert server.ask("/update_weights", {"path": str(checkpoints["qwen3"])}, server.admin)[0] == 200
        assert complete(client).choices[0].text == before
    assert server.ask("/sleep", {})[0] in (404, 405)


@pytest.mark.slow
def test_another_model_is_taken_by_the_admin_port_and_served_under_the_old_name(serve, checkpoints, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(checkpoints["llama"], other)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    (other / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3}))
    arguments = ("--served-model-name", "tiny", "--enable-sleep-mode", *TINY)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}

    fresh = serve(other, *arguments).ready()
    wanted = complete(fresh.client()).choices[0].text
    wanted_chat = fresh.client().chat.completions.create(**chat)
    fresh.stop()

    server = serve(checkpoints["qwen3"], *arguments).ready()
    client = server.client()
    before = complete(client).choices[0].text
    assert before != wanted
    update = ("/update_weights", {"path": str(other)}, server.admin)
    status, answer = server.ask(*update)
    assert status == 400 and "sleep at level 2" in answer and "sleep(" not in answer
    assert server.ask("/sleep?level=2&mode=wait", {}, server.admin)[0] == 200
    assert json.loads(server.ask(*update)[1]) == {"version": 1}
    with pytest.raises(openai.InternalServerError, match="sleeps"):
        complete(client)
    assert server.ask("/wake_up", {}, server.admin)[0] == 200
    assert complete(client).choices[0].text == wanted
    answered = client.chat.completions.create(**chat)
    assert answered.choices[0].message == wanted_chat.choices[0].message
    assert answered.usage == wanted_chat.usage and answered.usage.completion_tokens == 3
    assert [m.id for m in client.models.list().data] == ["tiny"]
    assert server.ask("/sleep?level=2&mode=wait", {}, server.admin)[0] == 200
    back = ("/update_weights", {"path": str(checkpoints["qwen3"])}, server.admin)
    assert json.loads(server.ask(*back)[1]) == {"version": 2}
    assert server.ask("/wake_up", {}, server.admin)[0] == 200
    assert complete(client).choices[0].text == before


def test_two_models_take_turns(serve, checkpoints):
    alone = {}
    models = ("--model", f"a={checkpoints['qwen3']}", "--model", f"b={checkpoints['llama']}")
    server = serve(*models, "--swap", "--swap-patience", "0.2", *TINY).ready()
    client = server.client()
    for name in ("a", "b"):
        alone[name] = complete(client, model=name).choices[0].text
    assert alone["a"] != alone["b"] and [m.id for m in client.models.list().data] == ["a", "b"]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(lambda i: complete(client, model="ab"[i % 2]).choices[0].text, range(48)))
    assert texts == [alone["ab"[i % 2]] for i in range(48)]
    assert "first token" in server.text()
    assert server.ask("/sleep?model=a", {}, server.admin)[0] == 400
    states = [
        json.loads(server.ask(f"/is_sleeping?model={name}", port=server.admin)[1])["is_sleeping"]
        for name in "ab"
    ]
    assert sorted(states) == [False, True]
    assert server.ask("/health")[0] == 200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/nowhere",), "/nowhere"),
        (("MODEL", "--tensor-parallel-size", "4"), "tensor_parallel_size"),
        (("--model", "a=MODEL", "--model", "b=MODEL"), "--swap"),
        (("MODEL", "--model", "a=MODEL"), "twice"),
        (("--model", "a=MODEL", "--swap", "--restart"), "--restart"),
        (("--model", "a=MODEL", "--model", "a=MODEL", "--swap"), "'a'"),
        (("MODEL", "--allowed-origins", "[1]"), "allowed_origins"),
        (("MODEL", "--chat-template", "/nowhere.jinja"), "/nowhere.jinja"),
        (("MODEL", "--api-key-file", "/nowhere"), "api_key_file"),
        (("MODEL", "--host", "192.0.2.1"), "192.0.2.1"),
        (("MODEL", "--ssl-certfile", "/nowhere", "--ssl-keyfile", "/nowhere"), "ssl_certfile"),
    ],
    ids=str,
)
def test_mistakes_are_told_in_one_line(arguments, words, serve, checkpoints):
    server = serve(*[a.replace("MODEL", str(checkpoints["llama"])) for a in arguments], "--device", "cpu")
    assert server.process.wait(DEADLINE_S) == 1
    last = server.text().strip().splitlines()[-1]
    assert last.startswith("shoal: ") and words in last and "Traceback" not in server.text()
    assert server.sockets() == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--api-key-file", "/nowhere"),
        ("--port", "80000"),
        ("--port", "TAKEN"),
        ("--admin-port", "TAKEN"),
        ("--ssl-certfile", "/nowhere", "--ssl-keyfile", "/nowhere"),
    ],
    ids=str,
)
def test_mistakes_are_told_before_an_engine_is_started(arguments, checkpoints, monkeypatch):
    started = []
    monkeypatch.setattr(AsyncLLM, "start", lambda *args, **options: started.append(args))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        assert (
            main(
                [
                    "serve",
                    str(checkpoints["llama"]),
                    "--port",
                    "0",
                    *[a.replace("TAKEN", number) for a in arguments],
                ]
            )
            == 1
        )
    assert not started


def test_a_core_that_dies_at_the_start_ends_the_server(serve, checkpoints):
    server = serve(checkpoints["llama"], *TINY)
    eventually(lambda: server.cores(), server.text)
    server.cores()[0].kill()
    assert server.process.wait(DEADLINE_S) == 1
    assert (
        "shoal: the engine core" in server.text()
        and "Traceback" not in server.text()
        and server.sockets() == []
    )
