"""instructor in its modes."""

from typing import Literal

import instructor
import openai
import pytest
from instructor import Mode
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow
ASK = [{"role": "user", "content": "Extract: Jason is 25 years old."}]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


class Address(BaseModel):
    street: str = Field(max_length=20)
    kind: Literal["home", "work"]


class Customer(BaseModel):
    person: Person
    addresses: list[Address] = Field(min_length=1, max_length=2)


@pytest.fixture
def client(url):
    def make(mode):
        inner = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)
        return instructor.from_openai(inner, mode=mode)

    return make


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA, Mode.JSON], ids=lambda mode: mode.value)
def test_a_model_is_extracted(mode, client, model):
    person = client(mode).chat.completions.create(
        model=model, messages=ASK, response_model=Person, max_retries=0, temperature=0, max_tokens=200
    )
    assert isinstance(person, Person)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA], ids=lambda mode: mode.value)
def test_a_nested_model_is_extracted(mode, client, model):
    found = client(mode).chat.completions.create(
        model=model, messages=ASK, response_model=Customer, max_retries=0, temperature=0, max_tokens=300
    )
    assert all(address.kind in ("home", "work") for address in found.addresses)


@pytest.mark.parametrize(
    "mode", [Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS], ids=lambda mode: mode.value
)
def test_a_model_is_extracted_by_responses(mode, client, model):
    person = client(mode).responses.create(
        model=model, input=ASK, response_model=Person, max_retries=0, temperature=0, max_output_tokens=200
    )
    assert isinstance(person, Person)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA], ids=lambda mode: mode.value)
def test_partial_models_are_streamed(mode, client, model):
    parts = list(
        client(mode).chat.completions.create_partial(
            model=model, messages=ASK, response_model=Person, max_retries=0, temperature=0, max_tokens=200
        )
    )
    assert len(parts) > 1 and parts[-1].age is not None
