"""Other programs, run so that they end: what they say, or why they say nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

LAST_WORDS = 300  # characters


@dataclass(frozen=True, slots=True)
class Said:
    """`failure`: why the program did not do its work, with its last line; None: it did."""

    out: str
    failure: str | None


def run(words: Sequence[str], limit_s: float, given: str | None = None) -> Said:
    """Runs a program for `limit_s` seconds at most, in a session of its own that ends with it. `given` is its
    standard input. What it has said until it failed is there, too."""
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE if given is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Said("", f"it cannot be started: {error.strerror}")
    try:
        out, err = process.communicate(given, limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return Said(out, f"it did not end within {limit_s:g} s")
    last = (err.strip().splitlines() or [""])[-1][:LAST_WORDS]
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        return Said(out, f"it was ended by {name}" + (f": {last}" if last else ""))
    if process.returncode:
        return Said(out, last or f"it ended with exit code {process.returncode}")
    return Said(out, None)


def python_failure(code: str, limit_s: float) -> str | None:
    """Returns the reason why a Python process of its own cannot run this code; None: it can. A library that
    crashes or hangs does so there."""
    return run([sys.executable, "-c", code], limit_s).failure


def version_of(package: str) -> str | None:
    """The version that is installed; None: it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
