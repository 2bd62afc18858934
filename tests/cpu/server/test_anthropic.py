"""/v1/messages as Anthropic's client sees it, over a fake engine."""

import json
import urllib.error
import urllib.request

import anthropic
import pytest

from tests.fake_server import FakeServer, tool_server

CALL = (
    '<think>\nLet me see.\n</think>\n\nI ask.\n<tool_call>\n{"name": "weather", "arguments": {"city": '
    '"Paris"}}\n</tool_call>'
)
TOOL = {
    "name": "weather",
    "description": "reports",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def served():
    with tool_server(api_key=["sesame"]) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return anthropic.Anthropic(base_url=served.url, api_key="sesame", max_retries=0, timeout=60)


def ask(client, **options):
    return client.messages.create(
        **{"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "hello"}], **options}
    )


def test_text_is_answered_with_usage(served, client):
    served.say("Hello there")
    served.engine.cached_tokens = 3
    # no longer the client's own
    message = ask(client, system="Be brief.", extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5})
    served.engine.cached_tokens = 0
    assert (
        message.content[0].text == "Hello there"
        and message.stop_reason == "end_turn"
        and message.role == "assistant"
    )
    assert message.usage.output_tokens == 12 and message.usage.cache_read_input_tokens == 3
    assert message.usage.input_tokens == len(served.last_request().prompt_token_ids) - 3
    assert served.last_prompt() == "<system>Be brief.<user>hello<assistant><think>\n\n</think>\n\n"
    params = served.last_request().params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 5)


def test_why_it_stopped_is_reported(served, client):
    served.say("Hello there")
    assert ask(client, max_tokens=3).stop_reason == "max_tokens"
    message = ask(client, stop_sequences=["th"])
    assert (
        message.stop_reason == "stop_sequence"
        and message.stop_sequence == "th"
        and message.content[0].text == "Hello "
    )


def test_thoughts_text_and_calls_are_blocks(served, client):
    served.say(CALL)
    message = ask(client, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    thinking, text, call = message.content
    assert thinking.thinking == "Let me see." and text.text == "I ask."
    assert call.name == "weather" and call.input == {"city": "Paris"} and message.stop_reason == "tool_use"
    assert "<think>" not in served.last_prompt() and '"weather"' in served.last_prompt()


def test_the_clients_stream_adds_up_to_the_whole(served, client):
    served.say(CALL)
    with client.messages.stream(
        model="tiny", max_tokens=200, messages=[{"role": "user", "content": "hello"}], tools=[TOOL]
    ) as stream:
        events = [e for e in stream if e.type not in ("text", "thinking", "input_json", "signature")]
        message = stream.get_final_message()
    kinds = [e.type for e in events]
    assert [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 3,
        "message_delta",
        "message_stop",
    ]
    assert [b.type for b in message.content] == ["thinking", "text", "tool_use"] and message.content[
        2
    ].input == {"city": "Paris"}
    assert message.stop_reason == "tool_use" and message.usage.output_tokens == len(served.engine.reply) + 1
    served.say("Hello")
    with client.messages.stream(
        model="tiny", max_tokens=20, messages=[{"role": "user", "content": "hello"}]
    ) as stream:
        assert "".join(stream.text_stream) == "Hello"


def test_cut_arguments_do_not_break_the_client(served, client):
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Par\\u00e9", "n": tru'
    served.say(text)
    message = ask(client, tools=[TOOL], max_tokens=len(text))
    assert message.content[0].input == {}
    with client.messages.stream(
        model="tiny", max_tokens=200, messages=[{"role": "user", "content": "hello"}], tools=[TOOL]
    ) as stream:
        assert stream.get_final_message().content[0].input == {"city": "Paré"}


def test_a_conversation_with_tools_comes_back(served, client):
    served.say("It is sunny.")
    ask(
        client,
        tools=[TOOL],
        messages=[
            {"role": "user", "content": "hello"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "I ask."},
                    {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_1",
                        "content": [{"type": "text", "text": "sunny"}],
                    },
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
    )
    assert served.last_prompt().endswith(
        '<user>hello<assistant>(thought: Hm.)I ask.<tool_call>weather{"city": "Paris"}</tool_call>'
        "<tool>sunny<user>So?<assistant><think>\n\n</think>\n\n"
    )


def test_what_anthropics_servers_wrote_for_themselves_is_left_out_and_logged_once(served, client, caplog):
    served.say("Yes.")
    for _ in range(2):
        ask(
            client,
            messages=[
                {"role": "user", "content": "hello"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "redacted_thinking", "data": "xx"},
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
                        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                        {"type": "text", "text": "Hi."},
                    ],
                },
                {"role": "user", "content": "So?"},
            ],
        )
        assert served.last_prompt().startswith("<user>hello<assistant>Hi.<user>So?<assistant>")
    assert len([m for m in caplog.messages if "left out" in m]) == 3


def test_a_picture_in_a_tools_result_is_named_as_the_model_sees_none(served, client):
    served.say("I see none.")
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    ask(
        client,
        tools=[TOOL],
        messages=[
            {"role": "user", "content": "hello"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "text", "text": "map:"}, image],
                    }
                ],
            },
        ],
    )
    assert "<tool>map:\n[image left out: this model reads text alone]<assistant>" in served.last_prompt()


def test_an_answer_that_was_begun_is_gone_on_with(served, client):
    served.say(" there")
    message = ask(
        client, messages=[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hello"}]
    )
    assert message.content[0].text == " there" and served.last_prompt() == "<user>hello<assistant>Hello"


def test_tool_choices(served, client):
    served.say('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>')
    message = ask(client, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    assert message.content[0].input == {"city": "Rome"} and message.stop_reason == "tool_use"
    message = ask(client, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert message.content[0].input == {"city": "Rome"}
    assert ")*" not in served.last_request().params.structured_outputs.grammar
    served.say("No.")
    assert (
        ask(client, tools=[TOOL], tool_choice={"type": "none"}).content[0].text == "No."
        and "weather" not in served.last_prompt()
    )
    served.say('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    for body in ({"output_config": {"format": form}}, {"output_format": form}):
        ask(client, extra_body=body)
        assert served.last_request().params.structured_outputs.json == schema


def test_strict_tools_are_constrained_as_in_openais_api(served, client):
    """Regression: `strict` of a tool had no effect in this API."""
    served.say(CALL)
    strict = {**TOOL, "strict": True}
    message = ask(client, tools=[strict])
    assert message.content[-1].input == {"city": "Paris"} and message.stop_reason == "tool_use"
    form = served.last_request().params.structured_outputs.structural_tag["format"]
    assert form["type"] == "triggered_tags" and form["triggers"] == ["<tool_call>"]
    assert not form["stop_after_first"]
    ask(client, tools=[strict], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert served.last_request().params.structured_outputs.structural_tag["format"]["stop_after_first"]
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        ask(client, tools=[strict], tool_choice=choice)
        assert "weather" in served.last_request().params.structured_outputs.grammar
    for tool in (TOOL, {**TOOL, "strict": False}):
        ask(client, tools=[tool])
        assert served.last_request().params.structured_outputs is None


OWN = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


def test_anthropics_own_tools_are_left_out_and_logged_once(served, client, caplog):
    served.say(CALL)
    for _ in range(2):
        message = ask(client, tools=[OWN, TOOL, {"type": "bash_20250124", "name": "bash"}])
        assert message.content[-1].name == "weather" and "bash" not in served.last_prompt()
    assert [
        ("web_search_20250305" in m, "bash_20250124" in m) for m in caplog.messages if "left out" in m
    ] == [(True, False), (False, True)]


def test_more_tokens_than_fit_are_as_many_as_fit(served, client):
    served.say("Hello")
    # Claude Code's number, whatever the model
    assert ask(client, max_tokens=32_000, timeout=60).content[0].text == "Hello"
    request = served.last_request()
    assert request.params.max_tokens == 4096 - len(request.prompt_token_ids)


def test_tokens_are_counted(served, client):
    served.say("x")
    asked = {"messages": [{"role": "user", "content": "hello"}], "tools": [TOOL], "system": "Be brief."}
    count = client.messages.count_tokens(model="tiny", **asked).input_tokens
    assert ask(client, **asked).usage.input_tokens == count


@pytest.mark.parametrize(
    "options, error",
    [
        ({"model": "other"}, anthropic.NotFoundError),
        ({"messages": []}, anthropic.BadRequestError),
        ({"max_tokens": -2}, anthropic.BadRequestError),
        ({"messages": [{"role": "robot", "content": "x"}]}, anthropic.BadRequestError),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            anthropic.BadRequestError,
        ),
        ({"tools": [OWN], "tool_choice": {"type": "tool", "name": "web_search"}}, anthropic.BadRequestError),
        ({"tools": [OWN], "tool_choice": {"type": "any"}}, anthropic.BadRequestError),
        ({"tool_choice": {"type": "tool", "name": "x"}}, anthropic.BadRequestError),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, anthropic.BadRequestError),
    ],
)
def test_errors_have_anthropics_shape(client, options, error):
    with pytest.raises(error) as caught:
        ask(client, **options)
    assert caught.value.body["type"] == "error" and len(caught.value.body["error"]["message"]) > 10
    assert caught.value.body["error"]["type"] == (
        "not_found_error" if error is anthropic.NotFoundError else "invalid_request_error"
    )


def test_a_wrong_key_and_a_failing_engine_are_reported_in_that_shape(served, client):
    with pytest.raises(anthropic.AuthenticationError) as caught:
        ask(client.with_options(api_key="wrong"))
    assert caught.value.body["error"]["type"] == "authentication_error"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(
            urllib.request.Request(served.url + "/v1/messages", data=b"{", headers={"x-api-key": "sesame"})
        )
    assert (
        refused.value.code == 400
        and json.loads(refused.value.read())["error"]["type"] == "invalid_request_error"
    )
    served.say("Hello there")
    served.engine.error_after = 4
    try:
        with pytest.raises(anthropic.APIError, match="set to fail"):
            list(ask(client, stream=True))
        with pytest.raises(anthropic.InternalServerError, match="set to fail"):
            ask(client)
    finally:
        served.engine.error_after = None


@pytest.mark.parametrize("kind", [["text"], {"a": 1}, 5, None])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_block_of_a_type_that_is_none_is_a_mistake_of_the_client(kind, role):
    blocks = [{"type": kind, "text": "a"}]
    with FakeServer() as server:
        for content in (blocks, [{"type": "tool_result", "tool_use_id": "x", "content": blocks}]):
            body = {"messages": [{"role": role, "content": content}], "max_tokens": 1}
            assert server.json("/v1/messages", body)[0] == 400


def test_blocks_that_are_text_are_read_and_unknown_ones_left_out(served, client, caplog):
    """Regression: tool_reference, search_result, documents of text and new blocks were refused, so a
    conversation that held one was over."""
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "plain"}}
    search = {
        "type": "search_result",
        "title": "S",
        "source": "u",
        "content": [{"type": "text", "text": "f"}],
    }
    result = [{"type": "tool_reference", "tool_name": "mcp__a__b"}, search]
    served.say("Hello")
    ask(
        client,
        messages=[
            {"role": "user", "content": [document, {"type": "container_upload", "file_id": "x"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "mcp_tool_use", "id": "m"},
                    {"type": "tool_use", "id": "c", "name": "find", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": result}]},
        ],
    )
    assert "<user>T\nplain<assistant>" in served.last_prompt()
    assert "<tool>mcp__a__b\nS\nu\nf<assistant>" in served.last_prompt()
    assert "container_upload" in caplog.text and "mcp_tool_use" in caplog.text


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch={};"


@pytest.mark.parametrize(
    "system",
    [
        [BILLING, "Follow the rules."],
        [BILLING + "\nFollow the rules."],
        ["Follow the rules.", BILLING],
        BILLING + "\nFollow the rules.",
    ],
)
def test_claude_codes_billing_line_does_not_change_the_prompt(served, client, system):
    """Regression: the line changes with each request, so no later block was found in the prefix cache."""

    def prompt(system):
        served.say("Yes")
        blocks = [{"type": "text", "text": text} for text in system]
        ask(client, system=system if isinstance(system, str) else blocks)
        return served.last_prompt()

    def fill(code):
        return system.format(code) if isinstance(system, str) else [text.format(code) for text in system]

    assert prompt(fill("1a2b")) == prompt(fill("3c4d5")) == prompt("Follow the rules.")


def test_what_a_user_wrote_about_the_billing_line_stays(served, client):
    counts = [
        client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": text}])
        for text in ("Hello", BILLING + "\nHello")
    ]
    assert counts[1].input_tokens > counts[0].input_tokens + 10
    text = "The header\n" + BILLING + "\nis kept."
    with_line, without = (
        client.messages.count_tokens(
            model="tiny", system=system, messages=[{"role": "user", "content": "Hello"}]
        )
        for system in (text, "The header\nis kept.")
    )
    assert with_line.input_tokens > without.input_tokens + 10


def test_the_id_of_a_request_is_under_anthropics_name_too(served, client):
    """Regression: only x-request-id was sent, so the SDK's ids were None."""
    served.say("Yes")
    assert ask(client)._request_id
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, messages=[])
    assert caught.value.request_id == caught.value.response.headers["x-request-id"]


def test_models_have_anthropics_shape_for_its_clients(served, client):
    """Regression: the answer was OpenAI's, so type, name and date of each model were None in the SDK."""
    page = client.models.list()
    [model, *_] = page.data
    assert page.has_more is False and page.first_id == model.id and page.last_id == page.data[-1].id
    assert model.type == "model" and model.display_name == model.id and model.created_at.year >= 2026
    assert client.models.retrieve(model.id) == model
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("there-is-no-such-model")
    assert caught.value.body["error"]["type"] == "not_found_error" and caught.value.request_id
    with pytest.raises(anthropic.AuthenticationError) as caught:
        anthropic.Anthropic(base_url=served.url, api_key="wrong", max_retries=0).models.list()
    assert caught.value.body["error"]["type"] == "authentication_error"
    # A client without the header gets OpenAI's shape.
    _, found = served.json("/v1/models", headers={"authorization": "Bearer sesame"})
    assert found["object"] == "list"


def test_models_come_in_pages_for_anthropics_clients():
    with FakeServer(model={"names": ["a", "b", "c"]}) as served:
        client = anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0)
        first = client.models.list(limit=2)
        assert [m.id for m in first.data] == ["a", "b"] and first.has_more
        assert [m.id for m in client.models.list(limit=2)] == ["a", "b", "c"]  # the SDK asks for all pages
        before = client.models.list(limit=1, before_id="c")
        assert [m.id for m in before.data] == ["b"] and before.has_more
        for wrong in ({"limit": 0}, {"after_id": "d"}):
            with pytest.raises(anthropic.BadRequestError):
                client.models.list(**wrong)


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, {}]
)
def test_threads_are_refused_with_the_code_that_anthropics_sdk_knows(served, client, thread):
    """Regression: `thread` was ignored, and the second turn answered without the turns before it."""
    for call in (client.messages.create, client.messages.count_tokens):
        more = {"max_tokens": 5} if call == client.messages.create else {}
        with pytest.raises(anthropic.BadRequestError) as caught:
            call(model="tiny", messages=[], extra_body={"thread": thread}, **more)
        assert caught.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}
    served.say("Hello")
    assert ask(client, extra_body={"thread": None}).content[0].text == "Hello"


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_put_the_prompt_into_the_cache(served, client, stream):
    """Regression: max_tokens 0, which Anthropic documents for this, was a 400."""
    served.say("Hello there")
    if stream:
        with client.messages.stream(
            model="tiny", max_tokens=0, messages=[{"role": "user", "content": "hello"}]
        ) as events:
            message = events.get_final_message()
    else:
        message = ask(client, max_tokens=0)
    assert message.content == [] and message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 0 and message.usage.input_tokens > 0
    assert served.last_request().params.max_tokens == 1


def test_minus_one_token_means_as_many_as_fit(served, client):
    served.say("Hello there")
    assert ask(client, max_tokens=-1, timeout=60).content[0].text == "Hello there"
    request = served.last_request()
    assert request.params.max_tokens == 4096 - len(request.prompt_token_ids)


def test_consecutive_turns_of_one_role_are_one(served, client):
    """Regression: they went to the template as they were, and templates that want turns refused them."""
    served.say("Yes.")
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "e"}]},
        {"role": "user", "content": "f"},
    ]
    ask(client, messages=messages, tools=[TOOL])
    prompt = served.last_prompt()
    assert "<user>a\nb\nc<assistant>d" in prompt and prompt.count("<assistant>") == 2
    assert prompt.index("e") < prompt.index("<user>f")


def test_other_modes_of_thinking_think(served, client, caplog):
    """Regression: `between_tools`, which Anthropic's SDK knows, was a 400."""
    prompts = []
    for mode in ("adaptive", "between_tools", "sometimes"):
        served.say("Yes.")
        ask(client, extra_body={"thinking": {"type": mode}})
        prompts.append(served.last_prompt())
    assert len(set(prompts)) == 1
    assert [m for m in caplog.messages if "'sometimes' is taken for 'adaptive'" in m]


def test_half_a_character_in_arguments_keeps_the_rest_of_them(served, client):
    """Regression: the input of such a call came as an empty object."""
    served.say('<tool_call>{"name": "weather", "arguments": {"city": "Ro\\ud83d"}}</tool_call>')
    [block] = ask(client, tools=[TOOL]).content
    assert block.input == {"city": "Ro\N{REPLACEMENT CHARACTER}"}


def test_texts_of_joined_answers_are_lines_and_errors_name_the_message(served, client):
    """Regression: words of two answers ran together, and errors counted joined turns as one message."""
    hello = {"role": "user", "content": "hello"}
    answers = [{"role": "assistant", "content": text} for text in ("One.", "Two.")]
    served.say("Yes.")
    ask(client, messages=[{"role": "developer", "content": "Rule."}, hello, *answers, hello])
    assert "<system>Rule.<user>hello<assistant>One.\nTwo.<user>" in served.last_prompt()
    picture = {"role": "user", "content": [{"type": "image", "source": {}}]}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[2\]\.content\[0\] must be text"):
        ask(client, messages=[hello, hello, picture])
