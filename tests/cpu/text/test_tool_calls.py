"""Tools and reasoning of chat completions as OpenAI's client sees them, over a fake engine; and what a
request's tools come to."""

import base64
import json

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from shoal.errors import RequestError
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from shoal.server.apis.tools import choose_reasoning_parser, choose_tool_call_parser, plan_tools
from shoal.text.grammar.structured import check, grammar_of
from tests.fake_server import FakeServer, byte_tokenizer, tool_server

SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Paris", "Rome"]}},
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "tells", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "now"}}
CALLS = (
    'I ask.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
BYTES = LLTokenizer("byte")
NAMED = {"type": "function", "function": {"name": "weather"}}


def ask(client, **options):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 500}
    return client.chat.completions.create(**{**asked, **options})


def shape(calls):
    return [(c.function.name, c.function.arguments) for c in calls or ()]


def streamed(client, **options):
    """(content, reasoning, calls, finish reason), put together as a careful client does."""
    content, reasoning, calls, reason = "", "", {}, None
    for chunk in ask(client, stream=True, **options):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(calls) and call.type == "function"
                calls[call.index] = [call.id, call.function.name, ""]
            calls[call.index][2] += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    assert len({c[0] for c in calls.values()}) == len(calls)
    return content, reasoning, [tuple(c[1:]) for c in calls.values()], reason


def test_calls_are_found_whole_and_streamed(served, client):
    served.say(CALLS)
    choice = ask(client, tools=[TOOL, OTHER]).choices[0]
    expected = [("weather", '{"city": "Paris"}'), ("now", "{}")]
    assert choice.message.content == "I ask."
    assert shape(choice.message.tool_calls) == expected
    assert choice.finish_reason == "tool_calls"
    assert not served.last_request().params.skip_special_tokens
    assert streamed(client, tools=[TOOL, OTHER]) == ("I ask.", "", expected, "tool_calls")
    assert (
        shape(ask(client, tools=[TOOL, OTHER], parallel_tool_calls=False).choices[0].message.tool_calls)
        == expected[:1]
    )


def test_the_clients_own_stream_helper_understands(served, client):
    served.say(CALLS)
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "hello"}], tools=[TOOL]
    ) as stream:
        final = stream.get_final_completion()
    assert shape(final.choices[0].message.tool_calls) == [("weather", '{"city": "Paris"}'), ("now", "{}")]


def test_no_tools_or_none_chosen_leaves_the_text_alone(served, client):
    served.say(CALLS)
    for options in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = ask(client, **options).choices[0]
        assert choice.message.content == CALLS
        assert choice.finish_reason == "stop"
        assert "weather" not in served.last_prompt()


def test_an_answer_cut_within_a_call_says_length(served, client):
    served.say(CALLS)
    choice = ask(client, tools=[TOOL], max_tokens=63).choices[0]
    assert choice.finish_reason == "length"
    assert shape(choice.message.tool_calls) == [("weather", '{"city": "P')]


def test_a_named_tool_is_enforced_in_the_familys_syntax(served, client):
    served.say(CALL)
    choice = ask(client, tools=[TOOL], tool_choice=NAMED).choices[0]
    assert shape(choice.message.tool_calls) == [("weather", '{"city": "Rome"}')]
    assert choice.finish_reason == "stop"
    assert choice.message.content is None
    params = served.last_request().params
    assert can_write(CALL, params) and not can_write(f"{CALL}\n{CALL}", params)
    assert not can_write(NOW, params) and not can_write('{"city": "Rome"}', params)
    assert streamed(client, tools=[TOOL], tool_choice=NAMED) == (
        "",
        "",
        [("weather", '{"city": "Rome"}')],
        "stop",
    )


def test_required_calls_are_in_the_familys_syntax(served, client):
    served.say(f"{CALL}\n{NOW}")
    expected = [("weather", '{"city": "Rome"}'), ("now", "{}")]
    choice = ask(client, tools=[TOOL, OTHER], tool_choice="required").choices[0]
    assert shape(choice.message.tool_calls) == expected and choice.finish_reason == "tool_calls"
    assert streamed(client, tools=[TOOL, OTHER], tool_choice="required") == ("", "", expected, "tool_calls")
    check(served.last_request().params.structured_outputs)
    assert "<think>\n\n</think>" not in served.last_prompt()


def test_with_strict_tools_the_grammar_begins_at_a_calls_mark(served, client):
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    served.say(f"I ask.\n{CALL}")
    choice = ask(client, tools=[strict, OTHER]).choices[0]
    assert shape(choice.message.tool_calls) == [("weather", '{"city": "Rome"}')]
    params = served.last_request().params
    for text in (
        "Hello {",
        f"I ask.\n{CALL}",
        f"{CALL}\n{NOW}",
        f"<think>a <tool_call> b</think>{CALL} Done.",
    ):
        assert can_write(text, params), text
    for text in (CALL.replace("Rome", "Oslo"), "a <tool_call> b", f"{CALL}{CALL.replace('weather', 'x')}"):
        assert not can_write(text, params), text
    ask(client, tools=[strict], parallel_tool_calls=False)
    assert can_write(CALL, served.last_request().params)
    assert not can_write(f"{CALL}\n{CALL}", served.last_request().params)
    ask(client, tools=[TOOL])
    assert served.last_request().params.structured_outputs is None


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(tools=[TOOL], tool_choice="required"), "CALL"),
        (dict(tools=[TOOL], tool_choice=NAMED), "CALL"),
        (dict(response_format={"type": "json_object"}), '{"age": 3}'),
        (dict(extra_body={"structured_outputs": {"regex": "[ab]+"}}), "abba"),
        (dict(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}), "no"),
    ],
)
def test_a_grammar_begins_after_the_reasoning(served, client, options, text):
    """Regression: a grammar switched reasoning off."""
    text = CALL if text == "CALL" else text
    served.say(f"<think>\nHm, <tool_call>?\n</think>\n\n{text}")
    message = ask(client, **options).choices[0].message
    assert message.reasoning == "Hm, <tool_call>?"
    assert message.tool_calls if text == CALL else message.content == text
    params = served.last_request().params
    for accepted in (text, f"<think>\nHm.\n</think>\n\n{text}", f"\n<think></think>{text}"):
        assert can_write(accepted, params), accepted
    for refused in (f"<think>{text}", f"<think>a</think>c{text}", f"Hm.</think>{text}", "<think>a</think>"):
        assert not can_write(refused, params), refused
    ask(client, reasoning_effort="none", **options)
    assert "<think>\n\n</think>" in served.last_prompt()
    params = served.last_request().params
    assert can_write(text, params) and not can_write(f"<think>a</think>{text}", params)


def test_thoughts_come_first_and_calls_after(served, client):
    served.say("<think>\nHm.\n</think>\n\n" + CALLS)
    message = ask(client, tools=[TOOL]).choices[0].message
    assert message.reasoning_content == "Hm." == message.reasoning
    assert message.content == "I ask."
    assert len(message.tool_calls) == 2
    content, reasoning, calls, reason = streamed(client, tools=[TOOL])
    assert (content, reasoning, len(calls), reason) == ("I ask.", "Hm.", 2, "tool_calls")
    message = ask(client, tools=[TOOL], extra_body={"include_reasoning": False}).choices[0].message
    assert message.content == "I ask." and not hasattr(message, "reasoning_content")


def test_a_prompt_that_opens_the_thoughts_is_known(served, client):
    served.say("Hm.</think>Yes.")
    served.model.loaded.tokenizer.chat_templates["open"] = "{{ messages[0].content }}<think>\n"
    message = ask(client, extra_body={"chat_template": "open"}).choices[0].message
    assert message.content == "Yes." and message.reasoning_content == "Hm."


def test_half_a_thought_of_the_client_is_continued(served, client):
    served.say(" says hi.\n</think>\n\nHello")
    messages = [
        {"role": "user", "content": "<think> is what?"},
        {"role": "assistant", "content": "<think>\nThe user"},
    ]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    message = ask(client, messages=messages, extra_body=going_on).choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello", " says hi.")
    content, reasoning, _, _ = streamed(client, messages=messages, extra_body=going_on)
    assert (content, reasoning) == ("Hello", " says hi.")
    served.say("Hello")
    message = ask(client, messages=messages[:1]).choices[0].message
    assert message.content == "Hello" and not hasattr(message, "reasoning_content")


def test_effort_none_and_template_variables_switch_thoughts_off(served, client):
    served.say("Yes.")
    for options in (
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        assert ask(client, **options).choices[0].message.content == "Yes."
        assert served.last_prompt().endswith("<think>\n\n</think>\n\n")


def test_a_conversation_with_calls_and_thoughts_comes_back(served, client):
    served.say("It is sunny.")
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
    }
    for name in ("reasoning", "reasoning_content"):
        ask(
            client,
            messages=[
                {"role": "user", "content": "hello"},
                {"role": "assistant", name: "Hm.", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            ],
        )
        assert served.last_prompt() == (
            '<user>hello<assistant>(thought: Hm.)<tool_call>weather{"city": "Paris"}</tool_call>'
            "<tool>sunny<assistant>"
        )


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def function(**fields):
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    "tools, choice",
    [
        ([{"type": "web_search"}], None),
        ([{"type": "function"}], None),
        (function(name="a b"), None),
        (function(name=None), None),
        (function(name=""), None),
        (function() * 2, None),
        (function(parameters=[]), None),
        (function(parameters={"type": "string"}), None),
        (function(description=3), None),
        (function(), "sometimes"),
        (function(), {"type": "function", "function": {"name": "g"}}),
        (function(), {"type": "tool"}),
        (None, "required"),
        (function(), allowed("required", "g")),
        (function(), allowed("sometimes", "f")),
        (function(), allowed("auto")),
        (function(), {"type": "allowed_tools", "allowed_tools": 5}),
        ([], {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_bad_tools_are_refused(tools, choice):
    with pytest.raises(RequestError, match="tool"):
        plan_tools(tools, choice, None, "hermes")


def test_bad_tools_are_a_400_of_the_right_field(client):
    broken = function(parameters={"type": "object", "properties": {"a": {"type": "nothing"}}})
    for options in (
        {"tools": function(name="a b")},
        {"tools": function(), "tool_choice": "x"},
        {"tools": broken, "tool_choice": "required"},
    ):
        with pytest.raises(openai.BadRequestError):
            ask(client, **options)


def test_a_model_without_a_parser_refuses_auto_alone():
    with pytest.raises(RequestError, match="tool-call-parser"):
        plan_tools(function(), None, None, "none")
    for choice in ("required", "none", {"type": "function", "function": {"name": "f"}}):
        plan_tools(function(), choice, None, "none")


def test_schemas_of_required_calls_keep_their_references():
    plan = plan_tools([TOOL, OTHER], "required", False, "none")
    schema = plan.structured.json
    assert schema["maxItems"] == 1
    assert schema["$defs"]["weather"]["properties"]["city"] == {"$ref": "#/$defs/weather/$defs/City"}
    params = SamplingParams()
    plan.constrain(params, "none", "none", {})
    check(params.structured_outputs)


def test_a_call_whose_arguments_are_no_json_comes_back_as_text(served, client):
    served.say("I try again.")
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Par'}}
    result = {"role": "tool", "tool_call_id": "c", "content": "the arguments are not JSON"}
    answer = ask(
        client,
        messages=[{"role": "user", "content": "hello"}, {"role": "assistant", "tool_calls": [call]}, result],
    )
    assert answer.choices[0].message.content == "I try again."
    assert r'<tool_call>weather"{\"city\": \"Par"</tool_call><tool>the arguments' in served.last_prompt()
    item = {"type": "function_call", "call_id": "c", **call["function"]}
    response = client.responses.create(model="tiny", input=[{"role": "user", "content": "hello"}, item])
    assert response.output_text == "I try again." and r'weather"{\"city' in served.last_prompt()


def test_a_schema_with_an_address_of_its_own_keeps_its_references():
    schema = {
        **SCHEMA,
        "$id": "https://x.example/weather",
        "$schema": "http://json-schema.org/draft-07/schema#",
    }
    plan = plan_tools(
        [{"type": "function", "function": {"name": "weather", "parameters": schema}}],
        "required",
        None,
        "hermes",
    )
    matcher = LLMatcher(BYTES, grammar_of(plan.structured))
    good = CALL.encode()
    assert matcher.try_consume_tokens(list(good)) == len(good)
    assert LLMatcher(BYTES, grammar_of(plan.structured)).try_consume_tokens(
        list(good.replace(b"Rome", b"Oslo"))
    ) < len(good)


def test_values_that_look_like_references_and_anchors_stay_as_they_are_in_required_calls():
    parameters = {
        "type": "object",
        "properties": {"const": {"$ref": "#/$defs/N"}, "a": {"const": {"$ref": "#/x"}}, "b": {"$ref": "#N"}},
        "$defs": {"N": {"$anchor": "N", "type": "integer"}},
    }
    plan = plan_tools(
        [{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required", None, "none"
    )
    schema = plan.structured.json["$defs"]["f"]
    assert schema["properties"] == {
        "const": {"$ref": "#/$defs/f/$defs/N"},
        "a": {"const": {"$ref": "#/x"}},
        "b": {"$ref": "#N"},
    }
    check(plan.structured)


@pytest.mark.parametrize(
    "template, tools, reasoning",
    [
        ("{{ x }}<tool_call>{{ y }}</tool_call> ... <think>", "hermes", "qwen3"),
        ("<|python_tag|>", "llama3_json", "none"),
        ("role == 'ipython'", "llama3_json", "none"),
        ("plain", "hermes", "none"),
        (None, "hermes", "none"),
    ],
)
def test_parsers_are_chosen_by_the_template(template, tools, reasoning):
    assert choose_tool_call_parser("auto", template) == tools
    assert choose_reasoning_parser("auto", template) == reasoning
    assert choose_tool_call_parser("none", template) == "none" == choose_reasoning_parser("none", template)


def can_write(text, params):
    """Returns True if the request's grammar accepts this answer."""
    matcher = LLMatcher(BYTES, grammar_of(params.structured_outputs), log_level=0)
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


PERSON = {
    "type": "json_schema",
    "json_schema": {"name": "p", "schema": {"type": "object", "properties": {"age": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("form", [PERSON, {"type": "json_object"}], ids=["schema", "object"])
def test_beside_a_format_an_answer_is_a_call_or_in_the_format(served, client, form):
    served.say(CALL)
    choice = ask(client, tools=[TOOL, OTHER], response_format=form).choices[0]
    assert shape(choice.message.tool_calls) == [("weather", '{"city": "Rome"}')]
    assert choice.finish_reason == "tool_calls"
    params = served.last_request().params
    for text in (CALL, NOW, f"{CALL}\n{NOW}", '{"age": 3}', "{}"):
        assert can_write(text, params), text
    for text in (
        "Hello",
        CALL.replace("Rome", "Oslo"),
        CALL.replace('"}}', '", "z": 1}}'),
        CALL + "{}",
        CALL.replace("weather", "other"),
    ):
        assert not can_write(text, params), text
    served.say('{"age": 3}')
    choice = ask(client, tools=[TOOL], response_format=form, parallel_tool_calls=False).choices[0]
    assert choice.message.content == '{"age": 3}'
    assert not choice.message.tool_calls
    assert choice.finish_reason == "stop"
    assert can_write(CALL, served.last_request().params)
    assert not can_write(f"{CALL}\n{CALL}", served.last_request().params)


def test_beside_a_format_a_choice_of_calls_wins_and_none_leaves_the_format(served, client):
    served.say(CALL)
    assert ask(client, tools=[TOOL], tool_choice=NAMED, response_format=PERSON).choices[0].message.tool_calls
    assert can_write(CALL, served.last_request().params)
    ask(client, tools=[TOOL], tool_choice="required", response_format=PERSON)
    assert can_write(CALL, served.last_request().params)
    ask(client, tools=[TOOL], tool_choice="none", response_format=PERSON)
    assert can_write('{"age": 3}', served.last_request().params)
    assert not can_write(CALL, served.last_request().params)
    ask(client, tools=[TOOL], extra_body={"structured_outputs": {"regex": "[ab]+"}})
    assert can_write("abba", served.last_request().params)
    assert not can_write(CALL, served.last_request().params)


def test_a_newline_after_the_last_call_does_not_force_another_one():
    """Regression: a small model ended its line, and then had to repeat its call."""
    for parallel in (None, False):
        params = SamplingParams()
        plan_tools([TOOL, OTHER], "required", parallel, "hermes").constrain(params, "hermes", "none", {})
        assert can_write(CALL, params)
        assert can_write(f"{CALL}\n\n", params) == can_write(f"{CALL}\n{NOW}", params) == (parallel is None)
        assert not can_write(f"{CALL}\n\n\n", params)


def test_beside_a_format_llamas_calls_may_be_written():
    text = json.dumps(PERSON["json_schema"]["schema"])
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=text))
    plan_tools([TOOL, OTHER], None, None, "llama3_json").constrain(params, "llama3_json", "none", {})
    call = '{"name": "weather", "parameters": {"city": "Rome"}}'
    assert can_write(call, params)
    assert can_write(f"{call}; {call}", params)
    assert can_write('{"age": 3}', params)
    assert not can_write(CALL, params) and not can_write(f"{call}{call}", params)


def test_arguments_are_closed_unless_their_schema_says_otherwise(served, client):
    served.say('{"a": 1}')
    for parameters, may_grow in (
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, False),
        ({"type": "object"}, True),
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}, True),
    ):
        wrapped = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            ask(client, tools=function(parameters=parameters), tool_choice=choice)
            params = served.last_request().params
            assert can_write(wrapped % '{"a": 1}', params)
            assert can_write(wrapped % '{"a": 1, "z": 2}', params) == may_grow


def test_allowed_tools_are_all_shown_and_only_some_may_be_called(served, client):
    served.say(NOW)
    choice = ask(client, tools=[TOOL, OTHER], tool_choice=allowed("required", "now")).choices[0]
    assert shape(choice.message.tool_calls) == [("now", "{}")] and '"weather"' in served.last_prompt()
    assert not can_write(CALL, served.last_request().params)
    served.say(f"{CALL}\n{NOW}")
    message = ask(client, tools=[TOOL, OTHER], tool_choice=allowed("auto", "now")).choices[0].message
    assert message.content == CALL
    assert shape(message.tool_calls) == [("now", "{}")]
    assert '"weather"' in served.last_prompt()
    content, _, calls, _ = streamed(client, tools=[TOOL, OTHER], tool_choice=allowed("auto", "now"))
    assert content == CALL and calls == [("now", "{}")]
    ask(client, tools=[TOOL, OTHER], tool_choice=allowed("auto", "now"), response_format=PERSON)
    assert can_write(NOW, served.last_request().params) and not can_write(CALL, served.last_request().params)
    with pytest.raises(openai.BadRequestError, match="elsewhere"):
        ask(client, tools=[TOOL, OTHER], tool_choice=allowed("auto", "now", "elsewhere"))


def test_older_functions_are_tools_and_their_call_is_in_the_older_shape(served, client):
    served.say("I ask." + CALL)
    functions = [TOOL["function"], OTHER["function"]]
    choice = ask(client, functions=functions).choices[0]
    found = choice.message.function_call
    assert (found.name, found.arguments) == ("weather", '{"city": "Rome"}')
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.content == "I ask."
    chunks = [chunk.choices[0] for chunk in ask(client, functions=functions, stream=True)]
    calls = [c.delta.function_call for c in chunks if c.delta.function_call]
    assert calls[0].name == "weather" and "".join(c.arguments for c in calls) == '{"city": "Rome"}'
    assert chunks[-1].finish_reason == "function_call"
    served.say(CALL)
    assert (
        ask(client, functions=functions, function_call={"name": "weather"})
        .choices[0]
        .message.function_call.name
        == "weather"
    )
    assert ask(client, functions=functions, function_call="none").choices[0].message.content == CALL
    ask(
        client,
        messages=[
            {"role": "user", "content": "hello"},
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'},
            },
            {"role": "function", "name": "weather", "content": "sunny"},
        ],
    )
    assert served.last_prompt().startswith(
        '<user>hello<assistant><tool_call>weather{"city": "Rome"}</tool_call><tool>sunny<assistant>'
    )
    with pytest.raises(openai.BadRequestError, match="functions"):
        ask(client, functions=functions, tools=[TOOL])


@pytest.mark.parametrize(
    "parser, call, response",
    [
        (
            "hermes",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
            "<tool_response>\nsunny\n</tool_response>",
        ),
        (
            "llama3_json",
            '{"name": "weather", "parameters": {"city": "Rome"}}',
            "<tool_response>\nsunny\n</tool_response>",
        ),
        (
            "granite",
            '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]',
            "<tool_response>\nsunny\n</tool_response>",
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]',
            "<tool_response>\nsunny\n</tool_response>",
        ),
        (
            "qwen3_coder",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
            "<tool_response>\nsunny\n</tool_response>",
        ),
    ],
)
def test_a_template_without_a_place_for_tools_has_them_in_the_parsers_format(parser, call, response, caplog):
    byte_tokenizer.cache_clear()  # the warning comes once a tokenizer
    with tool_server(
        model={"tool_call_parser": parser, "reasoning_parser": "none", "tokenizer": byte_tokenizer()}
    ) as served:
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=60)
        served.say(call)
        for _ in range(2):
            found = shape(ask(client, tools=[TOOL]).choices[0].message.tool_calls)
            assert found == [("weather", '{"city": "Rome"}')]
        prompt = served.last_prompt()
        assert prompt.startswith("<system>")
        assert json.dumps(TOOL) in prompt
        assert prompt.endswith("<user>hello<assistant>")
        assert sum("no place for tools" in record.message for record in caplog.records) == 1
        asked = {
            "id": "1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
        }
        ask(
            client,
            tools=[TOOL],
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "I ask.", "tool_calls": [asked, asked]},
                {"role": "tool", "tool_call_id": "1", "content": "sunny"},
                {"role": "tool", "tool_call_id": "1", "content": "sunny"},
                {"role": "user", "content": "So?"},
            ],
        )
        prompt = served.last_prompt()
        assert prompt.startswith("<system>Be brief.\n\n") and json.dumps(TOOL) in prompt
        assert prompt.endswith(
            f"<user>hello<assistant>I ask.\n{call}\n{call}<user>{response}\n{response}\n\nSo?<assistant>"
        )
    byte_tokenizer.cache_clear()


def test_llamas_format_is_read_too():
    with tool_server(model={"tool_call_parser": "llama3_json", "reasoning_parser": "none"}) as served:
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=60)
        served.say('{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}')
        expected = [("weather", '{"city": "Paris"}'), ("now", "{}")]
        assert streamed(client, tools=[TOOL, OTHER]) == ("", "", expected, "tool_calls")
        served.say(json.dumps({"name": "Bob", "age": 3}))
        assert streamed(client, tools=[TOOL, OTHER]) == (
            json.dumps({"name": "Bob", "age": 3}),
            "",
            [],
            "stop",
        )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_description_without_room_is_left_out_of_a_call_that_a_grammar_makes(path, caplog):
    """The tiny model's template has no place for tools, and its tokens are bytes."""
    function = {"name": "pick", "description": "picks", "parameters": {"type": "object", "properties": {}}}
    bodies = {
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 5,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
        },
        "/v1/responses": {
            "input": "a",
            "max_output_tokens": 5,
            "tools": [{"type": "function", **function}],
            "tool_choice": "required",
        },
        "/v1/messages": {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 5,
            "tool_choice": {"type": "any"},
            "tools": [{"name": "pick", "input_schema": function["parameters"]}],
        },
    }
    with FakeServer(model={"tool_call_parser": "hermes"}) as server:
        assert server.json(path, bodies[path])[0] == 200
        assert "pick" not in server.last_prompt() and "it is left out" in caplog.text
        if path == "/v1/chat/completions":
            code, answer = server.json(path, {**bodies[path], "tool_choice": "auto"})
            assert code == 400 and "maximum context length" in answer["error"]["message"]


def test_parts_that_are_no_text_end_no_conversation(served, client):
    """Regression: a picture in a tool's result, a refusal and thoughts in an earlier answer were refused."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    served.say("Hello")
    user = {"role": "user", "content": "hello"}
    ask(
        client,
        messages=[
            user,
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}]},
            user,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}, picture]},
        ],
    )
    assert "never" in served.last_prompt() and "image_url left out" in served.last_prompt()
    with pytest.raises(openai.BadRequestError, match="content"):
        ask(client, messages=[{"role": "user", "content": [picture]}])


def test_tools_of_other_types_are_left_out_of_a_chat(served, caplog):
    """Regression: a custom tool in a chat was a 400 for the whole request."""
    custom = {"type": "custom", "custom": {"name": "apply_patch", "format": {"type": "text"}}}
    served.say("Hello")
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [custom, {"type": "web_search"}]}
    status, found = served.json("/v1/chat/completions", body)
    assert status == 200 and found["choices"][0]["message"]["content"] == "Hello"
    assert [m for m in caplog.messages if "no tools of the type 'custom'" in m]
    choice = {"type": "function", "function": {"name": "apply_patch"}}
    status, found = served.json("/v1/chat/completions", {**body, "tool_choice": choice})
    assert status == 400 and "must name a tool of this server" in found["error"]["message"]


def test_arguments_that_are_no_object_come_back_in_all_apis(served):
    """Regression: what a model wrote wrongly ended its conversation."""
    for given in ([1], 5, "half {", None):
        served.say("Hello")
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
        chat = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "4"},
        ]
        assert served.json("/v1/chat/completions", {"messages": chat})[0] == 200
        del call["id"]
        assert served.json("/api/chat", {"messages": chat, "stream": False})[0] == 200
        blocks = [{"type": "tool_use", "id": "c", "name": "f", "input": given}]
        result = [{"type": "tool_result", "tool_use_id": "c", "content": "4"}]
        turns = [chat[0], {"role": "assistant", "content": blocks}, {"role": "user", "content": result}]
        assert served.json("/v1/messages", {"max_tokens": 9, "messages": turns})[0] == 200
        if given is not None:
            item = {
                "type": "function_call",
                "call_id": "c",
                "name": "f",
                "arguments": given if given != 5 else "5",
            }
            told = {"type": "function_call_output", "call_id": "c", "output": "4"}
            assert served.json("/v1/responses", {"input": [chat[0], item, told]})[0] == 200


def test_text_files_are_read(served):
    """Regression: a file with text was refused as a medium."""
    data = "data:text/plain;base64," + base64.b64encode(b"hear, hear").decode()
    for path, content in (
        ("/v1/chat/completions", {"type": "file", "file": {"filename": "a.txt", "file_data": data}}),
        ("/v1/responses", {"type": "input_file", "filename": "a.txt", "file_data": data}),
    ):
        served.say("Hello")
        turns = [{"role": "user", "content": [content]}]
        body = {"input": turns} if "responses" in path else {"messages": turns}
        assert served.json(path, body)[0] == 200 and "a.txt\nhear, hear" in served.last_prompt()
    source = {"type": "base64", "media_type": "text/markdown", "data": data.partition(",")[2]}
    turns = [{"role": "user", "content": [{"type": "document", "title": "a.md", "source": source}]}]
    served.say("Hello")
    assert served.json("/v1/messages", {"max_tokens": 5, "messages": turns})[0] == 200
    assert "a.md\nhear, hear" in served.last_prompt()
    picture = {"type": "file", "file": {"filename": "a.png", "file_data": "data:image/png;base64,AAAA"}}
    body = {"messages": [{"role": "user", "content": [picture]}]}
    assert served.json("/v1/chat/completions", body)[0] == 400


def test_the_models_own_penalty_spares_answers_that_a_grammar_shapes():
    """Regression: with the default model's penalty a call that was required was followed by others that made
    no sense, as the sign that ends the list had been written before."""
    penalty = {"repetition_penalty": 1.1}
    with tool_server(model={"generation_config": penalty}) as served:
        user, schema = [{"role": "user", "content": "a"}], {"type": "object", "properties": {}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        chat, form = (
            {"messages": user, "max_tokens": 2},
            {"type": "json_schema", "json_schema": {"schema": schema}},
        )
        for path, body, expected in (
            ("/v1/chat/completions", chat, 1.1),
            ("/v1/chat/completions", {**chat, "tools": [tool]}, 1.1),
            ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "required"}, 1.0),
            ("/v1/chat/completions", {**chat, "response_format": form}, 1.0),
            ("/v1/chat/completions", {**chat, "response_format": form, "repetition_penalty": 1.2}, 1.2),
            (
                "/v1/completions",
                {"prompt": "a", "max_tokens": 2, "structured_outputs": {"json": schema}},
                1.0,
            ),
            (
                "/v1/responses",
                {"input": "a", "text": {"format": {**form["json_schema"], "type": "json_schema"}}},
                1.0,
            ),
            (
                "/v1/messages",
                {**chat, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
                1.0,
            ),
            ("/api/chat", {"messages": user, "stream": False, "format": "json"}, 1.0),
            ("/api/generate", {"prompt": "a", "stream": False, "format": "json"}, 1.0),
            (
                "/api/generate",
                {"prompt": "a", "stream": False, "format": "json", "options": {"repeat_penalty": 1.3}},
                1.3,
            ),
        ):
            served.say("{}")
            status, found = served.json(path, body)
            assert served.last_request().params.repetition_penalty == expected, (path, body, status, found)


def test_files_without_a_type_are_text_if_their_bytes_are(served):
    """Regression: source files without a type were refused, and a data URL without base64 lost its text."""
    packed = base64.b64encode(b"hear, hear").decode()
    for data in (packed, f"data:application/octet-stream;base64,{packed}", "data:text/x-python,hear,%20hear"):
        served.say("Hello")
        part = {"type": "file", "file": {"filename": "a.py", "file_data": data}}
        body = {"messages": [{"role": "user", "content": [part]}]}
        assert served.json("/v1/chat/completions", body)[0] == 200
        assert "a.py\nhear, hear" in served.last_prompt()
    for raw in (b"%PDF-1.7", b"\xff\xfe", b"a\0b"):
        part["file"]["file_data"] = base64.b64encode(raw).decode()
        status, error = served.json("/v1/chat/completions", body)
        assert status == 400 and error["error"]["param"] == "messages[0].content"


def test_a_call_of_a_custom_tool_comes_back_in_a_chat_and_is_counted(served):
    """Regression: a conversation that another server had begun with such a tool was refused."""
    call = {"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": "text"}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    messages = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": None,
            "reasoning_content": "hm",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c", "content": [picture]},
    ]
    served.say("Hello")
    assert served.json("/v1/chat/completions", {"messages": messages})[0] == 200
    assert '<tool_call>apply_patch{"input": "text"}' in served.last_prompt() and "hm" in served.last_prompt()
    status, found = served.json("/tokenize", {"messages": messages})
    assert status == 200 and found["tokens"] == served.last_request().prompt_token_ids


def test_null_fields_of_a_tool_are_absent_from_the_prompt_and_nulls_of_its_schema_stay(served):
    """Regression: templates wrote `"description": null`, and a null type was a 400."""
    schema = {"type": "object", "properties": {"x": {"default": None}}}
    function = {"name": "f", "description": None, "strict": None, "parameters": schema}
    served.say("Hello")
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": None, "function": function}]}
    assert served.json("/v1/chat/completions", body)[0] == 200
    written = served.last_prompt().partition("<tools>")[2].partition("</tools>")[0]
    assert json.loads(written) == [{"function": {"name": "f", "parameters": schema}}]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("data:text/plain;base64,77u/SGk=", "Hi"),
        ("data:text/plain;base64,SG\r\nk", "Hi"),
        ("DATA:Text/Plain;Charset=UTF-8;Base64,SGk=", "Hi"),
        ('data:text/plain;charset="iso-8859-1";base64,6Q==', "é"),
        ("data:application/ld+json,%7B%7D", "{}"),
    ],
    ids=["byte order mark", "broken lines, no padding", "capitals", "charset", "JSON of a kind"],
)
def test_text_files_are_read_however_their_url_is_written(given, text):
    """Regression: such files were refused, and a byte order mark became part of the prompt."""
    message = {"role": "user", "content": [{"type": "file", "file": {"file_data": given}}]}
    with tool_server() as served:
        status, _ = served.json("/v1/chat/completions", {"messages": [message], "max_tokens": 1})
        assert status == 200
        assert served.last_prompt() == f"<user>{text}<assistant>"


def test_a_text_file_of_an_unknown_charset_is_refused():
    part = {"type": "file", "file": {"file_data": "data:text/plain;charset=punycode,a"}}
    with tool_server() as served:
        status, _ = served.json("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert status == 400


def test_a_stream_that_has_begun_a_broken_call_does_not_ask_for_it(served):
    """Regression: such a stream ended with tool_calls and arguments that clients could not parse."""
    served.say('<tool_call>{"name": "weather", "arguments": {"city": "Rome",, "zebra": 1}}</tool_call> Done.')
    user, function = [{"role": "user", "content": "a"}], TOOL["function"]
    schema = {"name": "weather", "input_schema": SCHEMA}
    bodies = {
        "/v1/chat/completions": {"messages": user, "tools": [TOOL]},
        "/v1/responses": {"input": "a", "tools": [{"type": "function", **function}]},
        "/v1/messages": {"messages": user, "tools": [schema], "max_tokens": 300},
        "/api/chat": {"messages": user, "tools": [TOOL]},
    }
    ends = {
        "/v1/chat/completions": '"finish_reason":"stop"',
        "/v1/responses": '"status":"incomplete"',
        "/v1/messages": '"stop_reason":"end_turn"',
        "/api/chat": '"done":true',
    }
    for path, body in bodies.items():
        status, _, text = served.request(path, {**body, "stream": True})
        assert status == 200 and ends[path] in text, (path, text)
        assert '"stop_reason":"tool_use"' not in text
    assert '"tool_calls"' not in text
    assert "zebra" in "".join(json.loads(line)["message"]["content"] for line in text.splitlines())
