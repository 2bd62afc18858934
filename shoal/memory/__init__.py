"""Device memory that can be given back and taken again: `from shoal.memory import region, pause, resume`.
regions.py describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.memory.regions import Regions, pause, region, resume, usage

__all__ = ["Regions", "pause", "region", "resume", "usage"]


def __getattr__(name: str) -> Any:
    """Imports the names of `__all__` when they are first used, because they need torch and other files of
    this package do not."""
    if name in __all__:
        from shoal.memory import regions

        return getattr(regions, name)
    raise AttributeError(f"module 'shoal.memory' has no attribute {name!r}")
