"""The processes of ranks that this process has started."""

import psutil


def pids_of_ranks():
    return [
        child.pid
        for child in psutil.Process().children()
        if "shoal.engine.ranks.worker_main" in child.cmdline()
        or child.name() == "worker_main"  # it was forked
    ]
