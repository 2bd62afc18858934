"""KV events in vLLM's wire format (vllm/distributed/kv_events.py): the blocks that a worker has cached.

A publisher sends (topic, number as 8 bytes, payload), numbered from 0 without gaps; a payload is msgpack of
an EventBatch. Since June 2026 vLLM writes events as maps, before that as arrays; SGLang has its own names for
media. All forms are read, maps are written. `snapshot_hashes` is Shoal's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shoal.hashing import UINT64_MAX

# Media: GPU is an engine's own cache (also on a CPU), CPU is its host memory, STORAGE are
# files and stores.
GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"
# Media of other engines: older vLLM had none, and SGLang has its own names
MEDIA = {None: GPU, "CPU_PINNED": CPU, "DISK": STORAGE, "EXTERNAL": STORAGE}
END = (-1).to_bytes(8, "big", signed=True)  # in place of a number: the end of a replay


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """A run of full blocks of one sequence, `block_size` tokens each. Hashes are names: 64 bits, to be
    compared only. The parent is the block before the first; None at the start of a sequence.
    `extra_keys`: for each block the parts of its identity in addition to tokens: maps {"type": "lora",
    "name": ...}, {"type": "cache_salt", "salt": ...}; only a sequence's first block has the salt.
    `group_idx`, `kv_cache_spec_sliding_window`: the group of layers, and how many positions its layers see;
    the names of blocks are the same in all groups.
    `snapshot_hashes`: with recurrent layers the blocks after which a prompt can continue, as a snapshot of
    the states was kept there; None: after each of them. A block is stored again when that has changed."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Sequence[Annotated[int, Meta(ge=0, lt=2**32)]]
    block_size: Annotated[int, Meta(ge=1)]
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[dict[str, Any]] | None] | None = None
    snapshot_hashes: list[int] | None = None
    group_idx: int | None = None
    kv_cache_spec_sliding_window: int | None = None

    @property
    def cache_salt(self) -> str | None:
        """Returns the salt of a run that starts a sequence; None for other runs."""
        first = (self.extra_keys or [None])[0]
        return next((key.get("salt") for key in first or () if key.get("type") == "cache_salt"), None)


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Reports that all blocks of every medium were removed."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """The changes of a step, in order. `ts`: seconds since the epoch."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


# In the order of vLLM's arrays
FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}

encode = msgspec.msgpack.Encoder().encode
_decode_any = msgspec.msgpack.Decoder().decode


def decode(payload: bytes) -> EventBatch:
    """Decodes a batch of Shoal, of any vLLM with events, or of SGLang. Drops unknown fields and unknown kinds
    of events. Raises ValueError for other payloads."""
    try:
        batch = _decode_any(payload)
        if isinstance(batch, dict):
            batch = [batch["ts"], batch["events"], batch.get("data_parallel_rank", batch.get("attn_dp_rank"))]
        ts, events, rank = (*batch, None)[:3]
        known = [fields for event in events if (fields := _fields_of(event)) is not None]
        return msgspec.convert([ts, known, rank], EventBatch)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"a payload must be a batch of KV events, got {payload[:40]!r}...: {error}"
        ) from error


def _fields_of(event: Any) -> dict[str, Any] | None:
    """Returns the event in this file's classes; None for an unknown kind."""
    if not isinstance(event, dict):
        kind, *values = event
        event = {"type": kind, **dict(zip(FIELDS.get(kind, ()), values))}
    kind = event["type"]
    if kind not in FIELDS:
        return None
    found = {"type": kind, **{name: event.get(name) for name in FIELDS[kind]}}
    if "block_hashes" in found:
        found["block_hashes"] = [_name(value) for value in found["block_hashes"]]
        found["medium"] = MEDIA.get(event.get("medium"), event.get("medium"))
    if kind == "BlockStored":
        found["snapshot_hashes"] = event.get("snapshot_hashes")
        if found["parent_block_hash"] is not None:
            found["parent_block_hash"] = _name(found["parent_block_hash"])
        salt = event.get("cache_salt")  # SGLang has this name
        extra = found["extra_keys"]
        if not extra and salt and found["parent_block_hash"] is None:
            extra = [[salt]]
        found["extra_keys"] = extra and [keys and _typed(keys, found["lora_name"]) for keys in extra]
    return found


def _name(value: int | bytes) -> int:
    """Returns a hash as an integer of 64 bits. vLLM's hashes are bytes, unless
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES cuts them to their last 64 bits. SGLang's may be signed."""
    return (int.from_bytes(value, "big") if isinstance(value, bytes) else value) & UINT64_MAX


def _typed(keys: Sequence[Any], lora_name: str | None) -> list[dict[str, Any]]:
    """Returns an extra key as a map. Older events have bare values: an adapter's name, a salt, (hash, offset)
    of an image, bytes of embeddings."""
    typed: list[dict[str, Any]] = []
    for key in keys:
        if isinstance(key, dict):
            if key.get("type") == "cache_salt" and not isinstance(key.get("salt"), str):
                raise ValueError(f"the cache salt must be a string, got {key.get('salt')!r:.80}")
            typed.append(key)
        elif not isinstance(key, str):
            typed.append({"type": "legacy", "value": key})
        elif key == lora_name:
            typed.append({"type": "lora", "name": key})
        else:
            typed.append({"type": "cache_salt", "salt": key})
    return typed
