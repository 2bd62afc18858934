"""Chat templates: messages to prompt text, through Jinja in a sandbox, with the names and rules that `transformers` gives templates.

A template comes with a checkpoint, so it is not trusted: it sees plain JSON values only. Tokens are left to tokenizer.py.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.parser
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.errors import RequestError

TEXT_PARTS = ("text", "input_text", "output_text")
# Marks where a continued message ends. The space at its end tells whether the template trims messages.
CONTINUE = "<|continue here|> "


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", "?")
            raise RequestError(f"the chat template is not valid Jinja: {error} (line {line}); give another as chat_template") from None
        self._reads_parts = _loops_over_content(tree)

    def render(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool, continue_final_message: bool = False,
               tools: list[dict[str, Any]] | None = None, **variables: Any) -> str:
        """Raises RequestError for malformed messages, and with the template's own words if it refuses them."""
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message and add_generation_prompt exclude each other; set one of them to False")
        messages = [self._prepare(i, message) for i, message in enumerate(_checked(messages))]
        if continue_final_message:
            _mark_end(messages[-1])
        try:
            text = self._template.render({"documents": None, **_plain(variables, "the chat template's variables"), "messages": messages,
                                          "tools": _plain(tools, "tools"), "add_generation_prompt": add_generation_prompt})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            raise RequestError(f"the chat template does not take these messages: {error}") from None
        return _cut_at_mark(text) if continue_final_message else text

    def _prepare(self, i: int, message: Any) -> dict[str, Any]:
        """A plain copy, its content as this template expects it: text, or text parts if it loops over them."""
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {i} {message!r:.80} is no dict with a 'role'; a message is {{'role': 'user', 'content': 'text'}}")
        # As with OpenAI's API, what is None is absent; a message of nothing but tool calls has empty content.
        message = {key: value for key, value in _plain(message, f"message {i}").items() if value is not None}
        content = message.get("content", "")
        if isinstance(content, list):
            texts = [_part_text(i, part) for part in content]
            content = [{"type": "text", "text": t} for t in texts] if self._reads_parts else "\n".join(texts)
        elif not isinstance(content, str):
            raise RequestError(f"the content {content!r:.80} of message {i} is neither text nor a list of text parts")
        calls = message.get("tool_calls", [])
        if not isinstance(calls, list):
            raise RequestError(f"the tool_calls {calls!r:.80} of message {i} are no list of calls")
        for call in calls:
            _parse_arguments(i, call)
        return {**message, "content": content}


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what a model wrote, for training. Here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _checked(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError(f"the conversation {messages!r:.80} is no list of messages; give [{{'role': 'user', 'content': 'text'}}]")
    return messages


def _plain(value: Any, what: str) -> Any:
    """JSON values: an object with methods of its own would be a way out of the sandbox."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what}: {error}; only what JSON can express may be in a conversation") from None


def _part_text(i: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS and isinstance(part.get("text"), str):
        return part["text"]
    raise RequestError(f"message {i} has a content part {part!r:.80}; this model reads text: {{'type': 'text', 'text': ...}}")


def _parse_arguments(i: int, call: Any) -> None:
    """OpenAI's API carries a tool call's arguments as JSON text; templates expect the value."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the arguments {function['arguments']!r:.80} of a tool call in message {i} are not JSON: {error}") from None


def _mark_end(message: dict[str, Any]) -> None:
    if isinstance(message["content"], str):
        message["content"] += CONTINUE
    elif message["content"]:
        message["content"][-1]["text"] += CONTINUE


def _cut_at_mark(text: str) -> str:
    end = text.rfind(CONTINUE.strip())
    if end < 0:
        raise RequestError("the chat template does not write the final message's content, so nothing can continue it; "
                           "drop continue_final_message")
    return text[:end] if text.startswith(CONTINUE, end) else text[:end].rstrip()


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template has a loop over a message's content, directly or through a variable set from it."""
    names = {"content"}

    def is_content(node: nodes.Node | None) -> bool:
        while isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
            node = node.node
        return ((isinstance(node, nodes.Name) and node.name in names) or (isinstance(node, nodes.Getattr) and node.attr == "content")
                or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"))

    names |= {a.target.name for a in tree.find_all(nodes.Assign) if isinstance(a.target, nodes.Name) and is_content(a.node)}
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
             sort_keys: bool = False) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
