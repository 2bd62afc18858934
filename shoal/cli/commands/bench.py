"""`shoal bench` and `shoal profile`: measurements of an engine in this process, and of any server."""

from __future__ import annotations

import argparse
import os

from shoal.bench import serving
from shoal.bench.serving import ServeBench
from shoal.bench.vllm_options import BENCH_SERVE_OPTIONS
from shoal.cli.commands.engine_flags import add_engine_flags, add_lengths, build_llm, measured_params
from shoal.cli.output_file import PLOT_EXTRA, check_writable
from shoal.options.parser import Commands, Parser, given_options, integer

PROFILE_DESCRIPTION = "Runs a batch and traces it for ui.perfetto.dev: steps, kernels and host work by name."


def add_bench(commands: Commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure throughput or latency",
        description="Benchmarks of the engine, offline, and of any server.",
    )
    kinds = bench.add_commands("kinds", "KIND")
    throughput = kinds.add_parser(
        "throughput", help="many requests at once", description="Many requests at once: tokens a second."
    )
    throughput.add_argument(
        "--num-prompts", type=integer, metavar="N", default=16, help="requests (default: 16)"
    )
    throughput.set_defaults(batch_flag="num_prompts")
    latency = kinds.add_parser(
        "latency", help="one batch, several times", description="One batch, several times: ms a token."
    )
    _add_batch_size(latency)
    latency.set_defaults(batch_flag="batch_size")
    for kind in (throughput, latency):
        add_lengths(kind, output_len=128)
        kind.add_argument(
            "--num-iters",
            type=integer,
            metavar="N",
            default=3,
            help="timed repetitions after one warm-up (default: 3)",
        )
        kind.add_argument("--output-json", metavar="FILE", help="file to write the figures to")
        add_engine_flags(kind, run_bench)
    _add_bench_serve(kinds)


def _add_bench_serve(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "serve",
        help="any server under load",
        description="TTFT, ITL and throughput of any OpenAI-compatible server under Poisson load.",
    )
    parser.add_argument("--save-result", action="store_true", help="write the figures to --result-filename")
    parser.add_argument(
        "--result-filename",
        metavar="FILE",
        default="bench-serve.json",
        help="file of the figures (default: bench-serve.json)",
    )
    parser.add_argument("--plot", metavar="FILE", help=f"PNG file to draw; {PLOT_EXTRA}")
    parser.add_flags(ServeBench, "load")
    parser.add_vllm_options(BENCH_SERVE_OPTIONS)
    # vLLM's, in place of --base-url and of a path in --result-filename
    for flag in ("--host", "--port", "--result-dir"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.set_defaults(run=run_bench_serve)


def add_profile(commands: Commands) -> None:
    parser = commands.add_parser(
        "profile", help="write a trace for Perfetto", description=PROFILE_DESCRIPTION
    )
    _add_batch_size(parser)
    add_lengths(parser, output_len=16)
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        default="shoal-traces",
        help="folder of the traces, one per rank (default: shoal-traces)",
    )
    add_engine_flags(parser, run_profile)


def _add_batch_size(parser: Parser) -> None:
    parser.add_argument(
        "--batch-size", type=integer, metavar="N", default=1, help="requests in the batch (default: 1)"
    )


def run_bench(arguments: argparse.Namespace) -> int:
    check_writable("output_json", arguments.output_json)
    from shoal.bench.offline import measure

    with build_llm(arguments) as llm:
        measure(
            llm,
            measured_params(arguments),
            getattr(arguments, arguments.batch_flag),
            arguments.input_len,
            arguments.num_iters,
            arguments.output_json,
        )
    return 0


def run_bench_serve(arguments: argparse.Namespace) -> int:
    """Returns 1 if no request succeeded."""
    given = given_options(arguments, ServeBench)
    if arguments.host or arguments.port:
        given.setdefault("base_url", f"http://{arguments.host or '127.0.0.1'}:{arguments.port or 8000}")
    bench = ServeBench(**given)
    path = os.path.join(arguments.result_dir or "", arguments.result_filename)
    result_file = path if arguments.save_result else None
    check_writable("result_filename", result_file)
    check_writable("plot", arguments.plot)
    result = serving.command(bench, result_file, arguments.plot)
    return 0 if result["completed"] else 1


def run_profile(arguments: argparse.Namespace) -> int:
    from shoal.bench.offline import trace

    with build_llm(arguments) as llm:
        trace(
            llm, measured_params(arguments), arguments.batch_size, arguments.input_len, arguments.output_dir
        )
    return 0
