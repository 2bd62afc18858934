"""Endpoints of KV events: addresses, the limits of sockets that strangers may reach, and keys (CURVE)
that keep them out."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from shoal.config import KVEventsConfig
from shoal.errors import ConfigError

logger = logging.getLogger(__name__)

# An incoming frame is a subscription or a number. Libzmq closes connections that announce more.
MAX_FRAME_BYTES = 1024
# A TCP peer that reads nothing for this long is disconnected, and its queued messages are freed.
DEAF_MS = 30_000
LOOPBACK = ("lo", "localhost", "[::1]")


class Keys:
    """The server's key pair, and the public keys of its clients. One for each context, as ZAP, libzmq's
    protocol of authentication, asks for: a thread answers it. Raises ConfigError for files that hold no
    keys."""

    def __init__(self, context: zmq.Context[Any], secret_key_file: str, client_keys_dir: str) -> None:
        if not zmq.has("curve"):
            raise ConfigError(
                "kv_events_config.curve_secret_key_file needs a libzmq with CURVE, and this "
                "one has none; install pyzmq from its wheels, or leave the keys out"
            )
        try:
            self.public, self.secret = zmq.auth.load_certificate(secret_key_file)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"kv_events_config.curve_secret_key_file {secret_key_file!r} cannot be read: {error}"
            ) from None
        if self.secret is None:
            raise ConfigError(
                f"kv_events_config.curve_secret_key_file {secret_key_file!r} holds a public "
                "key only; name the .key_secret file that zmq.auth.create_certificates has "
                "written"
            )
        try:
            listeners = zmq.auth.load_certificates(client_keys_dir)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"kv_events_config.curve_client_keys_dir {client_keys_dir!r} cannot be read: {error}"
            ) from None
        if not listeners:
            raise ConfigError(
                f"kv_events_config.curve_client_keys_dir {client_keys_dir!r} must hold the "
                "*.key file of each listener, got a folder without any"
            )
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=client_keys_dir)

    def protect(self, socket_: zmq.Socket[bytes]) -> None:
        """Before it is bound. Who has no key that is let in does not get as far as a message."""
        socket_.curve_secretkey = self.secret
        socket_.curve_publickey = self.public
        socket_.curve_server = True

    def close(self) -> None:
        self._authenticator.stop()


def load_keys(context: zmq.Context[Any], config: KVEventsConfig) -> Keys | None:
    if config.curve_secret_key_file is None or config.curve_client_keys_dir is None:
        return None
    return Keys(context, config.curve_secret_key_file, config.curve_client_keys_dir)


def open_socket(
    context: zmq.Context[Any],
    kind: int,
    name: str,
    endpoint: str,
    keys: Keys | None,
    listens: bool,
    **options: int,
) -> zmq.Socket[bytes]:
    """Opens a socket, bound if `listens`, else connected. Raises ConfigError if the endpoint cannot be
    opened; `name` is its option."""
    opened = context.socket(kind)
    try:
        opened.maxmsgsize = MAX_FRAME_BYTES
        opened.ipv6 = "[" in endpoint
        if endpoint.startswith("tcp://"):
            opened.tcp_maxrt = DEAF_MS
        for option, value in options.items():
            setattr(opened, option, value)
        if keys is not None:
            keys.protect(opened)
        elif leaves_the_host(endpoint):
            logger.warning(
                "kv_events_config.%s %s sends every prompt, answer and cache_salt to any peer that "
                "can reach it; keep it on loopback, or give keys (curve_secret_key_file and "
                "curve_client_keys_dir)",
                name,
                endpoint,
            )
        _attach(name, endpoint, opened.bind if listens else opened.connect)
    except BaseException:
        opened.close(linger=0)
        raise
    return opened


def is_ours(endpoint: str) -> bool:
    """Says if the endpoint is bound here: vLLM's rule, and names of network interfaces ("lo"), which libzmq
    knows too."""
    if "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://"):
        return True
    return _host(endpoint) in [name for _, name in socket.if_nameindex()]


def leaves_the_host(endpoint: str) -> bool:
    host = _host(endpoint)
    return endpoint.startswith("tcp://") and host not in LOOPBACK and not host.startswith("127.")


def with_rank(endpoint: str, data_parallel_rank: int) -> str:
    """Returns a data-parallel rank's own endpoint: TCP ports count up, other addresses get a suffix."""
    if data_parallel_rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{data_parallel_rank}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + data_parallel_rank}"


def _host(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0]


def _attach(name: str, endpoint: str, attach: Callable[[str], Any]) -> None:
    """ZMQ itself would take an ipc endpoint from another process that listens there."""
    try:
        if endpoint.startswith("ipc://") and not endpoint.startswith("ipc://@"):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(endpoint.removeprefix("ipc://")) == 0:
                    raise OSError("another process listens there")
        attach(endpoint)
    except (OSError, zmq.ZMQError) as error:
        raise ConfigError(
            f"kv_events_config.{name} {endpoint!r} cannot be opened: {error}; choose another, or end "
            "the process that has it"
        ) from None
