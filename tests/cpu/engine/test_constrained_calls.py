"""Calls that a random sampler writes under the grammar of a family are read by the family's format, and their
arguments fit their schema."""

import json
import random

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from shoal.engine.scheduling import grammar as grammars_of_rows
from shoal.engine.scheduling.grammar import Grammars
from shoal.engine.scheduling.part_state import GrammarRow
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from shoal.server.apis.tools import AnswerFormat, ToolPlan, plan_tools, whole
from shoal.text.formats.registry import BY_NAME, FORMATS, THOUGHTS_BY_NAME
from shoal.text.grammar.call_grammar import call_grammar
from shoal.text.grammar.free_calls import text_and_calls
from shoal.text.reading.messages import Messages
from shoal.text.reading.reader import Expected, Reader
from shoal.text.reading.thoughts import BRACKETS, THINK, Start
from shoal.text.tokenizer import Tokenizer
from tests.cpu.text.chat_families import FAMILIES

SHORT, DIGIT = {"type": "string", "maxLength": 5}, {"type": "integer", "minimum": -9, "maximum": 12}
COLOR = {"enum": ["red", "green & <blue>", '"quoted"', ""]}
PAIR = {"type": "object", "properties": {"x": DIGIT, "color": COLOR}, "required": ["x"]}
SCHEMAS = {
    "texts": {
        "type": "object",
        "properties": {"a": SHORT, "b": {"type": "string", "minLength": 2, "maxLength": 3}, "c": COLOR},
        "required": ["a", "b", "c"],
    },
    "numbers": {
        "type": "object",
        "properties": {"whole": DIGIT, "real": {"type": "number"}, "on": {"type": "boolean"}},
        "required": ["whole", "real"],
    },
    "optional": {
        "type": "object",
        "properties": {
            "a": SHORT,
            "after": {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
            "note": {"anyOf": [SHORT, {"type": "null"}]},
            "mode": {"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}], "default": None},
        },
    },
    "nested": {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": DIGIT, "maxItems": 3},
            "pairs": {"type": "array", "items": {"$ref": "#/$defs/Pair"}, "maxItems": 2},
            "pair": {"$ref": "#/$defs/Pair"},
        },
        "required": ["pair", "pairs"],
        "$defs": {"Pair": PAIR},
    },
    "words": {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 3},
            "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
        },
        "required": ["words", "code"],
    },
    "forms": {
        "type": "object",
        "properties": {
            "day": {"type": "string", "format": "date"},
            "code": {"type": "string", "pattern": "^[a-c]{1,3}$|^/[a-c]$"},
            "hosts": {"type": "array", "items": {"type": "string", "format": "ipv4"}, "maxItems": 2},
        },
        "required": ["day", "code", "hosts"],
    },
    "ping": {"type": "object", "properties": {}},
}
MARKS = (
    "<tool_call>", "</tool_call>", "</parameter>", "<parameter=", "</function>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "｜DSML｜", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
    "<think>", "</think>", "[THINK]", "[/THINK]", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|tool_call>", "<tool_call|>", '<|"|>',
    "<minimax:tool_call>", "</minimax:tool_call>", "<|im_start|>", "<|channel>", "<channel|>", "<|eom|>",
    "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<|tool_call|>",
    "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>",
)  # fmt: skip
FORMATS_CHECKED = jsonschema.FormatChecker(["date", "ipv4"])
CONSTRAINED = [form for form in FORMATS if form.syntaxes]


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, the marks of many families as special tokens, and the name of Harmony's channel of reasoning."""
    return byte_tokenizer("analysis")


def byte_tokenizer(*words):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.add_tokens([AddedToken(word, normalized=False) for word in words])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in ("<end>", *MARKS)])
    return Tokenizer(backend, {"eos_token": "<end>"})


@pytest.fixture(autouse=True)
def no_grammar_is_slow(monkeypatch):
    """On a busy machine one would be, and its next mask computed in a thread, which these tests do not wait for."""
    monkeypatch.setattr(grammars_of_rows, "SLOW_S", 60.0)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(lambda: tokenizer, len(tokenizer), tokenizer.eos_token_ids)


def written(grammars, tokenizer, text, number, reasoning=None, most=6000):
    """Returns a text that a sampler writes which draws each token that the grammar allows with the same
    probability."""
    if not isinstance(text, StructuredOutputsParams):
        given = {"grammar": text} if isinstance(text, str) else {"structural_tag": text}
        text = StructuredOutputsParams(**given, reasoning=reasoning)
    grammar = grammars.start(text, (), True).result()
    drawn, ids = random.Random(number), []
    row = GrammarRow(0, grammar, [], None)
    while not grammar.ended:
        grammar.begin_slow()
        mask = grammars.masks([row])[0].view(np.uint8)
        ids.append(int(drawn.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little")))))
        assert grammar.accept(ids[-1]), grammar.error
        assert len(ids) < most, tokenizer.decode(ids, skip_special_tokens=False)
    return tokenizer.decode(ids[:-1], skip_special_tokens=False)


def read(form, text, thoughts=None):
    expected = Expected(SCHEMAS, None, takes_calls=True, thoughts=thoughts, start=Start.UNKNOWN)
    return whole(Reader(form, expected, True).push(text, "stop"))


@pytest.mark.parametrize("form", CONSTRAINED, ids=lambda form: form.name)
def test_a_random_samplers_calls_are_read_and_fit_their_schema(form, grammars, tokenizer):
    for number, tools in enumerate([*([name] for name in SCHEMAS), list(SCHEMAS)] * 4):
        print("seed", number)
        schemas = {name: SCHEMAS[name] for name in tools}
        text = written(grammars, tokenizer, call_grammar(form.syntaxes, schemas, False), number)
        answer = read(form, text)
        assert [call.name for call in answer.calls] in [[name] for name in tools], text
        assert not answer.content.strip(), text
        arguments = json.loads(answer.calls[0].arguments)
        jsonschema.validate(arguments, SCHEMAS[answer.calls[0].name], format_checker=FORMATS_CHECKED)


@pytest.mark.parametrize(
    "name", ["lfm2", "llama4_pythonic", "olmo3", "gemma4", "functiongemma", "hermes", "glm45"]
)
def test_lists_of_one_and_values_with_parts_fit_their_schema(name, grammars, tokenizer):
    """Regression: a list of at most one item was refused, and Gemma's calls had JSON's quotes in such values."""
    values = [["x y"], {"q": [1, "b"], "c d": None}, "e", 2]
    properties = {"one": {"type": "array", "items": DIGIT, "maxItems": 1}, "value": {"enum": values}}
    properties["some"] = {**properties["one"], "minItems": 1}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    for number in range(12):
        text = written(
            grammars, tokenizer, call_grammar(BY_NAME[name].syntaxes, {"f": schema}, False), number
        )
        expected = Expected({"f": schema}, None, takes_calls=True, thoughts=None, start=Start.UNKNOWN)
        [call] = whole(Reader(BY_NAME[name], expected, True).push(text, "stop")).calls
        jsonschema.validate(json.loads(call.arguments), schema)


@pytest.mark.parametrize("form", CONSTRAINED, ids=lambda form: form.name)
def test_several_calls_are_read(form, grammars, tokenizer):
    schemas = {name: SCHEMAS[name] for name in ("ping", "numbers")}
    lengths = set()
    for number in range(60, 84):
        text = written(grammars, tokenizer, call_grammar(form.syntaxes, schemas, True), number)
        answer = read(form, text)
        assert answer.calls and not answer.content.strip(), text
        lengths.add(len(answer.calls))
        for call in answer.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert len(lengths) > 1 or form.syntaxes[0].is_single


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "openai", "gemma4", "muse_glimmer"])
def test_calls_follow_the_reasoning(name, grammars, tokenizer):
    form = BY_NAME[name]
    thoughts = form.thoughts or (BRACKETS if name == "mistral" else THINK)
    reasoning = (thoughts.open, thoughts.close, thoughts.turn)
    schemas, num_thoughts = {"numbers": SCHEMAS["numbers"]}, 0
    for number in range(16):
        text = written(grammars, tokenizer, call_grammar(form.syntaxes, schemas, False), number, reasoning)
        answer = read(form, text, thoughts)
        assert len(answer.calls) == 1 and not answer.content.strip(), text
        num_thoughts += bool(answer.reasoning)
        jsonschema.validate(json.loads(answer.calls[0].arguments), SCHEMAS["numbers"])
    assert num_thoughts


@pytest.mark.parametrize("name", ["hermes", "mistral", "openai", "gemma4", "muse_glimmer"])
def test_an_answer_beside_a_format_is_a_call_or_in_the_format(name, grammars, tokenizer):
    """Regression: after reasoning, gpt-oss and Muse had the header of words before a call, which was text then."""
    form = BY_NAME[name]
    thoughts = form.thoughts or (BRACKETS if name == "mistral" else THINK)
    plan = ToolPlan("auto", [], schemas={"ping": SCHEMAS["ping"]}, parallel=False)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=PAIR))
    plan.constrain(params, name, thoughts.name, {})
    answer_format = AnswerFormat(plan, name, thoughts.name, "", params)
    kinds = set()
    for number in range(60, 84):
        text = written(grammars, tokenizer, params.structured_outputs, number)
        answer = whole(answer_format.parser(True).push(text, "stop"))
        assert len(answer.calls) == (not answer.content.strip()), text
        if answer.content.strip():
            jsonschema.validate(json.loads(answer.content), PAIR)
        kinds.add((bool(answer.reasoning), bool(answer.calls)))
    assert {True, False} == {calls for _, calls in kinds} and (True, True) in kinds


@pytest.mark.parametrize("form", CONSTRAINED, ids=lambda form: form.name)
def test_a_budget_ends_the_reasoning_before_a_required_call(form, grammars, tokenizer):
    """Regression: the budget of gpt-oss began the answer's words, which the grammar of a call refuses."""
    thoughts = form.thoughts or (BRACKETS if form.name == "mistral" else THINK)
    schemas = {"ping": SCHEMAS["ping"]}
    plan = ToolPlan("required", [], schemas=schemas)
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(grammar=call_grammar(form.syntaxes, schemas, False))
    )
    answer = AnswerFormat(plan, form.name, thoughts.name, "", params)
    budget = answer.budget(3, tokenizer)
    begun = [*tokenizer.encode(f"{thoughts.open}Hm", add_special_tokens=False), *budget.end_ids]
    grammar = grammars.start(params.structured_outputs, begun, True).result()
    call = written(grammars, tokenizer, params.structured_outputs.grammar, 1)
    assert all(grammar.accept(i) for i in tokenizer.encode(call, add_special_tokens=False)), grammar.error


def test_an_opening_of_reasoning_that_is_spelled_in_letters_is_not_allowed():
    """Regression: a small model with Harmony's template wrote `<|channel|>a` and thought without an end, as
    the names of both channels were allowed letter by letter."""
    tokenizer = byte_tokenizer()
    grammars = Grammars(lambda: tokenizer, len(tokenizer), tokenizer.eos_token_ids)
    form = BY_NAME["openai"]
    reasoning = (form.thoughts.open, form.thoughts.close, form.thoughts.turn)
    for number in range(6):
        schemas = {"numbers": SCHEMAS["numbers"]}
        text = written(grammars, tokenizer, call_grammar(form.syntaxes, schemas, False), number, reasoning)
        answer = read(form, text, form.thoughts)
        assert len(answer.calls) == 1 and not answer.reasoning, text


@pytest.mark.parametrize("form", CONSTRAINED, ids=lambda form: form.name)
def test_calls_that_the_model_decides_to_make_fit_their_schema(form, grammars, tokenizer):
    schemas = {name: SCHEMAS[name] for name in ("ping", "numbers")}
    tag, num_calls = text_and_calls(form, schemas, True), 0
    for number in range(12):
        text = written(grammars, tokenizer, tag, number)
        answer = read(form, text, form.thoughts)
        assert not any(mark in answer.content for mark in form.openings), text
        num_calls += len(answer.calls)
        for call in answer.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    begins = [syntax.begin + syntax.before for syntax in form.syntaxes]
    marks = [
        mark for mark in form.openings if any(begin.startswith(mark) for begin in begins)
    ] or form.openings[:1]
    # A random sampler spells no mark.
    assert num_calls or all(len(tokenizer.encode(mark, add_special_tokens=False)) > 1 for mark in marks)


TOWNS = {
    "weather": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    "weather.now": {"type": "object", "properties": {}},
}
LLAMA3, PYTHON, LIST = (
    '{"name": "weather", "parameters": {"city": "Paris"}}',
    '[weather(city="Paris")]',
    '[{"name": "weather", "arguments": {"city": "Paris"}}]',
)
TO, NEXT = "to=functions.weather", "<|start|>assistant"
JSON, ANALYSIS = ' <|constrain|>json<|message|>{"city": "Paris"}', "<|channel|>analysis<|message|>"
INVOKE = '<atem:invoke name="weather">\n<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n'
INVOKE = f" to=weather<|message|><atem:function_calls>\n{INVOKE}</atem:function_calls>"
FREE = {
    "llama3_json": (
        ["Hello", "", '{"name": "Bob"}', '{"name": "weathers"}', '{"a": {"name": "weather"}}', "{", "[1]"]
        + [LLAMA3, f" {LLAMA3}", LLAMA3.replace(" ", ""), f"<|python_tag|>{LLAMA3}", f"So.<|python_tag|>{LLAMA3}"]
        + [f'{LLAMA3}; {{"name": "weather.now", "parameters": {{}}}}', f"<|python_tag|>{LLAMA3}; {LLAMA3}"],
        [LLAMA3.replace("Paris", "Oslo"), f"<|python_tag|>{LLAMA3.replace('weather', 'x')}", f"{LLAMA3} So."]
        + ['{"name": "weather"}', '{"parameters": {"city": "x"}, "name": "weather"}', f"{LLAMA3}; {{}}"],
    ),
    "llama4_pythonic": (
        ["Hello", "[]", '[1] is "one"', "[a link](https://x)", "[weather]", "[other(1)]", "I [weather(x)]"]
        + [PYTHON, f"\n{PYTHON}", f"<|python_start|>{PYTHON}", '[weather.now(), weather(city="Rome")]'],
        [PYTHON.replace("Paris", "Oslo"), "<|python_start|>[other()]", "[weather()]", "[ weather (x)", f"{PYTHON} So."],
    ),
    "granite": (
        ["Hello", "[1, 2]", '[{"name": "Bob"}]', LIST, f"So.<|tool_call|>{LIST}"],
        [LIST.replace("Paris", "Oslo"), f"<|tool_call|>{LIST.replace('weather', 'x')}", '[{"name": "weather"}]'],
    ),
    "openai": (
        [f"<|channel|>final<|message|>Call {TO}.", "<|channel|>final<|message|>Hi<|end|>", f"<|channel|>commentary {TO}{JSON}"]
        + [f" {TO}<|channel|>commentary json<|message|>{{\"city\": \"Rome\"}}", f"<|channel|>analysis to=weather{JSON}"]
        + [f"<|channel|>commentary {TO}{JSON[1:]}", f"<|channel|>commentary {TO} json<|message|>{{\"city\": \"Rome\"}}"]
        + [f"{ANALYSIS}{TO}<|end|>{NEXT}<|channel|>commentary {TO}{JSON}", f"{ANALYSIS}Hm"]
        + [f"<|channel|>commentary<|message|>Ah.<|end|>{NEXT}{ANALYSIS}Hm<|end|>{NEXT}<|channel|>final<|message|>So."]
        + ["<|channel|>commentary to=functions.weather.now<|message|>{}"],
        [f"<|channel|>commentary {TO}{JSON.replace('Paris', 'Oslo')}", "<|channel|>commentary to=functions.x<|message|>{}"]
        + [f" {TO}.next{JSON}", f"<|channel|>commentary {TO}{JSON}<|end|>", f"{ANALYSIS}Hm<|end|>So."]
        + [f"<|channel|>commentary {TO}json<|message|>{{\"city\": \"Rome\"}}", f" {TO}<|channel|>analysisjson<|message|>{{\"city\": \"Rome\"}}"],
    ),
    "muse_glimmer": (
        [" to=user<|message|>Hi", f" to=self<|message|><atem:function_calls>?<|eom|>{NEXT}{INVOKE}", INVOKE]
        + [f" to=user<|message|>Ah.<|eom|>{NEXT}{INVOKE}"],
        [INVOKE.replace("Paris", "Oslo"), INVOKE.replace("weather", "x"), " to=user<|message|><atem:function_calls>x"]
        + [f"{INVOKE}{INVOKE}"],
    ),
}  # fmt: skip


def can_write(grammars, tokenizer, params, text):
    """Returns True if an answer with these structured outputs may be `text`."""
    grammar = grammars.start(params, (), True).result()
    return all(
        map(grammar.accept, [*tokenizer.encode(text, add_special_tokens=False), *tokenizer.eos_token_ids])
    )


@pytest.mark.parametrize("name", FREE)
def test_free_text_has_no_call_outside_the_grammar(name, grammars, tokenizer):
    """Regression: `strict` with tool_choice auto had no effect for families whose calls have no mark."""
    form, (accepted, refused) = BY_NAME[name], FREE[name]
    tools = [
        {"type": "function", "function": {"name": tool, "parameters": TOWNS[tool], "strict": True}}
        for tool in TOWNS
    ]
    plan, params = plan_tools(tools, "auto", True, name), SamplingParams()
    thoughts = form.thoughts.name if form.thoughts else "none"
    plan.constrain(params, name, thoughts, {})
    AnswerFormat(plan, name, thoughts, "", params)
    for text in accepted:
        assert can_write(grammars, tokenizer, params.structured_outputs, text), text
        answer = read(form, text, form.thoughts)
        assert all(call.name in TOWNS and json.loads(call.arguments) is not None for call in answer.calls)
    for text in refused:
        assert not can_write(grammars, tokenizer, params.structured_outputs, text), text


KINDS = {
    "required": dict(choice="required"),
    "named": dict(choice={"type": "function", "function": {"name": "weather.now"}}),
    "json": dict(form=StructuredOutputsParams(json=PAIR), text='{"x": 3}', wrong='{"y": 3}'),
    "regex": dict(form=StructuredOutputsParams(regex="[ab]+"), text="abba", wrong="c"),
    "choice": dict(form=StructuredOutputsParams(choice=["yes", "no"]), text="no", wrong="so"),
    "grammar": dict(form=StructuredOutputsParams(grammar='start: "x"+'), text="xx", wrong="xy"),
}
THINKING = {name: family for name, family in FAMILIES.items() if family.think}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", THINKING)
def test_a_grammar_of_every_family_begins_after_the_reasoning(name, kind, grammars, tokenizer):
    family, case = THINKING[name], KINDS[kind]
    form, thoughts = BY_NAME[family.form], THOUGHTS_BY_NAME[family.thoughts]
    tools = [{"type": "function", "function": {"name": tool, "parameters": TOWNS[tool]}} for tool in TOWNS]
    plan = plan_tools(tools, case.get("choice", "none"), True, family.form)
    params = SamplingParams(structured_outputs=case.get("form"))
    plan.constrain(params, family.form, family.thoughts, {})
    text, wrong, head = case.get("text", ""), case.get("wrong", "So"), ""
    if not text:
        text = written(grammars, tokenizer, params.structured_outputs, 1)
    elif isinstance(form, Messages):  # after the reasoning, words have a header of their own
        head = family.say("WORDS").split("WORDS")[0]
    prompt = thoughts.open if family.opens else ""
    answer_format = AnswerFormat(plan, family.form, family.thoughts, prompt, params)
    assert plan.thinks
    thought = f"I could write {family.quoted or text} but no."
    for accepted in (family.think(thought, head + text), *([] if family.opens else [text])):
        assert can_write(grammars, tokenizer, params.structured_outputs, accepted), accepted
        answer = whole(answer_format.parser(True).push(accepted, "stop"))
        assert answer.reasoning == (thought if accepted != text else "")
        assert bool(answer.calls) == ("choice" in case)
        assert answer.content.strip() == case.get("text", "")
    unfinished = family.think(thought, "").split(thoughts.close)[0]
    for refused in (family.think(thought, head + wrong), wrong, unfinished):
        assert not can_write(grammars, tokenizer, params.structured_outputs, refused), refused
