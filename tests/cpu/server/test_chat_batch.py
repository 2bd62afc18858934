"""Many conversations in one request, and SageMaker's one path for three APIs."""

import json

import pytest

from shoal.config import ServerConfig
from tests.cpu.server.test_external_routes import Workers, ask
from tests.fake_server import TEMPLATE, FakeServer, byte_tokenizer, engine_saying, ids_of

BATCH, CHAT = "/v1/chat/completions/batch", "/v1/chat/completions"


def said(text):
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def server():
    with FakeServer(engine_saying("hello world, how are you? ")) as server:
        yield server


def test_each_conversation_has_a_choice_in_its_order(server):
    before = len(server.engine.seen)
    conversations = [said("first"), [*said("second"), {"role": "assistant", "content": "x"}, *said("third")]]
    body = {"messages": conversations, "max_tokens": 5, "temperature": 0.5, "seed": 1}
    status, answer = server.json(BATCH, body)
    assert status == 200 and answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"hello"}
    prompts = [bytes(r.prompt_token_ids[-9:]).decode("latin-1") for r in server.engine.seen[before:]]
    alone = [server.json(CHAT, {"messages": one, "max_tokens": 5})[1] for one in conversations]
    usage = [one["usage"] for one in alone]
    assert answer["usage"]["completion_tokens"] == 10
    assert answer["usage"]["prompt_tokens"] == sum(one["prompt_tokens"] for one in usage)
    assert len(prompts) == 2 and server.engine.seen[before].params.temperature == 0.5
    assert answer["choices"][0] == alone[0]["choices"][0]


def test_a_batch_of_one_with_log_probabilities_a_format_and_token_ids(server):
    body = {"messages": [said("a")], "max_tokens": 2, "logprobs": True, "return_token_ids": True}
    [choice] = server.json(BATCH, body)[1]["choices"]
    assert len(choice["logprobs"]["content"]) == 2 and choice["token_ids"] == ids_of("he")
    format_ = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    status, _ = server.json(BATCH, {"messages": [said("a"), said("b")], "response_format": format_})
    assert status == 200
    assert all(request.params.structured_outputs is not None for request in server.engine.seen[-2:])


def test_thoughts_of_each_conversation_are_read():
    model = {"tokenizer": byte_tokenizer(TEMPLATE), "reasoning_parser": "qwen3"}
    with FakeServer(engine_saying("<think>hm</think>yes"), model=model) as server:
        body = {"messages": [said("a"), said("b")], "max_tokens": 20}
        messages = [choice["message"] for choice in server.json(BATCH, body)[1]["choices"]]
        assert [(m["reasoning"], m["content"]) for m in messages] == [("hm", "yes")] * 2


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"stream": True}, "stream", "for each conversation"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "for each conversation"),
        ({"n": 2}, "n", "repeat a conversation"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "for each conversation"),
        ({"messages": said("a")}, "messages[0]", "array"),
        ({"messages": []}, "messages", "length"),
        ({"messages": [said("a"), []]}, "messages[1]", "length"),
        ({"messages": [said("a"), [{"role": 5}]]}, "messages[1][0].role", "in messages[1]"),
        ({"messages": [said("a"), said("x" * 400)]}, "messages[1]", "maximum context length is 256"),
        ({"temperature": -1}, "temperature", "temperature"),
    ],
)
def test_what_a_batch_cannot_have_is_refused_by_name(server, changes, param, words):
    status, answer = server.json(BATCH, {"messages": [said("a")], "max_tokens": 2, **changes})
    assert (status, answer["error"]["param"]) == (400, param) and words in answer["error"]["message"]


def test_neutral_values_ask_for_nothing(server):
    body = {"messages": [said("a")], "max_tokens": 2, "stream": False, "tools": None, "n": 1}
    assert server.json(BATCH, body)[0] == 200


# SageMaker


def test_the_shape_of_a_body_says_which_api_it_is_for(server):
    asked = {"max_tokens": 3, "prompt": None}
    assert server.json("/invocations", {"messages": said("a"), **asked})[1]["object"] == "chat.completion"
    assert server.json("/invocations", {"prompt": "a", "max_tokens": 3})[1]["object"] == "text_completion"
    assert server.json("/invocations", {"input": "a"})[1]["object"] == "list"
    events = server.events("/invocations", {"messages": said("a"), "stream": True, "max_tokens": 3})
    assert events[0]["object"] == "chat.completion.chunk"


def test_a_body_of_no_shape_and_a_wrong_field_are_refused(server):
    status, answer = server.json("/invocations", {"text": "a"})
    assert status == 400 and "messages (chat), prompt (completions) or input" in answer["error"]["message"]
    status, answer = server.json("/invocations", {"messages": said("a"), "temperature": -1})
    assert (status, answer["error"]["param"]) == (400, "temperature")
    assert server.request("/invocations", b"{")[0] == server.request("/invocations", b"[]")[0] == 400
    assert server.request("/invocations")[0] == 405


def test_sagemakers_ping_is_the_health_of_the_server():
    with FakeServer(api_key=["k"]) as server:
        assert server.request("/ping")[0] == server.request("/ping", b"")[0] == 200
        assert server.request("/invocations", {"prompt": "a"})[0] == 401


@pytest.mark.parametrize(
    ("path", "field", "passed_on"),
    [
        ("/invocations", "messages", CHAT),
        ("/invocations", "prompt", "/v1/completions"),
        ("/invocations", "input", "/v1/embeddings"),
        (BATCH, "messages", BATCH),
    ],
)
def test_a_router_passes_both_on_to_an_external_worker(path, field, passed_on):
    workers = Workers(b"{}")
    body = {"model": "external", field: [said("a")] if path == BATCH else "a"}
    assert ask(workers, path, json.dumps(body).encode(), config=ServerConfig()).status == 200
    (call,) = workers.calls
    assert call.path == passed_on and json.loads(call.body) == body
