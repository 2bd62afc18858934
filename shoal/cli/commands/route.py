"""`shoal route`: one endpoint for many workers."""

from __future__ import annotations

import argparse
import dataclasses
import logging

from shoal.cli.commands.server_options import server_options
from shoal.config import ServerConfig
from shoal.fleet.config import NO_ROUTER_OPTIONS, REMOVED_OPTIONS, FleetConfig
from shoal.options.parser import Commands, given_options
from shoal.telemetry import logs

DESCRIPTION = """A router: one OpenAI-compatible endpoint for many workers. Each request goes to the worker
with the best mix of a long cached prefix and little load. Workers are any servers with OpenAI's API
(--worker), and Shoal's own, which join by themselves (shoal serve --plane). SIGTERM or Ctrl-C lets running
requests end."""


def add_route(commands: Commands) -> None:
    parser = commands.add_parser("route", help="one endpoint for many workers", description=DESCRIPTION)
    parser.add_argument("--verbose", action="store_true", help="log more")
    parser.add_flags(FleetConfig, "router", but=("worker",))
    [worker] = [field for field in dataclasses.fields(FleetConfig) if field.name == "worker"]
    parser.add_argument(
        "--worker",
        action="append",
        default=argparse.SUPPRESS,
        metavar="URL[,KEY=VALUE...]",
        help=worker.metadata["help"],
    )
    parser.add_flags(ServerConfig, "server", but=NO_ROUTER_OPTIONS)
    parser.removed |= REMOVED_OPTIONS
    parser.set_defaults(run=run_route)


def run_route(arguments: argparse.Namespace) -> int:
    """Returns 0 after a signal and a drain; 1 if a second signal ended the router, or if it could not
    start."""
    from shoal.apps.route import route

    given = server_options(arguments)
    server = ServerConfig(**{name: given[name] for name in given if name not in NO_ROUTER_OPTIONS})
    logs.set_up(logging.DEBUG if arguments.verbose else logging.INFO, server.log_format)
    return route(FleetConfig(**given_options(arguments, FleetConfig)), server)
