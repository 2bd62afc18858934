"""`FleetKey`: a secret in a file (`--fleet-key-file`) that all processes of one fleet share.

ZMQ sockets use it with CURVE: one key pair is derived from it, a server proves that it has the pair and
accepts clients that have it, and all messages are encrypted. So a process without the file can neither read
nor send. On NATS, whose server is outside the fleet, each payload is sealed with a tag (HMAC) that only
holders of the key can make; TLS keeps others from reading it.
"""

from __future__ import annotations

import codecs
import hashlib
import hmac
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from shoal.errors import ConfigError

MIN_CHARACTERS = 16
TAG_BYTES = 32
DOMAIN = "fleet"  # the ZAP domain of these sockets


class FleetKey:
    def __init__(self, secret: bytes) -> None:
        self._curve_secret = z85.encode(_derive(secret, b"curve"))
        self._curve_public = zmq.curve_public(self._curve_secret)
        self._seal_key = _derive(secret, b"seal")

    @classmethod
    def read(cls, path: str | None) -> FleetKey | None:
        """Returns None for no path. Raises ConfigError as read_secret does."""
        return None if path is None else cls(read_secret(path))

    # ZMQ

    def protect_server(self, socket: zmq.Socket[Any]) -> None:
        """Sets the keys of a server socket, before it is bound. It accepts no client unless its context has
        `authenticate`."""
        socket.curve_secretkey, socket.curve_publickey = self._curve_secret, self._curve_public
        socket.curve_server = True
        socket.zap_domain = DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def protect_client(self, socket: zmq.Socket[Any]) -> None:
        """Sets the keys of a client socket, before it connects. It accepts only a server with this key."""
        socket.curve_secretkey, socket.curve_publickey = self._curve_secret, self._curve_public
        socket.curve_serverkey = self._curve_public

    def authenticate(self, context: zmq.Context[Any]) -> ThreadAuthenticator:
        """Starts the thread that accepts clients of this context's servers, until it is stopped. libzmq uses
        one such thread per context."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(DOMAIN, _KeyCheck(self._curve_public))
        return authenticator

    # Payloads

    def seal(self, subject: str, payload: bytes) -> bytes:
        """Returns the payload with its tag, valid for this subject only. It stays readable."""
        return self._tag(subject, payload) + payload

    def unseal(self, subject: str, sealed: bytes) -> bytes | None:
        """Returns the payload; None unless it was sealed with this key for this subject."""
        tag, payload = sealed[:TAG_BYTES], sealed[TAG_BYTES:]
        return payload if hmac.compare_digest(tag, self._tag(subject, payload)) else None

    def _tag(self, subject: str, payload: bytes) -> bytes:
        digest = hmac.new(self._seal_key, subject.encode() + b"\0", hashlib.sha256)
        digest.update(payload)
        return digest.digest()


def read_secret(path: str) -> bytes:
    """Returns the key in the file. Raises ConfigError for an unreadable file or a short key."""
    try:
        secret = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).strip()
    except OSError as error:
        raise ConfigError(
            f"fleet_key_file must be readable, got {path!r}: {error}; make one with: openssl rand -hex 32"
        ) from None
    if len(secret) < MIN_CHARACTERS:
        raise ConfigError(
            f"fleet_key_file must hold at least {MIN_CHARACTERS} characters, got {len(secret)} in {path!r}; "
            "make one with: openssl rand -hex 32"
        )
    return secret


class _KeyCheck:
    """Accepts clients with the derived key pair."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=32, person=b"shoal-" + purpose).digest()
