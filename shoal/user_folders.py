"""The user's folders that outlive a process: what is fetched or compiled once, and the state of what runs.

They lie where the XDG base directories have them, below the home folder, unless variables say otherwise.
"""

from __future__ import annotations

import os
from pathlib import Path

from shoal.errors import ConfigError


def cache_folder() -> Path:
    """Returns $SHOAL_CACHE, or else shoal's folder in the user's cache. Raises ConfigError if there is no
    home."""
    if folder := os.environ.get("SHOAL_CACHE"):
        return Path(folder)
    return _base("XDG_CACHE_HOME", ".cache", "SHOAL_CACHE") / "shoal"


def state_folder() -> Path:
    """Returns shoal's folder of what the user's programs remember. Raises ConfigError if there is no home."""
    return _base("XDG_STATE_HOME", ".local/state", "XDG_STATE_HOME") / "shoal"


def _base(variable: str, below_home: str, way_out: str) -> Path:
    if folder := os.environ.get(variable):
        return Path(folder)
    home = os.path.expanduser("~")
    if home == "~":  # a container may run as a user whom its passwd does not have
        raise ConfigError(f"user {os.getuid()} has no home folder, as HOME is not set; set it, or {way_out}")
    return Path(home) / below_home
