"""The limit of open files, and the connections that a server may keep within it. Torch-free."""

from __future__ import annotations

RESERVED_FILES = 256  # for engines, libraries and logs, and for connections just accepted


def connections_for(files: int) -> int:
    """Returns how many connections a process with a limit of `files` open files may keep."""
    return max(files - RESERVED_FILES, files // 2)
