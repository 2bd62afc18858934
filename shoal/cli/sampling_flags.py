"""Sampling options of a command line: flags of the commands that generate, and settings (/set) of a chat."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any

from shoal.options.fields import kind_of
from shoal.options.parser import KINDS, Parser, flag_of
from shoal.sampling_params import LENGTH_SECTION, SAMPLING_SECTION, SamplingParams


def add_sampling_flags(parser: Parser) -> None:
    """Adds a flag for each entry of SAMPLING except the seed, for which the engine has --seed."""
    group = parser.add_argument_group("sampling")
    for name, (kind, field) in SAMPLING.items():
        if name != "seed":
            read, metavar = KINDS[kind]
            action = group.add_argument(
                flag_of(name),
                type=read,
                metavar=metavar,
                default=argparse.SUPPRESS,
                help=field.metadata["help"],
            )
            if not field.metadata["common"]:
                parser.rare.add(action)


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the sampling options that were given."""
    return {name: getattr(arguments, name) for name in SAMPLING if hasattr(arguments, name)}


def _sampling_numbers() -> dict[str, tuple[type, dataclasses.Field[Any]]]:
    """Returns (type, field) of each number in SamplingParams for sampling and for the length of an answer."""
    hints = typing.get_type_hints(SamplingParams)
    found, section = {}, None
    for field in dataclasses.fields(SamplingParams):
        section = field.metadata["section"] or section
        kind, _ = kind_of(hints[field.name])
        if section in (SAMPLING_SECTION, LENGTH_SECTION) and kind in (int, float):
            found[field.name] = (kind, field)
    return found


SAMPLING = _sampling_numbers()
