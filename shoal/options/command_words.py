"""Command lines in vLLM's forms: fields of JSON options (--option.field value), and options from a YAML file
(--config FILE)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from shoal.errors import ConfigError

SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")


def dashed(word: str) -> str:
    """Returns the word with dashes for underscores in an option's name: --max_model_len=5. A field after a
    dot keeps its underscores."""
    name, equals, value = word.partition("=")
    name, dot, fields = name.partition(".")
    return name[:2] + name[2:].replace("_", "-") + dot + fields + equals + value


def readable_integer(text: str) -> int:
    """Reads 4096, 4k (4000), 4K (4096) or 25.6k; the same for m, g and t. Raises ValueError."""
    if (found := SUFFIXED.fullmatch(text.strip())) is None:
        return int(text)
    number, suffix = found.groups()
    power = 1 + "kmgt".index(suffix.lower())
    return int(number) * 1024**power if suffix.isupper() else round(float(number) * 1000**power)


def with_joined_fields(words: Sequence[str], is_option: Callable[[str], bool]) -> list[str]:
    """Returns the words with the fields of each option put together as the option's JSON, at the end:
    `--option.a 1 --option.b.c+ x` becomes `--option {"a": 1, "b": {"c": ["x"]}}`. A `+` makes or extends a
    list. JSON of the same option is joined with its fields. Raises ConfigError for a field without a
    value."""
    found: list[str] = []
    joined: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        option, dot, path = name.partition(".")
        if word == "--":
            end = [word, *rest]
            return [*found, *_as_words(found, joined), *end]
        if not (word.startswith("-") and dot and path and is_option(option)):
            found.append(word)
            continue
        if not equals and (value := next(rest, None)) is None:  # type: ignore[assignment]
            raise ConfigError(f"{name} must have a value; give one after it")
        fields = joined.setdefault(dashed(option), {})
        if path.endswith("+"):
            _put(fields, path[:-1].split("."), value.split(","))
        else:
            _put(fields, path.split("."), _json_or_text(value))
    return [*found, *_as_words(found, joined)]


def words_of_file(path: str, is_option: Callable[[str], bool]) -> list[str]:
    """Returns a YAML file of options as words of a command line. Its keys are names of options, with dashes
    or underscores. A value true is a flag and false its opposite, a list several values, a mapping JSON, and
    null nothing. Raises ConfigError."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            options = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(
            f"--config must be a YAML file, got {path!r}, which cannot be read: {what}"
        ) from None
    if not isinstance(options, dict | None) or not all(isinstance(key, str) for key in options or ()):
        raise ConfigError(
            f"--config must be a YAML file of options, got {path!r}; write a line `name: value` for each"
        )
    words: list[str] = []
    for key, value in (options or {}).items():
        flag = dashed(f"--{key.strip().lstrip('-')}")
        if isinstance(value, bool):
            opposite = f"--no-{flag[2:]}"
            words += [flag] if value else [opposite] if is_option(opposite) else []
        elif isinstance(value, list):
            words += [flag, *map(str, value)] if value else []
        elif isinstance(value, dict):
            words.append(f"{flag}={json.dumps(value)}")
        elif value is not None:
            words.append(f"{flag}={value}")
    return words


def _as_words(words: list[str], joined: dict[str, Any]) -> list[str]:
    """Returns `--option JSON` for each option. Removes JSON of the same option from `words`."""
    found = []
    for option, fields in joined.items():
        for i, word in enumerate(words):
            name, equals, value = word.partition("=")
            if dashed(name) != option:
                continue
            whole = _json_or_text(value if equals else words[i + 1] if i + 1 < len(words) else "")
            if isinstance(whole, dict):
                for field, one in fields.items():
                    _put(whole, [field], one)
                fields = whole
                del words[i : i + (1 if equals else 2)]
            break
        found += [option, json.dumps(fields)]
    return found


def _put(fields: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        inner = fields.get(name)
        fields[name] = fields = inner if isinstance(inner, dict) else {}
    old = fields.get(last)
    if isinstance(old, list) and isinstance(value, list):
        value = old + value
    elif isinstance(old, dict) and isinstance(value, dict):
        for name, one in value.items():
            _put(old, [name], one)
        return
    fields[last] = value


def _json_or_text(text: str) -> Any:
    for read in (json.loads, readable_integer):
        try:
            return read(text)
        except ValueError:
            pass
    return text
