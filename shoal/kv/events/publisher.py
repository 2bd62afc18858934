"""KV events: an index of the cached blocks by tier, and the thread that publishes its changes as vLLM does.

The engine's thread notes changes and hands them over once a step. One other thread does the rest: the index,
encoding, sending, the last `buffer_steps` batches, and answers to listeners that have missed batches: those
batches, or, if they are gone, a snapshot. The wire format is in shoal/kv_events.py.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import msgspec
import zmq

from shoal import kv_events as kv_events
from shoal.config import KVEventsConfig
from shoal.errors import UnavailableError
from shoal.hashing import block_name
from shoal.kv.events.endpoints import Keys, is_ours, load_keys, open_socket, with_rank
from shoal.kv.events.replay import HIGH_WATER_MARK, Replay
from shoal.kv_events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEvent

logger = logging.getLogger(__name__)

REPLAY_POLL_S = 0.1  # longest wait of a request for a replay
REPLAY_TURN_S = 0.001  # between turns while a client reads its answer
REPLAY_STALL_S = 0.02  # and while no client reads
LAST_WORDS_MS = 1000  # for batches still unsent when the engine ends


class Stored(NamedTuple):
    keys: Sequence[bytes]
    parent: bytes | None
    token_ids: Sequence[int]
    adapter: str | None
    cache_salt: str | None
    tier: str
    has_states: bool = False  # with recurrent layers, and no snapshot after these blocks yet
    group: int = 0
    window: int | None = None  # how many positions the group's layers see; None: all


class Removed(NamedTuple):
    key: bytes
    tier: str
    group: int = 0


class Cleared(NamedTuple):
    tier: str


class Kept(NamedTuple):
    """A snapshot of states after a block was kept, or is gone."""

    key: bytes
    tier: str
    is_kept: bool


Change = Stored | Removed | Cleared | Kept


class _Block(msgspec.Struct, gc=False):
    """One block, in a Struct without GC: there are many, and neither making nor keeping them may hold the
    interpreter lock for long."""

    key: bytes
    parent: int | None
    token_ids: bytes  # uint32
    adapter: str | None
    cache_salt: str | None  # set in a sequence's first block
    has_snapshot: bool | None = None  # None: there are no recurrent layers
    window: int | None = None


class Shelf(NamedTuple):
    """The blocks of one group of layers in one tier."""

    tier: str
    group: int = 0


class BlockIndex:
    """The published blocks that are still cached, by tier and group of layers: name -> block. If two contents
    have one name (2^-64), the first is published."""

    def __init__(self) -> None:
        self.shelves: dict[Shelf, dict[int, _Block]] = {}
        # Shelves that have, or had, blocks of a group with a window -> tokens a block, and window
        self._windows: dict[Shelf, tuple[int, int]] = {}

    def apply(self, changes: Sequence[Change]) -> list[KVEvent]:
        """Returns the events of these changes, in their order. Changes without effect make no event:
        storing a block that was there, or removing one that was not."""
        events: list[KVEvent] = []
        kept: dict[tuple[str, bytes], bool] = {}
        for change in changes:
            if isinstance(change, Stored):
                events += self._store(change)
            elif isinstance(change, Removed):
                shelf = Shelf(change.tier, change.group)
                name, blocks = block_name(change.key), self.shelves.get(shelf, {})
                block = blocks.get(name)
                if block is not None and block.key == change.key:
                    del blocks[name]
                    kept.pop((change.tier, change.key), None)
                    _remove(events, name, shelf)
            elif isinstance(change, Kept):
                kept[change.tier, change.key] = change.is_kept
            else:
                self._clear(events, change.tier)
                kept = {of: is_kept for of, is_kept in kept.items() if of[0] != change.tier}
        self._mark(events, kept)
        return events

    def snapshot(self) -> list[KVEvent]:
        """Returns events that bring any listener to this state: all cleared, then all blocks, parents and
        first groups first."""
        events: list[KVEvent] = [AllBlocksCleared()]
        for shelf in sorted({**self.shelves, **self._windows}, key=lambda shelf: shelf.group):
            blocks, run = self.shelves.get(shelf, {}), list[tuple[int, _Block]]()
            for name, block in _parents_first(blocks):
                if run and not (block.parent == run[-1][0] and block.adapter == run[-1][1].adapter):
                    events.append(self._event(run, shelf))
                    run = []
                run.append((name, block))
            if run:
                events.append(self._event(run, shelf))
            if not blocks and shelf in self._windows:  # says that there is such a group
                size, window = self._windows[shelf]
                none = BlockStored([], None, [], size, None, shelf.tier, None)
                none.group_idx, none.kv_cache_spec_sliding_window = shelf.group, window
                events.append(none)
        return events

    def _store(self, stored: Stored) -> Iterator[BlockStored]:
        tokens = array("I", stored.token_ids)
        data, size = tokens.tobytes(), len(tokens) // max(1, len(stored.keys)) * tokens.itemsize
        shelf = Shelf(stored.tier, stored.group)
        blocks = self.shelves.setdefault(shelf, {})
        parent = None if stored.parent is None else block_name(stored.parent)
        adapter, salt = _text(stored.adapter), _text(stored.cache_salt) if parent is None else None
        run: list[tuple[int, _Block]] = []
        if stored.window is not None:
            self._windows[shelf] = size // tokens.itemsize, stored.window
        for i, key in enumerate(stored.keys):
            name = block_name(key)
            if name not in blocks:
                blocks[name] = block = _Block(key, parent, data[i * size : (i + 1) * size], adapter, salt)
                block.has_snapshot = False if stored.has_states else None
                block.window = stored.window
                run.append((name, block))
            elif run:
                yield self._event(run, shelf)
                run = []
            parent, salt = name, None
        if run:
            yield self._event(run, shelf)

    def _mark(self, events: list[KVEvent], kept: dict[tuple[str, bytes], bool]) -> None:
        """Adds to the events of a batch which blocks have a snapshot at its end: to the event that stores the
        block, or by a further event that stores it again."""
        for (tier, key), is_kept in kept.items():
            name = block_name(key)
            block = self.shelves.get(Shelf(tier), {}).get(name)
            if block is None or block.key != key or block.has_snapshot == is_kept:
                continue
            block.has_snapshot = is_kept
            stored = next((event for event in reversed(events) if _stores(event, name, tier)), None)
            if isinstance(stored, BlockStored) and stored.snapshot_hashes is not None:
                stored.snapshot_hashes.append(name)
            else:
                events.append(self._event([(name, block)], Shelf(tier)))

    def _clear(self, events: list[KVEvent], tier: str) -> None:
        """Clears a tier. vLLM's event clears every tier, so it is sent only if all are empty."""
        cleared = [shelf for shelf in self.shelves if shelf.tier == tier]
        gone = {shelf: self.shelves.pop(shelf) for shelf in cleared}
        if not any(self.shelves.values()):
            self._windows.clear()
            events.append(AllBlocksCleared())
            return
        for shelf, blocks in gone.items():
            if blocks:
                events.append(BlockRemoved(list(blocks), tier, shelf.group or None))

    def _event(self, run: list[tuple[int, _Block]], shelf: Shelf) -> BlockStored:
        first, tokens = run[0][1], array("I", b"".join([block.token_ids for _, block in run]))
        lora = [{"type": "lora", "name": first.adapter}] if first.adapter else []
        salt = [{"type": "cache_salt", "salt": first.cache_salt}] if first.cache_salt else []
        extra = [lora + salt or None, *[lora or None] * (len(run) - 1)] if lora or salt else None
        return BlockStored(
            [name for name, _ in run],
            first.parent,
            tokens.tolist(),
            len(first.token_ids) // tokens.itemsize,
            None,
            shelf.tier,
            first.adapter,
            extra,
            None if first.has_snapshot is None else [name for name, block in run if block.has_snapshot],
            shelf.group or None,
            first.window,
        )


def _text(value: str | None) -> str | None:
    """Replaces what UTF-8 cannot encode: a text that users send may hold halves of surrogate pairs."""
    return value and value.encode("utf-8", "replace").decode()


def _stores(event: KVEvent, name: int, tier: str) -> bool:
    return isinstance(event, BlockStored) and event.medium == tier and name in event.block_hashes


def _remove(events: list[KVEvent], name: int, shelf: Shelf) -> None:
    last, group = events[-1] if events else None, shelf.group or None
    if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (shelf.tier, group):
        last.block_hashes.append(name)
    else:
        events.append(BlockRemoved([name], shelf.tier, group))


def _parents_first(blocks: dict[int, _Block]) -> Iterator[tuple[int, _Block]]:
    """Yields blocks in the order stored, except that a parent stored after its children comes before them."""
    found: set[int] = set()
    for name in blocks:
        chain: list[int] = []
        at: int | None = name
        while at is not None and at in blocks and at not in found:
            chain.append(at)
            found.add(at)
            at = blocks[at].parent
        for ancestor in reversed(chain):
            yield ancestor, blocks[ancestor]


class KvEvents:
    """The engine's events. The first methods are the engine thread's alone; any thread may call the others.

    Raises ConfigError if an endpoint cannot be opened. A batch is numbered when it is published, and no
    batch is dropped: when `max_queue_size` batches wait, which no listener can cause, the engine's thread
    waits.
    """

    def __init__(self, config: KVEventsConfig, data_parallel_rank: int = 0) -> None:
        self.config, self.data_parallel_rank = config, data_parallel_rank
        self._changes: list[Change] = []
        self._queue: SimpleQueue[tuple[float, list[Change]] | Callable[[], None] | None] = SimpleQueue()
        self._index = BlockIndex()
        self._recent: deque[bytes] = deque(maxlen=config.buffer_steps)
        self._next = 0  # the number of the next batch
        self._drained = 0  # batches up to here were drained
        self._topic = config.topic.encode()
        self._in_process = config.endpoint.startswith("inproc://")  # known in one context
        self._context = zmq.Context.instance() if self._in_process else zmq.Context()
        self._pub: zmq.Socket[bytes] | None = None
        self._replay: Replay | None = None
        self._keys: Keys | None = None
        try:
            if config.publisher == "zmq":
                self._open()
        except BaseException:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._run, name="shoal-kv-events", daemon=True)
        self._thread.start()

    # The engine's thread

    def stored(
        self,
        keys: Sequence[bytes],
        parent: bytes | None,
        token_ids: Sequence[int],
        adapter: str | None = None,
        cache_salt: str | None = None,
        tier: str = GPU,
        has_states: bool = False,
        group: int = 0,
        window: int | None = None,
    ) -> None:
        """Notes a run of consecutive blocks with all their tokens. `parent`: the key of the block before;
        None at the start of a sequence. `has_states`: there are recurrent layers. `group`, `window`: of the
        layers."""
        change = Stored(keys, parent, token_ids, adapter, cache_salt, tier, has_states, group, window)
        self._changes.append(change)

    def snapshot_kept(self, key: bytes, tier: str, is_kept: bool) -> None:
        """Notes that a snapshot of states after a published block was kept, or is gone."""
        self._changes.append(Kept(key, tier, is_kept))

    def removed(self, key: bytes, group: int = 0) -> None:
        self._changes.append(Removed(key, GPU, group))

    def removed_below(self, key: bytes, tier: str, group: int = 0) -> None:
        self._changes.append(Removed(key, tier, group))

    def cleared(self, tier: str = GPU) -> None:
        self._changes.append(Cleared(tier))

    def flush(self) -> None:
        """Publishes the changes since the last call as one batch."""
        if not self._changes:
            return
        changes, self._changes = self._changes, []
        while self._queue.qsize() >= self.config.max_queue_size and self._thread.is_alive():
            time.sleep(0.001)
        if self._thread.is_alive():  # otherwise the queue has no reader
            self._queue.put((time.time(), changes))

    def check(self, keys: Sequence[bytes], has_others: bool = False) -> None:
        """Checks that exactly these blocks are published as being on the device; `has_others`: some of them
        are not published."""
        self.flush()
        published = self._ask(
            lambda: {block.key for block in self._index.shelves.get(Shelf(GPU), {}).values()}
        )
        wrong = published - set(keys) if has_others else published ^ set(keys)
        assert not wrong, f"{len(published)} blocks are published, {len(keys)} are cached"

    def close(self) -> None:
        """Publishes the remaining changes and stops. Safe to call twice."""
        self.flush()
        self._queue.put(None)
        self._thread.join()

    # Any thread

    def drain(self) -> list[EventBatch]:
        """Returns the batches published since the last call. If there were more than `buffer_steps`, a
        snapshot: one batch that clears all and stores every cached block."""

        def drain() -> list[bytes]:
            start, self._drained = self._drained, self._next
            if start < self._next - len(self._recent):
                return [self._encode_snapshot()]
            return list(islice(self._recent, start - self._next + len(self._recent), None))

        return [kv_events.decode(payload) for payload in self._ask(drain)]

    def snapshot(self) -> EventBatch:
        """Returns one batch that clears all and stores every cached block."""
        return self._ask(lambda: EventBatch(time.time(), self._index.snapshot(), self.data_parallel_rank))

    def _ask(self, function: Callable[[], Any]) -> Any:
        """Runs `function` in the thread after it has published everything flushed so far, and returns the
        result."""
        answer: Future[Any] = Future()

        def work() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                answer.set_exception(error)

        self._queue.put(work)
        while not answer.done() and self._thread.is_alive():
            try:
                return answer.result(timeout=1)
            except TimeoutError:
                pass
        if not answer.done():
            raise UnavailableError("KV events have ended with their engine; build a new one")
        return answer.result()

    # The publisher's thread

    def _run(self) -> None:
        moved = False  # True: the last turn of answers made progress
        try:
            while True:
                try:
                    item = self._queue.get(timeout=self._patience_s(moved))
                    if item is None:
                        return
                    if isinstance(item, tuple):
                        self._publish(*item)
                    else:
                        item()
                except Empty:
                    pass
                # Batches to publish go first, however many clients ask.
                if self._replay is not None and self._queue.empty():
                    moved = self._replay.turn()
        except Exception:
            logger.exception("KV events have ended; listeners keep an old state")
        finally:
            self._close_sockets()

    def _patience_s(self, moved: bool) -> float | None:
        """Returns how long to wait for a batch to publish before the next turn of answers."""
        if self._replay is None:
            return None
        if not self._replay.is_busy:
            return REPLAY_POLL_S
        return REPLAY_TURN_S if moved else REPLAY_STALL_S

    def _publish(self, ts: float, changes: list[Change]) -> None:
        events = self._index.apply(changes)
        if not events:
            return
        payload = kv_events.encode(EventBatch(ts, events, self.data_parallel_rank))
        self._recent.append(payload)
        if self._pub is not None:
            self._pub.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload))
        self._next += 1

    def _batch(self, number: int) -> bytes | None:
        index = number - self._next + len(self._recent)
        return self._recent[index] if 0 <= index < len(self._recent) else None

    def _encode_snapshot(self) -> bytes:
        return kv_events.encode(EventBatch(time.time(), self._index.snapshot(), self.data_parallel_rank))

    # Sockets

    def _open(self) -> None:
        config, rank = self.config, self.data_parallel_rank
        self._keys = load_keys(self._context, config)
        endpoint = with_rank(config.endpoint, rank)
        self._pub = open_socket(
            self._context, zmq.PUB, "endpoint", endpoint, self._keys, is_ours(endpoint), sndhwm=config.hwm
        )
        if config.replay_endpoint is not None:
            router = open_socket(
                self._context,
                zmq.ROUTER,
                "replay_endpoint",
                with_rank(config.replay_endpoint, rank),
                self._keys,
                True,
                sndhwm=HIGH_WATER_MARK,
                rcvhwm=HIGH_WATER_MARK,
            )
            self._replay = Replay(router, self._topic, self._batch, lambda: self._next, self._encode_snapshot)

    def _close_sockets(self) -> None:
        for socket_ in (self._pub, self._replay.router if self._replay is not None else None):
            if socket_ is not None:
                socket_.close(linger=LAST_WORDS_MS)
        if self._keys is not None:
            self._keys.close()
        if not self._in_process:
            self._context.term()  # waits until the addresses are free again
