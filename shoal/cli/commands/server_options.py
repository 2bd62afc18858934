"""Options of ServerConfig on a command line, in vLLM's spellings, too."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shoal.config import ServerConfig
from shoal.errors import ConfigError
from shoal.options.parser import given_options

JSON_LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")  # vLLM writes them so


def server_options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = given_options(arguments, ServerConfig)
    for name in JSON_LISTS:
        if len(values := given.get(name, ())) == 1 and values[0].startswith("["):
            given[name] = _json_list(name, values[0])
    return given


def _json_list(name: str, text: str) -> list[str]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ConfigError(
            f"{name} must be a JSON list of strings, got {text!r:.80}; give one, or the values one after "
            "the other"
        )
    return values
