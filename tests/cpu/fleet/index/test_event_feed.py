"""Feeds of KV events: whatever is lost, comes twice or out of order, the index ends with what the worker
has."""

import asyncio
import random

import msgspec
import pytest
import zmq.asyncio

from shoal.config import KVEventsConfig
from shoal.fleet.index import event_listener
from shoal.fleet.index.event_feed import EventFeed
from shoal.fleet.index.event_listener import listen
from shoal.fleet.index.indexer import KvIndexer, Overlap, WorkerRank
from shoal.hashing import extend_keys, root_key
from shoal.kv.events.publisher import KvEvents
from shoal.kv_events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode

RANK = WorkerRank("a")


class Publisher:
    """A worker with events, its last `kept` batches, and the truth."""

    def __init__(self, rng, kept, makes_snapshots, ts=0.0):
        self.rng, self.kept, self.makes_snapshots, self.ts = rng, kept, makes_snapshots, ts
        self.batches, self.truth = [], KvIndexer(4)
        self.names = {}

    def step(self):
        events = []
        for _ in range(self.rng.randrange(1, 4)):
            if self.names and self.rng.random() < 0.4:
                name = self.rng.choice(list(self.names))
                del self.names[name]
                events.append(BlockRemoved([name], GPU))
            else:
                parent = self.rng.choice([None, *self.names])
                tokens = [self.rng.randrange(2) for _ in range(4)]
                prefix = (*self.names.get(parent, ()), *tokens)
                if prefix not in self.names.values():
                    name = self.rng.getrandbits(64)
                    self.names[name] = prefix
                    events.append(BlockStored([name], parent, tokens, 4, None, GPU, None))
        self.publish(events)

    def publish(self, events):
        for event in events:
            self.truth.apply(RANK, event)
        self.ts += 1.0
        self.batches.append(encode(EventBatch(self.ts, events)))

    def replay(self, start):
        """(number, payload) of each answer."""
        end = len(self.batches)
        if start > end or start < end - self.kept:
            if self.makes_snapshots:
                return [(end - 1, self.snapshot())] if end else []
            return [(n, self.batches[n]) for n in range(max(0, end - self.kept), end) if n >= start]
        return [(n, self.batches[n]) for n in range(start, end)]

    def snapshot(self):
        stored, done = [], {}
        for name, prefix in sorted(self.names.items(), key=lambda item: len(item[1])):
            parent = done.get(prefix[:-4])
            if len(prefix) > 4 and parent is None:
                continue  # its parent is gone, so it cannot be placed
            done[prefix] = name
            stored.append(BlockStored([name], parent, list(prefix[-4:]), 4, None, GPU, None))
        return encode(EventBatch(self.ts, [AllBlocksCleared(), *stored]))


def catch_up(feed, publisher):
    for _ in range(1000):
        if feed.replay_from is None:
            return
        for number, payload in publisher.replay(feed.replay_from):
            feed.replayed(number, payload)
        feed.replay_ended()
    raise AssertionError("the feed never catches up")


@pytest.mark.parametrize("makes_snapshots", [True, False], ids=["snapshots", "as vLLM"])
def test_loss_duplication_reordering_and_restarts_leave_the_truth(makes_snapshots):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    index = KvIndexer(4)
    publisher, feed = (
        Publisher(rng, 10**9 if not makes_snapshots else 20, makes_snapshots),
        EventFeed(index, RANK),
    )
    waiting = []
    for _ in range(800):
        publisher.step()
        number = len(publisher.batches) - 1
        if rng.random() < 0.85:
            waiting.append((number, publisher.batches[number]))
        if rng.random() < 0.1:
            waiting.append(rng.choice([*waiting, (number, publisher.batches[number])]))
        if rng.random() < 0.2:
            rng.shuffle(waiting)
        while waiting and rng.random() < 0.7:
            feed.receive(*waiting.pop(0))
        if rng.random() < 0.3:
            catch_up(feed, publisher)
        if rng.random() < 0.01:  # another process in its place, which counts from 0
            publisher = Publisher(rng, publisher.kept, makes_snapshots, publisher.ts)
            waiting.clear()
    publisher.step()
    publisher.step()
    for number in range(len(publisher.batches)):
        feed.receive(number, publisher.batches[number])
    catch_up(feed, publisher)
    for _ in range(200):
        tokens = [rng.randrange(2) for _ in range(32)]
        assert index.find_matches(tokens) == publisher.truth.find_matches(tokens)


def stored(name, tokens, parent=None):
    return BlockStored([name], parent, tokens, 4, None, GPU, None)


def batch(ts, *events, rank=None):
    return encode(EventBatch(ts, list(events), rank))


def test_what_no_replay_fills_is_not_guessed():
    index = KvIndexer(4)
    feed = EventFeed(index, RANK)
    silent = Publisher(random, 0, False)
    catch_up(feed, silent)
    feed.receive(0, batch(1, stored(1, [1, 2, 3, 4])))
    assert index.find_matches([1, 2, 3, 4]) == {RANK: Overlap(1)}
    feed.receive(2, batch(3, stored(3, [5, 6, 7, 8])))
    assert feed.replay_from == 0
    catch_up(feed, silent)
    assert index.find_matches([1, 2, 3, 4]) == {} and index.find_matches([5, 6, 7, 8]) == {RANK: Overlap(1)}
    assert feed.replay_from is None and feed.num_lost == 1


def test_nonsense_is_counted_and_passed_over(caplog):
    index = KvIndexer(4)
    feed = EventFeed(index, RANK)
    feed.replay_ended()
    feed.receive(0, b"\xc1 nonsense")
    feed.receive(1, b"")
    feed.receive(2, batch(1, stored(1, [1, 2, 3, 4])))
    assert feed.num_unreadable == 2 and index.find_matches([1, 2, 3, 4]) == {RANK: Overlap(1)}
    assert len(caplog.records) == 1 and "cannot be read" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"block_size": -4},
        {"token_ids": [-1, 2, 3, 4]},
        {"token_ids": [2**32, 2, 3, 4]},
        {"extra_keys": [[{"type": "cache_salt", "salt": 7}]]},
    ],
    ids=str,
)
def test_an_event_with_impossible_values_is_counted_as_unreadable(wrong):
    fields = {"block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 4}
    event = {"type": "BlockStored", **fields, **wrong}
    feed = EventFeed(KvIndexer(4), RANK)
    feed.replay_ended()
    feed.receive(0, msgspec.msgpack.encode([1.0, [event]]))
    assert feed.num_unreadable == 1


def test_sglangs_salt_of_a_run_of_blocks_holds_for_all_of_them():
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "block_size": 4,
        "cache_salt": "s",
    }
    index = KvIndexer(4)
    feed = EventFeed(index, RANK)
    feed.replay_ended()
    feed.receive(0, msgspec.msgpack.encode([1.0, [event]]))
    assert index.find_matches([1, 2, 3, 4, 5, 6, 7, 8], cache_salt="s") == {RANK: Overlap(2)}


def test_a_rank_in_the_payload_wins():
    index = KvIndexer(4)
    feed = EventFeed(index, RANK)
    feed.replay_ended()
    feed.receive(0, batch(1, stored(1, [1, 2, 3, 4]), rank=3))
    assert index.find_matches([1, 2, 3, 4]) == {WorkerRank("a", 3): Overlap(1)}
    feed.receive(0, batch(2, stored(2, [5, 6, 7, 8])))  # the publisher counts from 0 again
    assert index.find_matches([1, 2, 3, 4]) == {}


def test_a_rank_that_the_worker_does_not_have_is_counted_and_left_out():
    index = KvIndexer(4)
    feed = EventFeed(index, RANK, num_ranks=2)
    catch_up(feed, Publisher(random, 0, False))
    feed.receive(0, batch(1, stored(1, [1, 2, 3, 4]), rank=2))
    feed.receive(1, batch(2, stored(1, [1, 2, 3, 4]), rank=-1))
    feed.receive(2, batch(3, stored(1, [5, 6, 7, 8]), rank=1))
    assert index.ranks == {WorkerRank("a", 1)} and feed.num_unreadable == 2


def test_the_only_rank_of_a_worker_is_its_own_whatever_number_it_has_elsewhere():
    index = KvIndexer(4)
    feed = EventFeed(index, RANK, num_ranks=1)
    catch_up(feed, Publisher(random, 0, False))
    feed.receive(0, batch(1, stored(1, [1, 2, 3, 4]), rank=5))
    assert index.find_matches([1, 2, 3, 4]) == {RANK: Overlap(1)}


@pytest.mark.parametrize("ts", [1.0, 500.0], ids=["earlier clock", "later clock"])
def test_a_publisher_that_started_again_is_told_from_the_old_one(ts):
    index = KvIndexer(4)
    feed, old, new = (
        EventFeed(index, RANK),
        Publisher(random, 99, False, 100.0),
        Publisher(random, 99, False, ts),
    )
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        old.publish([stored(tokens[0], tokens)])
    new.publish([stored(9, [9, 9, 9, 9])])
    new.publish([stored(8, [8, 8, 8, 8])])
    catch_up(feed, old)
    feed.check()
    catch_up(feed, new)
    assert index.find_matches([1, 2, 3, 4]) == {} and index.find_matches([9, 9, 9, 9]) == {RANK: Overlap(1)}
    for number in (0, 1):  # the same again, as live batches
        feed.receive(number, new.batches[number])
    assert feed.replay_from is None and index.num_blocks(RANK) == 2


def test_our_own_publisher_is_heard_late_and_over_a_gap(monkeypatch, tmp_path):
    monkeypatch.setattr(event_listener, "REPLAY_PATIENCE_S", 20.0)
    context = zmq.asyncio.Context()
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay)
    events, tokens = KvEvents(config), list(range(40))
    keys = []
    extend_keys(keys, root_key(), tokens, 4)

    def store(first, last):
        parent = keys[first - 1] if first else None
        events.stored(keys[first:last], parent, tokens[first * 4 : last * 4], None, None, GPU)
        events.flush()

    async def main():
        index = KvIndexer(4)
        store(0, 4)
        store(4, 6)
        feed = EventFeed(index, RANK)
        task = asyncio.create_task(listen(feed, context, endpoint, replay))
        await reaches(index, tokens, 6)
        task.cancel()  # it misses what comes now, and then goes on
        await asyncio.gather(task, return_exceptions=True)
        store(6, 8)
        task = asyncio.create_task(listen(feed, context, endpoint, replay))
        await asyncio.sleep(0.2)
        for end in range(8, 10):
            store(end, end + 1)
            await asyncio.sleep(0.05)
        await reaches(index, tokens, 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def reaches(index, tokens, blocks):
        for _ in range(400):
            if index.find_matches(tokens) == {RANK: Overlap(blocks)}:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(index.find_matches(tokens))

    try:
        asyncio.run(main())
    finally:
        events.close()
        context.destroy(0)
