"""The grammar of calls that are written as Python: literals of Python and of JSON, within the tool's schema, and small
enough for many tools."""

import json
import random

import pytest
from llguidance import LLMatcher, LLTokenizer

from shoal.sampling_params import StructuredOutputsParams
from shoal.text.formats.registry import form_of
from shoal.text.grammar.call_grammar import call_grammar
from shoal.text.grammar.free_calls import text_and_calls
from shoal.text.grammar.structured import LIMITS, check, grammar_of
from shoal.text.reading.reader import Expected, Reader
from tests.cpu.text.test_tool_formats import parse

BYTES = LLTokenizer("byte")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["metric", "it's", 7]},
        "code": {"type": "string", "pattern": "^[a-z/]{2,3}$"},
        "day": {"type": "string", "format": "date"},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "filter": {
            "type": "object",
            "properties": {"field": {"type": "string"}, "least": {"type": ["number", "null"]}},
            "required": ["field"],
        },
        "any": {"type": "array"},
    },
    "required": ["city"],
}


def required(name, schemas):
    return StructuredOutputsParams(grammar=call_grammar(form_of(name).syntaxes, schemas, True))


def matcher_of(params):
    matcher = LLMatcher(BYTES, grammar_of(params), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(matcher, text):
    matcher = matcher.deep_copy()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


ALLOWED = [
    "city='Paris'",
    'city="Paris"',
    r"city='it\'s \"x\" \\ \u00e9\n'",
    "city='two\nlines of \"text\"'",
    "city=''",
    "city='a', unit='metric', ok=True",
    r"city='a', unit='it\'s'",
    'city="a", unit="it\'s", ok=False',
    "city='a', unit=7",
    "city='a', code='a/b'",
    "city='a', day='2026-11-28'",
    "city='a', tags=['x', \"y\"]",
    'city="a", tags=["x","y"]',
    "city='a', tags=[]",
    "city='a', filter={'field': 'x', 'least': None}",
    "city='a', filter={\"field\": 'x', 'least': 1.5}",
    'city="a", filter={"field": "x", "least": null}',
    "city='a', any=[{'a': 1, 'b': ['c', None]}]",
]
REFUSED = [
    "unit='metric'",
    "city=1",
    "city='it's'",
    "city='a', unit='imperial'",
    "city='a', code='abcd'",
    "city='a', day='yesterday'",
    "city='a', ok='True'",
    "city='a', tags=['w', 'x', 'y', 'z']",
    "city='a', filter={'least': 1}",
    "city='a', filter={'field': 1}",
    "city='a', other='b'",
]


@pytest.mark.parametrize(
    "name, begin, end",
    [("llama4_pythonic", "[", "]"), ("lfm2", "<|tool_call_start|>[", "]<|tool_call_end|>")],
)
def test_texts_may_have_either_quotes_and_follow_their_schema(name, begin, end):
    """Regression: only JSON's texts, lists and objects were allowed, which these families seldom write."""
    matcher = matcher_of(required(name, {"f": SCHEMA}))
    for arguments in ALLOWED:
        assert accepts(matcher, f"{begin}f({arguments}){end}"), arguments
        assert accepts(matcher, f"{begin}f({arguments}), f({arguments}){end}"), arguments
    for arguments in REFUSED:
        assert not accepts(matcher, f"{begin}f({arguments}){end}"), arguments


ANY = {"type": ["string", "number", "boolean", "null", "array", "object"]}
CHARACTERS = "abc dé\"'\\\n,()[]{}=:"


def random_value(r, depth=0):
    kind = r.choice(["text", "text", "number", "word", *(["list", "object"] if depth < 2 else [])])
    match kind:
        case "text":
            return "".join(r.choices(CHARACTERS, k=r.randrange(6)))
        case "number":
            return r.choice([0, -7, 12, 2.5, 1e-7])
        case "word":
            return r.choice([True, False, None])
        case "list":
            return [random_value(r, depth + 1) for _ in range(r.randrange(3))]
    return {"".join(r.choices(CHARACTERS, k=3)): random_value(r, depth + 1) for _ in range(r.randrange(3))}


def test_any_value_that_python_writes_is_allowed_and_read_as_it_is():
    """Python's own repr is the oracle."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    r = random.Random(seed)
    schemas = {"f": {"type": "object", "properties": {"a": ANY, "b": ANY}}}
    form, matcher = form_of("llama4_pythonic"), matcher_of(required("llama4_pythonic", schemas))
    for _ in range(300):
        arguments = {key: random_value(r) for key in ("a", "b")}
        text = f"[f({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
        assert accepts(matcher, text), text
        [[kind, name, read]] = parse(Reader(form, Expected(schemas), True), [text])
        assert (kind, name, json.loads(read)) == ("call", "f", arguments)
        dense = json.dumps(arguments["a"], ensure_ascii=False, separators=(",", ":"))
        assert accepts(matcher, f"[f(a={dense}, b={json.dumps(arguments['b'], ensure_ascii=False)})]")


@pytest.mark.parametrize("name", ["llama4_pythonic", "lfm2", "gemma4"])
@pytest.mark.parametrize("num_required", [0, 2])
def test_128_tools_fit(name, num_required):
    """Regression: the grammar of 128 tools had more rules than a grammar may have."""

    def tool(i):
        properties = {
            f"query_{i}": {"type": "string", "description": "the text to look for"},
            f"limit_{i}": {"type": "integer", "minimum": 1, "maximum": 10 + i},
            f"unit_{i}": {"type": "string", "enum": ["metric", f"own_{i}"]},
            "verbose": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
        }
        return {"type": "object", "properties": properties, "required": list(properties)[:num_required]}

    schemas = {f"tool_{i}": tool(i) for i in range(128)}
    check(required(name, schemas))
    check(StructuredOutputsParams(structural_tag=text_and_calls(form_of(name), schemas, True)))
