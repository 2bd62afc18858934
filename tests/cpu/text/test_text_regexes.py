"""Raw texts under a JSON schema's patterns and formats, against Python's `re`, parsers and llguidance's own
formats."""

import datetime
import ipaddress
import itertools
import json
import random
import re
import uuid

import pytest

from shoal.engine.scheduling.grammar import Grammars
from shoal.errors import RequestError
from shoal.sampling_params import StructuredOutputsParams
from shoal.text.grammar.call_grammar import call_grammar
from shoal.text.grammar.javascript_regex import in_whole_text
from shoal.text.grammar.schema_meaning import FORMATS as KNOWN
from shoal.text.grammar.text_regexes import FORMATS
from shoal.text.reading.call_syntax import CallSyntax, PairedArguments, TaggedArgument
from tests.fake_server import byte_tokenizer

TAGS = CallSyntax("<call ", ">", "</call>", argument=TaggedArgument("<a ", ">", "</a>"))
PAIRS = CallSyntax("call:", "{", "}", argument=PairedArguments(":", ",", '<|"|>'))
TEXTS = ["".join(letters) for n in range(5) for letters in itertools.product("ab", repeat=n)]


@pytest.fixture(scope="module")
def grammars():
    tokenizer = byte_tokenizer("")
    return Grammars(lambda: tokenizer, len(tokenizer), tokenizer.eos_token_ids), tokenizer


def allows(grammars, text, **params):
    compiler, tokenizer = grammars
    grammar = compiler.start(StructuredOutputsParams(**params), (), True).result()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(grammar.accept(i) for i in ids) and grammar.accept(min(grammar.end_ids))


def allows_argument(grammars, text, schema):
    tools = {"f": {"type": "object", "properties": {"x": schema}, "required": ["x"]}}
    whole = f"<call f><a x>{text}</a></call>"
    return allows(grammars, whole, grammar=call_grammar([TAGS], tools, False))


def branches(draw, depth, opens, closes):
    return "|".join(branch(draw, depth, opens, closes) for _ in range(draw.randint(1, 2)))


def branch(draw, depth, opens, closes):
    """Returns a regex with anchors at the ends of branches only."""
    begins, ends = opens and draw.random() < 0.4, closes and draw.random() < 0.4
    parts = draw.randint(0, 2)
    found = []
    for i in range(parts):
        if depth and draw.random() < 0.4:
            is_first, is_last = i == 0 and not begins, i == parts - 1 and not ends
            inner = branches(draw, depth - 1, opens and is_first, closes and is_last)
            found.append(f"{draw.choice(['(', '(?:'])}{inner})")
        else:
            found.append(draw.choice(["a", "b", "[ab]", "a?", "b+", "a{0,2}", "[^a]", "a{2}"]))
    return "^" * begins + "".join(found) + "$" * ends


@pytest.mark.parametrize("seed", range(300))
def test_a_pattern_of_a_whole_text_finds_what_a_search_finds(seed):
    print("seed", seed)
    pattern = branches(random.Random(seed), 2, True, True)
    rewritten = in_whole_text(pattern)
    for text in TEXTS:
        assert bool(re.fullmatch(rewritten, text)) == bool(re.search(pattern.replace("$", r"\Z"), text)), text


@pytest.mark.parametrize("seed", range(0, 300, 20))
def test_an_argument_between_tags_takes_the_texts_that_json_takes(grammars, seed):
    pattern = branches(random.Random(seed), 2, True, True)
    schema = {"type": "string", "pattern": pattern}
    for text in TEXTS[:12]:
        in_json = allows(grammars, json.dumps(text), json=schema)
        assert allows_argument(grammars, text, schema) == in_json, (pattern, text)


@pytest.mark.parametrize(
    "pattern, good, bad",
    [
        (r"^\/[^/]+$", ["/a", "/a b"], ["a", "/a/b", "/"]),
        ("^(GET|POST) /", ["GET /x", "POST /"], ["PUT /", "GET x"]),
        (r"^[$^]\d+$", ["$12", "^3"], ["12", "$x"]),
        ("^a$|^b$", ["a", "b"], ["ab", "c"]),
        ("^(?=.*[0-9])[a-z0-9]+$", ["a1", "7"], ["abc", "A1"]),
        ("^a\nb$", ["a\nb"], ["a b"]),
    ],
)
def test_patterns_of_arguments_hold(grammars, pattern, good, bad):
    """Regression: a slash after a backslash ended the grammar's regex, and anchors of alternatives left the
    pattern out."""
    schema = {"type": "string", "pattern": pattern}
    for text in good:
        assert allows_argument(grammars, text, schema), text
    for text in bad:
        assert not allows_argument(grammars, text, schema), text


@pytest.mark.parametrize("pattern", ["a^b", "(^a)+", "(a|b$)c", "(?<name>^a)", "(" * 3000 + "^" + ")" * 3000])
def test_anchors_amid_a_branch_are_refused_by_name(pattern):
    with pytest.raises(RequestError, match="patterns with"):
        in_whole_text(pattern)


def test_lengths_patterns_and_formats_hold_together(grammars):
    schema = {"type": "string", "pattern": "^a", "maxLength": 3, "allOf": [{"pattern": "b$"}]}
    found = [text for text in TEXTS if allows_argument(grammars, text, schema)]
    assert found == ["ab", "aab", "abb"]
    schema = {"type": "string", "format": "date", "pattern": "^2026"}
    assert allows_argument(grammars, "2026-02-28", schema)
    assert not allows_argument(grammars, "2025-02-28", schema)
    schema = {"type": "string", "anyOf": [{"format": "ipv4"}, {"const": "localhost"}]}
    assert [allows_argument(grammars, t, schema) for t in ("10.0.0.1", "localhost", "x")] == [
        True,
        True,
        False,
    ]
    with pytest.raises(RequestError, match="'not'"):
        allows_argument(grammars, "a", {"type": "string", "not": {"const": "b"}})


VALID = {
    "date": ["2026-11-28", "2024-02-29", "2000-02-29", "1999-12-31"],
    "time": ["23:59:59Z", "00:00:00.25+01:30"],
    "date-time": ["2026-11-28T06:05:00Z", "2026-11-28T06:05:00.123-08:00"],
    "duration": ["P1D", "PT5M", "P1Y2M3DT4H5M6S", "P3W"],
    "email": ["a.b+c@example.org", "x@localhost"],
    "hostname": ["example.org", "a-b.c"],
    "ipv4": ["0.0.0.0", "255.255.255.255"],
    "ipv6": ["::", "::1", "2001:db8::8a2e:370:7334", "1:2:3:4:5:6:7:8", "::ffff:10.0.0.1", "fe80::"],
    "uri": ["https://example.org/a/b?c=d#e", "urn:isbn:0451450523", "mailto:a@b.c", "http://[::1]:80/"],
    "uuid": ["3f2504e0-4f89-11d3-9a0c-0305e82c3301"],
}
INVALID = {
    "date": ["2023-02-29", "1900-02-29", "2026-13-01", "2026-04-31", "26-04-30", "2026-04-30 "],
    "time": ["24:00:00Z", "12:00:00", "12:60:00Z"],
    "date-time": ["2026-11-28", "2026-11-28 06:05:00", "2026-02-30T00:00:00Z"],
    "duration": ["P", "PT", "1D", "P1DT", "P1S"],
    "email": ["a", "@b", "a@", "a b@c", "a..b@c"],
    "hostname": ["", "-a", "a-", "a..b", "a_b"],
    "ipv4": ["256.0.0.1", "1.2.3", "1.2.3.4.5", "01.2.3.4"],
    "ipv6": [":", "1::2::3", "1:2:3:4:5:6:7", "12345::", "::1.2.3"],
    "uri": ["", "a b:c", "/relative", "no scheme", "http://a b"],
    "uuid": ["3f2504e04f8911d39a0c0305e82c3301", "3f2504e0-4f89-11d3-9a0c-0305e82c330g"],
}


def test_the_formats_are_those_of_json():
    assert FORMATS.keys() == KNOWN == VALID.keys() == INVALID.keys()


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_formats_of_arguments_hold(grammars, form):
    """Regression: a format of an argument between tags had no effect."""
    schema = {"type": "string", "format": form}
    for text in VALID[form]:
        assert allows_argument(grammars, text, schema), text
    for text in INVALID[form]:
        assert not allows_argument(grammars, text, schema), text


def is_valid(form, text):
    match form:
        case "date":
            return bool(datetime.date.fromisoformat(text))
        case "date-time":
            return bool(datetime.datetime.fromisoformat(re.sub(r"\.\d+", "", text)))
        case "time":
            return bool(datetime.time.fromisoformat(re.sub(r"\.\d+", "", text)))
        case "ipv4":
            return bool(ipaddress.IPv4Address(text))
        case "ipv6":
            return bool(ipaddress.IPv6Address(text))
        case "uuid":
            return bool(uuid.UUID(text))
    return True


@pytest.mark.parametrize("form", ["date", "date-time", "time", "ipv4", "ipv6", "uuid"])
def test_texts_of_a_format_are_those_that_a_parser_reads(form):
    """Texts are random changes of valid ones."""
    draw, num_taken = random.Random(form), 0
    for _ in range(20_000):
        text = list(draw.choice(VALID[form]))
        for _ in range(draw.randint(1, 4)):
            text[draw.randrange(len(text))] = draw.choice("0123456789abcf:.-+ZT")
        if re.fullmatch(FORMATS[form], text := "".join(text)):
            num_taken += 1
            try:
                valid = is_valid(form, text)
            except ValueError:
                valid = text.startswith("0000")  # Python has no year 0
            assert valid, text
    assert num_taken > 20


def test_open_objects_and_lists_in_a_familys_own_syntax(grammars):
    """Regression: an object without named keys could only be empty, and an untyped list had texts only."""
    tools = {"f": {"type": "object", "properties": {"x": {"type": "object"}, "y": {"type": "array"}}}}
    grammar = call_grammar([PAIRS], tools, False)
    text = 'call:f{x:{a:1,b:{c:[true,<|"|>t<|"|>]}},y:[1,{z:null}]}'
    assert allows(grammars, text, grammar=grammar)
    tools = {"f": {"type": "object", "properties": {"x": {"type": "object", "additionalProperties": False}}}}
    grammar = call_grammar([PAIRS], tools, False)
    assert allows(grammars, "call:f{x:{}}", grammar=grammar)
    assert not allows(grammars, "call:f{x:{a:1}}", grammar=grammar)


@pytest.mark.parametrize(
    "schema, keyword",
    [
        ({"type": "array", "prefixItems": [{"type": "integer"}]}, "prefixItems"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "object", "patternProperties": {"^a": {}}}, "patternProperties"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "minProperties"),
    ],
)
def test_keywords_without_a_rule_are_refused_by_name(schema, keyword):
    tools = {"f": {"type": "object", "properties": {"x": schema}}}
    with pytest.raises(RequestError, match=keyword):
        call_grammar([PAIRS], tools, False)
