"""The `shoal` command. Each file of `commands/` adds one command's parser and runs it; heavy imports happen
inside the run functions."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import sys
from collections.abc import Sequence

from shoal import __version__
from shoal.cli.commands.bench import add_bench, add_profile
from shoal.cli.commands.chat import add_chat
from shoal.cli.commands.compile import add_compile
from shoal.cli.commands.doctor import add_doctor
from shoal.cli.commands.fleet import add_fleet
from shoal.cli.commands.generate import add_generate
from shoal.cli.commands.models import add_models, add_pull
from shoal.cli.commands.plan import add_plan
from shoal.cli.commands.quantize import add_quantize
from shoal.cli.commands.route import add_route
from shoal.cli.commands.run_batch import add_run_batch
from shoal.cli.commands.serve import add_serve, run_serve
from shoal.cli.commands.sim import add_sim
from shoal.cli.commands.top import add_top
from shoal.errors import ShoalError
from shoal.options.parser import Commands, Parser, take_vllm_options, warn_of_ignored

DESCRIPTION = "A small, very fast LLM inference system."
COMPLETION_DESCRIPTION = """Prints a script that completes this command. bash: eval "$(shoal completion bash)"
in ~/.bashrc; zsh: shoal completion zsh > a file _shoal in a folder of $fpath; fish: shoal completion fish >
~/.config/fish/completions/shoal.fish"""
SHELLS = ("bash", "zsh", "fish")
BROKEN_PIPE = 128 + 13  # the exit code of a program that SIGPIPE has ended


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 with a line on stderr for a user's mistake. Wrong arguments exit (2)."""
    _open_streams()
    try:
        arguments = build_parser().parse_args(argv)
        arguments.ignored = take_vllm_options(arguments)
        logging.basicConfig(
            level=logging.INFO if arguments.verbose else logging.WARNING,
            format="%(levelname)s %(name)s: %(message)s",
        )
        if arguments.run is not run_serve:  # it warns once its own log is set up
            warn_of_ignored(arguments.ignored)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has closed its end
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_output()
        where = error.filename or "the output"
        print(f"shoal: {where} cannot be written: {error.strerror}; make room there", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return code


def _open_streams() -> None:
    """Opens /dev/null for each standard stream that the caller has closed, and accepts input that is not
    UTF-8, so that a command can report it."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names may have letters that this terminal does not


def _drop_output() -> None:
    """Sends buffered output to /dev/null, so that writing it does not fail at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> Parser:
    parser = Parser(prog="shoal", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    parser.set_defaults(verbose=False)
    commands = parser.add_commands()
    for add in (
        add_generate,
        add_chat,
        add_serve,
        add_run_batch,
        add_route,
        add_plan,
        add_fleet,
        add_models,
        add_pull,
        add_bench,
        add_profile,
        add_compile,
        add_quantize,
        add_sim,
        add_doctor,
        add_top,
    ):
        add(commands)
    _add_completion(commands)
    _add_help(commands, parser)
    return parser


def _add_completion(commands: Commands) -> None:
    parser = commands.add_parser(
        "completion", help="complete this command in a shell", description=COMPLETION_DESCRIPTION
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    parser.set_defaults(run=run_completion)


def run_completion(arguments: argparse.Namespace) -> int:
    import shtab

    parser = build_parser()
    parser.name_choices()
    script = shtab.complete(parser, arguments.shell)
    # bash completes file names where the script has nothing to offer
    print(script.replace("complete -o bashdefault ", "complete -o bashdefault -o default "))
    return 0


def _add_help(commands: Commands, shoal: Parser) -> None:
    parser = commands.add_parser("help", help="explain a command")
    parser.add_argument("words", nargs="*", metavar="COMMAND", help="such as serve, or bench latency")
    parser.set_defaults(run=lambda arguments: shoal.parse_args([*arguments.words, "--help"]))


if __name__ == "__main__":
    sys.exit(main())
