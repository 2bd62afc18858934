"""Turns a structural tag, xgrammar's description of texts with JSON within marks, into Lark.

Free text (`any_text`, and the text around `triggered_tags`) has no grammar: the following text ends it. So
the rule of a part is written together with the texts that may end it, and a lazy terminal reads free text up
to the first of them.
"""

from __future__ import annotations

import re
from typing import Any

from llguidance import LLMatcher

from shoal.errors import RequestError
from shoal.text.grammar.javascript_regex import ascii_classes
from shoal.text.grammar.json_schema import SchemaWriter, bounded, check_nesting, json_text, parsed
from shoal.text.grammar.lark import MAX_RULES, lark_of, lark_text

KIND = "structural_tag"
FORMATS = (
    "const_string, json_schema, regex, grammar, any_text, sequence, or, tag, tags_with_separator, "
    "triggered_tags, optional, plus, star and repeat"
)
TIMES = {"optional": "?", "plus": "+", "star": "*"}
ANY = "(?s:.*)"
MAX_TIMES = 1000


def tag_grammar(given: Any, schemas: SchemaWriter) -> str:
    """Returns the grammar of a structural tag, or of its JSON text, in xgrammar's form, which vLLM accepts:
    {"type": "structural_tag", "format": {"type": "or", ...}}, or the older one with structures and
    triggers."""
    tag = parsed(KIND, given) if isinstance(given, str) else given
    bounded(KIND, json_text(KIND, tag))
    check_nesting(KIND, tag)
    if isinstance(tag, dict) and "structures" in tag and "format" not in tag:
        tag = {"type": KIND, "format": _of_older_form(tag)}
    if not isinstance(tag, dict) or tag.get("type") != KIND or not isinstance(tag.get("format"), dict):
        raise RequestError(
            f'structured_outputs.{KIND} {tag!r:.60} has no format; send {{"type": "{KIND}", '
            f'"format": {{...}}}}',
            field=f"structured_outputs.{KIND}",
        )
    return LLMatcher.grammar_from_lark(_Rules(schemas).text(tag["format"]))


def _of_older_form(tag: dict[str, Any]) -> dict[str, Any]:
    structures = tag["structures"]
    if not isinstance(structures, list) or not all(isinstance(part, dict) for part in structures):
        raise RequestError(
            f"structured_outputs.{KIND} has the structures {structures!r:.60}; give a list of objects with "
            "begin, schema and end",
            field=f"structured_outputs.{KIND}",
        )
    return {
        "type": "triggered_tags",
        "triggers": tag.get("triggers"),
        "tags": [
            {
                "type": "tag",
                "begin": part.get("begin"),
                "content": {"type": "json_schema", "json_schema": part.get("schema", True)},
                "end": part.get("end", ""),
            }
            for part in structures
        ],
    }


class _Rules:
    """Writes the rules of one structural tag. The recursion is bounded by the bounded nesting."""

    def __init__(self, schemas: SchemaWriter) -> None:
        self._schemas = schemas
        self._rules: list[str] = []

    def text(self, form: Any) -> str:
        start = self._rule(form, [])
        return "\n".join([f"start: {start}", *self._rules])

    def _named(self, body: str, prefix: str = "r") -> str:
        """Adds a rule (or with the prefix R a terminal) and returns its name."""
        if len(self._rules) == MAX_RULES:
            raise RequestError(
                f"structured_outputs.{KIND} has more than {MAX_RULES} parts; make it smaller",
                field=f"structured_outputs.{KIND}",
            )
        name = f"{prefix}{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _rule(self, part: Any, ends: list[str]) -> str:
        """Adds a rule for this part, followed by one of the texts `ends`, if there are any."""
        match part.get("type") if isinstance(part, dict) else None:
            case "any_text":
                return self._free(ends, _texts(part, "excludes"))
            case "triggered_tags":
                return self._triggered(part, ends)
            case "or":
                return self._named(" | ".join(self._rule(p, ends) for p in _parts(part, "elements")))
            case "sequence":
                *others, last = _parts(part, "elements")
                for i, other in enumerate(others):
                    if isinstance(other, dict) and other.get("type") in ("any_text", "triggered_tags"):
                        raise RequestError(
                            f"structured_outputs.{KIND} has {other['type']} as element {i} of a sequence, "
                            "which no text ends; make it the last, or the content of a tag",
                            field=f"structured_outputs.{KIND}",
                        )
                return self._named(" ".join([*(self._rule(p, []) for p in others), self._rule(last, ends)]))
            case "tag":
                own = _ends(part)
                body = f"{_lark_of(part, 'begin')} {self._rule(part.get('content'), own or ends)}"
                if not own:
                    return self._named(body)
            case "tags_with_separator":
                one = f"({' | '.join(self._rule(p, []) for p in _parts(part, 'tags'))})"
                more = f"{one} ({_lark_of(part, 'separator')} {one})*"
                body = one if part.get("stop_after_first") else more
                body = body if part.get("at_least_one") else f"({body})?"
            case "optional" | "plus" | "star" as times:
                body = f"({self._rule(part.get('content'), [])}){TIMES[times]}"
            case "repeat":
                body = f"({self._rule(part.get('content'), [])}){_count(part)}"
            case "const_string":
                body = _lark_of(part, "value")
            case "json_schema":
                body = "%json " + self._schemas.text(_schema_of(part))
            case "regex":
                pattern = ascii_classes(_text(part, "pattern")).replace("/", "\\/").replace("\n", "\\n")
                body = self._named(f"/{pattern}/", "R")
            case "grammar":
                body = f"%lark {{\n{lark_of(_text(part, 'grammar'), self._schemas)}\n}}"
            case other:
                raise RequestError(
                    f"structured_outputs.{KIND} must have a format of the types {FORMATS}, got "
                    f"{other!r:.60}; choose one",
                    field=f"structured_outputs.{KIND}",
                )
        return self._named(f"{body} {_any_of(ends)}" if ends else body)

    def _free(self, ends: list[str], excludes: list[str]) -> str:
        """Adds a rule for text without `excludes` up to the first of `ends`, or to the end."""
        without = f" & ~/{ANY}{_regex(excludes)}{ANY}/" if excludes else ""
        if not ends:
            return self._named(self._named(f"/{ANY}/{without}", "R"))
        terminal = self._named(f"/{ANY}{_regex(ends)}/{without}", "R")
        name = f"r{len(self._rules)}"
        self._named(terminal)
        self._rules[-1] = f"{name}[lazy]: {terminal}"
        return name

    def _triggered(self, part: dict[str, Any], ends: list[str]) -> str:
        """Adds a rule for free text in which each trigger begins one of the tags."""
        triggers, excludes = _texts(part, "triggers"), _texts(part, "excludes")
        if not triggers:
            raise RequestError(
                f"structured_outputs.{KIND} has no triggers; give a list of texts with which the tags begin",
                field=f"structured_outputs.{KIND}",
            )
        by_trigger: dict[str, list[str]] = {}
        whole: list[str] = []
        for tag in _parts(part, "tags"):
            begin = _text(tag, "begin") if isinstance(tag, dict) else ""
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise RequestError(
                    f"structured_outputs.{KIND} has a tag that begins with {begin!r:.60} and no trigger "
                    f"for it; let it begin with one of {', '.join(triggers)!r:.200}, or add the trigger",
                    field=f"structured_outputs.{KIND}",
                )
            rest = self._rule({"type": "tag", **tag, "begin": begin[len(trigger) :]}, [])
            by_trigger.setdefault(trigger, []).append(rest)
            whole.append(f"{lark_text(trigger)} {rest}")
        # An unused trigger is ordinary text, and the ends of the part end its free text.
        marks = [*ends, *by_trigger]
        tags = " | ".join(
            f"{self._free([trigger], [*excludes, *(mark for mark in marks if mark not in trigger)])} "
            f"({' | '.join(rests)})"
            for trigger, rests in by_trigger.items()
        )
        tail = self._free(ends, [*excludes, *by_trigger])
        first = f"({' | '.join(whole)})"
        last = _any_of(ends) if ends else ""
        if part.get("stop_after_first"):
            one = first if part.get("at_least_one") else f"({tags})"
            body = f"{one} {last}" if part.get("at_least_one") else f"{one} {last} | {tail}"
        else:
            body = f"({tags})* {tail}"
            body = f"{first} {body}" if part.get("at_least_one") else body
        return self._named(body)


def _text(part: dict[str, Any], name: str) -> str:
    if not isinstance(value := part.get(name, ""), str):
        raise RequestError(
            f"structured_outputs.{KIND}: {name} must be a string, got {value!r:.60}; give one",
            field=f"structured_outputs.{KIND}",
        )
    return value


def _lark_of(part: dict[str, Any], name: str) -> str:
    return lark_text(value) if (value := _text(part, name)) else ""


def _texts(part: dict[str, Any], name: str) -> list[str]:
    values = part.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise RequestError(
            f"structured_outputs.{KIND}: {name} must be a list of strings, got {values!r:.60}; give one",
            field=f"structured_outputs.{KIND}",
        )
    return list(dict.fromkeys(values))


def _ends(tag: dict[str, Any]) -> list[str]:
    if isinstance(tag.get("end"), list):
        return _texts(tag, "end")
    return [end] if (end := _text(tag, "end")) else []


def _parts(part: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(values := part.get(name), list) or not values:
        raise RequestError(
            f"structured_outputs.{KIND}: {name} must be a list of at least one, got {values!r:.60}; give one",
            field=f"structured_outputs.{KIND}",
        )
    return values


def _count(part: dict[str, Any]) -> str:
    least, most = part.get("min"), part.get("max")
    if not isinstance(least, int) or not isinstance(most, int) or not 0 <= least <= MAX_TIMES >= most >= -1:
        raise RequestError(
            f"structured_outputs.{KIND} has a repeat from {least!r:.20} to {most!r:.20}; give min and max, "
            f"at most {MAX_TIMES} (max -1: any number)",
            field=f"structured_outputs.{KIND}",
        )
    return f"{{{least},{'' if most == -1 else most}}}"


def _schema_of(part: dict[str, Any]) -> Any:
    if (style := part.get("style", "json")) != "json":
        raise RequestError(
            f"structured_outputs.{KIND}: style must be json, got {style!r:.60}; leave it out",
            field=f"structured_outputs.{KIND}",
        )
    schema = part.get("json_schema")
    if isinstance(schema, str):
        schema = parsed(KIND, schema)
        check_nesting(KIND, schema)
    return schema


def _any_of(texts: list[str]) -> str:
    return f"({' | '.join(map(lark_text, texts))})"


def _regex(texts: list[str]) -> str:
    return "(" + "|".join("".join(map(_escaped, text)) for text in texts) + ")"


def _escaped(char: str) -> str:
    return char if re.fullmatch(r"[A-Za-z0-9 _<>=:-]", char) else f"\\x{{{ord(char):x}}}"
