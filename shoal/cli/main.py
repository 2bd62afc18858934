"""The `shoal` command: its parser, and what each command runs. Heavy imports happen inside commands."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from shoal import logs
from shoal.api import SamplingParams
from shoal.bench import serving
from shoal.bench.serving import ServeBench
from shoal.config import DEFAULT_MODEL, EngineConfig, ServerConfig
from shoal.errors import ConfigError, ShoalError
from shoal.fleet.engine_profile import PROFILE_LENGTHS, PROFILE_USAGES, ProfileData
from shoal.fleet.fleet_config import NOT_OF_A_ROUTER, FleetConfig
from shoal.options import SAMPLING, Parser, flag_of, given_options, integer, take_vllm_options
from shoal.version import __version__
from shoal.vllm_options import ALL_OPTIONS, EARLIER_OPTIONS, ENGINE_OPTIONS

logger = logging.getLogger(__name__)

DESCRIPTION = "A small, very fast LLM inference system."
SERVE_DESCRIPTION = """An OpenAI-compatible server. SIGTERM or Ctrl-C lets running requests end, within
--shutdown-timeout; a second signal ends it at once. Command lines of vllm serve are understood. If the
engine's process dies the server stays up: its requests fail, /health is 503, and with --restart the engine
comes back."""
ROUTE_DESCRIPTION = """A router: one OpenAI-compatible endpoint for many workers, each request going where
most of its prefix is cached and least is waiting. Workers are any servers with OpenAI's API (--worker), and
our own, which join by themselves (shoal serve --plane). SIGTERM or Ctrl-C lets running requests end."""
PLAN_DESCRIPTION = """With FILE, sizes the running fleet of that file (shoal fleet up FILE) as its load
changes, in a process of its own; the fleet serves on without it. With --profile, measures what one worker
with these options of the engine can do, for a planner with targets of latency ([planner] mode = "sla"). With
--replay, decides again what a planner decided, from the observations in its record ([planner] record), and
prints the decisions as JSON lines; with other settings it shows what these would have done."""
FLEET_DESCRIPTION = """A router and its workers, all from one file (fleet up FILE). Workers that die are
started again. Ctrl-C lets running requests end, then the workers; a second one ends all at once."""
CHAT_DESCRIPTION = "A conversation, with a model on this machine or (--url) on a server. /help explains."
MODELS_DESCRIPTION = "Lists the models in this machine's caches; `shoal models rm NAME` removes one."
PROFILE_DESCRIPTION = "Runs a batch and traces it for ui.perfetto.dev: steps, kernels and host work by name."
COMPLETION_DESCRIPTION = """Prints a script that completes this command. bash: eval "$(shoal completion bash)"
in ~/.bashrc; zsh: shoal completion zsh > a file _shoal in a folder of $fpath; fish: shoal completion fish >
~/.config/fish/completions/shoal.fish"""
COMPILE_DESCRIPTION = """Compiles what a model needs on this machine, so that its next start does not. With
--compile-cache it is put there, too, for other machines of this kind. Weights are random, so nothing is
downloaded (except a GGUF model, whose file describes the architecture). Give the options that the model will
be served with."""
QUANTIZE_DESCRIPTION = """Writes a model whose layers have weights of fewer bits: fp8 with a scale for each
output, or int4 with one for each group of inputs. The folder has the format of compressed-tensors, which
vLLM and transformers read as well. Tensors come one by one; no GPU is needed."""
SIM_DESCRIPTION = """Simulates a fleet under a trace: the router's own code over simulated workers, on a
virtual clock. No GPU and no model is needed. FILE is a fleet's TOML file with a table [sim];
docs/simulator.md explains it."""
DOCTOR_DESCRIPTION = """Looks at this machine and says what works, what will not, and what to do about it:
GPU, driver, libraries, limits, folders, ports. With FILE, a fleet's TOML file, it looks at what that needs.
The exit code is 1 if something that was asked for will not work."""
TOP_DESCRIPTION = """Watches a router with its workers, or a single server: who does what, how full the KV
caches are, how quickly tokens come, what waits and what the planner decided. A worker is opened with Enter; q
ends. The dashboard of the same server (/dashboard) shows the same in a browser."""
BATCH_DESCRIPTION = """Answers the requests of a file, in OpenAI's batch format, as `vllm run-batch` does. The
same command continues an interrupted run: lines that are answered in the output are not run again."""
OF_A_BATCH = (  # fields of ServerConfig
    "served_model_name",
    "tool_call_parser",
    "reasoning_parser",
    "trust_request_chat_template",
    "default_chat_template_kwargs",
    "return_tokens_as_token_ids",
    "engine_timeout",
)
OF_ONE_MODEL = ("revision", "tokenizer", "chat_template")
SHELLS = ("bash", "zsh", "fish")
BROKEN_PIPE = 128 + 13  # the exit code of a program that SIGPIPE has ended


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 with a line on stderr for a user's mistake. Wrong arguments exit (2)."""
    _open_streams()
    try:
        arguments = build_parser().parse_args(argv)
        arguments.lines = take_vllm_options(arguments)
        logging.basicConfig(
            level=logging.INFO if arguments.verbose else logging.WARNING,
            format="%(levelname)s %(name)s: %(message)s",
        )
        if arguments.run is not run_serve:  # which says it in the form of its own log
            _log(arguments.lines)
        code = arguments.run(arguments)
        sys.stdout.flush()
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has gone
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_output()
        where = error.filename or "the output"
        print(f"shoal: {where} cannot be written: {error.strerror}; make room there", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return code


def _open_streams() -> None:
    """A stream that the caller has closed is as an empty one. What comes in need not be UTF-8 for that to be
    told."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names may have letters that this terminal does not


def _drop_output() -> None:
    """So that what is still buffered does not fail at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> Parser:
    parser = Parser(prog="shoal", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    parser.set_defaults(verbose=False, run=_print_help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    generate = commands.add_parser(
        "generate", help="continue a text", description="Continues a text and streams what is generated."
    )
    generate.add_argument(
        "prompt", metavar="PROMPT", help="the text to continue; - reads it from standard input"
    )
    _add_engine_flags(generate, run_generate)

    chat = commands.add_parser("chat", help="talk with a model", description=CHAT_DESCRIPTION)
    chat.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help="folder, .gguf file, hub id or URL (default: smollm2); with --url, the server's name",
    )
    chat.add_argument("--system", metavar="TEXT", help="a system message")
    chat.add_argument(
        "--url",
        metavar="URL",
        help="talk with a server, any OpenAI-compatible one, such as http://127.0.0.1:8000",
    )
    chat.add_argument(
        "--api-key", metavar="KEY", help="of that server; also taken from SHOAL_API_KEY or OPENAI_API_KEY"
    )
    _add_engine_flags(chat, run_chat)

    serve = commands.add_parser("serve", help="serve a model over HTTP", description=SERVE_DESCRIPTION)
    serve.add_argument(
        "model_path", nargs="?", metavar="MODEL", help="folder, .gguf file, hub id or URL (default: smollm2)"
    )
    serve.add_argument(
        "--model",
        action="append",
        default=[],
        dest="models",
        metavar="NAME=MODEL",
        help="one of several models, with --swap",
    )
    serve.add_argument("--verbose", action="store_true", help="log more")
    serve.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="a YAML file of these options; the command line goes before it",
    )
    serve.add_flags(ServerConfig, "server")
    serve.add_flags(EngineConfig, "engine", but=("model",))
    serve.add_vllm_options(ALL_OPTIONS)
    serve.set_defaults(run=run_serve)

    batch = commands.add_parser("run-batch", help="answer a file of requests", description=BATCH_DESCRIPTION)
    batch.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="requests in OpenAI's batch format, one a line",
    )
    batch.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="their answers; those that it has are kept"
    )
    batch.add_argument("--verbose", action="store_true", help="log what the engine decides")
    but = tuple(field.name for field in dataclasses.fields(ServerConfig) if field.name not in OF_A_BATCH)
    batch.add_flags(ServerConfig, "requests", but=but)
    batch.add_flags(EngineConfig, "engine")
    batch.add_vllm_options(ALL_OPTIONS)
    batch.set_defaults(run=run_batch)

    route = commands.add_parser("route", help="one endpoint for many workers", description=ROUTE_DESCRIPTION)
    route.add_argument("--verbose", action="store_true", help="log more")
    route.add_flags(FleetConfig, "router", but=("worker",))
    route.add_argument(
        "--worker",
        action="append",
        default=argparse.SUPPRESS,
        metavar="URL[,KEY=VALUE...]",
        help=_help_of(FleetConfig, "worker"),
    )
    route.add_flags(ServerConfig, "server", but=NOT_OF_A_ROUTER)
    route.set_defaults(run=run_route)

    plan = commands.add_parser(
        "plan", help="size a fleet, measure a worker, or replay a planner", description=PLAN_DESCRIPTION
    )
    what = plan.add_mutually_exclusive_group(required=True)
    what.add_argument("file", nargs="?", metavar="FILE", help="size the fleet of this TOML file")
    what.add_argument("--replay", metavar="FILE", help="decide again: the record, JSON lines")
    what.add_argument("--profile", metavar="MODEL", help="measure: folder, .gguf file, hub id or URL")
    plan.add_argument(
        "--fleet",
        metavar="FILE",
        help="a fleet's TOML file whose [planner] decides (default: as the record says)",
    )
    plan.add_argument(
        "--state-dir", metavar="DIR", help="that of shoal fleet up (default: $XDG_STATE_HOME/shoal)"
    )
    plan.add_argument(
        "--no-operation", action="store_true", help="advise, and change nothing, whatever FILE says"
    )
    plan.add_argument("--verbose", action="store_true", help="log more")
    _add_profile_flags(plan)
    plan.add_flags(EngineConfig, "engine", but=("model",))
    plan.add_vllm_options((*ENGINE_OPTIONS, *EARLIER_OPTIONS))
    plan.set_defaults(run=run_plan)

    fleet = commands.add_parser("fleet", help="many workers at once", description=FLEET_DESCRIPTION)
    fleet.set_defaults(run=_print_help(fleet))
    deeds = fleet.add_subparsers(title="commands", metavar="COMMAND")
    up = deeds.add_parser("up", help="start a fleet", description=FLEET_DESCRIPTION)
    up.add_argument("file", metavar="FILE", help="the fleet, a TOML file; docs/fleet.md explains it")
    up.add_argument(
        "--state-dir",
        metavar="DIR",
        help="where to note what runs, in a folder for each FILE (default: $XDG_STATE_HOME/shoal)",
    )
    up.add_argument("--on", choices=("ray",), help="where the fleet runs; default: on this host")
    up.add_argument(
        "--address",
        metavar="ADDRESS",
        help="of the Ray cluster: HOST:PORT, ray://HOST:PORT, or local for a new one on this host; default: "
        "RAY_ADDRESS, or the one that runs here",
    )
    up.add_argument("--verbose", action="store_true", help="log more")
    up.set_defaults(run=run_fleet_up)

    models = commands.add_parser(
        "models", help="list or remove downloaded models", description=MODELS_DESCRIPTION
    )
    models.add_argument("--json", action="store_true", help="print JSON")
    models.set_defaults(run=run_models)
    actions = models.add_subparsers(title="commands", metavar="[rm]")
    rm = actions.add_parser(
        "rm", help="remove models", description="Removes downloaded models, after a question at a terminal."
    )
    rm.add_argument("names", nargs="+", metavar="NAME", help="as `shoal models` lists it")
    rm.add_argument("--yes", "-y", action="store_true", help="do not ask")
    rm.set_defaults(run=run_models_rm)

    pull = commands.add_parser(
        "pull", help="download a model", description="Downloads a model; nothing is loaded."
    )
    pull.add_argument(
        "name",
        metavar="NAME",
        help="smollm2, a model of the hub (Qwen/Qwen3-0.6B, Qwen/Qwen3-8B-GGUF:Q4_K_M), one of Ollama's "
        "names (qwen3:8b), or a URL (s3://bucket/model)",
    )
    pull.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")
    pull.set_defaults(run=run_pull)
    for command in (models, rm, pull):
        command.add_argument(
            "--download-dir",
            metavar="DIR",
            default=argparse.SUPPRESS,
            help="where files from the hub are kept; default: the hub library's cache",
        )

    bench = commands.add_parser(
        "bench",
        help="measure throughput or latency",
        description="Benchmarks of the engine, offline, and of any server.",
    )
    bench.set_defaults(run=_print_help(bench))
    kinds = bench.add_subparsers(title="kinds", metavar="KIND")
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
    latency.add_argument(
        "--batch-size", type=integer, metavar="N", default=1, help="requests in the batch (default: 1)"
    )
    latency.set_defaults(batch_flag="batch_size")
    for kind in (throughput, latency):
        _add_lengths(kind, output_len=128)
        kind.add_argument(
            "--num-iters",
            type=integer,
            metavar="N",
            default=3,
            help="timed repetitions after one warm-up (default: 3)",
        )
        kind.add_argument("--output-json", metavar="FILE", help="write the figures to this file")
        _add_engine_flags(kind, run_bench)

    under_load = kinds.add_parser(
        "serve",
        help="any server under load",
        description="TTFT, ITL and throughput of any OpenAI-compatible server under Poisson load.",
    )
    under_load.add_argument(
        "--save-result", action="store_true", help="write the figures to --result-filename"
    )
    under_load.add_argument(
        "--result-filename", metavar="FILE", default="bench-serve.json", help="default: bench-serve.json"
    )
    under_load.add_argument(
        "--plot", metavar="FILE", help="a PNG file to draw; needs matplotlib: pip install 'shoal[bench]'"
    )
    under_load.add_flags(ServeBench, "load")
    under_load.set_defaults(run=run_bench_serve)

    profile = commands.add_parser(
        "profile", help="write a trace for Perfetto", description=PROFILE_DESCRIPTION
    )
    profile.add_argument(
        "--batch-size", type=integer, metavar="N", default=1, help="requests in the batch (default: 1)"
    )
    _add_lengths(profile, output_len=16)
    profile.add_argument(
        "--output-dir",
        metavar="DIR",
        default="shoal-traces",
        help="the folder of the traces, one a rank (default: shoal-traces)",
    )
    _add_engine_flags(profile, run_profile)

    compile_ = commands.add_parser(
        "compile", help="compile a model's kernels ahead", description=COMPILE_DESCRIPTION
    )
    compile_.add_argument(
        "model_path", nargs="?", metavar="MODEL", help="folder, .gguf file, hub id or URL (default: smollm2)"
    )
    _add_engine_flags(compile_, run_compile, generates=False)

    quantize = commands.add_parser(
        "quantize", help="write a model with fewer bits", description=QUANTIZE_DESCRIPTION
    )
    quantize.add_argument("model", metavar="MODEL", help="folder or hub id of a model in plain numbers")
    quantize.add_argument("--to", choices=("fp8", "int4"), help="what weights become; must be given")
    quantize.add_argument(
        "--output", metavar="DIR", help="a new folder; default: the model's name and format"
    )
    quantize.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        default=128,
        help="int4: inputs that share a scale (default: 128)",
    )
    quantize.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")
    quantize.set_defaults(run=run_quantize)

    sim = commands.add_parser("sim", help="simulate a fleet under a trace", description=SIM_DESCRIPTION)
    sim.add_argument("file", metavar="FILE", help="the fleet, a TOML file")
    sim.add_argument(
        "--trace", metavar="JSONL", required=True, help="requests, a line each, in Mooncake's format"
    )
    sim.add_argument("--policy", metavar="P", help="which worker gets a request (default: the file's, or kv)")
    sim.add_argument("--workers", type=integer, metavar="N", help="number of workers; overrides the file")
    sim.add_argument(
        "--seed", type=integer, metavar="N", help="of random choices (default: the file's, or 0)"
    )
    sim.add_argument("--planner", metavar="MODE", help="size the fleet as the load changes: load, sla")
    sim.add_argument("--max-gpu-budget", type=integer, metavar="N", help="GPUs that the planner may use")
    sim.add_argument(
        "--plot",
        metavar="FILE",
        help="draw load, workers and waits over time into this PNG file; needs matplotlib: pip install "
        "'shoal[bench]'",
    )
    sim.add_argument("--json", action="store_true", help="print JSON")
    sim.set_defaults(run=run_sim)

    doctor = commands.add_parser(
        "doctor", help="what works on this machine, and what to do", description=DOCTOR_DESCRIPTION
    )
    doctor.add_argument("file", nargs="?", metavar="FILE", help="a fleet that is to run here, a TOML file")
    asked: dict[str, Any] = {"default": argparse.SUPPRESS}
    doctor.add_argument("--model", metavar="MODEL", help="a model that is to be served", **asked)
    doctor.add_argument("--device", choices=("cuda", "cpu"), help="where it is to run", **asked)
    doctor.add_argument("--port", type=integer, metavar="N", help="where it is to be served", **asked)
    doctor.add_argument("--plane", metavar="URL", help="the plane of a fleet that is to be joined", **asked)
    doctor.add_argument("--fleet-key-file", metavar="FILE", help="the key of that fleet", **asked)
    doctor.add_argument("--all", action="store_true", help="also explain what is not there and not asked for")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=run_doctor)

    top = commands.add_parser("top", help="watch a server or a fleet", description=TOP_DESCRIPTION)
    top.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        default="http://127.0.0.1:8000",
        help="of a router or a server (default: http://127.0.0.1:8000)",
    )
    top.add_argument(
        "--api-key", metavar="KEY", help="of that server; also taken from SHOAL_API_KEY or OPENAI_API_KEY"
    )
    top.add_argument("--once", action="store_true", help="print one picture and end")
    top.set_defaults(run=run_top)

    completion = commands.add_parser(
        "completion", help="complete this command in a shell", description=COMPLETION_DESCRIPTION
    )
    completion.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    completion.set_defaults(run=run_completion)

    explain = commands.add_parser("help", help="explain a command")
    explain.add_argument("words", nargs="*", metavar="COMMAND", help="such as serve, or bench latency")
    explain.set_defaults(run=lambda arguments: parser.parse_args([*arguments.words, "--help"]))
    return parser


def _help_of(config: type, name: str) -> str:
    """What the option `name` means."""
    return next(str(f.metadata["help"]) for f in dataclasses.fields(config) if f.name == name)


def _add_engine_flags(
    parser: Parser, run: Callable[[argparse.Namespace], int], *, generates: bool = True
) -> None:
    """Adds the flags of a command that has an engine of its own."""
    parser.add_argument("--verbose", action="store_true", help="log what the engine decides")
    parser.add_flags(EngineConfig, "engine")
    if generates:
        parser.add_sampling_flags()
    parser.add_vllm_options((*ENGINE_OPTIONS, *EARLIER_OPTIONS))
    parser.set_defaults(run=run)


def _add_lengths(parser: Parser, output_len: int) -> None:
    parser.add_argument(
        "--input-len", type=integer, metavar="N", default=128, help="prompt tokens a request (default: 128)"
    )
    parser.add_argument(
        "--output-len",
        type=integer,
        metavar="N",
        default=output_len,
        help=f"generated tokens a request (default: {output_len})",
    )


def _add_profile_flags(parser: Parser) -> None:
    lists: Any = {"nargs": "+", "metavar": "N"}
    parser.add_argument("--output", metavar="FILE", help="write the profile to this JSON file")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw it into this PNG file; needs matplotlib: pip install 'shoal[bench]'",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="measure nothing: take the simulator's times of this GPU and a published MODEL",
    )
    parser.add_argument(
        "--input-lengths",
        type=integer,
        default=PROFILE_LENGTHS,
        help="tokens of prompts, for the first token (default: 128 to 32768, as far as there is room)",
        **lists,
    )
    parser.add_argument(
        "--context-lengths",
        type=integer,
        default=PROFILE_LENGTHS,
        help="tokens of contexts, for the time between tokens (default: likewise)",
        **lists,
    )
    parser.add_argument(
        "--kv-usages",
        type=float,
        default=PROFILE_USAGES,
        help="how full the KV cache is then, from 0 to 1 (default: 0.01 to 0.95)",
        **lists,
    )


def _print_help(parser: Parser) -> Callable[[argparse.Namespace], int]:
    """Returns what a command runs that needs a second word and got none: it prints the help and fails (2)."""

    def run(_: argparse.Namespace) -> int:
        sys.stderr.write(parser.format_help())
        return 2

    return run


def _sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in SAMPLING if hasattr(arguments, name)}


def _sampling_params(arguments: argparse.Namespace, base: SamplingParams, **defaults: Any) -> SamplingParams:
    return dataclasses.replace(base, **{**defaults, **_sampling_options(arguments)})


def _build_llm(arguments: argparse.Namespace, model: str | None = None) -> Any:
    """`model`: in place of the one that the arguments name, whose revision and tokenizer it does not get."""
    given = given_options(arguments, EngineConfig)
    if model not in (None, given.get("model", DEFAULT_MODEL)):
        given = {name: given[name] for name in given if name not in OF_ONE_MODEL} | {"model": model}
    EngineConfig(**given)  # a mistake is told before torch is imported, which takes seconds

    from shoal.engine.llm import LLM

    return LLM(**given)


def run_generate(arguments: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    # a mistake in the flags is told before a model is loaded
    _sampling_params(arguments, SamplingParams(), max_tokens=128)
    with _build_llm(arguments) as llm:
        params = _sampling_params(arguments, llm.get_default_sampling_params(), max_tokens=128)
        _stream(llm, prompt, params)
        print()
    return 0


def _stream(llm: Any, prompt: str, params: SamplingParams) -> None:
    """Prints the prompt once it is taken, and behind it an answer as it grows."""
    shown = 0
    for output in llm.stream(prompt, params, every_step=True):
        text = prompt + output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)


def run_batch(arguments: argparse.Namespace) -> int:
    from shoal.cli import batch

    config = ServerConfig(**batch.LIMITS, **given_options(arguments, ServerConfig))
    options = given_options(arguments, EngineConfig)
    return batch.run_batch(arguments.input_file, arguments.output_file, options, config)


def run_chat(arguments: argparse.Namespace) -> int:
    from shoal.cli.chat import Chat
    from shoal.cli.keyboard import Keyboard
    from shoal.cli.speakers import MAX_TOKENS, LocalSpeaker, RemoteSpeaker
    from shoal.cli.terminal import note

    settings = _sampling_options(arguments)
    # a mistake in the flags is told before a model is loaded
    SamplingParams(**{"max_tokens": MAX_TOKENS if arguments.url is None else None, **settings})
    keyboard = Keyboard(sys.stdin.isatty() and sys.stdout.isatty())
    if arguments.url is not None:
        if useless := given_options(arguments, EngineConfig).keys() - {"model", "seed"}:
            raise ConfigError(
                f"{', '.join(sorted(useless))}: the server at {arguments.url} decides that; "
                "leave it out, or leave out --url"
            )
        speaker = RemoteSpeaker(
            arguments.url, getattr(arguments, "model", None), _server_key(arguments.api_key)
        )
        return Chat(speaker, keyboard, arguments.system, settings).run()
    if arguments.api_key is not None:
        raise ConfigError("--api-key is of a server; give its --url, too")
    if keyboard.is_terminal:
        note(f"loading {getattr(arguments, 'model', DEFAULT_MODEL)} ...")
    local = LocalSpeaker(_build_llm(arguments), lambda name: _build_llm(arguments, name))
    with contextlib.closing(local):
        return Chat(local, keyboard, arguments.system, settings).run()


def _server_key(given: str | None) -> str | None:
    """The key to show a server: the one that was given, or that the environment has."""
    keys = (given, os.environ.get("SHOAL_API_KEY", "").partition(",")[0], os.environ.get("OPENAI_API_KEY"))
    return next(filter(None, keys), None)


def run_top(arguments: argparse.Namespace) -> int:
    from shoal.cli.top import top

    return top(arguments.url, _server_key(arguments.api_key), arguments.once)


def run_bench(arguments: argparse.Namespace) -> int:
    _check_writable("output_json", arguments.output_json)
    from shoal.bench.offline import measure

    with _build_llm(arguments) as llm:
        params = _sampling_params(
            arguments, SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=arguments.output_len
        )
        measure(
            llm,
            params,
            getattr(arguments, arguments.batch_flag),
            arguments.input_len,
            arguments.num_iters,
            arguments.output_json,
        )
    return 0


def run_profile(arguments: argparse.Namespace) -> int:
    from shoal.bench.offline import trace

    with _build_llm(arguments) as llm:
        params = _sampling_params(
            arguments, SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=arguments.output_len
        )
        trace(llm, params, arguments.batch_size, arguments.input_len, arguments.output_dir)
    return 0


def run_compile(arguments: argparse.Namespace) -> int:
    from shoal.engine.compile_cache import CompileCache, keep_kernels_together, local_names
    from shoal.engine.llm import LLM

    given = {"load_format": "dummy", **given_options(arguments, EngineConfig)}
    if arguments.model_path is not None:
        given["model"] = arguments.model_path
    url = given.pop("compile_cache", None)
    keep_kernels_together()
    store = CompileCache(url) if url is not None else None
    fetched = store.fetch() if store is not None else 0
    before = set(local_names())
    with LLM(**given):
        pass
    compiled = len(set(local_names()) - before)
    if compiled or fetched:
        print(f"{compiled} kernels and libraries were compiled, {fetched} fetched")
    else:
        print("nothing was left to compile: all kernels and libraries are in the cache")
    if store is not None:
        print(f"{store.offer()} were put into {store.url}")
    return 0


def run_serve(arguments: argparse.Namespace) -> int:
    """0 after SIGTERM, SIGINT or SIGHUP and a drain; 1 if a second one ended it, or if it could not start."""
    from shoal.cli.serve import serve

    if arguments.model_path is None and not arguments.models:
        _check_lists(arguments)
    given = _server_options(arguments)
    if "plane" in given:  # workers of one host need no different --port
        given.setdefault("port", 0)
    config = ServerConfig(**given)
    logs.set_up(logging.DEBUG if arguments.verbose else logging.INFO, config.log_format)
    _log(arguments.lines)
    return serve(arguments.model_path, arguments.models, given_options(arguments, EngineConfig), config)


def _log(lines: Sequence[str]) -> None:
    """Warns of options of vLLM's that have no effect."""
    for line in lines:
        logger.warning("%s", line)


def _check_lists(arguments: argparse.Namespace) -> None:
    """Raises ConfigError if MODEL may be what an option of several values, as --api-key, has taken last. A
    key may look like a hub's model by chance, and is not to be shown."""
    from shoal.weights.source import is_model_here, is_model_name

    for name, values in vars(arguments).items():
        if isinstance(values, list) and len(values) > 1:
            last, is_key = str(values[-1]), name == "api_key"
            if is_model_here(last) if is_key else is_model_name(last):
                what = "a last value" if is_key else repr(last)[:200]
                raise ConfigError(
                    f"{flag_of(name)} has taken {what}, which may be the model; name the model (the default "
                    f"is {DEFAULT_MODEL}) before the options, or behind `--`"
                )


def _server_options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = given_options(arguments, ServerConfig)
    for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
        # vLLM's spelling: a JSON list
        if len(values := given.get(name, ())) == 1 and values[0].startswith("["):
            given[name] = _json_list(name, values[0])
    return given


def run_route(arguments: argparse.Namespace) -> int:
    """As run_serve."""
    from shoal.cli.route import route

    given = _server_options(arguments)
    server = ServerConfig(**{name: given[name] for name in given if name not in NOT_OF_A_ROUTER})
    logs.set_up(logging.DEBUG if arguments.verbose else logging.INFO, server.log_format)
    return route(FleetConfig(**given_options(arguments, FleetConfig)), server)


def run_plan(arguments: argparse.Namespace) -> int:
    of_another = {
        "fleet": "replay",
        "output": "profile",
        "plot": "profile",
        "gpu": "profile",
        "state_dir": "file",
        "no_operation": "file",
    }
    for name, other in of_another.items():
        if getattr(arguments, name) not in (None, False) and getattr(arguments, other) is None:
            where = "FILE" if other == "file" else f"--{other}"
            given = "" if name == "no_operation" else f" {getattr(arguments, name)!r}"
            raise ConfigError(f"{flag_of(name)}{given} is of {where}; leave it out")
    if arguments.file is not None:
        from shoal.cli.plan import plan_fleet

        return plan_fleet(
            arguments.file, arguments.state_dir, arguments.verbose, no_operation=arguments.no_operation
        )
    if arguments.profile is not None:
        return _measure_worker(arguments)
    import msgspec

    from shoal.fleet.fleet_file import read_fleet_file
    from shoal.fleet.planner import replay

    config = None if arguments.fleet is None else read_fleet_file(arguments.fleet).planner
    try:
        lines = open(arguments.replay, "rb")  # noqa: SIM115 - what fails below is not this file
    except OSError as error:
        raise ConfigError(f"--replay {arguments.replay!r} cannot be read: {error}") from None
    with lines:
        for entry in replay(config, lines):
            print(json.dumps(msgspec.to_builtins(entry)))
    return 0


def _measure_worker(arguments: argparse.Namespace) -> int:
    from shoal.bench.worker_profile import measure_profile, plot, table
    from shoal.fleet.engine_profile import write_profile

    for name in ("input_lengths", "context_lengths"):
        if (least := min(getattr(arguments, name))) < 1:
            raise ConfigError(f"{flag_of(name)} {least} is below 1; give numbers of tokens")
    if wrong := [usage for usage in arguments.kv_usages if not 0 < usage <= 1]:
        raise ConfigError(f"--kv-usages {wrong[0]:g} is no share of the cache; give numbers up to 1, above 0")
    for name in ("output", "plot"):
        _check_writable(name, getattr(arguments, name))
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
    """Raises ConfigError for an option that the simulated times do not know of, and if too few points have
    room for a profile."""
    from shoal.fleet.engine_profile import check_profile, with_room
    from shoal.fleet.sim_config import SimWorkers
    from shoal.fleet.sim_timing import find_timing, profile_of

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


def run_fleet_up(arguments: argparse.Namespace) -> int:
    """As run_serve; 1 also if no worker could be started."""
    if arguments.on == "ray":
        if arguments.state_dir is not None:
            raise ConfigError(
                f"--state-dir {arguments.state_dir!r} is of a fleet on one host; on Ray nothing is noted, "
                "leave it out"
            )
        try:
            from shoal.cli.fleet_ray import fleet_up_on_ray
        except ModuleNotFoundError as error:
            raise ConfigError(f"--on ray needs Ray ({error}): pip install 'shoal[ray]'") from None

        return fleet_up_on_ray(arguments.file, arguments.address, arguments.verbose)
    from shoal.cli.fleet import fleet_up

    if arguments.address is not None:
        raise ConfigError(
            f"--address {arguments.address!r} is of a Ray cluster; add --on ray, or leave it out"
        )
    return fleet_up(arguments.file, arguments.state_dir, arguments.verbose)


def _json_list(name: str, text: str) -> list[str]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ConfigError(
            f"{name} {text!r:.80} is no JSON list of texts; give one, or the values one after the other"
        )
    return values


def run_bench_serve(arguments: argparse.Namespace) -> int:
    """1 if no request succeeded."""
    bench = ServeBench(**given_options(arguments, ServeBench))
    result_file = arguments.result_filename if arguments.save_result else None
    _check_writable("result_filename", result_file)
    _check_writable("plot", arguments.plot)
    result = serving.command(bench, result_file, arguments.plot)
    return 0 if result["completed"] else 1


def _check_writable(name: str, path: str | None) -> None:
    """Raises ConfigError, so that nothing is measured in vain."""
    try:
        if path is not None:
            was_there = os.path.lexists(path)
            open(path, "ab").close()
            if not was_there:
                os.remove(path)  # so that what fails later leaves no empty file
    except OSError as error:
        raise ConfigError(f"{name} {path!r} cannot be written: {error.strerror}; choose another") from None


def run_models(arguments: argparse.Namespace) -> int:
    from shoal.cli.models import list_models

    return list_models(arguments.json, getattr(arguments, "download_dir", None))


def run_models_rm(arguments: argparse.Namespace) -> int:
    from shoal.cli.models import remove_models

    return remove_models(arguments.names, arguments.yes, getattr(arguments, "download_dir", None))


def run_pull(arguments: argparse.Namespace) -> int:
    from shoal.cli.models import pull

    return pull(arguments.name, arguments.revision, getattr(arguments, "download_dir", None))


def run_quantize(arguments: argparse.Namespace) -> int:
    if arguments.to is None:
        raise ConfigError("--to must be fp8 or int4, got nothing; add one: shoal quantize MODEL --to fp8")
    from pathlib import Path

    from shoal.weights.quantize import quantize
    from shoal.weights.source import resolve

    files = resolve(arguments.model, arguments.revision)
    target = arguments.output or f"{Path(arguments.model).resolve().name}-{arguments.to}"
    print(quantize(files, arguments.to, Path(target), arguments.group_size))
    return 0


def run_sim(arguments: argparse.Namespace) -> int:
    from shoal.fleet.sim_config import read_sim_config
    from shoal.fleet.sim_trace import read_trace
    from shoal.fleet.simulator import Simulation

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
            f"--max-gpu-budget {arguments.max_gpu_budget} is of a planner, and there is none; add --planner "
            "load or --planner sla"
        )
    _check_writable("plot", arguments.plot)
    if arguments.plot is not None:
        serving.import_figure()  # before the simulation, which may take long
    simulation = Simulation(config, read_trace(arguments.trace, config.block_size))
    result = simulation.run()
    print(json.dumps(dataclasses.asdict(result)) if arguments.json else result.table())
    if arguments.plot is not None:
        from shoal.bench.simulated import plot

        plot(simulation, arguments.plot)
    return 0


def run_doctor(arguments: argparse.Namespace) -> int:
    from shoal.cli.doctor import doctor

    names = ("model", "device", "port", "plane", "fleet_key_file")
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return doctor(arguments.file, given, arguments.json, arguments.all)


def run_completion(arguments: argparse.Namespace) -> int:
    import shtab

    parser = build_parser()
    parser.name_choices()
    script = shtab.complete(parser, arguments.shell)
    # where there is nothing of ours, bash completes the names of files
    print(script.replace("complete -o bashdefault ", "complete -o bashdefault -o default "))
    return 0


if __name__ == "__main__":
    sys.exit(main())
