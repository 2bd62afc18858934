"""Texts of model families for test_chat_formats.py: a family knows how its models write calls, reasoning and
words; the cases are the same for all, and some families have more."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

TEXT, WHOLE, NUMBER, FLAG = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
SEARCH = {
    "query": TEXT,
    "limit": WHOLE,
    "ratio": NUMBER,
    "exact": FLAG,
    "after": {"type": ["integer", "null"]},
    "tags": {"type": "array", "items": TEXT},
    "filter": {"$ref": "#/$defs/Filter"},
    "note": {"anyOf": [TEXT, {"type": "null"}]},
}
SCHEMAS = {
    "weather": {"type": "object", "properties": {"city": TEXT, "days": WHOLE}},
    "search": {"type": "object", "properties": SEARCH, "$defs": {"Filter": {"type": "object"}}},
    "write": {"type": "object", "properties": {"path": TEXT, "content": TEXT}},
    "ping": {"type": "object", "properties": {}},
}
PARIS = ("weather", {"city": "Paris", "days": 3})
PING = ("ping", {})
VALUES = (
    "search",
    {
        "query": "q",
        "limit": -3,
        "ratio": 0.25,
        "exact": True,
        "after": None,
        "tags": ["a", "b, c"],
        "filter": {"min": 1.5, "deep": {"x": [1, {"y": "z"}], "on": False}},
        "note": "",
    },
)
EMPTY = ("search", {"query": "", "tags": [], "filter": {}})
DIGITS = ("search", {"query": "12345", "note": "true", "limit": 10})
SIGNS = "He said \"hi\" and 'bye'; C:\\temp\\new; a\tb; {x: [1]}; <b>&amp;</b> é 日本 😀"
MARKS = ("search", {"query": SIGNS})
LINES = ("write", {"path": "a b/ç.py", "content": 'one\n    two "2"\n\nthree\\n stays as it is\n'})
LONG = ("write", {"path": "long.txt", "content": " ".join(f"word{i}" for i in range(40))})
WORDS = "Hello, wörld! 1 < 2 & [3] > 2. 日本 {😀}"
Call = tuple[str, dict]


@dataclass
class Case:
    text: str
    content: str = ""  # without white space at its ends
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    is_open: bool = False  # the prompt has opened the reasoning


@dataclass
class Family:
    form: str  # a name of formats/registry.py
    call: Callable[[list[Call]], str]
    thoughts: str | None = None
    opens: bool = False  # its prompts open the reasoning
    say: Callable[[str], str] = str
    lead: Callable[[str, str], str] = "{}\n\n{}".format  # words before a call
    think: Callable[[str, str], str] | None = None
    several: bool = True
    quoted: str | None = None  # the text that looks like a call within reasoning
    after: bool = True  # words may follow calls
    broken: dict[str, str] = field(default_factory=dict)  # texts with the words zebra and crossing
    more: dict[str, Case] = field(default_factory=dict)
    signs: str = ""  # a chat template's text

    def cases(self) -> dict[str, Case]:
        call, say, lead = self.call, self.say, self.lead
        found = {
            "words": Case(say(WORDS), WORDS),
            "a call": Case(call([PARIS]), calls=[PARIS]),
            "a call without arguments": Case(call([PING]), calls=[PING]),
            "words before a call": Case(lead("I look.", call([PARIS])), "I look.", calls=[PARIS]),
            "values of all kinds": Case(call([VALUES]), calls=[VALUES]),
            "empty values": Case(call([EMPTY]), calls=[EMPTY]),
            "texts that look like numbers": Case(call([DIGITS]), calls=[DIGITS]),
            "quotes, marks and letters": Case(call([MARKS]), calls=[MARKS]),
            "lines": Case(call([LINES]), calls=[LINES]),
        }
        if self.several:
            found["several calls"] = Case(call([PARIS, PING, PARIS]), calls=[PARIS, PING, PARIS])
        if self.after:
            text = f"{lead('First.', call([PARIS]))}\n{say('Then.')}\n{call([PING])}"
            found["words between calls"] = Case(text, "First.Then.", calls=[PARIS, PING])
        if self.think is not None:
            text, is_open, think = "Hm, 7 < 8.\nSo é.", self.opens, self.think
            found["reasoning and words"] = Case(think(text, say(WORDS)), WORDS, text, is_open=is_open)
            found["reasoning and a call"] = Case(think(text, call([MARKS])), "", text, [MARKS], is_open)
            inner = self.quoted or call([PARIS])
            text = f"I could write {inner} but no."
            found["a call within reasoning"] = Case(think(text, say("Done.")), "Done.", text, is_open=is_open)
        return {**found, **self.more}


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def word_of(value: object) -> str:
    return value if isinstance(value, str) else dumped(value)


def joined(write: Callable[..., str], between: str = "\n") -> Callable[[list[Call]], str]:
    return lambda calls: between.join(write(*call) for call in calls)


def as_list(begin: str, end: str = "", arguments: str = "arguments") -> Callable[[list[Call]], str]:
    return lambda calls: begin + dumped([{"name": n, arguments: a} for n, a in calls]) + end


def hermes(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{dumped({'name': name, 'arguments': arguments})}\n</tool_call>"


def qwen(name: str, arguments: dict) -> str:
    inner = "".join(f"<parameter={k}>\n{word_of(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def seed(name: str, arguments: dict) -> str:
    inner = "".join(f"<parameter={k}>{v}</parameter>\n" for k, v in arguments.items())
    return f"<seed:tool_call>\n<function={name}>\n{inner}</function>\n</seed:tool_call>"


def glm(between: str) -> Callable[..., str]:
    def write(name: str, arguments: dict) -> str:
        pairs = [
            f"<arg_key>{k}</arg_key>{between}<arg_value>{word_of(v)}</arg_value>"
            for k, v in arguments.items()
        ]
        return f"<tool_call>{between.join([name, *pairs, ''])}</tool_call>"

    return write


def hy_v3_published(calls: list[Call]) -> str:
    return re.sub(r"(</?(?:tool_calls?|tool_sep|arg_key|arg_value))>", r"\1:opensource>", hy_v3(calls))


def hy_v3(calls: list[Call]) -> str:
    inner = "\n".join(
        f"<tool_call>{n}<tool_sep>\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{word_of(v)}</arg_value>\n" for k, v in a.items())
        + "</tool_call>"
        for n, a in calls
    )
    return f"<tool_calls>\n{inner}\n</tool_calls>"


def invokes(block: str, prefix: str = "", says_string: bool = False) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        found = ""
        for name, arguments in calls:
            found += f'<{prefix}invoke name="{name}">\n'
            for k, v in arguments.items():
                kind = f' string="{str(isinstance(v, str)).lower()}"' if says_string else ""
                found += f'<{prefix}parameter name="{k}"{kind}>{word_of(v)}</{prefix}parameter>\n'
            found += f"</{prefix}invoke>\n"
        return f"<{block}>\n{found}</{block}>"

    return write


def gemma_value(value: object, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_value(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma_value(v, quote) for v in value) + "]"
    return dumped(value)


def gemma(begin: str, end: str, quote: str) -> Callable[..., str]:
    return lambda name, arguments: f"{begin}call:{name}{gemma_value(arguments, quote)}{end}"


def python(calls: list[Call]) -> str:
    return (
        "["
        + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for n, arguments in calls)
        + "]"
    )


def cohere(calls: list[Call]) -> str:
    made = [
        dumped({"tool_call_id": str(i), "tool_name": n, "parameters": a}) for i, (n, a) in enumerate(calls)
    ]
    inner = ",\n    ".join(made)
    return f"<|START_ACTION|>[\n    {inner}\n]<|END_ACTION|>"


def olmo(calls: list[Call]) -> str:
    lines = "\n".join(python([call])[1:-1] for call in calls)
    return f"<function_calls>{lines}</function_calls>"


def kimi(calls: list[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dumped(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def deepseek3(calls: list[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumped(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek31(calls: list[Call]) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumped(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def harmony(name: str, arguments: dict) -> str:
    return (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(arguments)}<|call|>"
    )


def muse(calls: list[Call]) -> str:
    return f" to={calls[0][0]}<|message|>{invokes('atem:function_calls', 'atem:')(calls)}<|eom|>"


def closed(thoughts: str, rest: str) -> str:
    """Returns reasoning that the prompt has opened."""
    return f"{thoughts}\n</think>\n\n{rest}"


def opened(thoughts: str, rest: str) -> str:
    return f"<think>\n{thoughts}\n</think>\n\n{rest}"


def final(text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|end|>"


NEXT = "<|start|>assistant"
ARGUMENTS = dumped(PARIS[1])
THOUGHT = "I think."


def tags_in_words(name: str) -> dict[str, Case]:
    """Regression: XML in an answer lost the tags that some answers have around their words."""
    xml = f"XML:\n<{name}>\n  <a>1</a>\n</{name}>\nis it."
    return {"tags in words": Case(xml, xml), "tags in tags": Case(f"<{name}>\n{xml}\n</{name}>", xml)}


FAMILIES = {
    "Hermes, Qwen3": Family(
        "hermes",
        joined(hermes),
        "qwen3",
        think=opened,
        broken={"no JSON": "<tool_call>\nzebra\n</tool_call> crossing"},
        more={
            "escapes": Case(
                f"<tool_call>{json.dumps({'name': 'search', 'arguments': MARKS[1]})}</tool_call>",
                calls=[MARKS],
            )
        },
        signs="<tool_call>{}</tool_call><think>",
    ),
    "ERNIE 4.5, thinking": Family(
        "ernie45",
        joined(hermes),
        "qwen3",
        say="<response>\n{}\n</response>\n".format,
        lead="<response>\n{}\n</response>\n{}".format,
        opens=True,
        think=lambda thoughts, rest: f"{thoughts}\n</think>\n\n\n{rest}",
        broken={"no JSON": "<tool_call>\nzebra\n</tool_call> crossing"},
        more=tags_in_words("response"),
        signs="<tool_call>{}</tool_call><response></response><think>",
    ),
    "Qwen3.5, Nemotron 3": Family(
        "qwen3_coder",
        joined(qwen),
        "qwen3",
        opens=True,
        think=closed,
        broken={
            "no function": "<tool_call>\nzebra\n</tool_call>\ncrossing",
            "no name": "<tool_call>\n<function=>\n<parameter=zebra>\ncrossing\n</parameter></tool_call>",
        },
        more={
            "words of Python": Case(
                qwen("search", {"exact": "False"}) + qwen("search", {"exact": "True", "after": "None"}),
                calls=[("search", {"exact": False}), ("search", {"exact": True, "after": None})],
            ),
            "a second call before the first is closed": Case(
                qwen(*PARIS).removesuffix("</tool_call>") + qwen(*PING), calls=[PARIS, PING]
            ),
            "a second end of the reasoning": Case(
                "Hm.</think>So.</think>Yes.", "So.Yes.", "Hm.", is_open=True
            ),
        },
        signs="<tool_call><function=f><parameter=k></tool_call><think>",
    ),
    "Seed-OSS": Family(
        "seed_oss",
        joined(seed),
        "seed_oss",
        think="<seed:think>{}</seed:think>{}".format,
        broken={"no function": "<seed:tool_call>\nzebra\n</seed:tool_call>\ncrossing"},
        more={
            "values in JSON": Case(
                seed("search", {"tags": '["a"]', "filter": '{"x": null}', "exact": "true"}),
                calls=[("search", {"tags": ["a"], "filter": {"x": None}, "exact": True})],
            ),
            # Regression: this list of Python's became half of a surrogate pair, which no answer can hold.
            "half of a surrogate pair": Case(
                seed("search", {"tags": r"['\ud800']"}), calls=[("search", {"tags": r"['\ud800']"})]
            ),
        },
        signs="<seed:tool_call><function=f><parameter=k><seed:think>",
    ),
    "GLM 4.5": Family(
        "glm45",
        joined(glm("\n")),
        "qwen3",
        say="\n{}".format,
        lead="\n{}\n{}".format,
        think=lambda thoughts, rest: f"\n<think>{thoughts}</think>{rest}",
        broken={"no name": "\n<tool_call>\n<arg_key>zebra</arg_key>\n<arg_value>crossing</arg_value>\n"},
        signs="<tool_call>f<arg_key>k</arg_key><think>",
    ),
    "GLM 4.7, Laguna": Family(
        "glm45",
        joined(glm(""), ""),
        "qwen3",
        opens=True,
        lead="{}{}".format,
        think=lambda thoughts, rest: f"{thoughts}</think>{rest}",
        broken={"words": "<tool_call>zebra crossing</tool_call>"},
        signs="<tool_call>f<arg_key>k</arg_key></think><assistant>",
    ),
    "Hunyuan 3": Family(
        "hy_v3",
        hy_v3,
        "qwen3",
        think=opened,
        broken={"no name": "<tool_calls><tool_call><tool_sep>zebra crossing</tool_call></tool_calls>"},
        signs="<tool_calls><tool_call>f<tool_sep><arg_key><think>",
    ),
    "Hunyuan 3, published": Family(
        "hy_v3",
        hy_v3_published,
        "hy_v3",
        think="<think:opensource>\n{}\n</think:opensource>\n{}".format,
        broken={"no name": "<tool_calls:opensource>zebra crossing</tool_calls:opensource>"},
        signs="{% set suffix = ':opensource' %}<tool_calls{{ suffix }}><tool_sep{{ suffix }}><arg_key",
    ),
    "Hunyuan A13B": Family(
        "hunyuan_a13b",
        as_list("<tool_calls>", "</tool_calls>"),
        "qwen3",
        say="<answer>\n{}\n</answer>".format,
        lead="<answer>\n{}\n</answer>{}".format,
        think=opened,
        broken={"no list": "<tool_calls>zebra</tool_calls> crossing"},
        more=tags_in_words("answer"),
        signs="<tool_calls>[]</tool_calls><think>",
    ),
    "Mistral, from version 11": Family(
        "mistral",
        joined(lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{dumped(a)}", ""),
        "mistral",
        lead="{}{}".format,
        think="[THINK]{}[/THINK]{}".format,
        after=False,
        broken={"no object": "[TOOL_CALLS]weather[ARGS]zebra crossing"},
        more={
            "the call's id": Case(f"[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{ARGUMENTS}", calls=[PARIS]),
            "no mark before the arguments": Case(f"[TOOL_CALLS]weather{ARGUMENTS}", calls=[PARIS]),
            "reasoning after words": Case("So.[THINK]Hm.[/THINK]Yes.", "So.Yes.", "Hm."),
        },
        signs="[TOOL_CALLS]f[ARGS] [THINK]",
    ),
    "Mistral, to version 7": Family(
        "mistral",
        as_list("[TOOL_CALLS]"),
        lead="{}{}".format,
        after=False,
        broken={"no list": "[TOOL_CALLS]zebra crossing"},
        signs="[TOOL_CALLS] [",
    ),
    "DeepSeek V3, R1": Family(
        "deepseek_v3",
        deepseek3,
        "qwen3",
        opens=True,
        think=closed,
        broken={"no call": "<｜tool▁calls▁begin｜>zebra<｜tool▁calls▁end｜>crossing"},
        signs="<｜tool▁calls▁begin｜>```json <think>",
    ),
    "DeepSeek V3.1": Family(
        "deepseek_v31",
        deepseek31,
        "qwen3",
        opens=True,
        think=closed,
        broken={"no object": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>zebra<｜tool▁sep｜>crossing"},
        signs="<｜tool▁calls▁begin｜></think>",
    ),
    "DeepSeek V3.2": Family(
        "deepseek_v32",
        invokes("｜DSML｜function_calls", "｜DSML｜", says_string=True),
        "qwen3",
        opens=True,
        think=closed,
        broken={"no call": "<｜DSML｜function_calls>zebra</｜DSML｜function_calls>crossing"},
        signs="<｜DSML｜function_calls></think>",
    ),
    "DeepSeek V4": Family(
        "deepseek_v4",
        invokes("｜DSML｜tool_calls", "｜DSML｜", says_string=True),
        "qwen3",
        opens=True,
        think=closed,
        broken={"no call": "<｜DSML｜tool_calls>zebra</｜DSML｜tool_calls>crossing"},
        signs="<｜DSML｜tool_calls></think>",
    ),
    "MiniMax M2": Family(
        "minimax_m2",
        invokes("minimax:tool_call"),
        "qwen3",
        opens=True,
        think=closed,
        broken={"no call": "<minimax:tool_call>zebra</minimax:tool_call>crossing"},
        signs="<minimax:tool_call><think>",
    ),
    "Kimi K2": Family(
        "kimi_k2",
        kimi,
        "qwen3",
        opens=True,
        lead="{}{}".format,
        think=closed,
        broken={"no call": "<|tool_calls_section_begin|>zebra crossing<|tool_calls_section_end|>"},
        more={
            "dots in the name": Case(
                kimi([PARIS]).replace("functions.weather", "functions.a.weather"),
                calls=[("a.weather", PARIS[1])],
            ),
            "no section": Case(kimi([PARIS])[len("<|tool_calls_section_begin|>") :], calls=[PARIS]),
        },
        signs="<|tool_calls_section_begin|><think>",
    ),
    "Gemma 4": Family(
        "gemma4",
        joined(gemma("<|tool_call>", "<tool_call|>", '<|"|>'), ""),
        "gemma4",
        think="<|channel>thought\n{}\n<channel|>{}".format,
        broken={"no call": "<|tool_call>zebra<tool_call|>crossing"},
        more={
            "keys in quotes": Case(
                '<|tool_call>call:weather{<|"|>city<|"|>:<|"|>Paris<|"|>,days: 3}<tool_call|>', calls=[PARIS]
            ),
            "a text without marks": Case(
                "<|tool_call>call:weather{city:Paris,days:3}<tool_call|>", calls=[PARIS]
            ),
        },
        signs="<|tool_call>call:f{}<|channel>",
    ),
    "FunctionGemma": Family(
        "functiongemma",
        joined(gemma("<start_function_call>", "<end_function_call>", "<escape>"), ""),
        broken={"no call": "<start_function_call>zebra<end_function_call>crossing"},
        signs="<start_function_call>",
    ),
    "gpt-oss": Family(
        "openai",
        joined(harmony, NEXT),
        "openai_gptoss",
        say=final,
        lead=lambda words, call: f"<|channel|>commentary<|message|>{words}<|end|>{NEXT}{call}",
        think=lambda thoughts, rest: f"<|channel|>analysis<|message|>{thoughts}<|end|>{NEXT}{rest}",
        quoted=f"functions.weather({ARGUMENTS})",
        after=False,
        broken={
            "no object": "<|channel|>commentary to=functions.weather<|message|>zebra crossing",
            "no message": "<|channel|>final zebra crossing",
        },
        more={
            name: Case(f"{header}<|message|>{ARGUMENTS}<|call|>", calls=[PARIS])
            for name, header in {
                "a recipient before the channel": " to=functions.weather<|channel|>commentary json",
                "a recipient in the role": f"{NEXT} to=functions.weather<|channel|>commentary",
                "no word on the format": "<|channel|>commentary to=functions.weather",
                "a call on the channel of reasoning": "<|channel|>analysis to=functions.weather code",
                "a bare recipient": "<|channel|>commentary to=weather <|constrain|>json",
                "a channel behind the name": "<|channel|>analysis to=weather<|channel|>commentary json",
            }.items()
        }
        | {
            "no arguments": Case("<|channel|>commentary to=functions.ping<|message|>", calls=[PING]),
            "reasoning twice": Case(
                f"<|channel|>analysis<|message|>One.<|end|>{NEXT}<|channel|>commentary<|message|>I look.<|end|>"
                f"{NEXT}<|channel|>analysis<|message|>Two.<|end|>{NEXT}<|channel|>final<|message|>Three.",
                "I look.\nThree.",
                "One.\nTwo.",
            ),
            "no header": Case('{"a": 1}', '{"a": 1}'),
        },
        signs="<|start|>assistant<|channel|>final<|message|>",
    ),
    "Muse": Family(
        "muse_glimmer",
        muse,
        "muse_glimmer",
        say=" to=user<|message|>{}<|eot|>".format,
        lead=f" to=user<|message|>{{}}<|eom|>{NEXT}{{}}".format,
        think=f" to=self<|message|>{{}}<|eom|>{NEXT}{{}}".format,
        quoted="weather(Paris)",
        after=False,
        broken={"no call": " to=weather<|message|><atem:function_calls>zebra crossing<|eom|>"},
        signs="<|start|>assistant<|message|><atem:function_calls>",
    ),
    "Llama 4": Family(
        "llama4_pythonic",
        python,
        lead="{}<|python_start|>{}<|python_end|>".format,
        after=False,
        broken={"no call": "[weather(zebra crossing)]"},
        more={
            "within marks": Case(
                f"<|python_start|>{python([PARIS, PING])}<|python_end|>", calls=[PARIS, PING]
            ),
            "a list": Case('[1] is "one", [2] is two.', '[1] is "one", [2] is two.'),
            "an empty list": Case("[]", "[]"),
            "a link": Case("[a link](https://x)", "[a link](https://x)"),
            "forms of Python": Case(
                """[search(query=\"\"\"a "b" c\"\"\", tags=('x', "y\\x41\\u00e9\\d",), ratio=.5, limit=1_0,)]""",
                calls=[("search", {"query": 'a "b" c', "tags": ["x", "yAé\\d"], "ratio": 0.5, "limit": 10})],
            ),
        },
        signs="[func_name1(params)]",
    ),
    "LFM2": Family(
        "lfm2",
        lambda calls: f"<|tool_call_start|>{python(calls)}<|tool_call_end|>",
        "qwen3",
        lead="{}{}".format,
        think=opened,
        broken={"no Python": "<|tool_call_start|>zebra<|tool_call_end|>crossing"},
        more={
            "words of JSON": Case(
                '<|tool_call_start|>[search(query="a\nb", exact=true, after=null)]<|tool_call_end|>',
                calls=[("search", {"query": "a\nb", "exact": True, "after": None})],
            )
        },
        signs="<|tool_call_start|><think>",
    ),
    "OLMo 3": Family(
        "olmo3",
        olmo,
        "qwen3",
        opens=True,
        think=closed,
        broken={"no Python": "<function_calls>zebra</function_calls>crossing"},
        more={
            "words of JSON": Case(
                '<function_calls>\nsearch(query="a", exact=true, after=null)\n</function_calls>',
                calls=[("search", {"query": "a", "exact": True, "after": None})],
            )
        },
        signs="<function_calls><think>",
    ),
    "Phi-4-mini": Family(
        "phi4_mini_json",
        as_list("functools"),
        after=False,
        broken={"no list": "functools[zebra crossing]"},
        more={"a word": Case("Use functools.", "Use functools.")},
        signs="functools[",
    ),
    "Command R7B, Command A": Family(
        "cohere_command3",
        cohere,
        "cohere_command3",
        say="<|START_RESPONSE|>{}<|END_RESPONSE|>".format,
        lead="<|START_RESPONSE|>{}<|END_RESPONSE|>{}".format,
        think="<|START_THINKING|>{}<|END_THINKING|>{}".format,
        broken={"no list": "<|START_ACTION|>zebra<|END_ACTION|>crossing"},
        signs="<|START_THINKING|><|START_ACTION|>[<|START_RESPONSE|>",
    ),
    "Granite 3": Family(
        "granite",
        as_list("<|tool_call|>"),
        "granite",
        think="Here is my thought process: {}\nHere is my response: {}".format,
        after=False,
        broken={"no list": "<|tool_call|>zebra crossing"},
        more={
            "no mark": Case(as_list("")([PARIS]), calls=[PARIS]),
            "words of Granite 3.3": Case("<response>\nHi.\n</response>", "Hi."),
            **tags_in_words("response"),
        },
        signs="<|tool_call|> Here is my thought process: ... Here is my response:",
    ),
    "Nemotron Nano 2": Family(
        "nemotron_json",
        as_list("<TOOLCALL>", "</TOOLCALL>"),
        "qwen3",
        think=opened,
        broken={"no list": "<TOOLCALL>zebra</TOOLCALL> crossing"},
        signs="<TOOLCALL><think>",
    ),
    "InternLM": Family(
        "internlm",
        joined(
            lambda n, a: f"<|action_start|><|plugin|>{dumped({'name': n, 'parameters': a})}<|action_end|>"
        ),
        broken={"no JSON": "<|action_start|><|plugin|>zebra<|action_end|>crossing"},
        signs="<|action_start|>",
    ),
    "Llama 3": Family(
        "llama3_json",
        lambda calls: "; ".join(dumped({"name": n, "parameters": a}) for n, a in calls),
        lead="{}<|python_tag|>{}".format,
        after=False,
        broken={"no JSON": "<|python_tag|>zebra crossing"},
        more={"an answer in JSON": Case('{"name": "Bob"}', '{"name": "Bob"}')},
        signs="<|python_tag|>",
    ),
}
