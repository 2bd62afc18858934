"""Rewrites JavaScript's regexes, the syntax of patterns in JSON schemas, for llguidance, whose regexes are
Rust's and have no look-around.

A look-ahead at the beginning of a pattern, or a look-behind at its end, constrains the whole text, which a
further pattern can do as well. Others are left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from shoal.text.grammar.regex_complement import complement

# The meaning of these escapes in JavaScript and in xgrammar. Rust's digits and letters are from all scripts.
CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
WORD = re.compile(
    r"\\.|\[\^?\]?|\(\?<?[=!]|.", re.DOTALL
)  # a class may begin with the bracket that ends others
LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
BORDERS = ("\\b", "\\B")
MAX_LOOKS = 4  # limit per pattern; each may take some milliseconds


@dataclass(slots=True)
class Plain:
    """A pattern without look-around."""

    pattern: str
    also: list[str] = field(default_factory=list)  # patterns that the text must match in addition
    left_out: list[str] = field(default_factory=list)  # look-around that could not be expressed


def ascii_classes(regex: str) -> str:
    """Returns the regex with CLASSES in place of these escapes. Within a class they become ranges of it, and
    a dash beside them is a dash, as in JavaScript: Rust would take it for a range, or subtract classes."""
    words, depth = WORD.findall(regex), 0
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


def without_look_around(pattern: str, can_express: bool = True) -> Plain:
    """Returns the pattern without look-around, and the patterns that replace it, if `can_express`."""
    words = WORD.findall(pattern)
    ends, has_branches = _groups(words)
    plain, kept = Plain(""), list(words)
    i = 0
    while i < len(words):
        if i not in ends:
            i += 1
            continue
        end = ends[i]
        look, inner = words[i], "".join(words[i + 1 : end])
        shown = "".join(words[i : end + 1])
        kept[i : end + 1] = ["(?:)", *[""] * (end - i)] if look in LOOKS else [""]
        further = None
        is_beyond = len(plain.also) == MAX_LOOKS or has_branches or not can_express
        if look in LOOKS and not is_beyond and not any(j in ends for j in range(i + 1, end)):
            others = [word for word in kept[:i] if word not in ("", "(?:)")]
            if look in ("(?=", "(?!") and others == ["^"]:
                further = f"^(?:{inner})" if look == "(?=" else _whole(complement(inner))
            elif look in ("(?<=", "(?<!") and words[end + 1 :] == ["$"]:
                further = f"(?:{inner})$" if look == "(?<=" else _whole(complement(rf"[\s\S]*(?:{inner})$"))
        if further is None:
            plain.left_out.append(shown)
        else:
            plain.also.append(ascii_classes(further))
        i = end + 1
    plain.pattern = ascii_classes("".join(kept))
    return plain


def _whole(regex: str | None) -> str | None:
    return None if regex is None else f"^(?:{regex})$"


def _groups(words: list[str]) -> tuple[dict[int, int], bool]:
    """Returns the end of each look-around by its start, and True if the pattern has branches outside of
    groups."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    in_class = has_branches = False
    for i, word in enumerate(words):
        if in_class:
            in_class = word != "]"
        elif word[0] == "[":
            in_class = True
        elif word in BORDERS:
            ends[i] = i
        elif word[0] == "(":
            opened.append(i)
        elif word == ")" and opened:
            if words[start := opened.pop()] in LOOKS:
                ends[start] = i
        elif word == "|" and not opened:
            has_branches = True
    return ends, has_branches
