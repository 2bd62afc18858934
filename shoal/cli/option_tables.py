"""The pages of all options, generated from the data that the code uses: `python -m shoal.cli.option_tables`
rewrites docs/options.md and docs/vllm-options.md of this checkout.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from pathlib import Path
from typing import Any

from shoal.config import (
    EngineConfig,
    KVEventsConfig,
    KVTransferConfig,
    ServerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
)
from shoal.fleet.config import FleetConfig
from shoal.fleet.planner.config import PlannerConfig
from shoal.options.fields import Limits, interval, kind_of
from shoal.options.parser import flag_of
from shoal.options.vllm import EARLIER_OPTIONS, ENGINE_OPTIONS, NESTED_OPTIONS, SERVER_OPTIONS, VllmOption
from shoal.sampling_params import SamplingParams, StructuredOutputsParams

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
VLLM_PAGE = PAGE.with_name("vllm-options.md")
VLLM_HEAD = """# Options of vllm serve

Use a command line of `vllm serve` with `shoal serve`, and look up here which options have an effect:

    shoal serve Qwen/Qwen3-0.6B --max_model_len 4k -tp 1 --no-enable-prefix-caching

Names may be written as in vLLM: `-tp 2`, `--max_model_len 4k`, `--no-enable-prefix-caching`,
`--kv-transfer-config.kv_role kv_both`, `--structured-outputs-config '{"disable_any_whitespace": true}'`, and
as keys of a YAML file (`--config FILE`); the command line takes precedence over the file. The engine's
options also work in `LLM(...)`, `EngineArgs(...)` and a fleet's file. An option of the same name has
[Shoal's default](options.md): `--host`, for example, is 127.0.0.1. For each given option without effect, a
line of the log says why.

This page is generated from the table that the code uses: `python -m shoal.cli.option_tables` writes it, and
tests check that it is current and that no option of vLLM 0.24 is missing.
"""
HEAD = """# Options

Look up every option of the engine, the server, the router and the planner, and every sampling parameter. A
command lists its own options, too:

    shoal serve --help-all

Names and defaults are vLLM's where it has them. This page is generated from the code: `python -m
shoal.cli.option_tables` writes it, and a test checks that it is current.
"""
ENGINE = """## The engine

Arguments of `LLM(...)` and `EngineArgs(...)`, and flags of `shoal generate`, `chat`, `serve`, `bench` and
`profile`: `max_model_len=4096` is `--max-model-len 4096`. An option with the values yes or no is a flag, with
`--no-...` as its opposite.
"""
NESTED = """## Options with fields of their own

A dict in Python, JSON on the command line, such as
`--kv-events-config '{"enable_kv_cache_events": true}'`.
"""
SERVER = """## The server

Flags of `shoal serve`, in addition to the engine's.
"""
ROUTER = """## The router

Flags of `shoal route`, and keys of `[router]` in a fleet's file, with underscores. `shoal route` also has the
options of the server that do not concern an engine.
"""
PLANNER = """## The planner

Keys of `[planner]` in a fleet's file.
"""
SAMPLING = """## Sampling parameters

Fields of `SamplingParams(...)`, and of request bodies (there `logprobs` follows OpenAI's API, and the default
may come from the model's generation_config.json). The numbers under
"Sampling" and "Length of an answer" are flags of `shoal generate`, `chat`, `bench` and `profile`, too,
and names for `/set` in a chat.
"""


def page() -> str:
    """Returns the page of options as Markdown."""
    parts = [HEAD]
    parts += [ENGINE, _tables(EngineConfig, as_flags=True)]
    parts += [NESTED, _tables(KVEventsConfig, as_flags=False)]
    parts += [_tables(KVTransferConfig, as_flags=False)]
    parts += [_tables(SpeculativeConfig, as_flags=False)]
    parts += [_tables(StructuredOutputsConfig, as_flags=False)]
    parts += [SERVER, _tables(ServerConfig, as_flags=True)]
    parts += [ROUTER, _tables(FleetConfig, as_flags=True)]
    parts += [PLANNER, _tables(PlannerConfig, as_flags=False)]
    parts += [SAMPLING, _tables(SamplingParams, as_flags=False)]
    return "\n".join(parts)


def vllm_page() -> str:
    """Returns the page of vLLM's options as Markdown."""
    parts = [VLLM_HEAD]
    for title, options in {
        "The server": SERVER_OPTIONS,
        "The engine": ENGINE_OPTIONS,
        "Fields of JSON options": NESTED_OPTIONS,
        "Earlier releases": EARLIER_OPTIONS,
    }.items():
        rows = [f"| `{_spelled(option)}` | {_fate(option)} |" for option in options]
        parts.append("\n".join([f"## {title}", "", "| option | here |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _spelled(option: VllmOption) -> str:
    flag, dot, field = option.name.partition(".")
    return flag_of(flag) + dot + field + (f", -{option.short}" if option.short else "")


def _fate(option: VllmOption) -> str:
    """Returns the effect of an option, in words."""
    if option.own:
        same = "" if option.own == option.name else f": `{flag_of(option.own)}`"
        words = [
            f"`{_word(a)}` is {f'`{_word(b)}`' if b is not None else 'the default'}"
            for a, b in option.words.items()
        ]
        return f"the same effect{same}" + (f"; {', '.join(words)}" if words else "")
    if option.accepted is None:
        return f"no effect: {option.why}"
    words = [f"`{_word(value)}`" for value in option.accepted]
    why = f" ({option.why})" if option.why and option.why not in option.instead else ""
    but = f", but for {', '.join(words)}{why}" if words and option.takes != "flag" else why
    way = option.instead.format(value="N") if "{value}" in option.instead else option.instead.format()
    return f"refused{but}: {way}".replace("|", "\\|")


def _word(value: Any) -> str:
    if value == "":
        return '""'
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tables(config: type, as_flags: bool) -> str:
    """Returns a table for each section, in the order of the sections' first fields."""
    hints = typing.get_type_hints(config)
    sections: dict[str, list[str]] = {}
    section = ""
    for field in dataclasses.fields(config):
        section = field.metadata["section"] or section
        name = flag_of(field.name) if as_flags else field.name
        meaning = field.metadata["help"].replace("|", "\\|")
        row = f"| `{name}` | {_default(field)} | {_values(field, hints[field.name])} | {meaning} |"
        sections.setdefault(section, []).append(row)
    head = f"| {'flag' if as_flags else 'name'} | default | values | meaning |\n|---|---|---|---|"
    tables = []
    for title, rows in sections.items():
        shown = title if "_" in title else title[0].upper() + title[1:]
        tables.append("\n".join([f"### {shown}", "", head, *rows, ""]))
    return "\n".join(tables)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    return "" if field.default in (None, "") else f"`{field.default}`"


def _values(field: dataclasses.Field[Any], hint: Any) -> str:
    """Returns the possible values, in words."""
    kind, _ = kind_of(hint)
    limits: Limits = field.metadata["limits"]
    if limits.choices:
        return ", ".join(f"`{choice}`" for choice in limits.choices)
    if kind is bool:
        return "yes or no"
    if kind in (int, float):
        name = "integer" if kind is int else "number"
        if limits == Limits():
            return name
        if kind is float:
            return f"{name} in {interval(limits)}"
        return f"{name} from {limits.low}" + ("" if limits.high is None else f" to {limits.high}")
    if kind is str:
        return "text or texts" if list[str] in typing.get_args(hint) else "text"
    if typing.get_origin(kind) is list:
        return f"list of {'integers' if typing.get_args(kind) == (int,) else 'texts'}"
    return f"`{kind.__name__}`" if kind is StructuredOutputsParams else "JSON"


def main() -> int:
    PAGE.write_text(page(), "utf-8")
    VLLM_PAGE.write_text(vllm_page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
