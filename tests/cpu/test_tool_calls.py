"""Tools and reasoning of chat completions as OpenAI's client sees them, over a fake engine; and what a request's tools come to."""

import json

import openai
import pytest

from shoal.api import SamplingParams
from shoal.errors import RequestError
from shoal.server.tools import choose_reasoning_parser, choose_tool_call_parser, plan_tools
from shoal.structured import check
from tests.fake_server import tool_server

SCHEMA = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"], "additionalProperties": False,
          "$defs": {"City": {"enum": ["Paris", "Rome"]}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "tells", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "now"}}
CALLS = ('I ask.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
         '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
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
    assert choice.message.content == "I ask." and shape(choice.message.tool_calls) == expected and choice.finish_reason == "tool_calls"
    assert not served.last_request().params.skip_special_tokens
    assert streamed(client, tools=[TOOL, OTHER]) == ("I ask.", "", expected, "tool_calls")
    assert shape(ask(client, tools=[TOOL, OTHER], parallel_tool_calls=False).choices[0].message.tool_calls) == expected[:1]


def test_the_clients_own_stream_helper_understands(served, client):
    served.say(CALLS)
    with client.chat.completions.stream(model="tiny", messages=[{"role": "user", "content": "hello"}], tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    assert shape(final.choices[0].message.tool_calls) == [("weather", '{"city": "Paris"}'), ("now", "{}")]


def test_no_tools_or_none_chosen_leaves_the_text_alone(served, client):
    served.say(CALLS)
    for options in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = ask(client, **options).choices[0]
        assert choice.message.content == CALLS and choice.finish_reason == "stop" and "weather" not in served.last_prompt()


def test_an_answer_cut_within_a_call_says_length(served, client):
    served.say(CALLS)
    choice = ask(client, tools=[TOOL], max_tokens=63).choices[0]
    assert choice.finish_reason == "length" and shape(choice.message.tool_calls) == [("weather", '{"city": "P')]


def test_a_named_tool_is_enforced_and_its_text_is_the_arguments(served, client):
    served.say('{"city": "Rome"}')
    choice = ask(client, tools=[TOOL], tool_choice=NAMED).choices[0]
    assert shape(choice.message.tool_calls) == [("weather", '{"city": "Rome"}')] and choice.finish_reason == "stop"
    assert choice.message.content is None
    assert served.last_request().params.structured_outputs.json == SCHEMA
    assert streamed(client, tools=[TOOL], tool_choice=NAMED) == ("", "", [("weather", '{"city": "Rome"}')], "stop")


def test_required_calls_are_a_list_by_schema(served, client):
    served.say('[{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "now", "parameters": {}}]')
    expected = [("weather", '{"city": "Rome"}'), ("now", "{}")]
    choice = ask(client, tools=[TOOL, OTHER], tool_choice="required").choices[0]
    assert shape(choice.message.tool_calls) == expected and choice.finish_reason == "tool_calls"
    assert streamed(client, tools=[TOOL, OTHER], tool_choice="required") == ("", "", expected, "tool_calls")
    check(served.last_request().params.structured_outputs)
    assert "<think>\n\n</think>" in served.last_prompt()      # a grammar leaves no room for thoughts


def test_thoughts_come_first_and_calls_after(served, client):
    served.say("<think>\nHm.\n</think>\n\n" + CALLS)
    message = ask(client, tools=[TOOL]).choices[0].message
    assert message.reasoning_content == "Hm." == message.reasoning and message.content == "I ask." and len(message.tool_calls) == 2
    content, reasoning, calls, reason = streamed(client, tools=[TOOL])
    assert (content, reasoning, len(calls), reason) == ("I ask.", "Hm.", 2, "tool_calls")
    message = ask(client, tools=[TOOL], extra_body={"include_reasoning": False}).choices[0].message
    assert message.content == "I ask." and not hasattr(message, "reasoning_content")


def test_a_prompt_that_opens_the_thoughts_is_known(served, client):
    served.say("Hm.</think>Yes.")
    served.model.tokenizer.chat_templates["open"] = "{{ messages[0].content }}<think>\n"
    message = ask(client, extra_body={"chat_template": "open"}).choices[0].message
    assert message.content == "Yes." and message.reasoning_content == "Hm."


def test_effort_none_and_template_variables_switch_thoughts_off(served, client):
    served.say("Yes.")
    for options in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        assert ask(client, **options).choices[0].message.content == "Yes." and served.last_prompt().endswith("<think>\n\n</think>\n\n")


def test_a_conversation_with_calls_and_thoughts_comes_back(served, client):
    served.say("It is sunny.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    for name in ("reasoning", "reasoning_content"):
        ask(client, messages=[{"role": "user", "content": "hello"}, {"role": "assistant", name: "Hm.", "tool_calls": [call]},
                              {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}])
        assert served.last_prompt() == ('<user>hello<assistant>(thought: Hm.)<tool_call>weather{"city": "Paris"}</tool_call>'
                                        '<tool>sunny<assistant>')


def function(**fields):
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize("tools, choice", [
    ([{"type": "web_search"}], None), ([{"type": "function"}], None), (function(name="a b"), None), (function(name=None), None),
    (function(name=""), None), (function() * 2, None), (function(parameters=[]), None), (function(parameters={"type": "string"}), None),
    (function(description=3), None), (function(), "sometimes"), (function(), {"type": "function", "function": {"name": "g"}}),
    (function(), {"type": "tool"}), (None, "required"), ([], {"type": "function", "function": {"name": "f"}}),
])
def test_bad_tools_are_refused(tools, choice):
    with pytest.raises(RequestError, match="tool"):
        plan_tools(tools, choice, None, "hermes")


def test_bad_tools_are_a_400_of_the_right_field(client):
    broken = function(parameters={"type": "object", "properties": {"a": {"type": "nothing"}}})
    for options in ({"tools": function(name="a b")}, {"tools": function(), "tool_choice": "x"},
                    {"tools": broken, "tool_choice": "required"},
                    {"tools": function(), "tool_choice": "required", "response_format": {"type": "json_object"}}):
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
    assert schema["maxItems"] == 1 and schema["$defs"]["weather"]["properties"]["city"] == {"$ref": "#/$defs/weather/$defs/City"}
    params = SamplingParams()
    plan.constrain(params)
    check(params.structured_outputs)
    with pytest.raises(RequestError, match="tool_choice"):
        plan.constrain(params)


@pytest.mark.parametrize("template, tools, reasoning", [
    ("{{ x }}<tool_call>{{ y }}</tool_call> ... <think>", "hermes", "qwen3"), ("<|python_tag|>", "llama3_json", "none"),
    ("role == 'ipython'", "llama3_json", "none"), ("plain", "hermes", "none"), (None, "hermes", "none"),
])
def test_parsers_are_chosen_by_the_template(template, tools, reasoning):
    assert choose_tool_call_parser("auto", template) == tools and choose_reasoning_parser("auto", template) == reasoning
    assert choose_tool_call_parser("none", template) == "none" == choose_reasoning_parser("none", template)


def test_llamas_format_is_read_too():
    with tool_server(model={"tool_call_parser": "llama3_json", "reasoning_parser": "none"}) as served:
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=60)
        served.say('{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}')
        expected = [("weather", '{"city": "Paris"}'), ("now", "{}")]
        assert streamed(client, tools=[TOOL, OTHER]) == ("", "", expected, "tool_calls")
        served.say(json.dumps({"name": "Bob", "age": 3}))
        assert streamed(client, tools=[TOOL, OTHER]) == (json.dumps({"name": "Bob", "age": 3}), "", [], "stop")
