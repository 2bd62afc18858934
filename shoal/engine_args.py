"""EngineArgs: `LLM`'s options as an object and on a script's own command line, as vLLM's scripts use it."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any

from shoal.config import EngineConfig
from shoal.options.fields import described
from shoal.options.parser import argument_of, argument_of_vllm, flag_of
from shoal.options.vllm import ENGINE_OPTIONS


class EngineArgs(EngineConfig):
    """Checked options of `LLM`: `LLM(**dataclasses.asdict(EngineArgs(...)))`. vLLM's options are translated
    as in `LLM`. Raises ConfigError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**self.known_options(options))

    __doc__ = f"{__doc__}\n\n{described(EngineConfig)}\n"

    @staticmethod
    def add_cli_args(parser: Any) -> Any:
        """Adds a flag with its default for each option, and for each of vLLM's, to an ArgumentParser or a
        group. Returns the parser."""
        hints = typing.get_type_hints(EngineConfig)
        short = {option.name: [f"-{option.short}"] for option in ENGINE_OPTIONS if option.short}
        for field in dataclasses.fields(EngineConfig):
            argument = argument_of(field, hints[field.name]) | {"default": field.default}
            parser.add_argument(flag_of(field.name), *short.get(field.name, []), **argument)
        for option in ENGINE_OPTIONS:
            if option.name not in hints:
                names = (flag_of(option.name), *short.get(option.name, []))
                parser.add_argument(*names, **argument_of_vllm(option))
        return parser

    @classmethod
    def from_cli_args(cls, arguments: argparse.Namespace) -> EngineArgs:
        """Builds the options from parsed arguments and ignores other arguments."""
        names = [field.name for field in dataclasses.fields(cls)]
        names += [option.name for option in ENGINE_OPTIONS if option.name not in names]
        return cls(**{name: getattr(arguments, name) for name in names if hasattr(arguments, name)})
