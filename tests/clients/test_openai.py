"""openai's client with the habits of agents and SDKs that build on it."""

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field, SecretStr

pytestmark = pytest.mark.slow
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
FLAT = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("get_weather", "book_flight")
]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)


def test_models_are_parsed(client, model):
    king = [{"role": "user", "content": "An old king."}]
    answer = client.chat.completions.parse(model=model, messages=king, response_format=Person, max_tokens=100)
    assert isinstance(answer.choices[0].message.parsed, Person)
    answer = client.responses.parse(model=model, input=king, text_format=Person, max_output_tokens=100)
    assert isinstance(answer.output_parsed, Person)


def test_hosted_tools_beside_functions(client, model):
    answer = client.responses.create(
        model=model, input="Hello", tools=[FLAT, {"type": "web_search"}], max_output_tokens=16
    )
    assert answer.output


def test_allowed_tools(client, model):
    only = {"type": "function", "function": {"name": "get_weather"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [only]}}
    answer = client.chat.completions.create(
        model=model, messages=ASK, tools=TOOLS, tool_choice=choice, max_tokens=200, temperature=0
    )
    calls = answer.choices[0].message.tool_calls
    assert {call.function.name for call in calls} == {"get_weather"}
    assert set(json.loads(calls[0].function.arguments)) == {"city"}


def test_a_fixed_max_tokens_beyond_the_context_is_cut(client, model):
    answer = client.chat.completions.create(model=model, messages=ASK, max_completion_tokens=8192, stop=["."])
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_a_streamed_chat_is_put_together(client, model):
    with client.chat.completions.stream(
        model=model, messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=200, temperature=0
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments).keys() == {"city"}


def test_a_model_with_formats_that_only_pydantic_knows_is_answered(client, model):
    class Login(BaseModel):
        user: Literal["anna", "bob"]
        secret: SecretStr = Field(max_length=5)  # {"format": "password"}
        avatar: bytes = Field(max_length=5)  # {"format": "binary"}

    answer = client.chat.completions.parse(
        model=model, messages=ASK, response_format=Login, temperature=0, max_tokens=100
    )
    assert answer.choices[0].message.parsed.user in ("anna", "bob")


def test_a_stored_response_is_continued(client, model):
    first = client.responses.create(model=model, input="Hello", store=True, max_output_tokens=16)
    assert first.output_text and first.store is True
    second = client.responses.create(
        model=model, input="And now?", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.output_text and second.usage.input_tokens > first.usage.input_tokens
