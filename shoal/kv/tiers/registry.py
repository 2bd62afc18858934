"""All tiers, in the order in which they are asked for a block, and how each is opened.

Nothing else in the engine names a tier: a new one is an entry here, its options in config.py, and its file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.config import EngineConfig
from shoal.kv.layout import CacheSpec
from shoal.kv.tiers.disk import DiskTier
from shoal.kv.tiers.store import StoreTier
from shoal.kv.tiers.tier import Tier


@dataclass(frozen=True, slots=True)
class TierPlace:
    """The identity of a rank's blocks: the model that computed them, and the layout of their bytes."""

    fingerprint: bytes  # 16 bytes, of the weights' content
    specs: tuple[CacheSpec, ...]  # one for each group of layers; their blocks have equal bytes
    record_events: bool  # the caller must call take_events


@dataclass(frozen=True, slots=True)
class TierKind:
    """`first_bytes_per_s` is the assumed read speed of a rank before the first read, high enough that the
    tier is tried. `open` raises ConfigError."""

    name: str  # in logs, stats and metrics
    is_on: Callable[[EngineConfig], bool]
    open: Callable[[EngineConfig, TierPlace], Tier]
    first_bytes_per_s: float


def _open_disk(config: EngineConfig, place: TierPlace) -> Tier:
    assert config.kv_disk_path is not None
    return DiskTier(
        config.kv_disk_path,
        (config.kv_disk_bytes or 0) // place.specs[0].tp_size,
        place.fingerprint,
        place.specs[0],
        config.kv_eviction_policy,
        record_events=place.record_events,
        other_specs=place.specs[1:],
    )


def _open_store(config: EngineConfig, place: TierPlace) -> Tier:
    assert config.kv_store is not None
    return StoreTier(config.kv_store, place.fingerprint, place.specs[0], other_specs=place.specs[1:])


TIERS = (
    TierKind("disk", lambda config: config.kv_disk_path is not None, _open_disk, first_bytes_per_s=8e9),
    TierKind("store", lambda config: config.kv_store is not None, _open_store, first_bytes_per_s=1e9),
)


def open_tiers(config: EngineConfig, place: TierPlace) -> dict[str, Tier]:
    """Opens the tiers that the options ask for, by name, in order. Raises ConfigError and leaves no tier
    open."""
    tiers: dict[str, Tier] = {}
    try:
        for kind in TIERS:
            if kind.is_on(config):
                tiers[kind.name] = kind.open(config, place)
    except BaseException:
        for tier in tiers.values():
            tier.close()
        raise
    return tiers


def has_tiers(config: EngineConfig) -> bool:
    """Says if the options ask for a tier."""
    return any(kind.is_on(config) for kind in TIERS)


def first_read_s(name: str, num_bytes: int) -> float:
    """Returns the assumed seconds to read `num_bytes` of one rank before the first read."""
    [kind] = [kind for kind in TIERS if kind.name == name]
    return num_bytes / kind.first_bytes_per_s
