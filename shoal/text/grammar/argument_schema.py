"""Schemas of tools' arguments as the grammar of calls takes them: their alternatives by kind, parts as
documents of their own, and without what a grammar does not need."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shoal.text.grammar.closed_schema import ANNOTATIONS, DEFINITIONS, IDENTITY, OF_KEYS, VALUES
from shoal.text.reading.typed_values import target

MAX_STEPS = 200  # limit of visited schemas per argument; references may form cycles
ROOT = "#/$defs/tool"
OWN_TEXTS = frozenset({"format", "enum", "const"})  # keywords that say which strings there are
STRUCTURE = frozenset({"allOf", "properties", "items"})  # keywords of values other than strings


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
        name: moved(without(schema, IDENTITY), f"#/$defs/{name}") for name, schema in schemas.items()
    }
    return {"anyOf": calls, "$defs": definitions}


def escaped(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    for _ in range(MAX_STEPS):
        if not isinstance(schema, dict):
            return {}
        if not isinstance(schema.get("$ref"), str):
            return schema
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        found = target(root, schema["$ref"])
        schema = {**(found if isinstance(found, dict) else {}), **rest}
    return {}


def kinds(schema: Any, root: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yields the alternatives of a schema: ("string", its schema), ("value", a string) or ("json", a
    schema)."""
    schema = resolved(schema, root)
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list) and "type" not in schema and depth < MAX_STEPS:
            for branch in branches:
                yield from kinds(branch, root, depth + 1)
            return
        if isinstance(branches, list) and schema.get("type") == "string" and depth < MAX_STEPS:
            rest = without(schema, (key, *ANNOTATIONS))
            merged = [resolved(branch, root) for branch in branches]
            if all(
                one.get("type", "string") == "string" and one.keys() & rest.keys() <= {"type"}
                for one in merged
            ):
                for one in merged:
                    yield from kinds({**rest, **one}, root, depth + 1)
                return
    if isinstance(parts := schema.get("allOf"), list) and len(parts) == 1:
        rest, part = without(schema, ("allOf",)), resolved(parts[0], root)
        if schema.get("type") != "string" or part.keys() & rest.keys() <= ANNOTATIONS | {"type"}:
            yield from kinds({**part, **rest}, root, depth + 1)
            return
    if schema.get("nullable") is True:
        yield "json", {"type": "null"}
    types = schema.get("type")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        types = [types] if isinstance(types, str) else types
        if isinstance(types, list) and "string" not in types:
            values = [value for value in values if not isinstance(value, str)]
        yield from (("value", value) for value in values if isinstance(value, str))
        if others := [value for value in values if not isinstance(value, str)]:
            yield "json", {"enum": others}
    elif isinstance(types, list):
        for one in types:
            yield from kinds({**schema, "type": one, "nullable": False}, root, depth + 1)
    elif types == "string" or (types is None and not STRUCTURE & schema.keys()):
        yield "string", schema
    else:
        yield "json", schema


def as_document(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Returns a part of a tool's schema as a document of its own, with all that it may refer to."""
    if '"$ref"' not in json.dumps(schema):
        return schema
    return {**moved(schema, ROOT), "$defs": {"tool": moved(without(root, IDENTITY), ROOT)}}


def without(schema: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in names}


def undescribed(schema: Any) -> Any:
    """Returns a copy of a schema without descriptions, which are most of its bounded size."""
    if isinstance(schema, list):
        return [undescribed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in VALUES else undescribed(value)
        for key, value in schema.items()
        if not (key in ("description", "title") and isinstance(value, str))
    }


def without_text(schema: Any, text: str) -> Any:
    """Returns a copy of a schema whose strings do not contain `text`, a tag. Strings with a format or with
    values of their own stay as they are."""
    if isinstance(schema, list):
        return [without_text(part, text) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in VALUES else without_text(value, text) for key, value in schema.items()}
    kinds = schema.get("type")
    if "string" in (kinds if isinstance(kinds, list) else [kinds]) and not found.keys() & OWN_TEXTS:
        lacking = {"pattern": _lacking(text)}
        found |= {"allOf": [*found.get("allOf", []), lacking]} if "pattern" in found else lacking
    return found


def _lacking(tag: str) -> str:
    """Returns a pattern for texts without the tag, whose first character is nowhere else in it."""
    first, signs = tag[0], [escaped(c) for c in tag]
    begun = [escaped(tag[:n]) for n in range(1, len(tag))]
    begins = f"(?:{'|'.join(begun)})*"
    broken = "|".join(f"{text}[^{escaped(first)}{signs[n]}]" for n, text in enumerate(begun, 1))
    return f"^(?:[^{escaped(first)}]|{begins}(?:{broken}))*{begins}$"


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
