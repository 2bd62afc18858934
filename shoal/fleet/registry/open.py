"""`open_registry`: opens the registry that a `--plane` URL names, after `check_plane` has checked it. tcp://
and ipc:// open an EmbeddedRegistry (embedded.py), nats:// and tls:// a NatsRegistry (nats.py)."""

from __future__ import annotations

from random import SystemRandom
from urllib.parse import urlsplit

from shoal.errors import ConfigError
from shoal.fleet.clock import Clock, LoopClock
from shoal.fleet.key import FleetKey
from shoal.fleet.registry.embedded import EmbeddedRegistry, check_address
from shoal.fleet.registry.registry import LEASE_S, Registry
from shoal.hosts import is_loopback

EMBEDDED = ("tcp://", "ipc://")
NATS = ("nats://", "tls://")


def open_registry(
    url: str,
    *,
    lease_s: float = LEASE_S,
    may_host: bool = False,
    credentials_file: str | None = None,
    key: FleetKey | None = None,
    clock: Clock | None = None,
) -> Registry:
    """Opens `tcp://127.0.0.1:PORT` or `ipc:///PATH`, the embedded registry, in the first process that may
    host it; or `nats://...` (servers separated by commas), with user and password or a token in the URL, or
    `credentials_file` (.creds). `key`: processes without it cannot take part. Raises ConfigError for another
    URL, and for one beyond this machine without a key. It needs a running event loop, and does not wait until
    the registry is reached: the calls on it do.
    """
    check_plane(url, key)
    clock, random = clock or LoopClock(), SystemRandom()
    if url.startswith(NATS):
        try:
            from shoal.fleet.registry.nats import NatsRegistry
        except ModuleNotFoundError as error:
            raise ConfigError(f"plane {url!r} needs nats-py ({error}): pip install 'shoal[nats]'") from None

        return NatsRegistry.open(url, clock, random, lease_s, credentials_file, key)
    if credentials_file:
        raise ConfigError(
            f"credentials_file must be left out for plane {url!r}, got {credentials_file!r}; it is for NATS"
        )
    return EmbeddedRegistry.open(url, clock, random, lease_s, may_host, key)


def check_plane(urls: str, key: FleetKey | None) -> None:
    """Raises ConfigError for a `--plane` that is not a registry's URL, and for one that other hosts can
    reach, without a key."""
    if not urls.startswith((*EMBEDDED, *NATS)):
        known = ", ".join(f"{scheme}..." for scheme in EMBEDDED)
        raise ConfigError(f"plane must be {known} or {NATS[0]}..., got {urls!r}")
    if urls.startswith(EMBEDDED):
        check_address(urls)
        return
    for url in urls.split(","):
        try:
            host = urlsplit(url).hostname or ""
        except ValueError:
            raise ConfigError(
                f"plane must be the URL of a NATS server, nats://HOST:4222, got {url!r}"
            ) from None
        if key is None and not is_loopback(host):
            raise ConfigError(
                f"plane must be on this machine without a key, got {url!r}: others could join the fleet and "
                "give orders to its workers; give all processes of the fleet one key with --fleet-key-file"
            )
