"""Regexes of the raw texts that fit a JSON schema of strings, for syntaxes in which a text has no quotes: its
length, its patterns and its format. llguidance has the same rules for quoted texts only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal.errors import RequestError
from shoal.text.grammar.javascript_regex import in_whole_text, without_look_around

ANY_TEXT = "(?s:.*)"
MAX_PARTS = 200  # limit of the schemas that allOf combines for one text

_HOUR, _MINUTE = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_MONTH, _DAY = "(?:0[1-9]|1[0-2])", "(?:0[1-9]|1[0-9]|2[0-8])"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    f"(?:[0-9]{{4}}-{_MONTH}-{_DAY}|[0-9]{{4}}-(?:0[13-9]|1[0-2])-(?:29|30)"
    f"|[0-9]{{4}}-(?:0[13578]|1[02])-31|{_LEAP}-02-29)"
)
_TIME = f"{_HOUR}:{_MINUTE}:{_MINUTE}(?:\\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:{_MINUTE})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"(?:{_BYTE}\\.){{3}}{_BYTE}"
_PART = "[0-9A-Fa-f]{1,4}"


def _around_zeros() -> Iterator[tuple[str, str]]:
    """Yields the texts before and after the zeros that an address of version 6 leaves out."""
    for n in range(8):
        before = f"{_PART}(?::{_PART}){{{n - 1}}}" if n else ""
        endings = [f"(?:{_PART}:){{0,{5 - n}}}{_IPV4}"] if n < 6 else []
        endings += [f"{_PART}(?::{_PART}){{0,{6 - n}}}"] if n < 7 else []
        yield before, f"(?:{'|'.join(endings)})?" if endings else ""


_IPV6 = "|".join(
    [
        f"(?:{_PART}:){{7}}{_PART}",
        f"(?:{_PART}:){{6}}{_IPV4}",
        # The places before "::", then at most as many after it as are left.
        *(f"{before}::{after}" for before, after in _around_zeros()),
    ]
)
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = f"{_LABEL}(?:\\.{_LABEL}){{0,3}}"
_ATOM = "[A-Za-z0-9!#$%&'*+\\x2f=?^_`{|}~-]{1,30}"
_SPAN = "(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_IN_URI = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
# By the names of JSON Schema. Every text of them is valid; some rare valid ones, such as an email address
# with quotes, are not among them.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:[0-9]+W|{_DAYS}(?:T{_SPAN})?|T{_SPAN})",
    "email": f"{_ATOM}(?:\\.{_ATOM}){{0,1}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": f"[A-Za-z][A-Za-z0-9+.-]*:(?:\\x2f\\x2f(?:{_IN_URI}|\\[[0-9A-Fa-f:.]+\\])*|{_IN_URI}+)?"
    f"(?:\\x2f{_IN_URI}+)*\\x2f?(?:\\?(?:{_IN_URI}|[\\x2f?])*)?(?:#(?:{_IN_URI}|[\\x2f?])*)?",
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}


def texts_of(schema: dict[str, Any]) -> list[str]:
    """Returns regexes that a text must match, each as a whole, to fit the schema. Raises RequestError for a
    keyword that regexes cannot express."""
    found: list[str] = []
    todo: list[Any] = [schema]
    for _ in range(MAX_PARTS):
        if not todo:
            break
        part = todo.pop()
        if isinstance(part, dict):
            found += dict.fromkeys(_texts(part))
            todo += part["allOf"] if isinstance(part.get("allOf"), list) else []
    return found or [ANY_TEXT]


def _texts(schema: dict[str, Any]) -> Iterator[str]:
    for key in ("not", "if", "$ref", "anyOf", "oneOf"):
        if schema.get(key, False) is not False:
            raise RequestError(
                f"tools must have texts without {key!r} in their schema where calls are not JSON, got "
                f"{schema!r:.100}; write it as a pattern, a format or an enum",
                field="tools",
            )
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int) or isinstance(most, int):
        least = least if isinstance(least, int) else 0
        yield f"(?s:.{{{least},{most if isinstance(most, int) else ''}}})"
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        plain = without_look_around(pattern)
        yield from (in_whole_text(regex) for regex in (plain.pattern, *plain.also))
    form = schema.get("format")
    if isinstance(form, str) and form in FORMATS:
        yield f"(?:{FORMATS[form]})"
