"""Answers of a form: a choice, a regular expression, a JSON schema, a grammar
(after vLLM's features/structured_outputs/structured_outputs_offline.py)."""

import sys
from enum import StrEnum

from pydantic import BaseModel, Field

from shoal import LLM, SamplingParams
from shoal.sampling_params import StructuredOutputsParams


class CarType(StrEnum):
    sedan = "sedan"
    suv = "SUV"
    truck = "Truck"


class CarDescription(BaseModel):
    brand: str = Field(max_length=20)
    model: str = Field(max_length=20)
    car_type: CarType


GRAMMAR = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


def main():
    llm = LLM(model=sys.argv[1], max_model_len=256)

    def generate(prompt, form, **options):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**form), max_tokens=120, **options)
        return llm.generate(prompts=prompt, sampling_params=params)[0].outputs[0].text

    choice = generate("Classify this sentiment: vLLM is wonderful!", {"choice": ["Positive", "Negative"]})
    assert choice in ("Positive", "Negative")
    email = generate(
        "Generate an email address for Alan Turing, who works in Enigma. End in .com and new line.",
        {"regex": r"\w{1,20}@\w{1,20}\.com\n"},
        stop=["\n"],
    )
    assert "@" in email and email.endswith(".com")
    car = generate(
        "Generate a JSON with the brand, model and car_type of the most iconic car from the 90's",
        {"json": CarDescription.model_json_schema()},
    )
    CarDescription.model_validate_json(car)
    query = generate(
        "Generate an SQL query to show the 'username' and 'email' from the 'users' table.",
        {"grammar": GRAMMAR},
    )
    assert query.startswith("SELECT col_") and " where " in query
    print(choice, email, car, query, sep="\n")


if __name__ == "__main__":
    main()
