"""Closes the objects of a JSON schema: they may have only the keys that the schema names, unless the schema
allows others.

Most schemas, also pydantic's, leave objects open by default. A small model then invents keys until its tokens
are used up. Closing means `unevaluatedProperties: false` for every object that names
its keys, in keywords that llguidance knows: keys that `allOf`, `$ref` and the branches of an `anyOf` name
together are allowed together.
"""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import RequestError

MAX_STEPS = 200_000  # limit of visited parts and repeated keys, for compositions of compositions

# Keywords with schemas of other places in the document: OF_KEYS by name, OF_ITEMS one or a list.
OF_KEYS = ("properties", "patternProperties")
OF_ITEMS = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains", "unevaluatedItems")
DEFINITIONS = ("$defs", "definitions")
VALUES = ("const", "enum", "default", "examples")  # keywords with values, not schemas
IDENTITY = ("$schema", "$id")  # keywords of the document, only at its root
ANNOTATIONS = frozenset(
    {
        *DEFINITIONS,
        *IDENTITY,
        "$ref",
        "$comment",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "x-guidance",
    }
)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a closed copy with new names for definitions. A schema with references that do not point into
    itself is returned unchanged.

    The caller bounds the nesting. Raises RequestError if compositions make the copy too large.
    """
    try:
        return _Closing(schema).run()
    except LookupError:
        return schema  # The compiler knows more kinds of references, or reports a dangling one.


@dataclass(slots=True)
class _Keys:
    """Facts of a composition's parts about an object's keys."""

    names: dict[str, None] = field(default_factory=dict)  # a set that keeps its order
    patterns: dict[str, None] = field(default_factory=dict)
    are_named: bool = False  # True if a part lists its keys
    are_told: bool = False  # True if a part has a rule for other keys
    groups: list[list[Any]] = field(default_factory=list)  # the branches of each anyOf and oneOf


class _Closing:
    """Closes one schema."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._steps = 0
        # (pointer, whether it is closed) -> the new name of that definition
        self._new_names: dict[tuple[str, bool], str] = {}
        self._todo: list[tuple[str, bool]] = []  # definitions with a name, but without a schema so far

    def run(self) -> dict[str, Any]:
        """Returns the closed schema. Raises LookupError for an unresolvable reference."""
        result = self._place(self._root, _Keys())
        definitions: dict[str, Any] = {}
        while self._todo:
            pointer, is_closed = self._todo.pop()
            target = self._target(pointer)
            new = self._place(target, _Keys()) if is_closed else self._part(target)
            definitions[self._new_names[pointer, is_closed]] = new
        result |= {name: self._root[name] for name in IDENTITY if name in self._root}
        return {**result, "$defs": definitions} if definitions else result

    def _place(self, schema: Any, outer: _Keys) -> Any:
        """Returns the closed schema of one place in the document. `outer` has the keys that the schemas
        around `schema` name for the same place."""
        if schema is True and outer.are_named:
            schema = {}
        if not isinstance(schema, dict):
            return schema
        self._check_id(schema)
        if not outer.are_named and "$ref" in schema and schema.keys() <= ANNOTATIONS:
            return self._with_new_ref(schema, is_closed=True)
        keys = self._keys([schema], outer)
        groups = [name for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
        if keys.are_told:
            return self._part(schema)
        if len(groups) == len(keys.groups) == 1:
            branches = [self._place(branch, keys) for branch in schema[groups[0]]]
            rest = {name: value for name, value in schema.items() if name not in (groups[0], *IDENTITY)}
            return {**self._part(rest), groups[0]: branches}
        if keys.groups:
            # Any branch of one group may apply with any branch of another, so each may have the keys of all.
            branches = [branch for group in keys.groups for branch in group]
            keys = self._keys(branches, keys, into_groups=True)
            if keys.are_told:
                return self._part(schema)
        result = self._part(schema)
        if not keys.are_named or not isinstance(schema.get("allOf", []), list):
            return result
        self._count(len(keys.names) + len(keys.patterns))
        of_others = "$ref" in schema or "allOf" in schema
        own = {} if of_others else result
        bound: dict[str, Any] = {"additionalProperties": False}
        for name, wanted in zip(OF_KEYS, (keys.names, keys.patterns)):
            if wanted and isinstance(own.get(name, {}), dict):
                bound[name] = {**dict.fromkeys(wanted, True), **own.get(name, {})}
        return {**result, "allOf": [*result.get("allOf", []), bound]} if of_others else {**result, **bound}

    def _part(self, schema: Any) -> Any:
        """Returns one part of a composition. The part itself stays open, and the places within it are
        closed."""
        if not isinstance(schema, dict):
            return schema
        self._check_id(schema)
        if "$ref" in schema:
            schema = self._with_new_ref(schema, is_closed=False)
        result: dict[str, Any] = {}
        for name, value in schema.items():
            if name in OF_KEYS and isinstance(value, dict):
                result[name] = {key: self._place(v, _Keys()) for key, v in value.items()}
            elif name in OF_ITEMS and isinstance(value, list):
                result[name] = [self._place(v, _Keys()) for v in value]
            elif name in OF_ITEMS:
                result[name] = self._place(value, _Keys())
            elif name in ("allOf", "anyOf", "oneOf") and isinstance(value, list):
                result[name] = [self._part(v) for v in value]
            elif name == "unevaluatedProperties" and isinstance(value, bool):
                continue  # True has no effect, and False is written in other keywords.
            elif name not in (*DEFINITIONS, *IDENTITY):
                result[name] = value
        return result

    def _keys(self, parts: list[Any], known: _Keys, into_groups: bool = False) -> _Keys:
        """Returns the keys that `parts`, and the schemas they refer to, name in addition to `known`."""
        found = _Keys(dict(known.names), dict(known.patterns), known.are_named)
        todo, seen = list(reversed(parts)), set()
        while todo:
            part = todo.pop()
            self._count(1)
            if not isinstance(part, dict):
                continue
            is_told = part.get("unevaluatedProperties", False) is not False
            found.are_told |= is_told or "additionalProperties" in part
            for name, into in (("properties", found.names), ("patternProperties", found.patterns)):
                if isinstance(named := part.get(name), dict):
                    found.are_named = True
                    into.update(dict.fromkeys(named))
                    self._count(len(named))
            if isinstance(required := part.get("required"), list):  # A required key is an allowed key.
                found.names.update(dict.fromkeys(key for key in required if isinstance(key, str)))
            for name in ("anyOf", "oneOf"):
                if isinstance(group := part.get(name), list):
                    found.groups.append(group)
                    todo += reversed(group) if into_groups else ()
            if isinstance(together := part.get("allOf"), list):
                todo += reversed(together)
            if "$ref" in part:
                target = self._target(part["$ref"])
                if part["$ref"] not in seen:
                    seen.add(part["$ref"])
                    todo.append(target)
        return found

    # References

    def _with_new_ref(self, schema: dict[str, Any], *, is_closed: bool) -> dict[str, Any]:
        pointer = schema["$ref"]
        self._target(pointer)
        if (pointer, is_closed) not in self._new_names:
            name = pointer.rpartition("/")[2] if isinstance(pointer, str) else ""
            plain = "".join(c for c in name if c.isascii() and (c.isalnum() or c in "_-"))[:40]
            self._new_names[pointer, is_closed] = f"{plain}.{len(self._new_names)}"
            self._todo.append((pointer, is_closed))
        kept = {k: v for k, v in schema.items() if k not in (*DEFINITIONS, *IDENTITY)}
        return {**kept, "$ref": f"#/$defs/{self._new_names[pointer, is_closed]}"}

    def _check_id(self, schema: dict[str, Any]) -> None:
        """Raises LookupError for a schema with its own identity. References within it are relative to that,
        so they cannot be resolved here."""
        if "$id" in schema and schema is not self._root:
            raise LookupError

    def _target(self, pointer: Any) -> Any:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise LookupError
        value: Any = self._root
        for step in urllib.parse.unquote(pointer).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list):
                if not (key.isascii() and key.isdigit()) or int(key) >= len(value):
                    raise LookupError
                value = value[int(key)]
            elif isinstance(value, dict):
                value = value[key]
            else:
                raise LookupError
        return value

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise RequestError(
                "structured_outputs.json combines too many schemas to close its objects; "
                "simplify it, or set "
                "structured_outputs.disable_additional_properties to false",
                field="structured_outputs.json",
            )
