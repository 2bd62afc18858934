"""`shoal doctor`: what works on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.options.parser import Commands, integer

DESCRIPTION = """Examines this machine and says what works, what will not, and what to do about it: GPU,
driver, libraries, limits, folders, ports. With FILE, a fleet's TOML file, it examines what that fleet needs.
The exit code is 1 if something that was asked for will not work."""
NAMES = ("model", "device", "port", "plane", "fleet_key_file")


def add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor", help="what works on this machine, and what to do", description=DESCRIPTION
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="TOML file of a fleet that is to run here")
    absent: dict[str, Any] = {"default": argparse.SUPPRESS}
    parser.add_argument("--model", metavar="MODEL", help="model to be served", **absent)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="device to run it on", **absent)
    parser.add_argument("--port", type=integer, metavar="N", help="port to serve it on", **absent)
    parser.add_argument("--plane", metavar="URL", help="plane of a fleet to join", **absent)
    parser.add_argument("--fleet-key-file", metavar="FILE", help="key of that fleet", **absent)
    parser.add_argument(
        "--all", action="store_true", help="also explain what is missing and was not asked for"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    from shoal.cli.doctor import doctor

    given = {name: getattr(arguments, name) for name in NAMES if hasattr(arguments, name)}
    return doctor(arguments.file, given, arguments.json, arguments.all)
