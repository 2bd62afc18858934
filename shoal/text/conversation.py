"""Converts conversations of clients into forms that a chat template accepts. No text is lost: text without a
place in the template is written to a place that it has."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

INSTRUCTIONS = ("system", "developer")
# A lone surrogate as an escape of JSON: its writer has cut a text within an emoji. A whole character, and any
# other escape, is matched before it.
HALF_CHARACTER = re.compile(
    r"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\(?!u[dD][89a-fA-F]).)"
    r"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}",
    re.DOTALL,
)
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
SIGNS = string.digits + string.ascii_letters


def with_whole_escapes(text: str) -> str:
    """Returns JSON with U+FFFD in place of each escape of a lone surrogate."""
    return HALF_CHARACTER.sub(lambda found: found[1] or "\\ufffd", text)


def with_whole_characters(text: str) -> str:
    """Returns the text with U+FFFD in place of each lone surrogate, which tokenizers refuse."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def instructions(messages: Sequence[Message]) -> list[str]:
    """Returns the texts of all system and developer messages with text."""
    texts = [as_text(message["content"]) for message in messages if message["role"] in INSTRUCTIONS]
    return [text for text in texts if text.strip()]


def with_one_instruction(messages: Sequence[Message]) -> list[Message]:
    """Returns the conversation with all system and developer messages joined into a leading one."""
    text = "\n\n".join(instructions(messages))
    return [{"role": "system", "content": text}, *_without_instructions(messages)]


def with_instructions_of_user(messages: Sequence[Message]) -> list[Message]:
    """Returns the conversation with all system and developer messages before the user's first text."""
    rest = _without_instructions(messages)
    text = "\n\n".join(instructions(messages))
    if not text:
        return rest
    roles = [message["role"] for message in rest]
    if "user" not in roles:
        return [{"role": "user", "content": text}, *rest]
    first = roles.index("user")
    said = {**rest[first], "content": f"{text}\n\n{as_text(rest[first]['content'])}"}
    return [*rest[:first], said, *rest[first + 1 :]]


def _without_instructions(messages: Sequence[Message]) -> list[Message]:
    """Returns the conversation without system and developer messages. User messages around a removed one are
    joined, as many templates require alternating roles."""
    found: list[Message] = []
    was_between = False
    for message in messages:
        if message["role"] in INSTRUCTIONS:
            was_between = True
            continue
        if was_between and found and message["role"] == found[-1]["role"] == "user":
            text = f"{as_text(found[-1]['content'])}\n\n{as_text(message['content'])}"
            found[-1] = {**found[-1], "content": text}
        else:
            found.append(message)
        was_between = False
    return found


def with_parts(messages: Sequence[Message]) -> list[Message]:
    """Returns the conversation with each text content as a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]


def with_calls_alone(messages: Sequence[Message], empty: str | None) -> list[Message]:
    """Returns the conversation with `empty` as the content of messages with calls; their text becomes a
    separate message."""
    found: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            if as_text(message["content"]):
                found.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = {**message, "content": empty}
        found.append(message)
    return found


def with_results_first(messages: Sequence[Message]) -> list[Message]:
    """Returns the conversation with instructions between a call and its results moved after the results."""
    found: list[Message] = []
    held: list[Message] = []  # instructions since the last message with calls, or since a result of it
    for message in messages:
        if (
            message["role"] in INSTRUCTIONS
            and found
            and (found[-1].get("tool_calls") or found[-1]["role"] == "tool")
        ):
            held.append(message)
            continue
        if message["role"] != "tool":
            found += held
            held = []
        found.append(message)
    return found + held


def with_words_in_results(messages: Sequence[Message]) -> list[Message]:
    """Returns the conversation with the user's text after the result of a call moved to the end of the
    result. Instructions may be between them."""
    found: list[Message] = []
    result: int | None = None  # index of the last result, if only instructions followed
    for message in messages:
        if message["role"] == "user" and result is not None:
            text = f"{as_text(found[result]['content'])}\n\n{as_text(message['content'])}"
            found[result] = {**found[result], "content": text}
            continue
        found.append(message)
        if message["role"] == "tool":
            result = len(found) - 1
        elif message["role"] not in INSTRUCTIONS:
            result = None
    return found


def with_one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Returns the conversation with a message for each call, and after it the result of that call."""
    found: list[Message] = []
    results: list[Message] = []  # the results were moved after their calls
    for i, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            if not any(message is result for result in results):
                found.append(message)
            continue
        results = _results_behind(messages, i)
        left = list(results)
        for k, call in enumerate(calls):
            content = message["content"] if k == 0 or message["content"] is None else ""
            found.append({**message, "content": content, "tool_calls": [call]})
            own = [result for result in left if result.get("tool_call_id") == call.get("id")] or left[:1]
            for result in own[:1]:
                found.append(result)
                left.remove(result)
        found += left
    return found


def _results_behind(messages: Sequence[Message], i: int) -> list[Message]:
    end = i + 1
    while end < len(messages) and messages[end]["role"] == "tool":
        end += 1
    return list(messages[i + 1 : end])


def with_ids(messages: Sequence[Message], *, short: bool) -> list[Message]:
    """Returns the conversation with an id for each call; `short`: of nine letters and digits. Missing ids are
    generated, and results without an id belong to the calls in their order."""
    form = _short if short else str
    found: list[Message] = []
    open_ids: list[str] = []
    for i, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            open_ids = [form(call.get("id") or _short(f"{i} {k}")) for k, call in enumerate(calls)]
            message = {
                **message,
                "tool_calls": [{**call, "id": call_id} for call, call_id in zip(calls, open_ids)],
            }
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            call_id = form(given) if given else (open_ids[0] if open_ids else _short(str(i)))
            if call_id in open_ids:
                open_ids = [other for other in open_ids if other != call_id]
            message = {**message, "tool_call_id": call_id}
        found.append(message)
    return found


def _short(call_id: Any) -> str:
    text = str(call_id)
    if SHORT_ID.fullmatch(text):
        return text
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    signs = []
    for _ in range(9):
        number, remainder = divmod(number, len(SIGNS))
        signs.append(SIGNS[remainder])
    return "".join(signs)


def parsed_arguments(given: Any) -> Any:
    """Returns the arguments of a call, which are JSON text in OpenAI's API, as an object, a list or text.
    Invalid JSON stays text: models make such errors, and agents send them back with an error for the model to
    see."""
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(with_whole_escapes(given)) if given.strip() else {}
        except (ValueError, RecursionError):
            return given
    if value is None:
        return {}
    return value if isinstance(value, dict | list) else json.dumps(value, ensure_ascii=False)


def as_text(content: Any) -> str:
    """Returns a message's content (text, a list of text parts, or None) as text."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())
