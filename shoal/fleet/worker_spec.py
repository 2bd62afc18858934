"""An external worker as the command line names it: `URL,key=value,...`."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ConfigError
from shoal.files.toml_file import check_keys
from shoal.fleet.worker import WorkerInfo

KEYS = ("id", "tag", "kv_events", "replay", "topic", "block_size", "dp_size", "api_key_file")
ID = re.compile(r"[A-Za-z0-9:][A-Za-z0-9_.:\-]{0,99}")  # it goes into a header and a URL; ::1:9001 is one
DEFAULT_BLOCK_SIZE = 16
MOST_RANKS = 1024


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """`url` has no slash at its end. `kv_events` and `replay` are those of rank 0; the next rank has the next
    port."""

    url: str
    id: str
    tags: frozenset[str] = frozenset()
    kv_events: str | None = None
    replay: str | None = None
    topic: str = ""
    block_size: int = DEFAULT_BLOCK_SIZE
    dp_size: int | None = None  # None: as many as KV events name
    api_key: str | None = field(default=None, repr=False)

    def info(self) -> WorkerInfo:
        """What is known of the worker before it has answered."""
        return WorkerInfo(
            id=self.id,
            url=self.url,
            models=(),
            is_external=True,
            tags=self.tags,
            dp_size=self.dp_size,
            block_size=self.block_size,
        )

    def event_endpoints(self) -> list[tuple[str, str | None]]:
        """For each rank where its KV events are published, and where they are told again. [] without
        events."""
        if self.kv_events is None:
            return []
        return [
            (_next_port(self.kv_events, rank), None if self.replay is None else _next_port(self.replay, rank))
            for rank in range(self.dp_size or 1)
        ]


def parse_worker(text: str, block_size: int = DEFAULT_BLOCK_SIZE) -> WorkerSpec:
    """Reads `http://127.0.0.1:9002,kv_events=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5558,id=b,tag=x`.

    `tag` may come several times. `block_size` is of a worker that does not say its own. Raises ConfigError
    that names the key, and for an api_key_file that cannot be read."""
    url, *entries = text.strip().split(",")
    values: dict[str, str] = {}
    tags = set()
    for entry in entries:
        key, equals, value = entry.strip().partition("=")
        check_keys([key], KEYS, f"worker {text!r:.200}")
        if not equals or not value:
            raise ConfigError(f"worker {text!r:.200}: {key} has no value; write {key}=VALUE")
        if key == "tag":
            tags.add(value)
        elif key in values:
            raise ConfigError(f"worker {text!r:.200}: {key} is given twice")
        else:
            values[key] = value
    place = _check_url(url, text)
    spec = WorkerSpec(
        url=url.rstrip("/"),
        id=values.get("id", place),
        tags=frozenset(tags),
        kv_events=values.get("kv_events"),
        replay=values.get("replay"),
        topic=values.get("topic", ""),
        block_size=_number(values, "block_size", block_size, 1 << 20, text),
        dp_size=_number(values, "dp_size", 1, MOST_RANKS, text) if "dp_size" in values else None,
        api_key=_read_key(values.get("api_key_file"), text),
    )
    if not ID.fullmatch(spec.id):
        raise ConfigError(
            f"worker {text!r:.200}: id {spec.id!r:.100} is no name; up to 100 letters, digits and any of "
            "-_.: make one"
        )
    for key, endpoint in (("kv_events", spec.kv_events), ("replay", spec.replay)):
        if endpoint is not None:
            _check_endpoint(key, endpoint, spec.dp_size or 1, text)
    if spec.replay is not None and spec.kv_events is None:
        raise ConfigError(f"worker {text!r:.200}: replay without kv_events; give both, or neither")
    return spec


def check_distinct(specs: Iterable[WorkerSpec]) -> None:
    """Raises ConfigError for two workers of one id."""
    urls: dict[str, str] = {}
    for spec in specs:
        if spec.id in urls:
            raise ConfigError(
                f"two workers have the id {spec.id!r}: {urls[spec.id]} and {spec.url}; give each its own "
                "(id=NAME)"
            )
        urls[spec.id] = spec.url


def _check_url(url: str, text: str) -> str:
    """Returns HOST:PORT. Raises ConfigError."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"worker {text!r:.200}: its URL cannot be read: {error}") from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or "@" in url:
        raise ConfigError(f"worker {text!r:.200} begins with no URL; write http://HOST:PORT or https://...")
    default = 443 if parts.scheme == "https" else 80
    return f"{host}:{port or default}{parts.path.rstrip('/').replace('/', '.')}"


def _number(values: dict[str, str], key: str, default: int, high: int, text: str) -> int:
    value = values.get(key)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= high):
        raise ConfigError(f"worker {text!r:.200}: {key} {value!r:.40} is no number from 1 to {high}")
    return int(value)


def _check_endpoint(key: str, endpoint: str, dp_size: int, text: str) -> None:
    kind, _, address = endpoint.partition("://")
    port = address.rpartition(":")[2]
    is_tcp = kind == "tcp" and port.isascii() and port.isdigit() and 0 < int(port) <= 65536 - dp_size
    if not is_tcp and not (kind == "ipc" and address and dp_size == 1):
        raise ConfigError(
            f"worker {text!r:.200}: {key} {endpoint!r:.100} is no address of ZMQ with room for {dp_size} "
            "ranks; write tcp://HOST:PORT, or ipc://PATH for one rank"
        )


def _next_port(endpoint: str, rank: int) -> str:
    if rank == 0:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def _read_key(path: str | None, text: str) -> str | None:
    if path is None:
        return None
    try:
        key = Path(path).read_text("utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"worker {text!r:.200}: api_key_file cannot be read: {error}") from None
    if not key or "\n" in key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"worker {text!r:.200}: api_key_file {path!r} holds no key; write one line")
    return key
