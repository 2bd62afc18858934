"""llama-index with OpenAILike, which is for servers with OpenAI's API."""

import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow
ASK = "What is the weather in Paris?"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)


@pytest.fixture
def llm(url, model):
    def make(**options):
        return OpenAILike(
            model=model,
            api_base=url + "/v1",
            api_key="none",
            is_function_calling_model=True,
            max_retries=0,
            timeout=120,
            **{"is_chat_model": True, "temperature": 0, "max_tokens": 100} | options,
        )

    return make


def test_chat_and_its_stream(llm):
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Count.")]
    answer = llm(max_tokens=16).chat(messages)
    assert answer.message.content
    parts = [part.delta for part in llm(max_tokens=16).stream_chat(messages)]
    assert "".join(parts) == answer.message.content and len(parts) > 2


def test_completion_and_its_stream(llm):
    options = {"is_chat_model": False, "max_tokens": 8}
    answer = llm(**options).complete("The capital of France is")
    assert answer.text
    parts = [part.delta for part in llm(**options).stream_complete("The capital of France is")]
    assert "".join(parts) == answer.text


def test_a_tool_is_called_and_its_result_answered(llm):
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"It is sunny in {city}."

    tool = FunctionTool.from_defaults(get_weather)
    result = llm().predict_and_call([tool], ASK, tool_required=True)
    assert "It is sunny in" in result.response and result.sources[0].tool_name == "get_weather"
    call = llm().chat_with_tools([tool], ASK, tool_required=True)
    [asked] = llm().get_tool_calls_from_response(call)[:1]
    told = ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_call_id": asked.tool_id})
    answer = llm().chat([ChatMessage(role="user", content=ASK), call.message, told])
    assert answer.message.role == "assistant"


@pytest.mark.parametrize("strict", [False, True], ids=["tool", "schema"])
def test_a_model_is_extracted(llm, strict):
    options = {"should_use_structured_outputs": True} if strict else {}
    extractor = llm(**options).as_structured_llm(City)
    answer = extractor.complete("Paris has two million inhabitants.")
    assert isinstance(answer.raw, City)


def test_embeddings(url, model):
    embedder = OpenAILikeEmbedding(model_name=model, api_base=url + "/v1", api_key="none")
    [one, two] = embedder.get_text_embedding_batch(["one", "two"])
    assert len(one) == len(two) == 576 and one != two


def test_a_mistake_is_an_error_of_its_kind(llm):
    with pytest.raises(openai.BadRequestError, match="top_p"):
        llm().complete(ASK, top_p=-1)
