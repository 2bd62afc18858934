"""The argument parser of the command. Flags come from dataclass fields, --help shows the common ones, and an
error is one line."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import logging
import re
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

from shoal.errors import ConfigError
from shoal.options.command_words import dashed, readable_integer, with_joined_fields, words_of_file
from shoal.options.fields import kind_of
from shoal.options.vllm import VllmOption, translate, value_of

logger = logging.getLogger(__name__)

# Commands of Ollama, vLLM and Docker, and Shoal's counterparts.
COMMANDS_OF_OTHERS = {
    "run": "chat",
    "list": "models",
    "ls": "models",
    "ps": "top",
    "download": "pull",
    "complete": "generate",
    "collect-env": "doctor",
}
# Options of llama.cpp: Shoal's counterpart, or what to do instead.
_MODEL = "name the model without an option"
_LAYERS = "a GPU has all layers, and --device cpu none"
OPTIONS_OF_OTHERS = {
    **dict.fromkeys(("-m", "-hf", "--hf-repo"), _MODEL),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), _LAYERS),
    **dict.fromkeys(("-t", "--threads"), "set OMP_NUM_THREADS in the environment"),
    **dict.fromkeys(("-c", "--ctx-size"), "--max-model-len"),
    **dict.fromkeys(("-np", "--parallel"), "--max-num-seqs"),
    **dict.fromkeys(("-b", "--batch-size"), "--max-num-batched-tokens"),
    **dict.fromkeys(("-a", "--alias"), "--served-model-name"),
    **dict.fromkeys(("-n", "--n-predict", "--predict"), "--max-tokens"),
    "--temp": "--temperature",
}
CLOSE = 0.7  # least similarity (difflib) of a name that is suggested
ABSENT = object()
MODELS = {"model_path", "models"}  # two ways to name the served models
NEGATIVE_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the nearest name for a misspelt option and keeps rare ones for
    --help-all.

    An option's name may have underscores in place of dashes, and `--option.field value` sets a field of a
    JSON option, as in vLLM. Options cannot be abbreviated: what an abbreviation means would change with every
    new option.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Formatter, **options})
        self._positionals.title = "arguments"
        self.rare: set[argparse.Action] = set()  # shown by --help-all alone
        self.words: dict[argparse.Action, tuple[str, ...]] = {}  # the words that an option accepts
        self.vllm_options: tuple[VllmOption, ...] = ()  # see add_vllm_options
        self.more_words = ""  # advice for more words than there are arguments
        self.removed: dict[str, str] = {}  # why an option of earlier releases was removed
        self.short_titles: dict[object, str] = {}  # the title under which --help joins some groups

    def add_commands(self, title: str = "commands", metavar: str = "COMMAND") -> Commands:
        """Takes one of several commands next. Without one, the help is printed and the exit code is 2."""
        self.set_defaults(run=self._run_without_command)
        return self.add_subparsers(title=title, metavar=metavar)

    def _run_without_command(self, _: argparse.Namespace) -> int:
        sys.stderr.write(self.format_help())
        return 2

    def add_flags(self, config: type, title: str, but: tuple[str, ...] = ()) -> None:
        """Adds a flag for each field of the dataclass `config`, except `but`. A flag that is not given leaves
        no attribute."""
        if "--help-all" not in self._option_string_actions:
            self.add_argument("--help-all", action=_HelpAll, help="show all options and exit")
        group = self.add_argument_group(title)
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            if section := field.metadata["section"]:
                group = self.add_argument_group(section)
                self.short_titles[group] = title
            if field.name in but:
                continue
            action = group.add_argument(flag_of(field.name), **argument_of(field, hints[field.name]))
            if words := field.metadata["limits"].choices:
                self.words[action] = words
            if not field.metadata["common"]:
                self.rare.add(action)

    def add_vllm_options(self, options: tuple[VllmOption, ...]) -> None:
        """Accepts vLLM's other options, which no help shows, and vLLM's short forms. `take_vllm_options`
        handles them."""
        self.vllm_options = options
        self.set_defaults(vllm_options=options)
        for option in options:
            flag, known = flag_of(option.name), self._option_string_actions
            if flag not in known and option.name != option.own:
                self.add_argument(flag, **argument_of_vllm(option))
            if option.short:
                known[f"-{option.short}"] = known[flag]

    def name_choices(self) -> None:
        """Sets argparse's choices, for completion in a shell. Do not parse with this parser afterwards: each
        class of options has its own message for a wrong word."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    command.name_choices()
            elif action in self.words:
                action.choices = self.words[action]

    def format_usage(self) -> str:
        """Returns the usage in one line, without the options."""
        words = ["usage:", self.prog, "[options]"]
        for action in self._get_positional_actions():
            name = str(action.metavar or action.dest)
            words.append(f"[{name}]" if action.nargs in ("?", "*") else name)
        return " ".join(words) + "\n"

    def format_help(self, everything: bool = False) -> str:
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        has_commands = self._subparsers is not None
        groups = sorted(self._action_groups, key=lambda group: has_commands and group is self._optionals)
        if everything:
            titled = [(group.title, group._group_actions) for group in groups]
        else:
            titled = []
            for title, some in itertools.groupby(groups, lambda g: self.short_titles.get(g, g.title)):
                titled.append((title, [a for g in some for a in g._group_actions if a not in self.rare]))
        for title, actions in titled:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        if self.rare and not everything:
            formatter.add_text(f"{len(self.rare)} more options: {self.prog} --help-all")
        return f"{self.format_usage()}\n{formatter.format_help()}"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n{self.format_usage()}see `{self.prog} --help`\n")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Checks the names of all options first, so that a misspelt name is reported before a wrong value.
        The command line takes precedence over options of the file of --config."""
        found, extras = self._parsed(sys.argv[1:] if args is None else args, namespace)
        if extras:  # reported by the command that got them, not by `shoal`
            self.error(f"unrecognized arguments: {' '.join(extras)}" + self.more_words)
        if "--config" in self._option_string_actions and hasattr(found, "config"):
            self._add_options_of_file(found)
        return found, extras

    def _parsed(self, args: Sequence[str], namespace: Any = None) -> Any:
        words = list(args)
        if self.vllm_options:
            words = with_joined_fields(words, self._is_option)
        return super().parse_known_args(self._with_known_names(words), namespace)

    def _add_options_of_file(self, found: argparse.Namespace) -> None:
        words = words_of_file(found.config, self._is_option)
        of_file, extras = self._parsed(words)
        if extras or hasattr(of_file, "config"):
            raise ConfigError(
                f"--config must be a file of options, got {found.config!r} with "
                f"{' '.join(extras) or '--config'!r}; give each option as `name: value`"
            )
        bare, _ = super().parse_known_args([])
        given = {name for name, value in vars(found).items() if value != getattr(bare, name, ABSENT)}
        if given & MODELS:
            given |= MODELS
        for name in vars(of_file).keys() - given:
            setattr(found, name, getattr(of_file, name))

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Returns nothing, as options cannot be abbreviated: "-hello there" is not -h with a value."""
        return []

    def _is_option(self, word: str) -> bool:
        return word in self._option_string_actions or dashed(word) in self._option_string_actions

    def _with_known_names(self, args: Sequence[str]) -> list[str]:
        words = list(args)
        unknown: list[str] = []
        commands = next((a.choices for a in self._actions if isinstance(a, argparse._SubParsersAction)), None)
        is_value = False  # the word is the value of the option before it
        for i, word in enumerate(words):
            if word == "--":
                break
            if not word.startswith("-") or word == "-" or " " in word or NEGATIVE_NUMBER.match(word):
                if commands is not None and not is_value:
                    if word not in commands:
                        known = COMMANDS_OF_OTHERS.get(word)
                        hint = f"did you mean {known}?" if known in commands else _nearest(word, commands)
                        hint = hint or f"choose one of {', '.join(commands)}"
                        self.error(f"unknown command {word!r}; {hint}")
                    break  # the rest belongs to the command
                is_value = False
                continue
            if self.vllm_options and word.startswith("-O") and len(word) > 2:
                word = f"-O={word[2:].removeprefix('=')}"  # -O3
            name, equals, value = word.partition("=")
            if name not in self._option_string_actions:
                name = dashed(name)
            action = self._option_string_actions.get(name)
            if action is not None:
                words[i] = name + equals + value
                is_value = action.nargs is None and not equals
            else:
                if why := self.removed.get(name.lstrip("-").removeprefix("no-").replace("-", "_")):
                    unknown.append(f"{name} was removed: {why}; leave it out")
                    continue
                hint = self._hint(name)
                if texts := [a.metavar for a in self._get_positional_actions() if a.nargs is None]:
                    hint = hint or f"put `--` before a {texts[0]} that begins with a dash"
                unknown.append(f"unknown option {name}" + (f"; {hint}" if hint else ""))
        if unknown:
            self.error("\n".join(unknown))
        return words

    def _hint(self, name: str) -> str:
        """Returns a hint for an unknown option; empty without any."""
        shown = self._shown_names()
        known = OPTIONS_OF_OTHERS.get(name, "")
        if known.startswith("--"):
            known = f"did you mean {known}?" if known in shown else ""
        elif "--max-model-len" not in shown:  # the command has no engine
            known = ""
        return known or _nearest(name, shown)

    def _shown_names(self) -> list[str]:
        """Returns the names of the options that help shows, for a hint."""
        return [n for n, a in self._option_string_actions.items() if a.help is not argparse.SUPPRESS]


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class _HelpAll(argparse.Action):
    """Prints the help with the rare options and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        sys.stdout.write(parser.format_help(everything=True))
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def format_help(self) -> str:
        self._action_max_length += self._indent_increment  # the base class forgets the commands' indent
        return super().format_help()


def integer(text: str) -> int:
    try:
        return readable_integer(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None


def integer_or_auto(text: str) -> int | None:
    """Returns an integer, or None for `auto`: the default depends on the model or the machine."""
    return None if text.lower() == "auto" else integer(text)


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


KINDS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (integer, "N"),
    float: (number, "X"),
    str: (str, "TEXT"),
}


def given_options(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    """Returns the given arguments that are fields of the dataclass `config`."""
    names = [field.name for field in dataclasses.fields(config)]
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def take_vllm_options(arguments: argparse.Namespace) -> list[str]:
    """Replaces vLLM's options by Shoal's among the arguments. Returns a line for each option without effect.
    Raises ConfigError for a refused option."""
    options: tuple[VllmOption, ...] = getattr(arguments, "vllm_options", ())
    names = [option.name for option in options]
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    own = {option.own for option in options} - set(names)
    given |= {name: getattr(arguments, name) for name in own if hasattr(arguments, name)}
    found, lines = translate(given, options, flag_of)
    for name in given:
        delattr(arguments, name)
    for name, value in found.items():
        setattr(arguments, name, value)
    return lines


def warn_of_ignored(lines: Iterable[str]) -> None:
    """Warns of vLLM's options without effect; `lines` are from `take_vllm_options`."""
    for line in lines:
        logger.warning("%s", line)


def flag_of(name: str) -> str:
    """Returns the flag of an option."""
    return "--" + name.replace("_", "-")


def argument_of(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for a field."""
    kind, _ = kind_of(hint)
    notes = []
    if choices := field.metadata["limits"].choices:
        notes.append(" | ".join(choices))
    if field.default is not None:
        notes.append(f"default: {field.default}")
    meaning = field.metadata["help"] + (f" ({'; '.join(notes)})" if notes else "")
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": meaning}
    if kind is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    if dataclasses.is_dataclass(kind) or typing.get_origin(kind) is dict:
        return options | {"metavar": "JSON"}
    if typing.get_origin(kind) is list:
        options |= {"nargs": "+", "action": "extend"}
        [kind] = typing.get_args(kind)
    read, metavar = KINDS[kind]
    if kind is int and field.default is None and "nargs" not in options:
        read = integer_or_auto
    return options | {"type": read, "metavar": metavar}


def argument_of_vllm(option: VllmOption) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for an option that only vLLM has."""
    found: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    if option.takes == "flag":
        return found | {"action": argparse.BooleanOptionalAction}
    if option.takes == "optional":
        return found | {"type": value_of, "nargs": "?", "const": True}
    return found | {"type": value_of, "nargs": "+" if option.takes == "many" else None}


def _nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint: the only name with this prefix, or the most similar one; empty without either."""
    known = list(known)
    begun = [k for k in known if k.startswith(name)]
    # The dashes of options would make all of them similar.
    bare = {k.lstrip("-"): k for k in known}
    close = difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=CLOSE)
    nearest = begun if len(begun) == 1 else [bare[k] for k in close]
    return f"did you mean {nearest[0]}?" if nearest else ""
