"""`shoal models`, `shoal models rm` and `shoal pull`: the models in this machine's caches."""

from __future__ import annotations

import argparse

from shoal.options.parser import Commands, Parser

DESCRIPTION = "Lists the models in this machine's caches; `shoal models rm NAME` removes one."


def add_models(commands: Commands) -> None:
    models = commands.add_parser("models", help="list or remove downloaded models", description=DESCRIPTION)
    models.add_argument("--json", action="store_true", help="print JSON")
    actions = models.add_subparsers(title="commands", metavar="[rm]")
    rm = actions.add_parser(
        "rm", help="remove models", description="Removes downloaded models, after a question at a terminal."
    )
    rm.add_argument("names", nargs="+", metavar="NAME", help="name as `shoal models` lists it")
    rm.add_argument("--yes", "-y", action="store_true", help="do not ask")
    for parser in (models, rm):
        _add_download_dir(parser)
    models.set_defaults(run=run_models)
    rm.set_defaults(run=run_models_rm)


def add_pull(commands: Commands) -> None:
    parser = commands.add_parser(
        "pull", help="download a model", description="Downloads a model; nothing is loaded."
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="smollm2, gemma3-270m, a model of the hub (Qwen/Qwen3-0.6B, Qwen/Qwen3-8B-GGUF:Q4_K_M), one of "
        "Ollama's names (qwen3:8b), or a URL (s3://bucket/model)",
    )
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")
    _add_download_dir(parser)
    parser.set_defaults(run=run_pull)


def _add_download_dir(parser: Parser) -> None:
    parser.add_argument(
        "--download-dir",
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="folder of the files from the hub; default: the hub library's cache",
    )


def run_models(arguments: argparse.Namespace) -> int:
    from shoal.cli.models import list_models

    return list_models(arguments.json, getattr(arguments, "download_dir", None))


def run_models_rm(arguments: argparse.Namespace) -> int:
    from shoal.cli.models import remove_models

    return remove_models(arguments.names, arguments.yes, getattr(arguments, "download_dir", None))


def run_pull(arguments: argparse.Namespace) -> int:
    from shoal.cli.models import pull

    return pull(arguments.name, arguments.revision, getattr(arguments, "download_dir", None))
