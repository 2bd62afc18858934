"""Writes tools, calls and results as text, for chat templates without a place for them. The text has the
format of the model's parser of calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shoal.text.conversation import as_text, parsed_arguments
from shoal.text.formats.hermes import HERMES_CALL
from shoal.text.formats.registry import form_of
from shoal.text.reading.chat_format import JsonCall

HERMES = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments {where}:
{begin}{{"name": <function-name>, "arguments": <args-json-object>}}{end}"""
WITHIN_TAGS = "within <tool_call></tool_call> XML tags"
LLAMA = """You have access to the following functions. To call a function, respond with JSON for a function \
call. Respond in the format \
{{"name": function name, "parameters": dictionary of argument name and its value}}. Do not use variables.

{tools}"""


def describe(tools: Sequence[dict[str, Any]], parser: str) -> str:
    """Returns the text about tools for the system prompt, in the words on which models of the format were
    trained."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if parser == "llama3_json":
        return LLAMA.format(tools=listed)
    call = _json_call(parser)
    where = WITHIN_TAGS if call.begin.strip() == "<tool_call>" else "in this form"
    return HERMES.format(tools=listed, begin=call.begin, end=call.end, where=where)


def with_tools(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Returns the conversation with `text` in its system message, which is added if it is missing."""
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{as_text(messages[0]['content'])}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_calls_as_text(messages: Sequence[dict[str, Any]], parser: str) -> list[dict[str, Any]]:
    """Returns the conversation with each call in the text of its message. Results become user messages,
    because every template knows that role."""
    found: list[dict[str, Any]] = []
    after_results = False
    for message in messages:
        content = as_text(message["content"])
        if message["role"] == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if after_results:
                found[-1]["content"] += f"\n{result}"
            else:
                found.append({"role": "user", "content": result})
            after_results = True
            continue
        if message["role"] == "user" and after_results:  # many templates require alternating roles
            found[-1]["content"] += f"\n\n{content}"
        elif calls := message.get("tool_calls"):
            texts = [content] if content else []
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            found.append({**rest, "content": "\n".join([*texts, *(_call(call, parser) for call in calls)])})
        else:
            found.append(message)
        after_results = False
    return found


def _call(call: dict[str, Any], parser: str) -> str:
    """Returns one call as text. Some conversations have a call's name and arguments without `function` around
    them, which templates also accept."""
    function = call.get("function", call)
    name, arguments = function.get("name"), parsed_arguments(function.get("arguments"))
    if parser == "llama3_json":
        return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    call_form = _json_call(parser)
    return f"{call_form.begin}{text}{call_form.end}"


def _json_call(parser: str) -> JsonCall:
    """Returns the form of a call for a template without a place for calls: Hermes', unless the parser has a
    JSON form of its own."""
    return form_of(parser).json_call or HERMES_CALL
