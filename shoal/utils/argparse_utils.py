"""FlexibleArgumentParser, under vLLM's name and in vLLM's place: its scripts read command lines with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that takes --max_model_len for --max-model-len."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_dashes(argument) for argument in given], namespace)


def _with_dashes(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument
