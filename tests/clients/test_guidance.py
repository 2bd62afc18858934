"""guidance with its model for vLLM's server, which sends llguidance grammars."""

import pytest
from guidance import assistant, gen, json, regex, select, system, user
from guidance.models.experimental import VLLMModel
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow


class City(BaseModel):
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)


@pytest.fixture
def asked(url, model):
    lm = VLLMModel(model, base_url=url + "/v1", api_key="none", echo=False)
    with system():
        lm += "You are brief."
    with user():
        lm += "How is the weather in Paris?"
    return lm


def test_a_choice_is_selected(asked):
    with assistant():
        lm = asked + select(["sunny", "cloudy"], name="sky")
    assert lm["sky"] in ("sunny", "cloudy")


def test_an_expression_holds(asked):
    with assistant():
        lm = asked + regex(r"[0-9]{1,2} degrees", name="heat")
    number, unit = lm["heat"].split()
    assert number.isdecimal() and unit == "degrees"


def test_choices_and_expressions_are_joined_to_one_grammar(asked):
    with assistant():
        lm = asked + (select(["sunny", "cloudy"], name="sky") + " at " + regex("[0-9]{1,2}", name="heat"))
    assert lm["sky"] in ("sunny", "cloudy") and lm["heat"].isdecimal()


def test_a_schema_holds(asked):
    with assistant():
        lm = asked + json(name="city", schema=City)
    assert isinstance(City.model_validate_json(lm["city"]), City)


def test_text_ends_at_its_length(asked):
    """guidance itself reads no text back that ended at a `stop`."""
    with assistant():
        lm = asked + gen(name="text", max_tokens=16)
    assert 0 < len(lm["text"].split()) <= 16
