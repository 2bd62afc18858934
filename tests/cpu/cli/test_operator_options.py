"""Options by which an operator changes what every client gets, whatever its requests say; under vLLM's
names."""

import json
import logging

import pytest

from shoal import LLM, SamplingParams
from shoal.config import EngineConfig, ServerConfig
from shoal.errors import ConfigError
from tests import tiny
from tests.fake_server import TEMPLATE, FakeServer, byte_tokenizer

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "the treasure lies under the oak"}]
ASKED = {"messages": MESSAGES, "max_tokens": 3}


# Streams and log-probabilities


def test_every_stream_ends_with_its_usage_where_the_operator_wants_it():
    with FakeServer(enable_force_include_usage=True) as server:
        for path, body in ((CHAT, ASKED), (COMPLETE, {"prompt": "a", "max_tokens": 3})):
            for options in ({}, {"stream_options": {"include_usage": False}}):
                events = server.events(path, {**body, "stream": True, **options})
                assert events[-1]["usage"]["completion_tokens"] == 3 and events[-1]["choices"] == []
                assert not events[0].get("usage")
        assert server.request(CHAT, {**ASKED, "stream_options": {}})[0] == 400
    with FakeServer() as server:
        assert not server.events(CHAT, {**ASKED, "stream": True})[-1].get("usage")


def test_tokens_are_named_by_their_ids_unless_a_request_says_otherwise():
    with FakeServer(return_tokens_as_token_ids=True) as server:
        body = {"prompt": "a", "max_tokens": 1, "logprobs": 1}
        assert server.json(COMPLETE, body)[1]["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
        body = {**ASKED, "logprobs": True, "return_tokens_as_token_ids": False}
        told = server.json(CHAT, body)[1]["choices"][0]["logprobs"]["content"][0]["token"]
        assert not told.startswith("token_id:")


# Paths


def test_a_prefix_that_a_proxy_leaves_in_paths_is_answered_as_without_it():
    with FakeServer(root_path="/llm/", api_key=["k"]) as server:
        key = {"authorization": "Bearer k"}
        for path in ("/llm/v1/models", "/v1/models", "/llm/models/"):
            assert server.request(path, headers=key)[0] == 200
            assert server.request(path)[0] == 401
        assert server.request(f"/llm{CHAT}", ASKED, headers=key)[0] == 200
        assert server.request("/llm")[0] == server.request("/llm/health")[0] == 200
        assert server.request("/llmx/v1/models", headers=key)[0] == 404
        assert server.json("/llm/openapi.json")[1]["servers"] == [{"url": "/llm"}]
        assert "/llm/v1/chat/completions" in server.request("/llm/docs")[2]


@pytest.mark.parametrize("wrong", ["llm", "/", ""])
def test_a_prefix_begins_with_a_slash(wrong):
    with pytest.raises(ConfigError, match="root_path must begin with a slash"):
        ServerConfig(root_path=wrong)


def test_the_description_of_the_api_may_be_left_out():
    with FakeServer(disable_fastapi_docs=True) as server:
        assert server.request("/docs")[0] == server.request("/openapi.json")[0] == 404
        assert "/v1/chat/completions" in server.request("/nowhere")[2]


# The chat template's variables


def test_variables_of_the_template_have_defaults_that_requests_replace():
    settings = {"tokenizer": byte_tokenizer(TEMPLATE), "template_defaults": {"enable_thinking": False}}
    with FakeServer(model=settings) as server:
        for path, body in (
            (CHAT, ASKED),
            ("/v1/responses", {"input": "x", "max_output_tokens": 3}),
            ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 3}}),
        ):
            assert server.request(path, body)[0] == 200
            assert "</think>" in server.last_prompt()
        more = {"chat_template_kwargs": {"enable_thinking": True}}
        assert server.request(CHAT, {**ASKED, **more})[0] == 200
        assert "</think>" not in server.last_prompt()
        tokens = server.json("/tokenize", {"messages": MESSAGES})[1]["tokens"]
        assert "</think>" in byte_tokenizer().decode(tokens)


def test_defaults_of_the_template_are_a_json_object():
    assert ServerConfig(default_chat_template_kwargs='{"a": 1}').default_chat_template_kwargs == {"a": 1}
    for wrong in ("[1]", "{", 3):
        with pytest.raises(ConfigError, match="default_chat_template_kwargs must be"):
            ServerConfig(default_chat_template_kwargs=wrong)


# The log


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_a_request_is_logged_when_it_arrives_and_its_text_with_verbose_alone(level, caplog):
    with caplog.at_level(level), FakeServer(enable_log_requests=True, max_log_len=25) as server:
        server.request(CHAT, {**ASKED, "temperature": 0.5}, headers={"x-request-id": "mine"})
        server.request("/v1/messages", ASKED)
        server.request(COMPLETE, {"prompt": ["a", "b"], "max_tokens": 1})
    lines = [r.getMessage() for r in caplog.records if r.name == "shoal.server.http.arrival_log"]
    assert len(lines) == 3 and "id=mine" in lines[0] and "temperature=0.5" in lines[0]
    assert "max_tokens=3" in lines[1] and "2 prompts, 2 tokens" in lines[2]
    assert ("treas" in lines[0]) == (level == logging.DEBUG)
    assert "oak" not in "".join(lines)


def test_requests_are_not_logged_when_they_arrive_unless_it_is_asked_for(caplog):
    with caplog.at_level(logging.DEBUG), FakeServer() as server:
        server.request(CHAT, ASKED)
    assert not [r for r in caplog.records if r.name == "shoal.server.http.arrival_log"]


# Middleware


class Marked:
    """ASGI middleware that adds a header, and counts what it sees of each request's beginning."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def marked(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-marked", b"yes")]
            await send(message)

        if scope["path"] == "/closed":
            await send({"type": "http.response.start", "status": 418, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, marked)


def test_an_operators_middleware_is_around_the_public_port_alone():
    with FakeServer(middleware=["tests.cpu.cli.test_operator_options.Marked"]) as server:
        status, headers, _ = server.request(CHAT, ASKED)
        assert (status, headers["x-marked"]) == (200, "yes")
        assert server.request("/closed")[0] == 418
        assert len(server.events(CHAT, {**ASKED, "stream": True})) >= 3
        assert server.request("/health", admin=True)[1]["x-marked"] is None


@pytest.mark.parametrize("wrong", ["nowhere.at_all.Class", "json.Nothing", "json.loads", "plain"])
def test_middleware_that_is_not_a_class_ends_the_start(wrong):
    with pytest.raises(ConfigError, match="middleware must be"):
        FakeServer(middleware=[wrong]).__enter__()


# The model


def test_a_cap_of_the_operator_holds_whatever_a_request_asks_for():
    model = {"most_new_tokens": 4, "generation_config": {"max_new_tokens": 4}}
    with FakeServer(model=model) as server:
        for more in ({}, {"max_tokens": 50}, {"max_tokens": 2}):
            usage = server.json(CHAT, {"messages": MESSAGES, **more})[1]["usage"]
            assert usage["completion_tokens"] == min(4, more.get("max_tokens", 4))


def test_sampling_defaults_of_the_operator_go_before_the_models(root, build):
    folder = tiny.write_model(root, "llama")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_p": 0.8}))
    found = build("llama", override_generation_config='{"temperature": 0.0, "max_new_tokens": 3}')
    params = found.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.max_tokens) == (0.0, 0.8, 3)
    config = EngineConfig(generation_config="vllm", override_generation_config={"top_k": 5})
    assert config.sampling_config({"temperature": 0.9}) == {"top_k": 5}


@pytest.mark.parametrize(
    "wrong", [{"temprature": 1}, {"temperature": -1}, "[]", "{", {"max_new_tokens": "x"}]
)
def test_sampling_defaults_that_no_request_could_have_are_refused(wrong):
    with pytest.raises(ConfigError, match="override_generation_config"):
        EngineConfig(override_generation_config=wrong)


def test_fields_of_config_json_are_replaced(root, build):
    folder = tiny.write_model(root, "llama")
    config = json.loads((folder / "config.json").read_text())
    plain = build("llama", max_model_len=None)
    overrides = {"max_position_embeddings": 32, "rms_norm_eps": 0.5}
    changed = build("llama", max_model_len=None, hf_overrides=overrides)
    assert plain.config.max_model_len == config["max_position_embeddings"]
    assert changed.config.max_model_len == 32
    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    prompts = [list(range(1, 9))]
    answers = [llm.generate(prompts, greedy)[0].outputs[0].cumulative_logprob for llm in (plain, changed)]
    assert answers[0] != answers[1]
    with pytest.raises(ValueError, match="num_attention_heads"):
        LLM(str(folder), hf_overrides={"num_attention_heads": "many"}, device="cpu")


def test_a_gguf_file_has_no_config_json_to_override():
    with pytest.raises(ConfigError, match="hf_overrides must be left out"):
        LLM("smollm2", hf_overrides={"rope_theta": 1.0}, device="cpu")
