"""Flags of the commands that run an engine in this process, and the engine and parameters made from them."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.cli.sampling_flags import add_sampling_flags, sampling_options
from shoal.config import DEFAULT_MODEL, EngineConfig, SpeculativeConfig
from shoal.errors import CheckpointError
from shoal.options.parser import Parser, given_options, integer
from shoal.options.vllm import EARLIER_OPTIONS, ENGINE_OPTIONS
from shoal.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shoal.engine.llm import LLM

logger = logging.getLogger(__name__)

MODEL_HELP = "folder, .gguf file, hub id or URL (default: smollm2)"
ONE_MODEL_OPTIONS = ("revision", "tokenizer", "chat_template")  # they do not fit another model


def add_engine_flags(
    parser: Parser, run: Callable[[argparse.Namespace], int], *, generates: bool = True
) -> None:
    """Adds the options of an engine and, if the command generates, the sampling options."""
    parser.add_argument("--verbose", action="store_true", help="log the engine's decisions")
    parser.add_flags(EngineConfig, "engine")
    if generates:
        add_sampling_flags(parser)
    parser.add_vllm_options((*ENGINE_OPTIONS, *EARLIER_OPTIONS))
    parser.set_defaults(run=run)


def add_lengths(parser: Parser, output_len: int) -> None:
    parser.add_argument(
        "--input-len", type=integer, metavar="N", default=128, help="prompt tokens per request (default: 128)"
    )
    parser.add_argument(
        "--output-len",
        type=integer,
        metavar="N",
        default=output_len,
        help=f"generated tokens per request (default: {output_len})",
    )


def sampling_params(arguments: argparse.Namespace, base: SamplingParams, **defaults: Any) -> SamplingParams:
    return dataclasses.replace(base, **{**defaults, **sampling_options(arguments)})


def measured_params(arguments: argparse.Namespace) -> SamplingParams:
    """Returns the parameters of a measurement: every answer has --output-len tokens."""
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    return sampling_params(arguments, greedy, max_tokens=arguments.output_len)


def build_llm(arguments: argparse.Namespace, model: str | None = None, **defaults: Any) -> LLM:
    """Loads the model of the arguments, or `model` in its place, without the options of one model.
    `defaults`: values of options that are not given."""
    given = defaults | given_options(arguments, EngineConfig)
    if model not in (None, given.get("model", DEFAULT_MODEL)):
        given = {name: given[name] for name in given if name not in ONE_MODEL_OPTIONS} | {"model": model}
        speculation = SpeculativeConfig.of(given.get("speculative_config"))
        if speculation is not None and speculation.has_head and not _has_head(speculation, given):
            given["speculative_config"] = defaults.get("speculative_config")
            logger.warning("%s has no draft head of method %r; the default drafts", model, speculation.method)
    EngineConfig(**given)  # reports a wrong option before torch is imported, which takes seconds

    from shoal.engine.llm import LLM

    return LLM(**given)


def _has_head(speculation: SpeculativeConfig, given: Mapping[str, Any]) -> bool:
    """Says if the model of these options has a head of this method, which is for no other model."""
    if speculation.method != "mtp":  # its files are another model's
        return False
    from shoal.weights.source import resolve

    try:
        return resolve(given["model"], None, given.get("download_dir")).find_own_head() is not None
    except CheckpointError:
        return False
