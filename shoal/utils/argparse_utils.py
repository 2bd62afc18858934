"""FlexibleArgumentParser, under vLLM's name and in vLLM's place: its scripts read command lines with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from shoal.errors import ConfigError
from shoal.options.command_words import dashed, with_joined_fields, words_of_file


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that accepts --max_model_len for --max-model-len, --option.field value for a field of
    a JSON option, and --config FILE for options in YAML, over which the command line takes precedence."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        try:
            if "--config" not in self._option_string_actions:
                words = self._with_file(words)
            words = with_joined_fields(words, self._is_option)
        except ConfigError as error:
            self.error(str(error))
        return super().parse_known_args(
            [dashed(word) if word.startswith("--") else word for word in words], namespace
        )

    def _is_option(self, word: str) -> bool:
        return dashed(word) in self._option_string_actions

    def _with_file(self, words: list[str]) -> list[str]:
        """Returns the words of the file of --config, followed by the other words."""
        for i, word in enumerate(words):
            name, equals, path = word.partition("=")
            if name == "--config" and (equals or i + 1 < len(words)):
                rest = words[:i] + words[i + (1 if equals else 2) :]
                return words_of_file(path if equals else words[i + 1], self._is_option) + rest
        return words
