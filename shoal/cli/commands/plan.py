"""`shoal plan`: sizes a fleet, measures a worker (--profile), or decides again from a record (--replay)."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shoal.bench import serving
from shoal.cli.output_file import PLOT_EXTRA, check_writable
from shoal.config import EngineConfig
from shoal.errors import ConfigError
from shoal.fleet.planner.engine_profile import PROFILE_LENGTHS, PROFILE_USAGES, ProfileData
from shoal.options.parser import Commands, Parser, flag_of, given_options, integer
from shoal.options.vllm import EARLIER_OPTIONS, ENGINE_OPTIONS

DESCRIPTION = """With FILE, sizes the running fleet of that file (shoal fleet up FILE) as its load changes, in
a process of its own; the fleet serves on without it. With --profile, measures what one worker with these
options of the engine can do, for a planner with targets of latency ([planner] mode = "sla"). With --replay,
decides again what a planner decided, from the observations in its record ([planner] record), and prints the
decisions as JSON lines; with other settings it shows what these would have done."""
FORM_OF = {  # the form of the command to which an option belongs
    "fleet": "replay",
    "output": "profile",
    "plot": "profile",
    "gpu": "profile",
    "state_dir": "file",
    "no_operation": "file",
}


def add_plan(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan", help="size a fleet, measure a worker, or replay a planner", description=DESCRIPTION
    )
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("file", nargs="?", metavar="FILE", help="size the fleet of this TOML file")
    form.add_argument("--replay", metavar="FILE", help="decide again from this record, JSON lines")
    form.add_argument("--profile", metavar="MODEL", help="measure: folder, .gguf file, hub id or URL")
    parser.add_argument(
        "--fleet",
        metavar="FILE",
        help="TOML file of a fleet whose [planner] decides (default: the record's settings)",
    )
    parser.add_argument(
        "--state-dir", metavar="DIR", help="state folder of shoal fleet up (default: $XDG_STATE_HOME/shoal)"
    )
    parser.add_argument(
        "--no-operation", action="store_true", help="advise, and change nothing, whatever FILE says"
    )
    parser.add_argument("--verbose", action="store_true", help="log more")
    _add_profile_flags(parser)
    parser.add_flags(EngineConfig, "engine", but=("model",))
    parser.add_vllm_options((*ENGINE_OPTIONS, *EARLIER_OPTIONS))
    parser.set_defaults(run=run_plan)


def _add_profile_flags(parser: Parser) -> None:
    lists: Any = {"nargs": "+", "metavar": "N"}
    parser.add_argument("--output", metavar="FILE", help="JSON file to write the profile to")
    parser.add_argument("--plot", metavar="FILE", help=f"PNG file to draw the profile into; {PLOT_EXTRA}")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="measure nothing: take the simulator's times of this GPU and a published MODEL",
    )
    parser.add_argument(
        "--input-lengths",
        type=integer,
        default=PROFILE_LENGTHS,
        help="prompt tokens, for the time to the first token (default: 128 to 32768, as far as there is "
        "room)",
        **lists,
    )
    parser.add_argument(
        "--context-lengths",
        type=integer,
        default=PROFILE_LENGTHS,
        help="context tokens, for the time between tokens (default: 128 to 32768, as far as there is room)",
        **lists,
    )
    parser.add_argument(
        "--kv-usages",
        type=float,
        default=PROFILE_USAGES,
        help="shares of the KV cache that are full then, from 0 to 1 (default: 0.01 to 0.95)",
        **lists,
    )


def run_plan(arguments: argparse.Namespace) -> int:
    for name, form in FORM_OF.items():
        if getattr(arguments, name) not in (None, False) and getattr(arguments, form) is None:
            where = "FILE" if form == "file" else f"--{form}"
            given = "" if name == "no_operation" else f" {getattr(arguments, name)!r}"
            raise ConfigError(f"{flag_of(name)}{given} goes with {where} only; leave it out")
    if arguments.file is not None:
        from shoal.apps.plan import plan_fleet

        return plan_fleet(
            arguments.file, arguments.state_dir, arguments.verbose, no_operation=arguments.no_operation
        )
    return _replay(arguments) if arguments.profile is None else _measure_worker(arguments)


def _replay(arguments: argparse.Namespace) -> int:
    import msgspec

    from shoal.fleet.file.fleet_file import read_fleet_file
    from shoal.fleet.planner.planner import replay

    config = None if arguments.fleet is None else read_fleet_file(arguments.fleet).planner
    try:
        lines = open(arguments.replay, "rb")  # noqa: SIM115 - errors below are not about this file
    except OSError as error:
        raise ConfigError(f"--replay {arguments.replay!r} cannot be read: {error}") from None
    with lines:
        for entry in replay(config, lines):
            print(json.dumps(msgspec.to_builtins(entry)))
    return 0


def _measure_worker(arguments: argparse.Namespace) -> int:
    from shoal.bench.worker_profile import measure_profile, plot, table
    from shoal.fleet.planner.engine_profile import write_profile

    for name in ("input_lengths", "context_lengths"):
        if (least := min(getattr(arguments, name))) < 1:
            raise ConfigError(f"{flag_of(name)} must be >= 1, got {least}; give numbers of tokens")
    if wrong := [usage for usage in arguments.kv_usages if not 0 < usage <= 1]:
        raise ConfigError(f"--kv-usages must be in (0, 1], got {wrong[0]:g}; give shares of the cache")
    for name in ("output", "plot"):
        check_writable(name, getattr(arguments, name))
    if arguments.plot is not None:
        serving.import_figure()  # before the measurement, which may take long
    given = given_options(arguments, EngineConfig)
    if arguments.gpu is not None:
        data = _simulated_profile(arguments, given)
    else:
        from shoal.engine.llm import LLM

        with LLM(arguments.profile, **given) as llm:
            data = measure_profile(
                llm, arguments.input_lengths, arguments.context_lengths, arguments.kv_usages
            )
    print(table(data))
    if arguments.output is not None:
        write_profile(arguments.output, data)
    if arguments.plot is not None:
        plot(data, arguments.plot)
    return 0


def _simulated_profile(arguments: argparse.Namespace, given: dict[str, Any]) -> ProfileData:
    """Raises ConfigError for an option that simulated times do not depend on, and if too few points have room
    for a profile."""
    from shoal.fleet.planner.engine_profile import check_profile, with_room
    from shoal.fleet.simulator.config import SimWorkers
    from shoal.fleet.simulator.timing import find_timing, profile_of

    timed = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
    for name, value in given.items():
        if name not in (*timed, "kv_cache_memory_bytes", "num_gpu_blocks_override", "block_size"):
            raise ConfigError(
                f"{flag_of(name)} {value!r} changes nothing with --gpu {arguments.gpu}, whose times are the "
                "simulator's; leave it out, or measure on such a GPU"
            )
    worker = SimWorkers(**{name: given[name] for name in timed if name in given})
    config = EngineConfig(model=arguments.profile, **given)
    timing = find_timing(arguments.gpu, arguments.profile)
    if config.num_gpu_blocks_override is not None:
        tokens = config.num_gpu_blocks_override * config.block_size
    elif config.kv_cache_memory_bytes is not None:
        tokens = config.kv_cache_memory_bytes // timing.kv_bytes
    else:
        tokens = timing.cache_tokens(worker.gpu_memory_utilization)
    input_lengths, context_lengths = with_room(arguments.input_lengths, arguments.context_lengths, tokens)
    data = profile_of(
        arguments.gpu,
        arguments.profile,
        worker.max_num_seqs,
        tokens,
        worker.max_num_batched_tokens,
        input_lengths=input_lengths,
        context_lengths=context_lengths,
        kv_usages=arguments.kv_usages,
    )
    check_profile(data, arguments.kv_usages)
    return data
