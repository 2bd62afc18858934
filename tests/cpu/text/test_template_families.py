"""Chat templates of every family: the prompt is the one that transformers renders, and what clients send again
and again is never refused, whatever the template raises."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path

import jinja2
import pytest
import transformers
from tokenizers import Tokenizer, models

from shoal.text.chat_template import ChatTemplate

FOLDER = Path(__file__).parent.parent / "data" / "chat_templates"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ID, ID2 = "abcDEF123", "xyzXYZ987"
ARGUMENTS = {"city": "São Paulo", "days": 3, "metric": True}
NESTED = {"query": "a\nb", "after": None, "exact": False, "filter": {"deep": {"x": [1, {"y": "z"}]}}}
# Some templates write one call a message; transformers drops or refuses the others.
SINGLE_CALLS = ("gpt-oss", "llama3")
# Some templates write either words or calls of an answer; transformers drops the calls.
WORDS_OR_CALLS = ("phi4-mini",)
# Null content is what the template wants; transformers removes null fields, which makes it an empty answer.
NULL_BESIDE_CALLS = ("deepseek-r1",)
# Some templates of vision models write no text but the text of parts.
PARTS_ALONE = ("smolvlm",)
REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)


def tool(name, description, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool("get_weather", "The weather of a city", city={"type": "string"}, days={"type": "integer"}),
    tool(
        "search",
        "Looks things up",
        query={"type": "string"},
        tags={"type": "array", "items": {"type": "string"}},
        after={"type": ["integer", "null"]},
        filter={"type": "object", "properties": {"min": {"type": "number"}}},
    ),
    tool("ping", "Replies"),
]


def user(text):
    return {"role": "user", "content": text}


def system(text, role="system"):
    return {"role": role, "content": text}


def calling(*calls, content="", **more):
    made = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "content": content, **more, "tool_calls": made}


def result(call_id, text='21 °C, "sun"'):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


HELLO = {"role": "assistant", "content": "Hello."}
THOUGHTFUL = {**HELLO, "reasoning_content": "They greet."}
WEATHER = (ID, "get_weather", ARGUMENTS)
LOOKUP = (ID2, "search", {"query": 'a "b"', "tags": ["x", "é"], "filter": {"min": 0.5}})
CONVERSATIONS = {
    "one turn": [user("Hi.")],
    "a system message": [system("Be brief."), user("Hi.")],
    "two turns": [system("Be brief."), user("Hi."), HELLO, user("Bye.")],
    "a call and its result": [user("Weather?"), calling(WEATHER), result(ID)],
    "an answer to a result": [
        *(system("Be brief."), user("Weather?"), calling(WEATHER), result(ID)),
        *({"role": "assistant", "content": "Sun."}, user("And later?")),
    ],
    "words and a call": [user("Weather?"), calling(WEATHER, content="I look."), result(ID)],
    "a call without content": [user("Weather?"), calling(WEATHER, content=None), result(ID)],
    "two calls": [user("Weather?"), calling(WEATHER, LOOKUP), result(ID), result(ID2, "none")],
    "nested arguments": [user("Search."), calling((ID, "search", NESTED)), result(ID)],
    "old thoughts": [user("Hi."), THOUGHTFUL, user("Bye.")],
    "thoughts before a call": [
        *(user("Weather?"), calling(WEATHER, reasoning_content="I must look."), result(ID))
    ],
    "old and new thoughts": [
        *(user("Hi."), THOUGHTFUL, user("Weather?")),
        *(calling(WEATHER, reasoning_content="I must look."), result(ID)),
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": text} for text in ("One.", "Two.")]}],
    "a developer": [system("Be brief.", "developer"), user("Hi.")],
    "two system messages": [system("Be brief."), system("Be kind."), user("Hi.")],
    "a late system message": [system("Be brief."), user("Hi."), HELLO, system("Be kind."), user("Bye.")],
}


@functools.cache
def template_of(family):
    return ChatTemplate((FOLDER / f"{family}.jinja").read_text(), TOKENS)


@functools.cache
def oracle_of(family):
    backend = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS)
    tokenizer.chat_template = (FOLDER / f"{family}.jinja").read_text()
    return tokenizer


def with_json_arguments(messages):
    """Returns the messages as clients send them: arguments are JSON text."""
    found = json.loads(json.dumps(messages))
    for call in itertools.chain.from_iterable(message.get("tool_calls", ()) for message in found):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return found


def said(messages):
    """Returns the texts of all messages but answers with calls."""
    contents = [message["content"] for message in messages if "tool_calls" not in message]
    return [text for text in contents if isinstance(text, str)] + [
        part["text"] for content in contents if isinstance(content, list) for part in content
    ]


def forms_of(message, *, as_parts):
    """Returns the forms of a message that mean the same: a template may take one of them only."""
    thoughts = {"thinking": message["reasoning_content"]} if "reasoning_content" in message else {}
    contents = [message["content"]]
    if contents == [None]:
        contents = [None, ""]
    elif isinstance(contents[0], list):
        texts = [part["text"] for part in contents[0]]
        contents += ["\n".join(texts), "".join(texts)]
    elif as_parts:
        contents = [[{"type": "text", "text": contents[0]}]]
    roles = ["developer", "system"] if message["role"] == "developer" else [message["role"]]
    return [
        {**message, **thoughts, "content": content, "role": role} for content in contents for role in roles
    ]


def renderings(family, messages, tools, variables):
    """Returns the texts that transformers renders of the forms of a conversation, except texts that lack words
    of it."""
    words = said([message for message in messages if message["role"] not in ("assistant", "tool")])
    forms = [forms_of(message, as_parts=family in PARTS_ALONE) for message in messages]
    found = []
    for variant in itertools.product(*forms):
        try:
            text = oracle_of(family).apply_chat_template(
                list(variant), tools=tools, add_generation_prompt=True, tokenize=False, **variables
            )
        except REFUSALS:
            continue
        if all(word in text for word in words):
            found.append(text)
    return found


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_is_the_one_of_transformers(family, conversation):
    template, messages = template_of(family), CONVERSATIONS[conversation]
    has_calls = any("tool_calls" in message for message in messages)
    is_ours = (  # Shoal writes what transformers drops
        (has_calls and "tool_calls" not in (FOLDER / f"{family}.jinja").read_text())
        or (conversation == "two calls" and family in SINGLE_CALLS)
        or (conversation == "words and a call" and family in WORDS_OR_CALLS)
        or (conversation == "a call without content" and family in NULL_BESIDE_CALLS)
    )
    tool_lists = ([] if has_calls and template.reads_tools else [None]) + [TOOLS] * template.reads_tools
    for tools, thinks in itertools.product(tool_lists, (None, False, True)):
        variables = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
        text = template.render(
            with_json_arguments(messages), tools=tools, add_generation_prompt=True, **variables
        )
        wanted = renderings(family, messages, tools, variables)
        wanted = wanted or renderings(family, with_json_arguments(messages), tools, variables)
        if wanted and not is_ours:
            assert text in wanted
        else:
            for word in said([message for message in messages if message["role"] != "tool"]):
                assert text.count(word) == 1, text


ODD_ARGUMENTS = ('{"city": "zebra qua', "zebra", '["zebra"]', '"zebra"', "3", "null", "", None)
FOREIGN_IDS = ("toolu_01A2b3C4d5E6f7G8h9", "functions.f:0", None)


def places(call, answer):
    """Returns the conversation with late instructions in all places."""
    kind, late = system("Be kind.", "developer"), system("Be late.")
    return [
        [user("Weather?"), call, answer],
        [kind, late, user("Weather?"), call, answer],
        [user("Weather?"), kind, call, late, answer],
        [user("Weather?"), call, answer, kind, late],
        [
            user("Weather?"),
            call,
            answer,
            {"role": "assistant", "content": None},
            kind,
            user("And gnus?"),
            late,
        ],
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_clients_send_again_and_again_is_never_refused(family):
    template = template_of(family)
    for arguments, call_id, content in itertools.product(ODD_ARGUMENTS, FOREIGN_IDS, (None, [], "I look.")):
        call, answer = (
            calling((call_id, "get_weather", arguments), content=content),
            result(call_id, "quagga"),
        )
        if call_id is None:
            del call["tool_calls"][0]["id"], answer["tool_call_id"]
        for messages in places(call, answer):
            text = template.render(messages, tools=TOOLS, add_generation_prompt=True)
            words = [
                "Weather?",
                "quagga",
                *said([m for m in messages if m["role"] in ("system", "developer")]),
            ]
            words += ["zebra"] if arguments and "zebra" in arguments else []
            for word in words:
                assert word in text, (messages, text)
