"""The user's folders: a cache of downloads and compiled kernels, and the state of running fleets.

They are the XDG base directories below the home folder, unless environment variables name others.
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
    """Returns Shoal's folder in the user's state folder. Raises ConfigError if there is no home."""
    return _base("XDG_STATE_HOME", ".local/state", "XDG_STATE_HOME") / "shoal"


def kernel_folder() -> Path:
    """Returns the folder of compiled kernels: the cache folder or, if that cannot be written, a private
    folder among the temporary files. Raises ConfigError if there is neither."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (ConfigError, OSError):
        pass  # a container's user may have no home, or a read-only one
    return _temporary_folder()


def _temporary_folder() -> Path:
    """Returns a private temporary folder. Refuses a folder that other users own or may write, as Shoal would
    run libraries that they put there."""
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
    if home == "~":  # a container may run as a user without an entry in passwd
        raise ConfigError(f"user {os.getuid()} has no home folder, as HOME is not set; set it, or {way_out}")
    return Path(home) / below_home
