"""Turns a structural tag, xgrammar's description of texts with JSON within marks, into Lark."""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher

from shoal.api import StructuredOutputsParams
from shoal.errors import RequestError
from shoal.json_schema import bounded, check_nesting, json_options, json_text, parsed, schema_text
from shoal.lark import MAX_RULES, lark_text


def tag_grammar(params: StructuredOutputsParams, closes_objects: bool, left_out: list[str]) -> str:
    """Returns the grammar of a structural tag in xgrammar's form, which vLLM takes: {"type":
    "structural_tag", "format": {"type": "or", ...}}."""
    kind = "structural_tag"
    given = params.structural_tag
    tag = parsed(kind, given) if isinstance(given, str) else given
    bounded(kind, json_text(kind, tag))
    check_nesting(kind, tag)
    if not isinstance(tag, dict) or tag.get("type") != kind or not isinstance(tag.get("format"), dict):
        raise RequestError(
            f'structured_outputs.{kind} {tag!r:.60} is none; send {{"type": "structural_tag", '
            f'"format": {{...}}}}'
        )
    rules: list[str] = []
    options = json_options(params)

    def text(part: dict[str, Any], name: str) -> str:
        if not isinstance(value := part.get(name, ""), str):
            raise RequestError(
                f"structured_outputs.{kind} has the {name} {value!r:.60}, which is no text; give a string"
            )
        return lark_text(value) if value else ""

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
                    schema = parsed(kind, schema)
                    check_nesting(kind, schema)
                own = schema.get("x-guidance") if isinstance(schema, dict) else None
                guidance = {**own, **options} if isinstance(own, dict) else options
                body = "%json " + schema_text(
                    kind, schema, closes_objects, left_out, **{"x-guidance": guidance}
                )
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
