"""The disk tier: what is read is right or not there at all, whatever happens to its files, its disk, its
process and its neighbours."""

import errno
import logging
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as change

from shoal.errors import ConfigError
from shoal.files import io_threads
from shoal.kv.tiers import block_folder
from shoal.kv.tiers.block_file import HEADER_AT, MAGIC, PAGE, BlockFormat, in_pages, spec_name
from shoal.kv.tiers.disk import DiskTier
from tests.made_blocks import BYTES, MODEL, OTHER_MODEL, SPEC, chain, content, keys_of, read, settle, write

FILE = in_pages(PAGE + BYTES)  # a block's bytes on disk


@pytest.fixture
def make(tmp_path):
    """Builds tiers on one path. After the test they are checked and closed."""
    tiers = []

    def build(max_blocks=100, fingerprint=MODEL, spec=SPEC, path=tmp_path / "kv", **options):
        tiers.append(DiskTier(str(path), max_blocks * FILE, fingerprint, spec, **options))
        return tiers[-1]

    yield build
    for tier in tiers:
        settle(tier)
        tier.close()
        tier.check()


def all_right(tier, metas):
    return all(read(tier, meta) == content(meta, tier.spec) for meta in metas)


def files(tmp_path):
    return {path.stem: path for path in (tmp_path / "kv").rglob("*.kv")}


def fail(monkeypatch, name, code, when=lambda *args: True):
    """Makes os.<name> raise this error."""
    real = getattr(os, name)

    def failing(*args, **options):
        if when(*args):
            raise OSError(code, os.strerror(code), str(args[0]))
        return real(*args, **options)

    monkeypatch.setattr(os, name, failing)


# Blocks in, out, and after a restart


def test_what_was_written_is_read(make):
    tier, metas = (
        make(),
        [*chain(5), *chain(3, 1, ("adapter", "\ud800")), *chain(3, 1, (None, "salt" * 2000))],
    )
    assert all(write(tier, metas)) and all_right(tier, metas)
    assert (
        tier.match(keys_of(metas)) == 11
        and tier.match([metas[0].key, b"?" * 16]) == 1
        and not tier.contains(b"?" * 16)
    )
    settle(tier)
    stats = tier.stats()
    assert (stats.blocks, stats.written, stats.read, stats.pending, stats.problems) == (11, 11, 11, 0, {})
    assert stats.num_bytes == 8 * FILE + 3 * in_pages(2 * PAGE + BYTES)


def test_blocks_survive_a_restart(make):
    metas = chain(5)
    first = make()
    write(first, metas)
    first.close()
    tier = make()
    assert tier.match(keys_of(metas)) == 5 and all_right(tier, metas) and tier.stats().num_bytes == 5 * FILE


def test_a_block_that_is_there_is_not_written_again(make):
    tier, (meta,) = make(), chain(1)
    assert write(tier, [meta, meta]) == [True, True] and tier.stats().written == 1


def test_page_aligned_blocks_are_written_past_the_page_cache_and_others_through_it(make):
    spec = change(SPEC, head_dim=256)
    tier, metas = make(spec=spec), chain(2, spec=spec)
    aligned = mmap.mmap(-1, spec.block_bytes)
    aligned[:] = content(metas[0], spec)
    assert tier.write(metas[0], memoryview(aligned)).result(10)
    odd = memoryview(bytearray(spec.block_bytes + 1))[1:]
    odd[:] = content(metas[1], spec)
    assert tier.write(metas[1], odd).result(10) and not tier.stats().problems and all_right(tier, metas)


def test_short_writes_and_reads_are_completed(make, monkeypatch):
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, pieces: writev(fd, [pieces[0][:1000]]))
    monkeypatch.setattr(os, "preadv", lambda fd, pieces, at: preadv(fd, [pieces[0][:700]], at))
    tier, metas = make(), chain(3)
    tier._folder.direct = False
    assert all(write(tier, metas)) and all_right(tier, metas)


# The bound


def test_the_coldest_go_first_and_the_bound_holds(make, tmp_path):
    tier, metas = make(max_blocks=4), [meta for s in range(6) for meta in chain(1, s)]
    write(tier, metas[:4])
    assert all_right(tier, metas[:2])
    write(tier, metas[4:])
    assert files(tmp_path).keys() == {meta.key.hex() for meta in (metas[0], metas[1], metas[4], metas[5])}
    assert tier.stats().evicted == 2 and tier.stats().num_bytes == 4 * FILE


def test_tails_go_before_the_heads_without_which_they_are_of_no_use(make):
    tier, a, b = make(max_blocks=8), chain(4, "a"), chain(4, "b")
    write(tier, [*a, *b])
    assert all_right(tier, a)  # its head first, so that is the colder one
    write(tier, chain(3, "c"))
    assert tier.match(keys_of(b)) == 1 and tier.match(keys_of(a)) == 4
    write(tier, chain(3, "d"))
    assert tier.match(keys_of(a)) == 2 and tier.match(keys_of(chain(3, "c"))) == 3


def test_a_restart_learns_what_follows_what_by_reading(make):
    first, metas = make(), chain(4)
    write(first, metas)
    first.close()
    tier = make(max_blocks=4)
    assert all_right(tier, metas)
    write(tier, chain(2, 1))
    assert tier.match(keys_of(metas)) == 2


def test_lfu_keeps_what_is_used_often(make):
    tier, metas = make(max_blocks=3, policy="lfu"), [meta for s in range(5) for meta in chain(1, s)]
    write(tier, metas[:1])
    assert all_right(tier, metas[:1])
    write(tier, metas[1:])
    assert tier.contains(metas[0].key) and not tier.contains(metas[1].key) and tier.contains(metas[4].key)


def test_the_order_of_use_survives_a_restart(make):
    first, metas = make(), chain(4)
    write(first, metas)
    for age, meta in zip((3, 1, 4, 2), metas):
        os.utime(first._folder.file(meta.key), (10**9 - age, 10**9 - age))
    read(first, metas[2])
    first.close()
    tier = make(max_blocks=2)
    assert [tier.contains(meta.key) for meta in metas] == [False, True, True, False]


def test_files_of_models_that_nobody_runs_go_before_ours(make, tmp_path):
    other = make(fingerprint=OTHER_MODEL)
    write(other, chain(3, 9))
    other.close()
    ours = make(max_blocks=5)
    metas = chain(4)
    write(ours, metas[:2])
    assert len(files(tmp_path)) == 5 and ours.stats().num_bytes == 5 * FILE
    write(ours, metas[2:])
    assert len(files(tmp_path)) == 5 and all_right(ours, metas)
    write(ours, chain(1, 5))
    assert (
        len(files(tmp_path)) == 5
        and all_right(ours, metas)
        and not (tmp_path / "kv" / OTHER_MODEL.hex()).exists()
    )


def test_files_of_an_earlier_version_are_not_read_and_go_before_ours(make, tmp_path):
    earlier, metas = make(), chain(3)
    write(earlier, metas)
    earlier.close()
    folder = Path(earlier._folder.spec_folder)
    for path in folder.rglob("*.kv"):
        path.write_bytes(b"SHOALKV1" + path.read_bytes()[len(MAGIC) :])
    folder.rename(folder.with_name("float16-4-tp1-0123456789abcdef"))  # it described a cache otherwise, too
    ours = make(max_blocks=5)
    assert ours.match(keys_of(metas)) == 0 and ours.stats().num_bytes == 3 * FILE
    write(ours, chain(5, 9))
    assert len(files(tmp_path)) == 5 and all_right(ours, chain(5, 9))


def test_files_of_a_living_engine_are_left_alone(make):
    other, metas = make(fingerprint=OTHER_MODEL), chain(3, 9)
    write(other, metas)
    ours = make(max_blocks=2)
    write(ours, chain(4))
    assert all_right(other, metas) and ours.stats().num_bytes == 2 * FILE


def test_ranks_share_a_path_and_never_read_each_others_shards(make):
    ranks = [make(max_blocks=4, spec=change(SPEC, tp_rank=rank, tp_size=2)) for rank in range(2)]
    metas = chain(4)
    for rank in ranks:
        write(rank, metas[: 3 + rank.spec.tp_rank])
    assert [rank.match(keys_of(metas)) for rank in ranks] == [3, 4]
    for rank in ranks:
        rank.close()
    again = [make(max_blocks=4, spec=rank.spec) for rank in ranks]
    assert [rank.match(keys_of(metas)) for rank in again] == [3, 4] and all(
        all_right(rank, metas[:3]) for rank in again
    )


def test_a_smaller_bound_after_a_restart_is_kept_at_once(make, tmp_path):
    first = make(max_blocks=10)
    write(first, chain(10))
    first.close()
    assert make(max_blocks=3).stats().num_bytes == 3 * FILE and len(files(tmp_path)) == 3


# What may have happened to a file


def flipped(at):
    def damage(path):
        data = bytearray(path.read_bytes())
        data[at] ^= 0x10
        path.write_bytes(data)

    return damage


def swapped_for(make_other):
    """The file of a tier or block that is not this one, under this one's name."""

    def damage(path):
        shutil.copy(make_other(path), path)

    return damage


def another_models(path):
    tier = DiskTier(str(path.parents[5] / "elsewhere"), 1 << 20, OTHER_MODEL, SPEC)
    write(tier, chain(1))
    tier.close()
    return tier._folder.file(chain(1)[0].key)


def another_layouts(path):
    spec = change(SPEC, num_layers=1, head_dim=32)
    tier = DiskTier(str(path.parents[5] / "elsewhere"), 1 << 20, MODEL, spec)
    write(tier, chain(1))
    tier.close()
    return tier._folder.file(chain(1)[0].key)


def a_lie(**changes):
    """Returns a complete file whose header contradicts its name."""

    def damage(path):
        meta = replace(chain(1)[0], **changes)
        path.write_bytes(BlockFormat(MODEL, SPEC).seal(meta, content(chain(1)[0])) + content(chain(1)[0]))

    return damage


def in_place_of_it(make_thing):
    def damage(path):
        path.unlink()
        make_thing(path)

    return damage


DAMAGES = {
    "gone": (Path.unlink, "missing"),
    "empty": (lambda path: os.truncate(path, 0), "torn"),
    "cut off in the header": (lambda path: os.truncate(path, 30), "torn"),
    "cut off in the data": (lambda path: os.truncate(path, PAGE + BYTES - 1), "torn"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "torn"),
    "zeros of the same length": (lambda path: path.write_bytes(bytes(PAGE + BYTES)), "damaged"),
    "bit in the magic": (flipped(0), "damaged"),
    "bit in the checksum": (flipped(len(MAGIC) + 3), "damaged"),
    "bit in the header": (flipped(HEADER_AT + 9), "damaged"),
    "bit in the padding": (flipped(PAGE - 1), "damaged"),
    "bit in the data": (flipped(PAGE + BYTES // 2), "damaged"),
    "last bit": (flipped(-1), "damaged"),
    "another version": (lambda path: path.write_bytes(MAGIC[:-1] + b"1" + path.read_bytes()[8:]), "foreign"),
    "another model's": (swapped_for(another_models), "foreign"),
    "another layout's": (swapped_for(another_layouts), "foreign"),
    "another block's": (a_lie(key=b"k" * 16), "different"),
    "other tokens": (a_lie(token_ids=[1, 2, 3, 4]), "different"),
    "another parent": (a_lie(parent=b"p" * 16), "different"),
    "another adapter": (a_lie(extra=("adapter", None)), "different"),
    "another salt": (a_lie(extra=(None, "salt")), "different"),
    "a directory": (in_place_of_it(Path.mkdir), "torn"),
    "a pipe": (in_place_of_it(os.mkfifo), "torn"),
    "a link": (in_place_of_it(lambda path: path.symlink_to("/etc/hostname")), "ELOOP"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_not_served_is_counted_and_makes_way_for_a_good_one(make, tmp_path, name):
    damage, kind = DAMAGES[name]
    tier, metas = make(), chain(3)
    write(tier, metas)
    damage(files(tmp_path)[metas[0].key.hex()])
    assert (
        read(tier, metas[0]) is None
        and tier.stats().problems == {kind: 1}
        and not tier.contains(metas[0].key)
    )
    assert all_right(tier, metas[1:])
    if name != "a directory":
        assert metas[0].key.hex() not in files(tmp_path)
        assert write(tier, metas[:1]) == [True] and all_right(tier, metas)
    else:  # somebody else's, so it stays
        assert write(tier, metas[:1]) == [False] and write(tier, chain(1, 8)) == [True], "the tier goes on"


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_was_damaged_before_the_start_is_not_served_either(make, tmp_path, name):
    first, metas = make(), chain(3)
    write(first, metas)
    first.close()
    damage, _ = DAMAGES[name]
    damage(files(tmp_path)[metas[0].key.hex()])
    tier = make()
    assert read(tier, metas[0]) is None and all_right(tier, metas[1:])


def test_no_flipped_bit_is_ever_served(make, tmp_path):
    tier, (meta,) = make(), chain(1)
    r = random.Random(0)
    for at in sorted({*range(160), *r.sample(range(PAGE + BYTES), 300)}):
        assert write(tier, [meta]) == [True]
        path = files(tmp_path)[meta.key.hex()]
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << r.randrange(8)
        path.write_bytes(data)
        assert read(tier, meta) is None, f"byte {at}"


def test_strangers_files_are_left_alone(make, tmp_path):
    first = make()
    write(first, chain(2))
    first.close()
    folder = files(tmp_path)[chain(1)[0].key.hex()].parent
    for path in (
        tmp_path / "kv" / "notes.txt",
        folder / "notes.txt",
        folder / ("0" * 31 + ".kv"),
        tmp_path / "kv" / "elsewhere" / "x.kv",
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    make(max_blocks=1).close()
    assert (
        (tmp_path / "kv" / "notes.txt").exists()
        and (folder / "notes.txt").exists()
        and (folder / ("0" * 31 + ".kv")).exists()
    )
    assert (tmp_path / "kv" / "elsewhere" / "x.kv").exists()


def test_a_block_without_room_is_logged_with_its_bytes(make, caplog):
    """Regression: the log had None in their place."""
    tier = make(max_blocks=1)
    assert write(tier, chain(1, 1, (None, "salt" * 2000))) == [False]
    assert f"no room (a file of {in_pages(2 * PAGE + BYTES)} bytes, {FILE} allowed)" in caplog.text


def test_each_kind_of_problem_is_logged_once(make, tmp_path, caplog):
    tier, metas = make(), chain(4)
    write(tier, metas)
    for meta in metas[:2]:
        flipped(-1)(files(tmp_path)[meta.key.hex()])
    files(tmp_path)[metas[2].key.hex()].unlink()
    with caplog.at_level(logging.WARNING):
        assert [read(tier, meta) for meta in metas[:3]] == [None] * 3
    assert [record.getMessage().count("damaged") for record in caplog.records] == [1, 0]
    assert tier.stats().problems == {"damaged": 2, "missing": 1}


# What may happen to the disk


@pytest.mark.parametrize(
    "name, code",
    [
        ("writev", errno.EIO),
        ("open", errno.EROFS),
        ("open", errno.EACCES),
        ("replace", errno.EROFS),
        ("close", errno.EIO),
    ],
)
def test_a_write_that_fails_leaves_nothing_and_the_tier_rests_and_comes_back(
    make, tmp_path, monkeypatch, name, code
):
    tier, metas = make(), chain(3)
    write(tier, metas[:1])
    now = [1000.0]
    monkeypatch.setattr(io_threads.time, "monotonic", lambda: now[0])
    with monkeypatch.context() as broken:
        fail(broken, name, code, lambda first, *rest: name != "open" or (rest[0] & os.O_CREAT))
        assert write(tier, metas[1:2]) == [False]
    assert write(tier, metas[1:2]) == [False] and tier.stats().refused == 1, "it rests"
    assert (
        tier.stats().problems == {errno.errorcode[code]: 1}
        and len(files(tmp_path)) == 1
        and tier.stats().num_bytes == FILE
    )
    assert all_right(tier, metas[:1])
    now[0] += 1.1
    assert write(tier, metas[1:]) == [True, True] and all_right(tier, metas)
    assert not [path for path in (tmp_path / "kv").rglob("writing-*/*")]


def test_rests_grow_while_failures_go_on(make, monkeypatch):
    tier, (meta,) = make(), chain(1)
    now = [1000.0]
    monkeypatch.setattr(io_threads.time, "monotonic", lambda: now[0])
    fail(monkeypatch, "writev", errno.EIO)
    tried = []
    for second in range(40):
        before = tier.stats().refused
        write(tier, [meta])
        if tier.stats().refused == before:
            tried.append(second)
        now[0] += 1
    assert tried == [0, 1, 3, 7, 15, 31]


def test_a_full_disk_is_a_bound(make, monkeypatch):
    tier, metas = make(), chain(5)
    write(tier, metas[:3])
    real, times = os.writev, []

    def full_once(fd, pieces):
        times.append(1)
        if len(times) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, pieces)

    monkeypatch.setattr(os, "writev", full_once)
    assert write(tier, metas[3:]) == [True, True] and tier.stats().evicted == 1 and not tier.stats().problems
    assert not tier.contains(metas[2].key)


def test_a_file_that_cannot_be_deleted_counts_and_does_not_stop_the_tier(make, tmp_path, monkeypatch):
    tier, metas = make(max_blocks=3), chain(6)
    write(tier, metas[:3])
    stuck = str(files(tmp_path)[metas[2].key.hex()])
    now = [1000.0]
    monkeypatch.setattr(io_threads.time, "monotonic", lambda: now[0])
    fail(monkeypatch, "unlink", errno.EPERM, lambda path: path == stuck)
    assert write(tier, metas[3:4]) == [False] and tier.stats().problems == {"EPERM": 1}
    now[0] += 2
    assert (
        write(tier, metas[3:]) == [True] * 3
        and tier.stats().num_bytes == 3 * FILE
        and len(files(tmp_path)) == 3
    )


def test_a_shortage_of_descriptors_says_nothing_of_the_files(make, monkeypatch):
    tier, metas = make(), chain(2)
    write(tier, metas[:1])
    with monkeypatch.context() as broken:
        fail(broken, "open", errno.EMFILE)
        assert read(tier, metas[0]) is None and write(tier, metas[1:]) == [False]
    assert all_right(tier, metas[:1]) and write(tier, metas[1:]) == [True]


def test_an_unreadable_file_is_recomputed(make, monkeypatch):
    tier, metas = make(), chain(2)
    write(tier, metas)
    with monkeypatch.context() as broken:
        fail(broken, "preadv", errno.EIO)
        assert read(tier, metas[0]) is None
    assert not tier.contains(metas[0].key) and write(tier, metas[:1]) == [True] and all_right(tier, metas)


def test_files_of_other_groups_of_layers_are_not_found(tmp_path):
    """Equal first groups, and blocks of equal bytes: the layouts of all groups count."""
    other = change(SPEC, num_layers=1, padding=SPEC.block_bytes // SPEC.num_layers * (SPEC.num_layers - 1))
    metas = chain(2)

    def open_tier(*others):
        return DiskTier(str(tmp_path / "kv"), 1 << 20, MODEL, SPEC, other_specs=others)

    for others in ((), (other,), (other, other)):
        tier = open_tier(*others)
        assert not any(tier.contains(meta.key) for meta in metas)
        assert write(tier, metas) == [True] * 2
        tier.close()
    tier = open_tier(other)
    assert all_right(tier, metas)
    tier.close()
    front = BlockFormat(MODEL, SPEC).seal(metas[0], content(metas[0]))
    assert BlockFormat(MODEL, SPEC, (other,)).problem(metas[0], front, content(metas[0])) == "foreign"


@pytest.mark.parametrize("what", ["kv", f"kv/{MODEL.hex()}", f"kv/{MODEL.hex()}/{spec_name(SPEC)}/rank0"])
def test_a_folder_that_vanishes_is_made_again(make, tmp_path, what):
    tier, metas = make(), chain(6)
    write(tier, metas[:3])
    shutil.rmtree(tmp_path / what)
    assert read(tier, metas[0]) is None and tier.match(keys_of(metas[1:])) == 0, (
        "none of its blocks is believed"
    )
    assert write(tier, metas) == [True] * 6 and all_right(tier, metas)
    shutil.rmtree(tmp_path / what)
    assert all(write(tier, chain(3, 1))) and tier.match(keys_of(metas)) == 0 and all_right(tier, chain(3, 1))


def test_a_subfolder_that_vanishes_is_made_again(make, tmp_path):
    tier, metas = make(), chain(1)
    write(tier, metas)
    shutil.rmtree(files(tmp_path)[metas[0].key.hex()].parent)
    assert read(tier, metas[0]) is None and write(tier, metas) == [True] and all_right(tier, metas)


def test_a_path_turned_into_a_file_fails_writes_only(make, tmp_path):
    tier, metas = make(), chain(2)
    write(tier, metas[:1])
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").write_bytes(b"")
    assert read(tier, metas[0]) is None and write(tier, metas) == [False, False] and tier.stats().blocks == 0


def test_a_real_limit_on_file_sizes(tmp_path):
    """The kernel cuts the write off in the middle."""
    run_child(
        tmp_path,
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        tier = make(spec=change(SPEC, head_dim=256))
        metas = chain(2, spec=tier.spec)
        tier._folder.direct = False
        assert write(tier, metas) == [False, False], tier.stats()
        assert tier.stats().problems == {"EFBIG": 1} and tier.stats().num_bytes == 0, tier.stats()
        tier.check()
    """,
    )
    assert not files(tmp_path) and not list((tmp_path / "kv").rglob("writing-*/*"))


def test_an_interrupted_write_leaves_the_counts_right(make, monkeypatch):
    tier, metas = make(), chain(2)
    with monkeypatch.context() as broken:
        broken.setattr(tier._folder, "prepare", lambda *args: [][1])  # a bug
        assert write(tier, metas[:1]) == [False]
    settle(tier)
    tier.check()
    assert write(tier, metas) == [True, True]


# A bad start


def test_files_that_others_delete_during_a_start_are_passed_over(make, tmp_path):
    tier, keys = make(), [bytes([7]) + bytes([i]) * 15 for i in range(3)]
    write(tier, [replace(meta, key=key) for meta, key in zip(chain(3), keys)])
    found = tier._folder.blocks()
    next(found)
    shutil.rmtree(files(tmp_path)[keys[0].hex()].parent)
    assert list(found) == []


def test_folders_of_other_users_are_theirs(make, monkeypatch, tmp_path):
    other = make(fingerprint=OTHER_MODEL)
    write(other, chain(1))
    other.close()
    fail(monkeypatch, "listdir", errno.EACCES, lambda path: OTHER_MODEL.hex() in path)
    tier = make()
    assert all(write(tier, chain(2))) and tier.stats().num_bytes == 2 * FILE


def test_impossible_paths_are_refused_with_a_reason(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    for path, reason in [
        ("/proc/nowhere/kv", "No such file"),
        (str(tmp_path / "file"), "File exists|Not a directory"),
        (str(tmp_path / "file" / "kv"), "Not a directory"),
    ]:
        with pytest.raises(ConfigError, match=f"kv_disk_path {path} can't be used: .*({reason})"):
            DiskTier(path, 1 << 20, MODEL, SPEC)
    fail(monkeypatch, "mkdir", errno.EACCES)
    with pytest.raises(ConfigError, match=r"kv_disk_path .*Permission denied"):
        DiskTier(str(tmp_path / "kv"), 1 << 20, MODEL, SPEC)


def test_what_is_made_is_for_its_owner_alone(make, tmp_path, caplog):
    before = os.umask(0)
    try:
        tier = make(path=tmp_path / "above" / "kv")
        write(tier, chain(2))
    finally:
        os.umask(before)
    assert (tmp_path / "above").stat().st_mode & 0o777 == 0o777, "what lies above is not the tier's"
    made = [tmp_path / "above" / "kv", *(tmp_path / "above" / "kv").rglob("*")]
    assert {(path.is_dir(), path.stat().st_mode & 0o777) for path in made} == {(True, 0o700), (False, 0o600)}
    assert "open to others" not in caplog.text


@pytest.mark.parametrize("mode, warns", [(0o700, False), (0o500 | 0o040, True), (0o711, True)])
def test_a_folder_that_exists_keeps_its_rights_and_open_ones_are_reported(
    make, tmp_path, caplog, mode, warns
):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode | 0o200)
    make()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == mode | 0o200
    assert ("kv is open to others" in caplog.text) == warns


def test_less_than_a_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"kv_disk_bytes must be at least {FILE} .* got 8191"):
        DiskTier(str(tmp_path / "kv"), FILE - 1, MODEL, SPEC)


# Threads


class Gate:
    """os.writev waits until it is opened."""

    def __init__(self, monkeypatch):
        self.open, self.reached, real = threading.Event(), threading.Semaphore(0), os.writev

        def waiting(fd, pieces):
            self.reached.release()
            self.open.wait(20)
            return real(fd, pieces)

        monkeypatch.setattr(os, "writev", waiting)


def test_writes_beyond_the_bound_are_refused_at_once_and_reads_do_not_queue_behind_writes(make, monkeypatch):
    tier, metas = make(threads=1, max_pending=2), chain(6)
    write(tier, metas[:1])
    gate = Gate(monkeypatch)
    first = tier.write(metas[1], memoryview(content(metas[1])))
    gate.reached.acquire(timeout=10)
    others = [tier.write(meta, memoryview(content(meta))) for meta in metas[2:]]
    assert (
        [future.done() for future in others] == [False, False, True, True]
        and not others[2].result()
        and tier.stats().refused == 2
    )
    assert all_right(tier, metas[:1]) and not first.done()
    again = tier.write(metas[1], memoryview(content(metas[1])))
    assert again is first, "a block under way is not written twice"
    assert tier.stats().pending == 3
    gate.open.set()
    settle(tier)
    assert all(future.result() for future in (first, *others[:2]))


def test_threads_that_cannot_be_had_cost_a_block_or_some_speed(make, monkeypatch):
    tier, metas, real = make(), chain(8), threading.Thread.start

    def start(thread):
        if thread.name != "kv-disk-read-0":
            raise RuntimeError("can't start new thread")
        real(thread)

    assert write(tier, metas[:1]) == [True]
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        assert all(
            future.result(10) for future in [tier.write(meta, memoryview(content(meta))) for meta in metas]
        )
        into = [bytearray(BYTES) for _ in metas]
        assert all(
            future.result(10)
            for future in [tier.read(meta, memoryview(one)) for meta, one in zip(metas, into)]
        )
        other = make(fingerprint=OTHER_MODEL)
        assert write(other, metas[:1]) == [False] and other.stats().refused == 1
    assert write(other, metas[:1]) == [True]


def test_close_drops_what_waits(make, monkeypatch):
    tier, metas = make(threads=1), chain(3)
    gate = Gate(monkeypatch)
    futures = [tier.write(meta, memoryview(content(meta))) for meta in metas]
    gate.reached.acquire(timeout=10)
    threading.Timer(0.2, gate.open.set).start()
    tier.close()
    assert [future.result(1) for future in futures] == [True, False, False]
    assert not tier.write(metas[1], memoryview(content(metas[1]))).result(1) and read(tier, metas[0]) is None
    tier._writing.clear()


def test_a_block_forgotten_while_it_is_written_does_not_come_back(make, tmp_path, monkeypatch):
    tier, metas = make(threads=1), chain(2)
    gate = Gate(monkeypatch)
    futures = [tier.write(meta, memoryview(content(meta))) for meta in metas]
    gate.reached.acquire(timeout=10)
    tier.forget(keys_of(metas[:1]))
    gate.open.set()
    assert futures[1].result(10)
    settle(tier)
    assert [tier.contains(meta.key) for meta in metas] == [False, True] and files(tmp_path).keys() == {
        metas[1].key.hex()
    }


def test_a_block_forgotten_while_its_read_waits_is_a_miss_and_no_problem(make, monkeypatch):
    tier, metas, go, reached, real = (
        make(threads=1),
        chain(2),
        threading.Event(),
        threading.Event(),
        os.preadv,
    )
    write(tier, metas)
    monkeypatch.setattr(os, "preadv", lambda *args: (reached.set(), go.wait(20), real(*args))[2])
    futures = [tier.read(meta, memoryview(bytearray(BYTES))) for meta in metas]
    assert reached.wait(10)
    tier.forget(keys_of(metas[1:]))
    settle(tier)
    go.set()
    assert [future.result(10) for future in futures] == [True, False] and not tier.stats().problems


def test_forgotten_blocks_are_not_found_and_their_files_go(make, tmp_path):
    tier, metas = make(), chain(4)
    write(tier, metas)
    tier.forget(keys_of(metas[:2]))
    assert not tier.contains(metas[0].key) and read(tier, metas[0]) is None
    settle(tier)
    assert (
        files(tmp_path).keys() == {meta.key.hex() for meta in metas[2:]}
        and tier.stats().num_bytes == 2 * FILE
    )
    tier.reset()
    settle(tier)
    assert not files(tmp_path) and tier.stats().blocks == tier.stats().num_bytes == 0
    assert all(write(tier, metas)) and all_right(tier, metas)


def test_events_report_verified_and_removed_blocks(make, tmp_path):
    first, metas = make(), chain(4)
    write(first, metas[:3])
    first.close()
    tier = make(max_blocks=3, record_events=True)
    assert tier.take_events() == [], "a start makes no event"
    assert all_right(tier, metas[1:3]) and tier.take_events() == metas[1:3] and all_right(tier, metas[1:3])
    tier.forget(keys_of(metas[:1]))
    write(tier, metas[3:])
    assert tier.take_events() == metas[3:], "a block without a stored event has no removed event"
    flipped(-1)(files(tmp_path)[metas[2].key.hex()])
    read(tier, metas[2])
    tier.reset()
    events = tier.take_events()
    assert events[0] == metas[2].key and sorted(events[1:]) == sorted([metas[1].key, metas[3].key])


# Processes

PRELUDE = textwrap.dedent("""
    import os, sys, time
    from msgspec.structs import replace as change
    from shoal.kv.tiers.disk import DiskTier
    from tests.made_blocks import *
    def make(max_blocks=100, fingerprint=MODEL, spec=SPEC):
        return DiskTier(sys.argv[1], max_blocks * 8192, fingerprint, spec)
""")


def start_child(tmp_path, code):
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), str(tmp_path / "kv")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )


def run_child(tmp_path, code):
    out, err = (child := start_child(tmp_path, code)).communicate(timeout=60)
    assert child.returncode == 0, err
    return out


BEFORE_RENAME = """
    tier = make()
    write(tier, chain(2))
    real = os.replace
    def waiting(source, target):
        print("here", flush=True)
        sys.stdin.readline()
        real(source, target)
    os.replace = waiting
    print(write(tier, chain(3)[2:]), flush=True)
"""


def test_a_process_killed_between_write_and_rename_leaves_no_block_and_no_file(make, tmp_path):
    child = start_child(tmp_path, BEFORE_RENAME)
    assert child.stdout.readline() == "here\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert len(list((tmp_path / "kv").rglob("writing-*/*"))) == 1
    tier, metas = make(), chain(3)
    assert (
        not tier.contains(metas[2].key) and all_right(tier, metas[:2]) and tier.stats().num_bytes == 2 * FILE
    )
    assert [path.name for path in (tmp_path / "kv").rglob("writing-*")] == [
        os.path.basename(tier._folder._unfinished)
    ]
    assert all(write(tier, metas)) and all_right(tier, metas)


def test_the_unfinished_file_of_a_living_process_is_left_to_it(make, tmp_path):
    child = start_child(tmp_path, BEFORE_RENAME)
    assert child.stdout.readline() == "here\n"
    tier, metas = make(), chain(3)
    assert len(list((tmp_path / "kv").rglob("writing-*/*"))) == 1 and not tier.contains(metas[2].key)
    out, err = child.communicate("\n", timeout=30)
    assert out == "[True]\n", err
    assert write(tier, metas) == [True] * 3 and all_right(tier, metas)


def test_a_killed_process_leaves_its_files_to_others_that_need_the_room(make, tmp_path):
    child = start_child(
        tmp_path,
        """
        write(make(fingerprint=OTHER_MODEL), chain(3))
        print("here", flush=True)
        sys.stdin.readline()
    """,
    )
    assert child.stdout.readline() == "here\n"
    tier = make(max_blocks=4)
    assert tier.stats().num_bytes == 0, "it lives"
    child.kill()
    child.communicate()
    tier.close()
    tier = make(max_blocks=4)
    assert (
        tier.stats().num_bytes == 3 * FILE
        and all(write(tier, chain(4, 1)))
        and tier.stats().num_bytes == 4 * FILE
    )


def test_engines_on_one_path_find_and_evict_each_others_blocks_and_both_stay_right(make, tmp_path):
    child = start_child(
        tmp_path,
        """
        import random
        tier, r = make(max_blocks=8), random.Random(1)
        metas = chain(20)
        print("here", flush=True)
        for _ in range(600):
            meta = r.choice(metas)
            into = bytearray(BYTES)
            if tier.read(meta, memoryview(into)).result(10):
                assert bytes(into) == content(meta)
            else:
                write(tier, [meta])
        assert tier.stats().problems.keys() <= {"missing"}, tier.stats()
        tier.check()
    """,
    )
    assert child.stdout.readline() == "here\n"
    tier, metas, r = make(max_blocks=8), chain(20), random.Random(2)
    for _ in range(600):
        meta = r.choice(metas)
        if (found := read(tier, meta)) is not None:
            assert found == content(meta)
        else:
            write(tier, [meta])
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert tier.stats().problems.keys() <= {"missing"} and len(files(tmp_path)) <= 16


# All of it at once


class Faults:
    """Makes os functions fail, or do only a part, at random."""

    CODES = [
        errno.EIO,
        errno.ENOSPC,
        errno.EROFS,
        errno.EACCES,
        errno.EMFILE,
        errno.ENOENT,
        errno.EINTR,
        errno.EDQUOT,
    ]

    def __init__(self, monkeypatch, r, root):
        self.rate, self.r, self.root, self.lock = 0.0, r, str(root), threading.Lock()
        for name in ("open", "writev", "preadv", "replace", "unlink", "makedirs", "utime", "fstat", "close"):
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name, real):
        def call(first, *args, **options):
            ours = threading.current_thread().name.startswith("kv-disk")
            with self.lock:
                draw = self.r.random() if ours else 1.0
                # that would be a lie
                code = self.r.choice(
                    [code for code in self.CODES if name != "unlink" or code != errno.ENOENT]
                )
            if draw < self.rate:
                if name == "close":
                    real(first)
                raise OSError(code, os.strerror(code), str(first))
            if draw < 2 * self.rate and name in ("writev", "preadv"):
                pieces = args[0]
                return real(first, [pieces[0][: self.r.randint(1, len(pieces[0]))]], *args[1:])
            return real(first, *args, **options)

        return call


def vandalize(r, path):
    """Damages, removes or replaces a file without the tier."""
    action = r.randrange(6)
    if action == 0:
        path.unlink()
    elif action == 1:
        os.truncate(path, r.randrange(PAGE + BYTES))
    elif action == 2:
        path.write_bytes(os.urandom(PAGE + BYTES))
    elif action == 3 and path.parent.exists():
        shutil.rmtree(path.parent)
    elif path.stat().st_size:
        flipped(r.randrange(path.stat().st_size))(path)


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_with_failures_return_the_right_bytes_or_none(tmp_path, monkeypatch, seed):
    print(f"seed {seed}")
    r = random.Random(seed)
    monkeypatch.setattr(io_threads, "RETRY_S", 0.0)
    monkeypatch.setattr(io_threads, "MAX_RETRY_S", 0.0)
    faults = Faults(monkeypatch, random.Random(seed + 1000), tmp_path)
    max_blocks, policy = r.randint(4, 20), r.choice(["lru", "lfu"])
    metas = [meta for s in range(6) for meta in chain(5, s)]
    served = written = 0

    def build(fingerprint=MODEL):
        rate, faults.rate = faults.rate, 0.0
        tier = DiskTier(
            str(tmp_path / "kv"), max_blocks * FILE, fingerprint, SPEC, policy, record_events=True
        )
        faults.rate = rate
        return tier

    tier, reported = build(), set()
    for step in range(700):
        if step % 100 == 0:
            faults.rate = r.choice([0.0, 0.0, 0.02, 0.2])
        action = r.random()
        if action < 0.4:
            chosen = r.sample(metas, r.randint(1, 4))
            futures = [tier.write(meta, memoryview(content(meta))) for meta in chosen]
            written += sum(future.result(20) for future in futures)
        elif action < 0.8:
            chosen = r.sample(metas, r.randint(1, 4))
            intos = [bytearray(BYTES) for _ in chosen]
            futures = [tier.read(meta, memoryview(into)) for meta, into in zip(chosen, intos)]
            for meta, into, future in zip(chosen, intos, futures):
                if future.result(20):
                    assert bytes(into) == content(meta)
                    served += 1
        elif action < 0.85:
            if r.random() < 0.1:
                tier.reset()
            else:
                tier.forget(keys_of(r.sample(metas, 3)))
        elif action < 0.96 and (paths := list(files(tmp_path).values())):
            vandalize(r, r.choice(paths))
        elif action < 0.97:
            tier.close()
            if r.random() < 0.3:  # other weights for a while
                other = build(OTHER_MODEL)
                for meta in r.sample(metas, 3):
                    other.write(meta, memoryview(content(meta))).result(20)
                other.close()
            tier, reported = build(), set()
        settle(tier)
        for event in tier.take_events():
            if isinstance(event, bytes):
                reported.remove(event)
            else:
                reported.add(event.key)
        settle(tier)
        tier.check()
        assert reported == tier._verified
        assert sum(in_pages(path.stat().st_size) for path in files(tmp_path).values()) <= max_blocks * FILE
    faults.rate = 0.0
    tier.close()
    assert served > 10 and written > 10
    tier = build()  # in peace, all is well again
    last = metas[-1]
    assert (
        read(tier, last) in (None, content(last))
        and write(tier, [last]) == [True]
        and read(tier, last) == content(last)
    )
    tier.close()


def test_the_lock_of_a_folder_ends_with_its_tier(tmp_path):
    tier = DiskTier(str(tmp_path / "kv"), 1 << 20, MODEL, SPEC)
    folder = tier._folder.spec_folder
    assert not block_folder.is_abandoned(folder)
    tier.close()
    assert block_folder.is_abandoned(folder)


def test_engines_that_start_at_once_on_one_path_all_hold_their_locks(tmp_path):
    """And none takes another for dead in between."""
    tiers, lock = [], threading.Lock()

    def start(i):
        for _ in range(10):
            tier = DiskTier(str(tmp_path / "kv"), 1 << 20, bytes([i]) * 16, SPEC)
            with lock:
                tiers.append(tier)

    threads = [threading.Thread(target=start, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tiers) == 40 and not any(block_folder.is_abandoned(tier._folder.spec_folder) for tier in tiers)
    assert all(write(tier, chain(1)) == [True] for tier in tiers)
    for tier in tiers:
        tier.close()
