"""Turns a request's structured outputs into a grammar for llguidance. No torch, because the server checks a
request here before it admits it.

`grammar_of` translates, and `check` also tests that llguidance accepts the result.
engine/scheduling/grammar.py compiles a grammar for a tokenizer. A grammar is an untrusted program, so its
size, its nesting and llguidance's own limits bound its cost.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits

from shoal.errors import RequestError
from shoal.sampling_params import StructuredOutputsParams
from shoal.text.grammar.javascript_regex import ascii_classes
from shoal.text.grammar.json_schema import SchemaWriter, bounded, check_nesting, parsed
from shoal.text.grammar.lark import lark_of, lark_text
from shoal.text.grammar.structural_tag import tag_grammar

logger = logging.getLogger(__name__)

LIMITS = LLParserLimits(
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    initial_lexer_fuel=500_000,
    step_max_items=20_000,
    verbose_errors=False,
)
# llguidance recurses along rules and needs up to 40 MiB of stack for MAX_BYTES. Untouched pages cost no
# memory.
STACK_BYTES = 256 << 20

WORD_OF_OPENING = re.compile(r"\|>(\w+)<\|")  # the name of the channel in <|channel|>analysis<|message|>

T = TypeVar("T")


def check(params: StructuredOutputsParams, closes_objects: bool = True) -> None:
    """Raises RequestError with the error of the specification and its place. Takes a millisecond, and half a
    second at worst. Constraints beyond grammars are left out, with one line in the log."""
    left_out: list[str] = []
    message, approximated = _judged(grammar_of(params, closes_objects, left_out=left_out))
    if message is not None:
        raise RequestError(
            f"structured_outputs.{params.kinds[0]} is not usable: {message}; correct or simplify it",
            field=f"structured_outputs.{params.kinds[0]}",
        )
    for what in (*left_out, *approximated):
        _report(what)


def grammar_of(
    params: StructuredOutputsParams,
    closes_objects: bool = True,
    is_dense: bool = False,
    left_out: list[str] | None = None,
    token_of: Callable[[str], int | None] | None = None,
) -> str:
    """Returns the specification in llguidance's form, within bounds and before compilation, and adds the
    constraints that the grammar lacks to `left_out`. Raises RequestError.

    token_of: returns the token that is a whole text, or None. With `closes_objects`, an object of a JSON
    schema has no other keys than the schema names. With `is_dense`, JSON has no white space between its
    tokens. `params` may say otherwise.
    """
    kind = params.kinds[0]
    if is_dense and params.disable_any_whitespace is None and params.whitespace_pattern is None:
        params = dataclasses.replace(params, disable_any_whitespace=True)
    if params.disable_additional_properties is not None:
        closes_objects = params.disable_additional_properties
    schemas = SchemaWriter(params, "json" if kind == "json_object" else kind, closes_objects)
    try:
        grammar = _written(params, kind, schemas)
    except UnicodeEncodeError:
        raise RequestError(
            f"structured_outputs.{kind} must not have lone surrogates; send whole characters",
            field=f"structured_outputs.{kind}",
        ) from None
    if left_out is not None:
        left_out += schemas.left_out
    if params.reasoning is None:
        return grammar
    begin, close, gap = params.reasoning
    # A weak model would spell the mark where it means a call with the same first character. Free text, which
    # a structural tag may begin with, is told apart from a spelled mark only.
    token_id = None
    if begin and token_of is not None:
        # A model opens its reasoning by whole tokens. Where a word between two marks is spelled in letters,
        # the model has not learned this opening, and its first letter would lead it into endless reasoning.
        if any(token_of(word) is None for word in WORD_OF_OPENING.findall(begin)):
            return grammar
        token_id = token_of(begin) if kind != "structural_tag" else None
    return _after_reasoning(grammar, begin, close, gap, token_id)


def _after_reasoning(grammar: str, begin: str, close: str, gap: str, token_id: int | None) -> str:
    """Returns a grammar of reasoning, which may contain any text but its closing mark, and `grammar`.
    token_id: the token that is the whole opening mark."""
    space = "[ \\t\\r\\n]"
    thoughts = f"THOUGHTS {lark_text(gap) if gap else ''} SPACE?"
    if begin:
        opening = f"/{space}{{0,4}}{_pattern(begin)}/" if token_id is None else f"SPACE? <[{token_id}]>"
        thoughts = f"({opening} {thoughts})?"
    rules = [f"start: reasoning @constrained\nreasoning: {thoughts}", f"SPACE: /{space}{{1,4}}/"]
    end = _pattern(close)
    text = f"/(?s:.*){end}/ & ~/(?s:.*){end}(?s:.+)/"
    if gap:  # its first mark begins a message, so it is in no reasoning
        text += f" & ~/(?s:.*){_pattern(gap[: gap.find('>') + 1])}(?s:.*)/"
    rules.append(f"THOUGHTS: {text}")
    if not grammar.lstrip().startswith("{"):
        grammar = json.dumps({"grammars": [{"lark_grammar": grammar}]})
    [own] = json.loads(grammar)["grammars"]
    parts = [{"lark_grammar": "\n".join(rules)}, {**own, "name": "constrained"}]
    return json.dumps({"grammars": parts}, ensure_ascii=False)


def _pattern(text: str) -> str:
    return "".join(f"\\x{{{ord(c):x}}}" for c in text)


def _written(params: StructuredOutputsParams, kind: str, schemas: SchemaWriter) -> str:
    if kind in ("json", "json_object"):
        return _json_grammar(params, schemas)
    if kind == "structural_tag":
        return tag_grammar(params.structural_tag, schemas)
    if params.whitespace_pattern is not None:
        raise RequestError(
            f"structured_outputs.whitespace_pattern goes with json and json_object only, not with {kind}; "
            "leave it out",
            field="structured_outputs.whitespace_pattern",
        )
    if kind == "regex":
        return LLMatcher.grammar_from_regex(ascii_classes(bounded(kind, params.regex or "")))
    if kind == "choice":
        return _choice_grammar(params.choice or [])
    return LLMatcher.grammar_from_lark(lark_of(bounded(kind, params.grammar or ""), schemas))


def in_any_spelling(grammar: str) -> str:
    """Returns a grammar of `grammar_of` whose texts may be written in any tokens. Where one text alone can
    follow, llguidance would allow only the tokens that the tokenizer makes of it."""
    if not grammar.lstrip().startswith("{"):
        grammar = json.dumps({"grammars": [{"lark_grammar": grammar}]})
    first, *others = json.loads(grammar)["grammars"]
    option = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @answer'}
    return json.dumps({"grammars": [option, {**first, "name": "answer"}, *others]}, ensure_ascii=False)


def texts_of(params: StructuredOutputsParams) -> str:
    """Returns the texts of a specification, without their backslashes before signs, for a search."""
    found: list[str] = []
    todo: list[object] = [getattr(params, params.kinds[0]), params.reasoning]
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            todo += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            todo += value
    return re.sub(r"\\([^A-Za-z0-9\s])", r"\1", "\n".join(found))


def in_deep_thread(call: Callable[[], T]) -> Future[T]:
    """Runs a call of llguidance's compiler in a thread with a large stack. Calls run one after another."""
    return _deep_thread().submit(call)


@functools.lru_cache(maxsize=512)
def _judged(grammar: str) -> tuple[str | None, list[str]]:
    """Returns llguidance's error about a refused grammar, and its warnings about an accepted one."""
    failed, messages = in_deep_thread(
        lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    ).result()
    return (short(messages[0]), []) if failed else (None, [short(message) for message in messages])


@functools.lru_cache(maxsize=512)
def _report(what: str) -> None:
    """Logs, once, a constraint that the grammar of a JSON schema lacks."""
    logger.warning("a JSON schema has a limit that its grammar leaves out: %.300s", what)


def short(message: str) -> str:
    """Returns an error of llguidance without long parts of a user's grammar."""
    message = " ".join(message.split("<non-verbose/>")[0].split())
    if (unsupported := re.search(r"Unimplemented keys: \[(.*?)\]", message)) is not None:
        return f"the JSON schema keywords {unsupported[1]} are not supported"
    if "NoExtensionBias" in message:
        return "no text fits it"
    return message if len(message) <= 300 else f"{message[:200]} ... {message[-90:]}"


def _json_grammar(params: StructuredOutputsParams, schemas: SchemaWriter) -> str:
    schema = {"type": "object"} if params.json_object else params.json
    if isinstance(schema, str):
        schema = parsed("json", schema)
    check_nesting("json", schema)
    text = schemas.text(schema)
    try:
        return LLMatcher.grammar_from_json_schema(text)
    except ValueError as error:
        raise RequestError(
            f"structured_outputs.json is not usable: {short(str(error))}; correct it",
            field="structured_outputs.json",
        ) from None


def _choice_grammar(choice: list[str]) -> str:
    """Returns a grammar with one terminal for all choices. As alternatives of a rule, each choice would be an
    item of the parser's row, whose length is bounded."""
    texts = dict.fromkeys(choice)
    bounded("choice", "".join(texts))
    return LLMatcher.grammar_from_lark(
        "start: CHOICE\nCHOICE: " + " | ".join(lark_text(text) for text in texts)
    )


@functools.cache
def _deep_thread() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1, "shoal-grammar")
    with _start_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            pool.submit(int).result()  # a thread takes the stack size that is set when it starts
        finally:
            threading.stack_size(before)
    return pool


_start_lock = threading.Lock()
