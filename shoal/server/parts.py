"""Parts of a conversation's content: one rule for all APIs.

What can be read as text is read. What cannot is left out, with a warning, because clients send their whole
conversation with every request and a refusal would end it. Pictures and files in a user's message stay as
they are, for the API to refuse by their field: an answer that ignores them would mislead.
"""

from __future__ import annotations

import base64
from typing import Any

from shoal.server.http import Exchange

TEXTS = ("text", "input_text", "output_text")
TEXT_FILES = frozenset(
    f"application/{name}" for name in ("json", "jsonl", "x-ndjson", "xml", "yaml", "x-yaml", "toml", "csv")
)
MEDIA = frozenset(
    {
        *("image", "image_url", "input_image", "computer_screenshot"),
        *("document", "file", "input_file"),
        *("audio", "audio_url", "input_audio", "video", "video_url", "input_video"),
    }
)


def readable(exchange: Exchange, content: Any, *, is_user: bool = False) -> Any:
    """Returns the content with text in the place of each part that can be read or is media, without the parts
    that mean nothing here. What has the wrong shape stays, for the API's own check to name."""
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
        else:  # the model learns that it sees none
            warn_unread(exchange, kind)
            found.append({"type": "text", "text": f"[{kind} left out: this model reads text alone]"})
    return found


def warn_unread(exchange: Exchange, kind: str) -> None:
    """Tells the log, once a client, of a part of a conversation that this server cannot use."""
    exchange.warn(
        f"part {kind!r:.60}",
        f"this server cannot read parts of a conversation of the type {kind!r:.60}: they are left out of "
        f"{exchange.path}",
    )


def _text_of(part: dict[str, Any]) -> str | None:
    """The text of a part that is text by another name. None if the part has none."""
    kind, found = part["type"], None
    if kind in ("file", "input_file"):
        file = part["file"] if isinstance(part.get("file"), dict) else part
        header, _, data = str(file.get("file_data") or "").partition(";base64,")
        if (text := _decoded(header.removeprefix("data:"), data)) is not None:
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
            inner = _decoded(str(source.get("media_type")), str(source.get("data")))
        if isinstance(inner, str):
            found = _lines(part.get("title"), part.get("context"), inner)
    return found if isinstance(found, str) else None


def _decoded(media_type: str, data: str) -> str | None:
    """The text of a file. None if it is no text by its type, or is not what its type says."""
    media_type = media_type.partition(";")[0].strip().lower()
    if not media_type.startswith("text/") and media_type not in TEXT_FILES:
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except ValueError:
        return None


def _joined(content: Any) -> str | None:
    """The text of a part's own content. None if a part of it holds other than text."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "\n".join(texts) if texts and len(texts) == len(content) else None


def _lines(*texts: Any) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)
