"""The processes of ranks that this process has started."""

from itertools import pairwise

import psutil


def pids_of_ranks():
    return [
        child.pid
        for child in psutil.Process().children()
        # The process that forks others has the names of their modules in its command, too.
        if ("-m", "shoal.engine.ranks.worker_main") in pairwise(child.cmdline())
        or child.name() == "worker_main"  # it was forked
    ]
