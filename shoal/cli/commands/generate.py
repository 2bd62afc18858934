"""`shoal generate`: continues a text."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from shoal.cli.commands.engine_flags import add_engine_flags, build_llm, sampling_params
from shoal.options.parser import Commands
from shoal.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shoal.engine.llm import LLM

MAX_TOKENS = 128


def add_generate(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate", help="continue a text", description="Continues a text and streams what is generated."
    )
    parser.add_argument(
        "prompt", metavar="PROMPT", help="the text to continue; - reads it from standard input"
    )
    add_engine_flags(parser, run_generate)


def run_generate(arguments: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    # reports a wrong option before a model is loaded
    sampling_params(arguments, SamplingParams(), max_tokens=MAX_TOKENS)
    with build_llm(arguments) as llm:
        params = sampling_params(arguments, llm.get_default_sampling_params(), max_tokens=MAX_TOKENS)
        _stream(llm, prompt, params)
        print()
    return 0


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> None:
    """Prints the prompt once the engine has accepted it, and after it the answer as it grows."""
    num_shown = 0
    for output in llm.stream(prompt, params, every_step=True):
        text = prompt + output.outputs[0].text
        print(text[num_shown:], end="", flush=True)
        num_shown = len(text)
