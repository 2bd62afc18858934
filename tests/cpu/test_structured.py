"""What an answer must look like: specifications that are taken, those that are refused and how, and what none
may cost."""

import json
import time

import pytest
from llguidance import LLMatcher, LLTokenizer

from shoal.api import StructuredOutputsParams
from shoal.errors import RequestError
from shoal.structured import FORMATS, MAX_BYTES, MAX_NESTING, check, grammar_of


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


BYTES = LLTokenizer("byte")


def can_write(value, schema, closes_objects=True):
    """Whether the grammar of this schema takes the text of `value`."""
    grammar = grammar_of(StructuredOutputsParams(json=schema), closes_objects)
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(json.dumps(value, ensure_ascii=False))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def tag(**form):
    return {"type": "structural_tag", "format": form}


@pytest.mark.parametrize(
    "given",
    [
        dict(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        dict(json='{"type": "string", "format": "date-time"}'),
        dict(json=True),
        dict(
            json={
                "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                "$ref": "#/$defs/tree",
            }
        ),
        dict(json={"type": "array", "maxItems": 3}, whitespace_pattern=" ?"),
        dict(json_object=True),
        dict(regex=r"\d{3}-[a-z]+"),
        dict(choice=["yes", "no"]),
        dict(choice=['é😀 "quoted" \\ /slash/', "two\nlines\t\x00\x7f", "a", "ab", "a"]),
        dict(choice=[f"choice number {i}" for i in range(4000)]),
        dict(grammar='start: "a" B+\nB: /[0-9]/\n%ignore " "'),
        dict(
            grammar='root ::= item ("," item)* # items\nitem ::= [a-z]+ | "\\"" [^"\\\\]{0,5} "\\"" '
            '| "\\u00e9\\U0001F600" [\\u0041-\\u005A] | "\\\\u"'
        ),
        dict(structural_tag=tag(type="json_schema", json_schema=True)),
        dict(
            structural_tag=tag(
                type="or",
                elements=[
                    {
                        "type": "tag",
                        "begin": "<a>",
                        "content": {"type": "json_schema", "json_schema": {"type": "object"}},
                        "end": "</a>",
                    },
                    {
                        "type": "sequence",
                        "elements": [
                            {"type": "const_string", "value": 'é "\n'},
                            {"type": "const_string", "value": "b"},
                        ],
                    },
                ],
            ),
            whitespace_pattern=" ?",
        ),
        dict(grammar='?start: rule\nrule: "a" | rule "b"'),
    ],
    ids=lambda given: str(given)[:60],
)
def test_what_is_sound_is_taken(given):
    check(StructuredOutputsParams(**given))


def test_bounds_beyond_64_bits_that_leave_integers_of_64_bits_are_taken():
    for minimum, maximum in ((-(2**63), 2**63 - 1), (-(10**20), 2**64 - 1), (0, 2**64 - 1)):
        assert can_write(2**62, {"type": "integer", "minimum": minimum, "maximum": maximum})
    assert can_write(5, {"type": "integer", "default": 10**20, "minimum": -1e30})
    assert can_write(10**20, {"const": 10**20, "default": {"type": "text", "minimum": 10**20}})


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        (r"\d+", ["12"], ["1𝟩", "٣"]),
        (r"[\d-z]+", ["1-z"], ["𝟩", "a"]),
        (r"[+-\d]+", ["+1-2"], ["A]", ","]),
        (r"[.-\w]+", ["a.-_9"], ["/", "é"]),
        (r"[\d-\w]+", ["a-9"], ["+"]),
        (r"\w\W\D", ["a--", "aé٣"], ["é--", "a-9"]),
        (r"[^\d]", ["x", "٣"], ["7"]),
        (r"[^\W]", ["x", "_"], ["-", "é"]),
        (r"[a\D]+", ["a-"], ["7"]),
        (r"[]\d]+", ["]7"], ["["]),
        (r"\\d", ["\\d"], ["\\7", "7"]),
        (r"[\w-\.]+@([\w-]+\.)+[\w-]{2,4}", ["a.b@c.org"], ["é@c.org", "a@c"]),
    ],
)
def test_digits_and_letters_of_a_regex_are_those_of_javascript(regex, good, bad):
    pattern = {"type": "string", "pattern": f"^{regex}$"}
    matcher = LLMatcher(BYTES, grammar_of(StructuredOutputsParams(regex=regex)), log_level=0)
    for text in [*good, *bad]:
        tokens = list(text.encode())
        own = matcher.deep_copy()
        fits = own.try_consume_tokens(tokens) == len(tokens) and own.is_accepting()
        assert fits == can_write(text, pattern) == (text in good), text


@pytest.mark.parametrize("closes_objects", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("name", ["format", "const", "properties"])
def test_a_format_that_nobody_checks_is_no_limit(name, closes_objects):
    """pydantic writes "binary" for bytes and "path" for a Path, where the compiler knows ten formats."""
    text = {"type": "string", "format": "path"}
    schema = {
        "type": "object",
        "$defs": {name: text},
        "properties": {
            name: {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]},
            "b": {"format": "int32"},
        },
        "required": [name],
    }
    assert can_write({name: "a b", "b": 1}, schema, closes_objects)
    assert not can_write({name: 5}, schema, closes_objects)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_that_is_known_is_a_limit(name):
    assert not can_write("a b", {"type": "string", "format": name})


def test_a_value_may_look_like_a_format():
    assert can_write({"format": "path"}, {"const": {"format": "path"}})
    assert not can_write({}, {"const": {"format": "path"}})


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (dict(json="{"), "no JSON"),
        (dict(json="[]"), "no JSON schema"),
        (dict(json='"text"'), "no JSON schema"),
        (dict(json="false"), "no JSON schema"),
        (dict(json={"type": "text"}), "text"),
        (dict(json={"not": {"type": "string"}}), '"not"'),
        (dict(json={"properties": {"a": {"if": {}, "then": {}}}}), '"if", "then"'),
        (dict(json={"type": "array", "uniqueItems": True}), '"uniqueItems"'),
        (dict(json={"$ref": "http://example.org/a.json"}), "http://example.org/a.json"),
        (dict(json={"$ref": "#/$defs/nowhere"}), "nowhere"),
        (dict(json={"enum": []}), "json"),
        (dict(json={"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (dict(json={"type": "string", "pattern": "(?!a)b"}), "look"),
        (dict(json={"const": {1, 2}}), "no JSON"),
        (dict(json={"const": float("nan")}), "no JSON"),
        (dict(json={"const": "\ud800"}), "surrogate"),
        (dict(json={"description": "x" * MAX_BYTES}), str(MAX_BYTES)),
        (dict(json=nested(MAX_NESTING + 1)), str(MAX_NESTING)),
        (dict(json={"type": "integer", "multipleOf": 1_000_003}), "multipleOf"),
        (dict(json={"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}), "multipleOf"),
        (dict(json={"type": "integer", "maximum": 10**300}), "digits"),
        (dict(json={"type": "integer", "minimum": 10**25}), "64 bits"),
        (dict(json={"type": "integer", "maximum": -(10**25)}), "64 bits"),
        (dict(json={"type": ["integer", "null"], "minimum": 1e30}), "64 bits"),
        (dict(json={"type": "integer", "const": 2**63}), "64 bits"),
        # The compiler would end the process.
        (dict(json={"const": -(2**63)}), "64 bits"),
        (dict(json={"enum": [1, {"a": [-(2**63) + 511]}]}), "64 bits"),
        (dict(json={"type": "integer", "const": -1e30}), "64 bits"),
        (dict(json={"type": "integer", "enum": [10**20, 5]}), "64 bits"),
        (dict(json={"type": "string"}, whitespace_pattern="("), "json"),
        (dict(structural_tag="{"), "no JSON"),
        (dict(structural_tag={"type": "json"}), "structural_tag"),
        (dict(structural_tag=tag(type="triggered_tags")), "triggered_tags"),
        (dict(structural_tag=tag(type="or", elements=[])), "at least one"),
        (dict(structural_tag=tag(type="const_string", value=5)), "no text"),
        (dict(structural_tag=tag(type="json_schema", json_schema=5)), "no JSON schema"),
        (dict(structural_tag=tag(type="json_schema", json_schema={"not": {}})), '"not"'),
        (dict(structural_tag=tag(type="json_schema", json_schema=nested(MAX_NESTING))), str(MAX_NESTING)),
        (
            dict(
                structural_tag=tag(type="sequence", elements=[{"type": "const_string", "value": "a"}] * 1001)
            ),
            "1000",
        ),
        (dict(structural_tag=tag(type="const_string", value="x" * MAX_BYTES)), str(MAX_BYTES)),
        (dict(regex="(["), "regex"),
        (dict(regex="("), "regex"),
        (dict(regex="(" * 5000 + "a" + ")" * 5000), "regex"),
        (dict(regex="a" * (MAX_BYTES + 1)), str(MAX_BYTES)),
        (dict(regex="a\ud800"), "surrogate"),
        (dict(regex="a", whitespace_pattern=" "), "whitespace_pattern"),
        (dict(choice=["x" * MAX_BYTES, "y"]), str(MAX_BYTES)),
        (dict(grammar="root ::= missing"), "missing"),
        (dict(grammar='other ::= "a"'), "root"),
        (dict(grammar='root ::= "a'), "end of input"),
        (dict(grammar='root ::= "\\q"'), "escape"),
        (dict(grammar='root ::= "\\ud800"'), "no character"),
        (dict(grammar="root ::= " + "(" * 20000), "deep"),
        (dict(grammar="\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(5000))])), "rules"),
        (dict(grammar=""), "grammar"),
        (dict(grammar="what is this"), "grammar"),
        (dict(grammar="start: missing"), "missing"),
        (dict(grammar="start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
        (
            dict(grammar="start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(8000)) + '\na8000: "a"'),
            "rules",
        ),
        (
            dict(
                grammar="start: A0\n"
                + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60))
                + '\nA60: "a"'
            ),
            "too big",
        ),
        (dict(grammar='start: %json {"multipleOf": 1000003}'), "%json"),
        (dict(grammar="%import common.NUMBER\nstart: NUMBER"), "%import"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_not_is_refused_with_its_name(given, names):
    with pytest.raises(RequestError, match="structured_outputs") as raised:
        check(StructuredOutputsParams(**given))
    assert names in str(raised.value) and len(str(raised.value)) < 1000


def rules_in_depth(count, name):
    """Rules that nest 20 deep each, one in the other: llguidance's compiler recurses through all of them."""
    first = f"start: {name}0\n" + "\n".join(
        f"{name}{i}: {'(' * 20}{name}{i + 1}{')?' * 20}" for i in range(count)
    )
    return first + f'\n{name}{count}: "a"'


@pytest.mark.parametrize(
    "given",
    [
        dict(grammar=rules_in_depth(990, "a")),
        dict(grammar=rules_in_depth(990, "A")),
        dict(
            json={
                "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2000)}
                | {"d2000": {}},
                "$ref": "#/$defs/d0",
            }
        ),
        dict(
            json={
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(4)]}
                    for i in range(14)
                ]
            }
        ),
        dict(json={"type": "array", "minItems": 10**9, "items": {"type": "array", "maxItems": 10**9}}),
        dict(regex="((a|b|c){1,1000}(d|e){1,1000}){1,1000}"),
        dict(regex="(a|b)*a(a|b){300}"),
        dict(grammar='start: (("a" b){1000}){1000}\nb: "b"'),
    ],
    ids=lambda given: str(given)[:50],
)
def test_nothing_of_allowed_size_takes_long_or_overflows_a_stack(given):
    start = time.monotonic()
    try:
        check(StructuredOutputsParams(**given))
    except RequestError as error:
        assert "structured_outputs" in str(error)
    assert time.monotonic() - start < 30
