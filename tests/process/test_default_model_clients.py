"""The official clients against a server with the default model: what a newcomer does first."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import anthropic
import openai
import pytest

from tests.serving import free_port

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
PICK = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    port = free_port()
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [
        sys.executable,
        "-m",
        "shoal",
        "serve",
        "--device",
        "cpu",
        "--max-model-len",
        "1024",
        "--port",
        str(port),
    ]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=file, stderr=file
        )
    deadline = time.monotonic() + DEADLINE_S
    while "ready after" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0, log.read_text()


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def name(client):
    return client.models.list().data[0].id


@pytest.fixture
def chat(client, name):
    def ask(messages=QUESTION, **options):
        return client.chat.completions.create(
            **{"model": name, "messages": messages, "max_tokens": 24, "temperature": 0, **options}
        )

    return ask


def test_it_chats_and_streams_the_same(chat):
    answer = chat()
    assert "Paris" in answer.choices[0].message.content and answer.usage.completion_tokens <= 24
    parts = list(chat(stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
        == answer.choices[0].message.content
    )
    assert (
        parts[-1].usage == answer.usage or parts[-1].usage.completion_tokens == answer.usage.completion_tokens
    )


def test_completions_with_stop_and_several_answers(client, name):
    answer = client.completions.create(
        model=name, prompt="The capital of France is", max_tokens=16, n=2, temperature=0.8, seed=1, stop=["."]
    )
    assert [c.index for c in answer.choices] == [0, 1] and all("." not in c.text for c in answer.choices)


def test_log_probabilities(chat):
    unpenalized = {"repetition_penalty": 1}  # log-probabilities leave penalties out
    answer = chat(logprobs=True, top_logprobs=3, max_tokens=4, extra_body=unpenalized)
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert (
            entry.logprob <= 0 and len(entry.top_logprobs) == 3 and entry.token == entry.top_logprobs[0].token
        )


def test_a_schema_holds(chat):
    asked = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    answer = chat([{"role": "user", "content": "Describe a dog."}], response_format=asked, max_tokens=80)
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"name", "size"} and found["size"] in ("small", "large")
    choice = chat(extra_body={"structured_outputs": {"choice": ["red", "green"]}}).choices[0].message.content
    assert choice in ("red", "green")


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["required", "named"],
)
def test_tools_are_called(choice, chat):
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    [call] = chat(asked, tools=[PICK], tool_choice=choice, max_tokens=120).choices[0].message.tool_calls[:1]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and set(arguments) == {"city", "unit"}
    streamed = ""
    for part in chat(asked, tools=[PICK], tool_choice=choice, max_tokens=120, stream=True):
        for piece in (part.choices[0].delta.tool_calls or []) if part.choices else []:
            if piece.index == 0:
                streamed += piece.function.arguments or ""
    assert json.loads(streamed) == arguments


def test_mistakes_are_explained(chat):
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    for options, words in (
        ({"temperature": -1}, "temperature"),
        ({"model": "other"}, "other"),
        ({"logprobs": True, "top_logprobs": 30}, "top_logprobs"),
        ({"response_format": broken}, "nonsense"),
    ):
        with pytest.raises(openai.APIStatusError) as error:
            chat(**options)
        assert error.value.status_code in (400, 404) and words in str(error.value)
    assert chat().choices[0].message.content


def test_responses(client, name):
    asked = {"model": name, "input": QUESTION[0]["content"], "max_output_tokens": 24, "temperature": 0}
    answer = client.responses.create(**asked)
    assert "Paris" in answer.output_text
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == answer.output_text


def test_embeddings(client, name):
    data = client.embeddings.create(model=name, input=["a dog", "a puppy", "tax law"]).data
    dog, puppy, law = (d.embedding for d in data)
    assert sum(x * x for x in dog) == pytest.approx(1, abs=1e-3)
    assert sum(x * y for x, y in zip(dog, puppy)) > sum(x * y for x, y in zip(dog, law))


def test_anthropics_client(url, name):
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S)
    # no argument in newer ones
    asked = {"model": name, "max_tokens": 24, "messages": QUESTION, "extra_body": {"temperature": 0}}
    answer = client.messages.create(**asked)
    assert (
        "Paris" in answer.content[0].text
        and answer.stop_reason in ("end_turn", "max_tokens")
        and answer.usage.output_tokens > 0
    )
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == answer.content[0].text
    warmed = client.messages.create(**{**asked, "max_tokens": 0})
    assert warmed.content == [] and warmed.usage.output_tokens == 0
    tool = {
        "name": "get_weather",
        "description": "The weather in a city",
        "input_schema": PICK["function"]["parameters"],
    }
    answer = client.messages.create(
        **{**asked, "max_tokens": 120}, tools=[tool], tool_choice={"type": "tool", "name": "get_weather"}
    )
    assert next(b for b in answer.content if b.type == "tool_use").name == "get_weather"


def test_the_page_and_the_document_are_there(url):
    for path in ("/", "/openapi.json", "/metrics"):
        with urllib.request.urlopen(url + path, timeout=DEADLINE_S) as answer:
            assert answer.status == 200
