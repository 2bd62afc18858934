"""Rewrites JavaScript's regexes, the syntax of patterns in JSON schemas, for llguidance, whose regexes are
Rust's and have no look-around.

A look-ahead at the beginning of a pattern, or a look-behind at its end, constrains the whole text, which a
further pattern can do as well. Others are left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from shoal.errors import RequestError
from shoal.text.grammar.regex_complement import complement

# The meaning of these escapes in JavaScript and in xgrammar. Rust's digits and letters are from all scripts.
CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
WORD = re.compile(
    r"\\.|\[\^?\]?|\(\?<?[=!]|.", re.DOTALL
)  # a class may begin with the bracket that ends others
LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
BORDERS = ("\\b", "\\B")
ANY = "(?s:.*)"
LARK_ESCAPES = {"/": "\\x2f", "\\/": "\\x2f", "\n": "\\n"}  # characters that end a regex in Lark
MAX_LOOKS = 4  # limit per pattern; each may take some milliseconds


@dataclass(slots=True)
class Plain:
    """A pattern without look-around."""

    pattern: str
    also: list[str] = field(default_factory=list)  # patterns that the text must match in addition
    left_out: list[str] = field(default_factory=list)  # look-around that could not be expressed


def ascii_classes(regex: str) -> str:
    """Returns the regex with CLASSES in place of these escapes. Within a class they become ranges of it, and
    a dash next to them is a dash, as in JavaScript: Rust would take it for a range, or subtract classes."""
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


def in_whole_text(pattern: str) -> str:
    """Returns a regex without anchors for the whole text in which `pattern`, without look-around, is found.
    Raises RequestError for a pattern with an anchor that is neither at the beginning nor at the end of one of
    its branches."""
    try:
        found, end = _Anchored(pattern).branches(0, opens=True, closes=True)
    except RecursionError:
        raise _misplaced(pattern) from None
    if end < len(WORD.findall(pattern)):
        raise _misplaced(pattern)
    return found


class _Anchored:
    """Rewrites a regex whose text may be anywhere in another one, unless an anchor says otherwise."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._words = pattern, WORD.findall(pattern)

    def branches(self, at: int, *, opens: bool, closes: bool) -> tuple[str, int]:
        """Returns the branches from word `at` to the end of their group, and that end. opens, closes: any
        text may precede them, and may follow them."""
        found = []
        while True:
            text, at = self._branch(at, opens, closes)
            found.append(text)
            if at >= len(self._words) or self._words[at] != "|":
                return f"(?:{'|'.join(found)})", at
            at += 1

    def _branch(self, at: int, opens: bool, closes: bool) -> tuple[str, int]:
        items, end = self._items(at)
        anchored = [item for item in items if self._words[item[0]] in ("^", "$")]
        begins, ends = 0, len(items)
        while begins < ends and self._words[items[begins][0]] == "^":
            begins += 1
        while ends > begins and self._words[items[ends - 1][0]] == "$":
            ends -= 1
        is_misplaced = len(anchored) != begins + len(items) - ends
        if is_misplaced or (begins and not opens) or (ends < len(items) and not closes):
            raise _misplaced(self._pattern)
        opens, closes = opens and not begins, closes and ends == len(items)
        kept, found = items[begins:ends], []
        for i, (first, last) in enumerate(kept):
            words = self._words[first:last]
            if words[0] != "(" or not self._has_anchor(first, last):
                found.append("".join(LARK_ESCAPES.get(word, word) for word in words))
                continue
            if words[1] == "?" and words[2] != ":":  # a named group, or flags
                raise _misplaced(self._pattern)
            is_open, is_close = i == 0 and opens, i == len(kept) - 1 and closes
            head = 3 if words[1] == "?" else 1
            text, close = self.branches(first + head, opens=is_open, closes=is_close)
            if close != last - 1:  # a group with a repetition
                raise _misplaced(self._pattern)
            found.append(text)
            opens, closes = opens and not is_open, closes and not is_close
        return ANY * opens + "".join(found) + ANY * closes, end

    def _items(self, at: int) -> tuple[list[tuple[int, int]], int]:
        """Returns the ranges of words of a branch's items, each with its repetition, and the branch's end."""
        items: list[tuple[int, int]] = []
        while at < len(self._words) and self._words[at] not in ("|", ")"):
            begin, word = at, self._words[at]
            if word[0] == "[":
                while at < len(self._words) and self._words[at] != "]":
                    at += 1
            elif word == "(":
                at = self._close(at)
            at += 1
            if word in ("^", "$"):
                items.append((begin, at))
                continue
            while at < len(self._words) and self._words[at] in ("*", "+", "?", "{"):
                while self._words[at] == "{" and "}" in self._words[at:] and self._words[at] != "}":
                    at = self._words.index("}", at)
                at += 1
            items.append((begin, at))
        return items, at

    def _close(self, at: int) -> int:
        """Returns the bracket that closes the group that begins at word `at`."""
        depth, in_class = 0, False
        for i in range(at, len(self._words)):
            word = self._words[i]
            if in_class:
                in_class = word != "]"
            elif word[0] == "[":
                in_class = True
            else:
                depth += (word[0] == "(") - (word == ")")
                if depth == 0:
                    return i
        raise _misplaced(self._pattern)

    def _has_anchor(self, first: int, last: int) -> bool:
        in_class = False
        for word in self._words[first:last]:
            if in_class:
                in_class = word != "]"
            elif word[0] == "[":
                in_class = True
            elif word in ("^", "$"):
                return True
        return False


def _misplaced(pattern: str) -> RequestError:
    return RequestError(
        "tools must have patterns with ^ only at the beginning and $ only at the end of a branch, got "
        f"{pattern!r:.100}; move it, or write several patterns",
        field="tools",
    )
