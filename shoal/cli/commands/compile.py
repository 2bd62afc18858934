"""`shoal compile`: compiles a model's kernels ahead of its first start."""

from __future__ import annotations

import argparse

from shoal.cli.commands.engine_flags import MODEL_HELP, add_engine_flags
from shoal.config import EngineConfig
from shoal.options.parser import Commands, given_options

DESCRIPTION = """Compiles what a model needs on this machine, so that its next start does not. With
--compile-cache the result is stored there, too, for other machines of this kind. Weights are random, so
nothing is downloaded (except a GGUF model, whose file describes the architecture). Give the options that the
model will be served with."""


def add_compile(commands: Commands) -> None:
    parser = commands.add_parser("compile", help="compile a model's kernels ahead", description=DESCRIPTION)
    parser.add_argument("model_path", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add_engine_flags(parser, run_compile, generates=False)


def run_compile(arguments: argparse.Namespace) -> int:
    from shoal.engine.compile_cache import CompileCache, keep_kernels_together, local_names
    from shoal.engine.llm import LLM

    given = {"load_format": "dummy", **given_options(arguments, EngineConfig)}
    if arguments.model_path is not None:
        given["model"] = arguments.model_path
    url = given.pop("compile_cache", None)
    keep_kernels_together()
    store = CompileCache(url) if url is not None else None
    fetched = store.download() if store is not None else 0
    before = set(local_names())
    with LLM(**given):
        pass
    compiled = len(set(local_names()) - before)
    if compiled or fetched:
        print(f"{compiled} kernels and libraries were compiled, {fetched} fetched")
    else:
        print("nothing was left to compile: all kernels and libraries are in the cache")
    if store is not None:
        print(f"{store.upload()} were put into {store.url}")
    return 0
