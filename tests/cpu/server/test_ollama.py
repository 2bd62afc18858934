"""Ollama's API: what its clients send and read."""

import datetime
import json

import pytest

from shoal.api import ModelSummary
from tests.fake_server import END, FakeServer, byte_tokenizer, engine_saying, ids_of, tool_server

USER = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
COUNTS = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}


def stream(served, path, body):
    """The objects of an answer's lines."""
    status, headers, text = served.request(path, body)
    assert status == 200 and headers["content-type"] == "application/x-ndjson", text
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_no_character_of_an_answer_ends_a_line_of_its_stream(served, path):
    """Regression: clients that split lines as str.splitlines does, such as httpx, could not read U+2028 or U+0085."""
    served.say(said := "a\u2028b\u2029c\x85d\x1ee\x0bf")
    given = {"input": "Hi"} if path == "/v1/responses" else {"messages": [USER], "max_tokens": 50}
    _, _, text = served.request(path, {**given, "stream": True})
    lines = [line.removeprefix("data: ") for line in text.splitlines() if not line.startswith("event: ")]
    found = json.dumps([json.loads(line) for line in lines if line not in ("", "[DONE]")])
    assert all(json.dumps(char) in found for char in said)
    served.say("Good day.")


def chat(served, **options):
    return served.json("/api/chat", {"messages": [USER], "stream": False, **options})[1]


def test_a_chat_is_a_stream_of_lines_unless_stream_is_false(served):
    served.say("Good day.")
    *parts, last = stream(served, "/api/chat", {"model": "tiny", "messages": [USER]})
    assert len(parts) > 2 and not any(part["done"] for part in parts)
    assert {part["message"]["role"] for part in (*parts, last)} == {"assistant"}
    assert [part["message"]["content"] for part in (*parts, last)] == [*"Good day.", ""]
    whole = chat(served, model="tiny")
    assert whole["message"] == {"role": "assistant", "content": "Good day."}
    for answer in (last, whole):
        assert (answer["done"], answer["done_reason"], answer["model"]) == (True, "stop", "tiny")
        assert answer.keys() >= COUNTS
        assert answer["prompt_eval_count"] == len(served.last_request().prompt_token_ids)
        assert answer["eval_count"] == len("Good day.") + 1
        parts_ns = [answer[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
        assert all(part >= 0 for part in parts_ns) and 0 < sum(parts_ns) <= answer["total_duration"]
        assert datetime.datetime.fromisoformat(answer["created_at"]).tzinfo is not None
    assert served.last_prompt() == "<user>Hi<assistant>"


def test_an_answer_of_one_token_takes_time(served):
    """Regression: its eval_duration was 0, and clients divide by it."""
    served.say("abc")
    for answer in (
        chat(served, options={"num_predict": 1}),
        stream(served, "/api/chat", {"messages": [USER], "options": {"num_predict": 1}})[-1],
    ):
        assert answer["eval_count"] == 1
        assert 0 < answer["eval_duration"] <= answer["total_duration"]


def test_a_text_is_answered_through_the_template_or_raw(served):
    served.say("Yes.")
    body = {"prompt": "Is it?", "system": "Be brief."}
    *parts, last = stream(served, "/api/generate", body)
    assert "".join(part["response"] for part in parts) == "Yes." and last["response"] == ""
    assert last.keys() >= COUNTS
    assert served.last_prompt() == "<system>Be brief.<user>Is it?<assistant>"
    assert last["context"] == [*served.last_request().prompt_token_ids, *ids_of("Yes."), END]
    again = served.json("/api/generate", {"prompt": "Why?", "context": last["context"], "stream": False})[1]
    assert served.last_request().prompt_token_ids == last["context"] + ids_of("<user>Why?<assistant>")
    assert again["context"][: len(last["context"])] == last["context"] and again["response"] == "Yes."
    raw = served.json("/api/generate", {**body, "raw": True, "stream": False})[1]
    assert served.last_prompt().endswith("Is it?") and "<user>" not in served.last_prompt()
    assert "context" not in raw


def test_options_reach_the_engine(served):
    served.say("abcdefgh")
    options = {
        "num_predict": 5,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 11,
        "stop": ["x"],
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "num_ctx": 4096,
        "num_gpu": 99,
        "num_thread": 8,
    }
    answer = chat(served, options=options, keep_alive="5m")
    assert (answer["done_reason"], answer["eval_count"]) == ("length", 5)
    assert answer["message"]["content"] == "abcde"
    params = served.last_request().params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (5, 0.5, 7, 0.5)
    assert (params.min_p, params.seed, params.repetition_penalty) == (0.25, 11, 1.5)
    assert (params.presence_penalty, params.frequency_penalty, params.stop) == (0.5, -0.5, ["x"])
    for num_predict in (-1, -2, 10**6):  # as many as fit
        assert chat(served, options={"num_predict": num_predict})["done_reason"] == "stop"
        request = served.last_request()
        assert request.params.max_tokens == 4096 - len(request.prompt_token_ids)
    assert chat(served, options={"stop": "cd"})["message"]["content"] == "ab"


def test_options_that_mean_nothing_are_logged_once(served, caplog):
    served.say("Hi.")
    for _ in range(2):
        chat(served, options={"num_ctx": 8192, "mirostat": 1, "num_thread": 8})
    [context, unknown] = sorted(
        r.getMessage() for r in caplog.records if r.name == "shoal.server.http.client_warnings"
    )
    assert (
        "'options.mirostat'" in context + unknown
        and "num_ctx 8192 is more than the 4096" in context + unknown
    )


def test_a_format_is_a_grammar(served):
    served.say("{}")
    chat(served, format="json")
    assert served.last_request().params.structured_outputs.json_object
    chat(served, format={"type": "object"})
    assert served.last_request().params.structured_outputs.json == {"type": "object"}
    chat(served, format="")
    assert served.last_request().params.structured_outputs is None


@pytest.mark.parametrize("streams", [True, False])
def test_tool_calls_come_whole_with_objects_for_arguments(served, streams):
    served.say("<think>\nHm.\n</think>\n\nOne moment." + CALLS)
    body = {"messages": [USER], "tools": [TOOL], "think": True}
    answers = stream(served, "/api/chat", body) if streams else [chat(served, **body)]
    messages = [answer["message"] for answer in answers]
    assert "".join(m.get("thinking", "") for m in messages) == "Hm."
    assert "".join(m["content"] for m in messages).strip() == "One moment."
    calls = [call for m in messages for call in m.get("tool_calls", ())]
    assert [(call["function"]["index"], call["function"]["arguments"]) for call in calls] == [
        (0, {"city": "Rome"}),
        (1, {"city": "Oslo"}),
    ]
    assert {call["function"]["name"] for call in calls} == {"weather"}
    assert answers[-1]["done_reason"] == "stop" and "<tools>" in served.last_prompt()


def test_a_conversation_with_tools_and_thoughts_comes_back(served):
    served.say("Sunny.")
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    asked = {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call]}
    told = {"role": "tool", "tool_name": "weather", "content": "22 degrees"}
    chat(served, messages=[USER, asked, told], think=False)
    prompt = served.last_prompt()
    assert '(thought: Hm.)<tool_call>weather{"city": "Rome"}</tool_call><tool>22 degrees' in prompt
    assert prompt.endswith("<think>\n\n</think>\n\n")  # thinking is off
    chat(served, messages=[USER, {"role": "assistant", "content": "It is"}])
    assert served.last_prompt().endswith("<assistant>It is")


def test_nothing_to_answer_is_a_model_to_load(served):
    for path, key, empty in (
        ("/api/chat", "message", {"role": "assistant", "content": ""}),
        ("/api/generate", "response", ""),
    ):
        for body in ({"model": "tiny"}, {"model": "tiny", "messages": [], "prompt": "", "keep_alive": -1}):
            answer = served.json(path, body)[1]
            assert (answer["done"], answer["done_reason"], answer[key]) == (True, "load", empty)
        answer = served.json(path, {"model": "tiny", "stream": False, "keep_alive": 0})[1]
        assert (answer["done"], answer["done_reason"]) == (True, "unload")


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", {"model": "no such"}, 404, "'no such' does not exist"),
        ("/api/chat", {"messages": [{**USER, "images": ["aGk="]}]}, 400, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": 5, "content": "x"}]}, 400, "messages[0].role"),
        ("/api/chat", {"messages": [USER], "format": "xml"}, 400, "got 'xml'"),
        ("/api/chat", {"messages": [USER], "think": "a lot"}, 400, "got 'a lot'"),
        ("/api/chat", {"messages": [USER], "options": {"temperature": "hot"}}, 400, "options.temperature"),
        (
            "/api/chat",
            {"messages": [USER], "options": {"top_p": 2}},
            400,
            "top_p must be a finite number in (0, 1], got 2",
        ),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "template"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, 400, "images"),
        ("/api/generate", {"prompt": "x" * 5000}, 400, "4096"),
        ("/api/embed", {"input": "x" * 5000, "truncate": False}, 400, "4096"),
        ("/api/pull", {"model": "x"}, 404, "`shoal pull` downloads others"),
        ("/api/show", b"{", 400, "not valid JSON"),
    ],
)
def test_errors_are_one_text(served, path, body, status, words):
    got, error = served.json(path, body)
    assert got == status and error.keys() == {"error"} and words in error["error"]


def test_a_stream_that_fails_midway_ends_with_an_error(served):
    served.say("Good day.")
    served.engine.error_after = 4
    try:
        lines = stream(served, "/api/chat", {"messages": [USER]})
    finally:
        served.engine.error_after = None
    assert lines[0]["message"]["content"] and lines[-1] == {"error": "the fake engine was set to fail"}


def test_a_model_that_does_not_think_says_so():
    with FakeServer() as server:
        assert server.json("/api/generate", {"prompt": "x", "think": True})[0] == 400
        assert server.json("/api/generate", {"prompt": "x", "think": False, "stream": False})[0] == 200


def test_embeddings(served):
    status, found = served.json("/api/embed", {"model": "tiny", "input": ["one", "three"], "dimensions": 8})
    assert status == 200 and found["prompt_eval_count"] >= 8
    assert [len(vector) for vector in found["embeddings"]] == [8, 8]
    assert sum(x * x for x in found["embeddings"][0]) == pytest.approx(1)
    one = served.json("/api/embed", {"input": "one"})[1]["embeddings"]
    assert served.json("/api/embeddings", {"prompt": "one"})[1]["embedding"] == one[0]
    for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        for length in (5000, 100_000):
            assert served.json(path, {field: "x" * length})[0] == 200
            assert len(served.last_request().prompt_token_ids) == 4096
    assert served.json("/api/embed", {"input": "x" * 100_000, "truncate": False})[0] == 400
    assert served.json("/api/embed", {"input": []})[1]["embeddings"] == []
    assert served.json("/api/embeddings", {"prompt": ""})[1] == {"embedding": []}


SUMMARY = ModelSummary(
    "qwen3", "gguf", 8_190_735_360, "Q4_K", 5_027_783_488, 1.7e9, "ab" * 32, {"embedding_length": 4096}
)


def test_models_are_listed_with_a_tag_and_found_with_or_without():
    with tool_server(
        model={
            "names": ["tiny", "org/big:8b"],
            "summary": SUMMARY,
            "generation_config": {"temperature": 0.6, "repetition_penalty": 1.1},
        }
    ) as server:
        models = server.json("/api/tags")[1]["models"]
        assert [m["name"] for m in models] == [m["model"] for m in models] == ["tiny:latest", "org/big:8b"]
        assert models[0]["size"] == 5_027_783_488 and models[0]["digest"] == "ab" * 32
        assert models[0]["modified_at"].startswith("2023-11-14T")
        details = {
            "parent_model": "",
            "format": "gguf",
            "family": "qwen3",
            "families": ["qwen3"],
            "parameter_size": "8.2B",
            "quantization_level": "Q4_K",
        }
        assert models[0]["details"] == details
        for path, body in (
            ("/api/show", {"model": "tiny:latest"}),
            ("/api/show", {"name": "tiny"}),
            ("/api/chat", {"model": "tiny:latest"}),
            ("/api/show", {"model": "org/big:8b"}),
            ("/v1/completions", {"model": "tiny:latest", "prompt": "x"}),
        ):
            assert server.json(path, body)[0] == 200, (path, body)
        assert server.json("/api/show", {"model": "tiny:8b"})[0] == 404
        shown = server.json("/api/show", {"model": "tiny"})[1]
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["template"] == server.model.loaded.tokenizer.chat_template
        info = {
            "general.architecture": "qwen3",
            "general.parameter_count": 8_190_735_360,
            "qwen3.embedding_length": 4096,
            "qwen3.context_length": 4096,
        }
        assert shown["model_info"] == info
        assert set(shown["parameters"].splitlines()) == {"temperature 0.6", "repeat_penalty 1.1"}
        [running] = server.json("/api/ps")[1]["models"]
        assert running["name"] == "tiny:latest" and running["context_length"] == 4096
        server.request("/sleep", b"", admin=True)
        assert server.json("/api/ps")[1]["models"] == []


def test_clients_find_the_server_and_a_version_that_is_new_enough(served):
    assert served.request("/", method="HEAD")[0] == 200
    version = served.json("/api/version")[1]["version"]
    assert tuple(map(int, version.split("."))) >= (0, 9, 0)  # the first that knew `think`


def test_keys_are_asked_for_as_elsewhere():
    with FakeServer(api_key=["sesame"]) as server:
        assert server.json("/api/tags")[0] == 401 and server.json("/api/version")[0] == 200
        assert server.json("/api/tags", headers={"authorization": "Bearer sesame"})[0] == 200


def test_the_tokenizer_is_described_for_clients_that_write_prompts(served):
    tokenizer = byte_tokenizer()
    found = served.json("/tokenizer_info")[1]
    assert found["chat_template"] == served.model.loaded.tokenizer.chat_template
    assert found["model_max_length"] == 4096
    assert found["eos_token"] == tokenizer.eos_token and found["bos_token"] == tokenizer.bos_token
    assert {int(i) for i in found["added_tokens_decoder"]} == set(tokenizer.all_special_ids)
    assert served.json("/tokenizer_info?model=nobody")[0] == 404


def test_a_reader_gets_what_is_ready_in_one_line():
    all_at_once = engine_saying("abc", token_seconds=1e-9)
    with FakeServer(all_at_once) as server:
        lines = stream(server, "/api/generate", {"prompt": "x", "raw": True, "options": {"num_predict": 30}})
        assert len(lines) < 10 and "".join(line["response"] for line in lines) == "abc" * 10


@pytest.mark.parametrize(
    "path, more", [("/api/chat", {"messages": [USER]}), ("/api/generate", {"prompt": "Hi"})]
)
def test_log_probabilities_whole_and_streamed(served, path, more):
    """Regression: `logprobs` was ignored with a 200."""
    served.say("Hi!")
    asked = {**more, "logprobs": True, "top_logprobs": 2}
    status, whole = served.json(path, {**asked, "stream": False})
    rows = whole["logprobs"]
    assert status == 200 and "".join(row["token"] for row in rows) == "Hi!"
    assert all(len(row["top_logprobs"]) == 2 and row["logprob"] <= 0 for row in rows)
    lines = stream(served, path, asked)
    assert [row for line in lines for row in line.get("logprobs", ())] == rows
    assert len([line for line in lines if "logprobs" in line]) > 1
    _, plain = served.json(path, {**more, "stream": False})
    assert "logprobs" not in plain
    status, error = served.json(path, {**more, "top_logprobs": 2})
    assert status == 400 and "top_logprobs" in error["error"]
    status, error = served.json(path, {**asked, "top_logprobs": 50})
    assert status == 400 and error["error"].startswith("top_logprobs must be <= max_logprobs 20, got 50")


def test_messages_go_by_the_rule_of_the_other_apis(served):
    """Regression: a developer's message, parts as content, and pictures of tools and answers were a 400."""
    told = {"role": "tool", "tool_name": "f", "content": "4", "images": ["aGk="]}
    seen = {"role": "assistant", "content": "", "images": ["aGk="]}
    messages = [{"role": "developer", "content": "Rule."}, USER, seen, told, USER]
    served.say("Yes.")
    chat(served, messages=messages)
    prompt = served.last_prompt()
    assert (
        "<system>Rule." in prompt
        and "<tool>4\n[image left out" in prompt
        and "<assistant>[image left" in prompt
    )
    chat(served, messages=[{"role": "user", "content": [{"type": "text", "text": "in parts"}]}])
    assert "<user>in parts" in served.last_prompt()
    status, error = served.json("/api/chat", {"messages": [{**USER, "content": [{"type": "image_url"}]}]})
    assert status == 400 and error["error"].startswith("messages[0].content must be text")


def test_half_a_character_in_arguments_keeps_the_rest_of_them(served):
    """Regression: the arguments of such a call came as an empty object."""
    served.say('<tool_call>{"name": "weather", "arguments": {"city": "Ro\\ud83d"}}</tool_call>')
    body = {"messages": [USER], "tools": [TOOL], "stream": False}
    [call] = served.json("/api/chat", body)[1]["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"city": "Ro\N{REPLACEMENT CHARACTER}"}
