"""/docs: the OpenAPI document as a page for people. It needs no script and nothing from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import shlex
import urllib.parse
from collections.abc import Sequence
from html import escape
from typing import Any

from shoal.server.http.exchange import Exchange
from shoal.server.http.route import Handler, Route
from shoal.server.operator.openapi import document

HOST = re.compile(r"[\w.-]+(:\d+)?|\[[0-9a-fA-F:.]+\](:\d+)?", re.ASCII)  # a safe Host for the examples
REF = "#/components/schemas/"
# Values of fields in examples, other than the model; a schema says no more than their types.
EXAMPLES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello!"}],
    "prompt": "Once upon a time",
    "input": "Hello!",
    "max_tokens": 32,
    "max_output_tokens": 32,
    "tokens": [1, 2, 3],
    "token_ids": [1, 2, 3],
}
TEXTS = ("messages", "input", "prompt")  # a request with several shows the first
LIMITS = {
    "minimum": "from",
    "maximum": "to",
    "exclusiveMinimum": "above",
    "exclusiveMaximum": "below",
    "minLength": "length from",
    "maxLength": "length to",
    "minItems": "items from",
    "maxItems": "items to",
}
WIDE = 2**31 - 1

STYLE = """
:root { color-scheme: light dark;
  --page: light-dark(#faf9f7, #15181b); --card: light-dark(#fff, #1d2125);
  --text: light-dark(#22282c, #e4e7e9); --soft: light-dark(#626b71, #98a2a9);
  --line: light-dark(#e4e2dd, #2e343a); --accent: light-dark(#0b6b74, #63c7d0);
  --tint: light-dark(#e6f1f1, #1f3236); --code: light-dark(#f2f0ec, #101315) }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.55 system-ui, sans-serif;
  overflow-wrap: anywhere }
main { max-width: 860px; margin: 0 auto; padding: 24px 16px 64px }
h1 { font-size: 24px; letter-spacing: -.02em; margin: 0 }
h2 { font-size: 18px; margin: 36px 0 10px }
h3 { font-size: 15px; margin: 18px 0 6px; color: var(--soft); font-weight: 600 }
p { margin: 6px 0; color: var(--soft) }
a { color: var(--accent) }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px }
details { background: var(--card); border: 1px solid var(--line); border-radius: 12px; margin: 8px 0;
  padding: 0 14px }
summary { cursor: pointer; padding: 10px 0; display: flex; flex-wrap: wrap; gap: 2px 10px;
  align-items: baseline; border-radius: 8px }
summary::-webkit-details-marker { display: none }
summary b { font: 600 12px/1.6 ui-monospace, Menlo, Consolas, monospace; background: var(--tint);
  color: var(--accent); border-radius: 6px; padding: 0 7px }
summary span { color: var(--soft); font-size: 14.5px }
code, pre { font: .88em/1.5 ui-monospace, Menlo, Consolas, monospace }
summary code { font-weight: 600 }
pre { background: var(--code); border: 1px solid var(--line); border-radius: 10px; padding: 10px 12px;
  white-space: pre-wrap; margin: 4px 0 }
table { width: 100%; border-collapse: collapse; font-size: 14.5px; margin-bottom: 12px }
td { border-top: 1px solid var(--line); padding: 5px 10px 5px 0; vertical-align: top }
td:first-child { width: 38% }
small { color: var(--soft) }
em { color: var(--accent); font-style: normal; font-size: 12.5px }
"""
STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = "; ".join(
    [
        "default-src 'none'",
        f"style-src 'sha256-{STYLE_HASH}'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def docs(routes: Sequence[Route]) -> Handler:
    """Returns a handler that answers with the page of these routes. They may grow until the first request."""

    async def handle(exchange: Exchange) -> None:
        host = exchange.headers.get(b"host", b"").decode("latin-1")
        address = f"{exchange.scope['scheme']}://{host if HOST.fullmatch(host) else '127.0.0.1:8000'}"
        address += exchange.context.config.root_path or ""
        model = next(iter(exchange.models.names), "MODEL")
        page = docs_page(tuple(routes), address, model, bool(exchange.context.keys))
        await exchange.respond(page, content_type=b"text/html; charset=utf-8", headers=HEADERS)

    return handle


@functools.lru_cache(maxsize=8)
def docs_page(routes: tuple[Route, ...], address: str, model: str, asks_for_key: bool) -> bytes:
    """address: the server's, as its reader knows it. model: the name that examples use."""
    described = document(routes)
    schemas = described["components"]["schemas"]
    groups: dict[str, list[str]] = {}
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            shown = _operation(
                method.upper(), path, operation, schemas, _Example(address, model, asks_for_key)
            )
            groups.setdefault(operation["tags"][0], []).append(shown)
    endpoints = "".join(f"<h2>{escape(name)}</h2>{''.join(shown)}" for name, shown in groups.items())
    types = "".join(
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"{_fields(schema) if 'properties' in schema else f'<p>{_type(schema)}</p>'}</details>"
        for name, schema in sorted(schemas.items())
        if "properties" in schema or "enum" in schema
    )
    info, root = described["info"], escape(urllib.parse.urlsplit(address).path)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(info["title"])} API</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(info["title"])} {escape(info["version"])}</h1>
<p>{escape(info["description"])} <a href="{root}/openapi.json">openapi.json</a> has the same for programs.
<a href="{root}/">The chat page</a> is for talking.</p>
{endpoints}
<h2>Types</h2>
{types}
</main>
</body>
</html>
""".encode()


class _Example:
    """Returns curl lines that work when pasted."""

    def __init__(self, address: str, model: str, asks_for_key: bool) -> None:
        self._address, self._model, self._asks_for_key = address, model, asks_for_key

    def line(self, method: str, path: str, schema: dict[str, Any] | None, asks_for_key: bool) -> str:
        named = self._model if path.startswith("/v1/models/") else "ID"
        parts = [f"curl {self._address}{urllib.parse.quote(path.replace('{id}', named))}"]
        if method != "GET" and schema is None:
            parts.append(f"-X {method}")
        if self._asks_for_key and asks_for_key:
            parts.append('-H "Authorization: Bearer $SHOAL_API_KEY"')
        if schema is not None:
            parts += [
                "-H 'Content-Type: application/json'",
                "-d " + shlex.quote(json.dumps(self._body(schema))),
            ]
        return " \\\n  ".join(parts)

    def _body(self, schema: dict[str, Any]) -> dict[str, Any]:
        fields = schema["properties"]
        text = next((name for name in TEXTS if name in fields), None)
        limit = "max_output_tokens" if "max_output_tokens" in fields else "max_tokens"
        names = [text, *schema.get("required", ()), limit]
        known = EXAMPLES.keys() & fields
        found = {name: EXAMPLES[name] for name in names if name in known}
        several = [name for name in found if fields[name].get("items", {}).get("type") == "array"]
        return {"model": self._model} | found | {name: [found[name]] for name in several}


def _operation(
    method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any], example: _Example
) -> str:
    schema = None
    if (body := operation.get("requestBody")) is not None:
        schema = schemas[body["content"]["application/json"]["schema"]["$ref"].removeprefix(REF)]
    line = example.line(method, path, schema, "security" in operation)
    request = "" if schema is None else f"<h3>Request</h3>{_fields(schema)}"
    answers = operation["responses"]["200"]["content"]
    answer = ", ".join(
        f"{escape(kind)}{' ' + _type(found['schema']) if '$ref' in found['schema'] else ''}"
        for kind, found in answers.items()
    )
    return (
        f"<details><summary><b>{method}</b> <code>{escape(path)}</code> "
        f"<span>{escape(operation['summary'])}</span></summary>"
        f"<h3>Example</h3><pre>{escape(line)}</pre>{request}<h3>Answer</h3><p>{answer}</p></details>"
    )


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = []
    for name, field in sorted(schema["properties"].items(), key=lambda item: item[0] not in required):
        note = " <em>required</em>" if name in required else ""
        if field.get("default") not in (None, [], {}, ""):
            note = f" <small>default {escape(json.dumps(field['default']))}</small>"
        shown = escape(name).replace("_", "_<wbr>")  # where a narrow column may break it
        rows.append(f"<tr><td><code>{shown}</code>{note}</td><td>{_type(field)}</td></tr>")
    return f"<table>{''.join(rows)}</table>" if rows else "<p>no fields</p>"


def _type(schema: dict[str, Any]) -> str:
    """Returns the HTML of a field's type. A type with a section of its own is a link to that. null is not
    shown, because every field that may be left out may also be null."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(REF))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "enum" in schema:
        return " | ".join(
            f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"] if value is not None
        )
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    kind = schema.get("type", "anything")
    if kind == "array":
        text = f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        text = f"object of {_type(schema['additionalProperties'])}"
    else:
        text = escape(kind)
    # Limits that only give the width of an integer do not help a reader.
    limits = [f"{word} {limit}" for key, word in LIMITS.items() if abs(limit := schema.get(key, WIDE)) < WIDE]
    return f"{text} <small>{', '.join(limits)}</small>" if limits else text
