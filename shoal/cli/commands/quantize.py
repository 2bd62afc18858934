"""`shoal quantize`: writes a model with fewer bits per weight."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.errors import ConfigError
from shoal.options.parser import Commands

DESCRIPTION = """Writes a model whose layers have weights of fewer bits: fp8 with a scale for each output, or
int4 with one for each group of inputs. The folder has the format of compressed-tensors, which vLLM and
transformers read as well. Tensors are converted one by one; no GPU is needed."""


def add_quantize(commands: Commands) -> None:
    parser = commands.add_parser("quantize", help="write a model with fewer bits", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of an unquantized model")
    parser.add_argument("--to", choices=("fp8", "int4"), help="format of the new weights; required")
    parser.add_argument("--output", metavar="DIR", help="a new folder; default: the model's name and format")
    parser.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        default=128,
        help="int4: inputs that share a scale (default: 128)",
    )
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")
    parser.set_defaults(run=run_quantize)


def run_quantize(arguments: argparse.Namespace) -> int:
    if arguments.to is None:
        raise ConfigError("--to must be fp8 or int4, got nothing; add one: shoal quantize MODEL --to fp8")
    from shoal.weights.quantize import quantize
    from shoal.weights.source import resolve

    files = resolve(arguments.model, arguments.revision)
    target = arguments.output or f"{Path(arguments.model).resolve().name}-{arguments.to}"
    print(quantize(files, arguments.to, Path(target), arguments.group_size))
    return 0
