"""The user's folders that outlive a process: what is fetched or compiled once, and the state of what runs.

They lie where the XDG base directories have them, below the home folder, unless variables say otherwise.
"""

from __future__ import annotations

import os
import stat
import tempfile
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


def kernel_folder() -> Path:
    """Returns where compiled kernels are kept: the cache folder, or where that cannot be written, a folder
    of the user's own among the temporary files. Raises ConfigError if there is neither."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (ConfigError, OSError):
        pass  # a container's user may have no home, or one in which nothing can be written
    return _temporary_folder()


def _temporary_folder() -> Path:
    """Other users could put a library of theirs into a folder that they own or may write, and Shoal would
    run it: such a folder is refused."""
    way_out = "set SHOAL_CACHE to a folder that can be written"
    try:
        folder = Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"kernels can be kept neither in the cache nor a temporary folder: {error}; {way_out}"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"the temporary folder {folder} must be this user's and closed to others; {way_out}"
        )
    return folder


def _base(variable: str, below_home: str, way_out: str) -> Path:
    if folder := os.environ.get(variable):
        return Path(folder)
    home = os.path.expanduser("~")
    if home == "~":  # a container may run as a user whom its passwd does not have
        raise ConfigError(f"user {os.getuid()} has no home folder, as HOME is not set; set it, or {way_out}")
    return Path(home) / below_home
