"""Programs that the tests of connectors start: they register as a file of their name in a folder, and take it
away when they have drained."""

import contextlib
import sys
import textwrap

import psutil

from shoal.fleet.connectors.connector import Component
from shoal.fleet_views import WorkerState

START_TIMEOUT_S = 2.0
WORKER = textwrap.dedent(
    """
    import os, pathlib, signal, sys, time
    file = pathlib.Path(sys.argv[1], sys.argv[2])
    if sys.argv[3] == "stuck":
        time.sleep(600)

    def end(*_):
        file.with_suffix(".drained").touch()
        file.unlink()
        sys.exit()

    signal.signal(signal.SIGTERM, end)
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    time.sleep(600)
    """
)


def component(folder, name, role, count, how="good", **more):
    words = (sys.executable, "-S", "-c", WORKER, str(folder), "{id}", how)
    return Component(name, words, model="m", role=role, count=count, **more)


def two_components(folder):
    """One worker that does both roles, and no prefill worker."""
    return component(folder, "m", "both", 1), component(folder, "m-prefill", "prefill", 0)


class Folder:
    """A RouterView: a worker is there while its file is, and its process lives."""

    def __init__(self, path):
        self.path = path

    def state_of(self, worker_id):
        return WorkerState.READY if lives(self.pid(worker_id)) else None

    def role_of(self, worker_id):
        """Returns the role in its file `ID.role`, or None without such a file."""
        with contextlib.suppress(FileNotFoundError):
            return (self.path / f"{worker_id}.role").read_text()

    def pid(self, worker_id):
        with contextlib.suppress(FileNotFoundError):
            return int((self.path / worker_id).read_text())

    def ready(self, model, role):
        names = [path.name for path in self.path.iterdir() if path.name.rpartition("-")[2].isdigit()]
        is_prefill = role == "prefill"
        return [name for name in sorted(names) if ("prefill" in name) == is_prefill and self.state_of(name)]

    async def add(self, spec):
        raise NotImplementedError

    async def remove(self, worker_id):
        raise NotImplementedError


def lives(pid):
    """Returns True if the process exists and is not a zombie."""
    if pid is None or not psutil.pid_exists(pid):
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
