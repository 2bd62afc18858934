"""The free host memory of this process. Without torch, because the server uses it as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def available_bytes() -> int:
    """Returns the bytes of host memory that can be had without swapping to disk, within the limits of this
    process's control group."""
    found = [_field(Path("/proc/meminfo"), "MemAvailable:") * 1024]
    for limit, used, stat in _limits():
        found.append(limit - int((CGROUP / used).read_text()) + _field(CGROUP / stat, "inactive_file"))
    return max(0, min(found))


def total_bytes() -> int:
    """Returns the bytes of host memory that this process could have if no other process had any."""
    return min([_field(Path("/proc/meminfo"), "MemTotal:") * 1024, *(limit for limit, _, _ in _limits())])


def _limits() -> Iterator[tuple[int, str, str]]:
    """Yields each limit of this process's control group, in bytes, with the names of two files: the memory in
    use, and the page cache in it."""
    for limit, used, stat in FILES:
        if (CGROUP / limit).exists() and (text := (CGROUP / limit).read_text().strip()).isdigit():
            yield int(text), used, stat


def _field(path: Path, name: str) -> int:
    """Returns the number after `name` in a file of such lines, and 0 if the name is missing."""
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0
