"""The contract of every transport, on the CPU and on GPUs. Slices of random bytes are the oracle."""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from msgspec.structs import replace

from shoal.kv.block_map import BlockCopyError
from shoal.kv.layout import CacheSpec, Layout
from shoal.kv.storage import Storage
from shoal.kv.transfer.registry import TRANSPORTS, Transports
from shoal.kv.transfer.ticket import ExportAddress, Failure, TransferError
from shoal.kv.transfer.transport import Pull
from shoal.kv.view import BlockView
from tests.kv_cases import contents
from tests.kv_owner import KINDS, Owner, OwnerProcess, fill, logical, ranks_of, share_of, with_equal_blocks

SPEC = CacheSpec(Layout.WHOLE_BLOCKS, 3, 4, 8, "bfloat16", 4, num_blocks=12)
NAMES = [kind.name for kind in TRANSPORTS]
# Where an owner's cache lies so that the transport can read it
MEMORY = {"in_process": "host", "cuda_ipc": "device", "shared_memory": "shared", "nixl": "host"}
Allocate = Callable[[int], Storage]


def why_not(name: str) -> str | None:
    """Returns why a transport can't be tested on this machine; None: it can."""
    if MEMORY[name] == "device" and not torch.cuda.is_available():
        return f"{name} needs a GPU here"
    if name == "nixl" and importlib.util.find_spec("nixl") is None:
        return "NIXL is not installed (pip install 'shoal[nixl]')"
    return None


def transports_here(names: Sequence[str] = NAMES) -> list:
    """The parameters of a test, with a skip and its reason where the machine can't run one."""
    found = []
    for name in names:
        reason = why_not(name)
        found.append(pytest.param(name, marks=[pytest.mark.skip(reason=reason)] if reason else []))
    return found


_processes: list[OwnerProcess] = []


def owner_process() -> OwnerProcess:
    """One for all tests, as long as it lives."""
    if not _processes or not _processes[-1].is_alive:
        _processes.append(OwnerProcess())
    return _processes[-1]


@contextmanager
def owner_of(name: str, specs: Sequence[CacheSpec], seed: int = 1, memory: str | None = None) -> Iterator:
    """In another process, if the transport leads out of this one."""
    arguments = (specs, seed, memory or MEMORY[name], [name])
    if name == "in_process":
        owner = Owner(*arguments)
        yield owner
        owner.close()
    else:
        yield owner_process().become(*arguments)


def wait(pull: Pull, timeout_s: float = 60) -> None:
    until = time.monotonic() + timeout_s
    while not pull.done():
        assert time.monotonic() < until, "the pull has not ended"
        time.sleep(0.0005)


def connect(name: str, ranks: Sequence[Sequence[ExportAddress]], into: BlockView):
    used, peer = Transports([KINDS[name]]).connect(ranks, [into])
    assert used == name
    return peer


def empty(spec: CacheSpec, allocate: Allocate, seed: int = 99) -> BlockView:
    """A reader's cache, full of other bytes."""
    view = BlockView.over(spec, allocate(spec.num_bytes))
    fill(view, logical(spec, seed))
    return view


def check_blocks_come_as_they_are(name: str, allocate: Allocate, seed: int) -> None:
    """Random ids, any layouts, any tensor-parallel sizes, any runs of layers; nothing else changes."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(4):
        spec = replace(
            SPEC,
            layout=rng.choice(list(Layout)),
            num_heads=rng.choice((1, 2, 4)),
            dtype=rng.choice(("float32", "bfloat16", "uint8")),
        )
        src_tp, dst_tp = rng.choice((1, 2, 4)), rng.choice((1, 2, 4))
        with owner_of(name, ranks_of(spec, src_tp), seed) as owner:
            ranks, content = owner.addresses(), logical(spec, seed)
            target = replace(spec, layout=rng.choice(list(Layout)), num_blocks=rng.choice((7, 20)))
            for rank in ranks_of(target, dst_tp):
                into = empty(rank, allocate)
                expected = contents(into).clone()
                peer = connect(name, ranks, into)
                for _ in range(3):
                    count = rng.randint(0, 7)
                    src_ids, dst_ids = rng.sample(range(12), count), rng.sample(range(rank.num_blocks), count)
                    layers = range(*sorted(rng.sample(range(4), 2)))
                    pull = peer.pull(src_ids, dst_ids, layers)
                    wait(pull)
                    pull.cancel()
                    assert pull.num_bytes == count * len(layers) * rank.block_layer_bytes
                    for layer in layers:
                        expected[layer, dst_ids] = share_of(content[layer, src_ids], rank)
                    assert torch.equal(contents(into), expected)
                peer.close()
                peer.close()


def check_blocks_of_several_groups_come_by_their_heads(name: str, allocate: Allocate) -> None:
    """Three kinds of layers in one memory, any tensor-parallel sizes; a latent is the same on every rank."""
    kinds = [
        replace(SPEC, num_layers=2, num_heads=4),
        replace(SPEC, num_layers=1, num_heads=2, block_size=8),
        replace(SPEC, num_layers=2, num_heads=1, head_dim=24, planes=1),
    ]
    content = [logical(kind, seed) for seed, kind in enumerate(kinds)]
    rng = random.Random(7)
    with owner_of(name, [SPEC]) as owner:
        for src_tp, dst_tp in ((1, 1), (2, 1), (1, 2), (2, 4), (4, 2)):
            ranks = owner.export_groups(kinds, src_tp, MEMORY[name], name)
            for rank in range(dst_tp):
                specs = with_equal_blocks([ranks_of(kind, dst_tp)[rank] for kind in kinds])
                storage = allocate(specs[0].num_bytes)
                into = [BlockView.over(spec, storage) for spec in specs]
                used, peer = Transports([KINDS[name]]).connect(ranks, into)
                assert used == name
                targets = rng.sample(range(SPEC.num_blocks), SPEC.num_blocks)
                for g, view in enumerate(into):
                    src_ids = range(g, SPEC.num_blocks, len(kinds))
                    dst_ids = [targets[block] for block in src_ids]
                    wait(peer.pull(src_ids, dst_ids, range(view.spec.num_layers), g))
                for g, view in enumerate(into):
                    src_ids = range(g, SPEC.num_blocks, len(kinds))
                    dst_ids = [targets[block] for block in src_ids]
                    expected = share_of(content[g][:, list(src_ids)], view.spec)
                    assert torch.equal(contents(view)[:, dst_ids], expected)
                with pytest.raises(TransferError, match="groups of layers are 3") as caught:
                    Transports([KINDS[name]]).connect(ranks, into[:2])
                assert caught.value.failure is Failure.INCOMPATIBLE
                peer.close()


def check_a_late_read_sees_what_is_there_now(name: str, allocate: Allocate) -> None:
    """No copy of the blocks is kept anywhere: that they are still the blocks meant is for tickets to say."""
    with owner_of(name, [SPEC]) as owner:
        into = empty(SPEC, allocate)
        peer = connect(name, owner.addresses(), into)
        owner.reuse(2)
        wait(peer.pull(range(12), range(12), range(3)))
        assert torch.equal(contents(into), logical(SPEC, 2))
        peer.close()


def check_several_threads_pull_at_once(name: str, allocate: Allocate) -> None:
    with owner_of(name, [SPEC]) as owner:
        into = empty(SPEC, allocate)
        peer = connect(name, owner.addresses(), into)

        def pull_some(first: int) -> None:
            for layer in range(SPEC.num_layers):
                for block in range(first, SPEC.num_blocks, 3):
                    wait(peer.pull([block], [block], range(layer, layer + 1)))

        threads = [threading.Thread(target=pull_some, args=(first,)) for first in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(contents(into), logical(SPEC, 1))
        peer.close()


def check_caches_that_do_not_go_together_are_refused(name: str, allocate: Allocate) -> None:
    with owner_of(name, [SPEC]) as owner:
        for field, value in (("block_size", 8), ("dtype", "float16"), ("head_dim", 16), ("num_layers", 2)):
            with pytest.raises(TransferError, match=field) as caught:
                connect(name, owner.addresses(), empty(replace(SPEC, **{field: value}), allocate))
            assert caught.value.failure is Failure.INCOMPATIBLE


def check_ids_that_can_not_be_are_refused(name: str, allocate: Allocate) -> None:
    with owner_of(name, [SPEC]) as owner:
        peer = connect(name, owner.addresses(), empty(SPEC, allocate))
        for src_ids, dst_ids in (([12], [0]), ([-1], [0]), ([0], [12]), ([0, 1], [2, 2]), ([0, 1], [2])):
            with pytest.raises(BlockCopyError):
                peer.pull(src_ids, dst_ids, range(3))
        peer.close()


def check_garbage_for_an_address_is_refused(name: str, allocate: Allocate) -> None:
    """Whatever stands where the transport's own part of an address should be."""
    with owner_of(name, [SPEC]) as owner:
        [[address]] = owner.addresses()
        rng, into = random.Random(5), empty(SPEC, allocate)
        for memory in [b"", b"\x90", b"\xc0", *(rng.randbytes(n) for n in (1, 8, 40, 400))]:
            with pytest.raises(TransferError):
                connect(name, [[replace(address, memory=memory)]], into)
        larger = replace(address, specs=(replace(SPEC, num_blocks=1 << 30),))
        with pytest.raises(TransferError):
            peer = connect(name, [[larger]], into)
            wait(peer.pull([SPEC.num_blocks + 4096], [0], range(3)))


def check_an_owner_that_was_killed_can_not_be_read(name: str, allocate: Allocate) -> None:
    """No new reader reads it, and a reader in the middle does not wait for ever."""
    with owner_of(name, [SPEC]) as owner:
        ranks, into = owner.addresses(), empty(SPEC, allocate)
        peer = connect(name, ranks, into)
        wait(peer.pull([0], [0], range(3)))
        owner.kill()
        try:  # what was mapped stays as long as it is mapped; what is read anew is lost
            wait(peer.pull([1], [1], range(3)))
        except TransferError as error:
            assert error.failure is Failure.LOST
        peer.close()
        with pytest.raises(TransferError) as caught:
            late = connect(name, ranks, into)
            wait(late.pull([1], [1], range(3)))
        assert caught.value.failure in (Failure.UNREACHABLE, Failure.LOST)


CASES = [
    check_blocks_of_several_groups_come_by_their_heads,
    check_a_late_read_sees_what_is_there_now,
    check_several_threads_pull_at_once,
    check_caches_that_do_not_go_together_are_refused,
    check_ids_that_can_not_be_are_refused,
    check_garbage_for_an_address_is_refused,
]
