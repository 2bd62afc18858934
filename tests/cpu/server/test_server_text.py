"""Texts, bodies and templates that would hold up everybody: refused before they cost much, or ended."""

import asyncio
import threading
import time

import msgspec
import pytest

from shoal.errors import RequestError
from shoal.server.http import exchange
from shoal.server.served import model as server_model
from shoal.server.served.text_threads import Overtime, TextThreads, _Job
from tests.fake_server import FakeServer, byte_tokenizer

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
FOREVER = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor "
    "%}"
    "{% endfor %}"
)
HUNGRY = "{{ 'x' * 10 ** 12 }}"


@pytest.fixture(scope="module")
def server():
    with FakeServer() as server:
        yield server


class Seen:
    """A tokenizer's backend that notes what it is given."""

    def __init__(self, backend):
        self.backend, self.texts = backend, []

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def encode_batch_fast(self, texts, **options):
        self.texts += texts
        return self.backend.encode_batch_fast(texts, **options)


@pytest.fixture
def seen(server, monkeypatch):
    tokenizer = server.model.loaded.tokenizer
    seen = Seen(tokenizer._backend)
    monkeypatch.setattr(tokenizer, "_backend", seen)
    return seen


def test_a_text_that_can_never_fit_is_not_tokenized(server, seen):
    longest = byte_tokenizer().longest_token
    code, body = server.json(COMPLETE, {"prompt": "a" * (256 * longest + 1)})
    assert code == 400 and "maximum context length is 256" in body["error"]["message"] and not seen.texts
    code, body = server.json(CHAT, {"messages": [{"role": "user", "content": "a" * (256 * longest)}]})
    assert code == 400 and "maximum context length is 256" in body["error"]["message"] and not seen.texts


def test_of_a_text_that_may_fit_a_part_is_tokenized_first(server, seen, monkeypatch):
    monkeypatch.setattr(type(byte_tokenizer()), "longest_token", 1000)
    code, body = server.json(COMPLETE, {"prompt": "a" * 200_000})
    assert code == 400 and "maximum context length is 256" in body["error"]["message"]
    assert [len(text) for text in seen.texts] == [] or max(map(len, seen.texts)) <= 8 * 256


def test_a_text_that_is_cut_to_its_end_may_be_long(server):
    code, body = server.json(
        COMPLETE, {"prompt": "a" * 20_000, "truncate_prompt_tokens": 10, "max_tokens": 1}
    )
    assert code == 200 and body["usage"]["prompt_tokens"] == 10
    assert server.json("/tokenize", {"prompt": "a" * 20_000})[1]["count"] == 20_000


def test_long_and_short_texts_have_the_same_tokens():
    tokenizer = byte_tokenizer()
    text = "Grüße, 東京 🚀 <begin>\n" * 500
    pieces = tokenizer._backend.encode(text, add_special_tokens=True).ids
    assert tokenizer.encode(text) == pieces and len(text) > 4096


def test_more_messages_than_tokens_are_refused(server):
    code, body = server.json(CHAT, {"messages": [{"role": "user", "content": "a"}] * 300})
    assert code == 400 and body["error"]["param"] == "messages" and "300" in body["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "x": [' + b",".join([b"[]"] * 200_000) + b"]}",
        b'{"prompt": "a", "allowed_token_ids": [' + b",".join([b"1"] * 1_200_000) + b"]}",
    ],
    ids=["lists", "values"],
)
def test_json_of_too_many_values_is_not_read(body, server, monkeypatch):
    monkeypatch.setattr(exchange, "decode", lambda *_: pytest.fail("it was read"))
    code, answer = server.json(COMPLETE, body)
    assert code == 413 and "more than" in answer["error"]["message"]


def test_lists_of_tokens_are_no_longer_than_the_vocabulary(server):
    for name, value in (
        ("allowed_token_ids", [1] * 301),
        ("stop_token_ids", [1] * 301),
        ("logit_bias", {i: 1.0 for i in range(301)}),
    ):
        code, body = server.json(COMPLETE, {"prompt": "a", name: value})
        assert code == 400 and body["error"]["param"] == name and "300 tokens" in body["error"]["message"]


def test_collections_go_on_after_a_large_body(server):
    import gc

    assert server.json(COMPLETE, {"prompt": "a", "max_tokens": 1, "user": "x" * 100_000})[0] == 200
    assert gc.isenabled()


@pytest.fixture(scope="module")
def trusting():
    with FakeServer(trust_request_chat_template=True) as server:
        yield server


def test_a_template_that_does_not_end_is_ended(trusting, monkeypatch):
    monkeypatch.setattr(server_model, "TEMPLATE_SECONDS", 0.3)
    ask = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for _ in range(3):  # more than there are threads
        code, body = trusting.json(CHAT, {**ask, "chat_template": FOREVER})
        assert code == 400 and "chat template took longer than 0.3 s" in body["error"]["message"]
    assert trusting.json(CHAT, ask)[0] == 200


def test_a_template_that_does_not_end_holds_nobody_up(trusting, monkeypatch):
    monkeypatch.setattr(server_model, "TEMPLATE_SECONDS", 2.0)
    ask = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    looping = threading.Thread(target=trusting.json, args=(CHAT, {**ask, "chat_template": FOREVER}))
    looping.start()
    for _ in range(5):
        assert trusting.json("/version")[0] == 200 and looping.is_alive()
    looping.join()


@pytest.mark.parametrize(
    "template", [HUNGRY, "{{ [1] * 10 ** 9 }}", "{{ 10 ** 8 * 'y' }}", "{{ 9 ** (10 ** 9) }}"]
)
def test_a_template_cannot_take_all_memory_by_one_operator(template, trusting):
    code, body = trusting.json(
        CHAT, {"messages": [{"role": "user", "content": "a"}], "chat_template": template}
    )
    assert code == 400 and "chat template" in body["error"]["message"]


def test_work_is_ended_alone_and_its_thread_goes_on():
    async def run():
        threads = TextThreads()

        def endless():
            while True:
                time.sleep(0)

        def late():
            end = time.monotonic() + 0.05
            while time.monotonic() < end:
                pass
            return "late"

        failed = await asyncio.gather(
            *[threads.run_bounded(endless, 0.1, "it") for _ in range(5)], return_exceptions=True
        )
        assert all(isinstance(error, RequestError) and "longer than 0.1 s" in str(error) for error in failed)
        for _ in range(30):  # it ends about when it is ended: either is right, and the next work is whole
            try:
                assert await threads.run_bounded(late, 0.05, "it") == "late"
            except RequestError:
                pass
            assert await threads.run(lambda: sum(range(1000))) == 499500
        threads.close()

    asyncio.run(run())


def test_work_of_a_client_that_leaves_is_ended():
    async def run():
        threads, ended = TextThreads(), threading.Event()

        def endless():
            try:
                while True:
                    time.sleep(0.001)
            finally:
                ended.set()

        task = asyncio.create_task(threads.run_bounded(endless, 60.0, "it"))
        await asyncio.sleep(0.1)
        task.cancel()
        assert await asyncio.to_thread(ended.wait, 10)
        threads.close()

    asyncio.run(run())


def test_work_that_nobody_waits_for_any_more_is_not_begun():
    begun = []
    job = _Job(lambda: begun.append(True))
    job.end()  # its client leaves, and only then a thread is free
    with pytest.raises(Overtime):
        job.run()
    assert not begun


def test_what_a_template_sees_is_plain():
    from shoal.text.chat_template import _plain

    class Sly(str):
        def upper(self):
            raise AssertionError("called")

    value = _plain({"a": [Sly("x"), 1, 2.5, None, True, ("t",)], 3: {"b": "c"}, None: 1}, "it")
    assert (
        value == {"a": ["x", 1, 2.5, None, True, ["t"]], "3": {"b": "c"}, "null": 1}
        and type(value["a"][0]) is str
    )
    assert value == msgspec.json.decode(msgspec.json.encode(value))
    for wrong in (object(), {"a": {1, 2}}, {(1,): 2}, b"x"):
        with pytest.raises(RequestError, match="send JSON values only"):
            _plain(wrong, "it")
