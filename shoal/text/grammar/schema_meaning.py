"""Rewrites a JSON schema with the keywords that llguidance knows.

Programs generate most schemas, with keywords that have no effect (`propertyNames` of any text) or that other
keywords can express. The remaining constraints beyond grammars are of two kinds: `uniqueItems`, look-around
within a pattern and similar ones are left out and reported, as the answer is nearly always right without
them; others stay, and llguidance refuses them by name.
"""

from __future__ import annotations

import urllib.parse
from typing import Any

from shoal.text.grammar.closed_schema import ANNOTATIONS, DEFINITIONS, OF_KEYS, VALUES
from shoal.text.grammar.javascript_regex import Plain, without_look_around

LEAST_BOUND = (
    1024 - 2**63
)  # llguidance keeps bounds as floats, and cannot begin a range at the float below this one
LOWER_BOUNDS = ("minimum", "exclusiveMinimum")
# The formats of texts that llguidance knows.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
BRANCHES = ("allOf", "anyOf", "oneOf")
# Keywords that determine, or may determine, the type of a value.
TYPING = frozenset({"type", "enum", "const", "$ref", "not", *BRANCHES})
MAX_PATTERNS = 20  # limit of different patterns per document whose look-around is expressed
NAMES = (*OF_KEYS, *DEFINITIONS, "dependentSchemas")  # keywords whose keys are arbitrary names
# Values with which a keyword has no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "exclusiveMinimum": (False,),
    "exclusiveMaximum": (False,),
}


def as_meant(schema: dict[str, Any], left_out: list[str]) -> Any:
    """Returns a rewritten copy of a schema: a dict, or False if no value fits it. Adds the constraints that
    the copy lacks to `left_out`."""
    return _Meaning(schema, left_out).of(schema)


class _Meaning:
    """Rewrites one document.

    By JSON Schema's rules a format is an annotation unless the reader can check it. pydantic writes "binary",
    "path" and "password", and OpenAPI's documents have many more: formats outside of FORMATS, which
    llguidance would refuse, are left out. By the same rules a string, too, fits a schema with properties and
    without a type; here, properties mean an object, and items a list, as in xgrammar, with which vLLM reads
    schemas.
    """

    def __init__(self, root: dict[str, Any], left_out: list[str]) -> None:
        self._root, self._left_out = root, left_out
        self._plain: dict[str, Plain] = {}  # patterns with look-around, without it

    def of(self, schema: Any, are_names: bool = False, is_typed: bool = False) -> Any:
        """Returns one rewritten part. are_names: the keys here are arbitrary names, such as the names of
        properties. is_typed: the outer schema has the type."""
        if isinstance(schema, list):
            return [self.of(part, is_typed=is_typed) for part in schema]
        if not isinstance(schema, dict):
            return schema
        if are_names:
            return {name: self.of(part) for name, part in schema.items()}
        if schema.get("not") in (True, {}):
            return False  # zod writes this for an optional value
        is_typed = is_typed or "type" in schema
        meant = {
            key: value if key in VALUES else self.of(value, key in NAMES, is_typed and key in BRANCHES)
            for key, value in schema.items()
            if not _says_nothing(schema, key, value)
        }
        self._say_texts(meant)
        self._say_numbers(schema, meant)
        self._say_lists(meant)
        self._say_names(meant)
        if not is_typed and not schema.keys() & TYPING:
            if "properties" in schema:
                meant["type"] = "object"
            elif "items" in schema or "prefixItems" in schema:
                meant["type"] = "array"
        return meant

    def _say_texts(self, meant: dict[str, Any]) -> None:
        if isinstance(pattern := meant.get("pattern"), str):
            plain = self._without_look_around(pattern)
            meant["pattern"] = plain.pattern
            self._left_out += [f"{look} in the pattern {pattern}" for look in plain.left_out]
            if plain.also and isinstance(together := meant.get("allOf", []), list):
                meant["allOf"] = [*together, *({"pattern": further} for further in plain.also)]
        if isinstance(patterns := meant.get("patternProperties"), dict):
            plains = {name: self._without_look_around(name) for name in patterns}
            meant["patternProperties"] = {plains[name].pattern: part for name, part in patterns.items()}
            self._left_out += [
                f"look-around in the patternProperties {name}"
                for name, plain in plains.items()
                if plain.also or plain.left_out
            ]

    def _say_numbers(self, schema: dict[str, Any], meant: dict[str, Any]) -> None:
        for key, own in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if meant.get(own) is True:  # draft 4: the bound itself is excluded
                del meant[own]
                if key in meant:
                    meant[own] = meant.pop(key)
        if is_integer(schema):
            for key in LOWER_BOUNDS:  # OpenAPI's int64 has one
                if isinstance(least := meant.get(key), (int, float)) and least < LEAST_BOUND:
                    meant[key] = LEAST_BOUND

    def _say_lists(self, meant: dict[str, Any]) -> None:
        if meant.get("uniqueItems") is True:
            del meant["uniqueItems"]
            if not (isinstance(most := meant.get("maxItems"), int) and most <= 1):
                self._left_out.append("uniqueItems")
        if not meant.keys() & {"$ref", "$dynamicRef", *BRANCHES}:  # no other keyword evaluates keys or items
            for own, key in (
                ("unevaluatedProperties", "additionalProperties"),
                ("unevaluatedItems", "items"),
            ):
                if own in meant:
                    meant.setdefault(key, meant.pop(own))

    def _without_look_around(self, pattern: str) -> Plain:
        if (plain := self._plain.get(pattern)) is None:
            plain = without_look_around(pattern, can_express=len(self._plain) < MAX_PATTERNS)
            if plain.also or plain.left_out:
                self._plain[pattern] = plain
        return plain

    # propertyNames

    def _say_names(self, meant: dict[str, Any]) -> None:
        """Moves the allowed names of keys into properties or patternProperties."""
        if "propertyNames" not in meant or not isinstance(
            names := self._followed(meant["propertyNames"]), dict | bool
        ):
            return
        given = meant.pop("propertyNames")
        if names is False:
            meant["maxProperties"] = 0
            return
        value = meant.get("additionalProperties", True)
        if names is True or value is False or not (keywords := names.keys() - ANNOTATIONS - {"type"}):
            return
        texts = names.get("enum", [names["const"]] if "const" in names else None)
        if keywords <= {"enum", "const"} and isinstance(texts, list):
            own = meant.get("properties", {})
            meant["properties"] = {**{text: value for text in texts if isinstance(text, str)}, **own}
        elif keywords <= {"pattern", "minLength", "maxLength"} and (regex := _regex_of_names(names)):
            meant["patternProperties"] = {**meant.get("patternProperties", {}), regex: value}
        else:
            self._left_out.append(f"propertyNames {given!r:.100}")
            return
        meant["additionalProperties"] = False

    def _followed(self, schema: Any) -> Any:
        """Returns the target of plain references from `schema`."""
        for _ in range(10):
            if not isinstance(schema, dict) or not str(schema.get("$ref", "")).startswith("#/"):
                return schema
            target: Any = self._root
            for step in urllib.parse.unquote(schema["$ref"]).split("/")[1:]:
                target = target.get(step) if isinstance(target, dict) else None
            schema = target
        return schema


def is_integer(schema: dict[str, Any]) -> bool:
    """True if a schema of numbers admits integers only."""
    kinds = schema.get("type")
    return kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds)


def _says_nothing(schema: dict[str, Any], key: str, value: Any) -> bool:
    """True if `schema` means the same without this key."""
    match key:
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case "if" | "then" | "else":
            branches = [schema.get(name, True) for name in ("then", "else")]
            return "if" not in schema or all(branch in (True, {}) for branch in branches)
        case "minContains" | "maxContains" if "contains" not in schema:
            return True
        case "contains" | "minContains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
    return any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(key, ()))


def _regex_of_names(names: dict[str, Any]) -> str | None:
    """Returns the regex of keys with the pattern or the length of `names`; None if one regex is not
    enough."""
    if "pattern" not in names:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        return (
            f"^[\\s\\S]{{{least},{most}}}$"
            if isinstance(least, int) and (most == "" or isinstance(most, int))
            else None
        )
    if names.keys() & {"minLength", "maxLength"} or not isinstance(names["pattern"], str):
        return None
    plain = without_look_around(names["pattern"])
    return None if plain.also or plain.left_out else plain.pattern
