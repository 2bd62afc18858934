"""A random trace that fails prints the call that repeats it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def prints_its_seed(trace: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function `trace`, whose arguments are a seed and sizes."""

    @functools.wraps(trace)
    def run(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
        try:
            return trace(*args, **named)
        except BaseException:
            given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in named.items())])
            print(f"failed: {trace.__name__}({given})")
            raise

    return run
