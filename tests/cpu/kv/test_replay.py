"""Replays of KV events: any number of requests, and clients that do not read, take bounded memory and delay
no other client."""

from __future__ import annotations

import itertools
import random
import threading
import time
from pathlib import Path

import pytest
import zmq

from shoal import kv_events as kv_events
from shoal.config import KVEventsConfig
from shoal.hashing import extend_keys, root_key
from shoal.kv.events import replay
from shoal.kv.events.publisher import KvEvents
from tests.kv_listener import Listener
from tests.waiting import eventually

SIZE = 16


@pytest.fixture
def start(tmp_path):
    """Events with a replay socket, and what asks it."""
    made = []

    def events(**options):
        made.append(
            KvEvents(
                KVEventsConfig(
                    enable_kv_cache_events=True,
                    **{
                        "endpoint": f"ipc://{tmp_path}/e",
                        "replay_endpoint": f"ipc://{tmp_path}/r",
                        "topic": "t",
                    }
                    | options,
                )
            )
        )
        return made[-1]

    yield events
    for one in made:
        one.close()


@pytest.fixture
def ask(tmp_path):
    """A client that has asked for all batches from a number on, and reads nothing by itself."""
    context, made = zmq.Context(), []

    def client(start=0, kind=zmq.DEALER):
        made.append(context.socket(kind))
        made[-1].rcvhwm = 1
        made[-1].connect(f"ipc://{tmp_path}/r")
        made[-1].send_multipart([b"", (start % 2**64).to_bytes(8, "big")])
        return made[-1]

    yield client
    context.destroy(linger=0)


def store(events, seed, num_tokens=SIZE):
    tokens = [random.Random(seed).randrange(1 << 20)] * num_tokens
    keys: list[bytes] = []
    extend_keys(keys, root_key(None, None), tokens, SIZE)
    events.stored(keys, None, tokens)
    events.flush()


def read(client, seconds=20.0):
    """Returns the numbers of all batches up to the end."""
    numbers = []
    while client.poll(int(seconds * 1000)):
        _, _, number, _ = client.recv_multipart()
        if number == kv_events.END:
            return numbers
        numbers.append(int.from_bytes(number, "big"))
    raise AssertionError(f"no end after {len(numbers)} batches")


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def test_clients_that_never_read_cost_bounded_memory_and_hold_nobody_up(start, ask, tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "MAX_HELD_BYTES", 64 << 20)
    events = start()
    for i in range(250):
        store(events, i, 8000)
    events.snapshot()  # when it is there, all is published
    all_bytes, before = sum(map(len, events._recent)), resident_mib()
    assert all_bytes > 5 << 20
    deaf = [ask() for _ in range(150)]
    eventually(lambda: len(events._replay._answers) == 150)
    honest = Listener(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r", b"t")
    try:
        time.sleep(1.0)
        assert events._replay.num_held_bytes <= 150 * replay.HIGH_WATER_MARK * 50_000
        assert resident_mib() - before < 120, "150 answers are 1 GB and more"
        assert [number for number, _ in honest.replay(0)] == list(range(250))
        store(events, 250)
        events.snapshot()
        assert events._next == 251
    finally:
        honest.close()
    monkeypatch.setattr(replay, "PATIENCE_S", 0.1)
    eventually(lambda: not events._replay._answers)
    for client in deaf:
        client.close(linger=0)
    eventually(lambda: events._replay.turn() or events._replay.num_held_bytes == 0)


def test_beyond_the_most_bytes_answers_wait_until_others_leave(start, ask, monkeypatch):
    monkeypatch.setattr(replay, "MAX_HELD_BYTES", 1 << 20)
    monkeypatch.setattr(replay, "PATIENCE_S", 60.0)
    events = start()
    for i in range(100):
        store(events, i, 8000)
    events.snapshot()
    deaf = [ask() for _ in range(40)]
    eventually(lambda: events._replay.num_held_bytes > 0.9 * 2**20)
    time.sleep(0.3)
    assert events._replay.num_held_bytes <= 1 << 20
    late = ask()
    for client in deaf:
        client.close(linger=0)
    assert read(late) == list(range(100))


def test_a_client_that_reads_slowly_gets_everything(start, ask):
    events = start(buffer_steps=1000)
    for i in range(300):
        store(events, i)
    events.snapshot()
    client = ask()
    time.sleep(0.3)
    assert read(client) == list(range(300))


def test_a_snapshot_replaces_batches_that_are_gone_during_an_answer(start, ask, monkeypatch):
    monkeypatch.setattr(replay, "HIGH_WATER_MARK", 1)
    events, is_open = start(buffer_steps=200), threading.Event()
    advance = events._replay._advance
    # It stands after four batches, until those behind them are gone.
    events._replay._advance = lambda client, answer: (
        (answer.next < 4 or is_open.is_set()) and advance(client, answer)
    )
    for i in range(200):
        store(events, i, 4000)
    events.snapshot()
    client = ask()
    eventually(lambda: events._replay._answers and next(iter(events._replay._answers.values())).next == 4)
    for i in range(200, 600):
        store(events, i)
    eventually(lambda: events._replay._num_batches() == 600)
    is_open.set()
    events.snapshot()
    numbers = read(client)
    gaps = [(a, b) for a, b in itertools.pairwise(numbers) if b != a + 1]
    assert numbers == sorted(numbers) and numbers[-1] == 599 and len(gaps) == 1


def test_a_client_that_leaves_ends_its_answer(start, ask):
    events = start()
    for i in range(100):
        store(events, i, 8000)
    client = ask()
    eventually(lambda: events._replay._answers)
    client.close(linger=0)
    eventually(lambda: not events._replay._answers)
    assert read(ask()) == list(range(100))


def test_requests_beyond_the_most_are_not_heard_and_are_later(start, ask, monkeypatch):
    monkeypatch.setattr(replay, "MAX_ANSWERS", 3)
    events = start()
    for i in range(100):
        store(events, i, 8000)
    events.snapshot()
    deaf = [ask() for _ in range(3)]
    eventually(lambda: len(events._replay._answers) == 3)
    late = ask()
    assert not late.poll(300)
    for client in deaf:
        client.close(linger=0)
    eventually(lambda: not events._replay._answers)
    late.send_multipart([b"", (0).to_bytes(8, "big")])
    assert read(late) == list(range(100))


def test_snapshots_are_made_once_for_all_who_ask_and_take_a_share_of_the_time(start, ask, monkeypatch):
    events = start(buffer_steps=2)
    for i in range(50):
        store(events, i)
    events.snapshot()
    made = []
    snapshot = events._index.snapshot
    monkeypatch.setattr(events._index, "snapshot", lambda: made.append(time.sleep(0.02)) or snapshot())
    gate = [ask() for _ in range(40)]
    assert all(read(client) == [49] for client in gate)
    assert len(made) <= 20, "one for those who have asked by then"
