"""KV events: what a listener hears is what the pool holds, in vLLM's words, whatever it has missed."""

import json
import random
import socket
import struct
import threading
import time

import msgpack
import msgspec
import pytest
import zmq

from shoal import kv_events as kv_events
from shoal import wire
from shoal.api import Request
from shoal.config import EngineConfig, KVEventsConfig
from shoal.engine.block_events import BlockEvents
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.state_blocks import SnapshotRoom
from shoal.engine.step_part import Parts
from shoal.errors import ConfigError, UnavailableError
from shoal.hashing import block_name, extend_keys, root_key
from shoal.kv.events.endpoints import with_rank
from shoal.kv.events.publisher import BlockIndex, Cleared, Kept, KvEvents, Removed, Stored
from shoal.kv.groups import LayerGroup
from shoal.kv_events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from shoal.sampling_params import SamplingParams
from tests.kv_listener import Listener, View

SIZE = 4
QUIET = KVEventsConfig(enable_kv_cache_events=True, publisher="null")


def chain(*token_ids, adapter=None, cache_salt=None):
    """Keys and tokens of one sequence."""
    tokens = list(token_ids)
    keys: list[bytes] = []
    extend_keys(keys, root_key(adapter, cache_salt), tokens, SIZE)
    return keys, tokens


def names(keys):
    return [block_name(key) for key in keys]


def payload(events):
    return kv_events.encode(EventBatch(0.5, events, 0))


# The index


def test_a_run_of_blocks_is_one_event_with_all_its_tokens():
    keys, tokens = chain(*range(12))
    [event] = BlockIndex().apply([Stored(keys, None, tokens, None, None, "GPU")])
    assert event == BlockStored(names(keys), None, tokens, SIZE, None, "GPU", None)
    index = BlockIndex()
    index.apply([Stored(keys[:1], None, tokens[:4], None, None, "GPU")])
    assert index.apply([Stored(keys[1:], keys[0], tokens[4:], None, None, "GPU")]) == [
        BlockStored(names(keys[1:]), block_name(keys[0]), tokens[4:], SIZE, None, "GPU", None)
    ]


def test_a_snapshot_after_a_tier_was_cleared_says_which_groups_have_windows():
    """Regression: a listener that joined then did not know of the group, and counted prefixes whole."""
    keys, tokens = chain(*range(8))
    index = BlockIndex()
    for tier in (GPU, "CPU"):
        index.apply([Stored(keys, None, tokens, None, None, tier)])
    index.apply([Stored(keys, None, tokens, None, None, GPU, group=1, window=6)])
    index.apply([Cleared(GPU)])
    first, of_host, of_group = index.snapshot()
    assert isinstance(first, AllBlocksCleared) and of_host.medium == "CPU"
    assert of_group.block_hashes == [] and of_group.medium == GPU
    assert (of_group.group_idx, of_group.kv_cache_spec_sliding_window, of_group.block_size) == (1, 6, SIZE)
    index.apply([Cleared("CPU")])
    assert index.snapshot() == [AllBlocksCleared()]


def test_changes_without_effect_make_no_event():
    keys, tokens = chain(*range(20))
    index = BlockIndex()
    index.apply(
        [
            Stored(keys[1:2], keys[0], tokens[4:8], None, None, "GPU"),
            Stored(keys[3:4], keys[2], tokens[12:16], None, None, "GPU"),
        ]
    )
    stored = index.apply([Stored(keys, None, tokens, None, None, "GPU")])
    assert [e.block_hashes for e in stored] == [names(keys[:1]), names(keys[2:3]), names(keys[4:])]
    assert [e.parent_block_hash for e in stored] == [None, *names((keys[1], keys[3]))]
    assert [e.token_ids for e in stored] == [tokens[:4], tokens[8:12], tokens[16:]]
    assert index.apply([Removed(b"x" * 16, "GPU"), Removed(keys[0], "CPU")]) == []


def test_removals_in_a_row_are_one_event_and_a_block_stored_anew_makes_an_event():
    keys, tokens = chain(*range(8))
    store = Stored(keys, None, tokens, None, None, "GPU")
    index = BlockIndex()
    index.apply([store])
    removed = [Removed(key, "GPU") for key in reversed(keys)]
    assert index.apply([*removed, store, removed[0]]) == [
        BlockRemoved(names(keys)[::-1], "GPU"),
        BlockStored(names(keys), None, tokens, SIZE, None, "GPU", None),
        BlockRemoved(names(keys[1:]), "GPU"),
    ]


def test_tiers_have_events_of_their_own_and_cleared_means_all():
    keys, tokens = chain(*range(8))
    index = BlockIndex()
    reported = index.apply(
        [
            Stored(keys, None, tokens, None, None, "GPU"),
            Stored(keys[1:], keys[0], tokens[4:], None, None, "CPU"),
            Cleared("GPU"),
            Cleared("STORAGE"),
            Cleared("CPU"),
        ]
    )
    assert [type(event) for event in reported] == [BlockStored, BlockStored, BlockRemoved, AllBlocksCleared]
    assert reported[1].medium == "CPU" and reported[2] == BlockRemoved(names(keys), "GPU")
    assert index.apply([Cleared("GPU")]) == [AllBlocksCleared()], (
        "who knew nothing of it may have an old view"
    )


def test_events_have_adapter_and_salt():
    keys, tokens = chain(*range(8), adapter="a", cache_salt="s")
    index = BlockIndex()
    [event] = index.apply([Stored(keys, None, tokens, "a", "s", "GPU")])
    assert event.lora_name == "a" and event.cache_salt == "s"
    lora = {"type": "lora", "name": "a"}
    assert event.extra_keys == [[lora, {"type": "cache_salt", "salt": "s"}], [lora]]
    assert kv_events.decode(payload(index.snapshot())).events[1:] == [event]
    payload(index.apply([Stored([b"\1" * 16], None, [1, 2, 3, 4], None, "half a pair: \ud800", "GPU")]))
    keys, tokens = chain(*range(8), cache_salt="s")
    assert index.apply([Stored(keys, None, tokens, None, "s", "GPU")])[0].extra_keys == [
        [{"type": "cache_salt", "salt": "s"}],
        None,
    ]


def test_of_two_contents_with_one_name_the_first_is_published():
    index, a, b = BlockIndex(), b"\1" * 8 + b"name" * 2, b"\2" * 8 + b"name" * 2
    store = [Stored([key], None, [1, 2, 3, key[0]], None, None, "GPU") for key in (a, b)]
    assert [event.token_ids for event in index.apply(store)] == [[1, 2, 3, 1]]
    assert index.apply([Removed(b, "GPU")]) == []
    assert len(index.apply([Removed(a, "GPU")])) == 1


@pytest.mark.parametrize("seed", range(10))
def test_a_snapshot_equals_what_the_events_gave_with_parents_first(seed):
    print(f"seed {seed}")
    r = random.Random(seed)
    index, view = BlockIndex(), View(SIZE, reachable=False)
    chains = [chain(*(r.randrange(3) for _ in range(SIZE * r.randint(1, 6)))) for _ in range(12)]
    for _ in range(200):
        changes = []
        for _ in range(r.randint(1, 4)):
            (keys, tokens), tier = r.choice(chains), r.choice(("GPU", "CPU"))
            start, end = sorted(r.sample(range(len(keys) + 1), 2))
            changes.append(
                r.choice(
                    (
                        Stored(
                            keys[start:end],
                            keys[start - 1] if start else None,
                            tokens[start * SIZE : end * SIZE],
                            None,
                            None,
                            tier,
                        ),
                        Removed(r.choice(keys), tier),
                        Removed(keys[-1], tier),
                        Cleared(tier) if r.random() < 0.1 else Removed(keys[0], tier),
                    )
                )
            )
        if events := index.apply(changes):
            view.apply(payload(events))
        assert view.blocks == {
            (tier, name): (block.parent, struct.unpack(f"{SIZE}I", block.token_ids))
            for (tier, _), blocks in index.shelves.items()
            for name, block in blocks.items()
        }
        seen = set()
        for event in index.snapshot()[1:]:
            for i, name in enumerate(event.block_hashes):
                parent = event.block_hashes[i - 1] if i else event.parent_block_hash
                assert (
                    parent is None
                    or (event.medium, parent) in seen
                    or (event.medium, parent) not in view.blocks
                )
                seen.add((event.medium, name))
        assert View(SIZE, reachable=False).apply(payload(index.snapshot())).blocks == view.blocks


# The scheduler's events


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_events_of_any_load_match_the_pool(seed, has_states):
    """With recurrent layers only what lies before a snapshot is published, as prompts go on from these alone."""
    print(f"seed {seed}")
    r = random.Random(seed)
    events = KvEvents(
        KVEventsConfig(enable_kv_cache_events=True, publisher="null", buffer_steps=r.choice((1, 5, 10_000)))
    )
    scheduler = Scheduler(
        num_blocks=r.randint(8, 40) + 20 * has_states,
        block_size=SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=r.choice((5, 16, 64)),
        max_model_len=60,
        **({"groups": (LayerGroup((), SIZE),), "snapshots": SnapshotRoom(2)} if has_states else {}),
    )
    Parts(scheduler).add(BlockEvents(events, scheduler.blocks))

    def check(view: View) -> None:
        cached = set(names(scheduler.blocks.pool.cached_keys()))
        if has_states:
            kept = set(names(scheduler.blocks.snapshots._found))
            assert kept <= view.names() <= cached
            assert view.snapshots == {(kv_events.GPU, name) for name in kept}
        else:
            assert view.names() == cached

    view, in_flight, prompts = View(SIZE), [], [[]]
    for i in range(400):
        if r.random() < 0.3 and len(scheduler.waiting) < 6:
            base = r.choice(prompts)
            prompt = (
                base[: r.choice((len(base), r.randint(0, len(base))))]
                + [r.randrange(3) for _ in range(r.randint(1, 12))]
            )[:30]
            prompts = [*prompts[-8:], prompt]
            options = {"prompt_logprobs": 0} if r.random() < 0.2 else {}  # computes what is cached already
            params = SamplingParams(max_tokens=r.randint(1, 25), ignore_eos=True, **options)
            scheduler.add(Request(f"r{i}", prompt, params, cache_salt=r.choice((None, None, "s"))))
        if r.random() < 0.03 and scheduler.running:
            scheduler.abort(r.choice(scheduler.running).request.request_id)
        if r.random() < 0.02:
            scheduler.reset_prefix_cache()
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
        while len(in_flight) > (r.randint(0, 1) if plan is not None else 0):
            done = in_flight.pop(0)
            scheduler.update(done, [[r.randrange(3)] for e in done.scheduled if e.samples])
        events.flush()
        scheduler.check()
        if r.random() < 0.5:
            for batch in events.drain():
                view.apply(kv_events.encode(batch))
            check(view)
            assert {parent for parent, _ in view.blocks.values()} <= view.names() | {None}, (
                "cached, and out of reach"
            )
        if r.random() < 0.05:
            check(View(SIZE).apply(kv_events.encode(events.snapshot())))
    assert scheduler.stats().prefix_cache_hits > 0
    events.close()


def test_a_step_makes_one_batch_and_what_changes_nothing_makes_none():
    events = KvEvents(QUIET)
    scheduler = Scheduler(
        num_blocks=8, block_size=SIZE, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32
    )
    Parts(scheduler).add(BlockEvents(events, scheduler.blocks))
    for name in "ab":
        scheduler.add(
            Request(name, [1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(max_tokens=2, ignore_eos=True))
        )
    plan = scheduler.schedule()
    events.flush()
    [batch] = events.drain()
    assert [len(event.block_hashes) for event in batch.events] == [2] and batch.events[0].token_ids == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
    ]
    assert batch.data_parallel_rank == 0 and abs(batch.ts - time.time()) < 60
    scheduler.update(plan, [[5], [5]])
    scheduler.abort("a")
    scheduler.preempt_all()
    events.flush()
    assert events.drain() == []
    scheduler.reset_prefix_cache()
    events.flush()
    assert [batch.events for batch in events.drain()] == [[AllBlocksCleared()]]
    events.close()
    with pytest.raises(UnavailableError):
        events.drain()


# The wire


@pytest.fixture
def publish(tmp_path):
    """(events, listener), connected."""
    made = []

    def make(**options):
        ends = dict(
            endpoint=f"ipc://{tmp_path}/e{len(made)}",
            replay_endpoint=f"ipc://{tmp_path}/r{len(made)}",
            topic="t",
        )
        config = KVEventsConfig(enable_kv_cache_events=True, **ends | options)
        events, listener = KvEvents(config), Listener(config.endpoint, config.replay_endpoint, b"t")
        made.extend((listener, events))
        while not listener.sub.poll(20):  # a subscriber hears nothing until its subscription has arrived
            events.cleared()
            events.flush()
        events.drain()
        listener.last = -1
        while listener.last < events._next - 1:
            listener.last = listener.hear()[0]
        return events, listener

    yield make
    for one in made:
        one.close()


def store(events, *token_ids):
    keys, tokens = chain(*token_ids)
    events.stored(keys, None, tokens)
    events.flush()
    return keys


def test_batches_are_numbered_and_are_what_was_drained(publish):
    events, listener = publish()
    keys = store(events, *range(8))
    events.removed(keys[1])
    events.flush()
    heard = [listener.hear() for _ in range(2)]
    assert [number for number, _ in heard] == [listener.last + 1, listener.last + 2]
    assert events.drain() == [kv_events.decode(data) for _, data in heard]
    assert events.drain() == []


def test_who_missed_some_asks_for_them_by_number(publish):
    events, listener = publish()
    for i in range(5):
        store(events, i, i, i, i)
    heard = [listener.hear() for _ in range(5)]
    first = heard[0][0]
    assert listener.replay(first + 2) == heard[2:]
    assert listener.replay(first + 5) == [], "it has everything"
    assert [number for number, _ in listener.replay(0)] == list(range(first + 5))


def test_who_missed_too_much_gets_a_snapshot_under_the_last_number(publish):
    events, listener = publish(buffer_steps=3)
    keys = [store(events, i, i, i, i)[0] for i in range(6)]
    events.removed(keys[0])
    events.flush()
    heard = [listener.hear() for _ in range(7)]
    last = heard[-1][0]
    assert listener.replay(last - 2) == heard[-3:]
    for start in (last - 3, 0, -1, last + 2):  # gone, or numbers of an engine before this one
        [(number, data)] = listener.replay(start)
        assert number == last and View(SIZE).apply(data).names() == set(names(keys[1:]))
    for i in range(9, 14):
        keys += store(events, i, i, i, i)
    [snapshot] = events.drain()
    assert isinstance(snapshot.events[0], AllBlocksCleared)
    assert View(SIZE).apply(kv_events.encode(snapshot)).names() == set(names(keys[1:]))


def test_requests_that_are_none_are_ignored(publish):
    _, listener = publish()
    for frames in ([b"x"], [b"", b"x"], [b"", b"", b"12345678"], [b"", b"123456789"]):
        listener.ask.send_multipart(frames)
    assert len(listener.replay(listener.last)) == 1


def test_a_request_of_a_req_socket_is_answered(publish):
    """vLLM's example has one: it can read the first answer."""
    events, listener = publish()
    store(events, 1, 2, 3, 4)
    number, data = listener.hear()
    with zmq.Context() as context, context.socket(zmq.REQ) as req:
        req.linger = 0
        req.connect(events.config.replay_endpoint)
        req.send(number.to_bytes(8, "big"))
        assert req.poll(10_000) and req.recv_multipart() == [b"t", number.to_bytes(8, "big"), data]


def test_without_listeners_nothing_waits_and_the_queue_is_bounded(tmp_path):
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/e", max_queue_size=3, buffer_steps=2
    )
    events = KvEvents(config)
    gate = threading.Event()
    events._queue.put(gate.wait)  # the thread is busy
    threading.Timer(0.3, gate.set).start()
    for i in range(20):
        store(events, i, i, i, i)
        assert events._queue.qsize() <= 3
    assert gate.is_set() and len(events.snapshot().events) == 21
    events.close()


def test_what_is_to_be_published_goes_before_answers(publish):
    events, listener = publish()
    busy, queued = threading.Event(), threading.Event()

    def work():
        """Waits until it has been asked, and has something to publish."""
        busy.set()
        events._replay.router.poll(10_000)
        queued.wait(10)

    events._queue.put(work)
    assert busy.wait(10)
    start = events._next
    listener.ask.send_multipart([b"", start.to_bytes(8, "big")])
    for i in range(3):
        store(events, i, i, i, i)
    queued.set()
    numbers = []
    while (frames := listener.ask.recv_multipart())[2] != kv_events.END:
        numbers.append(int.from_bytes(frames[2], "big"))
    assert numbers == [start, start + 1, start + 2]


def test_when_the_thread_has_broken_off_nothing_is_kept_for_it(caplog):
    events = KvEvents(QUIET)
    events._queue.put(lambda: 1 / 0)
    events._thread.join(10)
    for i in range(5):
        store(events, i, i, i, i)
    assert events._queue.empty() and "KV events have ended" in caplog.text
    with pytest.raises(UnavailableError):
        events.drain()
    events.close()


def test_an_endpoint_that_cannot_be_had_is_a_config_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for options in (
            dict(endpoint=f"tcp://*:{port}"),
            dict(endpoint=f"ipc://{tmp_path}/a", replay_endpoint=f"tcp://127.0.0.1:{port}"),
            dict(endpoint=f"ipc://{tmp_path}/no/folder"),
            dict(endpoint="tcp://no such host::5:1"),
        ):
            with pytest.raises(
                ConfigError, match=r"kv_events_config\.(replay_)?endpoint .* cannot be opened"
            ):
                KvEvents(KVEventsConfig(enable_kv_cache_events=True, **options))
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/a")
    first = KvEvents(config)
    with pytest.raises(ConfigError, match="another process listens there"):
        KvEvents(config)
    first.close()
    KvEvents(config).close()


def test_an_address_of_one_host_is_connected_to(tmp_path):
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        port = sub.bind_to_random_port("tcp://127.0.0.1")
        sub.subscribe(b"")
        events = KvEvents(KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}"))
        while not sub.poll(20):
            store(events, 1, 2, 3, 4)
            events.cleared()
        assert sub.recv_multipart()[0] == b""
        events.close()


def test_data_parallel_ranks_have_endpoints_of_their_own():
    assert with_rank("tcp://*:5557", 0) == "tcp://*:5557" and with_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert (
        with_rank("ipc:///tmp/e", 2) == "ipc:///tmp/e_dp2"
        and with_rank("inproc://cache", 1) == "inproc://cache_dp1"
    )


# Reading others

HASH = bytes(range(32))
NAME = int.from_bytes(HASH, "big") % 2**64


def stored(**fields):
    return BlockStored(
        **dict(
            block_hashes=[1],
            parent_block_hash=None,
            token_ids=[5, 6],
            block_size=2,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
        | fields
    )


@pytest.mark.parametrize(
    "events, expected",
    [
        # vLLM, maps, and what it leaves out
        (
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [1],
                    "parent_block_hash": None,
                    "token_ids": [5, 6],
                    "block_size": 2,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full",
                    "session_id": "x",
                }
            ],
            [stored(group_idx=0)],
        ),
        (
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [HASH],
                    "parent_block_hash": HASH,
                    "token_ids": [5, 6],
                    "block_size": 2,
                    "lora_id": 3,
                    "medium": "CPU",
                    "lora_name": "a",
                    "extra_keys": [["a", "salt", ["image", 0]]],
                }
            ],
            [
                stored(
                    block_hashes=[NAME],
                    parent_block_hash=NAME,
                    lora_id=3,
                    medium="CPU",
                    lora_name="a",
                    extra_keys=[
                        [
                            {"type": "lora", "name": "a"},
                            {"type": "cache_salt", "salt": "salt"},
                            {"type": "legacy", "value": ["image", 0]},
                        ]
                    ],
                )
            ],
        ),
        (
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [1, 2],
                    "parent_block_hash": None,
                    "token_ids": [5, 6, 7, 8],
                    "block_size": 2,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "event_version": 1,
                    "extra_keys": [[{"type": "cache_salt", "salt": "s"}], None],
                }
            ],
            [
                stored(
                    block_hashes=[1, 2],
                    token_ids=[5, 6, 7, 8],
                    extra_keys=[[{"type": "cache_salt", "salt": "s"}], None],
                )
            ],
        ),
        # vLLM, arrays, younger and older
        (
            [
                ["BlockStored", [1], 7, [5, 6], 2, None, "STORAGE", "a", None, 0],
                ["BlockRemoved", [1, 2], "GPU"],
                ["AllBlocksCleared"],
            ],
            [
                stored(parent_block_hash=7, medium="STORAGE", lora_name="a", group_idx=0),
                BlockRemoved([1, 2], "GPU"),
                AllBlocksCleared(),
            ],
        ),
        (
            [["BlockStored", [1], None, [5, 6], 2, None], ["BlockRemoved", [HASH]]],
            [stored(), BlockRemoved([NAME], "GPU")],
        ),
        # SGLang
        (
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [-1],
                    "parent_block_hash": -2,
                    "token_ids": [5, 6],
                    "block_size": 2,
                    "lora_id": None,
                    "medium": "CPU_PINNED",
                },
                {"type": "BlockRemoved", "block_hashes": [3], "medium": "DISK"},
                {
                    "type": "BlockStored",
                    "block_hashes": [4],
                    "parent_block_hash": None,
                    "token_ids": [5, 6],
                    "block_size": 2,
                    "cache_salt": "s",
                    "medium": "EXTERNAL",
                },
            ],
            [
                stored(block_hashes=[2**64 - 1], parent_block_hash=2**64 - 2, medium="CPU"),
                BlockRemoved([3], "STORAGE"),
                stored(
                    block_hashes=[4], medium="STORAGE", extra_keys=[[{"type": "cache_salt", "salt": "s"}]]
                ),
            ],
        ),
        # from a later version
        (
            [
                {"type": "BlockMoved", "from": 1},
                ["BlockMoved", 1],
                {"type": "AllBlocksCleared", "why": "sleep"},
            ],
            [AllBlocksCleared()],
        ),
    ],
    ids=["map", "bytes", "typed", "array", "old array", "sglang", "unknown"],
)
def test_events_of_other_engines_are_read(events, expected):
    named = {"ts": 1.5, "events": events}
    for batch in ([1.5, events, 2], named | {"data_parallel_rank": 2}, named | {"attn_dp_rank": 2}):
        assert kv_events.decode(msgpack.packb(batch)) == EventBatch(1.5, expected, 2)
    assert kv_events.decode(msgpack.packb([1.5, events])) == EventBatch(1.5, expected, None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"{}",
        msgpack.packb(3),
        msgpack.packb([1.5]),
        msgpack.packb({"ts": 1.5}),
        msgpack.packb([1.5, 7]),
        msgpack.packb(["now", []]),
        msgpack.packb([1.5, [{}]]),
        msgpack.packb([1.5, [[]]]),
        msgpack.packb([1.5, [["BlockStored"]]]),
        msgpack.packb([1.5, [["BlockRemoved", 5, "GPU"]]]),
        msgpack.packb([1.5, [["BlockRemoved", ["a"], "GPU"]]]),
        msgpack.packb([1.5, [{"type": "BlockStored", "block_hashes": [1]}]]),
        msgpack.packb([1.5, [["BlockRemoved", [1], 5]]]),
        msgpack.packb([1.5, [["BlockStored", [1], None, ["a"], 2, None]]]),
        msgpack.packb([1.5, [[["BlockStored"]]]]),
        b"\x91" * 10**5,
    ],
)
def test_what_is_no_batch_is_refused(data):
    with pytest.raises(ValueError, match="must be a batch of KV events"):
        kv_events.decode(data)


def test_damaged_batches_are_refused_or_read_and_nothing_else():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    r = random.Random(seed)
    keys, tokens = chain(*range(12), adapter="a", cache_salt="s")
    good = payload(
        BlockIndex().apply(
            [Stored(keys, None, tokens, "a", "s", "GPU"), Removed(keys[2], "GPU"), Cleared("GPU")]
        )
    )
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(r.randint(1, 3)):
            data[r.randrange(len(data))] = r.randrange(256)
        try:
            kv_events.decode(bytes(data[: r.choice((len(data), r.randrange(len(data))))]))
        except ValueError:
            pass


# The options


def test_vllms_options_are_taken_as_dict_or_json():
    fields = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:6000",
        "replay_endpoint": "tcp://*:6001",
        "buffer_steps": 5,
        "hwm": 6,
        "max_queue_size": 7,
        "topic": "kv",
        "curve_secret_key_file": "a",
        "curve_client_keys_dir": "b",
    }
    for given in (fields, json.dumps(fields), KVEventsConfig(**fields)):
        config = EngineConfig.from_options(kv_events_config=given)
        assert msgspec.to_builtins(config.kv_events_config) == fields
        assert wire.decode_to_core(wire.encode(wire.Start(config))).config == config
    default = KVEventsConfig()
    assert (default.endpoint, default.replay_endpoint, default.topic) == ("tcp://lo:5557", None, "")
    assert (default.buffer_steps, default.hwm, default.max_queue_size) == (10_000, 100_000, 100_000)
    assert EngineConfig().kv_events_config is None


@pytest.mark.parametrize(
    "given, named",
    [
        ("{", "must be a dict or a JSON object"),
        ([1], "must be a dict or a JSON object"),
        ('"zmq"', "must be a dict or a JSON object"),
        ({"enabled": True}, "no field 'enabled'"),
        ({"bufer_steps": 1}, "did you mean 'buffer_steps'"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events must be true or false, got 1"),
        ({"publisher": "nats"}, "publisher must be one of zmq, null, got 'nats'"),
        ({"topic": None}, "topic must be a string, got None"),
        ({"buffer_steps": -1}, "buffer_steps must be .*, got -1"),
        ({"hwm": 0}, "hwm must be .*, got 0"),
        ({"hwm": True}, "hwm must be .*, got True"),
        ({"max_queue_size": 2.5}, "max_queue_size must be .*, got 2.5"),
        ({"max_queue_size": 2**40}, "max_queue_size must be .*, got 1099511627776"),
        ({"endpoint": None}, "endpoint must be a ZMQ address, got None"),
        ({"endpoint": "5557"}, "endpoint must be a ZMQ address, got '5557'"),
        ({"endpoint": "tcp://*"}, "endpoint must be a ZMQ address, got 'tcp://\\*'"),
        ({"endpoint": "tcp://*:70000"}, "tcp://\\*:70000"),
        ({"endpoint": "http://x:1"}, "http://x:1"),
        ({"replay_endpoint": ""}, "replay_endpoint must be a ZMQ address, got ''"),
        ({"replay_endpoint": "tcp://lo:5557"}, "replay_endpoint must differ from endpoint"),
        ({"curve_secret_key_file": "a"}, "belong together"),
        ({"curve_client_keys_dir": 3}, "curve_client_keys_dir must be a path, got 3"),
    ],
)
def test_bad_options_are_named(given, named):
    with pytest.raises(ConfigError, match=named):
        EngineConfig.from_options(kv_events_config=given)


def test_events_without_a_prefix_cache_are_refused():
    with pytest.raises(ConfigError, match="enable_prefix_caching False caches no blocks"):
        EngineConfig(kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)
    EngineConfig(kv_events_config={"enable_kv_cache_events": False}, enable_prefix_caching=False)


def test_a_block_is_stored_again_when_its_snapshot_has_come_or_gone():
    index, (keys, tokens) = BlockIndex(), chain(*range(3 * SIZE))
    stored = Stored(keys, None, tokens, None, None, GPU, has_states=True)
    [first] = index.apply(
        [stored, Kept(keys[2], GPU, True), Kept(keys[0], GPU, True), Kept(keys[0], GPU, False)]
    )
    assert first.block_hashes == names(keys) and first.snapshot_hashes == names(keys[2:])
    [again] = index.apply([Kept(keys[2], GPU, False), Kept(keys[1], GPU, True), Kept(keys[1], GPU, False)])
    assert (again.block_hashes, again.snapshot_hashes) == (names(keys[2:]), [])
    assert again.parent_block_hash == names(keys)[1]
    removed = [Kept(keys[2], GPU, True), Removed(keys[2], GPU)]
    last = Stored(keys[2:], keys[1], tokens[2 * SIZE :], None, None, GPU, has_states=True)
    assert [event.snapshot_hashes for event in index.apply([*removed, last])[1:]] == [[]]
    [_, whole] = index.snapshot()
    assert whole.snapshot_hashes == []
    [plain] = BlockIndex().apply([Stored(keys, None, tokens, None, None, GPU)])
    assert plain.snapshot_hashes is None and b"snapshot_hashes" not in kv_events.encode([plain])
