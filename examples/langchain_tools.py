"""LangChain on a server of your own: an answer in a given shape, and a tool that the model calls.

    pip install langchain-openai
    shoal serve Qwen/Qwen3-8B &
    python examples/langchain_tools.py --model Qwen/Qwen3-8B

Without a model's name, both `shoal serve` and this program take the small default model.
"""

import argparse

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city of the world."""

    name: str = Field(max_length=40)
    country: str = Field(max_length=40)


@tool
def get_weather(city: str) -> str:
    """Reports the weather in a city."""
    return f"It is sunny in {city}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2")
    arguments = parser.parse_args()

    model = ChatOpenAI(
        base_url=arguments.base_url, api_key="none", model=arguments.model, temperature=0, max_tokens=200
    )
    print("shape:", model.with_structured_output(City, method="json_schema").invoke("Tell me about Paris."))
    caller = model.bind_tools([get_weather], tool_choice="get_weather")
    for call in caller.invoke("What is the weather in Paris?").tool_calls:
        print("call:", call["name"], call["args"], "->", get_weather.invoke(call["args"]))


if __name__ == "__main__":
    main()
