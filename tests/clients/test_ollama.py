"""ollama's own client."""

import asyncio

import ollama
import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow
ASK = [{"role": "user", "content": "What is the capital of France?"}]
BRIEF = {"temperature": 0, "num_predict": 12}


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The name of the city
    """
    return f"It is sunny in {city}."


@pytest.fixture(scope="module")
def client(url):
    return ollama.Client(host=url)


def test_chat_and_its_stream(client, model):
    answer = client.chat(model, ASK, options=BRIEF)
    assert answer.message.content and answer.done and answer.eval_count <= 12 and answer.prompt_eval_count > 0
    parts = list(client.chat(model, ASK, options=BRIEF, stream=True))
    assert "".join(part.message.content for part in parts) == answer.message.content and len(parts) > 2
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_generate_and_its_stream(client, model):
    answer = client.generate(model, "Once upon a time", options=BRIEF)
    assert answer.response and answer.done_reason in ("stop", "length") and answer.total_duration > 0
    parts = list(client.generate(model, "Once upon a time", options=BRIEF, stream=True))
    assert "".join(part.response for part in parts) == answer.response
    raw = client.generate(model, "The capital of France is", raw=True, options=BRIEF)
    assert raw.response


def test_a_system_message_and_stop_strings(client, model):
    answer = client.generate(
        model, "Count: one two three", system="You count.", options=BRIEF | {"stop": ["e"]}
    )
    assert "e" not in answer.response


def test_a_format_holds(client, model):
    options = {"temperature": 0, "num_predict": 100}
    answer = client.chat(
        model,
        [{"role": "user", "content": "An old king."}],
        format=Person.model_json_schema(),
        options=options,
    )
    assert isinstance(Person.model_validate_json(answer.message.content), Person)
    answer = client.generate(model, "An old king.", format=Person.model_json_schema(), options=options)
    assert isinstance(Person.model_validate_json(answer.response), Person)


def test_tools_are_offered(client, model):
    answer = client.chat(
        model,
        [{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[get_weather],
        options={"temperature": 0, "num_predict": 60},
    )
    assert answer.message.content or answer.message.tool_calls
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    told = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
    ]
    assert client.chat(model, told, tools=[get_weather], options=BRIEF).message.role == "assistant"


def test_models_are_listed_and_shown(client, model):
    [found] = client.list().models
    assert found.model.split(":")[0] == model
    shown = client.show(found.model)
    assert shown.details.family and "completion" in shown.capabilities
    assert client.chat(found.model, ASK, options=BRIEF).message.content
    assert [running.model for running in client.ps().models] == [found.model]


def test_embeddings(client, model):
    found = client.embed(model, ["one", "two"])
    assert [len(embedding) for embedding in found.embeddings] == [576, 576]


def test_asyncio(url, model):
    async def ask():
        return [
            part.message.content
            async for part in await ollama.AsyncClient(host=url).chat(model, ASK, options=BRIEF, stream=True)
        ]

    assert "".join(asyncio.run(ask()))


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(ollama.ResponseError) as error:
        client.chat("no-such-model", ASK)
    assert error.value.status_code == 404 and "no-such-model" in error.value.error
