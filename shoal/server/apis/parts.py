"""Parts of a conversation's content: one rule for all APIs.

A part that can be read as text is read. Any other part is left out with a warning, because clients send their
whole conversation with every request and a refusal would end it. Pictures and files in a user's message stay,
and the API refuses them by their field: an answer that ignores them would mislead.
"""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import unquote_to_bytes

from shoal.server.http.exchange import Exchange

TEXTS = ("text", "input_text", "output_text")
# Types of text files besides text/*. Without a type, or with application/octet-stream, the bytes decide.
TEXT_FILES = frozenset(
    {
        *("", "application/octet-stream"),
        *("application/json", "application/jsonl", "application/x-ndjson", "application/xml"),
        *("application/yaml", "application/x-yaml", "application/toml", "application/csv"),
        *("application/javascript", "application/x-javascript", "application/typescript", "application/sql"),
        *("application/x-sh", "application/x-python", "application/x-httpd-php"),
    }
)
TEXT_SUFFIXES = ("+json", "+xml", "+yaml")
# Python knows more; decoding some of them takes quadratic time.
CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "windows-1252", "utf-16"})
MEDIA = frozenset(
    {
        *("image", "image_url", "input_image", "computer_screenshot"),
        *("document", "file", "input_file"),
        *("audio", "audio_url", "input_audio", "video", "video_url", "input_video"),
    }
)


def readable(exchange: Exchange, content: Any, *, is_user: bool = False) -> Any:
    """Returns the content with each readable or media part replaced by text, without parts of unknown
    types. Parts of a wrong shape stay; the API's own check names them."""
    if not isinstance(content, list):
        return content
    found = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind in TEXTS:
            found.append(part)
        elif (text := _text_of(part)) is not None:
            found.append({"type": "text", "text": text})
        elif kind not in MEDIA:
            warn_unread(exchange, kind)
        elif is_user:
            found.append(part)
        else:  # so that the model knows that something is missing
            warn_unread(exchange, kind)
            found.append({"type": "text", "text": f"[{kind} left out: this model reads text alone]"})
    return found


def readable_message(exchange: Exchange, message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message of OpenAI's chat API with the parts that this server reads, an answer's thoughts in
    the field that templates know, and calls of custom tools, whose input is text, as calls of functions."""
    content, calls, role = message.get("content"), message.get("tool_calls"), message.get("role")
    found = {**message, "content": readable(exchange, content, is_user=role == "user")}
    if role == "assistant" and isinstance(content, list):
        thoughts = [part for part in content if isinstance(part, dict) and part.get("type") == "thinking"]
        others = [part for part in content if part not in thoughts]
        found["content"] = readable(exchange, others)
        if thoughts and not message.get("reasoning_content"):
            found["reasoning_content"] = "".join(str(part.get("thinking") or "") for part in thoughts)
    if isinstance(calls, list):
        found["tool_calls"] = [_function_call(call) for call in calls]
    return found


def _function_call(call: Any) -> Any:
    custom = call.get("custom") if isinstance(call, dict) else None
    if not isinstance(custom, dict):
        return call
    function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    rest = {key: value for key, value in call.items() if key != "custom"}
    return {**rest, "type": "function", "function": function}


def warn_unread(exchange: Exchange, kind: str) -> None:
    """Logs, once a client, that a part of a conversation is left out."""
    exchange.warn(
        f"part {kind!r:.60}",
        f"this server cannot read parts of a conversation of the type {kind!r:.60}: they are left out of "
        f"{exchange.path}",
    )


def _text_of(part: dict[str, Any]) -> str | None:
    """Returns the text of a part of a type that wraps text, or None."""
    kind, found = part["type"], None
    if kind in ("file", "input_file"):
        file = part["file"] if isinstance(part.get("file"), dict) else part
        if (text := _text_of_file(str(file.get("file_data") or ""))) is not None:
            found = _lines(file.get("filename"), text)
    if kind == "refusal":
        found = part.get("refusal")
    elif kind == "tool_reference":
        found = part.get("tool_name")
    elif kind == "compaction":
        found = part.get("content")
    elif kind == "search_result":
        found = _lines(part.get("title"), part.get("source"), _joined(part.get("content")))
    elif kind == "document" and isinstance(source := part.get("source"), dict):
        inner = source.get("data") if source.get("type") == "text" else None
        if source.get("type") == "content":
            inner = _joined(source.get("content"))
        if source.get("type") == "base64":
            inner = _text_of_file(f"data:{source.get('media_type')};base64,{source.get('data')}")
        if isinstance(inner, str):
            found = _lines(part.get("title"), part.get("context"), inner)
    return found if isinstance(found, str) else None


def _text_of_file(given: str) -> str | None:
    """Returns the text of a file, a data URL or base64, without a byte order mark. None if it is absent,
    has another type, or is not text in the URL's charset (default: UTF-8)."""
    is_url = given[:5].lower() == "data:"
    header, comma, data = given.partition(",") if is_url else ("data:;base64", ",", given)
    media_type, *options = (each.strip() for each in header[len("data:") :].lower().split(";"))
    is_text = media_type.startswith("text/") or media_type in TEXT_FILES
    is_text = is_text or (media_type.startswith("application/") and media_type.endswith(TEXT_SUFFIXES))
    charsets = [each.removeprefix("charset=").strip('"') for each in options if each.startswith("charset=")]
    charset = charsets[0] if charsets else "utf-8"
    if not (given and comma and is_text) or charset not in CHARSETS:
        return None
    try:
        raw = _from_base64(data) if "base64" in options else unquote_to_bytes(data)
        text = raw.decode(charset).removeprefix("\ufeff")
    except ValueError:
        return None
    return None if "\0" in text or text.startswith("%PDF-") else text


def _from_base64(data: str) -> bytes:
    """Returns the bytes. Some clients break lines in base64, or leave out the padding."""
    whole = "".join(data.split())
    return base64.b64decode(whole + "=" * (-len(whole) % 4), validate=True)


def _joined(content: Any) -> str | None:
    """Returns the text of a part's own content. None if it contains a part that is not text."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "\n".join(texts) if texts and len(texts) == len(content) else None


def _lines(*texts: Any) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)
