"""Turns grammars of requests (Lark, GBNF) into the Lark that llguidance compiles."""

from __future__ import annotations

import json
import re

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from shoal.errors import RequestError
from shoal.text.grammar.json_schema import SchemaWriter, check_nesting

# In a grammar, and as many terminals and schemas. To compile nested ones takes quadratic time.
MAX_RULES = 1000
SIGNS = frozenset(r".^$*+?()[]{}|\/")  # that have a meaning in a regex
GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
LARK_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\.-?\d+)?(\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
DIRECTIVE = re.compile(r"^[ \t]*%(\w*)|%(regex|lark)\b", re.MULTILINE)
# Strings, comments and regexes of Lark: directives and rules within them have no meaning.
LITERAL = re.compile(r""""(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/""")
UNICODE_ESCAPE = re.compile(r"(\\\\)|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})")


def lark_text(text: str) -> str:
    """Returns a Lark string literal. A text with control characters, for which Lark has no escape, becomes a
    regex."""
    if text.isprintable():
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return "/" + "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text) + "/"


def literal(text: str) -> str:
    """Returns a regex of Lark for this text. Signs other than those with a meaning stay as they are."""
    return "".join("\\" + c if c in SIGNS else c if c.isprintable() else f"\\x{{{ord(c):x}}}" for c in text)


def lark_of(grammar: str, schemas: SchemaWriter) -> str:
    """Returns the grammar as Lark. A grammar with rules `name ::= ...` is GBNF and is converted."""
    if GBNF_RULE.search(grammar):
        if (count := grammar.count("::=")) > MAX_RULES:
            raise RequestError(
                f"structured_outputs.grammar has {count} rules, more than {MAX_RULES}; make it smaller",
                field="structured_outputs.grammar",
            )
        try:
            return gbnf_to_lark(UNICODE_ESCAPE.sub(_character, grammar))
        except RecursionError:
            raise RequestError(
                "structured_outputs.grammar is nested too deep; split it into rules",
                field="structured_outputs.grammar",
            ) from None
        except (GbnfToLarkError, IndexError, ValueError) as error:
            raise RequestError(
                f"structured_outputs.grammar must be GBNF: {error}; correct it",
                field="structured_outputs.grammar",
            ) from None
        except Exception as error:  # noqa: BLE001 - the converter raises plain Exception for a missing rule
            raise RequestError(
                f"structured_outputs.grammar must be GBNF: {error}; correct it",
                field="structured_outputs.grammar",
            ) from None
    grammar, num_rules = _with_schemas(grammar, schemas)
    if num_rules > MAX_RULES:
        raise RequestError(
            f"structured_outputs.grammar has {num_rules} rules, terminals or schemas, more than {MAX_RULES}; "
            "make it smaller",
            field="structured_outputs.grammar",
        )
    return grammar


def _with_schemas(grammar: str, schemas: SchemaWriter) -> tuple[str, int]:
    """Returns the grammar with each schema after %json rewritten by Shoal, and the largest of its numbers of
    rules, terminals and schemas. Refuses directives except %json, %ignore and %llguidance."""
    parts: list[str] = []
    bare = LITERAL.sub(lambda found: " " * len(found[0]), grammar)
    at = num_rules = num_terminals = num_schemas = 0
    while True:
        start = bare.find("%json", at)
        end = len(bare) if start < 0 else start
        rest = bare[at:end]
        names = [found[1].lstrip("_") for found in LARK_RULE.finditer(rest)]
        num_upper = sum(name[:1].isupper() for name in names)
        num_rules, num_terminals = num_rules + len(names) - num_upper, num_terminals + num_upper
        for found in DIRECTIVE.finditer(rest):
            if (name := found[1] if found[1] is not None else found[2]) not in ("ignore", "llguidance"):
                raise RequestError(
                    "structured_outputs.grammar may have the directives %json and %ignore only, got "
                    f"%{name}; leave it out",
                    field="structured_outputs.grammar",
                )
        parts.append(grammar[at:end])
        if start < 0:
            return "".join(parts), max(num_rules, num_terminals, num_schemas)
        num_schemas += 1
        at = start + len("%json")
        at += len(grammar[at:]) - len(grammar[at:].lstrip())
        try:
            schema, at = json.JSONDecoder().raw_decode(grammar, at)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"structured_outputs.grammar has %json without a JSON schema: {error}; give the schema "
                "after it",
                field="structured_outputs.grammar",
            ) from None
        check_nesting("grammar", schema)
        parts.append(f"%json {schemas.text(schema)}")


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
            f"structured_outputs.grammar must have escapes of characters, got {found[0]}; correct it",
            field="structured_outputs.grammar",
        )
    return chr(code)
