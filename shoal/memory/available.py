"""How much host memory can be had. Torch-free: the server asks as well."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int:
    """Host memory that can be had without swapping to disk, within this process's control group."""
    found = [_field(Path("/proc/meminfo"), "MemAvailable:") * 1024]
    for limit, used, stat in (("memory.max", "memory.current", "memory.stat"),
                              ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")):
        root = Path("/sys/fs/cgroup")
        if (root / limit).exists() and (text := (root / limit).read_text().strip()).isdigit():
            cached = _field(root / stat, "inactive_file")
            found.append(int(text) - int((root / used).read_text()) + cached)
    return max(0, min(found))


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0
