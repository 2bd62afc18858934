"""Tools of a request: checked, put into the prompt, enforced by a grammar on request, and parsed out of the
answer.

`tool_choice` means the same as in OpenAI's API and vLLM:

- "auto": the model decides. Calls are found in its text, in the format of the model's chat template. If a
  tool is strict, a grammar holds from the mark that begins a call to its end.
- "none": there are no calls. The tools are left out of the prompt, so that nothing invites one.
- "required": the answer is one or more calls, by a grammar.
- a function: the answer is a call of this function, by a grammar. The finish reason stays "stop", where the
  others say "tool_calls".
- allowed_tools: "auto" or "required" with some of the tools. All are in the prompt, and a call of another one
  is text like any other.

The grammar is in the syntax of the model's family. Without one, "required" means a list of calls in JSON, and
a function its arguments in JSON.

The request may also set a format (response_format and the like). With "none" the answer has this format, with
"auto" it has this format or is a call, and with the others it is the call. With a format other than JSON (a
regex, a choice, a grammar), "auto" allows no calls.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from shoal.errors import RequestError
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from shoal.server.errors import ApiError
from shoal.server.http.exchange import Exchange
from shoal.text.conversation import with_whole_escapes
from shoal.text.formats.registry import THOUGHTS_BY_NAME, choose, choose_thoughts, form_of
from shoal.text.grammar.argument_schema import call_schema
from shoal.text.grammar.call_grammar import call_grammar
from shoal.text.grammar.free_calls import text_and_calls
from shoal.text.reading.chat_format import ChatFormat
from shoal.text.reading.enforced import ListedCalls, NamedCall
from shoal.text.reading.messages import Messages
from shoal.text.reading.parts import CallDelta, Part
from shoal.text.reading.reader import Expected, Reader
from shoal.text.reading.thoughts import Start, Thoughts
from shoal.text.thinking import Thinking
from shoal.text.thinking_budget import ThinkingBudget
from shoal.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
CHOICES = ("auto", "none", "required")


def choose_tool_call_parser(setting: str, chat_template: str | None, added_tokens: Sequence[str] = ()) -> str:
    """Resolves ServerConfig.tool_call_parser for a model: a name of the registry, or "none". "auto" is
    decided by the text of the chat template, then by the tokenizer's added tokens; the log says so if no form
    of calls is known."""
    if setting != "auto":
        return setting
    name, problem = choose(chat_template or "", added_tokens)
    if problem is not None:
        logger.warning(
            "%s: with tool_choice auto they stay text; use tool_choice required or a function, or choose "
            "a parser by --tool-call-parser",
            problem,
        )
    return name


def choose_reasoning_parser(setting: str, chat_template: str | None) -> str:
    """Resolves ServerConfig.reasoning_parser for a model: by the marks in the chat template, else "none"."""
    return choose_thoughts(chat_template or "") if setting == "auto" else setting


@dataclass(slots=True)
class ToolPlan:
    """Tool use of one request: the tools that the model may call, whether a grammar enforces a call, and
    how calls are parsed."""

    mode: str = "none"  # "none" | "auto" | "required" | "named"
    tools: list[dict[str, Any]] | None = None  # for the prompt
    name: str = ""  # the tool's name, if the mode is "named"
    parallel: bool = True  # more calls than one may be made
    # The arguments' schema of each tool that may be called, by the tool's name.
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_limited: bool = False  # a call of any other tool counts as text
    has_headers: bool = False  # the grammar has the headers of messages to the user
    is_strict: bool = False  # a call that the model decides to make follows its schema
    structured: StructuredOutputsParams | None = None  # the grammar that enforces "required" and "named"
    thinks: bool = True  # False: a grammar holds from the answer's first token on, so there is no reasoning

    @property
    def is_enforced(self) -> bool:
        """True if a grammar makes the answer a call, even if the model does not know the tools."""
        return self.mode in ("required", "named")

    def constrain(
        self, params: SamplingParams, parser: str, reasoning_parser: str, names: dict[str, str]
    ) -> None:
        """Sets the request's grammar to the plan's, combined with the format that the request has. parser,
        reasoning_parser: the model's. names: see Exchange."""
        form = params.structured_outputs
        thoughts = THOUGHTS_BY_NAME.get(reasoning_parser)
        if self.mode == "auto":
            if self.schemas and form is not None and (form.json is not None or form.json_object):
                params.structured_outputs = self._call_or(form, parser, thoughts)
            elif self.is_strict and form is None:
                written = form_of(parser)
                # Free text would otherwise take the mark, and with it calls that the reasoning quotes.
                marks = () if thoughts is None else (thoughts.open,)
                tag = text_and_calls(written, self.schemas, self.parallel, marks)
                if tag is not None:
                    params.structured_outputs = StructuredOutputsParams(structural_tag=tag)
                    self.has_headers = isinstance(written, Messages)
                    names["structured_outputs"] = names.get("tools", "tools")
        elif self.structured is not None:
            closes = form.disable_additional_properties if form is not None else None
            params.structured_outputs = replace(self.structured, disable_additional_properties=closes)
            names["structured_outputs"] = names.get("tools", "tools")
        self.thinks = params.structured_outputs is None or (
            thoughts is not None and (not self.is_enforced or bool(form_of(parser).syntaxes))
        )

    def _call_or(
        self, form: StructuredOutputsParams, parser: str, thoughts: Thoughts | None
    ) -> StructuredOutputsParams:
        """Returns a grammar for either calls in the parser's format or JSON of `form`; for JSON alone if the
        calls of the parser have no grammar."""
        syntaxes = form_of(parser).syntaxes
        if not syntaxes:
            return form
        calls = {"type": "grammar", "grammar": call_grammar(syntaxes, self.schemas, self.parallel)}
        answer = _json_part({"type": "object"} if form.json_object else form.json)
        if (
            thoughts is not None and thoughts.turn
        ):  # a call and the words are messages with headers of their own
            head = (thoughts.words or thoughts.forced.removeprefix(thoughts.close)).removeprefix(
                thoughts.turn
            )
            answer = {"type": "sequence", "elements": [{"type": "const_string", "value": head}, answer]}
        either = {"type": "or", "elements": [calls, answer]}
        self.has_headers = True
        return replace(
            form, json=None, json_object=None, structural_tag={"type": "structural_tag", "format": either}
        )


def plan_tools(
    tools: list[dict[str, Any]] | None,
    tool_choice: str | dict[str, Any] | None,
    parallel: bool | None,
    parser: str,
    left_out: Sequence[str] = (),
) -> ToolPlan:
    """Checks `tools` and `tool_choice` of OpenAI's chat API. parser: the model's. left_out: requested
    tools that this server does not have, by name or type. Raises RequestError."""
    schemas, is_limited = _check_tools(tools), False
    tools = [_without_nulls(tool) for tool in tools] if tools is not None else None
    choice = tool_choice if tool_choice is not None else ("auto" if schemas else "none")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, names = _allowed(choice, schemas, left_out)
        schemas = {name: schemas[name] for name in names}
        is_limited = True
    if isinstance(choice, dict):
        name = _chosen(choice, schemas, left_out)
        schemas = {name: schemas[name]}
        arguments = StructuredOutputsParams(json=schemas[name])
        structured = _calls_grammar(parser, schemas, many=False) or arguments
        return ToolPlan("named", tools, name, schemas=schemas, is_limited=True, structured=structured)
    if choice not in CHOICES:
        raise RequestError(
            f"tool_choice must be {', '.join(CHOICES)} or a function, got {choice!r:.100}; choose one",
            field="tool_choice",
        )
    if choice == "none":
        return ToolPlan()
    if not schemas and choice == "required":
        why = "the request has none; send some"
        if left_out:
            why = f"this server has none of the tools sent ({', '.join(left_out):.200}); send functions"
        raise RequestError(f"tool_choice 'required' needs tools, and {why}", field="tool_choice")
    if not tools:
        return ToolPlan()
    many = parallel is not False
    if choice == "required":
        return ToolPlan(
            "required",
            tools,
            parallel=many,
            schemas=schemas,
            structured=_calls_grammar(parser, schemas, many)
            or StructuredOutputsParams(json=_calls_schema(schemas, many)),
        )
    if parser == "none":
        raise RequestError(
            "tool_choice 'auto' needs a parser of calls, and this server runs with --tool-call-parser none; "
            "choose a function, 'required' or 'none'",
            field="tool_choice",
        )
    is_strict = any(tool["function"].get("strict") is True for tool in tools)
    return ToolPlan("auto", tools, parallel=many, schemas=schemas, is_limited=is_limited, is_strict=is_strict)


def _chosen(choice: dict[str, Any], schemas: dict[str, Any], left_out: Sequence[str]) -> str:
    """Returns the name of the function that `tool_choice` demands. Raises RequestError."""
    name = _function_name(choice)
    if choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            f"tool_choice must name a function, got {choice!r:.100}; give "
            '{"type": "function", "function": {"name": ...}}, "auto", "none" or "required"',
            field="tool_choice",
        )
    if name in left_out:
        raise RequestError(
            f"tool_choice must name a tool of this server, got {name!r:.100}; choose another, or 'auto'",
            field="tool_choice",
        )
    if name not in schemas:
        raise RequestError(
            f"tool_choice must name one of the request's tools, got {name!r:.100}; "
            f"choose from: {', '.join(schemas) or '(no tools sent)'}",
            field="tool_choice",
        )
    return name


def _allowed(
    choice: dict[str, Any], schemas: dict[str, Any], left_out: Sequence[str]
) -> tuple[str, list[str]]:
    """Returns the mode and the names of a tool_choice of the type allowed_tools. A tool in `left_out` may
    be named and has no effect."""
    given = choice.get("allowed_tools")
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
    names = [_function_name(tool) for tool in tools] if isinstance(tools, list) else []
    if mode not in ("auto", "required") or not names or not all(isinstance(name, str) for name in names):
        raise RequestError(
            f"tool_choice must allow at least one function, got {choice!r:.200}; give it the mode 'auto' or "
            "'required' and a list of tools, "
            '{"type": "function", "function": {"name": ...}}',
            field="tool_choice",
        )
    if unknown := [str(name) for name in names if name not in schemas and name not in left_out]:
        raise RequestError(
            f"tool_choice must allow only the request's tools, got {', '.join(unknown):.200}; "
            f"choose from: {', '.join(schemas) or '(no tools sent)'}",
            field="tool_choice",
        )
    return mode, [str(name) for name in dict.fromkeys(names) if name in schemas]


def _function_name(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def warn_left_out(exchange: Exchange, kind: Any) -> None:
    """Logs, once a client, that a tool of an unsupported type is left out."""
    exchange.warn(
        f"tool {kind!r:.60}",
        f"this server has no tools of the type {kind!r:.60}: they are left out of {exchange.path}",
    )


def thinking_of(effort: str | None, plan: ToolPlan, budget: int | None = None) -> Thinking:
    """Returns what a request with this effort, in OpenAI's words, says about thinking."""
    if not plan.thinks:
        return Thinking(is_on=False, effort=effort)
    return Thinking.of_effort(effort, budget)


def check_finish(reason: str | None) -> str:
    """Returns the finish reason. Raises ApiError for an aborted answer, because these APIs have no word
    for it."""
    if reason not in ("stop", "length"):
        raise ApiError(503, "the answer was aborted: the engine was put to sleep or is ending; try again")
    return reason


class AnswerFormat:
    """The format of a request's answers: reasoning, content and calls."""

    def __init__(
        self,
        plan: ToolPlan,
        tool_call_parser: str,
        reasoning_parser: str,
        prompt: str,
        params: SamplingParams,
    ) -> None:
        """The grammar of the request begins after the reasoning, if there is any."""
        self.plan = plan
        if plan.mode != "none" or reasoning_parser != "none":
            params.skip_special_tokens = False  # many models mark the tags of calls and reasoning as special
        self._form: ChatFormat = form_of(tool_call_parser, reasoning_parser)
        if plan.is_enforced and not form_of(tool_call_parser).syntaxes:
            is_named = plan.mode == "named"
            self._form = NamedCall(self._form, plan.name) if is_named else ListedCalls(self._form)
        thoughts = THOUGHTS_BY_NAME.get(reasoning_parser) if plan.thinks else None
        self._expected = Expected(
            plan.schemas,
            plan.schemas if plan.is_limited else None,
            takes_calls=plan.mode != "none",
            thoughts=thoughts,
            start=Start.UNKNOWN if thoughts is None else thoughts.start_of(prompt),
        )
        if params.structured_outputs is not None and thoughts is not None:
            self._let_think(params, params.structured_outputs, thoughts)

    def _let_think(
        self, params: SamplingParams, structured: StructuredOutputsParams, thoughts: Thoughts
    ) -> None:
        """Lets reasoning precede what the grammar constrains."""
        gap = thoughts.words or thoughts.forced.removeprefix(thoughts.close)
        if self.plan.is_enforced or self.plan.has_headers:
            gap = thoughts.turn
        start = self._expected.start
        if start is not Start.AFTER:
            begin = thoughts.open if start is Start.UNKNOWN else ""
            params.structured_outputs = replace(structured, reasoning=(begin, thoughts.close, gap))

    def budget(self, limit: int | None, tokenizer: Tokenizer | None) -> ThinkingBudget | None:
        """Returns the budget of `limit` tokens for the answers' reasoning. None: no limit, or no
        reasoning."""
        thoughts = self._expected.thoughts
        if limit is None or limit < 0 or thoughts is None or tokenizer is None:
            return None
        start, calls = self._expected.start, self.plan.is_enforced or self.plan.has_headers
        return ThinkingBudget.of(limit, thoughts, start, tokenizer, calls=calls)

    def parser(self, is_whole: bool) -> AnswerParser:
        """Returns a new parser for one answer, whose text comes whole or as a stream."""
        return AnswerParser(Reader(self._form, self._expected, is_whole), self.plan)


class AnswerParser:
    """Splits the text of one answer, as it arrives, into reasoning, content and calls."""

    def __init__(self, reader: Reader, plan: ToolPlan) -> None:
        self._reader, self._mode, self._parallel = reader, plan.mode, plan.parallel

    def push(self, text: str, end: str | None = None) -> list[Part]:
        """Returns the parts of `text`, in their order. end: the engine's finish reason, if nothing follows;
        nothing is held back then."""
        parts = self._reader.push(text, end)
        if not self._parallel:
            parts = [p for p in parts if not isinstance(p, CallDelta) or p.index == 0]
        return parts

    @property
    def is_broken(self) -> bool:
        """True if a stream has begun a call that turned out to be broken, so that it cannot be made."""
        broken = self._reader.broken
        return broken is not None and (self._parallel or broken == 0)

    def finish_reason(self, reason: str) -> str:
        """Returns OpenAI's finish reason for an answer that the engine ended with this reason."""
        can_call = self._reader.index >= 0 and not self.is_broken and self._mode != "named"
        return "tool_calls" if reason == "stop" and can_call else reason


def is_object(arguments: str) -> bool:
    """True if the text is a whole JSON object."""
    try:
        return isinstance(msgspec.json.decode(with_whole_escapes(arguments)), dict)
    except msgspec.DecodeError:
        return False


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str  # JSON text; not whole if the answer was cut short


@dataclass(slots=True)
class Answer:
    """The parts of a whole answer."""

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


def functions_among(
    exchange: Exchange, tools: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Returns the functions among the tools of a request, and the names of the other tools, which are left
    out with a warning: clients send all their tools with every request."""
    functions, left_out = [], []
    for tool in tools or ():
        kind = tool.get("type", "function")
        if kind == "function" or not isinstance(kind, str):
            functions.append(tool)
        else:
            own = tool.get(kind)
            left_out.append(str((own if isinstance(own, dict) else tool).get("name") or kind))
            warn_left_out(exchange, kind)
    return (None if tools is None else functions), left_out


def _without_nulls(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns the tool without its null fields, which count as absent; within its schema, null is a value."""
    function = {name: value for name, value in tool["function"].items() if value is not None}
    return {**{name: value for name, value in tool.items() if value is not None}, "function": function}


def _check_tools(tools: list[dict[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Returns the schema of each tool's parameters, by the tool's name."""
    schemas: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if (tool.get("type") or "function") != "function" or not isinstance(function, dict):
            raise RequestError(
                f"tools[{i}] must be a function, got {tool!r:.100}; give "
                '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}',
                field=f"tools[{i}]",
            )
        name, schema = function.get("name"), function.get("parameters")
        if name is None:
            raise RequestError(
                f"tools[{i}] has no name; give one of letters, digits and any of _ . : -", field=f"tools[{i}]"
            )
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RequestError(
                f"tools[{i}] must have a name of 1 to 128 letters, digits and any of _ . : -, got "
                f"{name!r:.100}; rename it",
                field=f"tools[{i}]",
            )
        if name in schemas:
            raise RequestError(f"tools has {name!r} twice; give each tool a name of its own", field="tools")
        if not isinstance(function.get("description", ""), str | None):
            raise RequestError(
                f"tools[{i}] ({name}) must have a text as description, got "
                f"{function['description']!r:.100}; send a string",
                field=f"tools[{i}]",
            )
        if schema is not None and (not isinstance(schema, dict) or schema.get("type", "object") != "object"):
            raise RequestError(
                f"tools[{i}] ({name}) must have the JSON schema of an object as parameters, got "
                f"{schema!r:.100}; give "
                '{"type": "object", "properties": {...}}',
                field=f"tools[{i}]",
            )
        schemas[name] = {**(schema or {"properties": {}}), "type": "object"}
    return schemas


def _calls_grammar(
    parser: str, schemas: dict[str, dict[str, Any]], many: bool
) -> StructuredOutputsParams | None:
    """Returns the grammar of calls in the parser's syntax; None for a parser without one."""
    syntaxes = form_of(parser).syntaxes
    return StructuredOutputsParams(grammar=call_grammar(syntaxes, schemas, many)) if syntaxes else None


def _calls_schema(schemas: dict[str, dict[str, Any]], many: bool) -> dict[str, Any]:
    """Returns the schema of a list of calls."""
    call = call_schema(schemas, "parameters")
    return {
        "type": "array",
        "minItems": 1,
        **({} if many else {"maxItems": 1}),
        "items": {"anyOf": call["anyOf"]},
        "$defs": call["$defs"],
    }


def _json_part(schema: Any) -> dict[str, Any]:
    """Returns a structural tag's part for JSON of this schema."""
    return {"type": "json_schema", "json_schema": schema}
