"""langchain-openai's ChatOpenAI."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow
ASK = "What is the weather in Paris?"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@tool
def get_weather(city: Annotated[str, Field(max_length=20)]) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


@pytest.fixture
def chat(url, model):
    def make(**options):
        return ChatOpenAI(
            model=model,
            base_url=url + "/v1",
            api_key="none",
            temperature=0,
            max_retries=0,
            timeout=120,
            **{"max_tokens": 100} | options,
        )

    return make


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_it_answers_and_streams_the_same(responses, chat):
    llm = chat(use_responses_api=responses, max_tokens=16)
    answer = llm.invoke([("system", "Be brief."), ("human", "What is the capital of France?")])
    assert answer.text and answer.usage_metadata["output_tokens"] <= 16
    parts = list(llm.stream([("system", "Be brief."), ("human", "What is the capital of France?")]))
    assert "".join(part.text for part in parts) == answer.text and len(parts) > 2


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.parametrize("text", ["A person called Anna.", "An old king.", "Describe somebody."])
def test_structured_output(method, responses, text, chat):
    person = chat(use_responses_api=responses).with_structured_output(Person, method=method).invoke(text)
    assert isinstance(person, Person) and 0 <= person.age <= 120


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_tools_are_bound_called_and_answered(responses, chat):
    llm = chat(use_responses_api=responses)
    call = llm.bind_tools([get_weather], tool_choice="get_weather").invoke(ASK)
    [asked] = call.tool_calls
    assert asked["name"] == "get_weather" and set(asked["args"]) == {"city"}
    told = get_weather.invoke(asked)
    answer = llm.bind_tools([get_weather]).invoke([("human", ASK), call, told])
    assert answer.text or answer.tool_calls


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_a_tool_call_is_streamed(responses, chat):
    whole = None
    for part in chat(use_responses_api=responses).bind_tools([get_weather], tool_choice="any").stream(ASK):
        whole = part if whole is None else whole + part
    assert [call["name"] for call in whole.tool_calls][:1] == ["get_weather"]


def test_log_probabilities(chat):
    answer = chat(logprobs=True, top_logprobs=2, max_tokens=4).invoke("Hello")
    assert all(len(step["top_logprobs"]) == 2 for step in answer.response_metadata["logprobs"]["content"])


def test_batches(chat):
    assert [bool(answer.text) for answer in chat(max_tokens=8).batch(["Hello", "Good morning", "Hi"])] == [
        True
    ] * 3


def test_embeddings(url, model):
    embedder = OpenAIEmbeddings(
        model=model, base_url=url + "/v1", api_key="none", check_embedding_ctx_length=False
    )
    [one, two] = embedder.embed_documents(["one", "two"])
    assert len(one) == len(two) == 576 and one == embedder.embed_query("one")


def test_the_example_runs(url, model):
    script = Path(__file__).parents[2] / "examples" / "langchain_tools.py"
    done = subprocess.run(
        [sys.executable, str(script), "--base-url", f"{url}/v1", "--model", model],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "shape: name=" in done.stdout and "call: get_weather" in done.stdout
