"""Regions over fake drivers: contents, addresses, order and arguments of the driver's calls, failure at every
one of them, no leak."""

import gc
import logging
import random
import threading

import pytest
import torch

from shoal.errors import ConfigError, UnavailableError
from shoal.memory import available, library
from shoal.memory.pools import TorchPools, merged
from tests.cpu.fake_memory import GRAIN, checked_fake, make_regions, needs_compiler

pytestmark = needs_compiler
KINDS = ["cuda", "npu"]


@pytest.fixture
def fake():
    with checked_fake() as found:
        yield found


@pytest.fixture(params=KINDS)
def regions(request, fake):
    made = make_regions(fake.path, request.param)
    tensors = []
    made.make = lambda size, **options: make(made, tensors, size, **options)
    yield made
    for tensor in tensors:
        tensor.free()
    made.close()


def make(regions, tensors, size, tag="default", seed=None, **options):
    with regions.region(tag, **options):
        tensors.append(regions._pools.empty(size))
    if seed is not None:
        tensors[-1].fill(seed)
    return tensors[-1]


def test_what_is_kept_comes_back_at_the_same_address_and_the_rest_gives_its_memory_back(regions, fake):
    weights = [
        regions.make(size, tag="weights", seed=size, offload=True)
        for size in (GRAIN, 5 * GRAIN + 512, 33 * GRAIN, 700)
    ]
    cache = regions.make(100 * GRAIN, tag="cache", offload=False)
    mapped = fake.counts()["bytes"]
    for _ in range(3):
        report = regions.pause()
        assert fake.counts()["bytes"] == 0 and report.freed_bytes == mapped
        assert report.in_use_bytes == report.region_bytes == 0
        assert report.host_bytes == sum(w.size for w in weights)
        report = regions.resume()
        assert fake.counts()["bytes"] == mapped == report.taken_bytes == report.region_bytes
        assert report.host_bytes == 0
        assert all(w.holds(w.size) for w in weights)
    cache.bytes[:] = 1


def test_content_is_kept_unless_it_is_said_that_it_may_go(regions, fake):
    """vLLM's allocator keeps memory without a tag, too."""
    default, other = regions.make(4 * GRAIN, seed=1), regions.make(2 * GRAIN, tag="other", seed=2)
    scratch = regions.make(6 * GRAIN, tag="scratch", seed=3, offload=False)
    regions.graph_pool("graphs")
    graph = regions.make(8 * GRAIN, tag="graphs", seed=4)
    report = regions.pause()
    assert report.host_bytes == 14 * GRAIN
    regions.resume()
    assert default.holds(1) and other.holds(2) and graph.holds(4) and not scratch.holds(3)
    regions.make(GRAIN, tag="scratch")  # says nothing: as before
    assert regions.pause().host_bytes == 14 * GRAIN


def test_memory_in_use_is_reported_by_owner(fake):
    """Regions of the set; other memory of the process, other sets' regions included; and other processes'
    memory."""
    regions, trainer = make_regions(fake.path), make_regions(fake.path)
    ours, theirs = make(regions, [], 32 * GRAIN, offload=False), make(trainer, [], 8 * GRAIN, offload=False)
    pools = regions._pools
    pools.opened += trainer._pools.opened
    pools.elsewhere, pools.others = 5 * GRAIN, 100 * GRAIN
    parts = {"region_bytes": 32 * GRAIN, "process_bytes": 13 * GRAIN}
    assert regions.in_use() == {"in_use_bytes": 145 * GRAIN, **parts}
    report = regions.pause()
    assert (report.in_use_bytes, report.region_bytes, report.process_bytes) == (113 * GRAIN, 0, 13 * GRAIN)
    trainer.pause()
    assert regions.in_use() == {"in_use_bytes": 105 * GRAIN, "region_bytes": 0, "process_bytes": 5 * GRAIN}
    trainer.resume()
    ours.free()
    trainer.close()  # its tensor still holds its memory
    assert regions.in_use() == {"in_use_bytes": 113 * GRAIN, "region_bytes": 0, "process_bytes": 13 * GRAIN}
    theirs.free()
    regions.close()


def test_pausing_twice_is_harmless_and_a_second_pause_may_drop_what_was_kept(regions, fake):
    tensor = regions.make(9 * GRAIN, seed=1, offload=True)
    assert regions.pause().freed_bytes > 0
    assert regions.pause().freed_bytes == 0
    regions.resume()
    assert regions.resume().taken_bytes == 0
    assert tensor.holds(1)
    regions.pause()
    assert regions.pause(keep=[]).host_bytes == 0
    regions.resume()
    assert not tensor.holds(1)


def test_tags_choose_and_stages_are_possible(regions, fake):
    a, b = regions.make(4 * GRAIN, tag="a", seed=1), regions.make(4 * GRAIN, tag="b", seed=2, offload=True)
    regions.pause(["a"], keep=["a"])
    assert regions.paused() == {"a"} and b.holds(2)
    regions.pause()
    assert regions.usage() == {
        "a": {"device_bytes": 0, "reserved_bytes": 4 * GRAIN, "host_bytes": 4 * GRAIN},
        "b": {"device_bytes": 0, "reserved_bytes": 4 * GRAIN, "host_bytes": 4 * GRAIN},
    }
    regions.resume(["b"])
    assert b.holds(2) and regions.paused() == {"a"}
    regions.resume()
    assert a.holds(1)


@pytest.mark.parametrize("tags", [["nonsense"], "default", ["default", "x"]])
def test_unknown_tags_are_refused(regions, tags):
    regions.make(GRAIN)
    with pytest.raises(ConfigError):
        regions.pause(tags)
    with pytest.raises(ConfigError):
        regions.resume(tags)


def test_nothing_is_allocated_in_a_paused_region_nor_is_one_paused_that_is_entered(regions):
    regions.make(GRAIN)
    with regions.region(), pytest.raises(UnavailableError, match="being allocated"):
        regions.pause()
    regions.pause()
    with pytest.raises(UnavailableError, match="paused"), regions.region():
        pass


def test_inner_regions_count(regions, fake):
    with regions.region("outer"):
        a = regions._pools.empty(2 * GRAIN)
        with regions.region("inner"):
            b = regions._pools.empty(4 * GRAIN)
        c = regions._pools.empty(6 * GRAIN)
    usage = regions.usage()
    assert (usage["outer"]["reserved_bytes"], usage["inner"]["reserved_bytes"]) == (8 * GRAIN, 4 * GRAIN)
    for tensor in (a, b, c):
        tensor.free()
    assert fake.counts()["bytes"] == 0


def test_dead_bytes_are_not_copied(regions, fake):
    tensor = regions.make(20 * GRAIN, seed=1, offload=True)
    tensor.pool["live"] = {tensor.address + GRAIN: GRAIN, tensor.address + 15 * GRAIN + 7: 2 * GRAIN}
    whole = bytes(tensor.bytes)
    assert regions.pause().host_bytes == 3 * GRAIN
    regions.resume()
    for start, size in ((GRAIN, GRAIN), (15 * GRAIN + 7, 2 * GRAIN)):
        assert bytes(tensor.bytes[start : start + size]) == whole[start : start + size]


def test_memory_freed_while_paused_is_not_taken_again(regions, fake):
    tensors = [regions.make(8 * GRAIN, seed=i, offload=True) for i in range(3)]
    regions.pause()
    tensors[1].free()
    regions.resume()
    assert fake.counts()["bytes"] == 16 * GRAIN
    assert tensors[0].holds(0) and tensors[2].holds(2)


def test_requests_share_pieces_and_a_piece_goes_with_its_last_tenant(regions, fake):
    a, b = regions.make(512), regions.make(100)
    assert fake.counts()["physical"] == 1 and b.address - a.address == 512
    a.free()
    assert fake.counts()["physical"] == 1
    b.free()
    assert fake.counts()["physical"] == 0


def test_a_free_waits_for_the_device_when_a_piece_goes_and_only_then(regions, fake):
    a, b = regions.make(512), regions.make(100)
    before = fake.get("syncs")
    a.free()
    assert fake.get("syncs") == before
    b.free()
    assert fake.get("syncs") == before + 1 and fake.counts()["physical"] == 0


def test_large_requests_come_in_few_pieces(regions, fake):
    regions.make(80 * GRAIN)
    assert fake.counts()["physical"] == 10


def test_a_failed_allocation_is_pytorchs_error_with_the_reason_and_leaves_nothing(regions, fake):
    fake.set("capacity", 20 * GRAIN)
    with pytest.raises(torch.OutOfMemoryError) as error, regions.region("big"):
        regions._pools.empty(40 * GRAIN)
    assert "no physical memory" in error.value.__notes__[0] and "'big'" in error.value.__notes__[0]
    assert fake.counts()["bytes"] == 0
    regions.make(20 * GRAIN, tag="big")  # the error poisons nothing


def test_a_resume_that_finds_no_memory_changes_nothing_and_can_be_tried_again(regions, fake):
    tensors = [regions.make(10 * GRAIN, tag=tag, seed=i, offload=True) for i, tag in enumerate("abc")]
    regions.pause()
    fake.set("capacity", 25 * GRAIN)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            regions.resume()
        assert fake.counts()["bytes"] == 0 and regions.paused() == set("abc")
    fake.set("capacity", 1 << 30)
    regions.resume()
    assert all(tensor.holds(i) for i, tensor in enumerate(tensors))


def test_an_interrupt_behind_the_librarys_work_hides_nothing(regions, monkeypatch):
    """The memory is already freed, or mapped, when an interrupt ends the call early."""
    tensor = regions.make(10 * GRAIN, seed=1, offload=True)
    call = regions._call

    def interrupted(*args):
        call(*args)
        raise KeyboardInterrupt

    for action, paused in ((regions.pause, {"default"}), (regions.resume, set())):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(regions, "_call", interrupted)
            action()
        assert regions.paused() == paused
    assert tensor.holds(1)
    regions.pause()
    regions.resume()
    assert tensor.holds(1)


def test_a_pause_without_host_memory_fails_before_anything_is_unmapped(regions, fake, monkeypatch):
    tensor = regions.make(10 * GRAIN, seed=1, offload=True)
    unmaps = fake.get("unmaps")
    monkeypatch.setattr(available, "available_bytes", lambda: 3 * GRAIN)
    with pytest.raises(MemoryError, match=rf"{12 * GRAIN} bytes of host memory.*{3 * GRAIN} are free"):
        regions.pause()
    assert fake.get("unmaps") == unmaps and not regions.paused() and tensor.holds(1)
    assert regions.pause(keep=[]).freed_bytes


def test_host_buffers_are_pinned_once_and_used_again(regions, fake):
    tensor = regions.make(30 * GRAIN, seed=1, offload=True)
    regions.prepare_host(wait=True)
    pinned = fake.counts()["pinned"]
    assert pinned == 10 and regions.host_usage()["ready"] == 30 * GRAIN
    for _ in range(100):
        regions.pause()
        regions.resume()
    assert fake.counts()["pinned"] == pinned and tensor.holds(1)
    assert regions.host_usage()["used"] == 0


def test_where_pinning_is_refused_plain_memory_serves_with_a_warning(regions, fake, caplog):
    fake.set("refuse_pin", 1)
    tensor = regions.make(10 * GRAIN, seed=1, offload=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            regions.pause()
            regions.resume()
    assert tensor.holds(1) and caplog.text.count("could not be pinned") == 1


def test_content_from_a_file_is_read_again(regions, fake):
    calls = []
    regions.make(4 * GRAIN, tag="weights", offload="file", reread=lambda: calls.append(1))
    assert regions.pause().host_bytes == 0
    regions.resume()
    assert calls == [1]

    def broken():
        raise OSError("gone")

    with regions.region("weights", offload="file", reread=broken):
        pass
    regions.pause()
    with pytest.raises(OSError):
        regions.resume()
    assert regions.paused() == {"weights"} and fake.counts()["bytes"] == 0
    with pytest.raises(ConfigError, match="reread"), regions.region("x", offload="file"):
        pass


def test_a_file_that_cannot_be_read_costs_no_other_region_what_was_kept_of_it(regions, fake):
    def broken():
        raise OSError("gone")

    kept = regions.make(4 * GRAIN, tag="kept", seed=1)
    regions.make(4 * GRAIN, tag="weights", offload="file", reread=broken)
    regions.pause(keep=["kept"])
    with pytest.raises(OSError):
        regions.resume()
    assert regions.usage()["kept"]["host_bytes"] == 4 * GRAIN
    regions.resume(["kept"])
    assert kept.holds(1)


def test_what_was_kept_of_a_file_after_all_is_not_read_again(regions, fake):
    calls = []
    weights = regions.make(4 * GRAIN, tag="weights", seed=2, offload="file", reread=lambda: calls.append(1))
    regions.pause(keep=["weights"])
    regions.resume()
    assert not calls and weights.holds(2)


def test_host_buffers_go_back_when_what_they_keep_is_dropped(regions, fake):
    regions.make(30 * GRAIN, tag="a", offload=True)
    b = regions.make(6 * GRAIN, tag="b", seed=1, offload=True)
    regions.pause()
    assert regions.host_usage()["bytes"] == 36 * GRAIN
    regions.pause(["a"], keep=[])
    assert regions.host_usage()["bytes"] == 6 * GRAIN and fake.counts()["pinned"] == 2
    regions.resume()
    assert b.holds(1)


def test_a_dropped_set_leaves_nothing(fake):
    regions = make_regions(fake.path)
    tensor = make(regions, [], 5 * GRAIN, seed=3, offload=True)
    regions.prepare_host(wait=True)
    regions.pause()
    del regions
    gc.collect()
    tensor.free()


def test_devices_have_regions_of_their_own(regions, fake):
    tensors = []
    for device in (0, 1):
        regions._pools.device = device
        tensors.append(regions.make(5 * GRAIN, seed=device, offload=True))
    regions.pause()
    assert fake.counts()["bytes"] == 0
    regions.resume()
    assert all(tensor.holds(i) for i, tensor in enumerate(tensors))


def test_two_sets_are_independent(fake):
    sets = [make_regions(fake.path) for _ in range(2)]
    tensors = [make(each, [], 5 * GRAIN, seed=i, offload=True) for i, each in enumerate(sets)]
    sets[0].pause()
    assert tensors[1].holds(1) and not sets[1].paused()
    sets[1].pause()
    sets[0].resume()
    assert tensors[0].holds(0) and fake.counts()["mapped"] == fake.counts()["physical"] > 0
    sets[1].resume()
    for tensor, each in zip(tensors, sets):
        tensor.free()
        each.close()


def test_a_closed_set_keeps_memory_only_as_long_as_tensors_do(fake):
    regions = make_regions(fake.path)
    tensor = make(regions, [], 5 * GRAIN, seed=3)
    regions.close()
    assert tensor.holds(3)
    tensor.free()


def test_a_set_may_be_closed_while_it_sleeps(fake):
    regions = make_regions(fake.path)
    tensor = make(regions, [], 5 * GRAIN, seed=3, offload=True)
    regions.pause()
    regions.close()
    tensor.free()


@pytest.mark.parametrize("kind", KINDS)
def test_failure_at_every_call_of_the_driver(fake, kind):
    """After a failure at any call, restored content is right, the failure is reported, and another try
    succeeds."""
    seen = set()
    for k in range(1, 400):
        regions = make_regions(fake.path, kind, map_threads=2)
        tensors = []
        kept = [
            make(regions, tensors, size * GRAIN, tag=tag, seed=size, offload=True)
            for size, tag in ((3, "a"), (9, "b"), (5, "a"))
        ]
        make(regions, tensors, 20 * GRAIN, tag="c")
        regions.prepare_host(wait=True)
        fake.fail_at(k)
        errors = 0
        for step in (regions.pause, regions.resume):
            try:
                step()
            except RuntimeError as error:
                errors += 1
                assert "injected" in str(error) or kind == "npu"
                step()
        seen.add(fake.failed())
        hit = bool(fake.failed())
        fake.library.fake_reset()
        assert all(tensor.holds(size) for tensor, size in zip(kept, (3, 9, 5)))
        counts = fake.counts()
        assert counts["mapped"] == counts["physical"] and not counts["streams"] and not counts["events"]
        for tensor in tensors:
            tensor.free()
        regions.close()
        fake.check()
        if not hit:
            break
        assert errors, "a failure went unnoticed"
    assert not hit and len(seen) > 8


@pytest.mark.parametrize("kind", KINDS)
def test_failure_at_every_call_of_an_allocation(fake, kind):
    for k in range(1, 100):
        fake.fail_at(k, code=2 if kind == "cuda" else 207001)
        regions = tensor = None
        try:
            regions = make_regions(fake.path, kind)
            tensor = make(regions, [], 20 * GRAIN)
        except RuntimeError:  # OutOfMemoryError is one
            assert fake.counts()["bytes"] == 0
        hit = bool(fake.failed())
        fake.library.fake_reset()
        if hit:
            assert tensor is None
            tensor = make(regions, [], 20 * GRAIN)
        tensor.free()
        regions.close()
        fake.check()
        if not hit:
            return
    raise AssertionError("failures never ended")


def test_malloc_free_pause_and_resume_against_a_model(fake):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    regions = make_regions(fake.path)
    alive: dict[str, list] = {"a": [], "b": []}
    for step in range(600):
        tag, action = rng.choice("ab"), rng.random()
        paused = regions.paused()
        if action < 0.45 and tag not in paused:
            size = rng.choice(
                [rng.randrange(1, 2000), rng.randrange(1, 12) * GRAIN, rng.randrange(1, 40 * GRAIN)]
            )
            tensor = make(regions, [], size, tag=tag, seed=step, offload=True)
            for other, _ in alive["a"] + alive["b"]:
                assert tensor.address + size <= other.address or other.address + other.size <= tensor.address
            alive[tag].append((tensor, step))
        elif action < 0.75 and alive[tag]:
            alive[tag].pop(rng.randrange(len(alive[tag])))[0].free()
        elif action < 0.88 and regions.usage():
            regions.pause(rng.choice([None, list(regions.usage())[:1]]))
        elif regions.usage():
            fake.set(
                "capacity", rng.choice([1 << 32, fake.counts()["bytes"] + rng.randrange(1, 100) * GRAIN])
            )
            try:
                regions.resume()
            except torch.OutOfMemoryError:
                assert regions.paused() == paused
            fake.set("capacity", 1 << 32)
        for name, tensors in alive.items():
            if name not in regions.paused():
                assert all(tensor.holds(number) for tensor, number in tensors)
        counts = fake.counts()
        assert counts["mapped"] == counts["physical"] and not counts["streams"] and not counts["events"]
        fake.check()
    for tensors in alive.values():
        for tensor, _ in tensors:
            tensor.free()
    assert fake.counts()["bytes"] == 0
    regions.close()


def test_threads_allocate_free_and_pause_at_once(fake):
    regions = make_regions(fake.path)
    finished, right = [], []

    def run(tag):
        try:
            rng = random.Random(tag)
            pools = type(regions._pools)(fake.path)
            for i in range(150):
                with regions.region(tag, offload=True):
                    pool = regions._find(tag, 0).pool
                pools.stack = [(pool, 0)]
                tensor = pools.empty(rng.randrange(1, 20) * GRAIN).fill(i)
                if i % 10 == 0:
                    regions.pause([tag])
                    regions.resume([tag])
                assert tensor.holds(i)
                tensor.free()
            right.append(tag)
        finally:
            finished.append(tag)

    threads = [threading.Thread(target=run, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    regions.close()
    assert len(finished) == len(right) == 4


def test_expandable_segments_are_refused(fake, monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
            with pytest.raises(ConfigError, match=f"{name}.*expandable_segments"):
                TorchPools("cuda").open("library.so", 0)


def test_a_missing_driver_is_the_users_error(monkeypatch):
    with pytest.raises(ConfigError, match=r"needs a GPU's driver.*no/such"):
        library.open_driver(False, "/no/such/libcuda.so")
    with pytest.raises(ConfigError, match=r"needs a GPU's driver.*has no cuInit|no cu"):
        library.open_driver(False, "libm.so.6")


def test_without_a_compiler_and_a_built_library_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setattr(library.Path, "glob", lambda *args: iter(()))
    with pytest.raises(ConfigError, match="apt install gcc"):
        library.load.__wrapped__()


def test_near_ranges_become_one():
    assert merged([(0, 512), (512, 100), (70_000, 10), (1 << 20, 5)]) == [
        (0, 612),
        (70_000, 10),
        (1 << 20, 5),
    ]
    assert merged([(0, 612), (600 + 65_536, 10)]) == [(0, 610 + 65_536)]
