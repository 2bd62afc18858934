"""`shoal route` over external workers: a stand-in that breaks, `shoal serve` as if it were somebody else's, and
llama.cpp's Python server."""

import contextlib
import os
import subprocess

import openai
import pytest

from tests.external_worker import MODEL, ExternalWorkerThread, Fault, template, written
from tests.serving import TINY, Route, Serve, free_port
from tests.tiny import write_model
from tests.waiting import eventually

MESSAGES = [{"role": "user", "content": "Which fish swim together?"}]
LLAMA = os.environ.get("SHOAL_TEST_LLAMA_CPP_PYTHON")  # a Python that has llama-cpp-python[server]


@pytest.fixture
def route(tmp_path):
    """Starts a router over workers (URLs, or what --worker takes) and waits until all are ready."""
    routers = []

    def start(*workers, options=()):
        named = [f"{worker},id={'abcd'[i]}" for i, worker in enumerate(workers)]
        arguments = [part for one in named for part in ("--worker", one)]
        routers.append(Route(tmp_path, *arguments, *options))
        return routers[-1].ready().await_workers(len(workers))

    yield start
    for router in routers:
        router.stop()


@pytest.fixture
def stand_in():
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(ExternalWorkerThread(**options))


def text_of(stream):
    parts = [
        choice.text if hasattr(choice, "text") else choice.delta.content
        for c in stream
        for choice in c.choices
    ]
    return "".join(part or "" for part in parts)


def test_the_openai_client_sees_no_break(route, stand_in):
    a, b = (
        stand_in(alphabet="unicode", chunk_sizes=(1, 2, 3)),
        stand_in(alphabet="unicode", chunk_sizes=(1, 2, 3)),
    )
    client = route(a.url, b.url, options=["--policy", "round_robin"]).client()
    ask = dict(model=MODEL, max_tokens=40, stream=True, stream_options={"include_usage": True})
    for after in (0, 4, 17):
        a.faults, b.faults = [Fault("break", after, times=1)], []
        chunks = list(client.chat.completions.create(messages=MESSAGES, **ask))
        assert text_of(chunks) == written(template(MESSAGES), 40, "unicode")
        assert chunks[-1].usage.completion_tokens == 40 and len({chunk.id for chunk in chunks}) == 1
        a.faults, b.faults = [], [Fault("break", after, times=1)]
        assert text_of(client.completions.create(prompt="Which fish", **ask)) == written(
            "Which fish", 40, "unicode"
        )


def test_a_break_that_cannot_be_mended_is_an_error_event(route, stand_in):
    a, b = stand_in(), stand_in()
    router = route(a.url, b.url)
    a.faults, b.faults = [Fault("break", 5)], [Fault("break", 5)]
    stream = router.client().completions.create(
        model=MODEL, prompt="x", max_tokens=20, n=1, stream=True, extra_body={"guided_regex": "[a-z ]+"}
    )
    with pytest.raises(openai.APIError, match="grammar"):
        list(stream)
    assert router.metric("http_requests_total") >= 1


def test_adapters_are_offered_and_reached_where_they_are(route, stand_in):
    a, b = stand_in(), stand_in(adapters=("poems",))
    router = route(a.url, b.url)
    client = router.client()
    assert {model.id for model in client.models.list().data} == {MODEL, "poems"}
    for _ in range(4):
        client.completions.create(model="poems", prompt="x", max_tokens=2)
    assert len(b.received) == 4 and not a.received
    assert all(one.body["model"] == "poems" for one in b.received)


def test_a_worker_elsewhere_without_a_key_is_warned_of(tmp_path):
    key = tmp_path / "key"
    key.write_text("sesame")
    far = [
        "http://192.0.2.1:9,id=open",
        f"http://192.0.2.1:9,id=closed,api_key_file={key}",
        "http://127.0.0.1:9,id=near",
    ]
    router = Route(tmp_path, *(part for one in far for part in ("--worker", one)))
    try:
        text = router.ready().text()
        warned = "".join(line for line in text.splitlines() if "api_key_file" in line)
        assert "worker open" in warned and "worker closed" not in warned and "worker near" not in warned
        assert "sesame" not in text
    finally:
        router.stop()


# Real servers


@pytest.fixture
def shoals(tmp_path):
    """Two servers of Shoal behind --worker, spoken to as external ones. Their model is deep, so that a stream takes
    seconds: a server that writes faster than the test reads has ended before anything breaks."""
    folder = write_model(tmp_path, "qwen3", num_hidden_layers=32)
    servers = [Serve(tmp_path, folder, "--served-model-name", "tiny", *TINY) for _ in range(2)]
    try:
        yield [server.ready() for server in servers]
    finally:
        for server in servers:
            server.stop()


@pytest.mark.parametrize("form", [pytest.param("completion", marks=pytest.mark.slow), "chat"])
def test_a_real_server_killed_in_mid_stream_changes_no_text(form, route, shoals):
    urls = [f"http://127.0.0.1:{server.port}" for server in shoals]
    router = route(*urls, options=["--policy", "round_robin"])
    client = router.client()
    ask = dict(model="tiny", max_tokens=400, temperature=0, extra_body={"ignore_eos": True}, timeout=120)

    def stream():
        more = {"stream": True, "stream_options": {"include_usage": True}, **ask}
        if form == "chat":
            return client.chat.completions.with_raw_response.create(messages=MESSAGES, **more)
        return client.completions.with_raw_response.create(prompt="Once upon a time", **more)

    expected = list(stream().parse())
    assert text_of(expected) and expected[-1].usage.completion_tokens == 400
    begun = stream()
    owner, chunks = begun.headers["x-shoal-worker"], []
    for chunk in begun.parse():
        chunks.append(chunk)
        if len(chunks) == 5:
            shoals["ab".index(owner)].process.kill()
            for child in shoals["ab".index(owner)].cores():
                child.kill()
    assert text_of(chunks) == text_of(expected) and len({chunk.id for chunk in chunks}) == 1
    # The cached tokens and the accepted drafts depend on the worker that answered each part.
    details = ("prompt_tokens_details", "completion_tokens_details")
    usage = chunks[-1].usage
    assert usage == expected[-1].usage.model_copy(update={name: getattr(usage, name) for name in details})
    eventually(lambda: router.fleet()[owner]["state"] == "broken", router.text)
    (other,) = {"a", "b"} - {owner}
    assert router.fleet()[other]["requests"] == 2, "the stream went on there"


@pytest.mark.slow
@pytest.mark.skipif(
    LLAMA is None, reason="SHOAL_TEST_LLAMA_CPP_PYTHON names no Python with llama-cpp-python[server]"
)
def test_llama_cpps_server_is_a_worker(route, tmp_path):
    from shoal.weights.source import resolve

    port = free_port()
    model = os.environ.get("SHOAL_TEST_GGUF") or str(resolve("smollm2").path)
    arguments = [
        "--model",
        model,
        "--model_alias",
        "llama",
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--n_ctx",
        "512",
        "--interrupt_requests",  # by a newer one
        "false",
    ]
    with (tmp_path / "llama.log").open("w") as log:
        server = subprocess.Popen([LLAMA, "-m", "llama_cpp.server", *arguments], stdout=log, stderr=log)
    try:
        router = route(f"http://127.0.0.1:{port}/v1")
        client = router.client()
        direct = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        ask = dict(model="llama", max_tokens=12, temperature=0, messages=MESSAGES)
        text = direct.chat.completions.create(**ask).choices[0].message.content
        assert text
        assert client.chat.completions.create(**ask).choices[0].message.content == text
        assert text_of(client.chat.completions.create(stream=True, **ask)) == text
        assert router.fleet()["a"]["requests"] == 2
    finally:
        server.kill()
        server.wait()
