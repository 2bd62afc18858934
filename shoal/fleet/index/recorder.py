"""`Recorder`: writes KV events as JSON lines in NVIDIA Dynamo's shape; `EventPublisher` makes them for any
engine, and `apply_router_event` replays them into an index (indexer.py).

    {"timestamp": ms, "event": {"worker_id": 1, "event": {"event_id": 7, "data": {"stored": {
        "parent_hash": null, "blocks": [{"block_hash": 5, "tokens_hash": 9}]}}}}}

or `{"removed": {"block_hashes": [5]}}`, or `"cleared"`. `tokens_hash` is the hash of a block's tokens alone
(shoal.hashing.block_hashes), `block_hash` the worker's name for the block. Events of older and newer Dynamo
without `data` around the kind are read too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from shoal.fleet.index.indexer import KvIndexer, WorkerRank
from shoal.fleet.index.prefix_tree import DEVICE, DISK, HOST
from shoal.hashing import block_hashes, wire_seed

TIERS = {None: DEVICE, "device": DEVICE, "host_pinned": HOST, "disk": DISK, "external": DISK}


class EventPublisher:
    """Publishes the blocks of any engine written in Python. `send` gets each event as a dict in Dynamo's
    shape, to be recorded or published."""

    def __init__(self, worker_id: int | str, block_size: int, send: Callable[[dict[str, Any]], None]) -> None:
        self.worker_id, self.block_size = worker_id, block_size
        self._send = send

    def stored(
        self,
        event_id: int,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes_: Sequence[int],
        parent_hash: int | None = None,
        lora_id: str | None = None,
    ) -> None:
        """Publishes cached blocks of `num_block_tokens` tokens each. A partial block ends the event, as an
        index has only full blocks, and no blocks after a missing one. Raises ValueError if lengths
        disagree."""
        if len(num_block_tokens) != len(block_hashes_) or sum(num_block_tokens) != len(token_ids):
            raise ValueError(
                f"{len(token_ids)} tokens, {sum(num_block_tokens)} tokens in {len(num_block_tokens)} blocks "
                f"and {len(block_hashes_)} block hashes do not agree; give one size and one hash per block"
            )
        full = next(
            (n for n, size in enumerate(num_block_tokens) if size != self.block_size), len(num_block_tokens)
        )
        own = block_hashes(token_ids[: full * self.block_size], self.block_size, wire_seed(lora_id))
        blocks = [{"block_hash": name, "tokens_hash": h} for name, h in zip(block_hashes_[:full], own)]
        self._publish(event_id, {"stored": {"parent_hash": parent_hash, "blocks": blocks}})

    def removed(self, event_id: int, block_hashes_: Sequence[int]) -> None:
        self._publish(event_id, {"removed": {"block_hashes": list(block_hashes_)}})

    def cleared(self, event_id: int) -> None:
        self._publish(event_id, "cleared")

    def _publish(self, event_id: int, data: Any) -> None:
        self._send({"worker_id": self.worker_id, "event": {"event_id": event_id, "data": data}})


class Recorder:
    """Writes one JSON line per event. `clock`: milliseconds since the start."""

    def __init__(self, file: TextIO, clock: Callable[[], float]) -> None:
        self._file, self._clock = file, clock

    def write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps({"timestamp": round(self._clock()), "event": event}) + "\n")


def read(path: Path) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yields (milliseconds, event) for each line. Raises ValueError that names a malformed line."""
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
                yield float(entry["timestamp"]), entry["event"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: must be a recorded event ({error!r})") from None


def apply_router_event(index: KvIndexer, event: dict[str, Any]) -> None:
    """Applies one event in Dynamo's shape to an index. Raises ValueError for another shape."""
    try:
        inner = event["event"]
        data = inner.get("data", inner)
        rank = WorkerRank(str(event["worker_id"]), inner.get("dp_rank") or 0)
        tier = TIERS[event.get("storage_tier")]
        if data == "cleared" or "cleared" in data:
            index.remove_worker(rank)
        elif "stored" in data:
            blocks = data["stored"]["blocks"]
            names, hashes = [b["block_hash"] for b in blocks], [b["tokens_hash"] for b in blocks]
            index.store(rank, tier, names, hashes, data["stored"].get("parent_hash"))
        else:
            for name in data["removed"]["block_hashes"]:
                index.remove(rank, tier, name)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"a router event must have Dynamo's shape, got {str(event)[:200]}: {error!r}"
        ) from None
