"""Real programs of Prometheus for tests: Debian's package, unpacked into a cache folder where it is not installed."""

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

CACHE = Path.home() / ".cache/shoal/prometheus"


def find(name):
    """The path of `prometheus` or `promtool`. Skips the test if it is missing and apt-get cannot fetch it."""
    found = shutil.which(name)
    if found:
        return found
    why = _fetch()
    if why:
        pytest.skip(f"no {name}, and apt-get cannot download it ({why}): apt-get install prometheus")
    return str(CACHE / "usr/bin" / name)


@functools.cache
def _fetch():
    """Returns why it is not in the cache folder; None: it is."""
    if (CACHE / "usr/bin/promtool").exists():
        return None
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        words = ["apt-get", "download", "prometheus"]
        subprocess.run(words, cwd=CACHE, check=True, capture_output=True, timeout=120)
        for package in CACHE.glob("prometheus_*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, CACHE], check=True, capture_output=True)
            package.unlink()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None
