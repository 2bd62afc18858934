"""`CallSyntax`: the texts around the parts of a family's calls, from which a grammar of calls is written
(text/grammar/call_grammar.py). The family's ChatFormat reads what the grammar allows."""

from __future__ import annotations

from dataclasses import dataclass

GAP = r"[ \t\r\n]*"  # a regex


@dataclass(frozen=True, slots=True)
class TaggedArgument:
    """An argument as text between tags: `before`, its key, `middle`, its value, `lead`, `end`.

    lead: text before the closing tag `end` that is not part of the value. string, other: attributes after the
    key that say whether the value is a string.
    """

    before: str
    middle: str
    end: str
    lead: str = ""
    after: str = ""
    string: str = ""
    other: str = ""


@dataclass(frozen=True, slots=True)
class PairedArguments:
    """Arguments as pairs of a key, `equals` and a value, with `separator` between pairs.

    quote: mark around texts, which are raw; objects and lists within arguments are then written as arguments
    are, in braces and brackets. "": values are Python's literals, or JSON's texts, objects and lists. words:
    the words for true, false and null.
    """

    equals: str
    separator: str
    quote: str = ""
    words: tuple[str, str, str] = ("true", "false", "null")


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Calls in one answer: `begin`, calls with `separator` between them, `end`. A call is `before`, its name,
    `middle`, its arguments, `after`.

    middle: {name} is the call's name, and {number} any number. argument: None: the arguments are a JSON
    object. is_single: an answer has one call. key: the call between `before` and `after` is a JSON object
    with a name, and with its arguments under this key. may_end: the answer may end without `end`, so that a
    weak model is not led to a further call.
    """

    before: str
    middle: str
    after: str
    begin: str = ""
    end: str = ""
    separator: str = ""
    argument: TaggedArgument | PairedArguments | None = None
    is_single: bool = False
    key: str = ""
    may_end: bool = False


@dataclass(frozen=True, slots=True)
class BareCalls:
    """Calls without an opening mark, with which an answer begins.

    begun: a regex of the beginnings of such answers, in which {names} are the tools' names. head: a regex of
    the text before the first call's arguments, in which {name} is its name.
    """

    begun: str
    head: str


def json_syntax(
    begin: str, end: str, separator: str, before: str = "", after: str = "", key: str = "arguments"
) -> CallSyntax:
    """Returns the syntax of calls that are JSON objects. before, after: texts around each call."""
    return CallSyntax(before, "", after, begin, end, separator, key=key)


def bare_json(before: str, key: str) -> BareCalls:
    """Returns bare calls that are JSON objects. before: a regex of the text before the first one. key: see
    CallSyntax."""
    name, earlier = f'"name"{GAP}:{GAP}"', f'("(type|id|arguments|parameters)"{GAP}:(?s:.*))?'
    begin = f"{GAP}{before}\\{{{GAP}"
    return BareCalls(
        f'{begin}{earlier}{name}({{names}})"', f'{begin}{name}{{name}}"{GAP},{GAP}"{key}"{GAP}:{GAP}'
    )
