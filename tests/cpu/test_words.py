"""Words: comments, docstrings, help texts, errors, logs and documentation are in plain English with the field's
terms. The list is short on purpose; docs/decisions/structure.md says where it comes from."""

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Sentences whose subject is missing, and words for which the field has others.
PHRASES = re.compile(
    r"\b(who asked|who asks|by whom|whoever|likewise|none that|so many|foretel\w*|what of|of ours|hopeless"
    r"|forerunners?|hinders?|idlest|(is|are) none of)\b"
    r"|(?<!there )\b(is|are|was|were) no (?!longer|more\b)|  # of ",
    re.IGNORECASE,
)
FIRST_WORDS = re.compile(
    r"(What|Whether|Which|That|How|Where|Why|Those|It|Who|Whose|Nobody|When|Until|If|Of)\b"
)
FILES = [
    path
    for folder in ("shoal", "tests", "benchmarks", "deploy", "examples", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".c", ".h") and path != Path(__file__) and "vendor" not in path.parts
]


def texts(path: Path) -> list[tuple[int, str, bool]]:
    """Returns (line, text, is a docstring) for the prose of a file: all of a page, comments and strings of a
    program."""
    if path.suffix != ".py":
        return [(number, line, False) for number, line in enumerate(path.read_text().splitlines(), start=1)]
    found = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type == getattr(
            tokenize, "FSTRING_MIDDLE", -1
        ):
            is_docstring = token.string.startswith('"""') and not token.line[: token.start[1]].strip()
            comment = "  " if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip() else ""
            lines = token.string.splitlines()
            found += [
                (token.start[0] + i, comment + line, is_docstring and i == 0) for i, line in enumerate(lines)
            ]
    return found


def test_no_banned_phrase():
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {text.strip()}"
        for path in FILES
        for number, text, is_docstring in texts(path)
        if PHRASES.search(text) or (is_docstring and FIRST_WORDS.match(text.lstrip('"')))
    ]
    assert not wrong
