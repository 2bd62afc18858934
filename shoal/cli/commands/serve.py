"""`shoal serve`: one model, or several that take turns, over HTTP."""

from __future__ import annotations

import argparse
import logging

from shoal.cli.commands.engine_flags import MODEL_HELP
from shoal.cli.commands.server_options import server_options
from shoal.config import DEFAULT_MODEL, EngineConfig, ServerConfig
from shoal.errors import ConfigError
from shoal.options.parser import Commands, flag_of, given_options, warn_of_ignored
from shoal.options.vllm import ALL_OPTIONS
from shoal.telemetry import logs

DESCRIPTION = """An OpenAI-compatible server. SIGTERM or Ctrl-C lets running requests end, within
--shutdown-timeout; a second signal ends it at once. Command lines of vllm serve are understood. If the
engine's process dies the server stays up: its requests fail, /health is 503, and with --restart the engine
comes back."""


def add_serve(commands: Commands) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP", description=DESCRIPTION)
    parser.add_argument("model_path", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        dest="models",
        metavar="NAME=MODEL",
        help="one of several models, with --swap",
    )
    parser.add_argument("--verbose", action="store_true", help="log more")
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file of these options; the command line takes precedence",
    )
    parser.add_flags(ServerConfig, "server")
    parser.add_flags(EngineConfig, "engine", but=("model",))
    parser.add_vllm_options(ALL_OPTIONS)
    parser.set_defaults(run=run_serve)


def run_serve(arguments: argparse.Namespace) -> int:
    """Returns 0 after SIGTERM, SIGINT or SIGHUP and a drain; 1 if a second signal ended the server, or if it
    could not start."""
    from shoal.apps.serve import serve

    if arguments.model_path is None and not arguments.models:
        _check_lists(arguments)
    given = server_options(arguments)
    if "plane" in given:  # workers of one host need no different --port
        given.setdefault("port", 0)
    config = ServerConfig(**given)
    logs.set_up(logging.DEBUG if arguments.verbose else logging.INFO, config.log_format)
    warn_of_ignored(arguments.ignored)  # here, as the log has its format only now
    return serve(arguments.model_path, arguments.models, given_options(arguments, EngineConfig), config)


def _check_lists(arguments: argparse.Namespace) -> None:
    """Raises ConfigError if the last value of an option with several values, such as --api-key, may be MODEL.
    A key may look like a hub's model by chance, and must not be shown."""
    from shoal.weights.source import is_model_here, is_model_name

    for name, values in vars(arguments).items():
        if isinstance(values, list) and len(values) > 1:
            last, is_key = str(values[-1]), name == "api_key"
            if is_model_here(last) if is_key else is_model_name(last):
                what = "a last value" if is_key else repr(last)[:200]
                raise ConfigError(
                    f"{flag_of(name)} has taken {what}, which may be the model; name the model (the default "
                    f"is {DEFAULT_MODEL}) before the options, or after `--`"
                )
