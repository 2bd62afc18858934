"""A page of the server: an HTML file with the parts that pages share, its style and its scripts put into it,
under a policy that keeps all else out of it.

What is served is one page without outside assets. Its policy names the hashes of its own scripts and style,
computed here from the text that is served, so that nothing injected could run and the page may talk to this
server alone.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

PART = re.compile(r"<!-- (\w+\.html) -->\n")
ASSET = re.compile(r'<script src="([\w.]+)"></script>|<link rel="stylesheet" href="([\w.]+)">')
INLINE = {
    "script-src": re.compile(r"<script>(.*?)</script>", re.DOTALL),
    "style-src": re.compile(r"<style>(.*?)</style>", re.DOTALL),
}


@functools.cache
def web_page(name: str) -> tuple[bytes, dict[str, str]]:
    """(the page of this file, the headers to send beside its content type)."""
    page = ASSET.sub(_inlined, PART.sub(lambda part: _read(part[1]), _read(name)))
    policy = [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
    policy += [
        f"{directive} {' '.join(_source(text) for text in pattern.findall(page))}"
        for directive, pattern in INLINE.items()
    ]
    return page.encode(), {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def _read(name: str) -> str:
    return resources.files("shoal.server").joinpath(name).read_text("utf-8")


def _inlined(tag: re.Match[str]) -> str:
    """The file that a tag of the page names, as an element of the page."""
    script, style = tag.groups()
    return f"<script>{_read(script)}</script>" if script else f"<style>{_read(style)}</style>"


def _source(text: str) -> str:
    """A content security policy's name for an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
