"""Opens the plane that a URL names."""

from __future__ import annotations

import random as random_module
from random import Random
from urllib.parse import urlsplit

from shoal.errors import ConfigError
from shoal.fleet.clock import Clock, LoopClock
from shoal.fleet.key import FleetKey, is_loopback
from shoal.fleet.registry.embedded import EmbeddedPlane, check_address
from shoal.fleet.registry.registry import LEASE_S, Plane

EMBEDDED = ("tcp://", "ipc://")
NATS = ("nats://", "tls://")


def open_plane(
    url: str,
    *,
    lease_s: float = LEASE_S,
    may_host: bool = False,
    credentials_file: str | None = None,
    key: FleetKey | None = None,
    clock: Clock | None = None,
    random: Random | None = None,
) -> Plane:
    """`tcp://127.0.0.1:PORT` and `ipc:///PATH`: embedded, in the first process that may host it. `nats://...`
    (servers apart by commas): NATS, with user and password or a token in the URL, or `credentials_file`
    (.creds). `key` keeps out who does not have it. Raises ConfigError for another URL, and for one beyond
    this machine without a key. It needs a running event loop, and does not wait for the plane to be there:
    what is called on it does.
    """
    check_plane(url, key)
    clock, random = clock or LoopClock(), random or random_module.SystemRandom()
    if url.startswith(NATS):
        try:
            from shoal.fleet.registry.nats import NatsPlane
        except ModuleNotFoundError as error:
            raise ConfigError(f"plane {url!r} needs nats-py ({error}): pip install 'shoal[nats]'") from None

        return NatsPlane.open(url, clock, random, lease_s, credentials_file, key)
    if credentials_file:
        raise ConfigError(f"plane {url!r} takes no credentials_file: only NATS has such files")
    return EmbeddedPlane.open(url, clock, random, lease_s, may_host, key)


def check_plane(urls: str, key: FleetKey | None) -> None:
    """Raises ConfigError for what is no URL of a plane, and for a plane that strangers can reach, without a
    key."""
    if not urls.startswith((*EMBEDDED, *NATS)):
        known = ", ".join(f"{scheme}..." for scheme in (*EMBEDDED, NATS[0]))
        raise ConfigError(f"plane {urls!r} is none of {known}")
    if urls.startswith(EMBEDDED):
        check_address(urls)
        return
    for url in urls.split(","):
        try:
            host = urlsplit(url).hostname or ""
        except ValueError:
            raise ConfigError(f"plane {url!r} is no URL of a NATS server: nats://HOST:4222") from None
        if key is None and not is_loopback(host):
            raise ConfigError(
                f"plane {url!r} lies beyond this machine, where others could join the fleet and give orders "
                "to its workers; give all processes of the fleet one key with --fleet-key-file"
            )
