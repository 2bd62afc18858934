"""The shared store: many writers, objects that are wrong, stores that are slow, broken or dead. No wrong
byte, no endless wait."""

import logging
import random
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from msgspec.structs import replace as change

from shoal.errors import ConfigError
from shoal.files import io_threads, object_store
from shoal.files.io_threads import Breaker
from shoal.kv.layout import Layout
from shoal.kv.tiers import store
from shoal.kv.tiers.block_file import HEADER_AT, PAGE, BlockFormat
from shoal.kv.tiers.store import StoreTier
from tests.made_blocks import BYTES, MODEL, OTHER_MODEL, SPEC, chain, content, keys_of, read, settle, write

FILE = PAGE + BYTES


class Shaky(MemoryFileSystem):
    """An unreliable object store: `trouble` is called before every request and may raise or wait."""

    protocol = "shaky"
    store: dict = {}
    pseudo_dirs = [""]
    cachable = False
    requests: list = []

    @staticmethod
    def trouble():
        pass

    def _ask(self, what, path):
        Shaky.requests.append((what, path))
        Shaky.trouble()

    def info(self, path, **options):
        self._ask("info", path)
        return super().info(path, **options)

    def cat_file(self, path, *args, **options):
        self._ask("get", path)
        return super().cat_file(path, *args, **options)

    def pipe_file(self, path, value, *args, **options):
        self._ask("put", path)
        return super().pipe_file(path, value, *args, **options)


@pytest.fixture(autouse=True)
def shaky(monkeypatch):
    fsspec.register_implementation("shaky", Shaky, clobber=True)
    monkeypatch.setattr(object_store, "OBJECT_STORES", {*object_store.OBJECT_STORES, "shaky"})
    Shaky.trouble = staticmethod(lambda: None)
    Shaky.store.clear()
    Shaky.requests.clear()
    return Shaky


@pytest.fixture(params=["file", "shaky"])
def url(request, tmp_path):
    return f"file://{tmp_path}/store" if request.param == "file" else "shaky://bucket/kv"


@pytest.fixture
def make():
    tiers = []

    def build(url, fingerprint=MODEL, spec=SPEC, **options):
        tiers.append(StoreTier(url, fingerprint, spec, **options))
        return tiers[-1]

    yield build
    for tier in tiers:
        tier.close()


def look_up(tier, metas):
    return tier.look_up(keys_of(metas)).result(20)


def fails(error):
    def trouble():
        raise error

    return staticmethod(trouble)


def test_what_one_engine_wrote_another_reads(make, url):
    one, other, metas = make(url), make(url), [*chain(5), *chain(2, 1, ("adapter", "salt"))]
    assert all(write(one, metas)) and one.match(keys_of(metas)) == 7
    assert other.match(keys_of(metas)) == 0, "nothing is known before it was asked"
    assert look_up(other, metas[:5]) == 5 == other.match(keys_of(metas[:5]))
    assert all(read(other, meta) == content(meta) for meta in metas)
    assert write(other, metas) == [True] * 7 and other.stats().written == 0 and one.stats().written == 7


def test_other_models_layouts_and_ranks_find_nothing(make, url):
    metas = chain(3)
    write(make(url), metas)
    for tier in (
        make(url, OTHER_MODEL),
        make(url, spec=change(SPEC, num_layers=1, head_dim=32)),
        make(url, spec=change(SPEC, tp_size=2)),
    ):
        assert look_up(tier, metas) == 0 and read(tier, metas[0]) is None


@pytest.mark.parametrize("there", range(12))
def test_a_look_up_finds_the_leading_run_with_few_questions(make, shaky, there):
    metas = chain(11)
    write(make("shaky://bucket/kv"), metas[:there])
    tier = make("shaky://bucket/kv")
    shaky.requests.clear()
    assert look_up(tier, metas) == there == tier.match(keys_of(metas))
    assert len(shaky.requests) <= (1 if there == 0 else 2 if there == 11 else 6)
    assert tier.contains(metas[0].key) == (there > 0)


def test_answers_are_believed_for_a_while(make, shaky, monkeypatch):
    metas = chain(4)
    one, tier = make("shaky://bucket/kv"), make("shaky://bucket/kv")
    assert look_up(tier, metas) == 0
    write(one, metas)
    shaky.requests.clear()
    assert look_up(tier, metas) == 0 and not shaky.requests
    monkeypatch.setattr(store, "ABSENT_S", 0.0)
    tier.forget(keys_of(metas))
    assert look_up(tier, metas) == 4
    shaky.requests.clear()
    assert look_up(tier, metas) == 4 and not shaky.requests
    tier._known = type(tier._known)({key: (True, 0.0) for key in tier._known})
    assert tier.match(keys_of(metas)) == 0 and look_up(tier, metas) == 4 and shaky.requests


def test_folders_that_a_client_remembers_hide_nothing(make, monkeypatch):
    """S3's and Google's clients answer from the listings that they have."""

    class Remembering(Shaky):
        protocol = "remembering"

        def info(self, path, **options):
            folder = self._parent(path)
            if folder in self.dircache:
                raise FileNotFoundError(path)
            try:
                return super().info(path, **options)
            except FileNotFoundError:
                self.dircache[folder] = []
                raise

    fsspec.register_implementation("remembering", Remembering, clobber=True)
    monkeypatch.setattr(object_store, "OBJECT_STORES", {"remembering"})
    monkeypatch.setattr(store, "ABSENT_S", 0.0)
    one, other, metas = make("remembering://bucket/kv"), make("remembering://bucket/kv"), chain(3)
    assert look_up(other, metas) == 0 and all(write(one, metas)) and look_up(other, metas) == 3


def test_what_is_remembered_is_bounded(make, monkeypatch):
    monkeypatch.setattr(store, "MAX_KNOWN", 10)
    tier = make("shaky://bucket/kv")
    write(tier, chain(30))
    assert len(tier._known) == 10


def test_forgotten_blocks_are_absent_for_a_while(make, url):
    tier, metas = make(url), chain(3)
    write(tier, metas)
    tier.forget(keys_of(metas[1:2]))
    assert tier.match(keys_of(metas)) == 1 and look_up(tier, metas) == 1


# Wrong objects


def whole(meta, fingerprint=MODEL, spec=SPEC, data=None):
    data = content(meta) if data is None else data
    return BlockFormat(fingerprint, spec).seal(meta, data) + data


FIRST = chain(1)[0]
WRONG = {
    "empty": (b"", "torn"),
    "cut off": (whole(FIRST)[:-1], "torn"),
    "longer": (whole(FIRST) + b"x", "torn"),
    "a flipped bit": (whole(FIRST)[:-1] + bytes([whole(FIRST)[-1] ^ 1]), "damaged"),
    "a flipped bit in the header": (
        whole(FIRST)[: HEADER_AT + 5] + b"?" + whole(FIRST)[HEADER_AT + 6 :],
        "damaged",
    ),
    "other content under the same front": (
        BlockFormat(MODEL, SPEC).seal(FIRST, content(FIRST)) + bytes(BYTES),
        "damaged",
    ),
    "another block's": (whole(replace(FIRST, key=b"k" * 16)), "different"),
    "another model's": (whole(FIRST, OTHER_MODEL), "foreign"),
    "another layout's": (whole(FIRST, spec=change(SPEC, layout=Layout.KV_FIRST)), "foreign"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_object_is_not_served_is_counted_and_makes_way_for_a_good_one(make, url, name):
    value, kind = WRONG[name]
    tier, metas = make(url), chain(2)
    write(tier, metas)
    tier._fs.pipe_file(tier._path(FIRST.key), value)
    assert (
        read(tier, metas[0]) is None
        and tier.stats().problems == {kind: 1}
        and read(tier, metas[1]) == content(metas[1])
    )
    assert write(tier, metas) == [True, True] and read(tier, metas[0]) == content(metas[0])


def test_a_wrong_object_is_gone_before_its_reader_hears_of_it(make, url, monkeypatch):
    """Otherwise the removal could hit a good object that the reader writes next."""
    tier, [meta] = make(url), chain(1)
    write(tier, [meta])
    tier._fs.pipe_file(tier._path(meta.key), b"wrong")
    remove, reading, heard = type(tier._fs).rm_file, [], []

    def slowly(fs, path):
        while not reading:
            time.sleep(0.001)
        heard.append(reading[0].done())
        remove(fs, path)

    monkeypatch.setattr(type(tier._fs), "rm_file", slowly)
    reading.append(tier.read(meta, memoryview(bytearray(BYTES))))
    assert reading[0].result(20) is False and heard == [False]


def test_a_missing_object_is_a_miss_and_no_failure_of_the_store(make, url):
    tier, metas = make(url), chain(8)
    assert [read(tier, meta) for meta in metas] == [None] * 8 and write(tier, metas) == [True] * 8


def test_nothing_unfinished_is_left_under_another_name(make, tmp_path, monkeypatch):
    tier = make(f"file://{tmp_path}/store")
    write(tier, chain(4))

    def mv(source, target):
        raise PermissionError(1, "no")

    monkeypatch.setattr(tier._fs, "mv", mv)
    assert write(tier, chain(2, 1)) == [False, False]
    assert (
        len(list(tmp_path.rglob("*.kv"))) == 4
        and not list(tmp_path.rglob("*.tmp"))
        and not list(tmp_path.rglob("probe*"))
    )


# Stores in trouble


def test_a_dead_store_is_left_alone_and_tried_again(make, shaky, monkeypatch, caplog):
    now = [1000.0]
    monkeypatch.setattr(io_threads, "time", type("clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    tier, metas = make("shaky://bucket/kv"), chain(20)
    assert write(tier, metas[:1]) == [True]
    shaky.trouble = fails(ConnectionError("gone"))
    with caplog.at_level(logging.WARNING):
        assert [read(tier, metas[0]) for _ in range(3)] == [None] * 3
        deadline = time.monotonic() + 30
        while not caplog.records and time.monotonic() < deadline:  # a thread counts first, and then logs
            time.sleep(0.01)
    assert tier.stats().problems == {"ConnectionError": 3} and len(caplog.records) == 1
    shaky.requests.clear()
    assert (
        write(tier, metas[1:]) == [False] * 19
        and look_up(tier, metas[1:]) == 0
        and read(tier, metas[0]) is None
    )
    assert not shaky.requests and tier.stats().refused == 21
    now[0] += 1.1
    assert read(tier, metas[0]) is None and len(shaky.requests) == 1, "a trial"
    assert read(tier, metas[0]) is None and len(shaky.requests) == 1
    now[0] += 1.1
    assert read(tier, metas[0]) is None and len(shaky.requests) == 1, "the second rest is longer"
    now[0] += 1.1
    shaky.trouble = staticmethod(lambda: None)
    assert read(tier, metas[0]) == content(metas[0]) and all(write(tier, metas))


def test_a_store_that_hangs_costs_no_more_than_the_timeout(make, shaky, monkeypatch):
    monkeypatch.setattr(io_threads, "RETRY_S", 100.0)
    release = threading.Event()
    tier, metas = make("shaky://bucket/kv", threads=2, timeout_s=0.3), chain(10)
    write(tier, metas[:2])
    shaky.trouble = staticmethod(lambda: release.wait(20))
    into = [bytearray(b"\xaa" * BYTES) for _ in metas]
    futures = [tier.read(meta, memoryview(buffer)) for meta, buffer in zip(metas, into)]
    futures += [
        tier.look_up(keys_of(chain(2, 1))),
        *(tier.write(meta, memoryview(content(meta))) for meta in metas[2:]),
    ]
    assert [future.result(10) for future in futures] == [False] * len(futures)
    assert tier.stats().problems["timeout"] >= 3
    assert not tier.read(metas[0], memoryview(into[0])).result(0), "nobody asks it now"
    release.set()
    settle(tier)
    assert all(buffer == b"\xaa" * BYTES for buffer in into), "late answers leave the buffers alone"


def test_a_job_that_hangs_is_answered_when_the_tier_is_closed(make, shaky):
    release, reached = threading.Event(), threading.Event()
    tier, metas = make("shaky://bucket/kv"), chain(1)
    write(tier, metas)
    shaky.trouble = staticmethod(lambda: (reached.set(), release.wait(20)))
    future = tier.read(metas[0], memoryview(bytearray(BYTES)))
    assert reached.wait(10)
    tier.close(0.05)
    assert future.result(0) is False
    release.set()


def test_answers_that_come_too_late_are_no_sign_of_health(make, shaky, monkeypatch):
    # rests don't end
    monkeypatch.setattr(io_threads, "time", type("clock", (), {"monotonic": staticmethod(lambda: 1000.0)}))
    release, metas = threading.Event(), chain(3)
    tier = make("shaky://bucket/kv", threads=3, timeout_s=0.3)
    write(tier, metas)
    shaky.trouble = staticmethod(lambda: release.wait(20))
    assert [
        future.result(10) for future in [tier.read(meta, memoryview(bytearray(BYTES))) for meta in metas]
    ] == [False] * 3
    while tier.stats().problems["timeout"] < 3:
        time.sleep(0.01)
    release.set()
    settle(tier)
    shaky.requests.clear()
    assert read(tier, metas[0]) is None and not shaky.requests


def test_a_write_that_is_too_late_takes_nothing_from_a_buffer_that_has_been_given_away(make, shaky):
    release = threading.Event()
    tier, (meta,) = make("shaky://bucket/kv", threads=1, timeout_s=0.2), chain(1)
    shaky.trouble = staticmethod(lambda: release.wait(20))
    buffer = bytearray(content(meta))
    assert not tier.write(meta, memoryview(buffer)).result(10)
    buffer[:] = bytes(BYTES)
    release.set()
    settle(tier)
    shaky.trouble = staticmethod(lambda: None)
    assert read(make("shaky://bucket/kv"), meta) in (None, content(meta))
    assert not [path for what, path in shaky.requests if what == "put" and "probe" not in path]


def test_writes_beyond_the_bound_are_refused_and_close_drops_what_waits(make, shaky):
    tier, metas, release, reached = (
        make("shaky://bucket/kv", threads=1, max_pending=2),
        chain(6),
        threading.Event(),
        threading.Event(),
    )
    shaky.trouble = staticmethod(lambda: (reached.set(), release.wait(20)))
    first = tier.write(metas[0], memoryview(content(metas[0])))
    assert reached.wait(10)
    futures = [first, *(tier.write(meta, memoryview(content(meta))) for meta in metas[1:])]
    assert (
        [future.done() for future in futures] == [False] * 3 + [True] * 3
        and tier.stats().refused == 3
        and tier.stats().pending == 3
    )
    threading.Timer(0.2, release.set).start()
    tier.close()
    assert [future.result(1) for future in futures] == [True] + [False] * 5
    assert not tier.write(metas[3], memoryview(content(metas[3]))).result(1) and look_up(tier, metas[3:]) == 0


def test_the_breaker_lets_one_trial_through_and_rests_longer_each_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(io_threads, "time", type("clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    breaker = Breaker(failures=2)
    breaker.failed()
    assert breaker.allows()
    for _ in range(5):  # all let through before
        breaker.failed()
    tried = []
    for second in range(20):
        now[0] = second + 0.5
        while breaker.allows():
            tried.append(second)
            breaker.failed()
    assert tried == [1, 3, 7, 15]
    now[0] = 100
    assert breaker.allows() and not breaker.allows(), "one at a time"
    breaker.succeeded()
    assert breaker.allows() and breaker.allows()
    breaker.failed()
    assert breaker.allows()


# Bad starts


def test_impossible_stores_are_refused_with_a_reason(monkeypatch, tmp_path, shaky):
    (tmp_path / "file").write_bytes(b"")
    for url, reason in [
        ("nope://bucket", "nope"),
        ("file:///proc/nowhere/kv", "can't be written.*No such file"),
        (f"file://{tmp_path}/file/kv", "can't be written.*Not a directory"),
    ]:
        with pytest.raises(ConfigError, match=rf"kv_store {url} .*{reason}"):
            StoreTier(url, MODEL, SPEC)
    shaky.trouble = fails(PermissionError("403 Forbidden"))
    with pytest.raises(
        ConfigError, match=r"kv_store shaky://bucket/kv can't be written: PermissionError: 403"
    ):
        StoreTier("shaky://bucket/kv", MODEL, SPEC)
    release = threading.Event()
    shaky.trouble = staticmethod(lambda: release.wait(10))
    with pytest.raises(ConfigError, match=r"no answer in 0\.2 s"):
        StoreTier("shaky://bucket/kv", MODEL, SPEC, timeout_s=0.2)
    release.set()


def test_a_missing_fsspec_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[store\]'"):
        StoreTier("s3://bucket", MODEL, SPEC)


def test_a_password_in_the_url_is_not_shown():
    with pytest.raises(ConfigError) as error:
        StoreTier("nope://user:secret@host/path", MODEL, SPEC)
    assert "secret" not in str(error.value) and "nope://host/path" in str(error.value)


# Many at once


def test_processes_that_write_the_same_blocks_at_once_all_read_right(make, tmp_path):
    code = textwrap.dedent("""
        import random, sys
        from shoal.kv.tiers.store import StoreTier
        from tests.made_blocks import *
        tier, r, metas = StoreTier(sys.argv[1], MODEL, SPEC), random.Random(int(sys.argv[2])), chain(30)
        served = 0
        for _ in range(300):
            meta, into = r.choice(metas), bytearray(BYTES)
            if tier.read(meta, memoryview(into)).result(20):
                assert bytes(into) == content(meta)
                served += 1
            else:
                assert tier.write(meta, memoryview(content(meta))).result(20)
        assert tier.stats().problems.keys() <= {"missing"} and served > 100, tier.stats()
        tier.close()
    """)
    url = f"file://{tmp_path}/store"
    root = Path(__file__).parents[3]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, url, str(i)], stderr=subprocess.PIPE, text=True, cwd=root
        )
        for i in range(3)
    ]
    for child in children:
        _, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
    assert look_up(make(url), chain(30)) == 30 and not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_with_failures_return_the_right_bytes_or_none(make, shaky, monkeypatch, seed):
    print(f"seed {seed}")
    r, rate = random.Random(seed), [0.0]
    monkeypatch.setattr(io_threads, "RETRY_S", 0.0)
    monkeypatch.setattr(io_threads, "MAX_RETRY_S", 0.0)
    monkeypatch.setattr(store, "ABSENT_S", 0.0)
    draws, lock = random.Random(seed + 1000), threading.Lock()

    def trouble():
        with lock:
            draw = draws.random()
        if draw < rate[0] / 20:
            time.sleep(0.3)
        elif draw < rate[0]:
            raise [
                ConnectionError("reset"),
                OSError(5, "EIO"),
                PermissionError("403"),
                RuntimeError("from a backend"),
            ][int(draw * 1e6) % 4]

    shaky.trouble = staticmethod(trouble)
    tiers = [make("shaky://bucket/kv", timeout_s=0.2) for _ in range(2)]
    chains = [chain(5, s) for s in range(6)]
    served = 0
    for step in range(600):
        if step % 100 == 0:
            rate[0] = r.choice([0.0, 0.05, 0.3])
        tier, metas = r.choice(tiers), r.choice(chains)
        action = r.random()
        if action < 0.35:
            futures = [tier.write(meta, memoryview(content(meta))) for meta in metas[: r.randint(1, 5)]]
            [future.result(20) for future in futures]
        elif action < 0.45:
            assert 0 <= look_up(tier, metas) <= 5
        elif action < 0.9:
            intos = [bytearray(BYTES) for _ in metas]
            futures = [tier.read(meta, memoryview(into)) for meta, into in zip(metas, intos)]
            for meta, into, future in zip(metas, intos, futures):
                if future.result(20):
                    assert bytes(into) == content(meta)
                    served += 1
        elif names := [name for name in list(shaky.store) if name.endswith(".kv")]:
            name = r.choice(names)
            if r.random() < 0.5:
                shaky.store.pop(name, None)
            else:
                data = bytearray(shaky.store[name].getvalue())
                data[r.randrange(len(data))] ^= 1 << r.randrange(8)
                MemoryFileSystem.pipe_file(tier._fs, name, bytes(data[: r.choice([FILE, FILE - 1])]))
    assert served > 100
