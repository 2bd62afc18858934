"""`shoal fleet up`: a router and its workers, from one file."""

from __future__ import annotations

import argparse

from shoal.errors import ConfigError
from shoal.options.parser import Commands

DESCRIPTION = """A router and its workers, all from one file (fleet up FILE). Workers that die are started
again. Ctrl-C lets running requests end, then the workers; a second one ends all at once."""


def add_fleet(commands: Commands) -> None:
    fleet = commands.add_parser("fleet", help="many workers at once", description=DESCRIPTION)
    up = fleet.add_commands().add_parser("up", help="start a fleet", description=DESCRIPTION)
    up.add_argument("file", metavar="FILE", help="TOML file of the fleet; docs/fleet.md explains it")
    up.add_argument(
        "--state-dir",
        metavar="DIR",
        help="folder of what runs, with a folder in it for each FILE (default: $XDG_STATE_HOME/shoal)",
    )
    up.add_argument("--on", choices=("ray",), help="where the fleet runs; default: on this host")
    up.add_argument(
        "--address",
        metavar="ADDRESS",
        help="address of the Ray cluster: HOST:PORT, ray://HOST:PORT, or local for a new one on this host; "
        "default: RAY_ADDRESS, or the one that runs here",
    )
    up.add_argument("--verbose", action="store_true", help="log more")
    up.set_defaults(run=run_fleet_up)


def run_fleet_up(arguments: argparse.Namespace) -> int:
    """Returns 0 after a signal and a drain; 1 if a second signal ended the fleet, or if no worker could
    be started."""
    if arguments.on == "ray":
        if arguments.state_dir is not None:
            raise ConfigError(
                f"--state-dir {arguments.state_dir!r} is for a fleet on one host; a fleet on Ray keeps no "
                "state in files, leave it out"
            )
        try:
            from shoal.apps.fleet_ray import fleet_up_on_ray
        except ModuleNotFoundError as error:
            raise ConfigError(f"--on ray needs Ray ({error}): pip install 'shoal[ray]'") from None

        return fleet_up_on_ray(arguments.file, arguments.address, arguments.verbose)
    from shoal.apps.fleet import fleet_up

    if arguments.address is not None:
        raise ConfigError(
            f"--address {arguments.address!r} is for a Ray cluster; add --on ray, or leave it out"
        )
    return fleet_up(arguments.file, arguments.state_dir, arguments.verbose)
