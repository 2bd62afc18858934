"""`text_and_calls`: free text in which the model decides to make calls, and a grammar for each call.

A call begins at a mark, or in the header of a message, or at the start of the answer with the name of a tool.
Text that the family's ChatFormat reads as a call is never free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.text.grammar.call_grammar import CallWriter, call_grammar
from shoal.text.grammar.lark import literal
from shoal.text.reading.call_syntax import BareCalls, CallSyntax
from shoal.text.reading.chat_format import ChatFormat
from shoal.text.reading.messages import NEXT, START, Messages

Schemas = Mapping[str, dict[str, Any]]  # schema of the arguments by the tool's name
ANY = "(?s:.*)"


def text_and_calls(
    form: ChatFormat, schemas: Schemas, many: bool, excludes: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Returns a structural tag for free text with calls of these tools; None for a format without syntaxes.

    many: there may be several calls. excludes: marks that the text does not contain.
    """
    if not form.syntaxes:
        return None
    if isinstance(form, Messages):
        part = {"type": "grammar", "grammar": _messages(form, schemas)}
    elif form.bare is not None:
        part = {"type": "grammar", "grammar": _bare(form, form.bare, schemas, many, excludes)}
    else:
        part = _tagged(form, schemas, many, excludes)
    return {"type": "structural_tag", "format": part}


def _tagged(form: ChatFormat, schemas: Schemas, many: bool, excludes: Sequence[str]) -> dict[str, Any]:
    """Returns a structural tag's part for text in which a mark begins calls."""
    tags = []
    for syntax in form.syntaxes:
        opening = _opening(form, syntax)
        # Calls without a text around all of them begin one by one.
        grammar = call_grammar([syntax], schemas, many and bool(syntax.begin), opening)
        tags.append({"begin": opening, "content": {"type": "grammar", "grammar": grammar}, "end": ""})
    triggers = list(dict.fromkeys(tag["begin"] for tag in tags))
    others = [mark for mark in form.openings if not any(mark in trigger for trigger in triggers)]
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": tags,
        "excludes": [*others, *excludes],
        "stop_after_first": not many,
    }


def _opening(form: ChatFormat, syntax: CallSyntax) -> str:
    """Returns the mark with which calls of this syntax begin, or ""."""
    text = syntax.begin + syntax.before
    return next((mark for mark in form.openings if text.startswith(mark)), "")


def _bare(form: ChatFormat, bare: BareCalls, schemas: Schemas, many: bool, excludes: Sequence[str]) -> str:
    """Returns the grammar of an answer that is calls, or text that may end with a mark and calls."""
    writer, [syntax] = CallWriter(schemas), form.syntaxes
    opening = _opening(form, syntax)
    begun = bare.begun.replace("{names}", "|".join(map(literal, schemas)))
    mark, *others = form.openings
    free = f"~/{begun}{ANY}/" + _without([*others, *excludes])
    start = [
        f"{writer.lazy(f'/{ANY}{literal(mark)}/ & {free}')} ({writer.calls(syntax, many, opening)})",
        writer.calls_after(bare.head, syntax, many),
        writer.named(f"/{ANY}/ & {free}{_without([mark])}", "R"),
    ]
    return writer.text(" | ".join(start))


def _messages(form: Messages, schemas: Schemas) -> str:
    """Returns the grammar of an answer's messages. The last one may be a call, and may lack its end."""
    writer, [syntax] = CallWriter(schemas), form.syntaxes
    end, *others = form.ends
    more, last = [], []
    for head, marks in ((form.thoughts_head, others), (form.words_head, [*others, *form.openings])):
        head = writer.named(f"/{head}/", "R")
        marks = [START, *marks]
        more.append(f"{head} {writer.lazy(f'/{ANY}{literal(end)}/{_without(marks)}')}")
        last.append(f"{head} {writer.named(f'/{ANY}/{_without([end, *marks])}', 'R')}")
    message = writer.named(" | ".join(more))
    call = writer.call_after(form.call_head, syntax)
    return writer.text(f'({message} "{NEXT}")* ({" | ".join([message, *last, call])})')


def _without(marks: Sequence[str]) -> str:
    """Returns the rest of a terminal's body: none of the marks is in it."""
    return f" & ~/{ANY}({'|'.join(map(literal, marks))}){ANY}/" if marks else ""
