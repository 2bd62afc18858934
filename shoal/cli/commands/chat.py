"""`shoal chat`: a conversation with a model in this process or on a server."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from shoal.cli.address import API_KEY_HELP, server_key
from shoal.cli.commands.engine_flags import MODEL_HELP, add_engine_flags, build_llm
from shoal.cli.sampling_flags import sampling_options
from shoal.config import DEFAULT_MODEL, SERVER_SPECULATION, EngineConfig
from shoal.errors import ConfigError
from shoal.options.parser import Commands, given_options
from shoal.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shoal.engine.llm import LLM

DESCRIPTION = "A conversation with a model on this machine, or on a server (--url). /help lists its commands."


def add_chat(commands: Commands) -> None:
    parser = commands.add_parser("chat", help="talk with a model", description=DESCRIPTION)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help=f"{MODEL_HELP}; with --url, the server's name",
    )
    parser.more_words = "; a question comes from a pipe: echo QUESTION | shoal chat MODEL"
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--url",
        metavar="URL",
        help="address of an OpenAI-compatible server to talk with, such as http://127.0.0.1:8000",
    )
    parser.add_argument("--api-key", metavar="KEY", help=API_KEY_HELP)
    add_engine_flags(parser, run_chat)


def run_chat(arguments: argparse.Namespace) -> int:
    from shoal.cli.chat import Chat
    from shoal.cli.keyboard import Keyboard
    from shoal.cli.speakers import MAX_TOKENS, LocalSpeaker, RemoteSpeaker
    from shoal.cli.terminal import note

    settings = sampling_options(arguments)
    # reports a wrong option before a model is loaded
    SamplingParams(**{"max_tokens": MAX_TOKENS if arguments.url is None else None, **settings})
    keyboard = Keyboard(sys.stdin.isatty() and sys.stdout.isatty())
    if arguments.url is not None:
        if useless := given_options(arguments, EngineConfig).keys() - {"model", "seed"}:
            raise ConfigError(
                f"{', '.join(sorted(useless))}: the server at {arguments.url} decides that; "
                "leave it out, or leave out --url"
            )
        speaker = RemoteSpeaker(
            arguments.url, getattr(arguments, "model", None), server_key(arguments.api_key)
        )
        return Chat(speaker, keyboard, arguments.system, settings).run()
    if arguments.api_key is not None:
        raise ConfigError("--api-key is for a server; add its --url, or leave the key out")
    if keyboard.is_terminal:
        note(f"loading {getattr(arguments, 'model', DEFAULT_MODEL)} ...")

    def build(model: str | None = None) -> LLM:
        return build_llm(arguments, model, speculative_config=SERVER_SPECULATION)

    local = LocalSpeaker(build(), build)
    with contextlib.closing(local):
        return Chat(local, keyboard, arguments.system, settings).run()
