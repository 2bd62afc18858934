"""The `shoal` command. The engine's flags are EngineConfig's fields, so the two never differ. Heavy imports happen inside commands."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import time
import types
import typing
from collections.abc import Sequence
from typing import Any

from shoal import bench_serve
from shoal.api import RequestOutput, SamplingParams
from shoal.bench_serve import ServeBench
from shoal.config import EngineConfig, ServerConfig
from shoal.errors import ConfigError, RequestError, ShoalError
from shoal.version import __version__

SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy"), "top_p": (float, "smallest set of tokens with this probability mass"),
    "top_k": (int, "the k most likely tokens; 0 is off"), "min_p": (float, "tokens at least this fraction as likely as the best"),
    "repetition_penalty": (float, "above 1 discourages what was said"), "seed": (int, "same seed, same tokens"),
    "max_tokens": (int, "most tokens of an answer"),
}

SERVE_DESCRIPTION = """An OpenAI-compatible server. SIGTERM or Ctrl-C lets running requests end, within --shutdown-timeout; a second
signal ends it at once. If the engine's process dies the server stays up: its requests fail, /health is 503, and with --restart the engine
comes back."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 with one line on stderr for a user's mistake."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return arguments.run(arguments)
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal", description="A small, very fast LLM inference system.")
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    generate = commands.add_parser("generate", help="continue a text", description="Continues a text and streams what is generated.")
    generate.add_argument("prompt", help="the text to continue; - reads it from standard input")
    generate.set_defaults(run=run_generate)

    chat = commands.add_parser("chat", help="talk with a model", description="A conversation; an empty line or Ctrl-D ends it.")
    chat.add_argument("--system", help="a system message")
    chat.set_defaults(run=run_chat)

    bench = commands.add_parser("bench", help="measure throughput or latency",
                               description="Benchmarks of the engine, offline, and of any server.")
    kinds = bench.add_subparsers(required=True, metavar="kind")
    throughput = kinds.add_parser("throughput", help="many requests at once", description="Many requests at once: tokens a second.")
    throughput.add_argument("--num-prompts", type=int, default=16, help="requests (default: 16)")
    throughput.set_defaults(run=run_bench, batch_flag="num_prompts")
    latency = kinds.add_parser("latency", help="one batch, several times", description="One batch, several times: ms a token.")
    latency.add_argument("--batch-size", type=int, default=1, help="requests in the batch (default: 1)")
    latency.set_defaults(run=run_bench, batch_flag="batch_size")
    for kind in (throughput, latency):
        kind.add_argument("--num-iters", type=int, default=3, help="timed repetitions after one warm-up (default: 3)")
        kind.add_argument("--output-json", help="write the figures to this file")

    profile = commands.add_parser("profile", help="write a trace for Perfetto",
                                  description="Runs a batch and traces it for ui.perfetto.dev: steps, kernels and host work by name.")
    profile.add_argument("--batch-size", type=int, default=1, help="requests in the batch (default: 1)")
    profile.add_argument("--output-dir", default="shoal-traces", help="the folder of the traces, one a rank (default: shoal-traces)")
    profile.set_defaults(run=run_profile)
    for kind, output_len in ((throughput, 128), (latency, 128), (profile, 16)):
        kind.add_argument("--input-len", type=int, default=128, help="prompt tokens a request (default: 128)")
        kind.add_argument("--output-len", type=int, default=output_len, help=f"generated tokens a request (default: {output_len})")

    under_load = kinds.add_parser("serve", help="any server under load",
                                  description="TTFT, ITL and throughput of any OpenAI-compatible server under Poisson load.")
    _add_flags(under_load, ServeBench, "load")
    under_load.add_argument("--save-result", action="store_true", help="write the figures to --result-filename")
    under_load.add_argument("--result-filename", default="bench-serve.json", help="default: bench-serve.json")
    under_load.add_argument("--plot", help="a PNG file to draw; needs matplotlib: pip install 'shoal[bench]'")
    under_load.set_defaults(run=run_bench_serve, verbose=False)

    serve = commands.add_parser("serve", help="serve a model over HTTP", description=SERVE_DESCRIPTION)
    serve.add_argument("model_path", nargs="?", metavar="MODEL", help="folder, .gguf file or hub id (default: smollm2)")
    serve.add_argument("--model", action="append", default=[], dest="models", metavar="NAME=MODEL",
                       help="one of several models, with --swap")
    serve.add_argument("--verbose", action="store_true", help="log more")
    _add_flags(serve, EngineConfig, "engine", but=("model",))
    _add_flags(serve, ServerConfig, "server")
    serve.set_defaults(run=run_serve)

    for command in (generate, chat, throughput, latency, profile):
        command.add_argument("--verbose", action="store_true", help="log what the engine decides")
        _add_engine_flags(command)
        _add_sampling_flags(command)
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    _add_flags(parser, EngineConfig, "engine")


def _add_flags(parser: argparse.ArgumentParser, config: type, title: str, but: tuple[str, ...] = ()) -> None:
    add_flags(parser.add_argument_group(title), config, but)


def add_flags(group: Any, config: type, but: tuple[str, ...] = ()) -> None:
    """A flag for each field of the dataclass `config` but some; one that is not given leaves no trace in the arguments."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name in but:
            continue
        flag, hint = "--" + field.name.replace("_", "-"), hints[field.name]
        kinds = [t for t in typing.get_args(hint) if t is not types.NoneType] if isinstance(hint, types.UnionType) else [hint]
        default = "" if field.default is None else f" (default: {field.default})"
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": field.metadata["help"] + default}
        if kinds[0] is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kinds[0]) is list:
            options |= {"type": typing.get_args(kinds[0])[0], "nargs": "+"}
        elif dataclasses.is_dataclass(kinds[0]):
            options["metavar"] = "JSON"
        else:
            options["type"] = kinds[0]
        group.add_argument(flag, **options)


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, (kind, meaning) in SAMPLING_FLAGS.items():
        if name != "seed":    # the engine's --seed serves
            group.add_argument("--" + name.replace("_", "-"), type=kind, default=argparse.SUPPRESS, help=meaning)


def _engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {f.name: getattr(arguments, f.name) for f in dataclasses.fields(EngineConfig) if hasattr(arguments, f.name)}


def _sampling_params(arguments: argparse.Namespace, base: SamplingParams, **defaults: Any) -> SamplingParams:
    given = {name: getattr(arguments, name) for name in SAMPLING_FLAGS if hasattr(arguments, name)}
    return dataclasses.replace(base, **{**defaults, **given})


def _build_llm(arguments: argparse.Namespace) -> Any:
    from shoal.engine.llm import LLM
    return LLM(**_engine_options(arguments))


def run_generate(arguments: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    _sampling_params(arguments, SamplingParams())    # a mistake in the flags is told before a model is loaded
    with _build_llm(arguments) as llm:
        params = _sampling_params(arguments, llm.get_default_sampling_params(), max_tokens=128)
        print(prompt, end="", flush=True)
        _stream(llm, prompt, params)
        print()
    return 0


def run_chat(arguments: argparse.Namespace) -> int:
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    with _build_llm(arguments) as llm:
        params = _sampling_params(arguments, llm.get_default_sampling_params(), max_tokens=512)
        while text := _ask():
            messages.append({"role": "user", "content": text})
            start = time.perf_counter()
            try:
                answer, first = _stream(llm, llm.chat_prompt(messages), params)
            except (RequestError, KeyboardInterrupt) as error:    # the conversation goes on without this turn
                print(f"\nshoal: {error or 'interrupted'}", file=sys.stderr)
                messages.pop()
                continue
            seconds = time.perf_counter() - first
            count = len(answer.outputs[0].token_ids)
            rate = f"{(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds > 0 else "one token"
            print(f"\n[{count} tokens, {rate}, first after {first - start:.2f} s]", file=sys.stderr)
            messages.append({"role": "assistant", "content": answer.outputs[0].text})
    return 0


def _ask() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _stream(llm: Any, prompt: Any, params: SamplingParams) -> tuple[RequestOutput, float]:
    """Prints an answer as it grows; returns it and when its first token came."""
    shown, first, output = 0, 0.0, None
    for output in llm.stream(prompt, params):
        first = first or time.perf_counter()
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    return output, first    # type: ignore[return-value]


def run_bench(arguments: argparse.Namespace) -> int:
    from shoal.bench import measure
    with _build_llm(arguments) as llm:
        params = _sampling_params(arguments, SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=arguments.output_len)
        measure(llm, params, getattr(arguments, arguments.batch_flag), arguments.input_len, arguments.num_iters, arguments.output_json)
    return 0


def run_profile(arguments: argparse.Namespace) -> int:
    from shoal.bench import trace
    with _build_llm(arguments) as llm:
        params = _sampling_params(arguments, SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=arguments.output_len)
        trace(llm, params, arguments.batch_size, arguments.input_len, arguments.output_dir)
    return 0


def run_serve(arguments: argparse.Namespace) -> int:
    """0 after SIGTERM or SIGINT and a drain; 1 if a second signal ended it, or if it could not start."""
    from shoal.serve import serve
    logging.getLogger().setLevel(logging.DEBUG if arguments.verbose else logging.INFO)
    given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(ServerConfig) if hasattr(arguments, f.name)}
    for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
        if len(values := given.get(name, ())) == 1 and values[0].startswith("["):    # vLLM's spelling: a JSON list
            given[name] = _json_list(name, values[0])
    return serve(arguments.model_path, arguments.models, _engine_options(arguments), ServerConfig(**given))


def _json_list(name: str, text: str) -> list[str]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{name} {text!r:.80} is no JSON list of texts; give one, or the values one after the other")
    return values


def run_bench_serve(arguments: argparse.Namespace) -> int:
    """1 if no request succeeded."""
    given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(ServeBench) if hasattr(arguments, f.name)}
    result = bench_serve.command(ServeBench(**given), arguments.result_filename if arguments.save_result else None, arguments.plot)
    return 0 if result["completed"] else 1


if __name__ == "__main__":
    sys.exit(main())
