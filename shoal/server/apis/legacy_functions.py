"""OpenAI's older fields `functions` and `function_call` of a chat request, translated to tools."""

from __future__ import annotations

from typing import Any

from shoal.errors import RequestError
from shoal.server.apis.protocol import ChatCompletionRequest


def as_tools(request: ChatCompletionRequest, names: dict[str, str]) -> None:
    """Translates `functions`, `function_call` and messages with them into today's fields. names: see
    Exchange. Raises RequestError."""
    if request.functions is not None or request.function_call is not None:
        if request.tools is not None or request.tool_choice is not None:
            raise RequestError(
                "functions and function_call are the older names of tools and tool_choice; "
                "send one or the other",
                field="functions",
            )
        names |= {"tools": "functions", "tool_choice": "function_call"}
        choice = request.function_call
        request.tools = [{"type": "function", "function": function} for function in request.functions or ()]
        request.tool_choice = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
        request.parallel_tool_calls = False
    request.messages = [_message(i, message) for i, message in enumerate(request.messages)]


def _message(i: int, message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "function":
        return {
            "role": "tool",
            "tool_call_id": message.get("name"),
            "name": message.get("name"),
            "content": message.get("content"),
        }
    call = message.get("function_call")
    if call is None:
        return message
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise RequestError(
            f"messages[{i}].function_call must be a call, got {call!r:.80}; give it a name and arguments",
            field=f"messages[{i}].function_call",
        )
    rest = {key: value for key, value in message.items() if key != "function_call"}
    return {**rest, "tool_calls": [{"id": call["name"], "type": "function", "function": call}]}
