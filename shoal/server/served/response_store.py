"""Store of responses, kept for an hour, so that clients may send an id in place of the text."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

KEPT_SECONDS = 3600.0  # since a response was made or last used

Item = dict[str, Any]


class _Entry(msgspec.Struct):
    previous: str | None  # the response before it
    input: bytes  # JSON of the request's own items
    response: bytes  # JSON of the answer
    item_ids: list[str]  # the answer's items
    used: float

    @property
    def size(self) -> int:
        return len(self.input) + len(self.response)


class _Output(msgspec.Struct):
    output: list[Item]


class ResponseStore:
    """The responses that were used last, at most `max_bytes` of JSON; 0 keeps none."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes, self._clock = max_bytes, clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by id; the longest unused first
        self._owners: dict[str, str] = {}  # the response that an item belongs to, by the item's id
        self.num_bytes = 0

    def add(
        self, response_id: str, previous: str | None, items: list[Item], response: bytes, item_ids: list[str]
    ) -> bool:
        """Keeps an answer: `items` are the request's own, `response` is the JSON of the answer, whose items
        have `item_ids`. Returns whether it is kept: one that is larger than the whole store is not."""
        entry = _Entry(previous, msgspec.json.encode(items), response, item_ids, self._clock())
        if entry.size > self.max_bytes:
            return False
        self.remove(response_id)
        self._entries[response_id] = entry
        self._owners |= dict.fromkeys(item_ids, response_id)
        self.num_bytes += entry.size
        while self.num_bytes > self.max_bytes:
            self.remove(next(iter(self._entries)))
        return True

    def response(self, response_id: str) -> bytes | None:
        """Returns the JSON of a response. None if it is not kept."""
        entry = self._use(response_id)
        return None if entry is None else entry.response

    def conversation(self, response_id: str) -> list[Item] | None:
        """Returns all items up to the end of a response, first to last. None if one of the responses that it
        follows, or itself, is not kept any more."""
        turns: list[list[Item]] = []
        next_id: str | None = response_id
        while next_id is not None:
            if (entry := self._use(next_id)) is None:
                return None
            turns.append([*msgspec.json.decode(entry.input), *_output(entry)])
            next_id = entry.previous
        return [item for turn in reversed(turns) for item in turn]

    def item(self, item_id: str) -> Item | None:
        """Returns an item of an answer. None if it is not kept."""
        entry = self._use(self._owners.get(item_id, ""))
        if entry is None:
            return None
        return next((item for item in _output(entry) if item.get("id") == item_id), None)

    def remove(self, response_id: str) -> bool:
        """Forgets a response. Returns whether it was kept."""
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return False
        self.num_bytes -= entry.size
        for item_id in entry.item_ids:
            del self._owners[item_id]
        return True

    def _use(self, response_id: str) -> _Entry | None:
        now = self._clock()
        while self._entries and now - next(iter(self._entries.values())).used > KEPT_SECONDS:
            self.remove(next(iter(self._entries)))
        if (entry := self._entries.get(response_id)) is not None:
            entry.used = now
            self._entries.move_to_end(response_id)
        return entry


def _output(entry: _Entry) -> list[Item]:
    return msgspec.json.decode(entry.response, type=_Output).output
