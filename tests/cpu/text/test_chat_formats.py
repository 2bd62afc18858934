"""The contract of all chat formats: what is read of an answer, whole and in every division into pieces."""

import dataclasses
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from jiter import from_json

from shoal.config import ServerConfig
from shoal.sampling_params import SamplingParams
from shoal.server.apis.tools import AnswerFormat, ToolPlan, plan_tools
from shoal.text.formats.registry import BY_NAME, FORMATS, THOUGHTS_BY_NAME, choose, choose_thoughts
from shoal.text.reading.parts import CallDelta
from shoal.text.reading.reader import Expected, Reader
from shoal.text.reading.thoughts import Start
from tests.cpu.text.chat_families import FAMILIES, LONG, PARIS, PING, SCHEMAS, THOUGHT

CASES = [
    pytest.param(family, case, id=f"{name}: {title}")
    for name, family in FAMILIES.items()
    for title, case in family.cases().items()
]
BROKEN = [
    pytest.param(family, text, id=f"{name}: {title}")
    for name, family in FAMILIES.items()
    for title, text in family.broken.items()
]
PAGE = Path(__file__).parents[3] / "docs/compatibility.md"
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


class Found:
    """The parts of an answer, put together as a client does; what each delta promises is checked."""

    def __init__(self, family, text, *, is_open=False, end="stop", is_whole=False, **more):
        pieces = [text] if isinstance(text, str) else text
        thoughts = None if family.thoughts is None else THOUGHTS_BY_NAME[family.thoughts]
        start = Start.INSIDE if is_open else Start.UNKNOWN
        expected = Expected(**{"schemas": SCHEMAS, "thoughts": thoughts, "start": start, **more})
        self.reader = Reader(BY_NAME[family.form], expected, is_whole)
        self.content, self.reasoning, self.calls, self.ids, self.num_deltas = "", "", [], [], 0
        for i, piece in enumerate(pieces):
            for part in self.reader.push(piece, end if i == len(pieces) - 1 else None):
                self._add(part)
        assert len(set(self.ids)) == len(self.ids)
        self.is_broken = self.reader.broken is not None

    def _add(self, part):
        if isinstance(part, CallDelta):
            if part.name is not None:
                assert part.id and part.name and part.index == len(self.calls)
                self.ids.append(part.id)
                self.calls.append([part.name, part.arguments])
            else:
                assert part.id is None and part.arguments and part.index == len(self.calls) - 1
                self.calls[-1][1] += part.arguments
                self.num_deltas += 1
        elif part.reasoning:
            assert part.text
            self.reasoning += part.text
        else:
            assert part.text
            self.content += part.text

    def all(self):
        return self.content, self.reasoning, self.calls

    def read_calls(self):
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def random_pieces(text, number):
    rng, pieces = random.Random(number), []
    while text:
        length = rng.choice((1, 1, 2, 3, 7, 20))
        pieces.append(text[:length])
        text = text[length:]
    return pieces or [""]


def divisions(text):
    yield from ([text[:i], text[i:]] for i in range(len(text) + 1))
    yield [*text, ""]
    yield from (random_pieces(text, number) for number in range(10))


def beginnings(text):
    """Returns beginnings of a text: all of a short one, and some 80 of a long one."""
    lengths = range(len(text))
    return [text[:n] for n in sorted(random.Random(text).sample(lengths, min(80, len(text))))]


def squeezed(text):
    """Returns the text without white space around lines, as models write some between the parts."""
    return re.sub(r"\s+", " ", text).strip()


@pytest.mark.parametrize("family, case", CASES)
def test_a_whole_answer_is_read(family, case):
    found = Found(family, case.text, is_open=case.is_open, is_whole=True)
    assert squeezed(found.content) == squeezed(case.content)
    assert found.reasoning == case.reasoning
    assert json.dumps(found.read_calls()) == json.dumps(case.calls)
    assert not found.is_broken


@pytest.mark.parametrize("family, case", CASES)
def test_the_deltas_of_every_division_are_the_whole_answer(family, case):
    wanted = Found(family, case.text, is_open=case.is_open, is_whole=True).all()
    for pieces in divisions(case.text):
        assert Found(family, pieces, is_open=case.is_open).all() == wanted, pieces


@pytest.mark.parametrize("family, case", CASES)
def test_an_answer_that_the_token_limit_cuts_is_the_same_whole_and_streamed(family, case):
    for text in beginnings(case.text):
        more = {"is_open": case.is_open, "end": "length"}
        whole = Found(family, text, is_whole=True, **more)
        assert Found(family, [*text, ""], **more).all() == whole.all(), text
        for _, arguments in whole.calls:
            assert not arguments or isinstance(from_json(arguments.encode(), partial_mode=True), dict), text


@pytest.mark.parametrize("family, case", CASES)
def test_an_answer_that_ends_early_never_ends_with_a_broken_call(family, case):
    for text in beginnings(case.text):
        more = {"is_open": case.is_open}
        whole = Found(family, text, is_whole=True, **more)
        streamed = Found(family, [*text, ""], **more)
        assert not whole.is_broken
        for found in (whole, streamed) if not streamed.is_broken else (whole,):
            assert all(isinstance(arguments, dict) for _, arguments in found.read_calls()), text


@pytest.mark.parametrize("family, text", BROKEN)
def test_no_word_of_a_broken_call_is_lost(family, text):
    whole = Found(family, text, is_whole=True)
    assert not whole.calls and "zebra" in whole.content and "crossing" in whole.content
    for pieces in divisions(text):
        found = Found(family, pieces)
        everything = found.content + "".join(name + arguments for name, arguments in found.calls)
        assert "zebra" in everything and "crossing" in everything, pieces
        if not found.is_broken:
            assert all(isinstance(arguments, dict) for _, arguments in found.read_calls()), pieces


@each_family
def test_arguments_stream_while_they_are_written(family):
    text = family.call([LONG])
    found = Found(family, [text[i : i + 3] for i in range(0, len(text), 3)])
    assert found.num_deltas > 60


@each_family
def test_calls_are_text_where_none_are_wanted(family):
    text = family.lead("I look.", family.call([PARIS]))
    for pieces in ([text], list(text)):
        found = Found(family, pieces, takes_calls=False)
        assert not found.calls and "I look." in found.content and "Paris" in found.content


@each_family
def test_calls_of_tools_that_may_not_be_called_are_text(family):
    found = Found(family, family.call([PARIS]), names={"ping"})
    assert not found.calls and "Paris" in found.content
    assert Found(family, family.call([PING]), names={"ping"}).read_calls() == [PING]


@pytest.mark.parametrize(
    "family",
    [f for f in FAMILIES.values() if f.think is not None and f.quoted is None],
    ids=[name for name, f in FAMILIES.items() if f.think is not None and f.quoted is None],
)
def test_a_call_that_ends_reasoning_which_never_closes_is_a_call(family):
    call = family.call([PARIS])
    text = family.think(f"{THOUGHT}\n{call}", "")
    text = text[: text.index(call) + len(call)]
    for is_whole, pieces in ((True, [text]), *((False, pieces) for pieces in divisions(text))):
        found = Found(family, pieces, is_open=family.opens, is_whole=is_whole)
        assert (found.reasoning, found.content, found.read_calls()) == (THOUGHT, "", [PARIS])
    found = Found(family, f"{text} and so on", is_open=family.opens)
    assert not found.calls and THOUGHT in found.reasoning and "and so on" in found.reasoning


@each_family
def test_a_long_answer_takes_linear_time(family):
    """Each line break of an argument is an escape in JSON and Python."""
    lines = ("write", {"path": "a", "content": "line\n" * 20_000})
    assert Found(family, family.call([lines]), is_whole=True).read_calls() == [lines]


def test_mistrals_ids_have_nine_letters_and_digits():
    family = FAMILIES["Mistral, from version 11"]
    for pieces in ([family.call([PARIS] * 3)], list(family.call([PARIS] * 3))):
        assert all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in Found(family, pieces).ids)


def test_kimis_own_ids_are_kept_and_a_second_one_gets_another():
    family = FAMILIES["Kimi K2"]
    assert Found(family, family.call([PARIS, PING])).ids == ["functions.weather:0", "functions.ping:1"]
    twice = Found(family, family.call([PARIS]) * 2)
    assert len(twice.calls) == 2 and twice.ids[0] == "functions.weather:0"


FRAGMENTS = [
    " ",
    "\n",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    '"',
    "'",
    "\\",
    ":",
    ", ",
    "=",
    "1",
    "true",
    "a",
    "é",
    "functions.f:0",
]
FRAGMENTS += [
    '{"name": "ping", "arguments": {',
    '"a": "b"',
    "ping",
    "weather(city=",
    "call:ping{",
    '">',
    "json",
    "name",
]
FRAGMENTS += [
    "to=ping",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<function=",
    "<parameter=",
    ">",
    "<",
]
FRAGMENTS += [
    "</parameter>",
    "</function>",
    "<|message|>",
    "<|channel|>",
    "<|start|>assistant",
    "analysis",
    "[ARGS]",
]
FRAGMENTS += [
    '<invoke name="',
    '<parameter name="',
    "</invoke>",
    "<｜tool▁sep｜>",
    "<|tool_call_begin|>",
    "```json\n",
]


@each_family
@seed(5)
@settings(max_examples=60, deadline=None, database=None)
@given(data=st.data())
def test_random_texts_are_read_the_same_in_every_division(family, data):
    form = BY_NAME[family.form]
    marks = [*form.openings, *filter(None, [form.closing]), *getattr(form, "ends", ())]
    if family.thoughts is not None:
        marks += [THOUGHTS_BY_NAME[family.thoughts].open, THOUGHTS_BY_NAME[family.thoughts].close]
    fragments = [*FRAGMENTS, *marks * 4, *(mark[:-1] for mark in marks)]
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=25)))
    is_open, end = data.draw(st.booleans()), data.draw(st.sampled_from(["stop", "length"]))
    once = Found(family, text, is_open=is_open, end=end)
    for pieces in ([*text, ""], random_pieces(text, data.draw(st.integers(0, 1 << 30)))):
        found = Found(family, pieces, is_open=is_open, end=end)
        assert found.all() == once.all() and found.is_broken == once.is_broken
    whole = Found(family, text, is_open=is_open, end=end, is_whole=True)
    if end == "stop":
        assert all(isinstance(arguments, dict) for _, arguments in whole.read_calls())
        assert not whole.is_broken
    for _, arguments in once.calls:
        assert not arguments or isinstance(from_json(arguments.encode(), partial_mode=True), dict)


# The finish reason

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMAS["weather"]}}


@each_family
def test_the_finish_reason_is_that_of_whole_calls(family):
    plan = plan_tools([WEATHER], None, None, family.form)
    text = family.call([PARIS])

    def reason(text, end):
        prompt = ""
        parser = AnswerFormat(plan, family.form, family.thoughts or "none", prompt, SamplingParams()).parser(
            False
        )
        for i, char in enumerate(text):
            parser.push(char, end if i == len(text) - 1 else None)
        return parser.finish_reason(end)

    assert reason(text, "stop") == "tool_calls"
    assert reason(family.say("Hello."), "stop") == "stop"
    at = text.index("Paris") + 3
    assert reason(text[:at], "length") == "length"
    assert reason(text[:at], "stop") == "stop"


def test_a_broken_call_that_is_left_out_changes_no_finish_reason():
    text = FAMILIES["Hermes, Qwen3"].call([PARIS]) + '<tool_call>{"name": "weather", "arguments": {,'
    for parallel, reason in ((True, "stop"), (False, "tool_calls")):
        plan = plan_tools([WEATHER], None, parallel, "hermes")
        parser = AnswerFormat(plan, "hermes", "none", "", SamplingParams()).parser(is_whole=False)
        parser.push(text)
        parser.push("", "stop")
        assert parser.finish_reason("stop") == reason


# The choice of a format


@each_family
def test_the_template_says_which_format_a_model_has(family):
    assert choose(family.signs + "{{ tools }}") == (family.form, None)
    assert choose_thoughts(family.signs) == (family.thoughts or "none")


def test_the_options_name_every_format():
    for option, names in (("tool_call_parser", BY_NAME), ("reasoning_parser", THOUGHTS_BY_NAME)):
        [field] = [f for f in dataclasses.fields(ServerConfig) if f.name == option]
        assert field.metadata["limits"].choices == ("auto", *sorted(names), "none")


def test_the_table_of_the_documentation_is_that_of_the_families():
    section = PAGE.read_text("utf-8").split("## Chat formats")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    wanted = []
    for name, family in FAMILIES.items():
        form, parser = BY_NAME[family.form], f"`{family.form}`"
        signs = ", ".join(f"`{sign}`" for sign in form.signs[0]).replace("|", "\\|")
        reasoning = f"`{family.thoughts}`" if family.thoughts else "none"
        constrained = "a call, or JSON" if form.syntaxes else "a call"
        wanted.append([name, signs, parser, reasoning, constrained, "`test_chat_formats.py`"])
    assert [[*row[:4], *row[5:]] for row in rows] == wanted


@pytest.mark.parametrize("parser", ["none", "hermes"])
def test_messages_are_read_whatever_the_parser_of_calls_is(parser):
    family, plan = FAMILIES["gpt-oss"], ToolPlan()
    form = AnswerFormat(plan, parser, "openai_gptoss", "", SamplingParams())
    parts = form.parser(is_whole=True).push(family.think("Hm.", family.say("Yes.")), "stop")
    assert [(part.text, part.reasoning) for part in parts] == [("Hm.", True), ("Yes.", False)]


def test_every_format_is_tested():
    assert {family.form for family in FAMILIES.values()} == set(BY_NAME)
    assert len(BY_NAME) == len(FORMATS)
    assert {family.thoughts for family in FAMILIES.values()} - {None} == set(THOUGHTS_BY_NAME)
