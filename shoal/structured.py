"""Turns what a request says about the form of its answer into a grammar for llguidance. This file needs no
torch, because the server checks a request here before it admits it.

`grammar_of` translates, and `check` also proves that llguidance takes the result.
engine/scheduling/grammar.py compiles a grammar for a tokenizer. A grammar is a program that a stranger sends,
so its size, its nesting and llguidance's own limits bound what it may cost.
"""

from __future__ import annotations

import functools
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from shoal.api import STRUCTURED_KINDS, StructuredOutputsParams
from shoal.closed_schema import DEFINITIONS, OF_KEYS, VALUES, closed
from shoal.errors import RequestError

MAX_BYTES = 128 * 1024  # of a specification's text; the stack and time that it needs grow with it
MAX_NESTING = 60  # levels of a JSON schema; llguidance's parser takes 128 levels of JSON text
MAX_RULES = 1000  # of a grammar
MAX_MULTIPLE = 100_000  # the product of a schema's `multipleOf`s; the automaton has that many states
MAX_DIGITS = 40  # of a number in a schema
MAX_INTEGER = 2**63 - 1  # llguidance takes larger ones for this one
LEAST_BOUND = 1024 - 2**63  # llguidance keeps bounds as floats, and the one below this begins no range
LOWER_BOUNDS = ("minimum", "exclusiveMinimum")

# The formats of texts that llguidance knows.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)

BRANCHES = ("allOf", "anyOf", "oneOf")
# Keywords that say, or may say, of what type a value is.
TYPING = frozenset({"type", "enum", "const", "$ref", "not", *BRANCHES})
LIMITS = LLParserLimits(
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    initial_lexer_fuel=500_000,
    step_max_items=20_000,
    verbose_errors=False,
)
# llguidance recurses along rules and needs up to 40 MiB of stack for MAX_BYTES. Pages that are not touched
# cost nothing.
STACK_BYTES = 256 << 20

# What these escapes match in JavaScript, whose regexes JSON Schema's patterns are, and in xgrammar.
# llguidance's are Rust's, whose digits and letters are those of all scripts.
CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
LARK_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_]\w*(\.-?\d+)?(\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
DIRECTIVE = re.compile(r"^[ \t]*%(\w*)|%(json|regex|lark)\b", re.MULTILINE)
REGEX_WORD = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)  # a class may begin with the bracket that ends others
UNICODE_ESCAPE = re.compile(r"(\\\\)|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})")

T = TypeVar("T")


def check(params: StructuredOutputsParams, closes_objects: bool = True) -> None:
    """Raises RequestError that names what is wrong with the specification and where. It takes a millisecond,
    and half a second at worst."""
    if (message := _problem(grammar_of(params, closes_objects))) is not None:
        raise RequestError(
            f"structured_outputs.{_kind(params)} is not usable: {message}; mend or simplify it"
        )


def grammar_of(params: StructuredOutputsParams, closes_objects: bool = True) -> str:
    """Returns the specification in llguidance's form, within bounds, and not yet compiled. Raises
    RequestError.

    With `closes_objects`, an object of a JSON schema has no other keys than the schema names. `params` may
    say otherwise.
    """
    kind = _kind(params)
    if params.disable_additional_properties is not None:
        closes_objects = params.disable_additional_properties
    try:
        if kind in ("json", "json_object"):
            return _json_grammar(params, closes_objects)
        if kind == "structural_tag":
            return _tag_grammar(params, closes_objects)
        if params.whitespace_pattern is not None:
            raise RequestError(
                f"structured_outputs.whitespace_pattern belongs to json and json_object, not to {kind}; "
                "leave it out"
            )
        if kind == "regex":
            return LLMatcher.grammar_from_regex(_ascii_classes(_bounded(kind, params.regex or "")))
        if kind == "choice":
            return _choice_grammar(params.choice or [])
        return LLMatcher.grammar_from_lark(_lark(_bounded(kind, params.grammar or "")))
    except UnicodeEncodeError:
        raise RequestError(
            f"structured_outputs.{kind} holds half a character (a lone surrogate); send whole ones"
        ) from None


def in_deep_thread(call: Callable[[], T]) -> Future[T]:
    """Runs a call of llguidance's compiler in the thread whose stack is deep enough for it. Calls run one
    after the other."""
    return _deep_thread().submit(call)


@functools.lru_cache(maxsize=512)
def _problem(grammar: str) -> str | None:
    """Returns llguidance's message about a grammar that it does not take, None for one that it takes."""
    failed, messages = in_deep_thread(
        lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    ).result()
    return short(messages[0]) if failed else None


def short(message: str) -> str:
    """Returns an error of llguidance without the parts of a user's grammar that would fill a page."""
    message = " ".join(message.split("<non-verbose/>")[0].split())
    if (unsupported := re.search(r"Unimplemented keys: \[(.*?)\]", message)) is not None:
        return f"the JSON schema keywords {unsupported[1]} are not supported"
    if "NoExtensionBias" in message:
        return "no text fits it"
    return message if len(message) <= 300 else f"{message[:200]} ... {message[-90:]}"


def _kind(params: StructuredOutputsParams) -> str:
    return next(name for name in STRUCTURED_KINDS if getattr(params, name) not in (None, False))


def _bounded(kind: str, text: str) -> str:
    size = len(text.encode())
    if size > MAX_BYTES:
        raise RequestError(
            f"structured_outputs.{kind} has {size} bytes, more than {MAX_BYTES}; make it smaller"
        )
    return text


# JSON


def _json_grammar(params: StructuredOutputsParams, closes_objects: bool) -> str:
    schema = {"type": "object"} if params.json_object else params.json
    if isinstance(schema, str):
        schema = _parsed("json", schema)
    _check_nesting("json", schema)
    text = _schema_text("json", schema, closes_objects)
    try:
        options = _json_options(params)
        return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
    except ValueError as error:
        raise RequestError(f"structured_outputs.json is not usable: {short(str(error))}; mend it") from None


def _schema_text(kind: str, schema: Any, closes_objects: bool, **more: Any) -> str:
    """Returns `schema`, whose nesting was checked, as JSON text with `more` among its top keys."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(
            f"structured_outputs.{kind} {schema!r:.60} is no JSON schema; send an object (or "
            f"true for any JSON)"
        )
    _bounded(kind, _json_text(kind, schema))
    schema = _as_meant(schema)
    return _json_text(kind, {**(closed(schema) if closes_objects else schema), **more})


def _as_meant(schema: Any, are_names: bool = False, is_typed: bool = False) -> Any:
    """Returns a copy of a schema as its writer meant it. `are_names` says that the keys here are names that
    the writer chose, such as those of properties, and `is_typed` that the schema around says the type.

    By JSON Schema's rules a format is a word to the reader unless somebody knows how to check it. pydantic
    writes "binary", "path" and "password", and OpenAPI's documents have many more: those that llguidance
    would refuse, as it knows FORMATS alone, are left out. By the same rules a text, too, fits a schema that
    lists properties and says no type; who lists them means an object, and who says what items are a list. So
    xgrammar takes it, by which vLLM reads schemas.
    """
    if isinstance(schema, list):
        return [_as_meant(part, is_typed=is_typed) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if are_names:
        return {name: _as_meant(part) for name, part in schema.items()}
    is_typed = is_typed or "type" in schema
    meant = {
        key: value
        if key in VALUES
        else _as_meant(value, key in (*OF_KEYS, *DEFINITIONS), is_typed and key in BRANCHES)
        for key, value in schema.items()
        if not (key == "format" and isinstance(value, str) and value not in FORMATS)
    }
    if isinstance(pattern := schema.get("pattern"), str):
        meant["pattern"] = _ascii_classes(pattern)
    if _is_integer(schema):
        for key in LOWER_BOUNDS:  # OpenAPI's int64 has one
            if isinstance(least := schema.get(key), (int, float)) and least < LEAST_BOUND:
                meant[key] = LEAST_BOUND
    if not is_typed and not schema.keys() & TYPING:
        if "properties" in schema:
            meant["type"] = "object"
        elif "items" in schema or "prefixItems" in schema:
            meant["type"] = "array"
    return meant


def _ascii_classes(regex: str) -> str:
    """Returns the regex with CLASSES in place of these escapes. Within a class they become ranges of it, and
    a dash beside them is a dash, as in JavaScript: Rust would take it for a range, or subtract classes."""
    words, depth = REGEX_WORD.findall(regex), 0
    is_known = [word[0] == "\\" and word[1:] in CLASSES for word in words]
    for i, word in enumerate(words):
        if is_known[i]:
            words[i] = CLASSES[word[1:]]
            if depth and word[1:] in "dw":
                words[i] = words[i][1:-1]
        elif depth and word == "-" and any(is_known[max(0, i - 1) : i + 2]):
            words[i] = "\\-"
        elif word[0] == "[":
            depth += 1
        elif word == "]":
            depth = max(0, depth - 1)
    return "".join(words)


def _parsed(kind: str, text: str) -> Any:
    try:
        return json.loads(_bounded(kind, text))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.{kind} is no JSON: {error}; send a JSON schema") from None


def _json_text(kind: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"structured_outputs.{kind} is no JSON ({error}); send plain objects, lists, texts and numbers"
        ) from None


def _json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.whitespace_pattern is not None:
        return {"whitespace_pattern": _bounded("whitespace_pattern", params.whitespace_pattern)}
    return {"whitespace_flexible": not params.disable_any_whitespace}


def _check_nesting(kind: str, schema: Any) -> None:
    """Raises RequestError if a schema is nested too deep, or has numbers that would cost too much."""
    multiple = 1
    for depth, key, value in _walk(schema):
        if depth > MAX_NESTING:
            raise RequestError(
                f"structured_outputs.{kind} is nested deeper than {MAX_NESTING} levels; "
                f"flatten it, or use $defs and $ref"
            )
        if isinstance(value, dict) and _is_integer(value):
            _check_integers(kind, value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            digits = Decimal(repr(value)).normalize()
            if abs(digits.adjusted()) > MAX_DIGITS or len(digits.as_tuple().digits) > MAX_DIGITS:
                raise RequestError(
                    f"structured_outputs.{kind} has a number of more than {MAX_DIGITS} digits "
                    f"({key}); make it smaller"
                )
            if float(value) <= -(2.0**63) and key not in LOWER_BOUNDS:  # llguidance would crash
                raise _beyond(kind, key, value)
            if key == "multipleOf":
                multiple *= math.prod(Decimal(repr(value)).as_integer_ratio())
        if multiple > MAX_MULTIPLE:
            raise RequestError(
                f"structured_outputs.{kind} has multipleOf values with the product "
                f"{multiple}, more than {MAX_MULTIPLE}; "
                "use smaller ones"
            )


def _is_integer(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type")
    return kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds)


def _check_integers(kind: str, schema: dict[str, Any]) -> None:
    """Raises RequestError for a schema of integers that can only be met above 64 bits."""
    enum = schema.get("enum")
    values = [(key, schema.get(key)) for key in ("const", *LOWER_BOUNDS)]
    values += [("enum", value) for value in (enum if isinstance(enum, list) else ())]
    for key, value in values:
        if isinstance(value, (int, float)) and value > MAX_INTEGER:
            raise _beyond(kind, key, value)


def _beyond(kind: str, key: str, value: float) -> RequestError:
    return RequestError(
        f"structured_outputs.{kind} has the {key} {value}, beyond an integer of 64 bits; leave it out, or "
        "take a text"
    )


def _walk(schema: Any) -> Iterator[tuple[int, str, Any]]:
    """Yields (depth, the key above it, value) for every value in a schema."""
    todo: list[tuple[int, str, Any]] = [(0, "", schema)]
    while todo:
        depth, key, value = todo.pop()
        yield depth, key, value
        if isinstance(value, dict):
            todo += [(depth + 1, str(k), v) for k, v in value.items()]
        elif isinstance(value, list):
            todo += [(depth + 1, key, v) for v in value]


# Structural tags


def _tag_grammar(params: StructuredOutputsParams, closes_objects: bool) -> str:
    """Returns the grammar of a structural tag in xgrammar's form, which vLLM takes: {"type":
    "structural_tag", "format": {"type": "or", ...}}."""
    kind = "structural_tag"
    given = params.structural_tag
    tag = _parsed(kind, given) if isinstance(given, str) else given
    _bounded(kind, _json_text(kind, tag))
    _check_nesting(kind, tag)
    if not isinstance(tag, dict) or tag.get("type") != kind or not isinstance(tag.get("format"), dict):
        raise RequestError(
            f'structured_outputs.{kind} {tag!r:.60} is none; send {{"type": "structural_tag", '
            f'"format": {{...}}}}'
        )
    rules: list[str] = []
    options = _json_options(params)

    def text(part: dict[str, Any], name: str) -> str:
        if not isinstance(value := part.get(name, ""), str):
            raise RequestError(
                f"structured_outputs.{kind} has the {name} {value!r:.60}, which is no text; give a string"
            )
        return _lark_text(value) if value else ""

    def names(part: dict[str, Any], name: str) -> list[str]:
        if not isinstance(values := part.get(name), list) or not values:
            raise RequestError(
                f"structured_outputs.{kind} has the {name} {values!r:.60}; give a list of at least one"
            )
        return [rule(value) for value in values]

    def rule(part: Any) -> str:
        """Adds a rule for this part and returns its name. The recursion is bounded, because the nesting
        is."""
        match part.get("type") if isinstance(part, dict) else None:
            case "const_string":
                body = text(part, "value")
            case "json_schema":
                schema = part.get("json_schema")
                if isinstance(schema, str):
                    schema = _parsed(kind, schema)
                    _check_nesting(kind, schema)
                own = schema.get("x-guidance") if isinstance(schema, dict) else None
                guidance = {**own, **options} if isinstance(own, dict) else options
                body = "%json " + _schema_text(kind, schema, closes_objects, **{"x-guidance": guidance})
            case "sequence":
                body = " ".join(names(part, "elements"))
            case "or":
                body = " | ".join(names(part, "elements"))
            case "tag":
                body = " ".join((text(part, "begin"), rule(part.get("content")), text(part, "end")))
            case "tags_with_separator":
                one = f"({' | '.join(names(part, 'tags'))})"
                body = one if part.get("stop_after_first") else f"{one} ({text(part, 'separator')} {one})*"
                body = body if part.get("at_least_one") else f"({body})?"
            case other:
                raise RequestError(
                    f"structured_outputs.{kind} has a format of the type {other!r:.60}; there "
                    f"are const_string, json_schema, "
                    "sequence, or, tag and tags_with_separator"
                )
        rules.append(f"r{len(rules)}: {body}")
        if len(rules) > MAX_RULES:
            raise RequestError(f"structured_outputs.{kind} has more than {MAX_RULES} parts; make it smaller")
        return f"r{len(rules) - 1}"

    start = rule(tag["format"])
    return LLMatcher.grammar_from_lark("\n".join([f"start: {start}", *rules]))


# Grammars


def _choice_grammar(choice: list[str]) -> str:
    """Returns a grammar of one terminal. As alternatives of a rule, each choice would be an item of the
    parser's row, whose length is bounded."""
    texts = dict.fromkeys(choice)
    _bounded("choice", "".join(texts))
    return LLMatcher.grammar_from_lark(
        "start: CHOICE\nCHOICE: " + " | ".join(_lark_text(text) for text in texts)
    )


def _lark_text(text: str) -> str:
    """Returns a Lark string literal. A text with control characters, for which Lark has no escape, becomes a
    regex."""
    if text.isprintable():
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return "/" + "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text) + "/"


def _lark(grammar: str) -> str:
    """Returns the grammar as Lark. One with rules `name ::= ...` is GBNF and is converted."""
    if GBNF_RULE.search(grammar):
        if (count := grammar.count("::=")) > MAX_RULES:
            raise RequestError(
                f"structured_outputs.grammar has {count} rules, more than {MAX_RULES}; make it smaller"
            )
        try:
            return gbnf_to_lark(UNICODE_ESCAPE.sub(_character, grammar))
        except RecursionError:
            raise RequestError("structured_outputs.grammar is nested too deep; split it into rules") from None
        except (GbnfToLarkError, IndexError, ValueError) as error:
            raise RequestError(f"structured_outputs.grammar is no GBNF: {error}; mend it") from None
        except Exception as error:  # noqa: BLE001 - the converter raises nothing narrower for a rule that is missing
            raise RequestError(f"structured_outputs.grammar is no GBNF: {error}; mend it") from None
    if (count := len(LARK_RULE.findall(grammar))) > MAX_RULES:
        raise RequestError(
            f"structured_outputs.grammar has {count} rules, more than {MAX_RULES}; make it smaller"
        )
    for found in DIRECTIVE.finditer(grammar):
        if (name := found[1] if found[1] is not None else found[2]) not in ("ignore", "llguidance"):
            raise RequestError(
                f"structured_outputs.grammar uses %{name}; of directives only %ignore is supported, and a "
                "JSON schema is "
                "given as structured_outputs.json"
            )
    return grammar


def _character(found: re.Match[str]) -> str:
    """Returns the character of an escape such as \\u0041, which the converter would misread. It stays escaped
    if it has a meaning in a GBNF text or class."""
    if found[1] is not None:
        return found[1]
    code = int(found[2] or found[3], 16)
    if code < 256 and not chr(code).isalnum():
        return f"\\x{code:02x}"
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise RequestError(
            f"structured_outputs.grammar has the escape {found[0]}, which is no character; mend it"
        )
    return chr(code)


@functools.cache
def _deep_thread() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1, "shoal-grammar")
    with _start_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            pool.submit(int).result()  # threads take the size that holds when they start
        finally:
            threading.stack_size(before)
    return pool


_start_lock = threading.Lock()
