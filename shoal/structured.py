"""What an answer must look like, as a grammar of llguidance. Torch-free: the server checks a request here before it is admitted.

`grammar_of` translates, `check` also proves that llguidance takes the result; engine/grammar.py compiles it for a tokenizer. A grammar is
a program that a stranger sends: its size, its nesting and llguidance's own limits bound what it may cost.
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

from shoal.api import StructuredOutputsParams
from shoal.errors import RequestError

MAX_BYTES = 128 * 1024       # of a specification's text: what it may need in stack and time grows with it
MAX_NESTING = 60             # of a JSON schema; the parser below ends at 128 levels of the JSON text
MAX_RULES = 1000             # of a grammar
MAX_MULTIPLE = 100_000       # product of a schema's `multipleOf`s: the automaton has that many states
MAX_DIGITS = 40              # of a number in a schema

LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=100_000, initial_lexer_fuel=500_000, step_max_items=20_000,
                        verbose_errors=False)
STACK_BYTES = 256 << 20      # llguidance recurses along rules, up to 40 MiB deep for MAX_BYTES; untouched pages cost nothing

GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
LARK_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_]\w*(\.-?\d+)?(\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
DIRECTIVE = re.compile(r"^[ \t]*%(\w*)|%(json|regex|lark)\b", re.MULTILINE)
UNICODE_ESCAPE = re.compile(r"(\\\\)|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})")

T = TypeVar("T")


def check(params: StructuredOutputsParams) -> None:
    """Raises RequestError that names what is wrong with the specification and where. Takes a millisecond, half a second at worst."""
    if (message := _problem(grammar_of(params))) is not None:
        raise RequestError(f"structured_outputs.{_kind(params)} is not usable: {message}; mend or simplify it")


def grammar_of(params: StructuredOutputsParams) -> str:
    """llguidance's form of it: not yet compiled, but within bounds. Raises RequestError."""
    kind = _kind(params)
    try:
        if kind in ("json", "json_object"):
            return _json_grammar(params)
        if params.whitespace_pattern is not None:
            raise RequestError(f"structured_outputs.whitespace_pattern belongs to json and json_object, not to {kind}; leave it out")
        if kind == "regex":
            return LLMatcher.grammar_from_regex(_bounded(kind, params.regex or ""))
        if kind == "choice":
            return _choice_grammar(params.choice or [])
        return LLMatcher.grammar_from_lark(_lark(_bounded(kind, params.grammar or "")))
    except UnicodeEncodeError:
        raise RequestError(f"structured_outputs.{kind} holds half a character (a lone surrogate); send whole ones") from None


def in_deep_thread(call: Callable[[], T]) -> Future[T]:
    """Runs llguidance's compiler in a thread whose stack is deep enough for it; one call at a time."""
    return _deep_thread().submit(call)


@functools.lru_cache(maxsize=512)
def _problem(grammar: str) -> str | None:
    """What llguidance says of a grammar that it doesn't take."""
    failed, messages = in_deep_thread(lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)).result()
    return short(messages[0]) if failed else None


def short(message: str) -> str:
    """An error of llguidance without the parts of a user's grammar that fill a page."""
    message = " ".join(message.split("<non-verbose/>")[0].split())
    if (unsupported := re.search(r"Unimplemented keys: \[(.*?)\]", message)) is not None:
        return f"the JSON schema keywords {unsupported[1]} are not supported"
    return message if len(message) <= 300 else f"{message[:200]} ... {message[-90:]}"


def _kind(params: StructuredOutputsParams) -> str:
    return next(name for name in ("json", "regex", "choice", "grammar", "json_object") if getattr(params, name) not in (None, False))


def _bounded(kind: str, text: str) -> str:
    size = len(text.encode())
    if size > MAX_BYTES:
        raise RequestError(f"structured_outputs.{kind} has {size} bytes, more than {MAX_BYTES}; make it smaller")
    return text


# JSON

def _json_grammar(params: StructuredOutputsParams) -> str:
    schema = {"type": "object"} if params.json_object else params.json
    if isinstance(schema, str):
        try:
            schema = json.loads(_bounded("json", schema))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"structured_outputs.json is no JSON: {error}; send a JSON schema") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(f"structured_outputs.json {schema!r:.60} is no JSON schema; send an object (or true for any JSON)")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is no JSON ({error}); send plain objects, lists, texts and numbers") from None
    _check_schema(schema)
    options: dict[str, Any] = {"whitespace_flexible": True}
    if params.whitespace_pattern is not None:
        options = {"whitespace_pattern": _bounded("whitespace_pattern", params.whitespace_pattern)}
    try:
        return LLMatcher.grammar_from_json_schema(_bounded("json", text), overrides=options)    # type: ignore[arg-type]
    except ValueError as error:
        raise RequestError(f"structured_outputs.json is not usable: {short(str(error))}; mend it") from None


def _check_schema(schema: Any) -> None:
    multiple = 1
    for depth, key, value in _walk(schema):
        if depth > MAX_NESTING:
            raise RequestError(f"structured_outputs.json is nested deeper than {MAX_NESTING} levels; flatten it, or use $defs and $ref")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            digits = Decimal(repr(value)).normalize()
            if abs(digits.adjusted()) > MAX_DIGITS or len(digits.as_tuple().digits) > MAX_DIGITS:
                raise RequestError(f"structured_outputs.json has a number of more than {MAX_DIGITS} digits ({key}); make it smaller")
            if key == "multipleOf":
                multiple *= math.prod(Decimal(repr(value)).as_integer_ratio())
        if multiple > MAX_MULTIPLE:
            raise RequestError(f"structured_outputs.json has multipleOf values with the product {multiple}, more than {MAX_MULTIPLE}; "
                               "use smaller ones")


def _walk(schema: Any) -> Iterator[tuple[int, str, Any]]:
    """(depth, key it stands under, value) of every value in it."""
    todo: list[tuple[int, str, Any]] = [(0, "", schema)]
    while todo:
        depth, key, value = todo.pop()
        yield depth, key, value
        if isinstance(value, dict):
            todo += [(depth + 1, str(k), v) for k, v in value.items()]
        elif isinstance(value, list):
            todo += [(depth + 1, key, v) for v in value]


# Grammars

def _choice_grammar(choice: list[str]) -> str:
    """One terminal: as alternatives of a rule each would be an item of the parser's row, and a row is bounded."""
    texts = dict.fromkeys(choice)
    _bounded("choice", "".join(texts))
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(_lark_text(text) for text in texts))


def _lark_text(text: str) -> str:
    """A Lark string literal; control characters, which it has no escape for, as a regex."""
    if text.isprintable():
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return "/" + "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text) + "/"


def _lark(grammar: str) -> str:
    """The grammar as Lark, which it is unless it has rules `name ::= ...`."""
    if GBNF_RULE.search(grammar):
        if (count := grammar.count("::=")) > MAX_RULES:
            raise RequestError(f"structured_outputs.grammar has {count} rules, more than {MAX_RULES}; make it smaller")
        try:
            return gbnf_to_lark(UNICODE_ESCAPE.sub(_character, grammar))
        except RecursionError:
            raise RequestError("structured_outputs.grammar is nested too deep; split it into rules") from None
        except (GbnfToLarkError, IndexError, ValueError) as error:
            raise RequestError(f"structured_outputs.grammar is no GBNF: {error}; mend it") from None
        except Exception as error:    # noqa: BLE001 - the converter raises nothing narrower for a rule that is missing
            raise RequestError(f"structured_outputs.grammar is no GBNF: {error}; mend it") from None
    if (count := len(LARK_RULE.findall(grammar))) > MAX_RULES:
        raise RequestError(f"structured_outputs.grammar has {count} rules, more than {MAX_RULES}; make it smaller")
    for found in DIRECTIVE.finditer(grammar):
        if (name := found[1] if found[1] is not None else found[2]) not in ("ignore", "llguidance"):
            raise RequestError(f"structured_outputs.grammar uses %{name}; of directives only %ignore is supported, and a JSON schema is "
                               "given as structured_outputs.json")
    return grammar


def _character(found: re.Match[str]) -> str:
    """\\u0041 as the character itself, which the converter would misread; escaped where it has a meaning in a GBNF text or class."""
    if found[1] is not None:
        return found[1]
    code = int(found[2] or found[3], 16)
    if code < 256 and not chr(code).isalnum():
        return f"\\x{code:02x}"
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise RequestError(f"structured_outputs.grammar has the escape {found[0]}, which is no character; mend it")
    return chr(code)


@functools.cache
def _deep_thread() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1, "shoal-grammar")
    with _start_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            pool.submit(int).result()    # threads take the size that holds when they start
        finally:
            threading.stack_size(before)
    return pool


_start_lock = threading.Lock()
