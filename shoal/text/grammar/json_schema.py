"""Turns the JSON schema of a request into text for llguidance, within bounds: its size, its nesting and its
numbers determine the cost of a grammar.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from shoal.errors import RequestError
from shoal.sampling_params import StructuredOutputsParams
from shoal.text.grammar.closed_schema import closed
from shoal.text.grammar.schema_meaning import LOWER_BOUNDS, as_meant, is_integer

MAX_BYTES = 128 * 1024  # size of a specification's text, with which stack and time grow
MAX_NESTING = 60  # levels of a JSON schema; llguidance's parser accepts 128 levels of JSON text
MAX_MULTIPLE = 100_000  # product of a schema's `multipleOf`s, the number of states of the automaton
MAX_DIGITS = 40  # digits of a number in a schema
MAX_INTEGER = 2**63 - 1  # llguidance reduces larger ones to this one
# White space between the tokens of JSON. Without a bound, weak models print line breaks until their tokens
# are used up. A line break and eight levels of indentation are enough for readable JSON.
WHITESPACE = r"[ \t]{1,8}|[ \t]?\r?\n[ \t]{0,16}"


def bounded(kind: str, text: str) -> str:
    size = len(text.encode())
    if size > MAX_BYTES:
        raise RequestError(
            f"structured_outputs.{kind} has {size} bytes, more than {MAX_BYTES}; make it smaller",
            field=f"structured_outputs.{kind}",
        )
    return text


class SchemaWriter:
    """Writes JSON schemas of one request as text for llguidance, and collects the constraints that the text
    leaves out."""

    def __init__(self, params: StructuredOutputsParams, kind: str, closes_objects: bool) -> None:
        self._kind, self._closes_objects = kind, closes_objects
        self._options = _options(params)
        self.left_out: list[str] = []

    def text(self, schema: Any) -> str:
        """Returns a schema as JSON text, after a check of its nesting."""
        kind = self._kind
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise RequestError(
                f"structured_outputs.{kind} must be a JSON schema, got {schema!r:.60}; send an object (or "
                f"true for any JSON)",
                field=f"structured_outputs.{kind}",
            )
        bounded(kind, json_text(kind, schema))
        own = schema.get("x-guidance")
        options = {**_own_options(own if isinstance(own, dict) else {}), **self._options}
        if (schema := as_meant(schema, self.left_out)) is False:
            raise RequestError(
                f'structured_outputs.{kind} excludes every value by "not"; correct it',
                field=f"structured_outputs.{kind}",
            )
        return json_text(
            kind, {**(closed(schema) if self._closes_objects else schema), "x-guidance": options}
        )


def parsed(kind: str, text: str) -> Any:
    try:
        return json.loads(bounded(kind, text))
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"structured_outputs.{kind} must be JSON: {error}; send a JSON schema",
            field=f"structured_outputs.{kind}",
        ) from None


def json_text(kind: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"structured_outputs.{kind} must be JSON ({error}); send plain objects, lists, strings and "
            "numbers",
            field=f"structured_outputs.{kind}",
        ) from None


def _options(params: StructuredOutputsParams) -> dict[str, Any]:
    """Returns llguidance's options for JSON from the request. llguidance treats a `oneOf` with overlapping
    branches as an `anyOf`, and warns of it."""
    options: dict[str, Any] = {"coerce_one_of": True}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = bounded("whitespace_pattern", params.whitespace_pattern)
    elif params.disable_any_whitespace:
        options |= {"whitespace_flexible": False, "whitespace_pattern": None}
    return options


def _own_options(own: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a schema's `x-guidance`, with Shoal's white space as the default. Clients such
    as guidance parse the answer by the same options."""
    if own.get("whitespace_flexible") is False or own.get("whitespace_pattern") is not None:
        return own
    return {**own, "whitespace_pattern": WHITESPACE}


def check_nesting(kind: str, schema: Any) -> None:
    """Raises RequestError for a schema that is nested too deep, or has numbers that would cost too much."""
    multiple = 1
    for depth, key, value in walk(schema):
        if depth > MAX_NESTING:
            raise RequestError(
                f"structured_outputs.{kind} is nested deeper than {MAX_NESTING} levels; "
                f"flatten it, or use $defs and $ref",
                field=f"structured_outputs.{kind}",
            )
        if isinstance(value, dict) and is_integer(value):
            _check_integers(kind, value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            digits = Decimal(repr(value)).normalize()
            if abs(digits.adjusted()) > MAX_DIGITS or len(digits.as_tuple().digits) > MAX_DIGITS:
                raise RequestError(
                    f"structured_outputs.{kind} has a number of more than {MAX_DIGITS} digits "
                    f"({key}); make it smaller",
                    field=f"structured_outputs.{kind}",
                )
            if float(value) <= -(2.0**63) and key not in LOWER_BOUNDS:  # llguidance would crash
                raise _beyond(kind, key, value)
            if key == "multipleOf":
                multiple *= math.prod(Decimal(repr(value)).as_integer_ratio())
        if multiple > MAX_MULTIPLE:
            raise RequestError(
                f"structured_outputs.{kind} has multipleOf values with the product "
                f"{multiple}, more than {MAX_MULTIPLE}; "
                "use smaller ones",
                field=f"structured_outputs.{kind}",
            )


def _check_integers(kind: str, schema: dict[str, Any]) -> None:
    """Raises RequestError for a schema whose integers must exceed 64 bits."""
    enum = schema.get("enum")
    values = [(key, schema.get(key)) for key in ("const", *LOWER_BOUNDS)]
    values += [("enum", value) for value in (enum if isinstance(enum, list) else ())]
    for key, value in values:
        if isinstance(value, (int, float)) and value > MAX_INTEGER:
            raise _beyond(kind, key, value)


def _beyond(kind: str, key: str, value: float) -> RequestError:
    return RequestError(
        f"structured_outputs.{kind} has the {key} {value}, beyond an integer of 64 bits; leave it out, or "
        "take a text",
        field=f"structured_outputs.{kind}",
    )


def walk(schema: Any) -> Iterator[tuple[int, str, Any]]:
    """Yields (depth, the key above it, value) for every value in a schema."""
    todo: list[tuple[int, str, Any]] = [(0, "", schema)]
    while todo:
        depth, key, value = todo.pop()
        yield depth, key, value
        if isinstance(value, dict):
            todo += [(depth + 1, str(k), v) for k, v in value.items()]
        elif isinstance(value, list):
            todo += [(depth + 1, key, v) for v in value]
