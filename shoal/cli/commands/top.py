"""`shoal top`: a server or a fleet in a terminal."""

from __future__ import annotations

import argparse

from shoal.cli.address import API_KEY_HELP, server_key
from shoal.options.parser import Commands

DESCRIPTION = """Shows a router with its workers, or a single server: their load, how full the KV caches are,
tokens per second, what waits and what the planner decided. Enter opens a worker; q ends. The dashboard of the
same server (/dashboard) shows the same in a browser."""
DEFAULT_URL = "http://127.0.0.1:8000"


def add_top(commands: Commands) -> None:
    parser = commands.add_parser("top", help="watch a server or a fleet", description=DESCRIPTION)
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        default=DEFAULT_URL,
        help=f"address of a router or a server (default: {DEFAULT_URL})",
    )
    parser.add_argument("--api-key", metavar="KEY", help=API_KEY_HELP)
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.set_defaults(run=run_top)


def run_top(arguments: argparse.Namespace) -> int:
    from shoal.cli.top import top

    return top(arguments.url, server_key(arguments.api_key), arguments.once)
