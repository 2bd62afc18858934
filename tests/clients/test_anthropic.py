"""anthropic's client with the habits of an agent: a fixed max_tokens, cached blocks, tools, counting."""

import anthropic
import pytest

pytestmark = pytest.mark.slow
SYSTEM = [{"type": "text", "text": "You are an agent. Be brief.", "cache_control": {"type": "ephemeral"}}]
ASK = [{"role": "user", "content": [{"type": "text", "text": "What is the weather in Paris?"}]}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "The weather in a city", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def client(url):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)


def test_a_fixed_max_tokens_beyond_the_context_is_cut(client, model):
    with client.messages.stream(
        model=model, max_tokens=32000, system=SYSTEM, messages=ASK, stop_sequences=[".", "\n"]
    ) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens > 0 and "." not in text


def test_a_tool_is_called_streamed_and_answered(client, model):
    asked = {
        "model": model,
        "max_tokens": 200,
        "system": SYSTEM,
        "tools": [TOOL],
        "extra_body": {"temperature": 0},
    }
    with client.messages.stream(messages=ASK, tool_choice={"type": "any"}, **asked) as stream:
        answer = stream.get_final_message()
    assert answer.stop_reason == "tool_use"
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert {call.name for call in calls} == {"get_weather"} and set(calls[0].input) == {"city"}
    told = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
    messages = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": told}]
    assert client.messages.create(messages=messages, **asked | {"max_tokens": 16}).role == "assistant"


def test_tokens_are_counted_as_they_are_used(client, model):
    counted = client.messages.count_tokens(model=model, system=SYSTEM, messages=ASK).input_tokens
    used = client.messages.create(model=model, system=SYSTEM, messages=ASK, max_tokens=1).usage
    assert counted == used.input_tokens + (used.cache_read_input_tokens or 0)
