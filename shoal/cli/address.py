"""A server's address and key, as `shoal chat` and `shoal top` are given them."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from shoal.errors import ConfigError


def parts_of(url: str) -> SplitResult:
    """The parts of a server's address. Raises ConfigError for what is none."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # half a bracket, or a port that is no number
        is_address = False
    if not is_address or not _is_plain(url) or " " in url:
        raise ConfigError(f"{url!r:.100} is no address of a server; http://127.0.0.1:8000 is one")
    return parts


def key_header(api_key: str | None) -> dict[str, str]:
    """The header that shows the key, if there is one. Raises ConfigError."""
    if not api_key:
        return {}
    if not _is_plain(api_key):
        raise ConfigError(
            "the API key has a character that no header can hold, such as a line's end; give it by --api-key "
            "or SHOAL_API_KEY as the server has it"
        )
    return {"Authorization": f"Bearer {api_key}"}


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()
