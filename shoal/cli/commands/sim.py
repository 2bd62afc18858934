"""`shoal sim`: a simulated fleet under a trace."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from shoal.bench import serving
from shoal.cli.output_file import PLOT_EXTRA, check_writable
from shoal.errors import ConfigError
from shoal.options.parser import Commands, integer

DESCRIPTION = """Simulates a fleet under a trace: the router's own code over simulated workers, on a virtual
clock. No GPU and no model is needed. FILE is a fleet's TOML file with a table [sim]; docs/simulator.md
explains it."""


def add_sim(commands: Commands) -> None:
    parser = commands.add_parser("sim", help="simulate a fleet under a trace", description=DESCRIPTION)
    parser.add_argument("file", metavar="FILE", help="TOML file of the fleet")
    parser.add_argument(
        "--trace", metavar="JSONL", required=True, help="requests, one per line, in Mooncake's format"
    )
    parser.add_argument("--policy", metavar="P", help="routing policy (default: the file's, or kv)")
    parser.add_argument("--workers", type=integer, metavar="N", help="number of workers; overrides the file")
    parser.add_argument(
        "--seed", type=integer, metavar="N", help="seed of random choices (default: the file's, or 0)"
    )
    parser.add_argument("--planner", metavar="MODE", help="size the fleet as the load changes: load, sla")
    parser.add_argument("--max-gpu-budget", type=integer, metavar="N", help="GPUs that the planner may use")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help=f"PNG file for a drawing of load, workers and waits over time; {PLOT_EXTRA}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_sim)


def run_sim(arguments: argparse.Namespace) -> int:
    from shoal.fleet.simulator.config import read_sim_config
    from shoal.fleet.simulator.simulator import Simulation
    from shoal.fleet.simulator.trace import read_trace

    planner: dict[str, Any] = {}
    if arguments.planner is not None:
        planner |= {"enabled": True, "mode": arguments.planner}
    if arguments.max_gpu_budget is not None:
        planner["max_gpu_budget"] = arguments.max_gpu_budget
    config = read_sim_config(
        arguments.file,
        policy=arguments.policy,
        num_workers=arguments.workers,
        seed=arguments.seed,
        planner=planner,
    )
    if arguments.max_gpu_budget is not None and not config.planner.enabled:
        raise ConfigError(
            f"--max-gpu-budget {arguments.max_gpu_budget} is for a planner, and none is enabled; add "
            "--planner load or --planner sla"
        )
    check_writable("plot", arguments.plot)
    if arguments.plot is not None:
        serving.import_figure()  # before the simulation, which may take long
    simulation = Simulation(config, read_trace(arguments.trace, config.block_size))
    result = simulation.run()
    print(json.dumps(dataclasses.asdict(result)) if arguments.json else result.table())
    if arguments.plot is not None:
        from shoal.bench.simulated import plot

        plot(simulation, arguments.plot)
    return 0
