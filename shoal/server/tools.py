"""Tools of a request: checked, put into the prompt, enforced by a grammar where the request says so, and found again in the answer.

What `tool_choice` means, as in OpenAI's API and vLLM:
  "auto"      the model decides; calls are found in its text, in the format of the model's chat template
  "none"      no calls: the tools are left out of the prompt, so that nothing invites one
  "required"  the answer is a list of one or more calls, by a JSON schema
  a function  the answer is this function's arguments, by its schema; the finish reason stays "stop", where the others say "tool_calls"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shoal.api import SamplingParams, StructuredOutputsParams
from shoal.errors import RequestError
from shoal.server.errors import ApiError
from shoal.server.reasoning import ThinkParser, opens_thinking
from shoal.server.tool_parsers import CallDelta, ListedCalls, NamedCall, Parser, Part, TaggedCalls, TextDelta

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
CHOICES = ("auto", "none", "required")


def choose_tool_call_parser(setting: str, chat_template: str | None) -> str:
    """ServerConfig.tool_call_parser for a model: "hermes", "llama3_json" or "none"; "auto" goes by the template's text."""
    if setting != "auto":
        return setting
    template = chat_template or ""
    if "<tool_call>" not in template and ("<|python_tag|>" in template or "ipython" in template):
        return "llama3_json"
    return "hermes"


def choose_reasoning_parser(setting: str, chat_template: str | None) -> str:
    """ServerConfig.reasoning_parser for a model: "qwen3" where the template knows <think>, else "none"."""
    if setting != "auto":
        return setting
    return "qwen3" if "<think>" in (chat_template or "") or "</think>" in (chat_template or "") else "none"


@dataclass(slots=True)
class ToolPlan:
    """What a request's tools come to."""

    mode: str = "none"                   # "none" | "auto" | "required" | "named"
    tools: list[dict[str, Any]] | None = None    # for the prompt
    name: str = ""                       # of the tool, if "named"
    parallel: bool = True                # more calls than one may be made
    structured: StructuredOutputsParams | None = None    # what enforces "required" and "named"

    def constrain(self, params: SamplingParams) -> None:
        """Raises RequestError if the request has a format of its own."""
        if self.mode == "auto":
            params.skip_special_tokens = False    # some models mark the tags of calls as special
        if self.structured is None:
            return
        if params.structured_outputs is not None:
            raise RequestError("tool_choice asks for a call, and response_format or structured_outputs for another; drop one of them")
        params.structured_outputs = self.structured


def plan_tools(tools: list[dict[str, Any]] | None, tool_choice: str | dict[str, Any] | None, parallel: bool | None,
               parser: str) -> ToolPlan:
    """tools and tool_choice as in OpenAI's chat API. parser: the model's. Raises RequestError."""
    schemas = _check_tools(tools)
    choice = tool_choice if tool_choice is not None else ("auto" if schemas else "none")
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise RequestError(f"tool_choice {choice!r:.100} names no function; give "
                               '{"type": "function", "function": {"name": ...}}, "auto", "none" or "required"')
        if name not in schemas:
            raise RequestError(f"tool_choice names {name!r:.100}, which is not among the tools: {', '.join(schemas) or 'there are none'}")
        return ToolPlan("named", tools, name, structured=StructuredOutputsParams(json=schemas[name]))
    if choice not in CHOICES:
        raise RequestError(f"tool_choice {choice!r:.100} is none of {', '.join(CHOICES)} and no function")
    if choice == "none":
        return ToolPlan()
    if not schemas:
        if choice == "required":
            raise RequestError("tool_choice 'required' needs tools; send some")
        return ToolPlan()
    many = parallel is not False
    if choice == "required":
        return ToolPlan("required", tools, parallel=many, structured=StructuredOutputsParams(json=_calls_schema(schemas, many)))
    if parser == "none":
        raise RequestError("tool_choice 'auto' needs a parser of calls, and this server runs with --tool-call-parser none; "
                           "choose a function, 'required' or 'none'")
    return ToolPlan("auto", tools, parallel=many)


def template_variables(given: dict[str, Any] | None, effort: str | None, params: SamplingParams, reasoning_parser: str) -> dict[str, Any]:
    """Of the chat template: the request's own, and what its reasoning effort means.

    A grammar holds from the first token on, so a model that would think before it is told not to.
    """
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if reasoning_parser != "none" and (effort == "none" or params.structured_outputs is not None):
        variables["enable_thinking"] = False
    return {**variables, **(given or {})}


def check_finish(reason: str | None) -> str:
    """The reason, where the API has no word for answers that the server took back."""
    if reason not in ("stop", "length"):
        raise ApiError(503, "the answer was given up: the engine was put to sleep or is ending; try again")
    return reason


class AnswerFormat:
    """How the text of a request's answers is read: first reasoning, then content and calls."""

    def __init__(self, plan: ToolPlan, tool_call_parser: str, reasoning_parser: str, prompt: str, params: SamplingParams) -> None:
        """An answer with a grammar has no reasoning: the grammar holds from the first token on."""
        self.plan = plan
        self._tool_call_parser = tool_call_parser
        self._reasons = reasoning_parser == "qwen3" and params.structured_outputs is None
        self._thinking = self._reasons and opens_thinking(prompt)

    def parser(self) -> AnswerParser:
        """For one answer."""
        return AnswerParser(ThinkParser(self._thinking) if self._reasons else None, self._calls(), self.plan)

    def _calls(self) -> Parser | None:
        plan = self.plan
        if plan.mode == "named":
            return NamedCall(plan.name)
        if plan.mode == "required":
            return ListedCalls()
        if plan.mode == "none":
            return None
        if self._tool_call_parser == "llama3_json":
            return TaggedCalls("<|python_tag|>", bare_names={tool["function"]["name"] for tool in plan.tools or ()})
        return TaggedCalls("<tool_call>", "</tool_call>")


class AnswerParser:
    """One answer's text, as it comes, into reasoning, content and calls."""

    def __init__(self, reasoning: ThinkParser | None, calls: Parser | None, plan: ToolPlan) -> None:
        self._reasoning, self._calls = reasoning, calls
        self._mode, self._parallel = plan.mode, plan.parallel
        self._num_calls = 0

    def push(self, text: str, *, last: bool = False) -> list[Part]:
        """The parts of `text`, in their order. last: nothing follows, so nothing is held back."""
        if self._reasoning is None:
            parts: list[Part] = [TextDelta(text)] if text else []
        else:
            parts = self._reasoning.push(text) + (self._reasoning.finish() if last else [])
        if self._calls is not None:
            found: list[Part] = []
            for part in parts:
                if isinstance(part, TextDelta) and not part.reasoning:
                    found += self._calls.push(part.text)
                else:
                    found.append(part)
            parts = found + (self._calls.finish() if last else [])
        if not self._parallel:
            parts = [p for p in parts if not isinstance(p, CallDelta) or p.index == 0]
        self._num_calls += sum(isinstance(p, CallDelta) and p.name is not None for p in parts)
        return parts

    def finish_reason(self, reason: str) -> str:
        """What OpenAI's API says for the engine's reason."""
        return "tool_calls" if reason == "stop" and self._num_calls and self._mode != "named" else reason


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str                       # JSON text; not whole if the answer was cut short


@dataclass(slots=True)
class Answer:
    """A whole answer's parts."""

    reasoning: str
    content: str
    calls: list[Call]


def whole(parts: list[Part]) -> Answer:
    answer = Answer("", "", [])
    for part in parts:
        if isinstance(part, CallDelta):
            if part.name is not None:
                answer.calls.append(Call(part.id or "", part.name, part.arguments))
            else:
                answer.calls[part.index].arguments += part.arguments
        elif part.reasoning:
            answer.reasoning += part.text
        else:
            answer.content += part.text
    return answer


def _check_tools(tools: list[dict[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """The schema of each tool's parameters, by the tool's name."""
    schemas: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise RequestError(f"tools[{i}] {tool!r:.100} is no function; give "
                               '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}')
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RequestError(f"tools[{i}] has the name {name!r:.100}; names are 1 to 128 letters, digits and any of _ . : -")
        if name in schemas:
            raise RequestError(f"tools has {name!r} twice; give each tool a name of its own")
        if not isinstance(function.get("description", ""), str | None):
            raise RequestError(f"tools[{i}], {name}: the description {function['description']!r:.100} is no text")
        if schema is not None and (not isinstance(schema, dict) or schema.get("type", "object") != "object"):
            raise RequestError(f"tools[{i}], {name}: the parameters {schema!r:.100} are no JSON schema of an object; give "
                               '{"type": "object", "properties": {...}}')
        schemas[name] = {**(schema or {"properties": {}}), "type": "object"}
    return schemas


def _calls_schema(schemas: dict[str, dict[str, Any]], many: bool) -> dict[str, Any]:
    """A list of calls. Each tool's schema becomes a definition, and what it refers to within itself is looked for there."""
    calls = [{"type": "object", "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
              "required": ["name", "parameters"], "additionalProperties": False} for name in schemas]
    return {"type": "array", "minItems": 1, **({} if many else {"maxItems": 1}), "items": {"anyOf": calls},
            "$defs": {name: _moved(schema, f"#/$defs/{name}") for name, schema in schemas.items()}}


def _moved(schema: Any, root: str) -> Any:
    if isinstance(schema, list):
        return [_moved(value, root) for value in schema]
    if isinstance(schema, dict):
        return {key: root + value[1:] if key == "$ref" and isinstance(value, str) and value.startswith("#") else _moved(value, root)
                for key, value in schema.items()}
    return schema
