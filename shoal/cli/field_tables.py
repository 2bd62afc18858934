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

What becomes of each field that the APIs of OpenAI, Anthropic, Ollama, vLLM and llama.cpp know. A field that
would change the answer has its effect, or is a 400 that names it: a 200 would be taken for the answer that
was asked for. Null, and the values that ask for nothing, are taken everywhere. Names that no API knows are
ignored with a line in the log.

This page is made from the table that the code uses: `python -m shoal.cli.field_tables` writes it, and tests
hold that it is up to date and that no field of these APIs is missing.
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
