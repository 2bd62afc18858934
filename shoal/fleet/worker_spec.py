"""`WorkerSpec`: an external worker as written on the command line, `URL,key=value,...`."""

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
    """`url` has no slash at its end. `kv_events` and `replay` are the addresses of rank 0; each further rank
    has the next port."""

    url: str
    id: str
    tags: frozenset[str] = frozenset()
    kv_events: str | None = None
    replay: str | None = None
    topic: str = ""
    block_size: int = DEFAULT_BLOCK_SIZE
    dp_size: int | None = None  # None: learned from KV events
    api_key: str | None = field(default=None, repr=False)

    def info(self) -> WorkerInfo:
        """Returns the facts known before the worker has answered."""
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
        """Returns for each rank the addresses of its KV events and of their replay; [] without events."""
        if self.kv_events is None:
            return []
        return [
            (_next_port(self.kv_events, rank), None if self.replay is None else _next_port(self.replay, rank))
            for rank in range(self.dp_size or 1)
        ]


def parse_worker(text: str, block_size: int = DEFAULT_BLOCK_SIZE) -> WorkerSpec:
    """Reads `http://127.0.0.1:9002,kv_events=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5558,id=b,tag=x`.

    `tag` may be repeated. `block_size` is the default for the key of this name. Raises ConfigError that names
    the key, also for an api_key_file that cannot be read."""
    url, *entries = text.strip().split(",")
    values: dict[str, str] = {}
    tags = set()
    for entry in entries:
        key, equals, value = entry.strip().partition("=")
        check_keys([key], KEYS, f"worker {text!r:.200}")
        if not equals or not value:
            raise ConfigError(f"worker {text!r:.200}: {key} must have a value; write {key}=VALUE")
        if key == "tag":
            tags.add(value)
        elif key in values:
            raise ConfigError(f"worker {text!r:.200}: {key} must be given once, got two values")
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
            f"worker {text!r:.200}: id must be up to 100 letters, digits and any of -_.:, got "
            f"{spec.id!r:.100}"
        )
    for key, endpoint in (("kv_events", spec.kv_events), ("replay", spec.replay)):
        if endpoint is not None:
            _check_endpoint(key, endpoint, spec.dp_size or 1, text)
    if spec.replay is not None and spec.kv_events is None:
        raise ConfigError(f"worker {text!r:.200}: replay needs kv_events; give both, or neither")
    return spec


def check_distinct(specs: Iterable[WorkerSpec]) -> None:
    """Raises ConfigError for two workers with one id."""
    urls: dict[str, str] = {}
    for spec in specs:
        if spec.id in urls:
            raise ConfigError(
                f"the id of a worker must be its own, got {spec.id!r} for {urls[spec.id]} and {spec.url}; "
                "give one of them another (id=NAME)"
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
        raise ConfigError(
            f"worker {text!r:.200} must begin with a URL; write http://HOST:PORT or https://..."
        )
    default = 443 if parts.scheme == "https" else 80
    return f"{host}:{port or default}{parts.path.rstrip('/').replace('/', '.')}"


def _number(values: dict[str, str], key: str, default: int, high: int, text: str) -> int:
    value = values.get(key)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= high):
        raise ConfigError(f"worker {text!r:.200}: {key} must be from 1 to {high}, got {value!r:.40}")
    return int(value)


def _check_endpoint(key: str, endpoint: str, dp_size: int, text: str) -> None:
    kind, _, address = endpoint.partition("://")
    port = address.rpartition(":")[2]
    is_tcp = kind == "tcp" and port.isascii() and port.isdigit() and 0 < int(port) <= 65536 - dp_size
    if not is_tcp and not (kind == "ipc" and address and dp_size == 1):
        raise ConfigError(
            f"worker {text!r:.200}: {key} must be a ZMQ address with a port for each of {dp_size} ranks, got "
            f"{endpoint!r:.100}; write tcp://HOST:PORT, or ipc://PATH for one rank"
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
        raise ConfigError(f"worker {text!r:.200}: api_key_file must hold one line with a key, got {path!r}")
    return key
