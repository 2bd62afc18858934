"""Workers and routers for soaks: the same commands as in fleet_processes, in processes that are forked from one
that has imported everything (quick_starts.py). A worker is there in a fraction of the time that its imports would
take, and so is its core, which is forked from a process that its server forks while it has no threads yet.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
from typing import NoReturn

from shoal.cli import main as command
from shoal.engine.process import core_process
from tests.fleet_processes import Processes
from tests.quick_starts import PRELOADED, Forks
from tests.serving import PYTHON

PR_SET_PDEATHSIG = 1


class ForkedProcesses(Processes):
    """`settings`: constants of modules that have another value there, {module: {name: value}}."""

    settings: dict[str, dict[str, object]] = {}

    def __enter__(self):
        self.forks = Forks((*PRELOADED, __name__, "shoal.apps.route", "shoal.apps.serve"))
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self.forks.close()

    def _popen(self, command, **options):
        words = [PYTHON, "-m", __name__, json.dumps(self.settings), *command]
        return self.forks.subprocess.Popen(words, stdin=subprocess.DEVNULL, **options)


def main() -> NoReturn:
    """Runs a command in a new process until it ends, or until its parent ends."""
    settings, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for module, constants in settings.items():
        for name, value in constants.items():
            setattr(importlib.import_module(module), name, value)
    if arguments[0] == "serve":
        core_process.subprocess = Forks.inside().subprocess
    os._exit(command.main(arguments))
