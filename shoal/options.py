"""The command's parser. Flags come from dataclass fields, --help shows the common ones, and a mistake is one
line."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import re
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from shoal.api import DRAWING, LENGTH, SamplingParams
from shoal.config import IGNORED_OPTIONS, UNSUPPORTED_OPTIONS, EngineConfig
from shoal.fields import kind_of

CLOSE = 0.7  # how similar (difflib) a name is to what it is taken for
NEGATIVE_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that names a misspelt option's neighbour and keeps rare ones for --help-all.

    Underscores in an option's name are taken for dashes, as vLLM does. Options cannot be abbreviated: what an
    abbreviation means would change with every new option.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Formatter, **options})
        self._positionals.title = "arguments"
        self.rare: set[argparse.Action] = set()  # shown by --help-all alone
        self.words: dict[argparse.Action, tuple[str, ...]] = {}  # that an option takes, as its class checks
        self.foreign: dict[str, str] = {}  # options of other programs, and what to do about each
        self.short_titles: dict[object, str] = {}  # the title under which --help joins some groups

    def add_flags(self, config: type, title: str, but: tuple[str, ...] = ()) -> None:
        """Adds a flag for each field of the dataclass `config` but some. One not given leaves no trace."""
        if "--help-all" not in self._option_string_actions:
            self.add_argument("--help-all", action=_HelpAll, help="show all options and exit")
        if config is EngineConfig:
            self.foreign = dict.fromkeys(map(flag_of, IGNORED_OPTIONS), "it means nothing here; leave it out")
            self.foreign |= dict.fromkeys(
                map(flag_of, UNSUPPORTED_OPTIONS), "Shoal does not do that; leave it out"
            )
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

    def name_choices(self) -> None:
        """Tells argparse which words the options take, for a shell that completes them. Arguments are not
        parsed with this parser any more: each class of options has its own message for a wrong word."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    command.name_choices()
            elif action in self.words:
                action.choices = self.words[action]

    def add_sampling_flags(self) -> None:
        """Adds a flag for each of SAMPLING. There is none for the seed, as the engine's --seed serves."""
        group = self.add_argument_group("sampling")
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
                    self.rare.add(action)

    def format_usage(self) -> str:
        """One line: the options are counted below it, not listed."""
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
        """Checks the names of all options first, so that a misspelt name is told before a wrong value."""
        words = self._with_known_names(sys.argv[1:] if args is None else args)
        found, extras = super().parse_known_args(words, namespace)
        if extras:  # told by the command that got them, not by `shoal`
            self.error(f"unrecognized arguments: {' '.join(extras)}")
        return found, extras

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Nothing is abbreviated: a text such as "-hello there" is not -h with a value."""
        return []

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
                        verb = "is" if len(commands) == 1 else "are"
                        hint = _nearest(word, commands) or f"there {verb} {', '.join(commands)}"
                        self.error(f"there is no command {word!r}; {hint}")
                    break  # the rest is the command's
                is_value = False
                continue
            name, equals, value = word.partition("=")
            if name not in self._option_string_actions:
                name = name[:2] + name[2:].replace("_", "-")
            action = self._option_string_actions.get(name)
            if action is not None:
                words[i] = name + equals + value
                is_value = action.nargs is None and not equals
            else:
                hint = self.foreign.get(name) or _nearest(name, self._option_string_actions)
                if texts := [a.metavar for a in self._get_positional_actions() if a.nargs is None]:
                    hint = hint or f"`--` comes before a {texts[0]} that begins with a dash"
                unknown.append(f"there is no option {name}" + (f"; {hint}" if hint else ""))
        if unknown:
            self.error("\n".join(unknown))
        return words


class _HelpAll(argparse.Action):
    """Prints the help with the rare options and ends."""

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
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


KINDS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (integer, "N"),
    float: (number, "X"),
    str: (str, "TEXT"),
}


def given_options(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    """Returns the fields of the dataclass `config` that are among the arguments."""
    names = [field.name for field in dataclasses.fields(config)]
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def flag_of(name: str) -> str:
    """The command line's name of an option."""
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
    if dataclasses.is_dataclass(kind):
        return options | {"metavar": "JSON"}
    if typing.get_origin(kind) is list:
        options["nargs"] = "+"
        [kind] = typing.get_args(kind)
    read, metavar = KINDS[kind]
    return options | {"type": read, "metavar": metavar}


def _sampling_numbers() -> dict[str, tuple[type, dataclasses.Field[Any]]]:
    """(type, field) of each number in SamplingParams that says how tokens are drawn or where an answer
    ends."""
    hints = typing.get_type_hints(SamplingParams)
    found, section = {}, None
    for field in dataclasses.fields(SamplingParams):
        section = field.metadata["section"] or section
        kind, _ = kind_of(hints[field.name])
        if section in (DRAWING, LENGTH) and kind in (int, float):
            found[field.name] = (kind, field)
    return found


# How tokens are drawn: flags of the commands that generate, and what /set sets in a chat.
SAMPLING = _sampling_numbers()


def _nearest(name: str, known: Iterable[str]) -> str:
    """A hint at what was meant: the one that begins so, or the most similar; empty if there is none."""
    known = list(known)
    begun = [k for k in known if k.startswith(name)]
    # The dashes of options would make all of them similar.
    bare = {k.lstrip("-"): k for k in known}
    close = difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=CLOSE)
    nearest = begun if len(begun) == 1 else [bare[k] for k in close]
    return f"did you mean {nearest[0]}?" if nearest else ""
