"""Whatever clients send, they get the right 4xx with OpenAI's error shape, and the server goes on."""

import gzip
import json
import random
import re
import time

import pytest

from shoal.api import FinishReason, Output
from shoal.config import ServerConfig
from shoal.server.http.keys import key_environment, read_keys
from shoal.server.routes import PUBLIC_ROUTES
from tests.fake_server import FakeServer, post, read_until
from tests.waiting import eventually

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def server():
    with FakeServer(max_body_bytes=1 << 16, read_timeout=1.0) as server:
        yield server


def check_error(status, text, expected):
    assert status == expected, text
    error = json.loads(text)["error"]
    assert len(error["message"]) > 5 and error["type"] and {"param", "code"} <= error.keys()
    assert "Traceback" not in text and ".py" not in text
    return error


@pytest.mark.parametrize(
    "path, body, message",
    [
        (
            CHAT,
            {"messages": USER, "response_format": {"type": "xml"}},
            "response_format.type: must be one of json_object, json_schema, structural_tag, text, got 'xml'; "
            "choose one",
        ),
        (
            CHAT,
            {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
            "response_format must be a JSON schema, got False; send an object",
        ),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "xml"}}},
            "text.format.type: must be one of json_object, json_schema, text, got 'xml'; choose one",
        ),
        (
            "/v1/embeddings",
            {"input": "x", "encoding_format": "hex"},
            "must be one of base64, float, got 'hex'",
        ),
        (CHAT, {"messages": USER, "top_k": -2}, "top_k: Expected `int` >= -1, got -2"),
        (CHAT, {"messages": []}, "messages: Expected `array` of length >= 1, got []"),
    ],
)
def test_an_error_names_the_choices_or_the_value(path, body, message, server):
    status, answer = server.json(path, body)
    assert status == 400 and message in answer["error"]["message"], answer


NEVER = {"name": "n", "schema": {"not": {}}}
BAD_PARAMETERS = {"type": "object", "properties": {"a": {"type": "none"}}}
LONG = [{"role": "user", "content": "x" * 999}]
FORMAT = {"type": "json_schema", "schema": {"type": "none"}}


@pytest.mark.parametrize(
    "path, body, param",
    [
        (CHAT, b"{not json", None),
        (CHAT, b"\xff\xfe", None),
        (CHAT, b'{"messages": [{"role": "\xff"}]}', None),
        (CHAT, b"", None),
        (CHAT, b"[]", None),
        (CHAT, b'{"messages":' + b"[" * 20_000, "messages[0]"),
        (CHAT, b'{"messages":[{"a":' + b"[" * 20_000, None),
        (COMPLETE, b'{"prompt": "x", "temperature": NaN}', None),
        (COMPLETE, b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (COMPLETE, {"prompt": [1, 2, "x"]}, "prompt"),
        (COMPLETE, {"prompt": [1, 2, [3]]}, "prompt"),
        (COMPLETE, {"prompt": [[1], "x"]}, "prompt"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [1]}, "messages[0]"),
        (CHAT, {"messages": [{}]}, "messages[0].role"),
        (CHAT, {"messages": [*USER, {"role": 5, "content": "x"}]}, "messages[1].role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            CHAT,
            {"messages": [*USER, {"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[1].content",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": None}]}]},
            "messages[0].tool_calls[0]",
        ),
        (CHAT, {"messages": [{"role": "assistant", "function_call": 5}]}, "messages[0].function_call"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 30}, "top_logprobs"),
        (COMPLETE, {"prompt": "x", "logprobs": 30}, "logprobs"),
        (
            CHAT,
            {"messages": USER, "modalities": ["text", "audio"], "audio": {"voice": "alloy"}},
            "modalities",
        ),
        (CHAT, {"messages": USER, "functions": [{"name": "a b"}]}, "functions[0]"),
        (CHAT, {"messages": USER, "functions": [{"name": "a"}], "tools": []}, "functions"),
        (
            CHAT,
            {"messages": USER, "functions": [{"name": "a"}], "function_call": {"name": "b"}},
            "function_call",
        ),
        (
            CHAT,
            {"messages": USER, "response_format": {"type": "json_schema", "json_schema": NEVER}},
            "response_format",
        ),
        (CHAT, {"messages": USER, "guided_json": {"type": "none"}}, "guided_json"),
        (CHAT, {"messages": USER, "guided_regex": "("}, "guided_regex"),
        (CHAT, {"messages": USER, "guided_choice": []}, "guided_choice"),
        (
            CHAT,
            {
                "messages": USER,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": BAD_PARAMETERS}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": 5}]}]}, "messages[0].tool_calls[0]"),
        (
            CHAT,
            {"messages": USER, "guided_regex": "a", "structured_outputs": {"regex": "b"}},
            "structured_outputs",
        ),
        (CHAT, {"messages": USER, "guided_choice": "a"}, "guided_choice"),
        (
            CHAT,
            {"messages": USER, "structured_outputs": {"structural_tag": {"type": "x"}}},
            "structured_outputs.structural_tag",
        ),
        (CHAT, {"messages": LONG}, "messages"),
        ("/v1/responses", {"input": "x" * 999}, "input"),
        ("/v1/responses", {"input": "x" * 999, "truncation": "auto"}, "input"),
        (
            "/v1/responses",
            {
                "input": "x",
                "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "none"}}},
            },
            "text.format",
        ),
        (CHAT, {"messages": USER, "temperature": "hot"}, "temperature"),
        (CHAT, {"messages": USER, "temperature": -1}, "temperature"),
        (CHAT, {"messages": USER, "max_tokens": -5}, "max_tokens"),
        (CHAT, {"messages": USER, "max_tokens": 10**30}, "max_tokens"),
        (COMPLETE, {"prompt": "x", "max_tokens": 256}, "max_tokens"),
        (CHAT, {"messages": USER, "n": 0}, "n"),
        (CHAT, {"messages": USER, "n": 10**6}, "n"),
        (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"messages": USER, "response_format": {"type": "structural_tag"}}, "response_format.format"),
        (
            CHAT,
            {"messages": USER, "response_format": {"type": "structural_tag", "format": {"type": "tag"}}},
            "response_format",
        ),
        (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
        (
            CHAT,
            {"messages": USER, "response_format": {"type": "json_object", "schema": 123}},
            "response_format.schema",
        ),
        (CHAT, {"messages": USER, "json_schema": {"type": "none"}}, "json_schema"),
        (CHAT, {"messages": USER, "json_schema": {"type": "null"}, "grammar": 'root ::= "a"'}, "json_schema"),
        (COMPLETE, {"prompt": "x", "grammar": "root ::= missing"}, "grammar"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            CHAT,
            {
                "messages": USER,
                "response_format": {"type": "json_object"},
                "structured_outputs": {"regex": "a"},
            },
            "response_format",
        ),
        (CHAT, {"messages": USER, "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (CHAT, {"messages": USER, "structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        (CHAT, {"messages": USER, "structured_outputs": {"grammar": "%%"}}, "structured_outputs.grammar"),
        (CHAT, {"messages": USER, "structured_outputs": {}}, "structured_outputs"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools[0]"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
        (COMPLETE, {}, "prompt"),
        (COMPLETE, {"prompt": ""}, "prompt"),
        (COMPLETE, {"prompt": []}, "prompt"),
        (COMPLETE, {"prompt": [99999]}, "prompt"),
        (COMPLETE, {"prompt": [-1]}, "prompt[0]"),
        (COMPLETE, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETE, {"prompt": [10**40]}, "prompt[0]"),
        (COMPLETE, {"prompt": "x", "logit_bias": {"zzz": 1}}, "logit_bias[zzz]"),
        (COMPLETE, {"prompt": "x", "stop": 17}, "stop"),
        (COMPLETE, {"prompt": "x", "stop": [""]}, "stop"),
        (COMPLETE, {"prompt": "x", "stop": ["a"] * 257}, "stop"),
        (COMPLETE, {"prompt": "x", "bad_words": ["a"] * 257}, "bad_words"),
        (COMPLETE, {"prompt": "x", "stop": "a" * 1001}, "stop"),
        (COMPLETE, {"prompt": "x", "bad_words": ["a" * 1001]}, "bad_words[0]"),
        (COMPLETE, {"prompt": "x", "best_of": 3}, "best_of"),
        (COMPLETE, {"prompt": "x", "suffix": "y"}, "suffix"),
        (COMPLETE, {"prompt": "x", "seed": 2**70}, "seed"),
        (COMPLETE, {"prompt": "x", "priority": 2**40}, "priority"),
        (COMPLETE, {"prompt": "x", "timeout": 0}, "timeout"),
        (COMPLETE, {"prompt": "x", "stream": "maybe"}, "stream"),
        (COMPLETE, {"prompt": "x", "max_tokens": "abc"}, "max_tokens"),
        (COMPLETE, {"prompt": "x", "max_tokens": "1.5"}, "max_tokens"),
        (COMPLETE, {"prompt": "x", "max_tokens": True}, "max_tokens"),
        (COMPLETE, {"prompt": "x", "temperature": "inf"}, "temperature"),
        (COMPLETE, {"prompt": "x", "temperature": "1e999"}, "temperature"),
        (COMPLETE, {"prompt": "x", "user": 5}, "user"),
        (COMPLETE, {"prompt": 5}, "prompt"),
        (COMPLETE, {"prompt": None}, "prompt"),
        ("/v1/embeddings", {"input": None}, "input"),
        ("/detokenize", {"tokens": ["5"]}, "tokens[0]"),
        (COMPLETE, {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETE, {"prompt": "x", "min_tokens": 99}, "min_tokens"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
    ids=repr,
)
def test_bad_requests_name_what_is_wrong(path, body, param, server):
    status, _, text = server.request(path, body)
    assert check_error(status, text, 400)["param"] == param, text


@pytest.mark.parametrize(
    "path, body, param",
    [
        (COMPLETE, {"prompt": "x" * 250, "max_tokens": 7}, "max_tokens"),
        (COMPLETE, {"prompt": "x" * 256}, "prompt"),
        (COMPLETE, {"prompt": "x" * 999}, "prompt"),
        (COMPLETE, {"prompt": [1] * 256}, "prompt"),
        (CHAT, {"messages": LONG}, "messages"),
        (CHAT, {"messages": USER * 257}, "messages"),
        ("/v1/responses", {"input": "x" * 999}, "input"),
        ("/v1/embeddings", {"input": "x" * 999}, "input"),
        ("/v1/embeddings", {"input": [1] * 257}, "input"),
    ],
)
def test_what_the_context_cannot_hold_is_reported_in_the_words_that_agents_know(path, body, param, server):
    """Regression: the words were others, so LiteLLM took the error for an ordinary bad request and agents
    gave up in place of shortening the conversation."""
    status, _, text = server.request(path, body)
    error = check_error(status, text, 400)
    assert error["message"].startswith("This model's maximum context length is 256 tokens. However, ")
    assert error["code"] == "context_length_exceeded" and error["param"] == param


@pytest.mark.parametrize(
    "bias, key",
    [
        ({"5": 1, "not-a-token-id": 1}, "not-a-token-id"),
        ({"5": 1, "-7": 1, "6": 0}, "-7"),
        ({**dict.fromkeys(map(str, range(90)), 1), "43": "much"}, "43"),
        ({"5": 1, "1.5": 1}, "1.5"),
        ({"5": [1]}, "5"),
    ],
)
def test_a_mistake_in_a_map_is_reported_with_its_key(bias, key, server):
    """Regression: the error named the map alone, which may have hundreds of keys."""
    for path, body, field in (
        (CHAT, {"messages": USER, "logit_bias": bias}, "logit_bias"),
        (COMPLETE, {"prompt": "x", "logit_bias": bias}, "logit_bias"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"logit_bias": bias}},
            "sampling_params.logit_bias",
        ),
    ):
        status, _, text = server.request(path, body)
        error = check_error(status, text, 400)
        assert error["param"] == f"{field}[{key}]" and key in error["message"]


def test_paths_work_without_v1_and_with_a_slash_at_the_end(server):
    """Regression: they were a 404, which people took for a server without the API."""
    name = server.json("/v1/models")[1]["data"][0]["id"]
    for path, body in (
        ("/chat/completions", {"messages": USER, "max_tokens": 1}),
        ("/completions", {"prompt": "x", "max_tokens": 1}),
        ("/embeddings", {"input": "x"}),
        ("/responses", {"input": "x"}),
        ("/messages", {"messages": USER, "max_tokens": 1}),
        ("/v1/chat/completions/", {"messages": USER, "max_tokens": 1}),
        ("/chat/completions/", {"messages": USER, "max_tokens": 1}),
        ("/tokenize/", {"prompt": "x"}),
        ("/models", None),
        ("/v1/models/", None),
        (f"/models/{name}", None),
        (f"/v1/models/{name}/", None),
    ):
        status, _, text = server.request(path, body)
        assert status == 200, (path, text)
    _, _, text = server.request("/metrics")
    assert 'handler="/v1/chat/completions"' in text and 'handler="/chat/completions' not in text
    status, _, text = server.request("/v2/chat/completions", {})
    check_error(status, text, 404)


def test_paths_without_v1_ask_for_the_same_key():
    with FakeServer(api_key=["sesame"]) as server:
        for path in ("/chat/completions", "/v1/chat/completions/", "/models", "/models/"):
            assert server.request(path, None if "models" in path else {"messages": USER})[0] == 401


def test_errors_name_the_fields_of_other_apis(server):
    hello = {"messages": USER, "max_tokens": 5, "model": "tiny"}
    for path, body, told in (
        ("/api/chat", hello | {"format": {"type": "none"}}, "format is not usable"),
        ("/api/chat", hello | {"options": {"top_p": 7}}, "options.top_p"),
        ("/v1/messages", hello | {"output_config": {"format": FORMAT}}, "output_config.format is not usable"),
        ("/v1/messages", hello | {"output_format": FORMAT}, "output_format is not usable"),
        (
            "/v1/messages",
            hello | {"messages": LONG},
            "prompt is too long: This model's maximum context length is 256",
        ),
        (
            "/v1/messages/count_tokens",
            {"messages": USER, "output_config": {"format": 5}},
            "output_config.format",
        ),
    ):
        status, _, text = server.request(path, body)
        assert status == 400 and told in text, text


def test_ollamas_clients_can_read_the_errors_of_paths_that_are_not_there(server):
    for path, method in (("/api/pull", "POST"), ("/api/chat", "GET")):
        status, _, text = server.request(path, method=method)
        assert status in (404, 405) and isinstance(json.loads(text)["error"], str)


def test_paths_and_methods(server):
    check_error(*server.request("/nowhere", {})[::2], 404)
    check_error(*server.request("/v1/models/other")[::2], 404)
    check_error(*server.request(CHAT, {"messages": USER, "model": "other"})[::2], 404)
    for path, method, allowed in (
        (CHAT, "GET", "POST"),
        ("/health", "DELETE", "GET, HEAD"),
        ("/v1/models", "POST", "GET, HEAD"),
    ):
        status, headers, text = server.request(path, method=method)
        check_error(status, text, 405)
        assert headers["Allow"] == allowed
    assert server.request("/health", method="HEAD")[0] == 200
    for path in ("/sleep", "/wake_up", "/pause", "/update_weights", "/reset_prefix_cache"):
        assert server.request(path, b"")[0] == 404, f"the public port offers {path}"


def test_large_bodies_are_refused_by_their_length_and_by_their_size(server):
    body = {"prompt": "x" * (1 << 17)}
    check_error(*server.request(COMPLETE, body)[::2], 413)
    # without a length: the same, counted
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    connection = server.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 2
    )
    assert read_until(connection, b"\r\n").startswith(b"HTTP/1.1 413")
    # an announced one is refused before it is sent
    connection = server.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\nExpect: 100-continue\r\n\r\n"
    )
    assert read_until(connection, b"\r\n").startswith(b"HTTP/1.1 413")
    assert server.request("/health")[0] == 200


def test_bodies_have_a_limit_together():
    with FakeServer(max_body_bytes=1 << 16, max_total_body_bytes=1 << 16) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 40001\r\n\r\n"
        first = server.raw(head + b" " * 40_000)
        eventually(lambda: server.app.context.body_bytes == 40_000)
        answer = read_until(server.raw(head + b" " * 40_000), b"}}")
        assert (
            answer.startswith(b"HTTP/1.1 429")
            and b"retry-after" in answer
            and b"max-total-body-bytes" in answer
        )
        assert server.request(COMPLETE, {"prompt": "a", "max_tokens": 1})[0] == 200
        first.close()
        eventually(lambda: server.app.context.body_bytes == 0)
        assert server.request(COMPLETE, {"prompt": [1] * 20, "max_tokens": 1})[0] == 200


def test_slow_clients_get_an_error_and_delay_no_other(server):
    bodies = [
        server.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        for _ in range(40)
    ]
    heads = [server.raw(b"POST /v1/completions HTTP/1.1\r\nHo") for _ in range(40)]
    silent = [server.raw(b"") for _ in range(5)]
    assert server.json(COMPLETE, {"prompt": "a", "max_tokens": 4})[1]["usage"]["completion_tokens"] == 4
    for connection in bodies + heads + silent:
        answer = read_until(connection)
        assert answer.startswith(b"HTTP/1.1 408") and b"timeout_error" in answer
        connection.close()


def test_heads_have_a_limit(server):
    connection = server.raw(b"GET /health HTTP/1.1\r\n")
    try:
        connection.sendall(b"X: " + b"y" * (1 << 20))
        assert read_until(connection, b"\r\n").startswith(b"HTTP/1.1 431")
    except (ConnectionResetError, BrokenPipeError):
        pass  # refused while we were still sending
    assert server.request("/health")[0] == 200


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ],
)
def test_invalid_http_gets_an_error_as_well(head, server):
    answer = read_until(server.raw(head), b"}}")
    assert (
        answer.startswith(b"HTTP/1.1 400")
        and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    )


def test_a_broken_percent_path_is_not_found(server):
    assert server.request("/v1/models/%ff%00")[0] == 404


def test_garbage_never_breaks_the_server(server):
    seed = random.randrange(10**9)
    print("seed", seed)
    rng = random.Random(seed)
    values = [
        None,
        True,
        -1,
        0,
        1,
        10**25,
        1.5,
        -0.0,
        "",
        "x",
        "\u0000",
        [],
        [[]],
        {},
        [None],
        {"a": {}},
        [1, "a"],
        "x" * 300,
    ]
    fields = [
        "model",
        "messages",
        "prompt",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "max_tokens",
        "stream",
        "stream_options",
        "response_format",
        "structured_outputs",
        "tools",
        "tool_choice",
        "echo",
        "input",
        "tokens",
        "dimensions",
        "chat_template_kwargs",
        "prompt_logprobs",
        "bad_words",
        "timeout",
        "token_ids",
        "sampling_params",
    ]
    for _ in range(400):
        body = {
            "prompt": "a",
            "messages": USER,
            "input": "a",
            "tokens": [1],
            "token_ids": [1],
            "max_tokens": 3,
        }
        body |= {name: rng.choice(values) for name in rng.sample(fields, rng.randint(1, 4))}
        path = rng.choice(
            [CHAT, COMPLETE, "/v1/embeddings", "/tokenize", "/detokenize", "/inference/v1/generate"]
        )
        status, _, text = server.request(path, body)
        assert status in (200, 400, 404), (path, body, status, text)
        if status != 200:
            check_error(status, text, status)
    assert server.metric("vllm:num_requests_running") == 0 and server.json("/load")[1] == {"server_load": 0}


def test_what_nobody_foresaw_is_logged_and_reported_without_a_stack(caplog):
    with FakeServer() as server:
        server.engine.generate = None  # type: ignore[assignment,method-assign]
        status, _, text = server.request(COMPLETE, {"prompt": "a"})
        check_error(status, text, 500)
        assert any(r.exc_info for r in caplog.records)
        assert server.json("/load")[1] == {"server_load": 0}


def test_errors_come_before_a_stream_begins_or_within_it():
    with FakeServer() as server:
        server.engine.refuses = "prompt has a token of the wrong colour"
        assert server.json(COMPLETE, {"prompt": "a", "stream": True})[0] == 400
        server.engine.refuses, server.engine.error_after = None, 3
        events = server.events(COMPLETE, {"prompt": "a", "stream": True})
        assert [c["text"] for e in events[:-1] for c in e["choices"]] == ["h", "e"]
        assert events[-1]["error"]["code"] == "engine_error"
        check_error(*server.request(COMPLETE, {"prompt": "a"})[::2], 500)


def test_a_grammar_that_cannot_be_followed_is_the_clients_mistake():
    async def generate(request):
        yield Output(
            request.request_id,
            [],
            finish_reason=FinishReason.ERROR,
            stop_reason="grammar",
            error="the grammar cannot go on",
        )

    with FakeServer() as server:
        server.engine.generate = generate  # type: ignore[method-assign]
        status, _, text = server.request(COMPLETE, {"prompt": "a"})
        check_error(status, text, 400)
        assert "the grammar cannot go on" in text


def test_a_compressed_body_is_refused_as_such():
    """Regression: a body in gzip was a 400 that called it invalid JSON."""
    body = gzip.compress(json.dumps({"prompt": "a"}).encode())
    with FakeServer() as server:
        status, headers, text = server.request(COMPLETE, body, headers={"Content-Encoding": "gzip"})
        assert "Content-Encoding" in check_error(status, text, 415)["message"]
        assert headers["Accept-Encoding"] == "identity"
        assert server.request(COMPLETE, {"prompt": "a"}, headers={"Content-Encoding": "identity"})[0] == 200


# Keys and CORS


def test_the_key_of_vllm_closes_a_server_unless_an_option_gives_one(monkeypatch):
    """Regression: a server that was started with VLLM_API_KEY answered everybody."""

    def status(server, key):
        return server.request("/v1/models", headers={"Authorization": f"Bearer {key}"})[0]

    monkeypatch.setenv("VLLM_API_KEY", " one,whole ")
    with FakeServer() as server:
        assert server.request("/v1/models")[0] == 401
        assert [status(server, key) for key in ("one,whole", "one", "whole")] == [200, 401, 401]
    monkeypatch.setenv("SHOAL_API_KEY", "added")
    with FakeServer() as server:
        assert [status(server, key) for key in ("one,whole", "added")] == [200, 200]
    with FakeServer(api_key=["given"]) as server:
        assert [status(server, key) for key in ("given", "added", "one,whole")] == [200, 200, 401]


def test_workers_take_the_keys_of_their_router(monkeypatch):
    def keys_of_worker(config):
        with monkeypatch.context() as patched:
            for name, value in key_environment(config).items():
                patched.setenv(name, value)
            return sorted(read_keys(ServerConfig()))

    monkeypatch.delenv("SHOAL_API_KEY", raising=False)
    assert key_environment(ServerConfig()) == {}
    monkeypatch.setenv("VLLM_API_KEY", "one,whole")
    assert keys_of_worker(ServerConfig()) == ["one,whole"]
    assert keys_of_worker(ServerConfig(api_key=["given"])) == ["given"]
    monkeypatch.setenv("SHOAL_API_KEY", "a,b")
    assert keys_of_worker(ServerConfig()) == ["a", "b", "one,whole"]


def test_a_byte_order_mark_is_not_part_of_a_key_or_a_body(tmp_path):
    """Regression: the first key of a file with a mark was refused, and a body with one was not JSON."""
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    with FakeServer(api_key_file=str(tmp_path / "keys")) as server:
        for key in ("one", "two"):
            status, _, text = server.request(
                COMPLETE,
                b"\xef\xbb\xbf" + json.dumps({"prompt": "x", "max_tokens": 1}).encode(),
                headers={"Authorization": f"Bearer {key}"},
            )
            assert status == 200, text


def test_keys_are_asked_for_where_they_should(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("from-file\n\n  padded \n")
    monkeypatch.setenv("SHOAL_API_KEY", "from-env,second")
    with FakeServer(api_key=["given"], api_key_file=str(tmp_path / "keys")) as server:
        for key in ("given", "from-file", "padded", "from-env", "second"):
            assert server.request("/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 200
            assert server.request("/v1/models", headers={"x-api-key": key})[0] == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "given"},
            {"Authorization": ""},
            {"x-api-key": ""},
            {"Authorization": "Bearer "},
            {"Authorization": "Basic given"},
        ):
            for path in ("/v1/models", "/load"):
                status, answer_headers, text = server.request(path, headers=headers)
                assert (
                    check_error(status, text, 401)["code"] == "invalid_api_key"
                    and answer_headers["WWW-Authenticate"] == "Bearer"
                )
        for path in (
            "/v1/completions",
            "/tokenize",
            "/detokenize",
            "/inference/v1/generate",
            "/v1/embeddings",
            CHAT,
        ):
            assert server.request(path, {})[0] == 401, path
        assert (
            server.request("/v1/models", headers={"x-api-key": "", "Authorization": "Bearer given"})[0] == 200
        )
        assert (
            server.request("/v1/models", headers={"x-api-key": "given", "Authorization": "Bearer wrong"})[0]
            == 200
        )
        assert server.request("/is_sleeping", admin=True)[0] == 401
        for path in ("/health", "/ping", "/version", "/metrics", "/"):
            assert server.request(path)[0] == 200, path


def test_web_pages_may_not_operate_the_server_unless_their_site_is_named():
    page = {"Origin": "https://a.example"}
    with FakeServer() as server:
        check_error(*server.request("/sleep", b"", headers=page, admin=True)[::2], 403)
        assert server.json("/is_sleeping", admin=True)[1] == {"is_sleeping": False}
        assert server.request("/reset_prefix_cache", b"", admin=True)[0] == 200
    with FakeServer(allowed_origins=["https://a.example"]) as server:
        assert server.request("/reset_prefix_cache", b"", headers=page, admin=True)[0] == 200


def test_cors_is_off_unless_origins_are_named():
    asks = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "X-One, authorization",
    }
    with FakeServer() as server:
        assert server.request(CHAT, method="OPTIONS", headers=asks)[0] == 400
        assert (
            server.request("/health", headers={"Origin": "https://a.example"})[1][
                "Access-Control-Allow-Origin"
            ]
            is None
        )
    with FakeServer(allowed_origins=["https://a.example"], allow_credentials=True, api_key=["k"]) as server:
        # browsers send no key with it
        status, headers, _ = server.request(CHAT, method="OPTIONS", headers=asks)
        assert status == 204 and headers["Access-Control-Allow-Origin"] == "https://a.example"
        assert (
            headers["Access-Control-Allow-Methods"] == "POST"
            and headers["Access-Control-Allow-Headers"] == "x-one, authorization"
        )
        assert headers["Access-Control-Allow-Credentials"] == "true"
        status, headers, _ = server.request("/v1/models", headers={"Origin": "https://a.example"})
        assert (
            status == 401
            and headers["Access-Control-Allow-Origin"] == "https://a.example"
            and headers["Vary"] == "origin"
        )
        assert (
            server.request(CHAT, method="OPTIONS", headers={**asks, "Origin": "https://b.example"})[0] == 400
        )
    with FakeServer(allowed_origins=["*"], allowed_methods=["GET"], allowed_headers=["X-One"]) as server:
        assert (
            server.request("/health", headers={"Origin": "https://b.example"})[1][
                "Access-Control-Allow-Origin"
            ]
            == "*"
        )
        text = server.request(CHAT, method="OPTIONS", headers=asks)[2]
        assert re.search("method and headers", text)


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("at_once", [True, False])
def test_an_offer_to_speak_http2_is_declined_and_the_request_answered(framing, at_once, server):
    """Java's client makes it with each request, and so does `curl --http2`."""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    said, framed = (
        (f"Content-Length: {len(body)}", body)
        if framing == "length"
        else ("Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    )
    head = (
        f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: "
        "h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        f"{said}\r\n\r\n"
    ).encode()
    connection = server.raw(head + framed if at_once else head)
    for _ in range(3):
        if not at_once:
            connection.sendall(framed[:5])
            time.sleep(0.05)
            connection.sendall(framed[5:])
        assert read_until(connection, b'"cached_tokens":0}}}').startswith(b"HTTP/1.1 200")
        connection.sendall(head + framed if at_once else head)
    connection.sendall(b"" if at_once else framed)
    read_until(connection, b'"cached_tokens":0}}}')
    connection.sendall(
        b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" * 2
    )
    answers = read_until(connection, b"}")
    if answers.count(b"200 OK") < 2:
        answers += read_until(connection, b"}")
    assert answers.count(b"HTTP/1.1 200 OK") == 2


def test_keep_alive_connections_serve_one_request_after_another(server):
    connection = server.raw(
        post(COMPLETE, {"prompt": "a", "max_tokens": 1}) * 2
        + post(COMPLETE, {"prompt": "a", "max_tokens": 0})
    )
    answers = read_until(connection, b'"code":null}}')
    assert answers.count(b"HTTP/1.1 200") == 2 and answers.count(b"HTTP/1.1 400") == 1


@pytest.mark.parametrize(
    "given, meant",
    [
        ({"max_tokens": "2"}, {"max_tokens": 2}),
        ({"max_tokens": " 2.0 "}, {"max_tokens": 2}),
        ({"temperature": "0"}, {"temperature": 0.0}),
        ({"top_p": "5e-1"}, {"top_p": 0.5}),
        ({"seed": "9007199254740993"}, {"seed": 9007199254740993}),
        ({"ignore_eos": "Yes"}, {"ignore_eos": True}),
        ({"ignore_eos": 1}, {"ignore_eos": True}),
        ({"ignore_eos": "off"}, {"ignore_eos": False}),
        ({"logit_bias": {"5": "1"}}, {"logit_bias": {5: 1.0}}),
        ({"stop": "2", "max_tokens": "3"}, {"stop": ["2"], "max_tokens": 3}),
        ({"min_p": "1_0e-2"}, {"min_p": 0.1}),
        ({"stop_token_ids": ["5", 6]}, {"stop_token_ids": [5, 6]}),
        ({"allowed_token_ids": ["5", "6.0"]}, {"allowed_token_ids": [5, 6]}),
    ],
)
def test_numbers_and_flags_may_be_text(given, meant, server):
    """Regression: shell scripts and form fields send them so, vLLM reads them, and each was a 400."""
    for path, more in ((COMPLETE, {"prompt": "7"}), (CHAT, {"messages": USER})):
        status, _, text = server.request(path, {"max_tokens": 2, "stream": "false", **more, **given})
        assert status == 200, text
        params = server.last_request().params
        assert {name: getattr(params, name) for name in meant} == meant


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_tokens", "1e1"),
        ("max_tokens", "\u0663"),
        ("max_tokens", "9" * 5000),
        ("max_tokens", ""),
        ("temperature", "nan"),
        ("temperature", "-inf"),
        ("ignore_eos", " true "),
        ("stop_token_ids", ["five"]),
    ],
)
def test_text_that_pydantic_reads_as_no_number_and_no_flag_is_refused(name, value, server):
    """Regression: `max_tokens: "1e1"` was ten tokens, and vLLM refuses it."""
    status, _, text = server.request(COMPLETE, {"prompt": "x", "max_tokens": 2, name: value})
    assert status == 400 and name in text


def test_text_that_looks_like_a_number_stays_text_elsewhere(server):
    schema = {"type": "object", "properties": {"a": {"const": "1", "default": None}}}
    body = {"messages": USER, "max_tokens": "2", "structured_outputs": {"json": schema}}
    assert server.request(CHAT, body)[0] == 200
    assert server.last_request().params.structured_outputs.json == schema


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/embeddings", {"input": "x", "encoding_format": None}),
        ("/v1/embeddings", {"input": ["x", "y"], "encoding_format": None, "priority": None, "user": None}),
        (COMPLETE, {"prompt": "x", "max_tokens": 1, "priority": None, "stream_options": None}),
        (CHAT, {"messages": USER, "max_tokens": 1, "priority": None, "tools": None}),
        ("/inference/v1/generate", {"token_ids": [1], "version": None, "stream": None}),
    ],
)
def test_null_counts_as_absent(path, body, server):
    """Regression: LiteLLM sends `encoding_format: null`, and it was a 400."""
    status, _, text = server.request(path, body)
    assert status == 200, text


@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, rb'{"max_tokens": 1, "messages": [{"role": "user", "content": "a \ud83d b"}]}'),
        (COMPLETE, rb'{"max_tokens": 1, "prompt": "a \ud83d b"}'),
        ("/v1/responses", rb'{"max_output_tokens": 1, "input": "a \ud83d b"}'),
        ("/v1/messages", rb'{"max_tokens": 1, "messages": [{"role": "user", "content": "a \ud83d b"}]}'),
        (
            "/api/chat",
            rb'{"stream": false, "options": {"num_predict": 1}, "messages": [{"role": "user", '
            rb'"content": "a \ud83d b"}]}',
        ),
    ],
)
def test_half_a_character_is_replaced(path, body, server):
    """Regression: a text that its client cut amid an emoji ended the conversation with a 400."""
    status, _, text = server.request(path, body)
    assert status == 200, text
    assert "a \N{REPLACEMENT CHARACTER} b" in server.last_prompt()


def test_only_halves_of_characters_are_replaced(server):
    body = rb'{"max_tokens": 1, "prompt": "\ud83d\ude00 \\ud83d \ude00 \ud83d\ud83d\ude00 \n"}'
    assert server.request(COMPLETE, body)[0] == 200
    half = "\N{REPLACEMENT CHARACTER}"
    assert server.last_prompt() == f"\U0001f600 \\ud83d {half} {half}\U0001f600 \n"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "a", "max_tokens": "many", _', "max_tokens"),
        (b'{"prompt": "a", "logit_bias": {"x": 1}, _', "logit_bias"),
        (b'{"prompt": "a", "seed": "x", "a": "\xff"', "seed"),
        (b'{"prompt": "a", "top_k": -2, _', "top_k"),
        (b'{"prompt": "a", "top_k": -2, "a": "\xff"', "top_k"),
    ],
)
def test_a_wrong_field_before_malformed_json_is_a_refusal(body, param, server):
    """Regression: the search for what the client meant, or for the value that an error shows, read the whole
    body, and its failure was a 500."""
    status, _, text = server.request(COMPLETE, body)
    assert status == 400 and json.loads(text)["error"]["param"] == param, text


REQUIRED = {
    CHAT: {"messages": USER, "max_tokens": 1},
    COMPLETE: {"prompt": "x", "max_tokens": 1},
    "/v1/messages": {"messages": USER, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/embeddings": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
    "/api/chat": {"messages": USER, "stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "x", "stream": False, "options": {"num_predict": 1}},
    "/api/embed": {"input": "x"},
    "/api/embeddings": {"prompt": "x"},
}


@pytest.mark.parametrize("path", REQUIRED)
def test_every_optional_field_may_be_null(path, server):
    [kind] = [route.request for route in PUBLIC_ROUTES if route.path == path]
    nulls = {name: None for name in kind.__struct_fields__}
    status, _, text = server.request(path, {**nulls, **REQUIRED[path]})
    assert status == 200, text
