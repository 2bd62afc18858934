"""`PairWriter`: arguments that a family writes as pairs of a key and a value, `key=value` or `key:value`, as
rules of the grammar of calls (call_grammar.py)."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shoal.errors import RequestError
from shoal.text.grammar.argument_schema import as_document, kinds, resolved
from shoal.text.grammar.lark import lark_text
from shoal.text.reading.call_syntax import PairedArguments, TaggedArgument

PLAIN_KEY = re.compile(r"\w+")
RULE_NAME = re.compile(r"[a-z]\d+")
ANY = {"type": ["string", "number", "boolean", "null", "array", "object"]}
BEYOND = ("not", "if", "allOf", "anyOf", "oneOf", "$dynamicRef")  # keywords for which there are no rules here
BEYOND_LISTS = (*BEYOND, "prefixItems", "contains", "unevaluatedItems")
BEYOND_OBJECTS = (
    *(*BEYOND, "minProperties", "maxProperties", "patternProperties", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)


class Rules(Protocol):
    """The rules that a grammar has so far. values: rules of values by syntax, schema and, if it has
    references, the tool's whole schema; "" while the rule is written."""

    values: dict[tuple[PairedArguments, str, str], str]

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

    def single_quoted(self, schema: dict[str, Any]) -> str:
        """Adds a terminal for a text of Python in single quotes that fits the schema. Raises RequestError for
        limits that no regex has."""
        ...


class PairWriter:
    """schema: the arguments' of one tool."""

    def __init__(self, rules: Rules, syntax: PairedArguments, schema: dict[str, Any]) -> None:
        self._rules, self._syntax, self._root = rules, syntax, schema
        self._root_text = json.dumps(schema, sort_keys=True)
        self._text = TaggedArgument("", "", syntax.quote)
        self._separator = lark_text(syntax.separator)
        # within objects and lists, where Python's and JSON's literals may be dense
        self._equals, self._comma = ("/: ?/", "/, ?/") if not syntax.quote else ("", self._separator)

    def arguments(self) -> str:
        return self._pairs(resolved(self._root, self._root), self._key, self._separator)

    def _pairs(self, schema: dict[str, Any], begin: Callable[[str], str], separator: str) -> str:
        """Returns the pairs that the schema names, in its order. begin: returns the body of a key and the
        text between it and its value."""
        properties, required = schema.get("properties"), schema.get("required")
        properties = dict(properties) if isinstance(properties, dict) else {}
        required = required if isinstance(required, list) else []
        properties.update((key, {}) for key in required if isinstance(key, str) and key not in properties)
        # The first pair is the first required one, or an optional one before it.
        last = next((i for i, key in enumerate(properties) if key in required), len(properties))
        firsts, others = [] if last < len(properties) else ['""'], ""
        for i, (key, value) in reversed([*enumerate(properties.items())]):
            pair = f"{begin(key)} {self._value(value)}"
            if i <= last:
                firsts.append(f"{pair} {others}".strip())
            more = f"{separator} {pair}" if key in required else f"({separator} {pair})?"
            others = f"{more} {others}".strip()
            if 2 <= i <= last + 1:  # a rule, as it is written twice
                others = self._rules.named(others)
        return f"({' | '.join(reversed(firsts))})"

    def _key(self, key: str) -> str:
        quote = self._syntax.quote
        text = key if not quote or PLAIN_KEY.fullmatch(key) else f"{quote}{key}{quote}"
        return lark_text(text + self._syntax.equals)

    def _written(self, value: Any) -> str:
        """Returns a value as arguments are written, with the syntax's own mark around texts."""
        syntax = self._syntax
        if isinstance(value, str):
            return f"{syntax.quote}{value}{syntax.quote}"
        if isinstance(value, list):
            return f"[{syntax.separator.join(map(self._written, value))}]"
        if isinstance(value, dict):
            pairs = (f"{self._written(key)}{syntax.equals}{self._written(own)}" for key, own in value.items())
            return f"{{{syntax.separator.join(pairs)}}}"
        return json.dumps(value)

    def _key_of_python(self, key: str) -> str:
        return f"({_either_quotes(key)}) {self._equals}"

    def _value(self, schema: Any) -> str:
        """Returns the rule of a value. Tools share rules."""
        text, rules = json.dumps(schema, sort_keys=True), self._rules
        place = self._syntax, text, self._root_text if '"$ref"' in text else ""
        if place not in rules.values:
            rules.values[place] = ""
            body = " | ".join(self._alternatives(schema)) or '""'
            if name := rules.values[place]:
                rules.define(name, body)
            else:
                rules.values[place] = body if RULE_NAME.fullmatch(body) else rules.named(body)
        elif not rules.values[place]:  # a value that may have itself as a part
            rules.values[place] = rules.reserve()
        return rules.values[place]

    def _alternatives(self, schema: Any) -> list[str]:
        found, quote = [], self._syntax.quote
        for kind, value in kinds(schema, self._root):
            if kind == "json":
                found += self._json(value)
            elif quote:
                text = f"{value}{quote}" if kind == "value" else ""
                found.append(
                    lark_text(quote + text) + ("" if text else f" {self._rules.until(self._text, value)}")
                )
            elif kind == "value":
                found.append(_either_quotes(value))
            else:
                found.append(self._rules.json(as_document({**value, "type": "string"}, self._root)))
                with contextlib.suppress(RequestError):  # with such limits it is in double quotes
                    found.append(self._rules.single_quoted(value))
        return found

    def _json(self, schema: dict[str, Any]) -> list[str]:
        """Returns the alternatives of a value that has no text."""
        values, kind = schema.get("enum"), schema.get("type")
        if isinstance(values, list):
            words = [self._word(value) for value in values if value is None or isinstance(value, bool)]
            others = [value for value in values if not (value is None or isinstance(value, bool))]
            if self._syntax.quote:
                words += [
                    lark_text(self._written(value)) for value in others if isinstance(value, list | dict)
                ]
                others = [value for value in others if not isinstance(value, list | dict)]
            return [*words, self._rules.json({"enum": others})] if others else words
        if kind == "boolean":
            return [self._word(True), self._word(False)]
        if kind == "null":
            return [self._word(None)]
        if kind == "array" and self._has_rules(schema, BEYOND_LISTS):
            return [self._list(schema)]
        if (kind == "object" or "properties" in schema) and self._has_rules(schema, BEYOND_OBJECTS):
            return [self._object(schema)]
        return [self._rules.json(as_document(schema, self._root))]

    def _word(self, value: bool | None) -> str:
        """Returns the alternatives of a word. JSON's are in use within Python's literals, too."""
        true, false, null = self._syntax.words
        own = null if value is None else true if value else false
        return " | ".join(map(lark_text, dict.fromkeys((own, json.dumps(value)))))

    def _has_rules(self, schema: dict[str, Any], beyond: Sequence[str]) -> bool:
        """Returns whether there are rules for the list or object. It has to be JSON if not, and where it
        can't be JSON, this raises RequestError."""
        key = next((key for key in beyond if schema.get(key) not in (None, False, {}, [])), None)
        if not self._syntax.quote:
            has_others = schema.get("properties") and schema.get("additionalProperties") not in (None, False)
            return key is None and not has_others
        if key is not None:
            raise RequestError(
                f"tools must have objects and lists without {key!r} where calls are not JSON, got "
                f"{schema!r:.100}; leave it out, or send strict: false and tool_choice auto",
                field="tools",
            )
        return True

    def _object(self, schema: dict[str, Any]) -> str:
        begin = self._key if self._syntax.quote else self._key_of_python
        if schema.get("properties") or schema.get("required"):
            return f'"{{" {self._pairs(schema, begin, self._comma)} "}}"'
        return f'"{{" {self._any_pairs(schema)} "}}"'

    def _any_pairs(self, schema: dict[str, Any]) -> str:
        """Returns the pairs of an object whose keys the schema leaves open."""
        value = schema.get("additionalProperties", True)
        if value is False:
            return '""'
        key = f"/\\w{{1,40}}/ {lark_text(self._syntax.equals)}"
        if not self._syntax.quote:
            key = f"{self._value({'type': 'string'})} {self._equals}"
        pair = f"{key} {self._value(ANY if value is True else value)}"
        return f"({pair} ({self._comma} {pair})*)?"

    def _list(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minItems"), schema.get("maxItems")
        least = least if isinstance(least, int) else 0
        if most == 0:
            return '"[" "]"'
        item = self._value(schema.get("items", ANY))
        times = f"{{{max(0, least - 1)},{most - 1 if isinstance(most, int) else ''}}}"
        items = item if most == 1 else f"{item} ({self._comma} {item}){times}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'


def _either_quotes(text: str) -> str:
    """Returns the alternatives of a text of Python."""
    double = json.dumps(text, ensure_ascii=False)
    single = double[1:-1].replace('\\"', '"').replace("'", "\\'")
    return " | ".join(map(lark_text, (double, f"'{single}'")))
