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
from shoal.text.grammar.lark import lark_text
from shoal.text.grammar.pair_grammar import PairWriter
from shoal.text.grammar.text_regexes import texts_of
from shoal.text.reading.call_syntax import CallSyntax, PairedArguments, TaggedArgument


def call_grammar(
    syntaxes: Sequence[CallSyntax], schemas: Mapping[str, dict[str, Any]], many: bool, opening: str = ""
) -> str:
    """Returns the grammar of one or more calls, all in one of `syntaxes`. schemas: the arguments' schema of
    each tool. many: there may be several calls. opening: the beginning of the calls' text, which precedes
    the grammar."""
    return _Writer(schemas).text(syntaxes, many, opening)


def text_and_calls(
    syntaxes: Sequence[CallSyntax], schemas: Mapping[str, dict[str, Any]], many: bool, openings: Sequence[str]
) -> dict[str, Any] | None:
    """Returns a structural tag for free text in which a mark of `openings` begins calls; None for a family
    whose calls begin without a mark. many: there may be several calls."""
    tags = []
    for syntax in syntaxes:
        text = syntax.begin + syntax.before
        opening = next((mark for mark in openings if text.startswith(mark)), None)
        if opening is None:
            return None
        # Calls without a text around all of them begin one by one.
        grammar = call_grammar([syntax], schemas, many and bool(syntax.begin), opening)
        tags.append({"begin": opening, "content": {"type": "grammar", "grammar": grammar}, "end": ""})
    triggers = list(dict.fromkeys(tag["begin"] for tag in tags))
    form = {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": tags,
        "excludes": [mark for mark in openings if not any(mark in trigger for trigger in triggers)],
        "stop_after_first": not many,
    }
    return {"type": "structural_tag", "format": form}


class _Writer:
    def __init__(self, schemas: Mapping[str, dict[str, Any]]) -> None:
        self._schemas = schemas
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # rules by their bodies

    def text(self, syntaxes: Sequence[CallSyntax], many: bool, opening: str) -> str:
        start = " | ".join(self._calls(syntax, many, opening) for syntax in syntaxes)
        return "\n".join([f"start: {start}", *self._rules])

    def named(self, body: str, prefix: str = "r") -> str:
        if body not in self._names:
            self._names[body] = f"{prefix}{len(self._rules)}"
            self._rules.append(f"{self._names[body]}: {body}")
        return self._names[body]

    def reserve(self) -> str:
        self._rules.append("")
        return f"v{len(self._rules) - 1}"

    def define(self, name: str, body: str) -> None:
        self._rules[int(name[1:])] = f"{name}: {body}"

    def _calls(self, syntax: CallSyntax, many: bool, opening: str) -> str:
        first = self._call(syntax, syntax.begin, opening)
        more = f" ({self._call(syntax, syntax.separator)})*" if many and not syntax.is_single else ""
        end = f" ({lark_text(syntax.end)})?" if syntax.may_end else ""
        return _joined("", f"({first}){more}{end}", "" if end else syntax.end)

    def _call(self, syntax: CallSyntax, begin: str, opening: str = "") -> str:
        """Returns a call of any tool after the text `begin`, without the text `opening`."""
        if syntax.key:
            call = self.json(call_schema(self._schemas, syntax.key))
            return _joined((begin + syntax.before).removeprefix(opening), call, syntax.after)
        found = []
        for name, schema in self._schemas.items():
            # A name and the text after it are one terminal, as a name may begin another name.
            middle, *more = syntax.middle.replace("{name}", name).split("{number}")
            head = (begin + syntax.before + name + middle).removeprefix(opening)
            number = "".join(f"/[0-9]{{1,3}}/ {lark_text(text)} " for text in more)
            found.append(_joined(head, number + self._arguments(syntax, schema)))
        return " | ".join(found)

    def _arguments(self, syntax: CallSyntax, schema: dict[str, Any]) -> str:
        """Adds a rule for arguments and the text after them."""
        if isinstance(syntax.argument, PairedArguments):
            arguments = PairWriter(self, syntax.argument, schema).arguments()
        elif syntax.argument is not None:
            arguments = self._tagged(syntax.argument, schema)
        else:
            arguments = self.json(without(schema, IDENTITY))
        return self.named(_joined("", arguments, syntax.after) or '""')

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
