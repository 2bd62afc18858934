"""dspy's programs, with a provider declared as dspy does it for servers with OpenAI's API."""

import dspy
import pytest
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


class Extract(dspy.Signature):
    """Extract the city."""

    text: str = dspy.InputField()
    inhabitants: int = dspy.OutputField()
    large: bool = dspy.OutputField()


@pytest.fixture
def lm(url, model):
    access = AccessPolicy(provider="shoal", env_keys=(), base_url=url + "/v1")
    provider = ProviderDefinition.chat(access, compat=OpenAIChatCompat(), placeholder_key="none")
    register_provider(provider, supports=ModelSupport(response_schema=True), replace=True)
    return dspy.LM(f"shoal/{model}", temperature=0, max_tokens=100, cache=False, num_retries=0)


def test_a_model_is_asked(lm):
    [answer] = lm("What is the capital of France?")
    assert answer


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_a_model_is_asked_through_litellm(kind, url, model):
    address = {"api_base": url + "/v1", "api_key": "none", "model_type": kind}
    assert dspy.LM(f"openai/{model}", max_tokens=16, cache=False, **address)("What is the capital of France?")


def test_a_signature_is_filled_by_its_schema(lm):
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Extract)(text="Paris has two million inhabitants.")
    assert isinstance(found.inhabitants, int) and isinstance(found.large, bool)


def test_embeddings(url, model):
    embedder = dspy.Embedder(f"openai/{model}", api_base=url + "/v1", api_key="none", caching=False)
    assert embedder(["one", "two"]).shape == (2, 576)
