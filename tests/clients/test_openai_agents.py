"""openai-agents over chat and over responses."""

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow
set_tracing_disabled(True)
ASK = "What is the weather in Paris?"


class City(BaseModel):
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"])
def agent(request, url, model):
    def make(settings=None, **options):
        # An event loop of its own for each test: connections of one loop are of no use in another.
        client = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)
        settings = ModelSettings(temperature=0, max_tokens=100).resolve(settings or ModelSettings())
        return Agent("speaker", model=request.param(model, client), model_settings=settings, **options)

    return make


@pytest.fixture
def weather():
    """(tool, cities it was called with)"""
    cities = []

    @function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        cities.append(city)
        return "It is sunny."

    return get_weather, cities


def test_a_run_answers(agent):
    result = Runner.run_sync(agent(instructions="Be brief."), "What is the capital of France?")
    assert result.final_output and result.context_wrapper.usage.output_tokens > 0


def test_a_tool_is_called_and_its_result_answered(agent, weather):
    """The client forces the first call alone."""
    tool, cities = weather
    speaker = agent(ModelSettings(tool_choice="required", parallel_tool_calls=False), tools=[tool])
    result = Runner.run_sync(speaker, ASK, max_turns=4)
    assert cities and result.final_output
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"] and kinds[-1] == "message_output_item"


def test_an_output_type_is_filled(agent):
    result = Runner.run_sync(agent(output_type=City), "Paris has two million inhabitants.")
    assert isinstance(result.final_output, City)


@pytest.mark.asyncio
async def test_a_run_with_a_tool_is_streamed(agent, weather):
    tool, cities = weather
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=400)
    run = Runner.run_streamed(agent(settings, tools=[tool]), ASK, max_turns=4)
    events = [event.type async for event in run.stream_events()]
    assert cities and run.final_output and events.count("raw_response_event") > 5


def test_a_conversation_is_handed_to_another_agent(agent):
    """Handoffs are tools named by the client."""
    second = agent(instructions="Be brief.")
    first = agent(ModelSettings(tool_choice="required"), handoffs=[second.clone(name="expert")])
    result = Runner.run_sync(first, ASK, max_turns=3)
    assert result.last_agent.name == "expert" and result.final_output


def test_a_mistake_is_an_error_of_its_kind(agent):
    with pytest.raises(BadRequestError, match="temperature"):
        Runner.run_sync(agent(ModelSettings(temperature=-1)), ASK)
