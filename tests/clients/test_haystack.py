"""haystack's generators and embedders for OpenAI's API, alone and with its agent."""

import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

import openai
import pytest
from haystack import Document, Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel, Field

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]
ASK = [ChatMessage.from_user("What is the weather in Paris?")]


class City(BaseModel):
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


@pytest.fixture
def address(url):
    return {"api_base_url": url + "/v1", "api_key": Secret.from_token("none")}


@pytest.fixture(params=[OpenAIChatGenerator, OpenAIResponsesChatGenerator], ids=["chat", "responses"])
def generator(request, address, model):
    length = {OpenAIChatGenerator: "max_tokens", OpenAIResponsesChatGenerator: "max_output_tokens"}

    def make(tokens=100, more=None, **options):
        settings = {"temperature": 0, length[request.param]: tokens} | (more or {})
        return request.param(model=model, generation_kwargs=settings, max_retries=0, **address, **options)

    return make


def test_a_pipeline_answers(generator):
    pipeline = Pipeline()
    pipeline.add_component("prompt", ChatPromptBuilder(ASK + [ChatMessage.from_user("In {{unit}}.")]))
    pipeline.add_component("llm", generator(16))
    pipeline.connect("prompt.prompt", "llm.messages")
    [reply] = pipeline.run({"prompt": {"unit": "degrees"}})["llm"]["replies"]
    assert reply.text


def test_it_streams_what_it_answers(generator):
    parts = []
    [reply] = generator(16, streaming_callback=parts.append).run(ASK)["replies"]
    assert "".join(part.content for part in parts) == reply.text and len(parts) > 2


def test_a_tool_is_called_and_its_result_answered(generator):
    tool = create_tool_from_function(get_weather)
    [call] = generator(more={"tool_choice": "required"}).run(ASK, tools=[tool])["replies"]
    assert call.tool_calls[0].tool_name == "get_weather" and set(call.tool_calls[0].arguments) == {"city"}
    told = [ChatMessage.from_tool("sunny", origin=asked) for asked in call.tool_calls]
    [reply] = generator(more={"tool_choice": "none"}).run([*ASK, call, *told], tools=[tool])["replies"]
    assert reply.text


def test_an_agent_calls_its_tool(generator):
    agent = Agent(
        chat_generator=generator(more={"tool_choice": "required"}),
        tools=[create_tool_from_function(get_weather)],
        exit_conditions=["get_weather"],
    )
    last = agent.run(messages=ASK)["messages"][-1]
    assert "It is sunny in" in last.tool_call_result.result


def test_a_schema_holds(generator):
    name = "response_format" if isinstance(generator(), OpenAIChatGenerator) else "text_format"
    [reply] = generator(more={name: City}).run([ChatMessage.from_user("Paris")])["replies"]
    assert isinstance(City.model_validate_json(reply.text), City)


def test_embeddings(address, model):
    [found] = OpenAIDocumentEmbedder(model=model, **address).run([Document(content="one")])["documents"]
    one = OpenAITextEmbedder(model=model, **address).run("one")["embedding"]
    assert len(one) == 576 and found.embedding == pytest.approx(one, abs=1e-5)


def test_a_mistake_is_an_error_of_its_kind(generator):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        generator(more={"temperature": -1}).run(ASK)
