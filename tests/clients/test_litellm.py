"""litellm through three of its providers."""

import json

import litellm
import pytest

# Its own models and pydantic disagree about fields, which is not ours to hear.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning"),
]
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city", "parameters": PARAMETERS},
}
TOOL_CHOOSERS = ["openai", "hosted_vllm", "anthropic"]  # Ollama's API has no tool_choice
BASES = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": "", "ollama_chat": ""}


@pytest.fixture(params=BASES)
def complete(request, url, model):
    def call(messages=ASK, **options):
        return litellm.completion(
            f"{request.param}/{model}",
            messages,
            api_base=url + BASES[request.param],
            api_key="none",
            timeout=120,
            num_retries=0,
            **{"temperature": 0, "max_tokens": 16} | options,
        )

    return call


def test_it_answers_and_streams_the_same(complete):
    answer = complete()
    assert answer.choices[0].message.content and answer.usage.completion_tokens <= 16
    parts = list(complete(stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        == answer.choices[0].message.content
    )
    assert [part.choices[0].finish_reason for part in parts if part.choices and part.choices[0].finish_reason]


@pytest.mark.parametrize("complete", TOOL_CHOOSERS, indirect=True)
def test_a_tool_is_called(complete):
    answer = complete(tools=[TOOL], tool_choice="required", max_tokens=200)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather" and set(json.loads(call.function.arguments)) == {"city"}
    assert answer.choices[0].finish_reason == "tool_calls"
    told = [*ASK, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert complete(told, tools=[TOOL]).choices[0].message.role == "assistant"


@pytest.mark.parametrize("complete", TOOL_CHOOSERS, indirect=True)
def test_a_tool_call_is_streamed(complete):
    parts = list(complete(tools=[TOOL], tool_choice="required", max_tokens=200, stream=True))
    whole = litellm.stream_chunk_builder(parts, messages=ASK)
    assert set(json.loads(whole.choices[0].message.tool_calls[0].function.arguments)) == {"city"}


def test_tools_are_offered(complete):
    answer = complete(tools=[TOOL])
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_a_schema_holds(complete):
    properties = {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    answer = complete([{"role": "user", "content": "An old king."}], response_format=form, max_tokens=100)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}


def test_embeddings_and_text_completions(url, model):
    options = {"api_base": url + "/v1", "api_key": "none"}
    assert len(litellm.embedding(f"openai/{model}", ["one", "two"], **options).data) == 2
    answer = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="The capital of France is", max_tokens=4, **options
    )
    assert answer.choices[0].text


def test_a_mistake_is_an_error_of_its_kind(complete):
    with pytest.raises((litellm.BadRequestError, litellm.APIConnectionError)) as error:
        complete(temperature=-1.5)
    assert "temperature" in str(error.value)
