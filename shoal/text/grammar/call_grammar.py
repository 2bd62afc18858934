"""`call_grammar`: calls in a family's own syntax as a grammar in Lark.

JSON arguments follow their schema as any structured output does. An argument between tags is the text itself
where its schema allows a string, and JSON otherwise. A text ends at its closing tag, so it cannot contain it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.text.grammar.argument_schema import (
    as_document,
    call_schema,
    escaped,
    kinds,
    resolved,
    undescribed,
    without,
    without_text,
)
from shoal.text.grammar.closed_schema import ANNOTATIONS, IDENTITY
from shoal.text.grammar.lark import lark_text, literal
from shoal.text.grammar.pair_grammar import PairWriter
from shoal.text.grammar.text_regexes import ANY_TEXT, texts_of
from shoal.text.reading.call_syntax import CallSyntax, PairedArguments, TaggedArgument

# Within a text of Python in single quotes: characters, and escapes that JSON has, too
PLAIN = r"[^'\\\x00-\x08\x0b\x0c\x0e-\x1f]"
ESCAPE = r"\\([\\'\x22bfnrt]|u[0-9A-Fa-f]{4})"

# A newline after the last call, where calls are separated by newlines, must not force another call.
BLANK_LINES = r"/\n{0,2}/"


def call_grammar(
    syntaxes: Sequence[CallSyntax], schemas: Mapping[str, dict[str, Any]], many: bool, opening: str = ""
) -> str:
    """Returns the grammar of one or more calls, all in one of `syntaxes`. schemas: the arguments' schema of
    each tool. many: there may be several calls. opening: the beginning of the calls' text, which precedes
    the grammar."""
    writer = CallWriter(schemas)
    return writer.text(" | ".join(writer.calls(syntax, many, opening) for syntax in syntaxes))


class CallWriter:
    """Writes the rules of calls of these tools."""

    def __init__(self, schemas: Mapping[str, dict[str, Any]]) -> None:
        self._schemas = schemas
        self._rules: list[str] = []
        self._names: dict[tuple[str, str], str] = {}  # rules by their bodies and options
        self._arguments_of: dict[tuple[CallSyntax, str], str] = {}  # rules by syntax and tool
        self.values: dict[tuple[PairedArguments, str, str], str] = {}  # rules of pair_grammar.py's values

    def text(self, start: str) -> str:
        """Returns the grammar, whose first rule has the body `start`."""
        return "\n".join([f"start: {start}", *self._rules])

    def named(self, body: str, prefix: str = "r", options: str = "") -> str:
        """Adds a rule, or with the prefix R a terminal, and returns its name."""
        if (body, options) not in self._names:
            name = self._names[body, options] = f"{prefix}{len(self._rules)}"
            self._rules.append(f"{name}{options}: {body}")
        return self._names[body, options]

    def lazy(self, terminal: str) -> str:
        """Adds a rule for a terminal that ends as soon as it can."""
        return self.named(self.named(terminal, "R"), options="[lazy]")

    def reserve(self) -> str:
        self._rules.append("")
        return f"v{len(self._rules) - 1}"

    def define(self, name: str, body: str) -> None:
        self._rules[int(name[1:])] = f"{name}: {body}"

    def calls(self, syntax: CallSyntax, many: bool, opening: str = "") -> str:
        """Returns a body of calls. many: there may be several. opening: the text that precedes the body."""
        return self._and_more(self._call(syntax, syntax.begin, opening), syntax, many)

    def calls_after(self, head: str, syntax: CallSyntax, many: bool) -> str:
        """Returns a body of calls. head: a regex of the text before the first call's arguments, with {name}
        for its name."""
        return self._and_more(self.call_after(head, syntax), syntax, many)

    def call_after(self, head: str, syntax: CallSyntax) -> str:
        """Returns a body of one call, which may end before `syntax.end`."""
        found = []
        for name in self._schemas:
            begin = self.named(f"/{head.replace('{name}', literal(name))}/", "R")
            found.append(f"{begin} {self._arguments(syntax, name)}")
        return " | ".join(found)

    def _and_more(self, first: str, syntax: CallSyntax, many: bool) -> str:
        more = f" ({self._call(syntax, syntax.separator)})*" if many and not syntax.is_single else ""
        if more and syntax.separator.startswith("\n") and not syntax.end:
            more += f" {BLANK_LINES}"
        end = f" ({lark_text(syntax.end)})?" if syntax.may_end else ""
        return _joined("", f"({first}){more}{end}", "" if end else syntax.end)

    def _call(self, syntax: CallSyntax, begin: str, opening: str = "") -> str:
        """Returns a call of any tool after the text `begin`, without the text `opening`."""
        if syntax.key:
            call = self.json(call_schema(self._schemas, syntax.key))
            return _joined((begin + syntax.before).removeprefix(opening), call, syntax.after)
        found = []
        for name in self._schemas:
            # A name and the text after it are one terminal, as a name may begin another name.
            middle, *more = syntax.middle.replace("{name}", name).split("{number}")
            head = (begin + syntax.before + name + middle).removeprefix(opening)
            number = "".join(f"/[0-9]{{1,3}}/ {lark_text(text)} " for text in more)
            found.append(_joined(head, number + self._arguments(syntax, name)))
        return " | ".join(found)

    def _arguments(self, syntax: CallSyntax, name: str) -> str:
        """Returns the rule of a tool's arguments and the text after them, which is written once."""
        if (syntax, name) not in self._arguments_of:
            self._arguments_of[syntax, name] = self._written(syntax, self._schemas[name])
        return self._arguments_of[syntax, name]

    def _written(self, syntax: CallSyntax, schema: dict[str, Any]) -> str:
        if isinstance(syntax.argument, PairedArguments):
            arguments = PairWriter(self, syntax.argument, schema).arguments()
        elif syntax.argument is not None:
            arguments = self._tagged(syntax.argument, schema)
        else:
            arguments = self.json(without(schema, IDENTITY))
        return self.named(_joined("", arguments, ("}" if syntax.key else "") + syntax.after) or '""')

    def _tagged(self, syntax: TaggedArgument, schema: dict[str, Any]) -> str:
        """Returns the arguments that the schema names, in its order."""
        schema = resolved(schema, schema)
        properties, required = schema.get("properties"), schema.get("required")
        properties = dict(properties) if isinstance(properties, dict) else {}
        required = required if isinstance(required, list) else []
        properties.update((key, {}) for key in required if isinstance(key, str) and key not in properties)
        found = []
        for key, value in properties.items():
            rule = self._argument(syntax, key, value, schema)
            found.append(rule if key in required else f"({rule})?")
        return " ".join(found)

    def _argument(self, syntax: TaggedArgument, key: str, schema: Any, root: dict[str, Any]) -> str:
        texts, values = [], []
        for kind, value in kinds(schema, root):
            if kind == "string":
                texts.append(self.until(syntax, value))
            elif kind == "value":
                texts.append(lark_text(value + syntax.lead + syntax.end))
            else:
                value = as_document(without(value, ANNOTATIONS - {"$ref", "$defs", "definitions"}), root)
                inner = self.json(without_text(value, syntax.end))
                values.append(f"{inner} {lark_text(syntax.lead + syntax.end)}")
        begin, found = syntax.before + key, []
        if texts:
            found.append(_joined(begin + syntax.string + syntax.middle, f"({' | '.join(texts)})"))
        if values:
            found.append(_joined(begin + syntax.other + syntax.middle, f"({' | '.join(values)})"))
        return _joined("", f"({' | '.join(found)})", syntax.after)

    def json(self, schema: Any) -> str:
        return self.named("%json " + json.dumps(undescribed(schema), ensure_ascii=False))

    def single_quoted(self, schema: dict[str, Any]) -> str:
        """Adds a terminal for a text of Python in single quotes. If the schema limits it, it has no escapes.
        Raises RequestError for limits that no regex has."""
        if (texts := texts_of(schema)) == [ANY_TEXT]:
            return self.named(f"/'({PLAIN}|{ESCAPE})*'/", "R")
        return self.named(" & ".join([f"/'({PLAIN})*'/", *(f"/'{text}'/" for text in texts)]), "R")

    def until(self, syntax: TaggedArgument, schema: dict[str, Any]) -> str:
        """Adds a terminal for a text and its closing tag, which is nowhere else in it."""
        ending, end = escaped(syntax.lead + syntax.end), escaped(syntax.end)
        parts = [f"/{text}{ending}/" for text in texts_of(schema)]
        return self.named(" & ".join([*parts, f"~/(?s:.*){end}(?s:.+)/"]), "R")


def _joined(before: str, body: str = "", after: str = "") -> str:
    """Returns a rule's body between two texts, each possibly empty."""
    return " ".join(part for part in (_text(before), body, _text(after)) if part.strip())


def _text(text: str) -> str:
    return lark_text(text) if text else ""
