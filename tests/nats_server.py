"""A real nats-server for tests: Debian's package, unpacked into a cache folder where it is not installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

CACHES = [Path.home() / ".cache/shoal/nats", Path("/var/cache/shoal/nats")]
BINARY = "usr/sbin/nats-server"


def find() -> str:
    """The program's path. Skips the test where there is none and apt-get cannot fetch it."""
    found = shutil.which("nats-server") or next(
        (str(c / BINARY) for c in CACHES if (c / BINARY).exists()), None
    )
    if found:
        return found
    folder = CACHES[0]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(
            ["apt-get", "download", "nats-server"], cwd=folder, check=True, capture_output=True, timeout=120
        )
        for package in folder.glob("nats-server_*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, folder], check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no nats-server, and apt-get cannot download it ({error}): apt-get install nats-server")
    return str(folder / BINARY)
