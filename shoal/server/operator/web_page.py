"""A page of the server: an HTML file with the parts that pages share, its style and its scripts in it, under
a policy that keeps all else out of it. Libraries and fonts (vendor/) are files beside it, which browsers keep
for a day.

The policy names the hashes of the page's scripts, libraries included, and of its style, computed here from
the text that is served, so that nothing injected could run and the page may talk to this server alone. Only
the library that cleans HTML (DOMPurify) may turn text into HTML.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

PAGES = resources.files("shoal.server") / "pages"
PART = re.compile(r"<!-- (\w+\.html) -->\n")
ASSET = re.compile(r'<script src="([\w.]+)"></script>|<link rel="stylesheet" href="([\w./-]+)">')
LIBRARY = re.compile(r'<script src="vendor/([\w.-]+)"></script>')
SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
VENDORED = {
    ".js": b"text/javascript; charset=utf-8",
    ".woff2": b"font/woff2",
}  # the file types of vendor/ that are served


@functools.cache
def web_page(name: str) -> tuple[bytes, dict[str, str]]:
    """Returns the page of this file and its headers besides the content type."""
    page = ASSET.sub(_inlined, PART.sub(lambda part: _read(part[1]), _read(name)))
    libraries = [_file(f"vendor/{library}") for library in LIBRARY.findall(page)]
    scripts = [_hash(library) for library in libraries]
    scripts += [_hash(text.encode()) for text in SCRIPT.findall(page)]
    policy = [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        "font-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        f"script-src {_sources(scripts)}",
        f"style-src {_sources([_hash(text.encode()) for text in STYLE.findall(page)])}",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    ]
    page = LIBRARY.sub(_checked, page)
    return page.encode(), {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


@functools.cache
def vendored(name: str) -> tuple[bytes, bytes, dict[str, str]] | None:
    """Returns a file of vendor/, its content type and its other headers; None if no page needs it."""
    folder = PAGES / "vendor"
    names = {f"{place}{file.name}" for place in ("", "fonts/") for file in (folder / place).iterdir()}
    content_type = VENDORED.get(name[name.rfind(".") :])
    if name not in names or content_type is None:
        return None
    headers = {"x-content-type-options": "nosniff", "cache-control": "public, max-age=86400"}
    return _file(f"vendor/{name}"), content_type, headers


def _file(name: str) -> bytes:
    return PAGES.joinpath(name).read_bytes()


def _read(name: str) -> str:
    return _file(name).decode()


def _inlined(tag: re.Match[str]) -> str:
    """Returns the file that a tag of the page names, as an inline element."""
    script, style = tag.groups()
    if script:
        return f"<script>{_read(script)}</script>"
    folder = style[: style.rfind("/") + 1]  # its addresses are relative to this folder
    return f"<style>{_read(style).replace('url(', 'url(' + folder)}</style>"


def _checked(tag: re.Match[str]) -> str:
    """Returns the tag of a library with its hash. The policy demands it, and it gives a newer file a new
    address."""
    name = tag[1]
    found = _hash(_file(f"vendor/{name}"))
    return f'<script src="vendor/{name}?{found[7:15]}" integrity="{found}"></script>'


def _hash(text: bytes) -> str:
    """Returns the source expression of a script or a style for the content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}"


def _sources(hashes: list[str]) -> str:
    return " ".join(f"'{each}'" for each in hashes)
