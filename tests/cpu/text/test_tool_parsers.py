"""The tool-call parsers: what they find, and that it does not depend on how the text was cut."""

import json
import random

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from jiter import from_json

from shoal.text.formats.registry import BY_NAME, PLAIN
from shoal.text.reading.enforced import ListedCalls, NamedCall
from shoal.text.reading.parts import CallDelta
from shoal.text.reading.reader import Expected, Reader
from shoal.text.reading.thoughts import SEED, THINK, Start

LLAMAS = Expected({"f": {}, "get_weather": {}})


def hermes(is_whole=False):
    return Reader(BY_NAME["hermes"], Expected(), is_whole)


def llama(is_whole=False):
    return Reader(BY_NAME["llama3_json"], LLAMAS, is_whole)


def listed(is_whole=False):
    return Reader(ListedCalls(PLAIN), Expected(), is_whole)


def named():
    return Reader(NamedCall(PLAIN, "f"), Expected())


def thinking(start=Start.UNKNOWN):
    return Reader(PLAIN, Expected(takes_calls=False, thoughts=THINK, start=start))


def opened():
    return thinking(Start.INSIDE)


def parse(parser, pieces, end="length"):
    """The parts, neighbours of one kind joined: ["text", ...] or ["call", name, arguments]. Checks what every
    delta promises."""
    found, ids = [], set()
    ends = [None] * (len(pieces) - 1) + [end]
    for parts in map(parser.push, pieces or [""], ends):
        for part in parts:
            if not isinstance(part, CallDelta):
                kind = "reasoning" if part.reasoning else "content"
                assert part.text
                if found and found[-1][0] == kind:
                    found[-1][1] += part.text
                else:
                    found.append([kind, part.text])
                continue
            calls = [x for x in found if x[0] == "call"]
            if part.name is not None:
                assert part.id and part.id not in ids and part.index == len(calls)
                ids.add(part.id)
                found.append(["call", part.name, part.arguments])
            else:
                assert part.id is None and part.arguments and part.index == len(calls) - 1
                assert found[-1] is calls[-1], "arguments behind the content that follows them"
                calls[-1][2] += part.arguments
    return found


def cut(text, seed_):
    rng, pieces = random.Random(seed_), []
    while text:
        n = rng.choice((1, 1, 2, 3, 7, 20))
        pieces.append(text[:n])
        text = text[n:]
    return pieces


W = '{"name": "get_weather", "arguments": {"city": "Paris", "n": [1, -2.5e3, null, {"x": "}"}]}}'
WA = '{"city": "Paris", "n": [1, -2.5e3, null, {"x": "}"}]}'

HERMES = {
    "plain text": ("Hello, <tool> world <tool_cal", [["content", "Hello, <tool> world <tool_cal"]]),
    "one call": (f"<tool_call>\n{W}\n</tool_call>", [["call", "get_weather", WA]]),
    "text before": (
        f"I look.\n\n<tool_call>{W}</tool_call>\n",
        [["content", "I look."], ["call", "get_weather", WA]],
    ),
    "two calls": (
        f'<tool_call>\n{W}\n</tool_call>\n<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>',
        [["call", "get_weather", WA], ["call", "f", "{}"]],
    ),
    "text behind": (
        f"<tool_call>{W}</tool_call>\nDone. ",
        [["call", "get_weather", WA], ["content", "Done."]],
    ),
    "arguments first": (
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        [["call", "f", '{"a": 1}']],
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', [["call", "f", "{}"]]),
    "null arguments": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [["call", "f", "{}"]]),
    "arguments as text": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>',
        [["call", "f", '{"a": "\\u00e9"}']],
    ),
    "another key": (
        '<tool_call>{"id": [1, {"a": "b"}], "name": "f", "arguments": {"a": 1}, "x": 2}</tool_call>',
        [["call", "f", '{"a": 1}']],
    ),
    "line break in a string": (
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
        [["call", "f", '{"a": "x\\ny"}']],
    ),
    "a tag in a string": (
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        [["call", "f", '{"a": "</tool_call>"}']],
    ),
    "no JSON": ("<tool_call>f(1)</tool_call> ok", [["content", "<tool_call>f(1)</tool_call> ok"]]),
    "no name": (
        'x <tool_call>{"arguments": {"a": 1}}</tool_call>',
        [["content", 'x <tool_call>{"arguments": {"a": 1}}</tool_call>']],
    ),
    "cut before the name": ('<tool_call>{"na', [["content", '<tool_call>{"na']]),
    "cut in the arguments": ('<tool_call>{"name": "f", "arguments": {"a": "b', [["call", "f", '{"a": "b']]),
    "cut in an escape": ('<tool_call>{"name": "f", "arguments": {"a": "b\\u00', [["call", "f", '{"a": "b']]),
    "cut in a word": ('<tool_call>{"name": "f", "arguments": {"a": fal', [["call", "f", '{"a": ']]),
    "malformed arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": 1,, "b": 2}}</tool_call> x',
        [["call", "f", '{"a": 1,'], ["content", ', "b": 2}}x']],
    ),
    "one brace too few": (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>',
        [["call", "f", '{"a": 1}']],
    ),
    "one brace too many": (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}}\n</tool_call>',
        [["call", "f", '{"a": 1}']],
    ),
    "no closing tag": (f"<tool_call>{W}", [["call", "get_weather", WA]]),
    "a second try": (
        f"<tool_call><tool_call>{W}</tool_call>",
        [["content", "<tool_call>"], ["call", "get_weather", WA]],
    ),
    "unicode": (
        '<tool_call>{"name": "f", "arguments": {"ü": "日本 \\ud83d\\ude00"}}</tool_call>',
        [["call", "f", '{"ü": "日本 \\ud83d\\ude00"}']],
    ),
    "half a character in the name": (
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        [["content", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>']],
    ),
    "nested too deeply": (
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 80 + "]" * 80 + "}}</tool_call>",
        [["call", "f", '{"a": ' + "[" * 64], ["content", "[" * 16 + "]" * 80 + "}}"]],
    ),
}
L = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
LLAMA = {
    "plain text": (" Hello {", [["content", " Hello {"]]),
    "one call": (L, [["call", "get_weather", '{"city": "Paris"}']]),
    "behind the tag": (f"<|python_tag|>{L}", [["call", "get_weather", '{"city": "Paris"}']]),
    "text and the tag": (
        f"So: <|python_tag|>{L}\n",
        [["content", "So:"], ["call", "get_weather", '{"city": "Paris"}']],
    ),
    "several": (
        f'{L}; {{"type": "function", "name": "f", "parameters": {{}}}};',
        [["call", "get_weather", '{"city": "Paris"}'], ["call", "f", "{}"]],
    ),
    "an answer in JSON": ('{"name": "Bob", "age": 3}', [["content", '{"name": "Bob", "age": 3}']]),
    "JSON of other keys": (' {"f": {"name": "f"}}', [["content", ' {"f": {"name": "f"}}']]),
    "text in between": (
        f"{L} and {L}",
        [["call", "get_weather", '{"city": "Paris"}'], ["content", f"and {L}"]],
    ),
    "Python behind the tag": ("<|python_tag|>f.call(1)", [["content", "<|python_tag|>f.call(1)"]]),
    "white space": ("  \n ", [["content", "  \n "]]),
}
CASES = [(hermes, *case) for case in HERMES.values()] + [(llama, *case) for case in LLAMA.values()]
IDS = [f"hermes: {name}" for name in HERMES] + [f"llama: {name}" for name in LLAMA]


@pytest.mark.parametrize("make, text, expected", CASES, ids=IDS)
def test_what_is_found_is_the_same_however_the_text_is_cut(make, text, expected):
    assert parse(make(), [text]) == expected
    assert parse(make(), list(text)) == expected
    for i in range(len(text)):
        assert parse(make(), [text[:i], text[i:]]) == expected
    for i in range(10):
        assert parse(make(), cut(text, i)) == expected


@pytest.mark.parametrize(
    "parser, text",
    [
        (hermes(is_whole=True), HERMES["malformed arguments"][0]),
        (hermes(is_whole=True), HERMES["nested too deeply"][0]),
        (llama(is_whole=True), """{"name": "f", "parameters": {"a": 1, 'b': 2}}"""),
        (listed(is_whole=True), '[{"name": "f", "parameters": {"a": 1,}}]'),
    ],
)
def test_a_malformed_call_of_a_whole_answer_is_content_as_it_came(parser, text):
    assert parse(parser, [text]) == [["content", text]]


def test_calls_of_a_whole_answer_before_a_malformed_one_and_those_that_were_cut_short_stay():
    bad, cut_short = HERMES["malformed arguments"][0], HERMES["cut in the arguments"]
    assert parse(hermes(is_whole=True), [f"<tool_call>{W}</tool_call>{bad}"]) == [
        ["call", "get_weather", WA],
        ["content", bad],
    ]
    assert parse(hermes(is_whole=True), [cut_short[0]]) == cut_short[1]
    text = '[{"name": "f", "parameters": {"a": 1}} oops]'
    assert parse(listed(is_whole=True), [text]) == [["call", "f", '{"a": 1}'], ["content", "oops]"]]


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "<tool",
        "{",
        "}",
        '"name"',
        ": ",
        '"f"',
        ", ",
        '"arguments"',
        "[",
        "]",
        "\\",
        '"',
        "\n",
        " ",
        ";",
        "1",
        "-",
        "null",
        "x",
        "\\u12",
        "é",
        '{"name": "f", "arguments": {',
        '{"name": "f", "parameters": {}}',
        '"a": "b"',
        "<think>",
        "</think>",
        "<thi",
    ]
)


@seed(4)
@settings(max_examples=400, deadline=None, database=None)
@given(st.lists(FRAGMENTS, max_size=25).map("".join), st.integers(0, 1 << 30))
def test_random_text_cut_at_random_gives_the_same(text, cuts):
    for make in (hermes, llama, listed, named, thinking, opened):
        whole = parse(make(), [text])
        assert parse(make(), cut(text, cuts)) == whole
        if make in (hermes, llama):
            for part in whole:
                if part[0] == "call":
                    is_start_of_json(part[2])


def is_start_of_json(text):
    """As anthropic's client reads unfinished arguments."""
    assert isinstance(from_json(text.encode(), partial_mode=True), dict)


def test_text_is_held_back_only_while_it_may_be_markup():
    parser = hermes()
    assert [p.text for p in parser.push("a <b")] == ["a <b"]
    assert [p.text for p in parser.push(" <to")] == []
    assert [p.text for p in parser.push("p")] == [" <top"]


def test_arguments_stream_as_they_come():
    parser = hermes()
    parser.push('<tool_call>{"name": "f", "arguments": ')
    assert parser.push('{"a')[0].arguments == '{"a'
    assert parser.push('": "x y')[0].arguments == '": "x y'
    assert parser.push("\\")[0:] == []
    assert parser.push("n z")[0].arguments == "\\n z"


def test_long_arguments_take_linear_time():
    text = json.dumps({"name": "f", "arguments": {"a": "x" * 300_000, "b": [1] * 30_000}})
    parser = hermes()
    found = parse(parser, ["<tool_call>", *(text[i : i + 3] for i in range(0, len(text), 3)), "</tool_call>"])
    assert json.loads(found[0][2]) == json.loads(text)["arguments"]


@pytest.mark.parametrize(
    "text, expected",
    [
        ('[{"name": "f", "parameters": {"a": 1}}]', [["call", "f", '{"a": 1}']]),
        (
            ' [ {"name": "f", "parameters": {"a": 1}} , {"name": "g", "parameters": {}} ] ',
            [["call", "f", '{"a": 1}'], ["call", "g", "{}"]],
        ),
        ('[{"name": "f", "parameters": {"a"', [["call", "f", '{"a"']]),
        ('[{"na', [["content", '[{"na']]),
        ("no calls", [["content", "no calls"]]),
        (
            '[{"name": "f", "parameters": {}}] \n and:  more\n text \n',
            [["call", "f", "{}"], ["content", "and:  more\n text"]],
        ),
    ],
)
def test_a_list_of_calls_is_read(text, expected):
    for i in range(len(text)):
        assert parse(listed(), [text[:i], text[i:]]) == expected


def test_a_named_call_is_all_arguments():
    assert parse(named(), ['{"a"', "", ": 1}"]) == [["call", "f", '{"a": 1}']]
    assert parse(named(), []) == []


@pytest.mark.parametrize(
    "is_open, text, expected",
    [
        (
            False,
            "<think>\nHm.\n\nSo.\n</think>\n\nYes. ",
            [["reasoning", "Hm.\n\nSo."], ["content", "Yes. "]],
        ),
        (True, "Hm.\n</think>\n\nYes.", [["reasoning", "Hm."], ["content", "Yes."]]),
        (True, "<think>\nHm.\n</think>\n\nYes.", [["reasoning", "Hm."], ["content", "Yes."]]),
        (False, "Yes, <think>no</think>.", [["content", "Yes, <think>no</think>."]]),
        (False, "<think>\n\n</think>\n\nYes.", [["content", "Yes."]]),
        (False, "<think>Hm, </thin", [["reasoning", "Hm, </thin"]]),
        (True, "Hm ", [["reasoning", "Hm"]]),
        (True, "", []),
        (False, " <th", [["content", " <th"]]),
        (False, "<think>a</think>b</think>c", [["reasoning", "a"], ["content", "bc"]]),
        (False, "a</think>b", [["content", "a</think>b"]]),
    ],
)
def test_reasoning_is_split_off_however_the_text_is_cut(is_open, text, expected):
    start = Start.INSIDE if is_open else Start.UNKNOWN
    assert parse(thinking(start), list(text)) == expected
    for i in range(len(text) + 1):
        assert parse(thinking(start), [text[:i], text[i:]]) == expected


def test_a_prompt_that_ends_within_the_thoughts_is_known():
    assert THINK.start_of("<|im_start|>assistant\n<think>\n") is Start.INSIDE
    assert THINK.start_of("<|im_start|>assistant\n<think>\n\n</think>\n\n") is Start.AFTER
    assert THINK.start_of("<|im_start|>assistant\n") is Start.UNKNOWN


@pytest.mark.parametrize(
    "head",
    [
        "<|im_start|>assistant\n",
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<｜Assistant｜>",
        "Hi[/INST]",
        "<start_of_turn>model\n",
        "<|assistant|>\n",
        "]~b]ai\n",
        "<assistant>",
    ],
)
def test_a_prompt_that_ends_with_half_a_thought_is_known(head):
    def goes_on(prompt):
        return THINK.start_of(prompt) is Start.AMID

    assert goes_on(f"{head}<think>\nThe user")
    assert goes_on(f"<|im_start|>user\nWhat is <think>?<|im_end|>\n{head}<think>1 < 2, <b>[x] \n")
    assert not goes_on(f"{head}<think>\nThe user\n</think>\n\nHello")
    assert not goes_on(f"{head}<think>\n")  # opened by the template, with no thought yet
    assert not goes_on(f"{head}What is <think> and why")
    assert not goes_on(f"<|im_start|>user\n<think> is what?<|im_end|>\n{head}")
    assert not goes_on(f"<user><think> is what?{head}")


def test_the_thought_that_a_prompt_of_seed_oss_begins_is_continued():
    prompt = "<seed:bos>user\nHi<seed:eos><seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>"
    assert SEED.start_of(prompt) is Start.AMID


def test_half_a_thought_goes_on_to_the_letter():
    """Regression: what followed a half thought of the client was content, with its </think>."""
    text = " says hi.\n</think>\n\nHello"
    for pieces in ([text], list(text)):
        expected = [["reasoning", " says hi."], ["content", "Hello"]]
        assert parse(thinking(Start.AMID), pieces) == expected
    assert parse(thinking(Start.AMID), [" and <think> more"]) == [["reasoning", " and <think> more"]]
