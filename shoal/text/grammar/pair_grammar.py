"""`PairWriter`: arguments that a family writes as pairs of a key and a value, `key=value` or `key:value`, as
rules of the grammar of calls (call_grammar.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from shoal.errors import RequestError
from shoal.text.grammar.argument_schema import as_document, kinds, resolved
from shoal.text.grammar.lark import lark_text
from shoal.text.reading.call_syntax import PairedArguments, TaggedArgument

PLAIN_KEY = re.compile(r"\w+")
ANY = {"type": ["string", "number", "boolean", "null", "array", "object"]}
BEYOND = ("not", "if", "allOf", "anyOf", "oneOf", "$dynamicRef")  # keywords for which there are no rules here
BEYOND_LISTS = (*BEYOND, "prefixItems", "contains", "unevaluatedItems")
BEYOND_OBJECTS = (
    *(*BEYOND, "minProperties", "maxProperties", "patternProperties", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)


class Rules(Protocol):
    """The rules that a grammar has so far."""

    def named(self, body: str, prefix: str = "r") -> str:
        """Adds a rule with this body, unless there is one, and returns its name."""
        ...

    def reserve(self) -> str:
        """Returns the name of a rule whose body comes later, by `define`."""
        ...

    def define(self, name: str, body: str) -> None: ...

    def json(self, schema: Any) -> str: ...

    def until(self, syntax: TaggedArgument, schema: dict[str, Any]) -> str:
        """Adds a terminal for a text that fits the schema, and for the mark after it."""
        ...


class PairWriter:
    """schema: the arguments' of one tool."""

    def __init__(self, rules: Rules, syntax: PairedArguments, schema: dict[str, Any]) -> None:
        self._rules, self._syntax, self._root = rules, syntax, schema
        self._text = TaggedArgument("", "", syntax.quote)
        self._values: dict[str, str] = {}  # rules of values by their schemas, which may refer to themselves

    def arguments(self) -> str:
        return self._pairs(resolved(self._root, self._root))

    def _pairs(self, schema: dict[str, Any]) -> str:
        """Returns the pairs that the schema names, in its order."""
        properties, required = schema.get("properties"), schema.get("required")
        properties = dict(properties) if isinstance(properties, dict) else {}
        required = required if isinstance(required, list) else []
        properties.update((key, {}) for key in required if isinstance(key, str) and key not in properties)
        separator = lark_text(self._syntax.separator)
        first, others = '""', ""  # what follows if no pair precedes, and if one does
        for key, value in reversed(properties.items()):
            pair = f"{lark_text(self._key(key) + self._syntax.equals)} {self._value(value)}"
            begun = f"{pair} {others}".strip()
            if key in required:
                first, others = begun, f"{separator} {begun}"
            else:
                first, others = f"({begun} | {first})", f"({separator} {pair})? {others}".strip()
            first, others = self._rules.named(first), others and self._rules.named(others)
        return first

    def _key(self, key: str) -> str:
        quote = self._syntax.quote
        return key if not quote or PLAIN_KEY.fullmatch(key) else f"{quote}{key}{quote}"

    def _value(self, schema: Any) -> str:
        """Returns the rule of a value."""
        text = json.dumps(schema, sort_keys=True)
        if text not in self._values:
            self._values[text] = name = self._rules.reserve()
            self._rules.define(name, " | ".join(self._alternatives(schema)) or '""')
        return self._values[text]

    def _alternatives(self, schema: Any) -> list[str]:
        found, quote = [], self._syntax.quote
        for kind, value in kinds(schema, self._root):
            if kind == "string":
                found.append(
                    f"{lark_text(quote)} {self._rules.until(self._text, value)}"
                    if quote
                    else self._rules.json(as_document({**value, "type": "string"}, self._root))
                )
            elif kind == "value":
                found.append(lark_text(f"{quote}{value}{quote}" if quote else json.dumps(value)))
            else:
                found += self._json(value)
        return found

    def _json(self, schema: dict[str, Any]) -> list[str]:
        """Returns the alternatives of a value that has no text."""
        true, false, null = (lark_text(word) for word in self._syntax.words)
        words = {True: true, False: false, None: null}
        values, kind = schema.get("enum"), schema.get("type")
        if isinstance(values, list):
            found = [words[value] for value in values if value is None or isinstance(value, bool)]
            others = [value for value in values if not (value is None or isinstance(value, bool))]
            return [*found, self._rules.json({"enum": others})] if others else found
        if kind == "boolean":
            return [true, false]
        if kind == "null":
            return [null]
        if self._syntax.quote and kind == "array":
            _refuse(schema, BEYOND_LISTS)
            return [self._list(schema)]
        if self._syntax.quote and (kind == "object" or "properties" in schema):
            _refuse(schema, BEYOND_OBJECTS)
            is_named = schema.get("properties") or schema.get("required")
            return [f'"{{" {self._pairs(schema) if is_named else self._any_pairs(schema)} "}}"']
        return [self._rules.json(as_document(schema, self._root))]

    def _any_pairs(self, schema: dict[str, Any]) -> str:
        """Returns the pairs of an object whose keys the schema leaves open."""
        value = schema.get("additionalProperties", True)
        if value is False:
            return '""'
        pair = (
            f"/\\w{{1,40}}/ {lark_text(self._syntax.equals)} {self._value(ANY if value is True else value)}"
        )
        return f"({pair} ({lark_text(self._syntax.separator)} {pair})*)?"

    def _list(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minItems"), schema.get("maxItems")
        least = least if isinstance(least, int) else 0
        if most == 0:
            return '"[" "]"'
        item = self._value(schema.get("items", ANY))
        times = f"{{{max(0, least - 1)},{most - 1 if isinstance(most, int) else ''}}}"
        items = f"{item} ({lark_text(self._syntax.separator)} {item}){times}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'


def _refuse(schema: dict[str, Any], keywords: Sequence[str]) -> None:
    """Raises RequestError for a schema with one of these keywords."""
    for key in keywords:
        if schema.get(key) not in (None, False, {}, []):
            raise RequestError(
                f"tools must have objects and lists without {key!r} where calls are not JSON, got "
                f"{schema!r:.100}; leave it out, or send strict: false and tool_choice auto",
                field="tools",
            )
