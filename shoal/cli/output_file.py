"""A file that a command is to write at its end."""

from __future__ import annotations

import os

from shoal.errors import ConfigError

PLOT_EXTRA = "needs matplotlib: pip install 'shoal[bench]'"


def check_writable(name: str, path: str | None) -> None:
    """Raises ConfigError if `path` cannot be written, before a measurement whose figures would be lost."""
    try:
        if path is not None:
            was_there = os.path.lexists(path)
            open(path, "ab").close()
            if not was_there:
                os.remove(path)  # so that a later error leaves no empty file
    except OSError as error:
        raise ConfigError(f"{name} {path!r} cannot be written: {error.strerror}; choose another") from None
