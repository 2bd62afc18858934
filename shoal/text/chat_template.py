"""Chat templates turn messages into prompt text, through Jinja in a sandbox, with the names and rules that
`transformers` gives to templates.

A template is part of a checkpoint, so it is not trusted: it gets plain JSON values only. tokenizer.py turns
the text into tokens.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.parser
import jinja2.runtime
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.errors import RequestError
from shoal.text import conversation, tool_prompt
from shoal.text.template_traits import USER, WORD, TemplateTraits
from shoal.text.thinking import ThinkingVariables

TEXT_PARTS = ("text", "input_text", "output_text")
# This text marks where a continued message ends. Its last character, a space, shows whether the template
# trims messages.
CONTINUE = "<|continue here|> "
# Claude Code begins its system prompt with this line, whose value changes with each request. Left in, no
# later block of the prompt would be found in the prefix cache.
BILLING_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
# The roles of OpenAI's API. A template may know others.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Names under which clients send reasoning. Templates read the first, except gpt-oss' and LFM2's, which read
# the second.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
PLAIN_TYPES = frozenset({int, float, bool, type(None)})
MOST_REPEATED = 10_000_000  # limit for characters or items that a template's `*` makes
MOST_BITS = 100_000  # limit for bits of a number that a template's `**` makes
# A template's own code may raise these.
FAILURES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError)


class ChatTemplate:
    """One compiled template. Raises RequestError if the source is not valid Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens`: variables of every conversation, such as bos_token."""
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", "?")
            raise RequestError(
                f"the chat template is not valid Jinja: {error} (line {line}); give another as chat_template"
            ) from None
        self._source = source
        self._reads_parts = _loops_over_content(tree)
        names = jinja2.meta.find_undeclared_variables(tree)
        self.reads_tools = "tools" in names
        self._reads_calls = _names(tree, "tool_calls")
        self._knows_developer = _names(tree, "developer")
        self._special_tokens = dict(special_tokens or {})
        self._traits = TemplateTraits(self._probe)
        constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self.thinking = ThinkingVariables(names, constants, functools.partial(self._tried, [USER]))

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        tool_call_parser: str = "hermes",
        **variables: Any,
    ) -> str:
        """Returns the prompt's text. Raises RequestError for malformed messages, and with the template's own
        message if it refuses them.

        If the template does not write tools or calls itself, they are written in the format of
        `tool_call_parser` (tool_prompt.py).
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; switch one of them off",
                field="continue_final_message",
            )
        variables = {
            "documents": None,
            **self._special_tokens,
            **_plain(variables, "the chat template's variables"),
        }
        messages = [self._prepare(i, message) for i, message in enumerate(_checked(messages))]
        tools = _plain(tools, "tools", "tools")
        if not isinstance(tools, list | None) or not all(isinstance(tool, dict) for tool in tools or ()):
            raise RequestError(
                f"tools must be a list of tools, got {tools!r:.80}; a tool is "
                "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}",
                field="tools",
            )
        own_roles = [i for i, message in enumerate(messages) if _has_own_role(message)]
        if self._reads_calls:
            messages = self._with_calls(messages)
        else:
            messages = tool_prompt.with_calls_as_text(messages, tool_call_parser)
        if tools and not self.reads_tools:
            messages = tool_prompt.with_tools(messages, tool_prompt.describe(tools, tool_call_parser))
        if continue_final_message:
            _mark_end(messages[-1])

        def write(messages: list[dict[str, Any]]) -> str:
            if self._wants_parts:
                messages = conversation.with_parts(messages)
            return self._template.render(
                {
                    **variables,
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )

        text = _with_all_instructions(write, messages, self._source)
        if own_roles:
            self._check_roles(messages, own_roles, write)
        return _cut_at_mark(text) if continue_final_message else text

    def _check_roles(
        self, messages: list[dict[str, Any]], places: list[int], write: Callable[[list[dict[str, Any]]], str]
    ) -> None:
        """Raises RequestError for a role that the template leaves out. `places`: where the request had the
        messages with roles of its own."""
        marked = [
            _marked(k, message) if _has_own_role(message) else message for k, message in enumerate(messages)
        ]
        written = _with_all_instructions(write, marked, self._source)
        for i, message in zip(places, filter(_has_own_role, marked)):
            if conversation.as_text(message["content"]) not in written:
                raise RequestError(
                    f"messages[{i}].role must be one that the chat template writes, got "
                    f"{message['role']!r:.60}; send {', '.join(ROLES)}",
                    field=f"messages[{i}].role",
                )

    @functools.cached_property
    def _wants_parts(self) -> bool:
        """True if the template writes the text of parts alone, as some templates of vision models do."""

        def writes(content: Any) -> bool:
            return WORD in (self._tried([{"role": "user", "content": content}]) or "")

        return self._reads_parts and not writes(WORD) and writes([{"type": "text", "text": WORD}])

    def _probe(self, messages: list[dict[str, Any]]) -> str | None:
        return self._tried(conversation.with_parts(messages) if self._wants_parts else messages)

    def _tried(self, messages: list[dict[str, Any]], variables: Mapping[str, Any] = {}) -> str | None:
        given = {"messages": messages, "tools": None, "add_generation_prompt": False}
        try:
            return self._template.render({**self._special_tokens, **given, **variables})
        except (jinja2.TemplateError, *FAILURES):
            return None

    def _with_calls(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the conversation with calls, ids and arguments in a form that the template accepts."""
        num_calls = [len(message.get("tool_calls") or ()) for message in messages]
        if max(num_calls) > 1 and not self._traits.takes_several_calls:
            messages = conversation.with_one_call_each(messages)
        if any(num_calls):
            if self._traits.drops_calls_beside_words:
                empty = None if self._traits.writes_calls_beside_null else ""
                messages = conversation.with_calls_alone(messages, empty)
            if not self._traits.takes_instructions_before_results:
                messages = conversation.with_results_first(messages)
            if not self._traits.takes_words_after_results:
                messages = conversation.with_words_in_results(messages)
            if self._traits.wants_short_ids or self._traits.wants_ids:
                messages = conversation.with_ids(messages, short=self._traits.wants_short_ids)
            messages = [
                {**message, "tool_calls": [self._with_arguments(call) for call in message["tool_calls"]]}
                if message.get("tool_calls")
                else message
                for message in messages
            ]
        return messages

    def _with_arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        """Returns the call with arguments that the template accepts; {} if they are missing. A list or text
        is put into an object if the template accepts neither its own type nor text."""
        if "function" not in call:
            return call
        function = call["function"]
        given = function.get("arguments")
        value = conversation.parsed_arguments(given)
        if not self._traits.takes_arguments(value):
            if self._traits.takes_arguments(""):
                value = given if isinstance(given, str) else json.dumps(value, ensure_ascii=False)
            elif not isinstance(value, dict):
                value = {"arguments": value}
        return {**call, "function": {**function, "arguments": value}}

    def _prepare(self, i: int, message: Any) -> dict[str, Any]:
        """Returns a plain copy of messages[i]. Its content is as this template expects it: a list of text
        parts if the template loops over them, otherwise text."""
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{i}] must be an object with a role, got {message!r:.80}; a message is "
                f"{{'role': 'user', 'content': 'text'}}",
                field=f"messages[{i}]",
            )
        # As in OpenAI's API, a field with None counts as absent; so does content without parts.
        plain = _plain(message, f"messages[{i}]", f"messages[{i}]")
        message = {
            key: value
            for key, value in plain.items()
            if value is not None and (key, value) != ("content", [])
        }
        if message["role"] == "developer" and not (self._knows_developer and self._traits.writes_developer):
            message["role"] = "system"  # its older name
        content = message.get("content", "")
        is_system = message["role"] in ("system", "developer")
        if is_system and isinstance(content, str):
            content = without_billing_line(content)
        if isinstance(content, list):
            texts = [_part_text(f"messages[{i}].content", part) for part in content]
            if is_system:
                texts = without_billing_lines(texts)
            content = [{"type": "text", "text": t} for t in texts] if self._reads_parts else "\n".join(texts)
        elif not isinstance(content, str):
            raise RequestError(
                f"messages[{i}].content must be text or a list of text parts, got {content!r:.80}; send one "
                "of them",
                field=f"messages[{i}].content",
            )
        calls = message.get("tool_calls", [])
        if (
            calls == []
        ):  # some clients send an empty list with each answer, and some templates count calls by the key
            message.pop("tool_calls", None)
        if not isinstance(calls, list):
            raise RequestError(
                f"messages[{i}].tool_calls must be a list of calls, got {calls!r:.80}; send one",
                field=f"messages[{i}].tool_calls",
            )
        for k, call in enumerate(calls):
            if not isinstance(call, dict) or not isinstance(call.get("function", {}), dict):
                raise RequestError(
                    f"messages[{i}].tool_calls[{k}] must be a call, got {call!r:.80}; a call is "
                    f"{{'type': 'function', 'function': {{'name': ..., 'arguments': ...}}}}",
                    field=f"messages[{i}].tool_calls[{k}]",
                )
        if message["role"] == "assistant" and "content" not in message:
            content = (
                None if (self._traits.takes_null_beside_calls if calls else self._traits.takes_null) else ""
            )
        if (
            message["role"] == "assistant"
            and content == ""
            and not calls
            and not self._traits.takes_empty_answers
        ):
            content = " "
        thoughts = next((message[n] for n in THOUGHTS if isinstance(message.get(n), str)), None)
        if thoughts is not None:
            message["reasoning_content"] = thoughts
            if not (calls and content) or self._traits.takes_thoughts_beside_words:
                message.setdefault("thinking", thoughts)
        return {**message, "content": content}


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on `*` and `**`, so that one operator cannot take all memory or all
    time."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if (
                operator == "*"
                and isinstance(one, (str, list, tuple))
                and isinstance(other, int)
                and len(one) * other > MOST_REPEATED
            ):
                raise ValueError(
                    f"a text or list of {len(one)} times {other} is more than {MOST_REPEATED} long"
                )
        if (
            operator == "**"
            and isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * right > MOST_BITS
        ):
            raise ValueError(f"{left} ** {right} has more than {MOST_BITS} bits")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}, which marks a model's text for training. Only its body is rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _checked(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError(
            f"messages must be a list of messages, got {messages!r:.80}; give [{{'role': 'user', 'content': "
            "'text'}]",
            field="messages",
        )
    return messages


def _plain(value: Any, what: str, field: str | None = None) -> Any:
    """Returns a copy of JSON values only. An object with its own methods could escape the sandbox. `what`
    names the value in errors, and `field` the field of the request."""
    try:
        return _copied(value)
    except (TypeError, RecursionError) as error:
        raise RequestError(f"{what}: {error}; send JSON values only", field=field) from None


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind is str:
        return conversation.with_whole_characters(value)
    if kind in PLAIN_TYPES:
        return value
    if isinstance(value, dict):
        return {key if type(key) is str else _key(key): _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in value]
    for plain in (str, bool, int, float):  # a subclass may have methods of its own
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"a {kind.__name__} is not a JSON value")


def _key(key: Any) -> str:
    """Returns a key as text. Other keys become their JSON."""
    if isinstance(key, str):
        return str(key)
    if key is None or isinstance(key, (bool, int, float)):
        return json.dumps(key)
    raise TypeError(f"keys must be strings, got {key!r:.80}")


def without_billing_line(text: str) -> str:
    """Returns a system text without Claude Code's billing line, if the text begins with it."""
    found = BILLING_LINE.match(text)
    return text if found is None else text[found.end() :]


def without_billing_lines(texts: Sequence[str]) -> list[str]:
    """Returns the blocks of a system prompt without billing lines; a block that holds nothing else is left
    out."""
    return [kept for text in texts if (kept := without_billing_line(text)) or not text]


def _part_text(field: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if (
        isinstance(part, dict)
        and part.get("type", "text") in TEXT_PARTS
        and isinstance(part.get("text"), str)
    ):
        return part["text"]
    raise RequestError(
        f"{field} must be text, got the part {part!r:.80}; send {{'type': 'text', 'text': ...}}", field=field
    )


def _with_all_instructions(
    write: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]], source: str
) -> str:
    """Returns the prompt's text in the first of three forms in which the template writes all system and
    developer messages: in their order, joined into a leading one, before the user's first message. If the
    template changes their text, so that they are found in no form, the first accepted form is used. Raises
    RequestError with the template's own message if it accepts no form.

    If the text of an instruction also appears elsewhere, marks are rendered in place of the instructions."""
    texts = conversation.instructions(messages)
    others = [conversation.as_text(m["content"]) for m in messages if not _is_instruction(m)]
    is_doubtful = any(text.strip() in other for text in texts for other in (source, *others))
    is_doubtful = is_doubtful or len(set(texts)) < len(texts)
    marked = [_marked(k, m) if _is_instruction(m) else m for k, m in enumerate(messages)]
    marks = conversation.instructions(marked)
    forms: list[Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]]] = [list]
    if any(map(_is_instruction, messages)):
        forms += [conversation.with_one_instruction, conversation.with_instructions_of_user]
    taken: str | None = None
    refusal: Exception | None = None
    for form in forms:
        try:
            text = write(form(messages))
            is_whole = all(_appears(one, text) for one in texts)
            if is_whole and is_doubtful:
                written = write(form(marked))
                is_whole = all(mark in written for mark in marks)
        except (jinja2.TemplateError, *FAILURES) as error:
            refusal = refusal or error
            continue
        if is_whole:
            return text
        taken = text if taken is None else taken
    if taken is None:
        raise RequestError(f"messages: the chat template refuses them: {refusal}", field="messages") from None
    return taken


def _is_instruction(message: dict[str, Any]) -> bool:
    return message["role"] in conversation.INSTRUCTIONS


def _has_own_role(message: dict[str, Any]) -> bool:
    return message["role"] not in ROLES


def _marked(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with a text by which it can be found in a prompt; an empty one stays."""
    content = message["content"]
    if _is_instruction(message) and not conversation.as_text(content).strip():
        return message
    mark = f"Does message {number} appear?"
    return {**message, "content": [{"type": "text", "text": mark}] if isinstance(content, list) else mark}


def _appears(text: str, prompt: str) -> bool:
    """True if the template has written `text`, possibly with other white space."""
    return text.strip() in prompt or "".join(text.split()) in "".join(prompt.split())


def _mark_end(message: dict[str, Any]) -> None:
    if isinstance(message["content"], str | None):
        message["content"] = (message["content"] or "") + CONTINUE
    elif message["content"]:
        message["content"][-1]["text"] += CONTINUE


def _cut_at_mark(text: str) -> str:
    end = text.rfind(CONTINUE.strip())
    if end < 0:
        raise RequestError(
            "the chat template does not write the final message's content, so it cannot be continued; "
            "drop continue_final_message"
        )
    return text[:end] if text.startswith(CONTINUE, end) else text[:end].rstrip()


def _loops_over_content(tree: nodes.Template) -> bool:
    """True if the template loops over a message's content, or maps it, directly or through a variable that is
    set from it."""
    names = {"content"}

    def is_content(node: nodes.Node | None) -> bool:
        while isinstance(node, nodes.Filter) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        key: nodes.Node | None = None
        if isinstance(node, nodes.Getitem):
            key = node.arg
        elif (
            isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get"
        ):
            key = node.args[0] if node.args else None
        return (
            (isinstance(node, nodes.Name) and node.name in names)
            or (isinstance(node, nodes.Getattr) and node.attr == "content")
            or (isinstance(key, nodes.Const) and key.value == "content")
        )

    names |= {
        a.target.name
        for a in tree.find_all(nodes.Assign)
        if isinstance(a.target, nodes.Name) and is_content(a.node)
    }
    maps = (each for each in tree.find_all(nodes.Filter) if each.name == "map")
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For)) or any(map(is_content, maps))


def _names(tree: nodes.Template, name: str) -> bool:
    """True if the template reads an attribute of this name, or has this text as a constant."""
    return any(node.attr == name for node in tree.find_all(nodes.Getattr)) or any(
        node.value == name for node in tree.find_all(nodes.Const)
    )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Implements the filter `tojson`. Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
