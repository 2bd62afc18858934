"""The fleet key: a secret that all processes of one fleet share, in a file (`--fleet-key-file`).

ZMQ sockets use it as CURVE: one key pair is derived from it, a server shows that it has the pair and lets in
who has it, and all that is sent is encrypted. So who does not have the file can neither read nor send. On
NATS, whose server is none of ours, each payload is sealed with a tag (HMAC) that only holders of the key can
make; who should not read either is kept out by TLS.
"""

from __future__ import annotations

import codecs
import hashlib
import hmac
import ipaddress
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from shoal.errors import ConfigError

MIN_CHARACTERS = 16
TAG_BYTES = 32
DOMAIN = "fleet"  # what libzmq asks the authenticator about


class FleetKey:
    def __init__(self, secret: bytes) -> None:
        self._curve_secret = z85.encode(_derive(secret, b"curve"))
        self._curve_public = zmq.curve_public(self._curve_secret)
        self._seal_key = _derive(secret, b"seal")

    @classmethod
    def read(cls, path: str | None) -> FleetKey | None:
        """None for no path. Raises ConfigError as read_secret does."""
        return None if path is None else cls(read_secret(path))

    # ZMQ

    def protect_server(self, socket: zmq.Socket[Any]) -> None:
        """Before the socket is bound. Its context needs `let_in`, or it lets nobody in."""
        socket.curve_secretkey, socket.curve_publickey = self._curve_secret, self._curve_public
        socket.curve_server = True
        socket.zap_domain = DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def protect_client(self, socket: zmq.Socket[Any]) -> None:
        """Before the socket is connected. It takes no server but one with this key."""
        socket.curve_secretkey, socket.curve_publickey = self._curve_secret, self._curve_public
        socket.curve_serverkey = self._curve_public

    def let_in(self, context: zmq.Context[Any]) -> ThreadAuthenticator:
        """Decides for the servers of this context who may connect, until it is stopped. libzmq asks one such
        thread for each context."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(DOMAIN, _Holders(self._curve_public))
        return authenticator

    # Payloads

    def seal(self, subject: str, payload: bytes) -> bytes:
        """The payload with its tag. It is readable, and it counts under this subject alone."""
        return self._tag(subject, payload) + payload

    def unseal(self, subject: str, sealed: bytes) -> bytes | None:
        """The payload; None if nobody with the key has sealed it for this subject."""
        tag, payload = sealed[:TAG_BYTES], sealed[TAG_BYTES:]
        return payload if hmac.compare_digest(tag, self._tag(subject, payload)) else None

    def _tag(self, subject: str, payload: bytes) -> bytes:
        digest = hmac.new(self._seal_key, subject.encode() + b"\0", hashlib.sha256)
        digest.update(payload)
        return digest.digest()


def read_secret(path: str) -> bytes:
    """What the file holds. Raises ConfigError for one that cannot be read or holds too short a key."""
    try:
        secret = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).strip()
    except OSError as error:
        raise ConfigError(
            f"fleet_key_file {path!r} cannot be read: {error}; make one with: openssl rand -hex 32"
        ) from None
    if len(secret) < MIN_CHARACTERS:
        raise ConfigError(
            f"fleet_key_file {path!r} holds {len(secret)} characters, and a key has at least "
            f"{MIN_CHARACTERS}; make one with: openssl rand -hex 32"
        )
    return secret


class _Holders:
    """Those who have the derived key pair."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=32, person=b"shoal-" + purpose).digest()


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the host. An IPv6 address may be in brackets."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
