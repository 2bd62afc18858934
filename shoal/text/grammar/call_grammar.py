"""`call_grammar`: calls in a family's own syntax as a grammar in Lark.

JSON arguments follow their schema as any structured output does. An argument between tags is the text itself
where its schema allows a string, and JSON otherwise. A text ends at its closing tag, so it cannot contain it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shoal.text.grammar.closed_schema import ANNOTATIONS, DEFINITIONS, IDENTITY, OF_KEYS, VALUES
from shoal.text.grammar.javascript_regex import ascii_classes
from shoal.text.grammar.lark import lark_text
from shoal.text.reading.call_syntax import CallSyntax, TaggedArgument
from shoal.text.reading.typed_values import target

MAX_STEPS = 200  # limit of visited schemas per argument; references may form cycles
ROOT = "#/$defs/tool"
OWN_TEXTS = frozenset({"pattern", "format", "enum", "const"})  # keywords that say which strings there are
STRUCTURE = frozenset({"allOf", "properties", "items"})  # keywords of values other than strings
# The parts of a pattern in which signs have no meaning of their own.
LITERAL = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\(\?:", re.DOTALL)


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

    def _named(self, body: str, prefix: str = "r") -> str:
        if body not in self._names:
            self._names[body] = f"{prefix}{len(self._rules)}"
            self._rules.append(f"{self._names[body]}: {body}")
        return self._names[body]

    def _calls(self, syntax: CallSyntax, many: bool, opening: str) -> str:
        first = self._call(syntax, syntax.begin, opening)
        more = f" ({self._call(syntax, syntax.separator)})*" if many and not syntax.is_single else ""
        end = f" ({lark_text(syntax.end)})?" if syntax.may_end else ""
        return _joined("", f"({first}){more}{end}", "" if end else syntax.end)

    def _call(self, syntax: CallSyntax, begin: str, opening: str = "") -> str:
        """Returns a call of any tool after the text `begin`, without the text `opening`."""
        if syntax.key:
            call = self._json(call_schema(self._schemas, syntax.key))
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
        if syntax.argument is not None:
            arguments = self._tagged(syntax.argument, schema)
        else:
            arguments = self._json(_without(schema, IDENTITY))
        return self._named(_joined("", arguments, syntax.after) or '""')

    def _tagged(self, syntax: TaggedArgument, schema: dict[str, Any]) -> str:
        """Returns the arguments that the schema names, in its order."""
        schema = _resolved(schema, schema)
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
        for kind, value in _kinds(schema, root):
            if kind == "string":
                texts.append(self._text(syntax, value))
            elif kind == "value":
                texts.append(lark_text(value + syntax.lead + syntax.end))
            else:
                value = _as_document(_without(value, ANNOTATIONS - {"$ref", "$defs", "definitions"}), root)
                inner = self._json(_without_text(value, syntax.end))
                values.append(f"{inner} {lark_text(syntax.lead + syntax.end)}")
        begin, found = syntax.before + key, []
        if texts:
            found.append(_joined(begin + syntax.string + syntax.middle, f"({' | '.join(texts)})"))
        if values:
            found.append(_joined(begin + syntax.other + syntax.middle, f"({' | '.join(values)})"))
        return _joined("", f"({' | '.join(found)})", syntax.after)

    def _json(self, schema: Any) -> str:
        return self._named("%json " + json.dumps(_undescribed(schema), ensure_ascii=False))

    def _text(self, syntax: TaggedArgument, schema: dict[str, Any]) -> str:
        """Adds a terminal for a text and its closing tag, which is nowhere else in it."""
        least, most = schema.get("minLength"), schema.get("maxLength")
        least = least if isinstance(least, int) else 0
        length = f"{{{least},{most}}}" if isinstance(most, int) else f"{{{least},}}"
        ending, end = _pattern(syntax.lead + syntax.end), _pattern(syntax.end)
        body = f"/(?s:.{length}){ending}/ & ~/(?s:.*){end}(?s:.+)/"
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and (inner := _searched(pattern)) is not None:
            body += f" & /{inner}{ending}/"
        return self._named(body, "R")


def call_schema(schemas: Mapping[str, dict[str, Any]], key: str) -> dict[str, Any]:
    """Returns the schema of one call with its arguments under this key. Each tool's schema becomes a
    definition, and its references to itself lead there, whatever `$id` the schema has."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{name}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name in schemas
    ]
    definitions = {
        name: moved(_without(schema, IDENTITY), f"#/$defs/{name}") for name, schema in schemas.items()
    }
    return {"anyOf": calls, "$defs": definitions}


def _joined(before: str, body: str = "", after: str = "") -> str:
    """Returns a rule's body between two texts, each possibly empty."""
    return " ".join(part for part in (_text(before), body, _text(after)) if part.strip())


def _text(text: str) -> str:
    return lark_text(text) if text else ""


def _pattern(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _searched(pattern: str) -> str | None:
    """Returns a pattern for the whole text in which `pattern` is found; None for a pattern whose anchors are
    elsewhere than at its ends, which a grammar leaves out."""
    begins = pattern.startswith("^")
    inner = pattern[begins:]
    ends = inner.endswith("$") and not re.search(r"(?<!\\)(?:\\\\)*\\\$\Z", inner)
    inner = inner[:-1] if ends else inner
    rest = LITERAL.sub("", inner)
    if "^" in rest or "$" in rest or "(?" in rest or r"\b" in inner.lower():
        return None
    if "|" in rest and (begins or ends):
        return None
    inner = ascii_classes(inner).replace("/", "\\/").replace("\n", "\\n")
    return f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"


def _resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    for _ in range(MAX_STEPS):
        if not isinstance(schema, dict):
            return {}
        if not isinstance(schema.get("$ref"), str):
            return schema
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        found = target(root, schema["$ref"])
        schema = {**(found if isinstance(found, dict) else {}), **rest}
    return {}


def _kinds(schema: Any, root: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yields the alternatives of a schema: ("string", its schema), ("value", a string) or ("json", a
    schema)."""
    schema = _resolved(schema, root)
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list) and "type" not in schema and depth < MAX_STEPS:
            for branch in branches:
                yield from _kinds(branch, root, depth + 1)
            return
    if isinstance(parts := schema.get("allOf"), list) and len(parts) == 1:
        rest = {key: value for key, value in schema.items() if key != "allOf"}
        yield from _kinds({**_resolved(parts[0], root), **rest}, root, depth + 1)
        return
    if schema.get("nullable") is True:
        yield "json", {"type": "null"}
    kinds = schema.get("type")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if isinstance(kinds, list) and "string" not in kinds:
            values = [value for value in values if not isinstance(value, str)]
        yield from (("value", value) for value in values if isinstance(value, str))
        if others := [value for value in values if not isinstance(value, str)]:
            yield "json", {"enum": others}
    elif isinstance(kinds, list):
        for kind in kinds:
            yield from _kinds({**schema, "type": kind, "nullable": False}, root, depth + 1)
    elif kinds == "string" or (kinds is None and not STRUCTURE & schema.keys()):
        yield "string", schema
    else:
        yield "json", schema


def _as_document(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Returns a part of a tool's schema as a document of its own, with all that it may refer to."""
    if '"$ref"' not in json.dumps(schema):
        return schema
    return {**moved(schema, ROOT), "$defs": {"tool": moved(_without(root, IDENTITY), ROOT)}}


def _without(schema: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in names}


def _undescribed(schema: Any) -> Any:
    """Returns a copy of a schema without descriptions, which are most of its bounded size."""
    if isinstance(schema, list):
        return [_undescribed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in VALUES else _undescribed(value)
        for key, value in schema.items()
        if not (key in ("description", "title") and isinstance(value, str))
    }


def _without_text(schema: Any, text: str) -> Any:
    """Returns a copy of a schema whose strings do not contain `text`, a tag. Strings with a pattern or a
    format of their own stay as they are."""
    if isinstance(schema, list):
        return [_without_text(part, text) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in VALUES else _without_text(value, text) for key, value in schema.items()}
    kinds = schema.get("type")
    if "string" in (kinds if isinstance(kinds, list) else [kinds]) and not found.keys() & OWN_TEXTS:
        found["pattern"] = _lacking(text)
    return found


def _lacking(tag: str) -> str:
    """Returns a pattern for texts without the tag, whose first character is nowhere else in it."""
    first, signs = tag[0], [_pattern(c) for c in tag]
    begun = [_pattern(tag[:n]) for n in range(1, len(tag))]
    begins = f"(?:{'|'.join(begun)})*"
    broken = "|".join(f"{text}[^{_pattern(first)}{signs[n]}]" for n, text in enumerate(begun, 1))
    return f"^(?:[^{_pattern(first)}]|{begins}(?:{broken}))*{begins}$"


def moved(schema: Any, root: str, are_names: bool = False) -> Any:
    """Returns a copy of a schema whose references to itself lead to `root`. are_names: the keys are
    property names, not keywords."""
    if isinstance(schema, list):
        return [moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if are_names:
        return {name: moved(part, root) for name, part in schema.items()}
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
        else value
        if key in VALUES
        else moved(value, root, key in (*OF_KEYS, *DEFINITIONS))
        for key, value in schema.items()
    }
