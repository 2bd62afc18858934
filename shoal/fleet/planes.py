"""Opens the plane that a URL names."""

from __future__ import annotations

import random as random_module
from random import Random

from shoal.errors import ConfigError
from shoal.fleet.clock import Clock, LoopClock
from shoal.fleet.plane import LEASE_S, Plane
from shoal.fleet.plane_embedded import EmbeddedPlane

EMBEDDED = ("tcp://", "ipc://")
NATS = ("nats://", "tls://")


def open_plane(
    url: str,
    *,
    lease_s: float = LEASE_S,
    may_host: bool = False,
    credentials_file: str | None = None,
    clock: Clock | None = None,
    random: Random | None = None,
) -> Plane:
    """`tcp://127.0.0.1:PORT` and `ipc:///PATH`: embedded, in the first process that may host it. `nats://...`
    (servers apart by commas): NATS, with user and password or a token in the URL, or `credentials_file`
    (.creds). Raises ConfigError for another URL. It needs a running event loop, and does not wait for the
    plane to be there: what is called on it does.
    """
    clock, random = clock or LoopClock(), random or random_module.SystemRandom()
    if url.startswith(NATS):
        try:
            from shoal.fleet.plane_nats import NatsPlane
        except ModuleNotFoundError as error:
            raise ConfigError(f"plane {url!r} needs nats-py ({error}): pip install 'shoal[nats]'") from None

        return NatsPlane.open(url, clock, random, lease_s, credentials_file)
    if credentials_file:
        raise ConfigError(f"plane {url!r} takes no credentials_file: only NATS has such files")
    if not url.startswith(EMBEDDED):
        known = ", ".join(f"{scheme}..." for scheme in (*EMBEDDED, NATS[0]))
        raise ConfigError(f"plane {url!r} is none of {known}")
    return EmbeddedPlane.open(url, clock, random, lease_s, may_host)
