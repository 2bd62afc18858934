"""LangChain's own suites for chat models and embeddings (langchain-tests), whole."""

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests
from pydantic import BaseModel

# The clients keep their connections for the whole run, so all tests share one event loop.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore:.*is marked with '@pytest.mark.asyncio'", "ignore::UserWarning"),
]


def bounded(value):
    """Returns a request with a length for each string of its schemas, which a small model would not end."""
    if isinstance(value, list):
        return [bounded(part) for part in value]
    if isinstance(value, type) and issubclass(value, BaseModel):
        return bounded_model(value)
    if not isinstance(value, dict):
        return value
    bound = {"maxLength": 60} if value.get("type") == "string" and "enum" not in value else {}
    return bound | {key: bounded(part) for key, part in value.items()}


def bounded_model(model):
    """Returns the same model with such a schema, which OpenAI's SDK asks it for."""

    class Bounded(model):
        @classmethod
        def model_json_schema(cls, *arguments, **options):
            return bounded(model.model_json_schema(*arguments, **options))

    return Bounded


class ForcedOpenAI(ChatOpenAI):
    """Offered tools must be called once, as a small model calls none of its own accord."""

    def _get_request_payload(self, input_, **options):
        payload = bounded(super()._get_request_payload(input_, **options))
        if payload.get("tools") and payload.get("tool_choice", "auto") == "auto":
            last = (payload.get("messages") or payload["input"])[-1]
            answered = last.get("role") == "tool" or last.get("type") == "function_call_output"
            payload["tool_choice"] = "none" if answered else "required"
        if payload.get("tool_choice", "none") != "none":
            payload["parallel_tool_calls"] = False
        return payload


class ForcedAnthropic(ChatAnthropic):
    """The same for Anthropic's API."""

    def _get_request_payload(self, input_, **options):
        payload = bounded(super()._get_request_payload(input_, **options))
        if payload.get("tools") and not payload.get("tool_choice"):
            content = payload["messages"][-1]["content"]
            answered = isinstance(content, list) and any(part["type"] == "tool_result" for part in content)
            payload["tool_choice"] = {"type": "none" if answered else "any"}
        if payload.get("tool_choice", {"type": "none"})["type"] != "none":
            payload["tool_choice"]["disable_parallel_tool_use"] = True
        return payload


class BoundedOllama(ChatOllama):
    """Ollama's API has no tool_choice, so that its calls are not forced."""

    def _chat_params(self, *arguments, **options):
        return bounded(super()._chat_params(*arguments, **options))


UNICODE = {"test_unicode_tool_call_integration": "the small model does not copy Chinese names into a call"}
JSON_MODE = {"test_json_mode": "without a schema the small model does not end its JSON"}
UNFORCED = dict.fromkeys(
    [
        "test_agent_loop",
        "test_bind_runnables_as_tools",
        "test_tool_calling",
        "test_tool_calling_async",
        "test_tool_calling_with_no_arguments",
        "test_unicode_tool_call_integration",
    ],
    "Ollama's API cannot force a tool call, and the small model makes none of its own accord",
)


class OfShoal:
    """The server and its model, as the suites' properties find them."""

    model_name = "smollm2"  # the suites have a fixture `model` of their own
    supports_json_mode = True
    failing: dict[str, str] = {}  # reasons by test

    @pytest.fixture(autouse=True)
    def _server(self, url, request):
        type(self).url = url
        if reason := self.failing.get(request.node.originalname):
            request.applymarker(pytest.mark.xfail(reason=reason))

    @property
    def chat_model_params(self):
        return self.address | {"model": self.model_name, "temperature": 0}

    @property
    def embedding_model_params(self):
        return self.address | {"model": self.model_name}


class TestChat(OfShoal, ChatModelIntegrationTests):
    chat_model_class = ForcedOpenAI
    failing = UNICODE | JSON_MODE

    @property
    def address(self):
        address = {"base_url": self.url + "/v1", "api_key": "none", "max_tokens": 300, "max_retries": 0}
        return address | {"stream_usage": True}


class TestResponses(TestChat):
    @property
    def address(self):
        return super().address | {"use_responses_api": True}


class TestAnthropic(OfShoal, ChatModelIntegrationTests):
    chat_model_class = ForcedAnthropic
    failing = UNICODE

    @property
    def address(self):
        return {"base_url": self.url, "api_key": "none", "max_tokens": 300, "max_retries": 0}


class TestOllama(OfShoal, ChatModelIntegrationTests):
    chat_model_class = BoundedOllama
    failing = UNFORCED | JSON_MODE
    has_tool_choice = False

    @property
    def address(self):
        return {"base_url": self.url, "num_predict": 150}


class TestOpenAIEmbeddings(OfShoal, EmbeddingsIntegrationTests):
    embeddings_class = OpenAIEmbeddings

    @property
    def address(self):
        return {"base_url": self.url + "/v1", "api_key": "none", "check_embedding_ctx_length": False}


class TestOllamaEmbeddings(OfShoal, EmbeddingsIntegrationTests):
    embeddings_class = OllamaEmbeddings

    @property
    def address(self):
        return {"base_url": self.url}
