"""Device memory that can be given back and taken again: `from shoal.memory import region, pause, resume`. See
regions.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.memory.regions import Regions, pause, region, resume, usage

__all__ = ["Regions", "pause", "region", "resume", "usage"]


def __getattr__(name: str) -> Any:
    """They need torch; what else lies in this package does not."""
    if name in __all__:
        from shoal.memory import regions

        return getattr(regions, name)
    raise AttributeError(f"module 'shoal.memory' has no attribute {name!r}")
