"""/v1/responses as OpenAI's client sees it, over a fake engine."""

import json
import re
import threading

import openai
import pytest

from shoal.server.served.response_store import ResponseStore
from tests.fake_server import FakeServer, tool_server
from tests.waiting import eventually

CALL = (
    '<think>\nLet me see.\n</think>\n\nI ask.\n<tool_call>\n{"name": "weather", "arguments": {"city": '
    '"Paris"}}\n</tool_call>'
)
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "reports",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def ask(client, **options):
    return client.responses.create(**{"model": "tiny", "input": "hello", **options})


def test_text_is_answered_with_usage(served, client):
    served.say("Hello there")
    answer = ask(client, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    assert answer.output_text == "Hello there" and answer.status == "completed" and answer.error is None
    assert answer.usage.output_tokens == 12 and answer.usage.total_tokens == answer.usage.input_tokens + 12
    assert served.last_prompt() == "<system>Be brief.<user>hello<assistant>"
    assert answer.metadata == {"a": "b"}
    assert not answer.store and answer.tool_choice == "auto" and answer.tools == []
    assert served.last_request().params.temperature == 0.5 and answer.temperature == 0.5


def test_an_answer_cut_short_is_incomplete(served, client):
    served.say("Hello there")
    answer = ask(client, max_output_tokens=5)
    assert answer.output_text == "Hello"
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"


def test_reasoning_text_and_calls_are_items(served, client):
    served.say(CALL)
    answer = ask(client, tools=[TOOL])
    reasoning, message, call = answer.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text == "Let me see."
    assert message.content[0].text == "I ask." == answer.output_text
    assert call.type == "function_call"
    assert call.name == "weather"
    assert json.loads(call.arguments) == {"city": "Paris"}
    assert call.call_id
    assert '"weather"' in served.last_prompt()


def test_the_clients_stream_adds_up_to_the_whole(served, client):
    served.say(CALL)
    with client.responses.stream(model="tiny", input="hello", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type.removeprefix("response.") for e in events]
    assert [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert (
        "".join(e.delta for e in events if e.type == "response.output_text.delta")
        == "I ask."
        == final.output_text
    )
    assert (
        "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        == '{"city": "Paris"}'
    )
    assert final.output[2].arguments == '{"city": "Paris"}' and final.usage.output_tokens > 0
    assert [i.id for i in final.output] == [
        e.item.id for e in events if e.type == "response.output_item.added"
    ]


def test_a_cut_stream_ends_with_incomplete(served, client):
    served.say("Hello there")
    events = list(ask(client, stream=True, max_output_tokens=3))
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == "Hel"


def test_a_conversation_comes_back_as_items(served, client):
    served.say(CALL)
    first = ask(client, tools=[TOOL])
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        *[item.to_dict() for item in first.output],
        {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "sunny"},
    ]
    served.say("It is sunny.")
    assert ask(client, input=items, instructions="You help.").output_text == "It is sunny."
    assert served.last_prompt() == (
        "<system>You help.\n\nBe brief.<user>hello<assistant>(thought: Let me see.)I ask."
        '<tool_call>weather{"city": "Paris"}</tool_call><tool>sunny<assistant>'
    )


def test_what_codex_did_with_another_server_comes_back(served, client, caplog):
    served.say("Done.")
    patch = {
        "type": "custom_tool_call",
        "name": "apply_patch",
        "input": "*** Begin",
        "call_id": "1",
        "status": "completed",
    }
    shell = {
        "type": "local_shell_call",
        "call_id": "2",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"]},
    }
    items = [
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "q"},
        },
        patch,
        {"type": "custom_tool_call_output", "call_id": "1", "output": "Success"},
        shell,
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "a.py"}]},
    ]
    options = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
    }
    for _ in range(2):
        assert ask(client, input=items, **options).output_text == "Done."
    assert served.last_prompt() == (
        '<user>hello<assistant><tool_call>apply_patch{"input": "*** Begin"}</tool_call><tool>Success'
        '<assistant><tool_call>local_shell{"type": "exec", "command": ["ls"]}</tool_call><tool>a.py'
        "<assistant>"
    )
    [told] = [m for m in caplog.messages if "left out" in m]
    assert "web_search_call" in told


def test_a_picture_in_a_tools_output_is_named_as_the_model_sees_none(served, client):
    served.say("I see none.")
    output = [{"type": "input_image", "image_url": "data:image/png;base64,aaaa"}]
    ask(
        client,
        input=[
            {"role": "user", "content": "hello"},
            {"type": "function_call", "name": "view_image", "arguments": "{}", "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": output},
        ],
    )
    assert "<tool>[input_image left out: this model reads text alone]<assistant>" in served.last_prompt()


ENFORCED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_a_named_tool_and_a_schema_become_grammars(served, client):
    served.say(ENFORCED)
    answer = ask(client, tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
    assert answer.output[0].type == "function_call"
    assert answer.output[0].arguments == '{"city": "Rome"}'
    assert answer.output_text == ""
    assert '"const": "weather"' in served.last_request().params.structured_outputs.grammar
    assert "<think>\n\n</think>" not in served.last_prompt()
    served.say('{"city": "Rome"}')
    schema = TOOL["parameters"]
    answer = ask(
        client, text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    )
    assert answer.output_text == '{"city": "Rome"}'
    assert served.last_request().params.structured_outputs.json == schema
    ask(client, text={"format": {"type": "json_object", "schema": schema}})
    assert served.last_request().params.structured_outputs.json == schema
    ask(client, reasoning={"effort": "none"})
    assert "<think>\n\n</think>" in served.last_prompt()


HOSTED = [
    {"type": "web_search", "external_web_access": True},
    {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
    {"type": "mcp", "server_label": "x", "server_url": "https://example.org"},
]


def test_tools_of_other_servers_are_left_out_and_logged_once_in_the_log(served, client, caplog):
    served.say(CALL)
    for _ in range(2):
        answer = ask(client, tools=[*HOSTED, TOOL])
        assert answer.output[-1].name == "weather" and "apply_patch" not in served.last_prompt()
    told = [record.message for record in caplog.records if "left out" in record.message]
    assert len(told) == len(HOSTED) and "web_search" in told[0] and "openai" in told[0].lower()
    served.say("Hello")
    assert ask(client, tools=HOSTED).output_text == "Hello"
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}, {"type": "web_search"}],
    }
    served.say(ENFORCED)
    answer = ask(client, tools=[*HOSTED, TOOL], tool_choice=allowed)
    assert answer.output[0].arguments == '{"city": "Rome"}' and answer.tool_choice.type == "allowed_tools"


def test_a_format_and_tools_go_together(served, client):
    served.say(ENFORCED)
    form = {"format": {"type": "json_object"}}
    answer = ask(client, tools=[TOOL], tool_choice={"type": "function", "name": "weather"}, text=form)
    assert answer.output[0].type == "function_call" and answer.text.format.type == "json_object"
    served.say('{"city": "Rome"}')
    answer = ask(client, tools=[TOOL], text=form)
    assert answer.output_text == '{"city": "Rome"}'
    assert served.last_request().params.structured_outputs.structural_tag


def test_more_tokens_than_fit_are_as_many_as_fit(served, client):
    served.say("Hello")
    assert ask(client, max_output_tokens=32_000).output_text == "Hello"
    request = served.last_request()
    assert request.params.max_tokens == 4096 - len(request.prompt_token_ids)


def test_a_response_that_shall_be_stored_is_answered_and_its_sender_warned(served, client, caplog):
    for _ in range(2):
        served.say("Hello")
        answer = ask(client, store=True, text={"verbosity": "low"})
        assert answer.output_text == "Hello" and answer.store is False
        assert answer.text.verbosity == "low" and answer.text.format.type == "text"
    assert len([m for m in caplog.messages if "keeps no responses" in m]) == 1


@pytest.mark.parametrize(
    "options, param",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": "x"}, {"id": "msg_1"}]}, "input[1]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": HOSTED, "tool_choice": "required"}, "tool_choice"),
        ({"tools": HOSTED, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": HOSTED, "tool_choice": {"type": "custom", "name": "apply_patch"}}, "tool_choice"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "x"}],
                },
            },
            "tool_choice",
        ),
        (
            {"input": [{"type": "function_call", "name": "f", "call_id": "1", "arguments": None}]},
            "input[0].arguments",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [TOOL]}}, "tool_choice"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_fields_name(client, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **options)
    assert caught.value.param == param or param is None
    assert param != "tool_choice" or "None" not in caught.value.message
    assert len(caught.value.message) > 20


def test_a_failure_in_mid_stream_is_an_event(served, client):
    served.say("Hello there")
    served.engine.error_after = 4
    try:
        events = list(ask(client, stream=True))
    finally:
        served.engine.error_after = None
    assert events[-1].type == "response.failed" and "set to fail" in events[-1].response.error.message


@pytest.mark.parametrize("kind", [["message"], {"a": 1}, 5])
def test_an_item_of_a_type_that_is_none_is_a_mistake_of_the_client(kind):
    with FakeServer() as server:
        item = {"type": kind, "role": "user", "content": "a"}
        assert server.json("/v1/responses", {"input": [item], "max_output_tokens": 1})[0] == 400


def test_outputs_of_shells_are_read_and_unknown_items_left_out(served, client, caplog):
    """Regression: outputs of shells, tool searches and compactions were refused with every later turn."""
    served.say("Done.")
    items = [
        {"role": "user", "content": "hello"},
        {"type": "tool_search_call", "call_id": "t", "arguments": {"query": "x"}},
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"type": "local_shell_call", "call_id": "s", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "s", "output": "a.txt"},
        {"type": "shell_call", "call_id": "u", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "u", "output": [{"stdout": "b.txt", "stderr": ""}]},
    ]
    assert ask(client, input=items).output_text == "Done."
    assert "<tool>a.txt" in served.last_prompt() and "<tool>b.txt" in served.last_prompt()
    assert "tool_search_call" in caplog.text and "compaction" in caplog.text


def test_functions_of_a_namespace_are_shown_and_called(served, client):
    """Regression: a namespace of tools was left out, so the model saw none of Codex's MCP tools."""
    served.say(CALL.replace('"weather"', '"mcp__a__weather"'))
    answer = ask(client, tools=[{"type": "namespace", "name": "mcp__a__", "tools": [TOOL]}])
    call = answer.output[-1].to_dict()
    assert (call["namespace"], call["name"]) == ("mcp__a__", "weather")
    ask(client, input=[{"role": "user", "content": "hello"}, call])
    assert "mcp__a__weather" in served.last_prompt()


@pytest.fixture(scope="module")
def keeping():
    with tool_server(responses_store_bytes=100_000) as served:
        yield served


def says(served, text, **body):
    served.say(text)
    status, answer = served.json("/v1/responses", body)
    assert status == 200, answer
    return answer


def test_a_conversation_goes_on_from_a_response_that_is_kept(keeping):
    first = says(keeping, "A bird.", input="What is a heron?", instructions="Be brief.")
    assert first["store"] is True and first["previous_response_id"] is None
    second = says(keeping, "Fish.", input="It eats?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    says(keeping, "Yes.", input=[{"role": "user", "content": "Sure?"}], previous_response_id=second["id"])
    # A response's instructions don't count for the next one, as in OpenAI's API.
    assert keeping.last_prompt() == (
        "<user>What is a heron?<assistant>A bird.<user>It eats?<assistant>Fish.<user>Sure?<assistant>"
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [{"type": "item_reference"}, {}, {"type": None}])
def test_an_item_that_is_kept_is_found_by_its_id(keeping, kind, stream):
    """Regression: Vercel's AI SDK sends answers back by their ids, and each second turn was a 400."""
    keeping.say("A bird.")
    if stream:
        _, _, text = keeping.request("/v1/responses", {"input": "A heron?", "stream": True})
        first = json.loads(text.split("data: ")[-1])["response"]
    else:
        first = says(keeping, "A bird.", input="A heron?")
    [item] = first["output"]
    user = {"role": "user", "content": "It eats?"}
    says(keeping, "Fish.", input=[{"role": "user", "content": "A heron?"}, {**kind, "id": item["id"]}, user])
    assert keeping.last_prompt() == "<user>A heron?<assistant>A bird.<user>It eats?<assistant>"


def test_what_is_not_kept_is_reported(keeping):
    unkept = says(keeping, "A bird.", input="A heron?", store=False)
    assert unkept["store"] is False
    status, found = keeping.json("/v1/responses", {"input": "x", "previous_response_id": unkept["id"]})
    assert status == 400 and found["error"]["code"] == "previous_response_not_found"
    status, found = keeping.json("/v1/responses", {"input": [{"id": unkept["output"][0]["id"]}]})
    assert status == 404 and "store: false" in found["error"]["message"]


def test_a_response_that_is_kept_can_be_read_and_deleted(keeping):
    first = says(keeping, "A bird.", input="A heron?")
    assert keeping.json(f"/v1/responses/{first['id']}") == (200, first)
    status, _, _ = keeping.request(f"/v1/responses/{first['id']}", method="DELETE")
    assert status == 200 and keeping.json(f"/v1/responses/{first['id']}")[0] == 404
    assert keeping.request(f"/v1/responses/{first['id']}", method="DELETE")[0] == 404


def test_responses_are_kept_within_their_bytes_and_their_hour():
    now = 0.0
    store = ResponseStore(1000, lambda: now)
    answer = json.dumps({"output": [{"id": "msg_1", "text": "x" * 200}]}).encode()

    def add(name, previous=None):
        return store.add(name, previous, [{"role": "user"}], answer.replace(b"msg_1", name.encode()), [name])

    assert add("a") and add("b", "a") and add("c", "b")
    assert len(store.conversation("c")) == 6 and store.item("c")["id"] == "c"
    assert store.response("b") and add("d")  # "a" is the longest unused one, so it gives way
    assert store.response("a") is None and store.item("a") is None and store.num_bytes <= 1000
    assert store.conversation("c") is None and store.response("c")
    assert not store.add("big", None, [], b"x" * 1001, [])
    assert add("late")
    now = 3601.0
    assert store.response("late") is None and store.num_bytes == 0


TOLD = [
    {"input": "Hello there"},
    {"input": [{"role": "user", "content": "Hello"}], "instructions": "Be brief.", "tools": [TOOL]},
]


@pytest.mark.parametrize("body", TOLD)
def test_the_tokens_of_an_input_are_counted(served, client, body):
    """Regression: the path was a 404, and pydantic-ai counts before each request."""
    served.say("Hello")
    counted = client.responses.input_tokens.count(model="tiny", **body)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == ask(client, **body).usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_put_into_the_cache_alone(served, client, stream):
    served.say("Hello there")
    answer = ask(client, extra_body={"prompt_cache_options": {"prewarm": True}}, stream=stream)
    answer = list(answer)[-1].response if stream else answer
    assert answer.output == [] and answer.status == "completed"
    assert answer.usage.output_tokens == 0 and answer.usage.input_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_from_a_prompt_that_was_put_into_the_cache(keeping, stream):
    """Regression: such a response said that it is stored and was not, so the turn that followed was a 400."""
    client = openai.OpenAI(base_url=keeping.url + "/v1", api_key="none")
    body = {"model": "tiny", "input": "What is a heron?", "stream": stream}
    warm = client.responses.create(extra_body={"prompt_cache_options": {"prewarm": True}}, **body)
    warm = list(warm)[-1].response if stream else warm
    assert client.responses.retrieve(warm.id).output == []
    says(keeping, "Yes.", input="Say it.", previous_response_id=warm.id)
    assert keeping.last_prompt() == "<user>What is a heron?<user>Say it.<assistant>"


def test_what_is_below_a_response_is_not_taken_for_its_id(keeping):
    """Regression: 'the response resp_1/input_items is not kept here'."""
    for path, words in (("resp_1/input_items", "there is nothing at"), ("resp_1", "is not kept here")):
        status, answer = keeping.json(f"/v1/responses/{path}")
        assert status == 404 and words in answer["error"]["message"]


def test_minus_one_output_token_means_as_many_as_fit(served, client):
    served.say("Hello")
    assert ask(client, max_output_tokens=-1).output_text == "Hello"
    request = served.last_request()
    assert request.params.max_tokens == 4096 - len(request.prompt_token_ids)
    for wrong in (0, -2):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, max_output_tokens=wrong)
        assert caught.value.param == "max_output_tokens"


def test_log_probabilities_are_those_of_the_text(served, client):
    """Regression: a 400 sent people to another endpoint."""
    served.say("Hi!")
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = ask(client, **asked)
    rows = answer.output[0].content[0].logprobs
    assert "".join(row.token for row in rows) == "Hi!" == answer.output_text
    assert all(len(row.top_logprobs) == 2 and row.logprob <= 0 for row in rows)
    events = list(ask(client, stream=True, **asked))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [row.token for delta in deltas for row in delta.logprobs] == list("Hi!")
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [row.token for row in done.logprobs] == list("Hi!")
    assert events[-1].response.output[0].content[0].logprobs == rows
    assert ask(client).output[0].content[0].logprobs == []
    assert len(ask(client, include=asked["include"]).output[0].content[0].logprobs) == 3


def test_log_probabilities_of_thoughts_and_calls_are_not_those_of_the_text(served, client):
    served.say(CALL)
    answer = ask(client, tools=[TOOL], include=["message.output_text.logprobs"])
    _, message, call = answer.output
    assert message.content[0].text == "I ask." and call.name == "weather"
    shown = "".join(row.token for row in message.content[0].logprobs)
    assert "I ask." in shown and "Let me see" not in shown and "Paris" not in shown


def test_nulls_of_items_count_as_absent(served):
    """Regression: `type: null` of a message and null content of an answer were a 400."""
    served.say("Yes.")
    items = [
        {"type": None, "role": "user", "content": "a", "id": None, "status": None},
        {"type": "message", "role": "assistant", "content": None},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": 5, "namespace": None},
        {"type": "function_call_output", "call_id": "c", "output": None},
        {"type": "message", "role": "user", "content": "b"},
    ]
    assert served.json("/v1/responses", {"input": items})[0] == 200
    assert "<user>a<assistant>" in served.last_prompt() and "<tool><user>b" in served.last_prompt()
    picture = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
    status, error = served.json("/v1/responses", {"input": [*items, picture]})
    assert status == 400 and error["error"]["param"] == "input[5].content"


def test_a_namespace_may_be_allowed_as_a_whole(served):
    """Regression: allowed_tools took a namespace for the name of a function that is missing."""
    space = {
        "type": "namespace",
        "name": "mcp__a__",
        "tools": [{"type": "function", "name": name} for name in ("one", "two")],
    }
    other = {"type": "function", "name": "three"}
    for entry, allowed in (
        ({"type": "namespace", "name": "mcp__a__"}, {"mcp__a__one", "mcp__a__two"}),
        ({"type": "function", "namespace": "mcp__a__", "name": "one"}, {"mcp__a__one"}),
    ):
        choice = {"type": "allowed_tools", "mode": "required", "tools": [entry]}
        served.say('<tool_call>\n{"name": "mcp__a__one", "arguments": {}}\n</tool_call>')
        body = {"input": "a", "tools": [space, other], "tool_choice": choice}
        status, found = served.json("/v1/responses", body)
        assert status == 200 and found["output"][0]["name"] == "one"
        grammar = served.last_request().params.structured_outputs.grammar
        assert set(re.findall('"const": "(.*?)"', grammar)) == allowed


def test_an_item_that_is_forgotten_meanwhile_does_not_fail_its_answer(keeping):
    """Regression: the references of a request were looked up again when its answer was kept, and one that was
    gone by then failed the answer that had been computed from it."""
    first = says(keeping, "A bird.", input="A heron?")
    keeping.say("Fish.", token_seconds=0.05)
    num_seen, found = len(keeping.engine.seen), []
    body = {"input": [{"id": first["output"][0]["id"]}, {"role": "user", "content": "It eats?"}]}
    asking = threading.Thread(target=lambda: found.append(keeping.json("/v1/responses", body)))
    asking.start()
    eventually(lambda: len(keeping.engine.seen) > num_seen)
    keeping.request(f"/v1/responses/{first['id']}", method="DELETE")
    asking.join(60)
    [(status, second)] = found
    assert status == 200 and second["output"][0]["content"][0]["text"] == "Fish."
    says(keeping, "Yes.", input="Sure?", previous_response_id=second["id"])
    assert keeping.last_prompt().startswith("<assistant>A bird.<user>It eats?<assistant>Fish.<user>Sure?")
