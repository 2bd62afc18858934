"""`shoal run-batch`: answers a file of requests."""

from __future__ import annotations

import argparse
import dataclasses

from shoal.config import EngineConfig, ServerConfig
from shoal.options.parser import Commands, given_options
from shoal.options.vllm import ALL_OPTIONS

DESCRIPTION = """Answers the requests of a file, in OpenAI's batch format, as `vllm run-batch` does. The same
command continues an interrupted run: lines that are answered in the output are not run again."""
REQUEST_OPTIONS = (  # fields of ServerConfig about requests and answers, not about ports
    "served_model_name",
    "tool_call_parser",
    "reasoning_parser",
    "trust_request_chat_template",
    "default_chat_template_kwargs",
    "return_tokens_as_token_ids",
    "engine_timeout",
)


def add_run_batch(commands: Commands) -> None:
    parser = commands.add_parser("run-batch", help="answer a file of requests", description=DESCRIPTION)
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="requests in OpenAI's batch format, one per line",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="file of the answers; answers that it already has are kept",
    )
    parser.add_argument("--verbose", action="store_true", help="log the engine's decisions")
    but = tuple(f.name for f in dataclasses.fields(ServerConfig) if f.name not in REQUEST_OPTIONS)
    parser.add_flags(ServerConfig, "requests", but=but)
    parser.add_flags(EngineConfig, "engine")
    parser.add_vllm_options(ALL_OPTIONS)
    parser.set_defaults(run=run_batch)


def run_batch(arguments: argparse.Namespace) -> int:
    from shoal.cli import batch

    config = ServerConfig(**batch.LIMITS, **given_options(arguments, ServerConfig))
    options = given_options(arguments, EngineConfig)
    return batch.run_batch(arguments.input_file, arguments.output_file, options, config)
