"""Executes another program, which dies with the process that started it, even if that is killed:

    python -I -S launch.py PARENT_PID SIGNAL COMMAND...

A fleet starts its workers with this program, as a function between fork and exec is unsafe with threads.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
NOT_FOUND = 127  # exit code of a shell for an unknown command


def main() -> None:
    parent, signal_number, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit("the parent process has died before the worker started")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]!r} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_FOUND)


if __name__ == "__main__":
    main()
