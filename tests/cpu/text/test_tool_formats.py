"""The families' forms of tool calls: what is found, whole and streamed, and which one a template asks for."""

import json

import pytest

from shoal.sampling_params import SamplingParams
from shoal.server.apis.tools import AnswerFormat, choose_tool_call_parser, plan_tools, whole
from shoal.text.formats.registry import BY_NAME, FORMATS, choose
from shoal.text.reading.parts import CallDelta
from shoal.text.reading.reader import Expected, Reader
from tests.cpu.text.test_tool_parsers import cut, parse

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "scale": {"type": "number"},
    "detailed": {"type": "boolean"},
    "filter": {"$ref": "#/$defs/Filter"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "id": {"type": ["integer", "string"]},
    "unit": {"enum": ["C", "F", 1]},
    "free": {},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"Filter": {"type": "object"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "ping"}},
]


def xml(name, close="</function>\n", **values):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}{close}</tool_call>"


def weather(**arguments):
    return ["call", "weather", json.dumps(arguments, ensure_ascii=False)]


QWEN = {
    "one call": (xml("weather", city="São Paulo", days="3"), [weather(city="São Paulo", days=3)]),
    "words around": (f"I look.\n\n{xml('weather', city='x')}\n", [["content", "I look."], weather(city="x")]),
    "several": (
        f"{xml('weather', city='a')}\n{xml('ping')}\n{xml('other', k='1')}",
        [weather(city="a"), ["call", "ping", "{}"], ["call", "other", '{"k": "1"}']],
    ),
    "texts that look like JSON": (
        xml("weather", city='{"a": 1}') + xml("weather", city="12345") + xml("weather", city="null"),
        [weather(city='{"a": 1}'), weather(city="12345"), weather(city="null")],
    ),
    "an empty text": ("<function=weather><parameter=city></parameter></function>", [weather(city="")]),
    "lines of a text": (xml("weather", city="\n  a\n\nb\n"), [weather(city="\n  a\n\nb\n")]),
    "tags in a text": (
        xml("weather", city='</function> </tool_call> <parameter> "q" \\ <div>'),
        [weather(city='</function> </tool_call> <parameter> "q" \\ <div>')],
    ),
    "types": (
        xml("weather", scale="2.5", detailed="True", filter='{"a": [1]}', tags='["x",\n "y"]', note="None"),
        [
            [
                "call",
                "weather",
                '{"scale": 2.5, "detailed": true, "filter": {"a": [1]}, "tags": ["x", "y"], "note": null}',
            ]
        ],
    ),
    "texts where others are allowed": (
        xml("weather", note="nothing", id="a7", unit="F", free="5"),
        [weather(note="nothing", id="a7", unit="F", free="5")],
    ),
    "others where texts are allowed": (xml("weather", id="7", unit="1"), [weather(id=7, unit=1)]),
    "JSON without a schema": (
        xml("weather", free='{"a": 1}', more="[1]"),
        [weather(free={"a": 1}, more=[1])],
    ),
    "values that do not fit": (
        xml("weather", days="soon", detailed="1", filter="[1", scale="NaN"),
        [weather(days="soon", detailed="1", filter="[1", scale="NaN")],
    ),
    "no line breaks": (
        "<tool_call><function=weather><parameter=city>x</parameter><parameter=days>1</parameter></function>"
        "</tool_call>",
        [weather(city="x", days=1)],
    ),
    "no outer tag": (
        "<function=weather>\n<parameter=city>\nx\n</parameter>\n</function>",
        [weather(city="x")],
    ),
    "a second outer tag": (
        "<tool_call>\n<tool_call>\n<function=ping>\n</function>\n</tool_call>",
        [["call", "ping", "{}"]],
    ),
    "no end of the function": (xml("weather", close="", city="x"), [weather(city="x")]),
    "no arguments and no end": ("<tool_call><function=ping></tool_call>", [["call", "ping", "{}"]]),
    "the last mark is missing": (xml("weather", city="x")[: -len("</tool_call>")], [weather(city="x")]),
    "two functions in one": (
        "<tool_call><function=ping></function><function=weather><parameter=city>x</parameter></function>"
        "</tool_call> done",
        [["call", "ping", "{}"], weather(city="x"), ["content", "done"]],
    ),
    "JSON within the tag": (
        '<tool_call>{"name": "weather", "arguments": {"city": "x"}}</tool_call>',
        [weather(city="x")],
    ),
    "no call": ("<tool_call>what</tool_call>", [["content", "<tool_call>what</tool_call>"]]),
    "a mark in words": ("Use <function=NAME> here", [["content", "Use <function=NAME> here"]]),
    "cut in a name": ("x <tool_call>\n<function=wea", [["content", "x <tool_call>\n<function=wea"]]),
    "cut in a text": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nPar",
        [["call", "weather", '{"city": "Par']],
    ),
    "cut in a number": (
        "<tool_call>\n<function=weather>\n<parameter=days>\n1",
        [["call", "weather", '{"days": ']],
    ),
}
LIST = '[{"name": "weather", "arguments": {"city": "x", "n": [1]}}, {"name": "ping", "arguments": {}}]'
LISTED = [["call", "weather", '{"city": "x", "n": [1]}'], ["call", "ping", "{}"]]
GRANITE = {
    "a list": (f"<|tool_call|>{LIST}", LISTED),
    "words before": (f"I look. <|tool_call|> {LIST}\n", [["content", "I look."], *LISTED]),
    "an end mark": (f"<|tool_call|>{LIST}<|/tool_call|>", LISTED),
    "the other mark": (f"<tool_call>{LIST}", LISTED),
    "two lists": (f"<|tool_call|>{LIST}\n<|tool_call|>{LIST}", [*LISTED, *LISTED]),
    "without a mark": (f"\n{LIST}", LISTED),
    "other lists": ("[1, 2] is one", [["content", "[1, 2] is one"]]),
    "lists of others": (
        '[{"name": "Bob", "arguments": {}}]',
        [["content", '[{"name": "Bob", "arguments": {}}]']],
    ),
    "no list": ("<|tool_call|>none", [["content", "<|tool_call|>none"]]),
    "an empty list": ("<|tool_call|>[]", [["content", "<|tool_call|>[]"]]),
    "cut": (f"<|tool_call|>{LIST[:45]}", [["call", "weather", '{"city": "x']]),
}
MISTRAL = {
    "a list": (f"[TOOL_CALLS]{LIST}", LISTED),
    "a list with ids": (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "x"}, "id": "abcDEF123"}]',
        [weather(city="x")],
    ),
    "names": (
        '[TOOL_CALLS]weather[ARGS]{"city": "x"}[TOOL_CALLS]ping[ARGS]{}',
        [weather(city="x"), ["call", "ping", "{}"]],
    ),
    "ids": (
        'Words.[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{"city": "x"}',
        [["content", "Words."], weather(city="x")],
    ),
    "no [ARGS]": ('[TOOL_CALLS]weather{"city": "[ARGS]"}', [weather(city="[ARGS]")]),
    "an object": ('[TOOL_CALLS]{"name": "ping", "arguments": {}}', [["call", "ping", "{}"]]),
    "an unknown name": ('[TOOL_CALLS]other[ARGS] {"a": 1}', [["call", "other", '{"a": 1}']]),
    "words behind": ("[TOOL_CALLS]ping[ARGS]{}\nDone.", [["call", "ping", "{}"], ["content", "Done."]]),
    "no call": ("[TOOL_CALLS]what is this", [["content", "[TOOL_CALLS]what is this"]]),
    "a mark at the end": ("Words [TOOL_CALLS]", [["content", "Words [TOOL_CALLS]"]]),
    "cut": ('[TOOL_CALLS]weather[ARGS]{"city": "Pa', [["call", "weather", '{"city": "Pa']]),
}
CASES = [
    pytest.param(name, text, expected, id=f"{name}: {case}")
    for name, cases in (("qwen3_coder", QWEN), ("granite", GRANITE), ("mistral", MISTRAL))
    for case, (text, expected) in cases.items()
]
SCHEMAS = {"weather": SCHEMA, "ping": {"type": "object", "properties": {}}}


def reader(name, names=None, is_whole=False):
    return Reader(BY_NAME[name], Expected(SCHEMAS, names), is_whole)


@pytest.mark.parametrize("name, text, expected", CASES)
def test_calls_are_found_however_the_text_is_cut(name, text, expected):
    """Regression: the calls of Qwen3-Coder, Granite 3 and Mistral came back as text."""
    for pieces in ([text], list(text), *(cut(text, seed) for seed in range(8))):
        assert parse(reader(name), pieces) == expected


@pytest.mark.parametrize("name, text, expected", CASES)
def test_calls_of_a_whole_answer_are_those_of_a_stream(name, text, expected):
    assert parse(reader(name, is_whole=True), [text]) == expected


@pytest.mark.parametrize(
    "name, text",
    [
        ("qwen3_coder", xml("ping")),
        ("granite", '<|tool_call|>[{"name": "ping", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]ping[ARGS]{}"),
        ("mistral", '[TOOL_CALLS][{"name": "ping", "arguments": {}}]'),
    ],
)
def test_where_only_some_tools_may_be_called_a_call_of_another_is_text(name, text):
    for is_whole in (False, True):
        assert parse(reader(name, {"weather"}, is_whole), [text]) == [["content", text]]
        assert parse(reader(name, {"ping"}, is_whole), [text]) == [["call", "ping", "{}"]]


@pytest.mark.parametrize("key", ["city", "note", "free", "id"])
def test_texts_of_xml_stream_while_they_are_written(key):
    xml = reader("qwen3_coder")
    xml.push(f"<tool_call>\n<function=weather>\n<parameter={key}>\n")
    for _ in range(3):
        parts = xml.push("words and \n")
    assert any(isinstance(part, CallDelta) and "words and" in part.arguments for part in parts)


def test_long_values_take_linear_time():
    xml = reader("qwen3_coder")
    xml.push("<tool_call>\n<function=weather>\n<parameter=tags>\n[")
    for _ in range(50_000):
        xml.push('"words", ')
    parts = xml.push("1]\n</parameter>\n</function>\n</tool_call>")
    assert parts[-1].arguments.endswith('"words", 1]}')


LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    "marks, expected",
    [
        ("<tool_call>\n<function=f>\n<parameter=k>", "qwen3_coder"),
        ("<|tool_call|>", "granite"),
        ("<|tool_call|>[]<|/tool_call|>", "granite"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS]f[ARGS]", "mistral"),
        ("<tool_call>\n{}", "hermes"),
        ("<|python_tag|>", "llama3_json"),
    ],
)
def test_the_template_says_how_a_model_writes_its_calls(marks, expected, caplog):
    assert choose_tool_call_parser("auto", LOOP + marks) == expected
    assert not caplog.records


def test_added_tokens_decide_where_the_template_has_tools_and_no_sign():
    tokens = ["<|im_end|>", "<|tool_call_start|>"]
    assert choose(LOOP, tokens) == ("lfm2", None)
    assert choose(LOOP + "[TOOL_CALLS]", tokens) == ("mistral", None)
    assert choose("{{ messages }}", tokens) == ("hermes", None)


def test_a_template_with_tools_and_no_known_form_says_so(caplog):
    assert choose_tool_call_parser("auto", LOOP) == "hermes"
    assert "no form of calls" in caplog.text
    caplog.clear()
    assert choose("{% for m in messages %}{{ m.content }}{% endfor %}") == ("hermes", None)
    assert choose_tool_call_parser("granite", LOOP) == "granite"
    assert not caplog.records


@pytest.mark.parametrize("name", [form.name for form in FORMATS if form.json_call is not None])
def test_a_call_that_a_grammar_lets_be_written_beside_a_format_is_read(name):
    form = BY_NAME[name]
    written = form.json_call
    call = json.dumps({"name": "weather", written.arguments: {"city": "x"}})
    text = written.separator.join([written.begin + call + written.end] * 2)
    plan = plan_tools(TOOLS, None, None, name)
    for is_whole in (True, False):
        parser = AnswerFormat(plan, name, "none", "", SamplingParams()).parser(is_whole)
        calls = whole(parser.push(text, "stop")).calls
        assert [(c.name, c.arguments) for c in calls] == [("weather", '{"city": "x"}')] * 2
