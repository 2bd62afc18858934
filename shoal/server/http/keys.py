"""The API keys of a server: from options, a file, and the environment."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from shoal.config import ServerConfig
from shoal.errors import ConfigError
from shoal.hosts import is_loopback

VARIABLE = "SHOAL_API_KEY"
VLLM_VARIABLE = "VLLM_API_KEY"


class Keys:
    """The keys of a server. Falsy if it is open."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError as `read_keys` does."""
        self._digests = [_digest(key.encode()) for key in read_keys(config)]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def hold(self, given: Sequence[bytes]) -> bool:
        """Returns whether one of the client's keys is valid. All keys are compared, by their digests, so
        the time reveals nothing about any of them."""
        fits = [hmac.compare_digest(_digest(one), key) for one in given for key in self._digests]
        return any(fits)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def check_admin_port(config: ServerConfig) -> None:
    """Raises ConfigError for an admin port that is reachable from outside and has no key, and as
    `read_keys` does."""
    keys = read_keys(config)
    if config.admin_port is not None and not keys and not is_loopback(config.admin_host):
        raise ConfigError(
            f"admin_host must be a loopback address without keys, got {config.admin_host!r}: anybody could "
            "put the model to sleep or replace its weights; set --api-key or --api-key-file, or leave it out"
        )


def key_environment(config: ServerConfig) -> dict[str, str]:
    """Returns the variables with which a worker's HTTP port takes the same keys as the router's. Both are
    set, so that a worker takes no key from its parent's environment that the router does not take."""
    keys = read_keys(config)
    if not keys:
        return {}
    # VLLM_API_KEY may hold a comma, so it does not go into the list.
    whole = "" if config.api_key else os.environ.get(VLLM_VARIABLE, "").strip()
    return {VARIABLE: ",".join(key for key in keys if key != whole), VLLM_VARIABLE: whole}


def read_keys(config: ServerConfig) -> list[str]:
    """Returns all keys; none if the server is open. As in vLLM, VLLM_API_KEY is one key, commas included, and
    counts unless api_key is given. Raises ConfigError for a file that cannot be read, and for options that
    hold no key, as nobody means that."""
    given = config.api_key or [os.environ.get(VLLM_VARIABLE, "")]
    keys = [*given, *os.environ.get(VARIABLE, "").split(",")]
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"api_key_file {config.api_key_file!r} cannot be read: {error}; name a text file, one key a "
                "line"
            ) from None
        keys += lines
    keys = [key for k in keys if (key := k.strip())]
    if not keys and (config.api_key or config.api_key_file is not None):
        raise ConfigError(
            "api_key and api_key_file hold no key; write at least one, or leave both out for an open server"
        )
    return keys
