"""outlines with its models for vLLM's server, OpenAI and Ollama."""

import json
from typing import Literal

import ollama
import openai
import outlines
import pytest
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow


class City(BaseModel):
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)


@pytest.fixture
def vllm(url, model):
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)
    return outlines.from_vllm(client, model)


def test_text_and_its_stream(vllm):
    text = vllm("What is the capital of France?", max_tokens=16, temperature=0)
    parts = list(vllm.stream("What is the capital of France?", max_tokens=16, temperature=0))
    assert text and "".join(parts) == text and len(parts) > 2


def test_a_choice_an_expression_and_a_grammar_hold(vllm):
    assert vllm("Is the sky blue?", Literal["yes", "no"], temperature=0) in ("yes", "no")
    assert vllm("How warm is it?", Regex("[0-9]{2} degrees"), temperature=0).endswith(" degrees")
    grammar = CFG('start: "warm" | "cold" " winter"')
    assert vllm("How is it?", grammar, temperature=0) in ("warm", "cold winter")


def test_a_schema_holds(vllm):
    answer = vllm("Paris", City, max_tokens=100, temperature=0)
    assert isinstance(City.model_validate_json(answer), City)


def test_a_schema_holds_over_openais_api(url, model):
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)
    answer = outlines.from_openai(client, model)("Paris", City, max_tokens=100, temperature=0)
    assert isinstance(City.model_validate_json(answer), City)


def test_a_schema_holds_over_ollamas_api(url, model):
    options = {"num_predict": 100, "temperature": 0}
    answer = outlines.from_ollama(ollama.Client(url), model)("Paris", City, options=options)
    assert set(json.loads(answer)) == {"name", "population"}


def test_a_mistake_is_named(vllm):
    with pytest.raises(Exception, match="temperature"):
        vllm("Hello", temperature=-1)
