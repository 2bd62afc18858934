"""Converts values of XML formats of calls from text to JSON of the schema's type."""

from __future__ import annotations

import ast
import json
import math
from typing import Any

KINDS: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
WORDS = {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")}
FIRSTS = {"object": "{", "array": "[", "integer": "-0123456789", "number": "-0123456789"}
NAMES = frozenset(kind for kinds in KINDS.values() for kind in kinds)
MAX_STEPS = 200  # limit of visited schemas per parameter; references may form cycles


def kinds_of(parameters: dict[str, Any], name: str) -> frozenset[str]:
    """Returns JSON Schema's names of the possible types of a tool's parameter; an empty set if the schema has
    no type."""
    properties = parameters.get("properties")
    found = properties.get(name) if isinstance(properties, dict) else None
    if found is None:
        found = parameters.get("additionalProperties")
    kinds: set[str] = set()
    todo = [found]
    for _ in range(MAX_STEPS):
        if not todo:
            break
        schema = todo.pop()
        if not isinstance(schema, dict):
            continue
        if isinstance(kind := schema.get("type"), str):
            kinds.add(kind)
        elif isinstance(kind, list):
            kinds.update(k for k in kind if isinstance(k, str))
        else:
            values = schema["enum"] if isinstance(schema.get("enum"), list) else []
            values = [*values, schema["const"]] if "const" in schema else values
            kinds.update(kind for value in values for kind in KINDS.get(type(value), ()))
            for key in ("anyOf", "oneOf", "allOf"):
                todo += schema[key] if isinstance(schema.get(key), list) else []
            todo.append(target(parameters, schema.get("$ref")))
        if schema.get("nullable") is True:
            kinds.add("null")
    return frozenset(kinds & NAMES)


def target(root: dict[str, Any], pointer: Any) -> Any:
    if not isinstance(pointer, str) or not pointer.startswith("#/"):
        return None
    value: Any = root
    for step in pointer.split("/")[1:]:
        value = value.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value


def is_text(start: str, kinds: frozenset[str]) -> bool:
    """Returns True if every value that begins with `start` is a string."""
    if "string" not in kinds and kinds:
        return False
    others = kinds - {"string"} or (frozenset() if kinds else frozenset({"object", "array"}))
    if not others:
        return True
    if not (bare := start.strip()):
        return False
    return not any(
        bare[0] in FIRSTS.get(kind, "") or any(word.startswith(bare) for word in WORDS.get(kind, ()))
        for kind in others
    )


def json_of(text: str, kinds: frozenset[str]) -> str:
    """Returns the JSON of a value that was written as `text`. JSON of a type among `kinds` stays, and
    everything else becomes a string, even if the schema does not allow one: a refusal would lose the call."""
    bare = text.strip()
    bare = PYTHON_WORDS.get(bare, bare)
    try:
        value = json.loads(bare, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text if (found := _literal(bare, kinds)) is None else found, ensure_ascii=False)
    own = KINDS[type(value)]
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        own = ("integer", "number")
    if isinstance(value, str):
        # Quotes around a string belong to it, if the schema has its type or no type.
        fits = bool(kinds) and "string" not in kinds
    elif kinds:
        fits = bool(kinds & set(own))
    else:
        fits = isinstance(value, dict | list)
    if not fits:
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False) if "\n" in bare or "\t" in bare else bare


def _literal(text: str, kinds: frozenset[str]) -> Any:
    """Returns the list or object that the text writes as Python does; None for anything else, and where the
    schema allows a string."""
    if not kinds or "string" in kinds:
        return None
    try:
        value = ast.literal_eval(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # not half of a surrogate pair
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, dict | list) and kinds & set(KINDS[type(value)]) else None


def _refuse(word: str) -> Any:
    raise ValueError(word)
