"""The folder of shared memory, which all processes of a machine have in common: what a test has left in it."""

import os
import time
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")
PATIENCE_S = 240


def names():
    return set(os.listdir(FOLDER))


def assert_nothing_left(before):
    """Waits until each new file since `before` is gone, or is mapped by processes that are not children of this
    one: other tests run on this machine, too."""
    deadline = time.monotonic() + PATIENCE_S
    while left := names() - before - _mapped_by_others():
        assert time.monotonic() < deadline, f"left in {FOLDER}: {left}"
        time.sleep(0.1)


def _mapped_by_others():
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    found = set()
    for pid in set(psutil.pids()) - own:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:  # it has ended
            continue
        found |= {
            line.rpartition("/")[2].removesuffix(" (deleted)") for line in lines if f" {FOLDER}/" in line
        }
    return found
