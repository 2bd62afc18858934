"""pydantic-ai's agents with OpenAI's provider."""

import asyncio

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

pytestmark = pytest.mark.slow


class City(BaseModel):
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def llm(request, url, model):
    return request.param(model, provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))


@pytest.fixture
def settings():
    return {"temperature": 0, "max_tokens": 200}


def test_text(llm, settings):
    result = Agent(llm, instructions="Be brief.").run_sync(
        "What is the capital of France?", model_settings=settings | {"max_tokens": 16}
    )
    assert result.output and result.usage.output_tokens <= 16


@pytest.mark.parametrize("output", [ToolOutput, NativeOutput])
def test_an_output_type_is_filled(output, llm, settings):
    agent = Agent(llm, output_type=output(City), retries=0)
    assert isinstance(
        agent.run_sync("Paris has two million inhabitants.", model_settings=settings).output, City
    )


def test_a_tool_beside_an_output_type(llm, settings):
    """The model must call one of the two; a tool's answer goes back to it until it fills the output or the
    requests are spent."""
    called = []
    agent = Agent(llm, output_type=City, retries=0)

    @agent.tool_plain
    def get_population(city: str) -> int:
        """Returns the population of a city."""
        called.append(city)
        return 2_100_000

    limit = UsageLimits(request_limit=4)
    try:
        result = agent.run_sync("How many people live in Paris?", model_settings=settings, usage_limits=limit)
    except UsageLimitExceeded:
        assert called
    else:
        assert isinstance(result.output, City)


def test_text_is_streamed(llm, settings):
    async def stream():
        async with Agent(llm).run_stream(
            "Count to five.", model_settings=settings | {"max_tokens": 24}
        ) as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    assert len(asyncio.run(stream())) > 2
