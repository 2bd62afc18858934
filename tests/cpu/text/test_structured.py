"""Structured outputs: specifications that are accepted, those that are refused with their error, and the cost
that every one may have at most."""

import json
import time

import pytest
from llguidance import LLMatcher, LLTokenizer

from shoal.errors import RequestError
from shoal.sampling_params import StructuredOutputsParams
from shoal.text.grammar import structured
from shoal.text.grammar.json_schema import MAX_BYTES, MAX_NESTING
from shoal.text.grammar.schema_meaning import FORMATS
from shoal.text.grammar.structured import check, grammar_of, texts_of


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


BYTES = LLTokenizer("byte")


def can_write(value, schema, closes_objects=True):
    """Returns True if the grammar of this schema accepts the text of `value`."""
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


A = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
F = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": A}, "end": "</f>"}
G = {"type": "tag", "begin": "<g=1>", "content": {"type": "any_text"}, "end": ["</g>", "<end>"]}
THOUGHT = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}


def takes(text, **params):
    matcher = LLMatcher(BYTES, grammar_of(StructuredOutputsParams(**params)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (dict(type="any_text"), ["", "any\n<text>"], []),
        (dict(type="any_text", excludes=["<t", "/"]), ["", "< t>"], ["a<t>", "a/b"]),
        (
            dict(type="sequence", elements=[THOUGHT, {"type": "const_string", "value": "x"}]),
            ["<t></t>x", "<t>a <t> \n</ t></t>x"],
            ["<t>x", "<t></t>", "<t></t>y", "<t></t>x</t>x"],
        ),
        (
            dict(type="triggered_tags", triggers=["<f", "<g"], tags=[F, G]),
            ["", "words <", 'a<f>{"a": 1}</f>b<g=1>text<f</g><g=1><end> < f>'],
            ["a<f", "<f>{}</f>", "<g=2>", "<g=1>", '<f>{"a": 1}', '<f>{"a":10}</f>'],
        ),
        (
            dict(type="triggered_tags", triggers=["<f"], tags=[F], at_least_one=True),
            ['<f>{"a":1}</f>', '<f>{"a":1}</f> and <f>{"a":2}</f>.'],
            ["", "words", '<f>{"a":1}</f><f'],
        ),
        (
            dict(type="triggered_tags", triggers=["<f"], tags=[F], stop_after_first=True),
            ["", "words", 'words <f>{"a":1}</f>'],
            ['<f>{"a":1}</f> words'],
        ),
        (
            dict(type="triggered_tags", triggers=["<f"], tags=[F], stop_after_first=True, at_least_one=True),
            ['<f>{"a":1}</f>'],
            ["words", 'words <f>{"a":1}</f>', '<f>{"a":1}</f> words'],
        ),
        (
            {**THOUGHT, "content": dict(type="triggered_tags", triggers=["<f"], tags=[F], excludes=["no"])},
            ["<t>a</t>", '<t>a<f>{"a":1}</f>b</t>'],
            ["<t>a", "<t>no</t>", "<t>a</t>b", "<t>a<f></t>"],
        ),
        (
            dict(type="or", elements=[F, {"type": "sequence", "elements": [THOUGHT, {"type": "any_text"}]}]),
            ['<f>{"a":1}</f>', "<t>a</t>b"],
            ["b"],
        ),
        (dict(type="regex", pattern=r"\d+/[a-z]\w"), ["1/aB"], ["٣/ab", "1/a"]),
        (dict(type="grammar", grammar='root ::= "a" b\nb ::= "b"{2,3}'), ["abb"], ["ab"]),
        (dict(type="grammar", grammar='start: "a" %json {"const": 5}'), ["a5"], ["a6"]),
        (dict(type="plus", content=F), ['<f>{"a":1}</f>' * 2], [""]),
        (
            dict(type="repeat", min=1, max=2, content={"type": "const_string", "value": "x"}),
            ["xx"],
            ["", "xxx"],
        ),
        (dict(type="repeat", min=1, max=-1, content={"type": "const_string", "value": "x"}), ["x" * 9], [""]),
        (dict(type="optional", content={"type": "const_string", "value": "x"}), ["", "x"], ["xx"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_structural_tags_hold_free_text_around_and_within_tags(form, good, bad):
    given = {"type": "structural_tag", "format": form}
    check(StructuredOutputsParams(structural_tag=given))
    assert [text for text in good if not takes(text, structural_tag=given)] == []
    assert [text for text in bad if takes(text, structural_tag=json.dumps(given))] == []


def test_structural_tags_of_the_older_form_mean_triggered_tags():
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": A, "end": "</f>"}, {"begin": "<g>", "end": "</g>"}],
        "triggers": ["<f", "<g"],
    }
    for text in ("words", 'a<f>{"a": 1}</f>b', "<g>[1]</g>"):
        assert takes(text, structural_tag=older)
    for text in ("<f>{}</f>", "<g>x</g>", "<f"):
        assert not takes(text, structural_tag=older)


def test_a_lark_grammar_may_hold_json_schemas():
    grammar = 'start: "a" %json {\n  "type": "object", "description": "with %json and %lark"\n} tail\ntail: %json true'
    check(StructuredOutputsParams(grammar=grammar))
    assert takes('a{"b": 1}[1]', grammar=grammar)
    assert not takes("a[1][1]", grammar=grammar)
    closed = 'start: %json {"properties": {"a": {"type": "string", "format": "path"}}}'
    assert takes('{"a": "b"}', grammar=closed)
    assert not takes('{"b": "b"}', grammar=closed)
    assert not takes('{\n\n\n"a": "b"}', grammar=closed)


@pytest.mark.parametrize(
    ("rule", "good"),
    [
        ('"%json {"', "%json {"),
        (r'"a\" %json"', 'a" %json'),
        ('"%lark" "%regex"', "%lark%regex"),
        ("/%json [a-z]/ // %json {", "%json x"),
        ('"a" # %json or %regex', "a"),
        ('"#" %json true // %json', "#1"),
    ],
)
def test_directives_in_texts_and_comments_of_a_lark_grammar_mean_nothing(rule, good):
    """Regression: a text such as "%json" was taken for the directive, and the grammar refused."""
    grammar = f"// %json and %lark\nstart: {rule}\n"
    check(StructuredOutputsParams(grammar=grammar))
    assert takes(good, grammar=grammar)


@pytest.mark.parametrize(
    "send", [lambda s: {"json": s}, lambda s: {"grammar": f"start: %json {json.dumps(s)}"}]
)
def test_the_white_space_of_a_schemas_own_options_holds(send):
    """Regression: Shoal's white space replaced a schema's own, so that guidance could not read its answers."""
    dense = {
        **A,
        "x-guidance": {"whitespace_flexible": False, "key_separator": ": ", "whitespace_pattern": None},
    }
    assert takes('{"a": 1}', **send(dense))
    assert not takes('{"a":1}', **send(dense)) and not takes('{\n"a": 1}', **send(dense))
    wide = {**A, "x-guidance": {"whitespace_pattern": "[ ]{20}"}}
    assert takes('{"a":' + " " * 20 + "1}", **send(wide)) and not takes('{\n"a":1}', **send(wide))
    assert takes('{\n"a": 1}', **send({**A, "x-guidance": {"whitespace_pattern": None, "lenient": True}}))
    asked = send(wide) | {"disable_any_whitespace": True}
    assert takes('{"a":1}', **asked) and not takes('{"a":' + " " * 20 + "1}", **asked)


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


@pytest.mark.parametrize("closes_objects", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
            [{"a": 1}],
            [{"a": "b"}],
        ),
        (
            {
                "propertyNames": {"enum": ["a", "b"]},
                "additionalProperties": {"type": "number"},
                "required": ["a"],
            },
            [{"a": 1}, {"a": 1, "b": 2}],
            [{"c": 1}, {"a": "x"}, {}],
        ),
        (
            {
                "propertyNames": {"$ref": "#/$defs/Color"},
                "additionalProperties": {"type": "number"},
                "$defs": {"Color": {"title": "Color", "type": "string", "enum": ["red"]}},
            },
            [{"red": 1}, {}],
            [{"blue": 1}],
        ),
        ({"propertyNames": {"pattern": "^x"}}, [{"xa": "b"}, {}], [{"a": "b"}]),
        ({"propertyNames": {"minLength": 2, "maxLength": 3}}, [{"ab": 1}], [{"a": 1}, {"abcd": 1}]),
        ({"propertyNames": False}, [{}], [{"a": 1}]),
        (
            {"propertyNames": {"type": "string"}, "properties": {"a": {"not": {}}, "b": {}}},
            [{"b": 1}, {}],
            [{"a": 1}],
        ),
        (
            {"minProperties": 0, "unevaluatedProperties": True, "dependentRequired": {}, "not": False},
            [{"a": 1}],
            [1],
        ),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
        ({"if": {"required": ["a"]}, "$comment": "no consequence"}, [{"a": 1}, {}], [1]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_keywords_of_generated_schemas_that_say_nothing_are_passed_over(schema, good, bad, closes_objects):
    """Regression: the first `propertyNames` among thirty tools refused the whole request."""
    schema = {"type": "object", **schema}
    check(StructuredOutputsParams(json=schema), closes_objects)
    for value in good:
        assert can_write(value, schema, closes_objects), value
    for value in bad:
        assert not can_write(value, schema, closes_objects), value


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "uniqueItems": True, "items": {"type": "string"}}, [["a", "b"], []], [[1]]),
        ({"type": "array", "uniqueItems": False, "contains": {}, "minContains": 0}, [[], [1]], [1]),
        (
            {"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False},
            [[None]],
            [[None, 1]],
        ),
        ({"anyOf": [{"not": {}}, {"type": "string"}]}, ["a"], [1]),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]}, ["abc"], [1]),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True, "maximum": 3}, [2, 3], [1, 4]),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": False}, [1], [0]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_sets_unions_and_bounds_of_older_drafts_are_taken(schema, good, bad):
    check(StructuredOutputsParams(json=schema))
    assert all(can_write(value, schema) for value in good)
    assert not any(can_write(value, schema) for value in bad)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (DECIMAL, ["1.5", "-0.25", "+7", ".5"], ["", "-", "+.", "1e5"]),
        (EMAIL, ["a.b@c.org"], [".a@c.org", "a..b@c.org", "a@c"]),
        (r"^(?=.*[A-Z])(?=.*\d).{4,}$", ["aB3d"], ["ab3d", "aBcd", "B3"]),
        (r"^(?!(?:CON|PRN)$)[A-Z]+$", ["CONX", "A", "PR"], ["CON", "PRN"]),
        (r"^(?!-)[a-z-]+(?<!-)$", ["a-b", "a"], ["-a", "a-", "-"]),
        (r"^[a-z]+(?<=ing)$", ["sing"], ["song"]),
        (r"^(?!a{2,3}b)[ab]+$", ["ab", "aab"[1:], "aaaab"], ["aab", "aaabb"]),
        (r"^(?!\s*$).+", ["a", " a"], ["", "  "]),
        (r"^(?!.*[\d_])\w+$", ["ab"], ["a1", "a_b"]),
        (r"^[(?=a)]+$", ["(?=a)"], ["b"]),
    ],
)
def test_look_around_at_the_ends_of_a_pattern_is_expressed(pattern, good, bad, caplog):
    """Regression: pydantic's Decimal and zod's email refused the whole request."""
    schema = {"type": "string", "pattern": pattern}
    check(StructuredOutputsParams(json=schema))
    assert all(can_write(text, schema) for text in good)
    assert [text for text in bad if can_write(text, schema)] == []
    assert not caplog.records


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "pattern": r"^a(?=bx|by)b[x-z]$"}, "(?=bx|by)"),
        ({"type": "string", "pattern": r"^(?!a)b|c"}, "(?!a)"),
        ({"type": "string", "pattern": r"\bword\B"}, r"\b in"),
        ({"type": "string", "pattern": r"^(?!(?:.{50}a){20})[a-z]"}, "(?!(?:.{50}a){20})"),
        ({"type": "object", "patternProperties": {"^(?!x)": {}}}, "patternProperties"),
        ({"type": "object", "propertyNames": {"format": "uuid"}}, "propertyNames"),
        ({"type": "array", "uniqueItems": True, "title": "reported"}, "uniqueItems"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_a_grammar_cannot_say_is_left_out_with_a_warning(schema, named, caplog):
    structured._report.cache_clear()
    for _ in range(2):
        check(StructuredOutputsParams(json=schema))
    assert sum(named in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ('{ "a" : [\n  1\n ]\n}', True),
        ('{"a":1}', True),
        ('{\r\n                "a": 1}', True),
        ("{\t}", True),
        ("{" + " " * 9 + "}", False),
        ("{\n\n\n}", False),
        ("{\n" + " " * 40 + "}", False),
    ],
    ids=repr,
)
def test_whitespace_of_json_is_bounded(text, is_taken):
    """Regression: a weak model could write line breaks until max_tokens."""
    as_tag = tag(type="json_schema", json_schema={"type": "object"})
    for params in ({"json": {"type": "object"}}, {"json_object": True}, {"structural_tag": as_tag}):
        grammar = grammar_of(StructuredOutputsParams(**params), closes_objects=False)
        matcher, tokens = LLMatcher(BYTES, grammar, log_level=0), list(text.encode())
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == is_taken


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (dict(json="{"), "must be JSON"),
        (dict(json="[]"), "must be a JSON schema, got"),
        (dict(json='"text"'), "must be a JSON schema, got"),
        (dict(json="false"), "must be a JSON schema, got"),
        (dict(json=False), "must be a JSON schema, got"),
        (dict(json={"type": "text"}), "text"),
        (dict(json={"not": {"type": "string"}}), '"not"'),
        (dict(json={"properties": {"a": {"if": {}, "then": {"required": ["b"]}}}}), '"if", "then"'),
        (dict(json={"$ref": "http://example.org/a.json"}), "http://example.org/a.json"),
        (dict(json={"$ref": "#/$defs/nowhere"}), "nowhere"),
        (dict(json={"enum": []}), "json"),
        (dict(json={"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (dict(json={"type": "string", "pattern": "(a)\\1"}), "backreferences"),
        (dict(regex="(?!a)b"), "look"),
        (dict(json={"const": {1, 2}}), "must be JSON"),
        (dict(json={"const": float("nan")}), "must be JSON"),
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
        (dict(structural_tag="{"), "must be JSON"),
        (dict(structural_tag={"type": "json"}), "structural_tag"),
        (dict(structural_tag=tag(type="triggered_tags")), "no triggers"),
        (dict(structural_tag=tag(type="token_triggered_tags")), "token_triggered_tags"),
        (dict(structural_tag=tag(type="triggered_tags", triggers=["<g"], tags=[F])), "no trigger for it"),
        (dict(structural_tag=tag(type="sequence", elements=[{"type": "any_text"}, F])), "which no text ends"),
        (dict(structural_tag=tag(type="json_schema", json_schema=True, style="qwen_xml")), "qwen_xml"),
        (
            dict(structural_tag={"type": "structural_tag", "structures": [5], "triggers": ["<f"]}),
            "structures",
        ),
        (dict(structural_tag=tag(type="repeat", min=2, max=10**6, content=F)), "at most"),
        (dict(structural_tag=tag(type="or", elements=[])), "at least one"),
        (dict(structural_tag=tag(type="const_string", value=5)), "value must be a string"),
        (dict(structural_tag=tag(type="json_schema", json_schema=5)), "must be a JSON schema, got"),
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
        (dict(grammar='root ::= "\\ud800"'), "must have escapes of characters"),
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
        (dict(grammar='start: %json {"multipleOf": 1000003}'), "multipleOf"),
        (dict(grammar="start: %json {"), "%json"),
        (dict(grammar='start: %json {"not": {"type": "null"}} | "%json"'), '"not"'),
        (dict(grammar="start: %lark { start: %json {} }"), "%lark"),
        (dict(grammar='start: "a" | %json {"type": "string"} %regex { }'), "%regex"),
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


def test_a_server_may_leave_white_space_out_of_json_unless_a_request_says_otherwise():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    def takes(text, **more):
        grammar = grammar_of(StructuredOutputsParams(json=schema, **more), is_dense=True)
        matcher = LLMatcher(BYTES, grammar, log_level=0)
        return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()

    assert takes('{"a":1}') and not takes('{"a": 1}')
    assert takes('{"a": 1}', disable_any_whitespace=False) and takes('{"a": 1}', whitespace_pattern=" ")


def test_markers_are_found_in_all_kinds_of_grammars():
    for given in (
        dict(regex=r"\[TOOL_CALLS\]a<\|b\|>"),
        dict(choice=["[TOOL_CALLS]", "<|b|>"]),
        dict(json={"enum": ["x", {"[TOOL_CALLS]": "<|b|>"}]}),
    ):
        texts = texts_of(StructuredOutputsParams(**given))
        assert "[TOOL_CALLS]" in texts and "<|b|>" in texts and "<|a|>" not in texts
