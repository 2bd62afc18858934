"""A tool is called and its answer told to the model (after vLLM's chat_with_tools.py; the form of the call is
enforced, for a model as small as ours)."""

import json
import sys

from shoal import LLM
from shoal.sampling_params import SamplingParams, StructuredOutputsParams

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather in a given location",
            "parameters": PARAMETERS,
        },
    }
]


def get_current_weather(city, unit):
    return f"The weather in {city} is 85 degrees {unit}."


def main():
    llm = LLM(model=sys.argv[1])
    messages = [
        {"role": "user", "content": "Can you tell me what the temperature will be in Dallas, in fahrenheit?"}
    ]
    form = StructuredOutputsParams(json=PARAMETERS)
    outputs = llm.chat(
        messages,
        sampling_params=SamplingParams(max_tokens=100, temperature=0.0, structured_outputs=form),
        tools=TOOLS,
    )
    call = outputs[0].outputs[0].text
    arguments = json.loads(call)
    answer = get_current_weather(**arguments)
    messages += [
        {"role": "assistant", "content": call},
        {"role": "tool", "content": answer, "tool_call_id": "call00001"},
    ]
    outputs = llm.chat(messages, SamplingParams(max_tokens=16, temperature=0.0), tools=TOOLS)
    print(arguments, answer, outputs[0].outputs[0].text, sep="\n")


if __name__ == "__main__":
    main()
