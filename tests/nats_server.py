"""A real nats-server for tests: Debian's package, unpacked into a cache folder where it is not installed."""

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

CACHES = [Path.home() / ".cache/shoal/nats", Path("/var/cache/shoal/nats")]
BINARY = "usr/sbin/nats-server"


def find() -> str:
    """The program's path. Skips the test if it is missing and apt-get cannot fetch it."""
    found = _find()
    if not Path(found).exists():
        pytest.skip(f"no nats-server, and apt-get cannot download it ({found}): apt-get install nats-server")
    return found


@functools.cache
def _find() -> str:
    """Returns the path, or the reason why it is missing."""
    found = shutil.which("nats-server")
    if found:
        return found
    for cache in CACHES:
        if (cache / BINARY).exists():
            return str(cache / BINARY)
    folder = CACHES[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["apt-get", "download", "nats-server"], cwd=folder, check=True, capture_output=True, timeout=60
        )
        for package in folder.glob("nats-server_*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, folder], check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return str(folder / BINARY)
