"""The page of request fields, generated from the table that the code uses: `python -m shoal.cli.field_tables`
rewrites docs/request-fields.md of this checkout.
"""

from __future__ import annotations

import json
from pathlib import Path

from shoal.server.http.request_fields import Ignored, Refused, fields_of
from shoal.server.http.route import Route
from shoal.server.routes import PUBLIC_ROUTES

PAGE = Path(__file__).parents[2] / "docs" / "request-fields.md"
HEAD = """# Fields of requests

Send requests of OpenAI, Anthropic, Ollama, vLLM or llama.cpp, and look up here how Shoal treats each field:

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
         -d '{"prompt": "Once upon a time", "max_tokens": 20, "min_p": 0.1}'

A field that would change the answer has its effect, or the answer is a 400 that names it. Null and neutral
values are accepted for every field. Unknown names are ignored with a line in the log.

This page is generated from the table that the code uses: `python -m shoal.cli.field_tables` writes it, and
tests check that it is current and that no field of these APIs is missing.
"""


def page() -> str:
    """Returns the whole page, as Markdown."""
    routes = [route for route in PUBLIC_ROUTES if route.request is not None and fields_of(route.request)]
    return "\n".join([HEAD, *map(_section, routes)])


def _section(route: Route) -> str:
    kind = route.request
    assert kind is not None
    names = sorted(getattr(kind, "__struct_fields__", ()))
    lines = [f"## {route.path}", "", "Read: " + ", ".join(f"`{name}`" for name in names) + ".", ""]
    fields = fields_of(kind)
    refused = {name: field for name, field in fields.items() if isinstance(field, Refused)}
    if refused:
        lines += ["| refused | but for | instead |", "|---|---|---|"]
        for name, field in refused.items():
            neutral = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
            lines.append(f"| `{name}` | {neutral} | {field.instead} |")
        lines.append("")
    ignored = {name: field for name, field in fields.items() if isinstance(field, Ignored)}
    if ignored:
        lines += ["| without effect | because |", "|---|---|"]
        lines += [f"| `{name}` | {field.why} |" for name, field in ignored.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
